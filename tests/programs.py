"""What the tests count in compiled programs (`jzero.hlo` reads them), and what the papers' formulas expect there."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from typing import Any, TypeAlias

import pytest
from jax.sharding import AbstractMesh

from jzero import hlo
from jzero.hlo import Collective, Instruction, instructions

# What compiles for accelerators that are not there.
ON_TPU = pytest.mark.skipif(not find_spec("libtpu"), reason="libtpu is not installed")
ON_GPU = pytest.mark.skipif(
    not any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)), reason="no CUDA plugin is installed"
)


def collectives(text: str) -> list[Collective]:
    """Those of a program whatever its mesh: their axes do not count here."""
    devices = re.search(r"\bnum_partitions=(\d+)", text[: text.index("\n")])
    return hlo.collectives(text, AbstractMesh((int(devices[1]) if devices else 1,), ("devices",)))


# (kind, elements of the result, devices that take part together, loops around it, runs a step)
Key: TypeAlias = tuple[str, int, int, int, int | None]


def keys(found: Iterable[Collective]) -> Counter[Key]:
    return Counter((c.kind, c.size, c.group, len(c.loops), c.runs) for c in found)


def sent(found: Iterable[Key]) -> Fraction:
    """Elements that each device sends in a step."""
    share = {
        "all-gather": lambda n, group: Fraction(n * (group - 1), group),
        "reduce-scatter": lambda n, group: Fraction(n * (group - 1)),
        "all-reduce": lambda n, group: Fraction(2 * n * (group - 1), group),
    }
    total = Fraction()
    for kind, n, group, _, runs in found:
        assert runs is not None
        total += share[kind](n, group) * runs
    return total


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


def temporary_bytes(compiled: Any, platform: str = "cpu") -> int:
    """What a device holds beyond the program's arguments and results."""
    return hlo.memory(compiled, platform).temporaries
