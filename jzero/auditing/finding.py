"""What an audit says of one array or one thing that travels."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """Something in the compiled program that the plan does not explain, or (severity "note") that costs what it need
    not, but is known and no mistake.

    kind: one word for what it is, as the table in `jzero.auditing` lists them. where: the parameter's path or the array
    of the state, else the line of the model or what JAX calls the operation. what: one sentence. advice: what to do.
    """

    kind: str
    severity: Literal["warning", "note"]
    where: str
    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.kind}, {self.where}: {self.what}; {self.advice}"


@dataclass(frozen=True)
class LeafAudit:
    """One array of the state or one gradient: where it was to lie and where the program has it.

    tree: parameters, gradients, master, optimizer, ema or model_state. asked, found: PartitionSpecs as text or "whole";
    found is None where the program does not show it, as with a gradient that is used up where it is made. Bytes are
    those of one device. reason: the plan's.
    """

    tree: str
    path: str
    asked: str
    found: str | None
    asked_bytes: int
    found_bytes: int | None
    reason: str
