"""Until jzero.traffic and jzero.footprint are there: rough formulas with their interfaces. To be deleted."""

import math
from dataclasses import dataclass
from typing import Any

import jax

from jzero.blueprint import Blueprint
from jzero.jaxprs import Program
from jzero.leaf import LeafPlan, axis_extent
from jzero.state import plan_tree


@dataclass(frozen=True)
class Transfer:
    kind: str
    dtype: Any
    elements: int
    axes: tuple[str, ...]
    group: int
    runs: int

    @property
    def sent_elements(self) -> float:
        ways = 2 if self.kind == "all-reduce" else 1
        return ways * self.elements * (self.group - 1) / self.group * self.runs

    @property
    def sent_bytes(self) -> float:
        return self.sent_elements * self.dtype.itemsize


def planned_transfers(blueprint: Blueprint, program: Program) -> list[Transfer]:
    plan, found = blueprint.plan, []
    k = blueprint.micro_batches(_batch(program))
    batch_axes = tuple(a for a in ("replica", "data") if plan.axis_sizes[a] > 1)
    for path, leaf in plan.params.items():
        size, gradient, weight = math.prod(leaf.stored_shape), plan.gradients[path], plan.weights[path]
        dtype = plan.compute[path]

        def add(kind: str, axes: tuple[str, ...], runs: int, size: int = size, dtype: Any = dtype) -> None:
            if axes:
                found.append(Transfer(kind, dtype, size, axes, axis_extent(axes, plan.axis_sizes), runs))

        if leaf.zero_axes:
            add("all-gather", leaf.zero_axes, 2 * k)
        elif weight.zero_axes:
            add("all-gather", weight.zero_axes, 1, dtype=leaf.dtype)
        if gradient.zero_axes:
            add("reduce-scatter", gradient.zero_axes, k)
            rest = tuple(a for a in batch_axes if a not in gradient.zero_axes)
            add("all-reduce", rest, 1, size // axis_extent(gradient.zero_axes, plan.axis_sizes))
        else:
            add("all-reduce" if not weight.zero_axes else "reduce-scatter", batch_axes, 1)
    return found


def _batch(program: Any) -> Any:
    tokens = next(v.aval for v in program.jaxpr.invars[::-1] if v.aval.ndim == 2)
    return {"tokens": jax.ShapeDtypeStruct(tokens.shape, tokens.dtype)}


@dataclass(frozen=True)
class Footprint:
    arguments: int
    gathered: int
    activations: int
    temporaries: int
    outputs: int

    @property
    def peak(self) -> int:
        return self.arguments + self.gathered + self.activations + self.temporaries + self.outputs


def estimate_footprint(blueprint: Blueprint, program: Any, platform: str) -> Footprint:
    plan, model = blueprint.plan, blueprint.config.model
    leaves = jax.tree.leaves(plan_tree(plan), is_leaf=lambda x: isinstance(x, LeafPlan))
    state = sum(leaf.bytes_per_device(plan.axis_sizes) for leaf in leaves)
    shards = plan.axis_sizes["replica"] * plan.axis_sizes["data"]
    batch = [v.aval for v in program.jaxpr.invars[len(leaves) :]]
    rows = batch[0].shape[0] // shards // blueprint.micro_batches(_batch(program))
    gathered = max(
        math.prod(x.shape[1:] if len(x.shape) > 2 else x.shape) * plan.compute[p].itemsize
        for p, x in plan.params.items()
    )
    width = rows * blueprint.config.data.sequence_length * model.hidden_size * 2
    factor = {"full": 1, "dots": 14, "none": 30}[model.remat]
    vocab = next(iter(plan.params.values())).shape[0]
    return Footprint(
        state + sum(math.prod(a.shape) * a.dtype.itemsize // shards for a in batch),
        2 * gathered if any(x.zero_axes for x in plan.params.values()) else 0,
        width * factor * model.num_hidden_layers,
        plan.bytes_per_device()["gradients"] + rows * blueprint.config.data.sequence_length * vocab * 8 + 30 * width,
        0,
    )
