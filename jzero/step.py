"""One optimizer update and one evaluation, each a single jitted program."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from jzero.config import LossScaleConfig
from jzero.grads import make_loss_fn
from jzero.grads_xla import split_global_rows
from jzero.gradstats import gradient_stats
from jzero.leaf import LeafPlan, map_leaves
from jzero.loss_scale import update_loss_scale
from jzero.mesh import AnyMesh
from jzero.plan import Plan
from jzero.rounding import cast, round_stochastically, widened
from jzero.state import TrainState, shardings, weights_of

Metrics = dict[str, jax.Array]


def make_train_step(
    grad_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    plan: Plan,
    mesh: AnyMesh,
    *,
    elementwise: bool,
    clip_norm: float | None,
    schedule: optax.Schedule | None,
    loss_scale: LossScaleConfig,
    ema_decay: float | None,
    seed: int,
    stochastic_rounding: bool,
    norm_groups: Mapping[str, Sequence[str]],
    histogram: bool,
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """step(state, batch) -> (state, metrics), jitted; the given state is donated and must not be used again.

    elementwise: the optimizer moves each element by that element's own history, so it may run on padded shards; any
    other one is given padded leaves in their true shape. schedule: for the learning_rate metric, of applied steps.
    ema_decay: of plan.ema. stochastic_rounding: of weights that are stored in bfloat16, by `seed`; else to nearest.
    norm_groups, histogram: see `gradient_stats`.

    The gradient is the sum over the batch divided by the summed weight; its norm is taken once over every element, then
    clipped to clip_norm. A step whose loss or norm is not finite, or whose weight is zero, changes only counters and
    the loss scale.
    """
    placement = shardings(plan, mesh)
    sharded = {path: NamedSharding(mesh, leaf.spec) for path, leaf in plan.weights.items()}
    update = _make_update(optimizer, plan, sharded, placement.opt_state, elementwise, seed, stochastic_rounding)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        # The scale of this step's backward pass is the one to divide by, whatever it becomes afterwards.
        scale = state.loss_scale.get("scale")
        sums, gradients, unscale, model_state = grad_fn(state.params, state.model_state, batch, state.step, scale)
        weights = jax.lax.with_sharding_constraint(weights_of(state, plan), sharded)
        gradients = jax.lax.with_sharding_constraint(gradients, sharded)
        means = sums.means()
        # In the plan's order: jit and constraints sort a dict by its keys.
        gradients = _average({path: gradients[path] for path in plan.gradients}, unscale, sums.loss.weight)
        stats = gradient_stats(gradients, plan.gradients, norm_groups, histogram)
        norm, broken, gradients = _measure_and_clip(gradients, clip_norm)
        finite = jnp.isfinite(norm) & jnp.isfinite(means["loss"]) & jnp.isfinite(sums.loss.weight)
        applied = finite & (sums.loss.weight > 0)
        updated = update(gradients, state.opt_state, weights, state.step)
        new_scale, exhausted = {}, None
        if state.loss_scale:
            new_scale, exhausted = update_loss_scale(loss_scale, state.loss_scale, ~finite)
        changed = (*updated, model_state)
        new_state = _next_state(state, plan, weights, changed, new_scale, finite, applied, ema_decay)
        metrics = {**means, "grad_norm": norm, "non_finite_leaf": broken, **stats}
        metrics |= {"skipped": new_state.skipped, "skipped_in_a_row": new_state.skipped_in_a_row}
        if scale is not None:
            metrics |= {"loss_scale": scale, "loss_scale_exhausted": exhausted}
        if schedule is not None:
            metrics["learning_rate"] = jnp.asarray(schedule(state.step - state.skipped), jnp.float32)
        return new_state, metrics

    return jax.jit(step, donate_argnums=0, out_shardings=(placement, placement.step))


def _next_state(
    state: TrainState,
    plan: Plan,
    weights: dict[str, Any],
    changed: Any,
    loss_scale: dict[str, Any],
    finite: jax.Array,
    applied: jax.Array,
    ema_decay: float | None,
) -> TrainState:
    """changed: new weights, optimizer state and model state, taken where the step is applied."""
    new_weights, opt_state, model_state = jax.tree.map(
        lambda new, old: jnp.where(applied, new, old), changed, (weights, state.opt_state, state.model_state)
    )
    return TrainState(
        step=state.step + 1,
        # Cast before the gather that the output's placement asks for: it then carries the parameters' own dtype.
        params=state.params | {path: x.astype(plan.params[path].dtype) for path, x in new_weights.items()},
        master={path: new_weights[path] for path in plan.master},
        opt_state=opt_state,
        ema=_move_average(state.ema, new_weights, ema_decay, applied),
        model_state=model_state,
        skipped=jnp.where(applied, state.skipped, state.skipped + 1),
        skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
        loss_scale=loss_scale,
    )


def _make_update(
    optimizer: optax.GradientTransformation,
    plan: Plan,
    weight_shardings: Any,
    state_shardings: Any,
    elementwise: bool,
    seed: int,
    stochastic_rounding: bool,
) -> Callable[..., tuple[Any, Any]]:
    """update(gradients, opt_state, weights, step) -> (weights, opt_state), all in stored shapes and sharded. Computed
    in float32 and stored in the planned dtypes.

    What an optimizer keeps is rounded to bfloat16 stochastically, weights where they are to be. To nearest, a second
    moment that falls by a thousandth a step would never fall.
    """
    own = _own_dtypes(optimizer, plan)

    def update(gradients: Any, opt_state: Any, weights: Any, step: Any) -> tuple[Any, Any]:
        weights = {path: cast(x, widened(x.dtype)) for path, x in weights.items()}
        opt_state = map_leaves(lambda leaf, x, dtype: cast(x, dtype), plan.optimizer, opt_state, own)
        if not elementwise:
            gradients, weights = (
                {p: leaf.cut(tree[p]) for p, leaf in plan.weights.items()} for tree in (gradients, weights)
            )
            opt_state = map_leaves(lambda leaf, x: leaf.cut(x), plan.optimizer, opt_state)
        # optax mixes int32 counts with float32, which a caller's strict promotion would refuse.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(gradients, opt_state, weights)
            weights = optax.apply_updates(weights, updates)
        if not elementwise:
            weights = {path: leaf.pad(weights[path]) for path, leaf in plan.weights.items()}
            opt_state = map_leaves(lambda leaf, x: leaf.pad(x), plan.optimizer, opt_state)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), step))
        weights = _round(dict(plan.weights), weights, keys[0] if stochastic_rounding else None)
        stored = weights, _round(plan.optimizer, opt_state, keys[1])
        return jax.lax.with_sharding_constraint(stored, (weight_shardings, state_shardings))

    return update


def _own_dtypes(optimizer: optax.GradientTransformation, plan: Plan) -> Any:
    """The dtypes that the optimizer itself keeps its state in, in the structure of the state."""
    wide = {path: jax.ShapeDtypeStruct(leaf.shape, widened(leaf.dtype)) for path, leaf in plan.weights.items()}
    with jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(lambda x: x.dtype, jax.eval_shape(optimizer.init, wide))


def _round(plans: Any, tree: Any, key: Any) -> Any:
    """Arrays in stored shapes in the planned dtypes."""
    numbers = iter(range(len(jax.tree.leaves(tree))))

    def store(leaf: LeafPlan, x: jax.Array) -> jax.Array:
        number = next(numbers)
        if key is None or leaf.dtype != jnp.bfloat16 or x.dtype != jnp.float32:
            return cast(x, leaf.dtype)
        # Drawn in the true shape: the padding, and with it the device count, has no say.
        bits = jax.random.bits(jax.random.fold_in(key, number), leaf.shape, jnp.uint16)
        return round_stochastically(x, leaf.pad(bits))

    return map_leaves(store, plans, tree)


def _move_average(
    ema: dict[str, Any], weights: dict[str, Any], decay: float | None, applied: jax.Array
) -> dict[str, Any]:
    if decay is None:
        return {}
    moved = {path: decay * x + (1 - decay) * weights[path].astype(x.dtype) for path, x in ema.items()}
    return {path: jnp.where(applied, moved[path], x) for path, x in ema.items()}


def make_eval_step(
    model: Any,
    loss: Any,
    points: Any,
    mesh: AnyMesh,
    num_micro_batches: int,
    params_of: Callable[[TrainState], Mapping[str, Any]],
) -> Callable[[TrainState, Any], Metrics]:
    """evaluate(state, batch) -> loss, weight and extra metrics, in evaluation mode; the state is only read. In as many
    parts, one after the other, as training would take: what a training step has room for has to do. params_of: which
    parameters of the state are evaluated."""
    loss_fn = make_loss_fn(model, loss, points, train=False)
    split = partial(split_global_rows, num_micro_batches=num_micro_batches, mesh=mesh)

    def evaluate(state: TrainState, batch: Any) -> Metrics:
        params = params_of(state)

        def sums_of(micro_batch: Any) -> Any:
            return loss_fn(params, {}, state.model_state, micro_batch, jnp.zeros(2, jnp.int32))[0]

        if num_micro_batches == 1:
            return sums_of(batch).means()
        parts = jax.lax.map(sums_of, jax.tree.map(split, batch))
        return jax.tree.map(lambda part: part.sum(0), parts).means()

    return jax.jit(evaluate)


def _average(gradients: dict[str, Any], unscale: jax.Array, weight: jax.Array) -> dict[str, Any]:
    """The gradient of the mean loss, float32; zero where the weight is."""
    scale = jnp.where(weight > 0, unscale / jnp.where(weight > 0, weight, 1.0), 0.0)
    return {path: g.astype(jnp.float32) * scale for path, g in gradients.items()}


def _measure_and_clip(mean: dict[str, Any], clip_norm: float | None) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    """The global norm before clipping; the number of the first leaf that is not finite, or -1; the clipped gradient."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in mean.values()))
    broken = jnp.stack([~jnp.isfinite(g).all() for g in mean.values()])
    first = jnp.where(broken.any(), jnp.argmax(broken), -1).astype(jnp.int32)
    factor = 1.0 if clip_norm is None else clip_norm / jnp.maximum(norm, clip_norm)
    return norm, first, {path: g * factor for path, g in mean.items()}
