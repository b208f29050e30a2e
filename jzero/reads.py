"""Where a program reads its parameters, found before it is differentiated."""

from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend import core

from jzero.errors import CollectivesError
from jzero.jaxprs import Program, equations, opened, own_equations, source_line, subprograms
from jzero.usepoint import carried_gradient, is_use_point

# What may be done to a stored array, and to its carrier, before it is read: a layer is taken out of a stack, or no
# gradient wanted.
_HANDS_ON = frozenset({"slice", "dynamic_slice", "squeeze", "reshape", "copy", "stop_gradient"})


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


def assert_reads(program: core.ClosedJaxpr, stored: Mapping[Any, str]) -> None:
    """Raise CollectivesError where a program takes a stored array as it is, past its use point: there is no gradient
    of that where the loss is differentiated by carriers, and at stage 3 the array is a device's part. And where it
    differentiates by one: that gradient goes to the carrier.

    stored: the path of each input variable that holds a parameter.
    """
    for equation in equations(program):
        if path := carried_gradient(equation):
            raise CollectivesError(
                f"{path}: the loss differentiates by the model itself; under zero.collectives = explicit the gradient "
                "is a device's own, and not where the parameter is. Set zero.collectives: xla, or differentiate by "
                "nnx.to_pure_dict of its state"
            )
    for path, where in _raw_reads(program, dict(stored)):
        raise CollectivesError(
            f"{path}: the model or the loss takes the stored array instead of reading the parameter ({where}); under "
            "zero.collectives = explicit that has no gradient. Read the variable, param[...] (or nnx.to_pure_dict of "
            "a state), or set zero.collectives: xla"
        )


def _raw_reads(program: Program, stored: dict[Any, str]) -> Iterator[tuple[str, str]]:
    """(path, primitive and source line); puts into `stored` what the program hands on of them."""
    for equation in own_equations(program):
        if is_use_point(equation.primitive, equation.params):
            continue
        taken = {i: stored[v] for i, v in enumerate(equation.invars) if not isinstance(v, core.Literal) and v in stored}
        if not taken:
            continue
        skipped, bodies = _aligned(equation)
        for body in bodies:
            held = {body.invars[i - skipped]: path for i, path in taken.items() if i >= skipped}
            yield from _raw_reads(body, held)
            handed = zip(equation.outvars, body.outvars, strict=True)
            stored |= {out: held[v] for out, v in handed if not isinstance(v, core.Literal) and v in held}
        if not bodies and equation.primitive.name in _HANDS_ON:
            stored |= dict.fromkeys(equation.outvars, next(iter(taken.values())))
        elif not bodies:
            where = f"{equation.primitive.name} at {source_line(equation)}"
            yield from ((path, where) for path in taken.values())


def _aligned(equation: core.JaxprEqn) -> tuple[int, list[core.Jaxpr]]:
    """The programs that an equation runs on its operands, one for one but for the first so many, which are left out."""
    skipped = {"cond": 1, "while": equation.params.get("cond_nconsts", 0)}.get(equation.primitive.name, 0)
    wanted = len(equation.invars) - skipped, len(equation.outvars)
    bodies = map(opened, subprograms(equation))
    return skipped, [body for body in bodies if (len(body.invars), len(body.outvars)) == wanted]
