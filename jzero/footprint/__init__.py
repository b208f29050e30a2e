"""The memory of a training step on one device, predicted from the traced program: nothing is compiled.

The step is read as operations on a device's own arrays (`operations`), with what a compiler adds (`rewrites`). Of their
results some stand and the others are computed where they are read (`standing`, by the `rules` of each compiler). Going
through them as they run (`schedule`), the most that stands at one time is found (`peak`).
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax

from jzero.blueprint import Blueprint
from jzero.config import MeshConfig
from jzero.footprint.operations import Scope, Value, read_program
from jzero.footprint.peak import Moment, fullest
from jzero.footprint.rewrites import rewritten, with_gathered_results
from jzero.footprint.rules import MOVES, RULES, Platform
from jzero.jaxprs import Program
from jzero.leaf import spec_extent
from jzero.mesh import abstract_mesh, batch_shards
from jzero.scopes import traced_engine


@dataclass(frozen=True)
class Footprint:
    """Bytes of one device at the moment of a step when it holds most.

    arguments: state and batch, exact (but for a TPU's padding of small arrays). gathered: parameters as they are read.
    activations: what the backward pass keeps of the forward pass. temporaries: all else, gradients too. outputs: those
    that do not take the place of an argument.
    """

    arguments: int
    gathered: int
    activations: int
    temporaries: int
    outputs: int

    @property
    def peak(self) -> int:
        return self.arguments + self.gathered + self.activations + self.temporaries + self.outputs


def estimate_footprint(blueprint: Blueprint, traced: jax.stages.Traced, platform: Platform) -> Footprint:
    """What compilers of a platform would report for a step: traced by `blueprint.trace_step`, for any devices.

    Arrays count whole along what the model itself splits over `tensor`. temporaries: on TPU with the program's code,
    which is most of them in programs of a few megabytes, and known to a factor of two there.
    """
    rules, sizes = RULES[platform], dict(blueprint.mesh.shape)
    state, batch = jax.tree.leaves(blueprint.abstract_state()), jax.tree.leaves(traced.args_info[0][1])
    held = [Value(x.size // spec_extent(x.sharding.spec, sizes), x.dtype) for x in state]
    rows = [Value(_size(x) // batch_shards(blueprint.mesh.shape), x.dtype, of_batch=True) for x in batch]
    program = read_program(_local(blueprint, traced), [*held, *rows], sizes)
    scope = rewritten(with_gathered_results(program, held), rules)
    # The new state is written where the old one stands.
    moment = fullest(scope, rules, {id(x) for x in scope.gives if x is not None})
    outputs = [Value(_size(x), x.dtype) for x in jax.tree.leaves(traced.out_info)[len(state) :]]
    found = _by_kind(moment, sum(x.bytes for x in (*held, *rows)), sum(x.bytes for x in outputs), rules.scratchpad)
    return replace(found, temporaries=found.temporaries + rules.operation_bytes * _num_operations(scope))


def _num_operations(scope: Scope) -> int:
    return sum((op.name not in MOVES) + sum(map(_num_operations, op.bodies)) for op in scope.ops)


def _by_kind(moment: Moment, arguments: int, outputs: int, scratchpad: int) -> Footprint:
    gathered = sum(x.bytes for x in moment.values if x.gathered)
    activations = sum(x.bytes for x in moment.values if _is_kept(x, moment) and not x.gathered)
    temporaries = moment.bytes - gathered - activations
    room = [temporaries, activations, gathered]
    for number, size in enumerate(room):
        room[number] = max(0, size - scratchpad)
        scratchpad -= size - room[number]
    return Footprint(arguments, room[2], room[1], room[0], outputs)


def _is_kept(value: Value, moment: Moment) -> bool:
    """Whether it is of the forward pass, and there for the backward pass."""
    made, at = value.made, moment.op
    if made is None or made.backward or not value.of_batch:
        return False
    return made.name == "scan" or (at is not None and at.backward)


def _local(blueprint: Blueprint, traced: jax.stages.Traced) -> Program:
    """The step with a device's own shapes: those inside of `shard_map`, or those of its twin for one device's rows, in
    which constraints alone tell how parameters are divided."""
    if traced_engine(traced.jaxpr) == "explicit":
        return traced.jaxpr
    shards, batch = batch_shards(blueprint.mesh.shape), traced.args_info[0][1]
    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // shards, *x.shape[1:]), x.dtype), whole)
    config, plan, steps = blueprint.config, blueprint.plan, blueprint.micro_batches(whole)
    config = config.model_copy(update={"zero": config.zero.model_copy(update={"collectives": "xla"})})
    if steps == 1:
        # The optimizer's placement of the finished gradients reaches back to where they are made (measured on GPU and
        # CPU: stage 1 takes the temporaries of stage 2).
        axes = {path: leaf.zero_axes for path, leaf in plan.weights.items()}
        plan = replace(plan, gradients={p: replace(leaf, zero_axes=axes[p]) for p, leaf in plan.gradients.items()})
    alone = MeshConfig(replica=1, data=1, tensor=blueprint.mesh.shape["tensor"])
    twin = replace(blueprint, config=config, plan=plan, mesh=abstract_mesh(alone, blueprint.mesh.shape["tensor"]))
    return twin.train_step(steps, rows).trace(twin.abstract_state(), rows).jaxpr


def _size(x: Any) -> int:
    return math.prod(x.shape)
