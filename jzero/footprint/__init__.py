"""The memory of a training step on one device, predicted from the traced program: nothing is compiled."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jzero.blueprint import Blueprint
from jzero.footprint.fusion import RULES
from jzero.footprint.operations import Reader, Value, spec_parts
from jzero.footprint.products import joined, with_copies
from jzero.footprint.peak import Moment, most
from jzero.mesh import BATCH_AXES, abstract_mesh
from jzero.config import MeshConfig


@dataclass(frozen=True)
class Footprint:
    """Bytes on one device at the moment of a step when it holds most.

    arguments: state and batch, exact. gathered: parameters as read. activations: kept for the backward pass.
    temporaries: all else. outputs: those that take over no argument's memory.
    """

    arguments: int
    gathered: int
    activations: int
    temporaries: int
    outputs: int

    @property
    def peak(self) -> int:
        return self.arguments + self.gathered + self.activations + self.temporaries + self.outputs


def estimate_footprint(blueprint: Blueprint, traced: jax.stages.Traced, platform: str) -> Footprint:
    moment, arguments, outputs = find_peak(blueprint, traced, platform)
    gathered = sum(size for x, size in moment.values if x.gathered)
    kept = sum(size for x, size in moment.values if not x.gathered and x.made is not None and not x.made.backward)
    return Footprint(arguments, gathered, kept, moment.bytes - gathered - kept, outputs)


def find_peak(blueprint: Blueprint, traced: Any, platform: str) -> tuple[Moment, int, int]:
    state, batch = traced.args_info[0]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    sizes = dict(blueprint.mesh.shape)
    shards = sizes["replica"] * sizes["data"]
    leaves = jax.tree.leaves(blueprint.abstract_state())
    held = [Value(x.size // spec_parts(x.sharding.spec, sizes), x.dtype) for x in leaves]
    rows = [Value(x.size // shards, x.dtype, of_batch=True) for x in jax.tree.leaves(shapes)]
    arguments = sum(x.bytes for x in (*held, *rows))
    if "shard_map" in {e.primitive.name for e in traced.jaxpr.jaxpr.eqns}:
        program, reader = traced.jaxpr, Reader(sizes)
    else:
        program, reader = _twin(blueprint, shapes, shards), Reader(sizes)
    scope = reader.read(program, [*held, *rows])
    if RULES[platform].joins:
        scope = joined(scope)
    if RULES[platform].wide_products:
        scope = with_copies(scope)
    free = {id(x) for x in scope.gives if x is not None}
    return most(scope, RULES[platform], free), arguments, 0


def _twin(blueprint: Blueprint, batch: Any, shards: int) -> Any:
    """The step on one device's rows: arrays of activations have its shapes, constraints tell of parameters'."""
    alone = MeshConfig(replica=1, data=1, tensor=blueprint.mesh.shape["tensor"])
    config = blueprint.config
    steps = blueprint.micro_batches(batch)
    config = config.model_copy(update={"zero": config.zero.model_copy(update={"collectives": "xla"})})
    plan = blueprint.plan
    if steps == 1:
        gradients = {path: replace(leaf, zero_axes=plan.weights[path].zero_axes) for path, leaf in plan.gradients.items()}
        plan = replace(plan, gradients=gradients)
    twin = replace(blueprint, plan=plan, mesh=abstract_mesh(alone, alone.tensor), config=config)
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // shards, *x.shape[1:]), x.dtype), batch)
    return twin.train_step(steps, rows).trace(twin.abstract_state(), rows).jaxpr
