"""What a step sends between devices, told before compilation from its plan and the program as traced.

Under `explicit` the collectives stand in the program. Under `xla` they are what XLA makes of the constraints at the use
points: rules read off its programs for 8 H100 (jax 0.10.2, tests/test_traffic.py compares), which hold for the textbook
cases and not for a model's own sharding, whose activations travel too. Nor are the sums and gathers told here of an
optimizer that looks beyond single elements.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from jax.extend import core

from jzero.blueprint import Blueprint
from jzero.hlo import ring_share
from jzero.jaxprs import Program, opened, own_equations, subprograms
from jzero.leaf import axis_extent, axis_names
from jzero.mesh import AXES, BATCH_AXES
from jzero.plan import Plan
from jzero.scopes import GATHER, MICRO_BATCHES, SCATTER, Phase, is_backward, traced_engine, use_points

Kind = Literal["all-gather", "reduce-scatter", "all-reduce"]

_KINDS: dict[str, Kind] = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "psum": "all-reduce"}


@dataclass(frozen=True)
class Transfer:
    """One collective of a step.

    path: the parameter, None for the numbers of loss and norm. elements: of the whole array, which a gather makes and
    the others take, on each device. axes: of the mesh, over which `group` devices take part. runs: times a step.
    loops: how many stand around it.
    """

    kind: Kind
    path: str | None
    phase: Phase
    dtype: np.dtype
    elements: int
    axes: tuple[str, ...]
    group: int
    runs: int
    loops: int

    @property
    def size(self) -> int:
        """Elements of the result."""
        return self.elements // self.group if self.kind == "reduce-scatter" else self.elements

    @property
    def sent_elements(self) -> Fraction:
        """What each device sends in a step, in elements, by the ring algorithm."""
        return self.elements * self.runs * ring_share(self.kind, self.group)

    @property
    def sent_bytes(self) -> Fraction:
        return self.sent_elements * self.dtype.itemsize


def planned_transfers(blueprint: Blueprint, program: Program) -> list[Transfer]:
    """The collectives of a training step. program: `blueprint.trace_step(batch).jaxpr`."""
    plan, sites = blueprint.plan, list(_sites(program))
    computed = _of_xla(plan, sites) if traced_engine(program) == "xla" else _of_explicit(plan, sites)
    return [*computed, *_of_update(plan)]


@dataclass(frozen=True)
class _Site:
    """An equation and where it stands. scope: the names of all programs around it. body: which loop, branch or
    rematerialised block it is part of."""

    equation: core.JaxprEqn
    scope: str
    loops: int
    runs: int
    body: int

    @property
    def elements(self) -> int:
        """Of its first operand."""
        array: Any = self.equation.invars[0].aval
        return math.prod(array.shape)

    @property
    def point(self) -> tuple[str, str] | None:
        """(GATHER or SCATTER, path) where it belongs to a use point."""
        return next(iter(use_points(self.scope)), None)

    @property
    def phase(self) -> Phase:
        return "backward" if is_backward(self.scope) else "forward"


def _sites(program: Program, scope: str = "", loops: int = 0, runs: int = 1, body: int = 0) -> Iterator[_Site]:
    """Every equation that a step runs; of a branch the longest counts, a `while` of unknown length once."""
    for equation in own_equations(program):
        here = f"{scope}/{equation.source_info.name_stack}"
        yield _Site(equation, here, loops, runs, body)
        inner, name = subprograms(equation), equation.primitive.name
        if name == "cond":
            inner = [max(inner, key=lambda branch: len(list(_sites(branch))))]
        loop = name in ("scan", "while")
        times = runs * equation.params.get("length", 1) if loop else runs
        for program in inner:
            inlined = name in ("jit", "shard_map", "custom_jvp_call", "custom_vjp_call")
            yield from _sites(program, here, loops + loop, times, body if inlined else id(opened(program)))


def _of_explicit(plan: Plan, sites: Iterable[_Site]) -> Iterator[Transfer]:
    for site in sites:
        equation, kind = site.equation, _KINDS.get(site.equation.primitive.name)
        named = axis_names(equation.params.get("axis_name", equation.params.get("axes")))
        axes, path = _spanning(plan, named), site.point[1] if site.point else None
        if kind is None or not axes:
            continue
        for variable in equation.outvars if kind == "all-gather" else equation.invars:
            array: Any = variable.aval
            size, group = math.prod(array.shape), _extent(plan, axes)
            yield Transfer(kind, path, site.phase, array.dtype, size, axes, group, site.runs, site.loops)


def _of_xla(plan: Plan, sites: Iterable[_Site]) -> Iterator[Transfer]:
    """Reads of a parameter side by side in one program become one, and so do their gradients."""
    batch, points, k = _spanning(plan, BATCH_AXES), {}, 1
    for site in sites:
        if site.point and site.equation.primitive.name == "sharding_constraint":
            points.setdefault((site.point, site.phase, site.body), site)
        elif MICRO_BATCHES in site.scope and site.equation.primitive.name == "scan" and site.loops == 0:
            k = site.equation.params["length"]
    for (what, path), site in ((site.point, site) for site in points.values() if site.point):
        leaf = plan.params[path]
        axes = _spanning(plan, leaf.zero_axes)
        if what == SCATTER and batch:
            yield from _summed_by_xla(plan, path, site, batch, k)
        elif what == GATHER and axes:
            whole = site.elements // _extent(plan, leaf.own_axes)
            yield Transfer(
                "all-gather",
                path,
                site.phase,
                plan.compute[path],
                whole,
                axes,
                _extent(plan, axes),
                site.runs,
                site.loops,
            )
    if batch:
        yield Transfer("all-reduce", None, "forward", np.dtype("float32"), 2, batch, _extent(plan, batch), 1, 0)


def _summed_by_xla(plan: Plan, path: str, site: _Site, batch: tuple[str, ...], k: int) -> Iterator[Transfer]:
    """Where and how XLA:GPU sums a gradient over devices: where the product is made that it is, inside the loops, but
    what can be added up on each device first."""
    leaf, compute = plan.gradients[path], plan.compute[path]
    size, in_layers = site.elements // _extent(plan, leaf.own_axes), site.loops > (k > 1)
    vector = len(leaf.shape) - in_layers < 2
    updated = _spanning(plan, plan.weights[path].zero_axes)
    # Where the sum ends: of a single micro-batch, in the optimizer's shards.
    wanted = _spanning(plan, leaf.zero_axes) or (updated if k == 1 else ())

    def sums(kind: Kind, elements: int, axes: tuple[str, ...], runs: int, loops: int) -> Transfer:
        # The gradient of a vector is a sum over rows, which XLA computes in float32 and sends before it rounds.
        dtype = np.dtype("float32") if vector else compute
        return Transfer(kind, path, "backward", dtype, elements, axes, _extent(plan, axes), runs, loops)

    if vector and in_layers and not leaf.zero_axes:
        yield sums("all-reduce", size * site.runs // k, batch, k, int(k > 1))
    elif in_layers or leaf.zero_axes or (wanted and not vector):
        if wanted == batch and len(batch) == 1 and not vector:
            yield sums("reduce-scatter", size, batch, site.runs, site.loops)
        elif wanted and wanted == updated != batch and not (in_layers or vector or k > 1):
            shard = size // _extent(plan, wanted)
            yield sums("reduce-scatter", size, wanted, 1, 0)
            yield sums("all-reduce", shard, tuple(axis for axis in batch if axis not in wanted), 1, 0)
        else:
            yield sums("all-reduce", size, batch, site.runs, site.loops)
    else:
        # Added up over micro-batches first; scattered only where nothing rounds in between.
        scattered = updated == batch and len(batch) == 1 and not vector and compute == plan.accumulate[path]
        yield sums("reduce-scatter" if scattered else "all-reduce", size, batch, 1, 0)


def _of_update(plan: Plan) -> Iterator[Transfer]:
    """The updated parameters, from the optimizer's shards to where they lie at rest; and two numbers of the norm."""
    for path, leaf in plan.weights.items():
        at_rest = plan.params[path]
        axes = _spanning(plan, tuple(axis for axis in leaf.zero_axes if axis not in at_rest.zero_axes))
        if axes:
            held = math.prod(at_rest.stored_shape) // _extent(plan, {*at_rest.own_axes, *at_rest.zero_axes})
            yield Transfer("all-gather", path, "update", at_rest.dtype, held, axes, _extent(plan, axes), 1, 0)
    if axes := _spanning(plan, {axis for leaf in plan.weights.values() for axis in leaf.zero_axes}):
        yield Transfer("all-reduce", None, "update", np.dtype("float32"), 2, axes, _extent(plan, axes), 1, 0)


def _spanning(plan: Plan, axes: Iterable[str]) -> tuple[str, ...]:
    """Those of the axes that have several devices, in the mesh's order."""
    return tuple(axis for axis in AXES if axis in axes and plan.axis_sizes[axis] > 1)


def _extent(plan: Plan, axes: Iterable[str]) -> int:
    return axis_extent(tuple(axes), plan.axis_sizes)
