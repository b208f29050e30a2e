"""Where every byte of the training state lives: one pure function of abstract shapes, axis sizes and configuration.

ZeRO (arXiv 1910.02054, section 5) is four trees of the model's shape: parameters at rest, gradients, master weights
and optimizer state. A stage says which of them are sharded; this module says how. It needs no devices: the same call
plans a 64-device job on a laptop.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jzero.config import PrecisionConfig, ZeroConfig
from jzero.errors import PlanError

Entry = str | tuple[str, ...] | None


@dataclass(frozen=True)
class AbstractParam:
    """A parameter before it exists.

    shape: true shape, leading stack dims of scanned layers included. dtype: as the model creates it.
    stack_ndim: how many leading dims are layer stacks; ZeRO never splits those.
    spec: the model's own placement over mesh axes, one entry a dim (empty: none); it stays, ZeRO goes on top.
    """

    shape: tuple[int, ...]
    dtype: Any
    stack_ndim: int = 0
    spec: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class LeafPlan:
    """One array of the state: its true and stored shape, dtype, placement and the reason for it.

    dim is the dimension ZeRO splits in some tree of this leaf (and pads, where stored_shape exceeds shape), else None.
    zero_axes are the mesh axes it is split over *in this tree*; empty means whole.
    """

    path: str
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    dtype: Any
    own_spec: tuple[Entry, ...]
    dim: int | None
    zero_axes: tuple[str, ...]
    reason: str

    @property
    def spec(self) -> PartitionSpec:
        entries = list(self.own_spec)
        if self.zero_axes and self.dim is not None:
            entries[self.dim] = self.zero_axes
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    @property
    def own_axes(self) -> set[str]:
        """The mesh axes that the model itself splits the leaf over."""
        return {axis for entry in self.own_spec for axis in _names(entry)}

    @property
    def whole(self) -> "LeafPlan":
        """The same leaf with only the model's own axes: what compute sees before padding is cut off."""
        return replace(self, zero_axes=())

    @property
    def padded(self) -> bool:
        return self.shape != self.stored_shape

    def bytes_per_device(self, axis_sizes: Mapping[str, int]) -> int:
        elements = math.prod(self.stored_shape)
        for entry in self.spec:
            elements //= _extent(entry, axis_sizes)
        return elements * self.dtype.itemsize

    def pad(self, array: Any) -> Any:
        """True shape to stored shape, zeros beyond; numpy in, numpy out."""
        if not self.padded:
            return array
        xp = np if isinstance(array, np.ndarray) else jnp
        return xp.pad(array, [(0, s - n) for n, s in zip(self.shape, self.stored_shape, strict=True)])

    def cut(self, array: Any) -> Any:
        """Stored shape to true shape."""
        return array[tuple(slice(0, n) for n in self.shape)] if self.padded else array


