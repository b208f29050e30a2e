"""A compiled program's text, instruction by instruction."""

import re
from dataclasses import dataclass
from typing import TypeAlias

# dtype as HLO writes it, and shape
Array: TypeAlias = tuple[str, tuple[int, ...]]

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
BODY = re.compile(r"\bbody=%?([\w.\-]+)")  # of a loop
_MOVES = ("copy", "copy-start", "copy-done", "bitcast")


@dataclass(frozen=True)
class Line:
    """An instruction as it is written. result: the type of what it returns. root: its computation returns that."""

    name: str
    result: str
    opcode: str
    root: bool
    text: str

    @property
    def operands(self) -> list[str]:
        _, _, after = self.text.partition(f" {self.opcode}(")
        return _OPERAND.findall(after.partition(")")[0])


class Computation:
    """A computation's lines, in order."""

    def __init__(self, lines: list[Line]):
        self.lines = lines
        self._by_name = {line.name: line for line in lines}

    @property
    def root(self) -> Line | None:
        return next((line for line in self.lines if line.root), None)

    def origin(self, name: str) -> Line | None:
        """What an operand is, through copies of it."""
        line = self._by_name.get(name)
        while line is not None and line.opcode in _MOVES and line.operands:
            line = self._by_name.get(line.operands[0])
        return line

    def element(self, name: str) -> int | None:
        """Which element of the computation's parameter an operand is, if it is one."""
        line = self.origin(name)
        if line is None or line.opcode != "get-tuple-element":
            return None
        source, index = self._by_name.get(line.operands[0]), _INDEX.search(line.text)
        return int(index[1]) if index and source is not None and source.opcode == "parameter" else None


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations by name, and the name of the entry, empty where there is none."""
    computations: dict[str, list[Line]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            result, rest = _split_result(match[3])
            current.append(Line(match[2], result, rest.partition("(")[0], bool(match[1]), line))
    return {name: Computation(lines) for name, lines in computations.items()}, entry


def arrays(result: str) -> tuple[Array, ...]:
    """The arrays of a result type."""
    return tuple((d, tuple(int(n) for n in dims.split(",") if n)) for d, dims in _ARRAY.findall(result))


def _split_result(text: str) -> tuple[str, str]:
    """`(f32[2]{0:T(8)}, s32[]) while(...)` -> the result type and the rest."""
    if not text.startswith("("):
        result, _, rest = text.partition(" ")
        return result, rest
    depth = 0
    for bracket in re.finditer(r"[()]", text):
        depth += 1 if bracket[0] == "(" else -1
        if depth == 0:
            return text[: bracket.end()], text[bracket.end() :].lstrip()
    raise ValueError(f"unbalanced: {text[:200]}")
