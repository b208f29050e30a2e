"""Reading compiled programs: the collectives in them, the loops around each, the memory they want.

Everything comes from the text of the optimised HLO (`compiled.as_text()`) and from `compiled.memory_analysis()`.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")

# XLA:TPU computes a reduce-scatter inside a fusion that calls a computation of this name.
_TPU_REDUCE_SCATTER = "calls=%all-reduce-scatter"

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SOURCE = re.compile(r"\bmetadata=\{[^}]*\}")
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_GROUPS = re.compile(
    r"replica_groups=(?:mesh(?P<mesh>\[.*?\]).*?\{(?P<axes>.*?)\}|\[\d+,(?P<iota>\d+)\]|\{\{(?P<list>[\d,]+)\})"
)


@dataclass(frozen=True)
class Instruction:
    """One operation of a compiled program.

    arrays: (dtype as HLO writes it, shape) of all it returns. loops: the `while` operations around it, outermost first.
    runs: how often a step executes it, None where the trip count of a loop is unknown. fused: it is part of a fusion.
    """

    name: str
    opcode: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    loops: tuple[str, ...]
    runs: int | None
    fused: bool
    text: str


@dataclass(frozen=True)
class Collective:
    """One array that a collective returns; an operation that XLA combined from several gives one of these for each.

    group: how many devices take part together.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    group: int | None
    loops: tuple[str, ...]
    runs: int | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def instructions(text: str) -> list[Instruction]:
    """The operations that a step reaches, those of a computation once for every place that calls it."""
    computations, entry = _parse(text)
    return list(_walk(computations, entry, (), 1, False))


def collectives(text: str) -> list[Collective]:
    """Every array that travels between devices, in a program for CPU, GPU or TPU."""
    found, seen = [], set()
    for op in instructions(text):
        kind = "reduce-scatter" if _TPU_REDUCE_SCATTER in op.text else op.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        # XLA:TPU spreads one collective over several fusions, each with a copy of the operation. Its channel alone does
        # not tell: those of shard_map have all the same.
        channel, source = _CHANNEL.search(op.text), _SOURCE.search(op.text)
        copies = op.fused or _TPU_REDUCE_SCATTER in op.text
        key = (channel[1], source and source[0], op.arrays, op.loops) if channel and copies else op.name
        if key not in seen:
            seen.add(key)
            found += [Collective(kind, d, s, _group(op.text), op.loops, op.runs) for d, s in _results(op)]
    return found


# (kind, elements of the result, devices that take part together, loops around it, runs a step)
Key: TypeAlias = tuple[str, int, int | None, int, int | None]


def keys(found: Iterable[Collective]) -> Counter[Key]:
    return Counter((c.kind, c.size, c.group, len(c.loops), c.runs) for c in found)


def sent(found: Iterable[Key]) -> Fraction:
    """Elements that each device sends in a step."""
    share = {
        "all-gather": lambda n, group: Fraction(n * (group - 1), group),
        "reduce-scatter": lambda n, group: Fraction(n * (group - 1)),
        "all-reduce": lambda n, group: Fraction(2 * n * (group - 1), group),
    }
    return sum((share[kind](n, group) * runs for kind, n, group, _, runs in found), Fraction())


@dataclass(frozen=True)
class Weight:
    """A parameter as a step reads it. size: elements of one layer, padding included. layers: of a stack that a scan
    runs over, else 1. split: over the ZeRO axes, from the stage on that splits it. At stage 3, gathers: how often each
    micro-batch gathers it; hoisted: how often the step does before all of them, because the compiler moved it there.
    """

    size: int
    layers: int = 1
    split: bool = True
    gathers: int = 2
    hoisted: int = 0


