"""What both gradient engines share: the loss as sums, its scaling, and the sum over micro-batches.

`grads_xla` computes over global arrays and XLA inserts the collectives; `grads_explicit` computes on each device's own
rows and places them itself. One signature: see `GradFn`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from jzero.errors import ModelError
from jzero.gathered import Gathered
from jzero.loss import WeightedLoss
from jzero.model_api import Model
from jzero.plan import Plan
from jzero.scopes import MICRO_BATCHES
from jzero.usepoint import UsePoint

Loss = Callable[[Any, Any], Any]

# fn(params, model_state, batch, step, scale) -> (LossSums, gradients, unscale, new model state).
#
# batch: arrays of the global batch, leading dim split over the batch axes. Micro-batch j is rows j, j+k, j+2k, ...: the
# split costs no communication, and which rows meet does not depend on the device count. step: int32, mixed with the
# micro-batch's number into random streams. scale: float32, multiplies each micro-batch's mean loss before its backward
# pass; None: nothing does. Gradients are of the loss total, once multiplied by `unscale` (float32 scalar), by the
# trained parameters, in stored shapes. Summed over several micro-batches they have the dtypes of plan.accumulate and
# are unscaled already.
GradFn: TypeAlias = Callable[..., tuple["LossSums", dict[str, jax.Array], jax.Array, dict[str, Any]]]

_OWN_METRICS = frozenset(
    ("loss", "weight", "grad_norm", "grad_histogram", "learning_rate", "skipped", "skipped_in_a_row")
    + ("non_finite_leaf", "loss_scale", "loss_scale_exhausted")
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossSums:
    """What a loss returned, as sums that add up over micro-batches: the loss itself and any extra metrics."""

    loss: WeightedLoss
    extras: dict[str, WeightedLoss]

    def means(self) -> dict[str, jax.Array]:
        """`loss`, `weight` and every extra metric as float32 scalars; zero where the weight is zero."""
        return {
            "loss": _mean(self.loss),
            "weight": self.loss.weight,
            **{name: _mean(value) for name, value in self.extras.items()},
        }


def bind_params(
    params: Mapping[str, jax.Array], points: Mapping[str, UsePoint], carriers: Mapping[str, jax.Array] | None = None
) -> dict[str, Gathered]:
    """Stored parameters wrapped so that reading one is its use point, which sends its gradient to the carrier where
    there is one."""
    carriers = carriers or {}
    return {path: Gathered(stored, points[path], carriers.get(path)) for path, stored in params.items()}


def loss_sums(result: Any, batch: Any) -> LossSums:
    """A loss's result (scalar or WeightedLoss, alone or with a dict of extra metrics) as sums.

    A scalar is a mean over the rows of its batch; a scalar metric is a mean with the loss's own weight.
    """
    if isinstance(result, tuple) and len(result) != 2:
        raise ModelError(f"the loss returned a tuple of {len(result)}; return the loss, or (loss, dict of metrics).")
    value, extras = result if isinstance(result, tuple) else (result, {})
    if not isinstance(extras, Mapping):
        raise ModelError(f"the loss returned (loss, {type(extras).__name__}); the second must be a dict of metrics.")
    rows = jax.tree.leaves(batch)[0].shape[0]
    loss = _weighted("loss", value, jnp.float32(rows))
    clash = [name for name in extras if name in _OWN_METRICS or name.startswith("grad_norm/")]
    if clash:
        raise ModelError(f"extra metric {min(clash)!r} has the name of one of jzero's own; call it something else.")
    # Metrics are read, not trained on.
    extra_sums = {name: _weighted(name, jax.lax.stop_gradient(v), loss.weight) for name, v in extras.items()}
    return LossSums(loss, extra_sums)


def make_loss_fn(model: Model, loss: Loss, points: Mapping[str, UsePoint], *, train: bool) -> Callable[..., Any]:
    """fn(params, carriers, model_state, batch, fold) -> (LossSums, new model state) over stored parameters."""

    def loss_fn(params: Any, carriers: Any, model_state: Mapping[str, Any], batch: Any, fold: Any) -> Any:
        bound = model.bind(bind_params(params, points, carriers), model_state, fold, train=train)
        sums = loss_sums(loss(bound, batch), batch)
        return sums, {**model_state, **model.collect(bound)}

    return loss_fn


def scaled(loss_fn: Callable[..., Any], whole_weight: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    """fn(params, carriers, model_state, batch, fold, scale) -> (what to differentiate, (LossSums, unscale, model
    state)). whole_weight: from the weight that loss_fn sees to that of the whole micro-batch."""

    def scaled_fn(params: Any, carriers: Any, model_state: Any, batch: Any, fold: Any, scale: Any) -> Any:
        sums, model_state = loss_fn(params, carriers, model_state, batch, fold)
        if scale is None:
            return sums.loss.total, (sums, jnp.float32(1.0), model_state)
        # Of the mean: a total over many tokens would need a scale far below 1.
        weight = whole_weight(jax.lax.stop_gradient(sums.loss.weight))
        factor = scale / jnp.where(weight > 0, weight, 1.0)
        return sums.loss.total * factor, (sums, 1.0 / factor, model_state)

    return scaled_fn


def accumulating(
    one: Callable[..., Any],
    plan: Plan,
    num_micro_batches: int,
    split: Callable[[jax.Array], jax.Array],
    placed: Callable[[dict[str, jax.Array]], dict[str, jax.Array]],
) -> GradFn:
    """`one` over the micro-batches of a batch in turn, its sums and gradients added up.

    split: an array of a batch to [num_micro_batches, rows, ...]. placed: gradients, where they belong.
    """

    def accumulated(params: Any, model_state: Any, batch: Any, step: Any, scale: Any) -> Any:
        def add(carry: Any, numbered: Any) -> Any:
            sums, gradients, model_state = carry
            number, micro_batch = numbered
            new_sums, new, unscale, model_state = one(params, model_state, micro_batch, fold(step, number), scale)
            if scale is not None:
                new = jax.tree.map(lambda g: g.astype(jnp.float32) * unscale, new)
            wide = jax.tree.map(lambda total, g: total + g.astype(total.dtype), gradients, new)
            return (jax.tree.map(jnp.add, sums, new_sums), placed(wide), model_state), None

        micro_batches = jax.tree.map(split, batch)
        first = jax.tree.map(lambda x: x[0], micro_batches)
        shapes = jax.eval_shape(one, params, model_state, first, fold(step, 0), scale)
        sums = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[0])
        gradients = placed({path: jnp.zeros(g.shape, plan.accumulate[path]) for path, g in shapes[1].items()})
        numbered = (jnp.arange(num_micro_batches, dtype=jnp.int32), micro_batches)
        with jax.named_scope(MICRO_BATCHES):
            (sums, gradients, model_state), _ = jax.lax.scan(add, (sums, gradients, model_state), numbered)
        # The placement the caller asks for would otherwise reach back into the loop: at stage 1 every micro-batch then
        # gathered the whole gradient once more (measured).
        return sums, placed(gradients), jnp.float32(1.0), model_state

    return accumulated


def split_rows(array: jax.Array, num_micro_batches: int) -> jax.Array:
    """[B, ...] as [num_micro_batches, B / num_micro_batches, ...]: micro-batch j is rows j, j+k, j+2k, ..."""
    # This reshape keeps each device's rows on the device; reshape(k, B // k, ...) would cost an all-to-all.
    return array.reshape(array.shape[0] // num_micro_batches, num_micro_batches, *array.shape[1:]).swapaxes(0, 1)


def fold(step: Any, micro_batch: Any) -> jax.Array:
    """What random streams are mixed with. Two numbers, not step * k + j: k may change when a run goes on."""
    return jnp.stack([jnp.asarray(step, jnp.int32), jnp.asarray(micro_batch, jnp.int32)])


def _weighted(name: str, value: Any, weight: jax.Array) -> WeightedLoss:
    if isinstance(value, WeightedLoss):
        return WeightedLoss(_scalar(f"{name}.total", value.total), _scalar(f"{name}.weight", value.weight))
    return WeightedLoss(_scalar(name, value) * weight, weight)


def _scalar(name: str, value: Any) -> jax.Array:
    if not jnp.isscalar(value):
        found = f"has shape {value.shape}" if hasattr(value, "shape") else f"is a {type(value).__name__}"
        raise ModelError(
            f"{name} {found}: return a scalar (a mean over the rows) or jzero.WeightedLoss(total, weight), two scalars."
        )
    return jnp.asarray(value).astype(jnp.float32)


def _mean(sums: WeightedLoss) -> jax.Array:
    # A weight of NaN is no zero: it shows.
    return jnp.where(sums.weight == 0, 0.0, sums.total / jnp.where(sums.weight == 0, 1.0, sums.weight))
