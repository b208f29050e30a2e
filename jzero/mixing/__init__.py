"""Whether the outputs of a program are sums over the rows of its batch: told before it is compiled.

Devices that each run a loss on their own rows and add up the results get what one device would get of all rows only if
the loss is a sum over rows. A contrastive loss, batch statistics or a mean over a number that is counted is none. What
is called MIXED certainly is; what the rules do not know is UNKNOWN.
"""

from jzero.mixing.flow import Effect, Flow, Term
from jzero.mixing.programs import batch_flow

__all__ = ["Effect", "Flow", "Term", "batch_flow"]
