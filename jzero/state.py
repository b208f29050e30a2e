"""The training state: what it holds, how it starts in place, what its arrays are called."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from jzero.errors import PlanError
from jzero.leaf import LeafPlan, map_leaves
from jzero.mesh import AnyMesh
from jzero.model_api import Model
from jzero.plan import Plan
from jzero.rounding import cast, widened


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything a step changes. Arrays have stored shapes (padded where a split dim does not divide).

    step: int32, optimizer steps done, skipped ones included. params: at rest, frozen ones too. master: wider copies the
    optimizer works on, of those parameters that have one. ema: moving average of the weights, empty where none is kept.
    model_state: BatchNorm statistics, random keys and the like. skipped: int32, steps that changed nothing.
    skipped_in_a_row: int32, how many of the last steps were skipped for non-finite values. loss_scale: see
    `jzero.loss_scale`; empty but for float16.
    """

    step: Any
    params: dict[str, Any]
    master: dict[str, Any]
    opt_state: Any
    ema: dict[str, Any]
    model_state: dict[str, Any]
    skipped: Any
    skipped_in_a_row: Any
    loss_scale: dict[str, Any]


def weights_of(state: TrainState, plan: Plan) -> dict[str, Any]:
    """What the optimizer updates: of each trained parameter the master copy where there is one, else itself."""
    return {path: state.master.get(path, state.params[path]) for path in plan.weights}


def plan_tree(plan: Plan) -> TrainState:
    """A TrainState whose leaves are LeafPlans."""
    counter = LeafPlan("", (), (), jnp.dtype(jnp.int32), (), None, (), "whole: scalar")
    return TrainState(
        step=counter,
        params=dict(plan.params),
        master=dict(plan.master),
        opt_state=plan.optimizer,
        ema=dict(plan.ema),
        model_state=dict(plan.model_state),
        skipped=counter,
        skipped_in_a_row=counter,
        loss_scale=dict(plan.loss_scale),
    )


def shardings(plan: Plan, mesh: AnyMesh) -> TrainState:
    """A TrainState of NamedShardings, for jit."""
    return map_leaves(lambda leaf: NamedSharding(mesh, leaf.spec), plan_tree(plan))


def init_values(model: Model, plan: Plan, mesh: Mesh, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights of a seed, or those that the user brought, and the model state; made in place: each device computes
    its own shards, and values do not depend on placement. By path, in the dtypes of plan.initial."""
    sharded = {path: NamedSharding(mesh, leaf.spec) for path, leaf in plan.initial.items()}

    def create(key: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
        params, model_state = model.init(key)
        padded = {path: leaf.pad(params[path].astype(leaf.dtype)) for path, leaf in plan.initial.items()}
        # Computed in the optimizer's shards, which the padding was made for, whatever the placement at rest. Split over
        # fewer devices they would be computed across the shards' borders, in other roundings (measured).
        return jax.lax.with_sharding_constraint(padded, sharded), model_state

    out = (weight_shardings(plan, mesh), shardings(plan, mesh).model_state)
    given = model.given(seed)
    if given is None:
        return jax.jit(create, out_shardings=out)(jax.random.key(seed))
    params, state = given
    host = {path: leaf.pad(params[path].astype(leaf.dtype)) for path, leaf in plan.initial.items()}
    # device_put may alias host memory, and the state is donated to every step: copy.
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=out)
    return copy(jax.device_put((host, state), out))


def init_state(
    values: Mapping[str, Any],
    model_state: Mapping[str, Any],
    optimizer: optax.GradientTransformation,
    plan: Plan,
    mesh: Mesh,
    loss_scale: Mapping[str, Any],
) -> TrainState:
    """The state before the first step, of what `init_values` returns; it takes the arrays over. loss_scale: its scalars
    to start from; taken where the plan has them."""
    placement = shardings(plan, mesh)

    def finish(values: dict[str, Any]) -> tuple[dict[str, Any], Any, dict[str, Any]]:
        params = {path: values[path].astype(plan.params[path].dtype) for path in plan.master}
        wide = {path: leaf.cut(values[path]).astype(widened(leaf.dtype)) for path, leaf in plan.weights.items()}
        with jax.numpy_dtype_promotion("standard"):  # as optax relies on
            opt_state = optimizer.init(wide)
        # A copy: no buffer may be donated twice, and jit may hand back what it was given.
        ema = {path: jnp.copy(values[path]).astype(leaf.dtype) for path, leaf in plan.ema.items()}
        return params, _store(plan.optimizer, opt_state), ema

    narrow = {path: placement.params[path] for path in plan.master}
    finish_all = jax.jit(finish, out_shardings=(narrow, placement.opt_state, placement.ema))
    params, opt_state, ema = finish_all(dict(values))
    return TrainState(
        step=_counter(placement),
        params={path: params.get(path, values[path]) for path in plan.params},
        master={path: values[path] for path in plan.master},
        opt_state=opt_state,
        ema=ema,
        model_state=dict(model_state),
        skipped=_counter(placement),
        skipped_in_a_row=_counter(placement),
        loss_scale={name: jax.device_put(loss_scale[name], place) for name, place in placement.loss_scale.items()},
    )


def weight_shardings(plan: Plan, mesh: Mesh) -> dict[str, NamedSharding]:
    """Where the values of `init_values` lie: those of the optimizer's own copies as these, the others at rest."""
    return {path: NamedSharding(mesh, plan.master.get(path, leaf).spec) for path, leaf in plan.params.items()}


def _store(plans: Any, tree: Any) -> Any:
    """Arrays in true shapes as they are kept: padded, in the planned dtype."""
    return map_leaves(lambda leaf, x: leaf.pad(cast(x, leaf.dtype)), plans, tree)


def assert_placement(state: TrainState, plan: Plan, mesh: Mesh) -> None:
    """Raise PlanError unless every array of the state has the planned shape and dtype, and its shards lie as planned:
    on the mesh's devices, along the planned dims."""
    faults = []
    placement = named(shardings(plan, mesh))
    for (name, leaf), array in zip(named(plan_tree(plan)).items(), named(state).values(), strict=True):
        if (array.shape, array.dtype) != (leaf.stored_shape, leaf.dtype):
            faults.append(f"{name}: {array.dtype}{array.shape}, planned {leaf.dtype}{leaf.stored_shape}")
        elif not array.sharding.is_equivalent_to(placement[name], array.ndim):
            held = max(shard.data.size for shard in array.addressable_shards)
            faults.append(f"{name}: {held} of {array.size} elements a device, {array.sharding}, planned {leaf.spec}")
    if faults:
        raise PlanError("the state does not lie where the plan says:\n  " + "\n  ".join(faults[:12]))


def named(state: TrainState) -> dict[str, Any]:
    """The leaves of a state (or of a TrainState of LeafPlans) by name, the same for any stage and device count."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: isinstance(x, LeafPlan))
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in leaves}


def from_named(plan: Plan, arrays: Mapping[str, Any]) -> TrainState:
    """The inverse of `named`. Raises PlanError unless the names are those of the plan's state."""
    tree = plan_tree(plan)
    if odd := sorted(arrays.keys() ^ named(tree).keys()):
        raise PlanError(f"these arrays are either given or planned, but not both: {', '.join(odd[:12])}")
    structure = jax.tree.structure(tree, is_leaf=lambda x: isinstance(x, LeafPlan))
    return jax.tree.unflatten(structure, [arrays[name] for name in named(tree)])


def _counter(placement: TrainState) -> jax.Array:
    return jax.jit(lambda: jnp.zeros((), jnp.int32), out_shardings=placement.step)()
