"""Until jzero.footprint is there: rough formulas with its interface. To be deleted."""

import math
from dataclasses import dataclass
from typing import Any

import jax

from jzero.blueprint import Blueprint
from jzero.leaf import LeafPlan
from jzero.state import plan_tree


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
