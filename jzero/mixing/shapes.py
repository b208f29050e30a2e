"""Rules for what moves elements: reshapes, slices, lookups."""

import math
from collections.abc import Iterable
from typing import Any

from jax.extend import core

from jzero.mixing.elements import Rule, shape_of
from jzero.mixing.flow import (
    UNKNOWN,
    Flow,
    Layout,
    aligned,
    beside,
    lost,
    moved,
    picked,
    union,
    without,
)


def _reshape(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    flow, old, new = ins[0], shape_of(equation.invars[0]), shape_of(equation.outvars[0])
    if 0 in old or equation.params.get("dimensions") is not None:
        return lost(flow)
    behind = lambda shape: [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    before, after = behind(old), behind(new)
    overlap = lambda d, e: after[e] < before[d] * old[d] and before[d] < after[e] * new[e]
    uneven = frozenset(e for d in flow.uneven for e in range(len(new)) if overlap(d, e))
    if not flow.layout:
        return Flow(flow.terms, None, uneven)
    stride, rows = before[flow.layout.dim] * flow.layout.inner, flow.layout.rows
    for e in range(len(new)):
        if stride % after[e] == 0 and after[e] * new[e] % (stride * rows) == 0:
            packed = flow.layout.packed if new[e] == old[flow.layout.dim] else new[e] > rows
            return Flow(flow.terms, Layout(e, stride // after[e], rows, packed), uneven)
    return lost(flow)  # a dim of its own for parts of the rows


def _broadcast(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    return moved(ins[0], dict(enumerate(equation.params["broadcast_dimensions"])))


def _transpose(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    return moved(ins[0], {old: new for new, old in enumerate(equation.params["permutation"])})


def _squeeze(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    return moved(ins[0], without(len(shape_of(equation.invars[0])), equation.params["dimensions"]))


def _rev(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    return _cut(ins[0], equation.params["dimensions"])


def _cut(flow: Flow, dims: Iterable[int]) -> Flow:
    """Some of the elements along dims, or in another order."""
    return lost(flow) if flow.layout and flow.layout.dim in dims else picked(flow, dims)


def _window(flow: Flow, shape: tuple[int, ...], starts: Any, limits: Any, strides: Any = None) -> Flow:
    steps = strides or (1,) * len(shape)
    dims = {d for d, size in enumerate(shape) if limits[d] - starts[d] < size or steps[d] > 1}
    if flow.layout and flow.layout.dim in dims:
        # A stack of batches, views or microbatches, one behind the other, comes apart again.
        dim, block = flow.layout.dim, flow.layout.inner * flow.layout.rows
        if starts[dim] % block == 0 and limits[dim] % block == 0 and steps[dim] == 1:
            return picked(flow, dims)
    return _cut(flow, dims)


def _slice(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    names = ("start_indices", "limit_indices", "strides")
    return _window(ins[0], shape_of(equation.invars[0]), *(equation.params[name] for name in names))


def _split(equation: core.JaxprEqn, ins: list[Flow]) -> list[Flow]:
    shape, axis, start, outs = shape_of(equation.invars[0]), equation.params["axis"], 0, []
    for size in equation.params["sizes"]:
        starts, limits = [0] * len(shape), list(shape)
        starts[axis], limits[axis] = start, start + size
        outs.append(_window(ins[0], shape, starts, limits))
        start += size
    return outs


def _unstack(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    axis = equation.params["axis"]
    flow = _cut(ins[0], {axis})
    return moved(flow, without(len(shape_of(equation.invars[0])), {axis}))


def _joined(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    """concatenate, stack."""
    new = equation.primitive.name == "stack"
    axis = equation.params["axis" if new else "dimension"]
    if new:
        ndim = len(shape_of(equation.outvars[0]))
        ins = [moved(flow, {old: dim for dim, old in without(ndim, {axis}).items()}) for flow in ins]
    elif any(flow.layout and flow.layout.dim == axis for flow in ins) and not all(flow.layout for flow in ins):
        return UNKNOWN
    return beside(ins, {axis})


def _tile(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    return ins[0]


def _pad(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    dims = {d for d, sizes in enumerate(equation.params["padding_config"]) if tuple(sizes) != (0, 0, 0)}
    return beside([_cut(ins[0], dims), ins[1]], dims)


def _dynamic_slice(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    flow, *starts = ins
    sizes = zip(equation.params["slice_sizes"], shape_of(equation.invars[0]), strict=True)
    dims = {d for d, (size, all_of_it) in enumerate(sizes) if size < all_of_it}
    return _cut(flow, dims) if all(start.constant for start in starts) else lost(flow)


def _dynamic_update_slice(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    array, update, *starts = ins
    sizes = zip(shape_of(equation.invars[1]), shape_of(equation.invars[0]), strict=True)
    dims = {d for d, (size, all_of_it) in enumerate(sizes) if size < all_of_it}
    over_rows = any(flow.layout and flow.layout.dim in dims for flow in (array, update))
    if over_rows or not all(start.constant for start in starts):
        return UNKNOWN
    return beside([array, update], dims)


def _gather(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    (array, indices), dims = ins, equation.params["dimension_numbers"]
    shape, sizes = shape_of(equation.invars[0]), equation.params["slice_sizes"]
    ndim = len(shape_of(equation.outvars[0]))
    # Of an output's dims those of a slice come from the array, the others from the indices.
    kept = without(len(shape), {*dims.collapsed_slice_dims, *dims.operand_batching_dims})
    of_array = {old: dims.offset_dims[new] for old, new in kept.items()}
    of_indices = dict(enumerate(d for d in range(ndim) if d not in dims.offset_dims))
    pairs = dict(zip(dims.operand_batching_dims, dims.start_indices_batching_dims, strict=True))
    of_array |= {old: of_indices[index] for old, index in pairs.items()}
    cut = {d for d, size in enumerate(shape) if size > sizes[d] and d not in pairs}
    if not indices.separate or (indices.layout and not array.separate):
        return lost(array)
    if array.layout and (array.layout.dim in cut or array.layout.dim not in of_array):
        return UNKNOWN
    if indices.layout and indices.layout.dim not in of_indices:
        return UNKNOWN
    if not indices.layout:
        return moved(picked(array, cut), of_array)
    found, places = moved(array, of_array), moved(indices, of_indices)
    return aligned([found, places], union([found, places]), UNKNOWN)


def _scatter(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    (array, indices, updates), dims = ins, equation.params["dimension_numbers"]
    ndim = len(shape_of(equation.invars[0]))
    windows = without(ndim, {*dims.inserted_window_dims, *dims.operand_batching_dims})
    to_array = {dims.update_window_dims[new]: old for old, new in windows.items()}
    update_ndim = len(shape_of(equation.invars[2]))
    scattered = [d for d in range(update_ndim) if d not in dims.update_window_dims]
    pairs = dict(zip(dims.scatter_indices_batching_dims, dims.operand_batching_dims, strict=True))
    to_array |= {scattered[index]: old for index, old in pairs.items()}
    whole = {d for d, old in to_array.items() if shape_of(equation.invars[2])[d] == shape_of(equation.invars[0])[old]}
    to_array = {d: to_array[d] for d in whole}
    if (array.layout and array.layout.dim not in to_array.values()) or not indices.separate:
        return UNKNOWN
    if updates.layout and updates.layout.dim not in to_array:
        return UNKNOWN
    if indices.layout and indices.layout.dim not in pairs:
        return UNKNOWN
    updates = moved(updates, to_array)
    places = moved(indices, pairs) if indices.layout else indices
    if indices.layout and not (array.separate and updates.separate):
        return UNKNOWN
    added = equation.primitive.name != "scatter" and not (array.separate and updates.separate)
    if added and equation.primitive.name not in ("scatter-add", "scatter-sub"):
        return UNKNOWN
    written = beside([array, updates], range(ndim))
    return aligned([written, places], union([written, places]), UNKNOWN) if indices.layout else written


RULES: dict[str, Rule] = {
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "rev": _rev,
    "slice": _slice,
    "split": _split,
    "unstack": _unstack,
    "concatenate": _joined,
    "stack": _joined,
    "tile": _tile,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), _scatter),
}
