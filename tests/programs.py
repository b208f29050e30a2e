"""Reading compiled programs: the collectives in them, the loops around each, the memory they want.

Everything comes from the text of the optimised HLO (`compiled.as_text()`) and from `compiled.memory_analysis()`.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")

Array = tuple[str, tuple[int, ...]]  # dtype as HLO writes it ("f32"), shape

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_CALLS = re.compile(r"\b(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True)
class Instruction:
    """One operation of a compiled program.

    arrays: what it returns. loops: the `while` operations around it, outermost first. runs: how often a step executes
    it (None where the trip count of a loop is unknown).
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    loops: tuple[str, ...]
    runs: int | None
    text: str


@dataclass(frozen=True)
class Collective:
    """One array that a collective returns: an operation that XLA combined from several gives one each."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    loops: tuple[str, ...]
    runs: int | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def instructions(text: str) -> list[Instruction]:
    """The operations that ENTRY reaches, those of a computation once for every place that calls it."""
    computations, entry = _parse(text)
    return list(_walk(computations, entry, (), 1))


def collectives(text: str) -> list[Collective]:
    """Every array that travels between devices in a compiled program, on CPU, GPU or TPU."""
    found = []
    for op in instructions(text):
        kind = _kind(op)
        if kind is None:
            continue
        arrays = op.arrays
        if op.opcode in ("all-gather-start", "collective-permute-start"):  # operands first, then results
            arrays = [a for a in arrays if a[1]][len([a for a in arrays if a[1]]) // 2 :]
        found += [Collective(kind, dtype, shape, op.loops, op.runs) for dtype, shape in arrays]
    return found


def peak_bytes(compiled: Any) -> int:
    """What a device holds at most. Not `peak_memory_in_bytes`: XLA:CPU leaves the temporaries out of it."""
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    return held - memory.alias_size_in_bytes


def temporary_bytes(compiled: Any) -> int:
    """What a device holds beyond the arguments and results of the program."""
    return compiled.memory_analysis().temp_size_in_bytes


def _kind(op: Instruction) -> str | None:
    opcode = op.opcode.removesuffix("-start")
    if opcode in KINDS:
        return opcode
    # XLA:TPU computes a reduce-scatter inside a fusion of this name.
    return "reduce-scatter" if op.opcode == "fusion" and op.name.startswith("all-reduce-scatter") else None


def _parse(text: str) -> tuple[dict[str, list[tuple[str, str, str, str]]], str]:
    """Computation name -> (name, result type, opcode, whole line) of each instruction; and the entry's name."""
    computations: dict[str, list[tuple[str, str, str, str]]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            type_, rest = _split_type(match[2])
            current.append((match[1], type_, rest.partition("(")[0], line))
    return computations, entry


def _split_type(text: str) -> tuple[str, str]:
    """ "(f32[2]{0:T(8)}, s32[]) while(...)" -> its result type and what follows."""
    if not text.startswith("("):
        type_, _, rest = text.partition(" ")
        return type_, rest
    depth = 0
    for end, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[: end + 1], text[end + 1 :].lstrip()
    raise ValueError(f"unbalanced type: {text[:200]}")


def _walk(computations: Any, name: str, loops: tuple[str, ...], runs: int | None) -> Iterator[Instruction]:
    for instruction, type_, opcode, line in computations[name]:
        arrays = tuple((dtype, tuple(map(int, filter(None, dims.split(","))))) for dtype, dims in _ARRAY.findall(type_))
        yield Instruction(instruction, opcode, arrays, loops, runs, line)
        inner, times = loops, runs
        if opcode == "while":
            trips = _TRIPS.search(line)
            inner, times = (*loops, instruction), runs * int(trips[1]) if trips and runs is not None else None
        for called in _CALLS.findall(line):
            for target in re.findall(r"[\w.\-]+", called):
                if target in computations:
                    yield from _walk(computations, target, inner, times)
