"""The engine `explicit`: each device computes on its own rows under `jax.shard_map`, and the collectives stand where we
put them: gathers and reduce-scatters at the use points, whatever is left to sum once a step.

A gradient need not have its parameter's shape here: the loss is differentiated by *carriers*, zeros of the gradient's
shape that the use points send their cotangents to. At stage 2 the reduce-scatter thus sits inside the layer loop and
no full gradient ever stands, although the parameters are whole.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jzero.apart import computed_apart
from jzero.grads import GradFn, Loss, accumulating, fold, make_loss_fn, scaled, split_rows
from jzero.leaf import LeafPlan, axis_extent
from jzero.mesh import AXES, BATCH_AXES, AnyMesh, platform_of
from jzero.model_api import Model
from jzero.plan import Plan
from jzero.residuals import forget_weights
from jzero.scopes import SCATTER, scope
from jzero.usepoint import UsePoint


def explicit_points(plan: Plan, mesh: AnyMesh) -> dict[str, UsePoint]:
    """The use point of every parameter, under shard_map over the batch axes."""
    on_cpu = platform_of(mesh) == "cpu"

    def point(path: str) -> UsePoint:
        leaf = plan.params[path]
        return UsePoint(
            path,
            leaf.shape,
            leaf.stored_shape,
            _held_shape(leaf, plan.axis_sizes),
            leaf.dim,
            leaf.dtype,
            plan.compute[path],
            gather=_Gather(leaf),
            scatter=_Scatter(plan.gradients.get(path, leaf), plan.reduce.get(path), on_cpu),
            carried=path in plan.gradients,
        )

    return {path: point(path) for path in plan.params}


@dataclass(frozen=True)
class _Gather:
    """A device's part of a parameter to the whole."""

    leaf: LeafPlan

    def __call__(self, array: jax.Array, dropped: int) -> jax.Array:
        leaf = self.leaf
        if leaf.dim is None or not leaf.zero_axes:
            return array
        gather = partial(jax.lax.all_gather, axis_name=leaf.zero_axes, axis=leaf.dim - dropped, tiled=True)
        return _within_own_axes(leaf, dropped, gather)(array)


@dataclass(frozen=True)
class _Scatter:
    """A device's gradient to its part of the sum over the axes that this tree is split over; where it is not, as it is:
    what its own rows give."""

    leaf: LeafPlan
    dtype: Any
    on_cpu: bool

    def __call__(self, array: jax.Array, dropped: int) -> jax.Array:
        axes = self.leaf.zero_axes
        if self.on_cpu and array.ndim == 2 and (dropped or not axes):
            # XLA:CPU turns the transposition of a gradient into another product, lhs^T rhs^T, which takes 2.8 times as
            # long (measured: [1024,128]^T [384,1024]^T); under the engine `xla` an all-reduce stands between. Not where
            # the gradients of unrolled layers are scattered: they would take more memory on the way.
            array = jax.lax.optimization_barrier(array.T).T
        return _scatter(self.leaf, dropped, axes, self.dtype, array) if axes else array


def _scatter(leaf: LeafPlan, dropped: int, axes: Any, dtype: Any, array: jax.Array) -> jax.Array:
    assert leaf.dim is not None
    scatter = partial(jax.lax.psum_scatter, axis_name=axes, scatter_dimension=leaf.dim - dropped, tiled=True)
    return _within_own_axes(leaf, dropped, scatter)(array.astype(dtype or array.dtype))


def _within_own_axes(leaf: LeafPlan, dropped: int, collective: Callable[..., Any]) -> Callable[..., Any]:
    """The collective on each device's part along the other axes, over which the model itself may split the leaf.
    Otherwise XLA gathers it over those first; and where an axis is left to it, even of size 1, XLA:CPU aborts the
    process on a sum in bfloat16 (measured: jax 0.10.2)."""
    spec = PartitionSpec(*leaf.own_spec[dropped:])
    others = set(AXES).difference(BATCH_AXES)
    return jax.shard_map(collective, in_specs=spec, out_specs=spec, axis_names=others, check_vma=False)


