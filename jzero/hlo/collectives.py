"""What a compiled program sends between devices: kind, size, mesh axes, how often, in which phase, for what."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from jzero.hlo.frames import Frames
from jzero.hlo.groups import crossing, spanned
from jzero.hlo.lines import Array
from jzero.hlo.parse import Instruction, instructions
from jzero.mesh import AnyMesh
from jzero.scopes import GRADIENTS, Phase, is_backward, parameter_read, use_points, without_paths

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")

_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_METADATA = re.compile(r"\bmetadata=\{[^}]*\}")


@dataclass(frozen=True)
class Collective:
    """One array that a collective returns; an operation that XLA combined from several gives one of these for each.

    dtype: HLO's. shape: of the result. axes: the mesh axes that it spans, those of size 1 left out; None where its
    groups are those of no set of axes. group: how many devices take part together. loops: the `while` operations around
    it, outermost first. runs: times a step, None where the trip count of a loop is unknown. phase: None where the
    program does not tell. source: the path of the parameter that it reads or whose gradient it makes, where the program
    names it (`jzero.usepoint`); else what JAX calls the operation; else None. line: where the model or the loss does
    what it is for, as "model.py:12", where the program tells.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[str, ...] | None
    group: int
    loops: tuple[str, ...]
    runs: int | None
    phase: Phase | None
    source: str | None
    line: str | None = None

    @property
    def size(self) -> int:
        """Elements of the result."""
        return math.prod(self.shape)

    @property
    def elements(self) -> int:
        """Elements of the whole array: the result of a gather, the operand of a reduction."""
        return self.size * (self.group if self.kind == "reduce-scatter" else 1)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the whole array, once."""
        return _bytes(self.elements, self.dtype)

    @property
    def sent_bytes(self) -> int | None:
        """Bytes that a device sends in a step, by the ring algorithm; None where `runs` is unknown."""
        if self.runs is None:
            return None
        return round(self.payload_bytes * self.runs * ring_share(self.kind, self.group))


def ring_share(kind: str, group: int) -> Fraction:
    """What each of `group` devices sends in a ring, as a share of the whole array (Patarasuk and Yuan 2009): of a
    gather or a reduce-scatter (N-1)/N, of an all-reduce twice that; of a permutation all."""
    if kind == "collective-permute":
        return Fraction(1)
    return Fraction((2 if kind == "all-reduce" else 1) * (group - 1), group)


def collectives(text: str, mesh: AnyMesh) -> list[Collective]:
    """Every array that travels between the devices of a mesh, in the text of a program for CPU, GPU or TPU."""
    found, seen = [], set()
    scoped, sizes, frames = GRADIENTS in text, tuple(mesh.shape.items()), Frames(text)
    for op in instructions(text):
        kind = op.opcode.removesuffix("-start")
        if kind not in KINDS or _identity(op) in seen:
            continue
        seen.add(_identity(op))
        axes, group = spanned(op.text, sizes)
        results, line = _results(op), frames.line(op.text)
        for (dtype, shape), name in zip(results, _names(op.op_name, len(results)), strict=True):
            phase, source = _phase(name, scoped), _source(name)
            found.append(Collective(kind, dtype, shape, axes, group, op.loops, op.runs, phase, source, line))
    return found


def crosses_nodes(axes: tuple[str, ...] | None, mesh_shape: Mapping[str, int], devices_per_node: int) -> bool:
    """Whether a collective over those mesh axes leaves a node: devices are numbered in the mesh's order, and so many of
    them in a row are a node. Groups of no set of axes (None) count as leaving it."""
    return axes is None or crossing(axes, mesh_shape, devices_per_node)


def _identity(op: Instruction) -> object:
    """The same for each copy of one operation: XLA:TPU spreads a collective over several fusions, each with a copy. Its
    channel alone does not tell: those of shard_map have all the same."""
    channel, metadata = _CHANNEL.search(op.text), _METADATA.search(op.text)
    return (channel[1], metadata and metadata[0], op.arrays, op.loops) if channel and op.fused else op.name


def _results(op: Instruction) -> tuple[Array, ...]:
    if op.opcode in ("all-gather-start", "reduce-scatter-start", "collective-permute-start"):
        arrays = tuple(array for array in op.arrays if array[1])
        return arrays[len(arrays) // 2 :]  # the operands come first
    return op.arrays


def _names(name: str | None, count: int) -> list[str | None]:
    """What JAX calls each of the arrays that an operation returns. XLA:CPU lists the operations that it combined:
    "jit(step)/(psum:reduce_sum)". Others keep the name of one of them, which says the phase, but whose array it is for
    one alone."""
    listed = _alternatives(name) if name else []
    if len(listed) == count:
        return list(listed)
    shared = name if name is None else without_paths(name)
    return [shared] * count


def _alternatives(name: str) -> list[str]:
    """`a/(b:c)/d` -> `a/b/d`, `a/c/d`; any other name as it is."""
    opened, start, colons = 0, 0, []
    for at, character in enumerate(name):
        if character == "(":
            opened += 1
            if opened == 1:
                start, colons = at, []
        elif character == ":" and opened == 1:
            colons.append(at)
        elif character == ")":
            opened -= 1
            if opened == 0 and colons:
                ends = [start, *colons, at]
                parts = [name[a + 1 : b] for a, b in pairwise(ends)]
                return [whole for part in parts for whole in _alternatives(f"{name[:start]}{part}{name[at + 1 :]}")]
    return [name]


def _phase(name: str | None, scoped: bool) -> Phase | None:
    """scoped: the program names all that computes gradients."""
    if name is None:
        return None
    if parameter_read(name):
        return "forward"  # where the update gathers, it does so for parameters that rest whole
    if is_backward(name):
        return "backward"
    if "jvp(" in name:
        return "forward"
    if GRADIENTS in name or "shard_map" in name:
        return "backward"  # the sums of what the passes gave
    return "update" if scoped else None


def _source(name: str | None) -> str | None:
    points = use_points(name or "")
    return points[-1][1] if points else parameter_read(name or "") or name


def _bytes(elements: int, dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return -(-elements * (int(bits[0]) if bits else 8) // 8)  # pred takes a byte
