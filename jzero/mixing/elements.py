"""Rules for what works element by element, and for reductions and what else works along some dims.

A rule is a function of an equation and the flows of its inputs. It gives the flow of all its outputs, or a list.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jzero.mixing.flow import (
    MIXED,
    PAIRED,
    UNKNOWN,
    Effect,
    Flow,
    Lump,
    aligned,
    beside,
    clipped,
    either,
    inverse,
    linear,
    moved,
    nonlinear,
    product,
    reduced,
    summed,
    union,
    without,
)

Rule = Callable[[core.JaxprEqn, list[Flow]], Flow | list[Flow]]


def shape_of(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def dtype_of(atom: Any) -> Any:
    return atom.aval.dtype


def inexact(atom: Any) -> bool:
    return jnp.issubdtype(dtype_of(atom), jnp.inexact)


# Element by element.


def _add(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    return aligned(ins, union(ins), PAIRED)


def _mul(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    return aligned(ins, product(*ins), MIXED)


def _div(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    if not inexact(equation.outvars[0]):
        return nonlinear(aligned(ins, union(ins), MIXED))
    return _mul(equation, [ins[0], inverse(ins[1])])


def _integer_pow(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    return inverse(ins[0]) if equation.params["y"] == -1 else nonlinear(ins[0])


def _function(kind: Callable[[Flow], Flow]) -> Rule:
    return lambda equation, ins: kind(aligned(ins, union(ins), MIXED))


def _clip(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    if any(flow.effect is Effect.ROWS for flow in ins) and not all(flow.separate for flow in ins):
        return UNKNOWN  # a bound on rows that is made of all rows, and may never hold one back
    return clipped(aligned(ins, union(ins), MIXED))


def _convert(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    rounds = inexact(equation.invars[0]) and not inexact(equation.outvars[0])
    to_bool = jnp.issubdtype(equation.params["new_dtype"], jnp.bool_)
    return nonlinear(ins[0]) if rounds or to_bool else ins[0]


def _select(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
    which, *cases = ins
    if which.value is not None:
        return cases[int(which.value)]
    if which.constant and not shape_of(equation.invars[0]):
        return either(cases)
    chosen = beside(cases, range(len(shape_of(equation.outvars[0]))))
    if which.constant:
        return chosen
    if which.separate:
        return aligned([which, chosen], product(which, chosen), MIXED)
    # where(count > 0, count, 1), where(count > 0, total / count, 0)
    if chosen.separate or (chosen.layout and Lump.MIXED not in chosen.terms):
        return UNKNOWN
    return clipped(chosen)


# Reductions.


def _reduction(kind: Callable[[Flow], Flow]) -> Rule:
    def rule(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
        flow, axes = ins[0], equation.params["axes"]
        if kind is linear:
            flow = summed(flow, axes)
        elif flow.layout and flow.layout.dim in axes:
            return UNKNOWN
        else:
            flow = kind(reduced(flow, axes))
        return moved(flow, without(len(shape_of(equation.invars[0])), axes))

    return rule


def _cumulative(kind: Callable[[Flow], Flow]) -> Rule:
    def rule(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
        over_rows = ins[0].layout and ins[0].layout.dim == equation.params["axis"]
        return UNKNOWN if over_rows or Lump.PAIRED in ins[0].terms else kind(ins[0])

    return rule


def _pooling(kind: Callable[[Flow], Flow]) -> Rule:
    def rule(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
        names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation", "padding")
        each = zip(*(equation.params[name] for name in names), strict=True)
        dims = {d for d, (*sizes, padding) in enumerate(each) if sizes != [1] * 4 or tuple(padding) != (0, 0)}
        over_rows = ins[0].layout and ins[0].layout.dim in dims
        return UNKNOWN if over_rows or Lump.PAIRED in ins[0].terms else kind(ins[0])

    return rule


def _within(dims_of: Callable[[core.JaxprEqn, int], Iterable[int]]) -> Rule:
    """What works along some dims only, and on everything else one by one."""

    def rule(equation: core.JaxprEqn, ins: list[Flow]) -> Flow:
        ndims = {len(shape_of(v)) for v in equation.invars}
        layouts = {flow.layout for flow in ins if flow.layout}
        if any(flow.mixed_throughout for flow in ins):
            return MIXED
        if len(ndims) > 1 or len(layouts) != 1 or not all(flow.separate for flow in ins):
            return UNKNOWN
        (layout,), (ndim,) = layouts, ndims
        return UNKNOWN if layout.dim in dims_of(equation, ndim) else Flow(union(ins), layout)

    return rule


def _last(count: int) -> Rule:
    return _within(lambda equation, ndim: range(ndim - count, ndim))


# What is worked out of numbers in the program: jnp.var, say, asks whether it divides by more than zero.
SCALARS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "convert_element_type": lambda value: value,
}
LINEAR = (
    *("neg", "real", "imag", "conj", "copy", "name", "stop_gradient", "reduce_precision"),
    *("sharding_constraint", "layout_constraint", "reshard", "pvary"),
)
CLIPPED = ("max", "min", "abs", "sign", "clamp")
NONLINEAR = (
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "sin", "sinh", "tan", "tanh"),
    *("exp", "exp2", "expm1", "log", "log1p", "log2", "logistic", "pow", "sqrt", "rsqrt", "cbrt", "square"),
    "one_minus_square",
    *("erf", "erfc", "erf_inv", "lgamma", "digamma", "polygamma", "igamma", "igammac", "zeta", "bessel_i0e"),
    *("bessel_i1e", "regularized_incomplete_beta", "floor", "ceil", "round", "rem", "nextafter", "is_finite"),
    *("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to", "and", "or", "not", "xor", "mulhi"),
    *("shift_left", "shift_right_arithmetic", "shift_right_logical", "population_count", "clz"),
)
RULES: dict[str, Rule] = {
    **{name: _function(linear) for name in LINEAR},
    **dict.fromkeys(CLIPPED, _clip),
    **{name: _function(nonlinear) for name in NONLINEAR},
    **dict.fromkeys(("add", "sub", "add_any", "complex"), _add),
    "mul": _mul,
    "div": _div,
    "integer_pow": _integer_pow,
    "convert_element_type": _convert,
    "select_n": _select,
    "optimization_barrier": lambda equation, ins: ins,
    "reduce_sum": _reduction(linear),
    **{f"reduce_{name}": _reduction(clipped) for name in ("max", "min")},
    **{f"reduce_{name}": _reduction(nonlinear) for name in ("prod", "and", "or", "xor")},
    **{name: _reduction(nonlinear) for name in ("argmax", "argmin")},
    "cumsum": _cumulative(linear),
    **{name: _cumulative(clipped) for name in ("cummax", "cummin")},
    **{name: _cumulative(nonlinear) for name in ("cumprod", "cumlogsumexp")},
    "reduce_window_sum": _pooling(linear),
    **{f"reduce_window_{name}": _pooling(clipped) for name in ("max", "min")},
    "sort": _within(lambda equation, ndim: {equation.params["dimension"]}),
    "top_k": _within(lambda equation, ndim: {equation.params.get("axis", ndim - 1) % ndim}),
    "fft": _within(lambda equation, ndim: range(ndim - len(equation.params["fft_lengths"]), ndim)),
    **{name: _last(2) for name in ("cholesky", "triangular_solve", "eigh", "svd", "lu")},
}
