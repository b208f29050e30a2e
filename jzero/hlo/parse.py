"""The operations of a compiled program, with the loops around each."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jzero.hlo.lines import Array, Computation, arrays, parse
from jzero.hlo.trips import trip_count

# XLA:TPU computes a reduce-scatter inside a fusion that calls a computation of this name.
_TPU_REDUCE_SCATTER = re.compile(r"\bcalls=%(all-reduce-scatter[\w.\-]*)")

_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")
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


def instructions(text: str) -> list[Instruction]:
    """The operations that a step reaches, those of a computation once for every place that calls it."""
    computations, entry = parse(text)
    return list(_walk(computations, entry, (), 1, False)) if entry else []


def _walk(
    computations: Mapping[str, Computation], name: str, loops: tuple[str, ...], runs: int | None, fused: bool
) -> Iterator[Instruction]:
    for line in computations[name].lines:
        if scatter := _TPU_REDUCE_SCATTER.search(line.text):
            summed = [inner.text for inner in computations[scatter[1]].lines if inner.opcode == "all-reduce"]
            text = "\n".join([line.text, *summed[:1]])
            yield Instruction(line.name, "reduce-scatter", line.result, loops, runs, fused, text)
            continue
        yield Instruction(line.name, line.opcode, line.result, loops, runs, fused, line.text)
        if line.opcode in ("async-update", "async-done"):
            continue  # what it waits for was counted where it starts
        around, times = loops, runs
        if line.opcode == "while":
            trips = trip_count(computations, computations[name], line)
            around, times = (*loops, line.name), None if trips is None or runs is None else runs * trips
        for called in _CALLED.findall(line.text):
            for target in re.findall(r"[\w.\-]+", called):
                if target in computations:
                    yield from _walk(computations, target, around, times, fused or line.opcode == "fusion")
