"""Where every byte of the training state lives: one pure function of abstract shapes, axis sizes and configuration.

ZeRO (arXiv 1910.02054, section 5) is four trees of the model's shape: parameters at rest, gradients, master weights
and optimizer state. A stage says which of them are sharded; this module says how. It needs no devices: the same call
plans a 64-device job on a laptop.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jzero.config import LossScaleConfig, PrecisionConfig, ZeroConfig
from jzero.errors import ConfigError, PlanError
from jzero.leaf import AbstractParam, Entry, LeafPlan, axis_extent, axis_names
from jzero.loss_scale import init_loss_scale
from jzero.paths import matching
from jzero.rounding import widened


@dataclass(frozen=True)
class Plan:
    """The placement of a whole training state, by parameter path.

    params: at rest, frozen ones included. compute: their dtypes where the model reads them; accumulate: those that
    gradients are summed in over micro-batches; reduce: over devices, empty for as they come. initial: all of them as
    their first values are computed, frozen ones too. The trees from here on are of trained parameters only. weights:
    what the optimizer updates, placed as it updates it. master: those of them that are copies of their own. optimizer:
    LeafPlans in the structure of the optax state. ema: the moving average of the weights, empty where none is kept.
    loss_scale: scalars, for float16.
    """

    axis_sizes: Mapping[str, int]
    stage: int
    params: Mapping[str, LeafPlan]
    compute: Mapping[str, Any]
    accumulate: Mapping[str, Any]
    reduce: Mapping[str, Any]
    initial: Mapping[str, LeafPlan]
    gradients: Mapping[str, LeafPlan]
    weights: Mapping[str, LeafPlan]
    master: Mapping[str, LeafPlan]
    optimizer: Any
    ema: Mapping[str, LeafPlan]
    model_state: Mapping[str, LeafPlan]
    loss_scale: Mapping[str, LeafPlan]

    def trees(self) -> dict[str, list[LeafPlan]]:
        """The leaves by tree; `optimizer` holds the master weights too, as the papers count them."""
        return {
            "parameters": list(self.params.values()),
            "gradients": list(self.gradients.values()),
            "optimizer": [*self.master.values(), *_leaves(self.optimizer)],
            "ema": list(self.ema.values()),
            "model_state": list(self.model_state.values()),
        }

    def bytes_per_device(self) -> dict[str, int]:
        """Exact bytes on each device by tree: parameters, gradients, optimizer, and ema and model_state where there are
        any."""
        sums = {
            tree: sum(leaf.bytes_per_device(self.axis_sizes) for leaf in leaves)
            for tree, leaves in self.trees().items()
        }
        return {tree: n for tree, n in sums.items() if n or tree not in ("ema", "model_state")}

    def whole_leaves(self) -> dict[str, LeafPlan]:
        """Parameters that no tree of a sharded stage splits, by path."""
        return {path: leaf for path, leaf in self.params.items() if leaf.dim is None}

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in self.params.values())


def make_plan(
    params: Mapping[str, AbstractParam],
    axis_sizes: Mapping[str, int],
    zero: ZeroConfig,
    precision: PrecisionConfig,
    optimizer: optax.GradientTransformation,
    model_state: Mapping[str, jax.ShapeDtypeStruct] | None = None,
    *,
    accumulating: bool = False,
    frozen: Sequence[str] = (),
    ema: bool = False,
) -> Plan:
    """The placement of every leaf of the training state.

    accumulating: gradients are summed over several micro-batches, so their tree has that sum's dtype. frozen: path
    patterns of parameters that are not trained. ema: a moving average of the weights is kept.

    Raises PlanError naming the parameter, dimension, size and axis size for a model's own spec that does not fit, and
    ConfigError for a pattern that matches nothing.
    """
    trained = trainable(params, frozen)
    kept = matching("precision.keep_float32", precision.keep_float32, params)
    axes, updated = zero_axes(zero, axis_sizes), precision.master or precision.params
    widest = max(axes.values(), key=len)
    placed = {
        path: _place(path, p.shape, p.stack_ndim, _own_spec(path, p, axis_sizes), widest, axis_sizes, zero)
        for path, p in params.items()
    }

    def dtype(path: str, wanted: str) -> Any:
        return stored_dtype(params[path].dtype, "float32" if path in kept else wanted)

    def tree(kind: str, wanted: str, paths: Iterable[str]) -> dict[str, LeafPlan]:
        return {
            path: replace(
                placed[path],
                dtype=dtype(path, wanted),
                zero_axes=_on_top(axes[kind], placed[path]),
                reason=_reason(placed[path], kind, _on_top(axes[kind], placed[path]), zero.stage),
            )
            for path in paths
        }

    at_rest, weights = tree("parameters", precision.params, params), tree("optimizer", updated, trained)
    return Plan(
        axis_sizes=dict(axis_sizes),
        stage=zero.stage,
        params=at_rest,
        compute={path: dtype(path, precision.compute) for path in params},
        accumulate={path: dtype(path, precision.accumulate) for path in trained},
        reduce={path: dtype(path, precision.reduce) for path in trained} if precision.reduce else {},
        initial={**tree("optimizer", precision.params, params), **weights},
        gradients=tree("gradients", _gradient_dtype(precision, accumulating), trained),
        weights=weights,
        master={path: leaf for path, leaf in weights.items() if leaf.dtype != at_rest[path].dtype},
        optimizer=_plan_optimizer(optimizer, weights, axes["optimizer"], axis_sizes, zero, precision.moments),
        ema={path: replace(leaf, dtype=widened(leaf.dtype)) for path, leaf in weights.items()} if ema else {},
        model_state=_plan_model_state(model_state or {}),
        loss_scale=_plan_loss_scale() if "float16" in (precision.params, precision.compute) else {},
    )


def _gradient_dtype(precision: PrecisionConfig, accumulating: bool) -> str:
    return precision.accumulate if accumulating else precision.reduce or precision.params


def _plan_model_state(model_state: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, LeafPlan]:
    reason = "whole: model state, not a parameter"
    return {path: _unsplit(path, leaf.shape, leaf.dtype, reason) for path, leaf in model_state.items()}


def _plan_loss_scale() -> dict[str, LeafPlan]:
    scalars = init_loss_scale(LossScaleConfig())
    return {name: _unsplit(name, (), x.dtype, "whole: scalar") for name, x in scalars.items()}


def trainable(paths: Collection[str], frozen: Sequence[str]) -> list[str]:
    """The paths that no pattern freezes, in their order. Raises ConfigError where none is left."""
    excluded = matching("train.frozen", frozen, paths)
    if len(excluded) == len(paths):
        raise ConfigError(f"train.frozen = {list(frozen)}: matches every parameter, so there is nothing to train.")
    return [path for path in paths if path not in excluded]


def zero_axes(zero: ZeroConfig, axis_sizes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Mesh axes each tree is split over; empty for a tree that the stage keeps whole.

    With both axes the entry is (data, replica), inner axis major: a gather over `replica` alone then yields the
    contiguous slice that a parameter sharded over `data` only holds.
    """
    groups = {"node": ("data",), "all": ("data", "replica")}
    group = tuple(a for a in groups[zero.group] if axis_sizes.get(a, 1) > 1)
    optimizer_group = tuple(a for a in groups[zero.optimizer_group or zero.group] if axis_sizes.get(a, 1) > 1)
    return {
        "parameters": group if zero.stage >= 3 else (),
        "gradients": group if zero.stage >= 2 else (),
        "optimizer": optimizer_group if zero.stage >= 1 else (),
    }


