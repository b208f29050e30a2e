"""What a compiled program does: what travels between devices, where, how often, for what; and the memory it takes.

Read from the text of the optimised program (`compiled.as_text()`) and from `compiled.memory_analysis()`.
"""

from jzero.hlo.collectives import KINDS as KINDS
from jzero.hlo.collectives import Collective as Collective
from jzero.hlo.collectives import collectives as collectives
from jzero.hlo.collectives import crosses_nodes as crosses_nodes
from jzero.hlo.collectives import ring_share as ring_share
from jzero.hlo.loops import Loop as Loop
from jzero.hlo.loops import loops as loops
from jzero.hlo.memory import Memory as Memory
from jzero.hlo.memory import memory as memory
from jzero.hlo.parse import Instruction as Instruction
from jzero.hlo.parse import instructions as instructions
