"""Rules for products of arrays: matrix products, convolutions, fused attention."""

import math
from dataclasses import replace

from jax.extend import core

from jzero.mixing.elements import Rule, shape_of
from jzero.mixing.flow import (
    MIXED,
    UNKNOWN,
    Flow,
    Lump,
    aligned,
    lost,
    met,
    moved,
    product,
    reduced,
    summed,
    union,
    without,
)


def _dot_general(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    contracting, batch = equation.params["dimension_numbers"]
    shapes = [shape_of(v) for v in equation.invars]
    places = _places(shapes, contracting, batch)
    sides = [
        moved(replace(reduced(flow, dims), layout=None), place)
        for flow, dims, place in zip(ins, contracting, places, strict=True)
    ]
    result = aligned(sides, product(*ins), MIXED)
    # Where the rows of each side go: a dim of the output, or -1 - n, summed along the n-th pair of dims.
    ends = [
        (flow.layout, place.get(flow.layout.dim, -1 - [*dims, flow.layout.dim].index(flow.layout.dim)))
        for flow, place, dims in zip(ins, places, contracting, strict=True)
        if flow.layout
    ]
    if len(ends) == 2:
        ((left, left_end), (right, right_end)) = ends
        if left_end != right_end:
            uneven = frozenset({left_end, right_end}) if min(left_end, right_end) >= 0 else frozenset[int]()
            return met([left, right], Flow(MIXED.terms, None, uneven))
        if left.inner != right.inner:
            return UNKNOWN
    elif ends and ends[0][1] < 0:
        # A vector adds rows up, a matrix may only put them in another order.
        length = math.prod(shapes[0][dim] for dim in contracting[0])
        if math.prod(shapes[1] if ins[0].layout else shapes[0]) > length:
            return lost(result)
    for layout, end in ends:
        result = replace(result, layout=replace(layout, dim=end))
    return summed(result, range(-len(contracting[0]), 0)) if contracting[0] else result


def _places(shapes: list[tuple[int, ...]], contracting: tuple, batch: tuple) -> list[dict[int, int]]:
    """For each side, dim -> its place in the output: batch dims, the left side's own, the right side's own."""
    places, first = [], len(batch[0])
    for shape, summed_dims, batch_dims in zip(shapes, contracting, batch, strict=True):
        own = without(len(shape), {*summed_dims, *batch_dims})
        places.append({dim: first + place for dim, place in own.items()} | {d: n for n, d in enumerate(batch_dims)})
        first += len(own)
    return places


def _convolution(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    (images, kernel), dims = ins, equation.params["dimension_numbers"]
    terms = product(images, kernel)
    ours = not images.layout or images.layout.dim == dims.lhs_spec[0]
    if not ours or kernel.layout or equation.params["batch_group_count"] > 1 or Lump.PAIRED in terms:
        return lost(images)
    uneven = range(len(shape_of(equation.outvars[0]))) if images.uneven or kernel.uneven else ()
    layout = images.layout and replace(images.layout, dim=dims.out_spec[0])
    return Flow(terms, layout, frozenset(uneven))


def _attention(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    """cuDNN's kernel: the batch is the first dim of all that it takes and gives."""
    layouts = {flow.layout for flow in ins if flow.layout}
    told = len(layouts) == 1 and all(layout.dim == 0 for layout in layouts) and all(flow.separate for flow in ins)
    return Flow(union(ins), layouts.pop()) if told else UNKNOWN


RULES: dict[str, Rule] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "dot_product_attention_fwd_wrapper": _attention,
}