def stored_dtype(declared: Any, wanted: str | None) -> Any:
    """The wanted floating dtype for a floating leaf; anything else keeps its own."""
    return jnp.dtype(wanted) if wanted and jnp.issubdtype(declared, jnp.floating) else jnp.dtype(declared)


def choose_dim(
    shape: Sequence[int], stack_ndim: int, own_spec: Sequence[Entry], count: int
) -> tuple[int, tuple[int, ...]] | None:
    """The dim to split over `count` devices and the stored shape, or None where every dim is taken.

    The largest dim that divides; else the one that wastes least when padded to the next multiple (ties: the larger).
    """
    free = [d for d in range(stack_ndim, len(shape)) if own_spec[d] is None and shape[d] > 0]
    if not free:
        return None
    waste = {d: (-shape[d] % count) / shape[d] for d in free}
    dim = min(free, key=lambda d: (waste[d], -shape[d]))
    return dim, tuple(n + -n % count if d == dim else n for d, n in enumerate(shape))


def _place(
    path: str,
    shape: tuple[int, ...],
    stack_ndim: int,
    own_spec: tuple[Entry, ...],
    axes: tuple[str, ...],
    axis_sizes: Mapping[str, int],
    zero: ZeroConfig,
) -> LeafPlan:
    """Split over `axes` (those of the tree that is split most) or whole, and why; dtype and the axes of each tree are
    filled in later. Axes that the model's own spec has taken are not used again."""
    whole = _unsplit(path, shape, None, "", own_spec)
    gathered, min_elements = math.prod(shape[stack_ndim:]), zero.min_shard_elements
    count = axis_extent(_unused(axes, whole), axis_sizes)
    if not axes:
        return replace(whole, reason="whole: nothing to split over")
    if count == 1:
        return replace(whole, reason=f"whole: the model's own {own_spec} has taken {', '.join(axes)}")
    if len(shape) == stack_ndim:
        return replace(whole, reason="whole: scalar" + (" (a layer)" if stack_ndim else ""))
    if gathered < min_elements:
        a_layer = " a layer" if stack_ndim else ""
        return replace(whole, reason=f"whole: {gathered} elements{a_layer} < zero.min_shard_elements {min_elements}")
    chosen = choose_dim(shape, stack_ndim, own_spec, count)
    if chosen is None:
        return replace(whole, reason=f"whole: every dimension carries an axis of the model's own {own_spec}")
    dim, stored = chosen
    padding = f", padded to {stored[dim]}" if stored != shape else ""
    return replace(whole, stored_shape=stored, dim=dim, reason=f"dim {dim} ({shape[dim]}{padding}) over {count}")


