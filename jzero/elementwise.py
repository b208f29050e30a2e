"""What an optimizer needs: whether jzero can drive it, and how far it looks beyond single elements."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.extend import core

from jzero.errors import ModelError
from jzero.jaxprs import Program, own_equations, subprograms


def assert_drivable(tx: Any, params: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raise ModelError unless `tx` is an optax transformation that `tx.update(gradients, state, params)` drives."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ModelError(f"optimizer is {tx!r}: give an optax transformation such as optax.adamw(1e-3), called.")
    _trace_update(tx, dict(params))


def is_elementwise(tx: optax.GradientTransformation, params: Mapping[str, jax.ShapeDtypeStruct]) -> bool:
    """Whether `tx` moves every element by that element's own gradient, state and value alone.

    Such an optimizer may run on padded or sliced arrays; any other (norms, factored moments,
    orthogonalisation, noise) must see the true shapes. Read from the program of `tx.update`: True only
    where every operation on an array with dimensions is element by element and no number in it comes from a
    shape. Whatever is unknown is False. Scalars, such as counts and learning rates, may be computed in any
    way.

    Raises ModelError like `assert_drivable`.
    """
    params = dict(params)
    program = _trace_update(tx, params)
    if not _program_is_elementwise(program):
        return False
    # Far larger, to cross any size at which it would change its ways. Shapes only, so this costs nothing.
    larger = {p: jax.ShapeDtypeStruct([n + 4096 for n in x.shape], x.dtype) for p, x in params.items()}
    try:
        return _constants(program) == _constants(_trace_update(tx, larger))
    except Exception:  # It takes these shapes only, so shapes matter to it.
        return False


# fmt: off
# Primitives of jax.lax that compute element i of the result from element i of each operand and from scalars.
ELEMENTWISE_PRIMITIVES = frozenset((
    "add", "add_any", "sub", "mul", "div", "rem", "neg", "sign", "abs", "square", "sqrt", "rsqrt", "cbrt",
    "integer_pow", "pow", "exp", "exp2", "expm1", "log", "log1p", "logistic",
    "erf", "erfc", "erf_inv", "lgamma", "digamma",
    "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh",
    "floor", "ceil", "round", "nextafter", "max", "min", "clamp", "select_n",
    "eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to", "is_finite",
    "and", "or", "xor", "not", "shift_left", "shift_right_logical", "shift_right_arithmetic",
    "population_count", "real", "imag", "conj", "complex", "copy", "copy_p", "convert_element_type",
    "reduce_precision",
))
# Primitives that run programs of their own on their operands as they are. Not scan, which slices them.
CALL_PRIMITIVES = frozenset((
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
    "checkpoint", "remat", "remat2", "cond", "while",
))
# fmt: on


def _trace_update(tx: optax.GradientTransformation, params: dict[str, Any]) -> core.ClosedJaxpr:
    try:
        # optax relies on implicit promotion (Adam's b1**count), which a caller's strict mode forbids.
        with jax.numpy_dtype_promotion("standard"):
            return jax.make_jaxpr(tx.update)(params, jax.eval_shape(tx.init, params), params)
    except Exception as error:
        raise ModelError(
            f"optimizer.update(gradients, state, params) raised {type(error).__name__}: {error}. jzero passes these "
            "three only, and parameters as a flat dict of arrays, so an optimizer that also wants the loss, a function "
            "to call, or parameters of another kind cannot be driven"
        ) from error


def _program_is_elementwise(program: Any) -> bool:
    return not any(np.ndim(c) for c in _captured(program)) and all(
        _equation_is_elementwise(equation) for equation in own_equations(program)
    )


def _equation_is_elementwise(equation: Any) -> bool:
    name = equation.primitive.name
    shapes = {_shape(x) for x in (*equation.invars, *equation.outvars)} - {()}
    if not shapes:
        return True
    # An array written into the program holds one number for one element and another for the next.
    if any(isinstance(x, core.Literal) and _shape(x) for x in equation.invars):
        return False
    if name in CALL_PRIMITIVES:
        inner = subprograms(equation)
        return bool(inner) and all(map(_program_is_elementwise, inner))
    if name == "broadcast_in_dim":
        return not any(map(_shape, equation.invars))
    return name in ELEMENTWISE_PRIMITIVES and len(shapes) == 1


def _constants(program: Any) -> list[str]:
    """The operations of a program in order, with every number written into it."""
    found = [repr(c) for c in _captured(program)]
    for equation in own_equations(program):
        literals = (x.val for x in equation.invars if isinstance(x, core.Literal))
        settings = (v for v in equation.params.values() if isinstance(v, int | float))
        found += [equation.primitive.name, *map(repr, literals), *map(repr, settings)]
        for inner in subprograms(equation):
            found += _constants(inner)
    return found


def _captured(program: Program) -> Sequence[Any]:
    """The values a program closes over."""
    return program.consts if isinstance(program, core.ClosedJaxpr) else ()


def _shape(variable: Any) -> tuple[int, ...]:
    """Of a program's variable; () for what is no array, such as a token."""
    return getattr(variable.aval, "shape", ())
