"""One optimizer step and one evaluation, each a single jitted program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from jzero.grads import make_loss_fn, split_batch
from jzero.plan import Plan, map_leaves
from jzero.state import TrainState, shardings

Metrics = dict[str, jax.Array]


def make_train_step(
    grad_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    plan: Plan,
    mesh: Mesh,
    *,
    elementwise: bool,
    clip_norm: float | None,
    schedule: optax.Schedule | None,
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """step(state, batch) -> (state, metrics), jitted; the given state is donated and must not be used again.

    elementwise: the optimizer moves each element by that element's own history, so it may run on padded shards; any
    other one is given padded leaves in their true shape. schedule: for the learning_rate metric, of applied steps.

    The gradient is the sum over the batch divided by the summed weight; its norm is taken once over every element, then
    clipped to clip_norm. A step whose loss or norm is not finite, or whose weight is zero, changes only counters.
    """
    placement = shardings(plan, mesh)
    sharded = {path: NamedSharding(mesh, leaf.spec) for path, leaf in plan.weights.items()}

    update = _make_update(optimizer, plan, sharded, placement.opt_state, elementwise)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        sums, gradients, model_state = grad_fn(state.params, state.model_state, batch, state.step)
        weights = jax.lax.with_sharding_constraint(state.weights, sharded)
        gradients = jax.lax.with_sharding_constraint(gradients, sharded)
        means = sums.means()
        # In the plan's order: jit and constraints sort a dict by its keys.
        gradients = {path: gradients[path] for path in plan.gradients}
        norm, broken, gradients = _average_and_clip(gradients, weights, sums.loss.weight, clip_norm)
        finite = jnp.isfinite(norm) & jnp.isfinite(means["loss"]) & jnp.isfinite(sums.loss.weight)
        applied = finite & (sums.loss.weight > 0)
        new_weights, new_opt_state = update(gradients, state.opt_state, weights)

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda n, o: jnp.where(applied, n, o), new, old)

        new_weights = keep(new_weights, weights)
        # Cast before the gather that the output's placement asks for: it then carries the parameters' own dtype.
        params = {path: new_weights[path].astype(leaf.dtype) for path, leaf in plan.params.items()}
        new_state = TrainState(
            step=state.step + 1,
            params=params,
            master=new_weights if plan.master else {},
            opt_state=keep(new_opt_state, state.opt_state),
            model_state=keep(model_state, state.model_state),
            skipped=jnp.where(applied, state.skipped, state.skipped + 1),
            skipped_in_a_row=jnp.where(finite, 0, state.skipped_in_a_row + 1),
        )
        counters = {"skipped": new_state.skipped, "skipped_in_a_row": new_state.skipped_in_a_row}
        metrics = {**means, "grad_norm": norm, **counters, "non_finite_leaf": broken}
        if schedule is not None:
            metrics["learning_rate"] = jnp.asarray(schedule(state.step - state.skipped), jnp.float32)
        return new_state, metrics

    return jax.jit(step, donate_argnums=0, out_shardings=(placement, placement.step))


def _make_update(
    optimizer: optax.GradientTransformation, plan: Plan, weight_shardings: Any, state_shardings: Any, elementwise: bool
) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """update(gradients, opt_state, weights) -> (weights, opt_state), all in stored shapes and sharded."""

    def update(gradients: Any, opt_state: Any, weights: Any) -> tuple[Any, Any]:
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
        return jax.lax.with_sharding_constraint((weights, opt_state), (weight_shardings, state_shardings))

    return update


def make_eval_step(
    model: Any, loss: Any, points: Any, mesh: Mesh, num_micro_batches: int
) -> Callable[[TrainState, Any], Metrics]:
    """evaluate(state, batch) -> loss, weight and extra metrics, in evaluation mode; the state is only read. In as many
    parts, one after the other, as training would take: what a training step has room for has to do."""
    loss_fn = make_loss_fn(model, loss, points, train=False)

    def evaluate(state: TrainState, batch: Any) -> Metrics:
        def sums_of(micro_batch: Any) -> Any:
            return loss_fn(state.params, state.model_state, micro_batch, jnp.zeros(2, jnp.int32))[1][0]

        if num_micro_batches == 1:
            return sums_of(batch).means()
        parts = jax.lax.map(sums_of, split_batch(batch, num_micro_batches, mesh))
        return jax.tree.map(lambda part: part.sum(0), parts).means()

    return jax.jit(evaluate)


def _average_and_clip(
    gradients: dict[str, Any], weights: dict[str, Any], weight: jax.Array, clip_norm: float | None
) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    """The global norm of the mean gradient (float32, before clipping); the number of the first leaf in it that is not
    finite, or -1; the clipped gradient in the weights' dtypes."""
    scale = jnp.where(weight > 0, 1.0 / jnp.where(weight > 0, weight, 1.0), 0.0)
    mean = {path: g.astype(jnp.float32) * scale for path, g in gradients.items()}
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in mean.values()))
    broken = jnp.stack([~jnp.isfinite(g).all() for g in mean.values()])
    first = jnp.where(broken.any(), jnp.argmax(broken), -1).astype(jnp.int32)
    factor = 1.0 if clip_norm is None else clip_norm / jnp.maximum(norm, clip_norm)
    return norm, first, {path: (g * factor).astype(weights[path].dtype) for path, g in mean.items()}
