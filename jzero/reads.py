"""Where a program reads its parameters, found before it is differentiated."""

from typing import Any

from jax.extend import core

from jzero.jaxprs import own_equations
from jzero.usepoint import is_use_point


def read_once(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The program with one read of each parameter instead of several: a table at both ends of a model is gathered, and
    its gradient reduced, once. Only its own equations: blocks of a loop or of rematerialisation read for themselves."""
    first: dict[Any, Any] = {}
    instead: dict[Any, Any] = {}
    kept = []
    replaced = lambda variables: [v if isinstance(v, core.Literal) else instead.get(v, v) for v in variables]
    for equation in own_equations(program):
        equation = equation.replace(invars=replaced(equation.invars))
        if is_use_point(equation.primitive, equation.params):
            read = first.setdefault(tuple(equation.invars), equation.outvars)
            if read is not equation.outvars:
                instead |= zip(equation.outvars, read, strict=True)
                continue
        kept.append(equation)
    return program.replace(jaxpr=program.jaxpr.replace(eqns=kept, outvars=replaced(program.jaxpr.outvars)))