def _reason(leaf: LeafPlan, tree: str, axes: tuple[str, ...], stage: int) -> str:
    if leaf.dim is None or axes:
        return leaf.reason
    return f"whole: {tree} at stage {stage}" + (
        f", but for the model's own {leaf.own_spec}" if any(leaf.own_spec) else ""
    )


def _unused(axes: tuple[str, ...], leaf: LeafPlan) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis not in leaf.own_axes)


def _on_top(axes: tuple[str, ...], leaf: LeafPlan) -> tuple[str, ...]:
    """The axes of a tree that a leaf is split over, beside those that the model itself splits it over."""
    return () if leaf.dim is None else _unused(axes, leaf)


def _unsplit(
    path: str, shape: Sequence[int], dtype: Any, reason: str, own_spec: tuple[Entry, ...] | None = None
) -> LeafPlan:
    own = (None,) * len(shape) if own_spec is None else own_spec
    return LeafPlan(path, tuple(shape), tuple(shape), dtype, own, None, (), reason)


def _own_spec(path: str, param: AbstractParam, axis_sizes: Mapping[str, int]) -> tuple[Entry, ...]:
    """The model's own spec, one entry a dim, checked against shape and mesh."""
    if len(param.spec) > len(param.shape):
        raise PlanError(f"{path}: its spec {param.spec} has more entries than its shape {param.shape} has dimensions.")
    spec = param.spec + (None,) * (len(param.shape) - len(param.spec))
    seen = set()
    for dim, entry in enumerate(spec):
        for axis in axis_names(entry):
            if axis not in axis_sizes:
                raise PlanError(
                    f"{path}: dim {dim} names axis {axis!r}, which the mesh has not. "
                    f"Its axes are {', '.join(axis_sizes)}; name one of them in the model's sharding."
                )
            if axis in seen:
                raise PlanError(
                    f"{path}: dim {dim} names axis {axis!r} again; an axis splits one dim of {param.shape}, but the "
                    f"model's own sharding is {param.spec}. Leave one of them out."
                )
            seen.add(axis)
        if param.shape[dim] % axis_extent(entry, axis_sizes):
            raise PlanError(
                f"{path}: dim {dim} of size {param.shape[dim]} does not divide over {entry!r} of size "
                f"{axis_extent(entry, axis_sizes)}, as the model's own {param.spec} asks. Change the size or the axis."
            )
    return spec


def _plan_optimizer(
    optimizer: optax.GradientTransformation,
    weights: Mapping[str, LeafPlan],
    axes: tuple[str, ...],
    axis_sizes: Mapping[str, int],
    zero: ZeroConfig,
    moments: str | None,
) -> Any:
    """LeafPlans in the structure of the optax state.

    An array under its parameter's path that has as many dims follows the parameter where it has the parameter's size
    along the dim that is split: moments do, and the scales of blocks along another dim. Of the rest it takes what its
    sizes share with the parameter's. Any other array is placed by its own shape. Scalars stay whole, and as the
    optimizer makes them for float32 weights: a sum or an estimate in the dtype of narrow ones would come to stand
    still. moments: the dtype of float arrays.
    """

    def abstract(dtype: Callable[[Any], Any]) -> Any:
        given = {path: jax.ShapeDtypeStruct(leaf.shape, dtype(leaf.dtype)) for path, leaf in weights.items()}
        with jax.numpy_dtype_promotion("standard"):  # as optax relies on
            return jax.eval_shape(optimizer.init, given)

    def place(keys: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, wide: jax.ShapeDtypeStruct) -> LeafPlan:
        # By path, not by optax.tree_map_params: that fails on masked states (measured: optax 0.2.8, contrib.muon).
        named = [key.key for key in keys if isinstance(key, jax.tree_util.DictKey) and key.key in weights]
        placed = _follow(weights[named[-1]], leaf.shape) if named else None
        if placed is None:
            placed = _place("", leaf.shape, 0, (None,) * len(leaf.shape), axes, axis_sizes, zero)
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        dtype = stored_dtype(leaf.dtype, moments) if leaf.ndim else wide.dtype
        return replace(placed, path=path, dtype=dtype, zero_axes=_on_top(axes, placed))

    return jax.tree_util.tree_map_with_path(place, abstract(lambda dtype: dtype), abstract(widened))


def _follow(param: LeafPlan, shape: tuple[int, ...]) -> LeafPlan | None:
    """An array of that shape placed as its parameter, padding included; None where it has another size along the dim
    that is split, or other dims."""
    if len(shape) != len(param.shape):
        return None
    shared = [n == own for n, own in zip(shape, param.shape, strict=True)]
    if not (all(shared) if param.dim is None else shared[param.dim]):
        return None
    stored = tuple(s if same else n for n, s, same in zip(shape, param.stored_shape, shared, strict=True))
    own_spec = tuple(entry if same else None for entry, same in zip(param.own_spec, shared, strict=True))
    return replace(param, shape=shape, stored_shape=stored, own_spec=own_spec)


def _leaves(tree: Any) -> Iterator[LeafPlan]:
    return iter(jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, LeafPlan)))
