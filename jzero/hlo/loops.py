"""What the loops of a compiled program carry from one run of their bodies to the next."""

from dataclasses import dataclass

from jzero.hlo.lines import BODY, Array, Computation, arrays, parse
from jzero.hlo.parse import Instruction, instructions


@dataclass(frozen=True)
class Loop:
    """A `while` operation and those of its arrays that its body changes."""

    operation: Instruction
    changed: tuple[Array, ...]


def loops(text: str) -> list[Loop]:
    """The loops that a step reaches."""
    computations, _ = parse(text)
    found = []
    for op in instructions(text):
        if op.opcode == "while" and (body := BODY.search(op.text)):
            found.append(Loop(op, _changed(op, computations[body[1]])))
    return found


def _changed(op: Instruction, body: Computation) -> tuple[Array, ...]:
    root = body.root
    if root is None or root.opcode != "tuple":
        return op.arrays
    carried = arrays(root.result)
    if len(carried) != len(root.operands):
        return carried  # a tuple within the tuple
    return tuple(array for at, array in enumerate(carried) if body.element(root.operands[at]) != at)
