"""Reading JAX programs before compilation."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Every equation of a program, those of nested programs (jit, scan, cond, custom_vjp, ...) after the one that holds them."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in subprograms(equation):
            yield from equations(inner)


def subprograms(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """The programs an equation holds as parameters."""
    found = jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr)
    )
    return [_open(x) for x in found if isinstance(x, core.Jaxpr | core.ClosedJaxpr)]


def _open(program: Any) -> core.Jaxpr:
    return program.jaxpr if isinstance(program, core.ClosedJaxpr) else program