def make_explicit_grad_fn(
    model: Model,
    loss: Loss,
    plan: Plan,
    mesh: AnyMesh,
    points: Mapping[str, UsePoint],
    num_micro_batches: int,
    *,
    by_node: bool,
) -> GradFn:
    """The gradients come in the placement of plan.weights. Random streams also depend on the device's position, so
    other masks are drawn than under `xla`. by_node: whole gradients are summed within nodes first (zero.group: node).
    """
    axes = tuple(axis for axis in BATCH_AXES if mesh.shape[axis] > 1)
    gathers = any(leaf.zero_axes for leaf in plan.params.values())
    loss_fn = scaled(make_loss_fn(model, loss, points, train=True), partial(_sum_over, axes))
    by_carriers = lambda carriers, params, *rest: loss_fn(params, carriers, *rest)
    prepared = forget_weights(computed_apart(by_carriers), points, gathers=gathers)
    differentiate = jax.value_and_grad(prepared, has_aux=True)

    def one(params: Any, model_state: Any, batch: Any, fold: Any, scale: Any) -> Any:
        position = jax.lax.axis_index(BATCH_AXES).astype(jnp.int32)
        fold = jnp.append(fold, position)
        inputs = (_carriers(plan), params, model_state, batch, fold, scale)
        (_, (sums, unscale, model_state)), gradients = differentiate(*inputs)
        if num_micro_batches > 1:
            # XLA:TPU would move a reduce-scatter behind the loop and sum whole gradients in it (measured: listed
            # layers, jax 0.10.2).
            gradients = jax.lax.optimization_barrier(gradients)
        return sums, gradients, unscale, model_state

    if num_micro_batches == 1:
        summed = lambda params, state, batch, step, scale: one(params, state, batch, fold(step, 0), scale)
    else:
        split = partial(split_rows, num_micro_batches=num_micro_batches)
        summed = accumulating(one, plan, num_micro_batches, split, lambda gradients: gradients)

    def on_a_device(*inputs: Any) -> Any:
        sums, gradients, unscale, model_state = summed(*inputs)
        whole_sum = _sum_by_node if by_node and plan.stage == 0 and axes == BATCH_AXES else jax.lax.psum
        gradients = {path: _finish(plan, path, axes, whole_sum, gradient) for path, gradient in gradients.items()}
        return _sum_over(axes, sums), gradients, unscale, model_state

    whole = PartitionSpec()
    params = {path: _manual_spec(leaf) for path, leaf in plan.params.items()}
    gradients = {path: _manual_spec(leaf) for path, leaf in plan.weights.items()}
    return jax.shard_map(
        on_a_device,
        mesh=mesh,
        in_specs=(params, whole, PartitionSpec(BATCH_AXES), whole, whole),
        out_specs=(whole, gradients, whole, whole),
        axis_names=set(BATCH_AXES),
        # With it, JAX would sum the cotangents of whole parameters by itself (measured: N times too much).
        check_vma=False,
    )


def _finish(
    plan: Plan, path: str, axes: tuple[str, ...], whole_sum: Callable[..., Any], gradient: jax.Array
) -> jax.Array:
    """What the use points left to sum over devices: into the optimizer's shards, the inner axis first, so that only a
    shard crosses nodes."""
    dtype, leaf = plan.reduce.get(path), plan.weights[path]
    done, wanted = plan.gradients[path].zero_axes, leaf.zero_axes
    with jax.named_scope(scope(SCATTER, path)):
        for axis in wanted:
            if axis not in done:
                gradient = _scatter(leaf, 0, axis, dtype, gradient)
        if rest := tuple(axis for axis in axes if axis not in (*done, *wanted)):
            reduce = _within_own_axes(leaf, 0, partial(whole_sum, axis_name=rest))
            gradient = reduce(gradient.astype(dtype or gradient.dtype))
    return gradient.astype(plan.gradients[path].dtype)


def _sum_by_node(array: jax.Array, axis_name: tuple[str, ...]) -> jax.Array:
    """The sum over both axes as a reduce-scatter within nodes, an all-reduce of the shards across them and an
    all-gather within: as many elements as in one all-reduce, but only a shard crosses nodes."""
    across, within = axis_name
    flat = array.reshape(-1)
    flat = jnp.pad(flat, (0, -flat.size % jax.lax.axis_size(within)))
    shard = jax.lax.psum(jax.lax.psum_scatter(flat, within, tiled=True), across)
    return jax.lax.all_gather(shard, within, tiled=True)[: array.size].reshape(array.shape)


def _carriers(plan: Plan) -> dict[str, jax.Array]:
    """Zeros in the shapes of a device's gradients of one micro-batch, in the dtypes they come in."""

    def zeros(path: str, leaf: LeafPlan) -> jax.Array:
        reduced = plan.reduce.get(path) if leaf.zero_axes else None
        return jnp.zeros(_held_shape(leaf, plan.axis_sizes), reduced or plan.compute[path])

    return {path: zeros(path, leaf) for path, leaf in plan.gradients.items()}


def _held_shape(leaf: LeafPlan, axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Of a device's part along the ZeRO axes; what the model itself splits counts whole."""
    parts = axis_extent(leaf.zero_axes or None, axis_sizes)
    return tuple(n // parts if dim == leaf.dim else n for dim, n in enumerate(leaf.stored_shape))


def _manual_spec(leaf: LeafPlan) -> PartitionSpec:
    """The leaf's placement over the ZeRO axes alone."""
    return replace(leaf, own_spec=(None,) * len(leaf.shape)).spec


def _sum_over(axes: tuple[str, ...], tree: Any) -> Any:
    return jax.lax.psum(tree, axes) if axes else tree
