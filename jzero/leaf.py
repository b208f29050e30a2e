"""One array of the training state: its shape, dtype and place."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

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
        return {axis for entry in self.own_spec for axis in axis_names(entry)}

    @property
    def whole(self) -> "LeafPlan":
        """The same leaf with only the model's own axes: what compute sees before padding is cut off."""
        return replace(self, zero_axes=())

    @property
    def padded(self) -> bool:
        return self.shape != self.stored_shape

    def bytes_per_device(self, axis_sizes: Mapping[str, int]) -> int:
        return math.prod(self.stored_shape) // spec_extent(self.spec, axis_sizes) * self.dtype.itemsize

    def pad(self, array: Any) -> Any:
        """True shape to stored shape, zeros beyond; numpy in, numpy out."""
        if not self.padded:
            return array
        xp = np if isinstance(array, np.ndarray) else jnp
        return xp.pad(array, [(0, s - n) for n, s in zip(self.shape, self.stored_shape, strict=True)])

    def cut(self, array: Any) -> Any:
        """Stored shape to true shape."""
        return array[tuple(slice(0, n) for n in self.shape)] if self.padded else array


def map_leaves(f: Callable[..., Any], plans: Any, *trees: Any) -> Any:
    """tree.map over a tree of LeafPlans and trees of its structure."""
    return jax.tree.map(f, plans, *trees, is_leaf=lambda x: isinstance(x, LeafPlan))


def axis_names(entry: Entry) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def axis_extent(entry: Entry, axis_sizes: Mapping[str, int]) -> int:
    return math.prod(axis_sizes[axis] for axis in axis_names(entry))


def spec_extent(spec: Iterable[Entry], axis_sizes: Mapping[str, int]) -> int:
    """Over how many devices a placement divides an array."""
    return math.prod(axis_extent(entry, axis_sizes) for entry in spec)
