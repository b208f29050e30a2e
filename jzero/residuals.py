"""What a backward pass keeps of the forward pass: everything but weights as they were read."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from jzero.jaxprs import Program, equations, own_equations, replace_equations
from jzero.usepoint import UsePoint, is_use_point

_MOVES = frozenset({"slice", "transpose", "reshape", "squeeze", "convert_element_type", "copy", "name"})


def residual_policy(points: Mapping[str, UsePoint]) -> Callable[..., bool]:
    """A rematerialisation policy that saves everything a plain backward pass saves, except weights as they were read.

    A gathered weight kept for the backward pass undoes stage 3. Refusing its name alone is not enough (its producer is
    saved instead), so the whole use point is refused, and with it every cheap move (cut, transpose, reshape, cast) of
    an array as large as a weight.
    """
    sizes = {
        math.prod(shape[stack:])
        for use in points.values()
        for shape in (use.shape, use.stored_shape)
        for stack in range((use.dim or 0) + 1)
    }

    def saveable(primitive: Any, *avals: Any, **params: Any) -> bool:
        # JAX rounds what it saves and cannot round complex numbers (jax 0.10.2): they are computed again.
        dtypes = [params.get("new_dtype"), *(getattr(a, "dtype", None) for a in avals)]
        if primitive.name in ("complex", "fft") or any(d is not None and _is_complex(d) for d in dtypes):
            return False
        # JAX asks about a use point as a whole first.
        if is_use_point(primitive, params) or _gathers(primitive, params):
            return False
        return not (primitive.name in _MOVES and any(getattr(a, "size", 0) in sizes for a in avals))

    return saveable


def _gathers(primitive: core.Primitive, params: Mapping[str, Any]) -> bool:
    """Whether it is how a use point gathers; by shard_map where the model splits the parameter itself."""
    if primitive.name == "shard_map":
        return any(_gathers(inner.primitive, inner.params) for inner in own_equations(params["jaxpr"]))
    return primitive in (primitives.sharding_constraint_p, primitives.all_gather_p)


def _is_complex(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


def forget_weights(fn: Callable[..., Any], points: Mapping[str, UsePoint], *, gathers: bool) -> Callable[..., Any]:
    """fn, whose backward pass reads the weights anew instead of keeping what the forward pass read.

    gathers: reading a weight gathers it. A scan over layers forgets in its body, even where nothing is gathered: JAX
    recomputes a scan as one, stacking the weights of all layers as they were read, at stages 1 and 2 a second copy of
    the whole stack. A program that holds rematerialised blocks of its own is taken as it is: its gathers are freed
    already, and JAX applies the outermost policy inside inner blocks too (measured: every activation saved).
    """
    policy = residual_policy(points)

    def forgetful(*args: Any) -> Any:
        program, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        rematerialised = any(equation.primitive is primitives.remat_p for equation in equations(program))
        if not rematerialised:
            program = _forget_in_scans(program, {use.held_shape for use in points.values()}, policy)
        run = core.jaxpr_as_fun(program)
        if gathers and not rematerialised:
            run = jax.checkpoint(run, policy=policy)
        return jax.tree.unflatten(jax.tree.structure(out), run(*jax.tree.leaves(args)))

    return forgetful


def _forget_in_scans(program: Program, stacks: set[tuple[int, ...]], policy: Callable[..., bool]) -> Program:
    """The program with the body of every scan over one of the stacks rematerialised under the policy."""

    def forget(equation: core.JaxprEqn) -> core.JaxprEqn:
        if equation.primitive is primitives.jit_p:
            body = _forget_in_scans(equation.params["jaxpr"], stacks, policy)
        elif equation.primitive is primitives.scan_p and _scans_over(equation, stacks):
            # The loops of a scan are separate programs, so there is nothing to keep XLA from merging.
            run = jax.checkpoint(core.jaxpr_as_fun(equation.params["jaxpr"]), policy=policy, prevent_cse=False)
            body = jax.make_jaxpr(run)(*equation.params["jaxpr"].in_avals)
        else:
            return equation
        return equation.replace(params={**equation.params, "jaxpr": body})

    return replace_equations(program, [forget(equation) for equation in own_equations(program)])


def _scans_over(scan: core.JaxprEqn, stacks: set[tuple[int, ...]]) -> bool:
    """Whether the scan takes one of the stacks apart, layer by layer."""
    outside = [getattr(operand.aval, "shape", None) for operand in scan.invars]
    inside = [getattr(aval, "shape", None) for aval in scan.params["jaxpr"].in_avals]
    return any(x in stacks and x != y for x, y in zip(outside, inside, strict=True))
