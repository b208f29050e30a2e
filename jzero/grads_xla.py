"""The engine `xla`: one program over global arrays. Shardings of inputs and outputs and the constraints at the use
points say where things live, XLA inserts the collectives. Accumulating under it reduces in every micro-batch."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jzero.grads import GradFn, Loss, accumulating, fold, make_loss_fn, scaled, split_rows
from jzero.mesh import BATCH_AXES, AnyMesh
from jzero.model_api import Model
from jzero.plan import Plan
from jzero.residuals import forget_weights
from jzero.usepoint import UsePoint


def xla_points(plan: Plan, mesh: AnyMesh) -> dict[str, UsePoint]:
    """The use point of every parameter, over global arrays."""

    def point(path: str) -> UsePoint:
        leaf = plan.params[path]
        gradient = plan.gradients.get(path, leaf)  # a frozen one has none
        specs = [_full(x.spec, len(leaf.shape)) for x in (leaf.whole, gradient)]
        return UsePoint(
            path,
            leaf.shape,
            leaf.stored_shape,
            leaf.stored_shape,
            leaf.dim,
            leaf.dtype,
            plan.compute[path],
            gather=partial(_constrain, mesh, specs[:1]),
            # Whole and then shard. With the second alone, XLA gathers every device's activations to compute its own
            # slice of an embedding's gradient (measured on GPU and TPU programs).
            # The sum over devices is in the compute dtype: XLA reduces where the product is made, whatever is cast
            # here (measured: float16, 8 CPU devices).
            scatter=partial(_constrain, mesh, specs),
        )

    return {path: point(path) for path in plan.params}


def make_xla_grad_fn(
    model: Model, loss: Loss, plan: Plan, mesh: AnyMesh, points: Mapping[str, UsePoint], num_micro_batches: int
) -> GradFn:
    """The gradients come in the placement of plan.gradients."""
    gathers = any(leaf.zero_axes for leaf in plan.params.values())
    loss_fn = scaled(make_loss_fn(model, loss, points, train=True), lambda weight: weight)
    of_trained = lambda trained, frozen, *rest: loss_fn({**trained, **frozen}, {}, *rest)
    differentiate = jax.value_and_grad(forget_weights(of_trained, points, gathers=gathers), has_aux=True)
    placement = {path: NamedSharding(mesh, leaf.spec) for path, leaf in plan.gradients.items()}

    def one(params: Any, model_state: Any, batch: Any, fold: Any, scale: Any) -> Any:
        trained = {path: params[path] for path in plan.gradients}
        frozen = {path: x for path, x in params.items() if path not in plan.gradients}
        (_, (sums, unscale, model_state)), gradients = differentiate(trained, frozen, model_state, batch, fold, scale)
        return sums, gradients, unscale, model_state

    if num_micro_batches == 1:
        return lambda params, model_state, batch, step, scale: one(params, model_state, batch, fold(step, 0), scale)
    placed = lambda gradients: jax.lax.with_sharding_constraint(gradients, placement)
    split = partial(split_global_rows, num_micro_batches=num_micro_batches, mesh=mesh)
    return accumulating(one, plan, num_micro_batches, split, placed)


def split_global_rows(array: jax.Array, num_micro_batches: int, mesh: AnyMesh) -> jax.Array:
    """`split_rows` of an array whose rows lie on all devices of the batch axes."""
    rows = split_rows(array, num_micro_batches)
    return jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, PartitionSpec(None, BATCH_AXES)))


def _constrain(mesh: AnyMesh, specs: list[PartitionSpec], array: jax.Array, dropped: int) -> jax.Array:
    for spec in specs:
        array = jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(*spec[dropped:])))
    return array


def _full(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    return PartitionSpec(*spec, *(None,) * (ndim - len(spec)))
