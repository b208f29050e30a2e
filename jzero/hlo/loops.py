"""What the loops of a compiled program carry from one run of their bodies to the next."""

import re
from dataclasses import dataclass

from jzero.hlo.parse import Array, Instruction, Line, arrays, instructions, parse

_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_MOVES = ("copy", "copy-start", "copy-done", "bitcast")


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
        if op.opcode == "while" and (body := _BODY.search(op.text)):
            found.append(Loop(op, _changed(computations[body[1]])))
    return found


def _changed(body: list[Line]) -> tuple[Array, ...]:
    lines = {line.name: line for line in body}
    root = next((line for line in body if line.text.lstrip().startswith("ROOT ")), body[-1])
    carried = arrays(root.result)
    operands = _operands(root)
    if root.opcode != "tuple" or len(operands) != len(carried):
        return carried
    return tuple(array for at, array in enumerate(carried) if not _handed_on(lines, operands[at], at))


def _handed_on(lines: dict[str, Line], name: str, at: int) -> bool:
    """Whether an element of the result is the same element of the parameter."""
    line = lines.get(name)
    while line is not None and line.opcode in _MOVES:
        line = lines.get(_operands(line)[0])
    index = line and line.opcode == "get-tuple-element" and _INDEX.search(line.text)
    if not line or not index:
        return False
    source = lines.get(_operands(line)[0])
    return int(index[1]) == at and source is not None and source.opcode == "parameter"


def _operands(line: Line) -> list[str]:
    after = line.text.split(f" {line.opcode}(", 1)[-1]
    return _OPERAND.findall(after.partition(")")[0])