def planned(
    weights: Iterable[Weight], stage: int, k: int, *, data: int, replica: int = 1, group: str, optimizer_group: str
) -> Counter[Key]:
    """What a step over k micro-batches sends under `zero.collectives: explicit`, by the formulas of the papers."""
    extents = {axis: n for axis, n in (("data", data), ("replica", replica)) if n > 1}
    spans = {"all": set(extents), "node": set(extents) - {"replica"}}
    tree = lambda name, first: spans[name] if stage >= first else set()
    params, gradients, optimizer = tree(group, 3), tree(group, 2), tree(optimizer_group, 1)
    count = lambda axes: math.prod(extents[axis] for axis in axes)
    found: list[Key] = [("all-reduce", 1, data * replica, 0, 1)] * 2  # the loss and its weight

    def once(kind: str, size: int, axes: set[str]) -> None:
        if axes:
            found.append((kind, size, count(axes), 0, 1))

    for weight in weights:
        total = weight.size * weight.layers
        if not weight.split or stage == 0:
            if stage == 0 and group == "node" and replica > 1:
                shard = -(-total // data)
                once("reduce-scatter", shard, {"data"})
                once("all-reduce", shard, {"replica"})
                once("all-gather", shard * data, {"data"})
            else:
                once("all-reduce", total, set(extents))
            continue
        in_use = ((k > 1) + (weight.layers > 1), k * weight.layers)
        if params:
            gather = ("all-gather", weight.size, count(params))
            found += [(*gather, *in_use)] * weight.gathers + [(*gather, 0, 1)] * weight.hoisted
        if gradients:
            found.append(("reduce-scatter", weight.size // count(gradients), count(gradients), *in_use))
        held = total // count(gradients)
        for axis in extents:  # the inner one first
            if axis in optimizer - gradients:
                held //= extents[axis]
                once("reduce-scatter", held, {axis})
        once("all-reduce", held, set(extents) - optimizer - gradients)
        once("all-gather", total // count(params), optimizer - params)
        found += [("all-reduce", 1, count(optimizer), 0, 1)] * 2  # its norm, and whether it is finite
    return Counter(found)


def sizes(found: Iterable[Collective]) -> Counter[int]:
    """How often each element count occurs: compilers transpose and reshape what they send."""
    return Counter(c.size for c in found)


def makers(text: str, shape: tuple[int, ...]) -> list[Instruction]:
    """The operations that make an array of that shape, not those that name one which is there."""
    naming = {"parameter", "get-tuple-element", "tuple", "while", "bitcast", "optimization-barrier"}
    return [op for op in instructions(text) if op.opcode not in naming and any(s == shape for _, s in op.arrays)]


def peak_bytes(compiled: Any) -> int:
    """What a device holds at most. Not `peak_memory_in_bytes`: XLA:CPU leaves the temporaries out of it."""
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    return held - memory.alias_size_in_bytes


def temporary_bytes(compiled: Any) -> int:
    """What a device holds beyond the program's arguments and results."""
    return compiled.memory_analysis().temp_size_in_bytes


def _results(op: Instruction) -> tuple[tuple[str, tuple[int, ...]], ...]:
    if op.opcode in ("all-gather-start", "reduce-scatter-start", "collective-permute-start"):
        arrays = tuple(array for array in op.arrays if array[1])
        return arrays[len(arrays) // 2 :]  # the operands come first
    return op.arrays


def _group(text: str) -> int | None:
    match = _GROUPS.search(text)
    if match is None:
        return None
    if match["mesh"]:
        extents = dict(re.findall(r"'(\w+)'=(\d+)", match["mesh"]))
        return math.prod(int(extents[axis]) for axis in re.findall(r"'(\w+)'", match["axes"]))
    return int(match["iota"]) if match["iota"] else match["list"].count(",") + 1


def _parse(text: str) -> tuple[dict[str, list[tuple[str, str, str, str]]], str]:
    """Computation name -> (name, result type, opcode, line) of each instruction; and the name of the entry."""
    computations: dict[str, list[tuple[str, str, str, str]]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            result, rest = _split_result(match[2])
            current.append((match[1], result, rest.partition("(")[0], line))
    return computations, entry


def _split_result(text: str) -> tuple[str, str]:
    """`(f32[2]{0:T(8)}, s32[]) while(...)` -> the result type and the rest."""
    if not text.startswith("("):
        result, _, rest = text.partition(" ")
        return result, rest
    depth = 0
    for end, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[: end + 1], text[end + 1 :].lstrip()
    raise ValueError(f"unbalanced: {text[:200]}")


def _walk(computations: Any, name: str, loops: tuple[str, ...], runs: int | None, fused: bool) -> Iterator[Instruction]:
    for instruction, result, opcode, line in computations[name]:
        arrays = tuple((d, tuple(int(n) for n in dims.split(",") if n)) for d, dims in _ARRAY.findall(result))
        yield Instruction(instruction, opcode, arrays, loops, runs, fused, line)
        if _TPU_REDUCE_SCATTER in line:
            continue
        inner, times = loops, runs
        if opcode == "while":
            trips = _TRIPS.search(line)
            inner, times = (*loops, instruction), runs * int(trips[1]) if trips and runs else None
        for called in _CALLED.findall(line):
            for target in re.findall(r"[\w.\-]+", called):
                if target in computations:
                    yield from _walk(computations, target, inner, times, fused or opcode == "fusion")
