"""The operations of a compiled program, with the loops around each."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

# dtype as HLO writes it, and shape
Array: TypeAlias = tuple[str, tuple[int, ...]]

# XLA:TPU computes a reduce-scatter inside a fusion that calls a computation of this name.
_TPU_REDUCE_SCATTER = re.compile(r"\bcalls=%(all-reduce-scatter[\w.\-]*)")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'\bmetadata=\{[^}]*?op_name="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Instruction:
    """One operation of a compiled program.

    result: the type of what it returns. loops: the `while` operations around it, outermost first. runs: how often a
    step executes it, None where the trip count of a loop is unknown; both branches of a conditional count. fused: it is
    part of a fusion. text: its line; of a reduce-scatter that XLA:TPU made a fusion of, also that of its all-reduce.
    """

    name: str
    opcode: str
    result: str
    loops: tuple[str, ...]
    runs: int | None
    fused: bool
    text: str

    @property
    def arrays(self) -> tuple[Array, ...]:
        """All that it returns."""
        return arrays(self.result)

    @property
    def op_name(self) -> str | None:
        """What JAX calls the operation it comes from, scopes included."""
        match = _OP_NAME.search(self.text)
        return match[1] if match and match[1] else None


@dataclass(frozen=True)
class Line:
    """An instruction as it is written."""

    name: str
    result: str
    opcode: str
    text: str


def instructions(text: str) -> list[Instruction]:
    """The operations that a step reaches, those of a computation once for every place that calls it."""
    computations, entry = parse(text)
    return list(_walk(computations, entry, (), 1, False)) if entry else []


def arrays(result: str) -> tuple[Array, ...]:
    """The arrays of a result type."""
    return tuple((d, tuple(int(n) for n in dims.split(",") if n)) for d, dims in _ARRAY.findall(result))


def parse(text: str) -> tuple[dict[str, list[Line]], str]:
    """The lines of each computation, and the name of the entry."""
    computations: dict[str, list[Line]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            result, rest = _split_result(match[2])
            current.append(Line(match[1], result, rest.partition("(")[0], line))
    return computations, entry


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


def _walk(
    computations: dict[str, list[Line]], name: str, loops: tuple[str, ...], runs: int | None, fused: bool
) -> Iterator[Instruction]:
    for line in computations[name]:
        if scatter := _TPU_REDUCE_SCATTER.search(line.text):
            inner = next((x.text for x in computations.get(scatter[1], ()) if x.opcode == "all-reduce"), "")
            text = f"{line.text}\n{inner}"
            yield Instruction(line.name, "reduce-scatter", line.result, loops, runs, fused, text)
            continue
        yield Instruction(line.name, line.opcode, line.result, loops, runs, fused, line.text)
        if line.opcode in ("async-update", "async-done"):
            continue  # what it waits for was counted where it starts
        around, times = loops, runs
        if line.opcode == "while":
            trips = _TRIPS.search(line.text)
            around, times = (*loops, line.name), runs * int(trips[1]) if trips and runs is not None else None
        for called in _CALLED.findall(line.text):
            for target in re.findall(r"[\w.\-]+", called):
                if target in computations:
                    yield from _walk(computations, target, around, times, fused or line.opcode == "fusion")