@dataclass(frozen=True)
class Plan:
    """The placement of a whole training state, by parameter path.

    weights: what the optimizer updates, placed as it updates it. master: the same where that is a copy of its own, else
    empty. optimizer: LeafPlans in the structure of the optax state.
    """

    axis_sizes: Mapping[str, int]
    stage: int
    params: Mapping[str, LeafPlan]
    gradients: Mapping[str, LeafPlan]
    weights: Mapping[str, LeafPlan]
    master: Mapping[str, LeafPlan]
    optimizer: Any
    model_state: Mapping[str, LeafPlan]

    def trees(self) -> dict[str, list[LeafPlan]]:
        """The leaves by tree; `optimizer` holds the master weights too, as the papers count them."""
        return {
            "parameters": list(self.params.values()),
            "gradients": list(self.gradients.values()),
            "optimizer": [*self.master.values(), *_leaves(self.optimizer)],
            "model_state": list(self.model_state.values()),
        }

    def bytes_per_device(self) -> dict[str, int]:
        """Exact bytes on each device by tree: parameters, gradients, optimizer, and model_state where there is any."""
        sums = {
            tree: sum(leaf.bytes_per_device(self.axis_sizes) for leaf in leaves)
            for tree, leaves in self.trees().items()
        }
        return {tree: n for tree, n in sums.items() if n or tree != "model_state"}

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
) -> Plan:
    """The placement of every leaf of the training state.

    accumulating: gradients are summed over several micro-batches, so their tree has the accumulation dtype
    (`precision.accumulate`) instead of the parameters' own. Raises PlanError naming the parameter, dimension, size and
    axis size for a model's own spec that does not fit.
    """
    axes = zero_axes(zero, axis_sizes)
    widest = max(axes.values(), key=len)
    placed = {
        path: _place(path, p.shape, p.stack_ndim, _own_spec(path, p, axis_sizes), widest, axis_sizes, zero)
        for path, p in params.items()
    }

    def tree(kind: str, dtype: str | None) -> dict[str, LeafPlan]:
        return {
            path: replace(
                leaf,
                dtype=stored_dtype(params[path].dtype, dtype),
                zero_axes=_on_top(axes[kind], leaf),
                reason=_reason(leaf, kind, _on_top(axes[kind], leaf), zero.stage),
            )
            for path, leaf in placed.items()
        }

    weights = tree("optimizer", precision.master or precision.params)
    return Plan(
        axis_sizes=dict(axis_sizes),
        stage=zero.stage,
        params=tree("parameters", precision.params),
        gradients=tree("gradients", precision.accumulate if accumulating else precision.params),
        weights=weights,
        master=weights if has_master(precision) else {},
        optimizer=_plan_optimizer(optimizer, weights, axes["optimizer"], axis_sizes, zero),
        model_state={
            path: _unsplit(path, leaf.shape, leaf.dtype, "whole: model state, not a parameter")
            for path, leaf in (model_state or {}).items()
        },
    )


def has_master(precision: PrecisionConfig) -> bool:
    """Whether the optimizer works on a wider copy of the parameters, kept in its own tree."""
    return precision.master is not None and precision.master != precision.params


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


def map_leaves(f: Callable[..., Any], plans: Any, *trees: Any) -> Any:
    """tree.map over a tree of LeafPlans and trees of its structure."""
    return jax.tree.map(f, plans, *trees, is_leaf=lambda x: isinstance(x, LeafPlan))


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
    count = _extent(_unused(axes, whole), axis_sizes)
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
        for axis in _names(entry):
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
        if param.shape[dim] % _extent(entry, axis_sizes):
            raise PlanError(
                f"{path}: dim {dim} of size {param.shape[dim]} does not divide over {entry!r} of size "
                f"{_extent(entry, axis_sizes)}, as the model's own {param.spec} asks. Change the size or the axis."
            )
    return spec


def _plan_optimizer(
    optimizer: optax.GradientTransformation,
    weights: Mapping[str, LeafPlan],
    axes: tuple[str, ...],
    axis_sizes: Mapping[str, int],
    zero: ZeroConfig,
) -> Any:
    """LeafPlans in the structure of the optax state.

    An array under its parameter's path that has as many dims follows the parameter where it has the parameter's size
    along the dim that is split: moments do, and the scales of blocks along another dim. Of the rest it takes what its
    sizes share with the parameter's. Any other array is placed by its own shape; scalars stay whole.
    """
    abstract = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in weights.items()}

    def place(keys: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> LeafPlan:
        # By path, not by optax.tree_map_params: that fails on masked states (measured: optax 0.2.8, contrib.muon).
        named = [key.key for key in keys if isinstance(key, jax.tree_util.DictKey) and key.key in weights]
        placed = _follow(weights[named[-1]], leaf.shape) if named else None
        if placed is None:
            placed = _place("", leaf.shape, 0, (None,) * len(leaf.shape), axes, axis_sizes, zero)
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        return replace(placed, path=path, dtype=leaf.dtype, zero_axes=_on_top(axes, placed))

    with jax.numpy_dtype_promotion("standard"):  # as optax relies on
        state = jax.eval_shape(optimizer.init, abstract)
    return jax.tree_util.tree_map_with_path(place, state)


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


def _names(entry: Entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _extent(entry: Entry, axis_sizes: Mapping[str, int]) -> int:
    return math.prod(axis_sizes[axis] for axis in _names(entry))
