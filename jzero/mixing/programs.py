"""Follows a batch through a program, loops and branches included."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jzero.jaxprs import Program, opened, own_equations, scan_operands, source_line, subprograms
from jzero.mixing import elements, products, shapes
from jzero.mixing.elements import Rule, dtype_of, inexact
from jzero.mixing.flow import (
    INDEPENDENT,
    ROW,
    UNKNOWN,
    ZERO,
    Effect,
    Flow,
    Layout,
    beside,
    either,
    lost,
    moved,
    number,
    settled,
)

# A loop whose flows still change after so many rounds is not followed.
MOST_ROUNDS = 8
NOWHERE = " at "


def batch_flow(program: core.ClosedJaxpr, rows: Sequence[bool]) -> list[Flow]:
    """What each output is of the batch: its `effect`, and for MIXED `where` that began.

    rows: for each input, whether it is an array of the batch, rows along dim 0. The number of rows that a program was
    traced with is independent of the batch: a mean over all rows is a SUM. Of one row alone nothing is told, so trace
    with two or more.
    """
    inputs = program.jaxpr.invars
    counts = {v.aval.shape[0] for v, is_rows in zip(inputs, rows, strict=True) if is_rows}
    count = counts.pop() if len(counts) == 1 else 1
    batch = Flow(frozenset({ROW}), Layout(0, 1, count)) if count > 1 else UNKNOWN
    return _follow(program, [batch if is_rows else INDEPENDENT for is_rows in rows])


def _follow(program: Program, inputs: Sequence[Flow]) -> list[Flow]:
    jaxpr = opened(program)
    known: dict[Any, Flow] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Flow:
        if isinstance(atom, core.Literal):
            return number(atom.val) if jnp.ndim(atom.val) == 0 else INDEPENDENT
        return known.get(atom, INDEPENDENT)  # a constant

    for equation in own_equations(program):
        ins = [read(atom) for atom in equation.invars]
        known |= dict(zip(equation.outvars, _apply(equation, ins), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(equation: core.JaxprEqn, ins: list[Flow]) -> list[Flow]:
    name, outputs = equation.primitive.name, equation.outvars
    if equation.effects and name not in LOOPS | CALLS:
        return [UNKNOWN] * len(outputs)  # it may read what another equation wrote
    if all(flow.constant for flow in ins) and name not in CALLS and not equation.effects:
        if name in elements.SCALARS and all(flow.value is not None for flow in ins):
            with np.errstate(all="ignore"):
                value = elements.SCALARS[name](*(flow.value for flow in ins))
                return [number(np.asarray(value).astype(dtype_of(outputs[0]))[()])]
        zero = name in KEEP_ZERO and not any(flow.terms for flow in ins)
        return [ZERO if zero else INDEPENDENT] * len(outputs)
    result = RULES[name](equation, ins) if name in RULES else UNKNOWN
    outs = [result] * len(outputs) if isinstance(result, Flow) else result
    return [_settled(equation, v, flow, ins) for v, flow in zip(outputs, outs, strict=True)]


def _settled(equation: core.JaxprEqn, output: Any, flow: Flow, ins: list[Flow]) -> Flow:
    sum_or_row = flow.separate or (not flow.layout and flow.effect is not Effect.MIXED)
    if not sum_or_row and not inexact(output):
        # Positions and group sizes come of all rows; what they lead to need not.
        return UNKNOWN
    if flow.effect is not Effect.MIXED:
        return settled(flow, "")
    before = [f.where for f in (flow, *ins) if f.effect is Effect.MIXED and f.where]
    here = f"{equation.primitive.name} at {source_line(equation)}"
    return settled(flow, before[0] if before else here)


def _call(equation: core.JaxprEqn, ins: list[Flow]) -> Flow | list[Flow]:
    inner = subprograms(equation)
    if len(inner) != 1:
        return UNKNOWN
    # Inside jnp.var and its like no line is the user's; that of the call is.
    here = f" at {source_line(equation)}"
    return [
        replace(f, where=f.where.removesuffix(NOWHERE) + here) if f.where.endswith(NOWHERE) else f
        for f in _follow(inner[0], ins)
    ]


def _cond(equation: core.JaxprEqn, ins: list[Flow]) -> Flow | list[Flow]:
    which, *operands = ins
    if which.value is not None:
        return _follow(equation.params["branches"][int(which.value)], operands)
    if not which.constant:
        return UNKNOWN
    outcomes = [_follow(branch, operands) for branch in equation.params["branches"]]
    return [either(flows) for flows in zip(*outcomes, strict=True)]


def _scan(equation: core.JaxprEqn, ins: list[Flow]) -> Flow | list[Flow]:
    params, (body, *_) = equation.params, subprograms(equation)
    num_consts, num_carry = scan_operands(equation)
    consts, carry, xs = ins[:num_consts], ins[num_consts : num_consts + num_carry], ins[num_consts + num_carry :]
    carry, xs, written = [_varying(flow) for flow in carry], [_unstacked(flow) for flow in xs], []
    for done in range(params["length"]):
        if done == MOST_ROUNDS:
            return UNKNOWN
        outs = _follow(body, [*consts, *carry, *xs])
        written.append([_shifted(flow, 1) for flow in outs[num_carry:]])
        before, carry = carry, [_varying(flow) for flow in outs[:num_carry]]
        if carry == before:
            break
    ys = [beside(flows, {0}) for flows in zip(*written, strict=True)]
    return [*carry, *(ys or [UNKNOWN] * (len(equation.outvars) - num_carry))]


def _varying(flow: Flow) -> Flow:
    """Of what a loop carries: a number in one round is another in the next."""
    return replace(flow, value=None)


def _unstacked(flow: Flow) -> Flow:
    if 0 in flow.uneven or (flow.layout and flow.layout.dim == 0):
        return lost(flow)
    return _shifted(flow, -1)


def _shifted(flow: Flow, by: int) -> Flow:
    dims = {*flow.uneven, *([flow.layout.dim] if flow.layout else [])}
    return moved(flow, {dim: dim + by for dim in dims})


def _while(equation: core.JaxprEqn, ins: list[Flow]) -> Flow | list[Flow]:
    params = equation.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    again, consts, carry = ins[:first], ins[first:second], [_varying(flow) for flow in ins[second:]]
    passed = [carry]
    while len(passed) < MOST_ROUNDS:
        if not all(flow.constant for flow in _follow(params["cond_jaxpr"], [*again, *carry])):
            return UNKNOWN
        carry = [_varying(flow) for flow in _follow(params["body_jaxpr"], [*consts, *carry])]
        if carry in passed:
            return [either(flows) for flows in zip(*passed, strict=True)]
        passed.append(carry)
    return UNKNOWN


CALLS: dict[str, Rule] = dict.fromkeys(
    ("jit", "closed_call", "remat2", "composite", "custom_jvp_call", "custom_vjp_call"), _call
)
LOOPS: dict[str, Rule] = {"cond": _cond, "scan": _scan, "while": _while}
RULES: dict[str, Rule] = {**elements.RULES, **shapes.RULES, **products.RULES, **CALLS, **LOOPS}
# Of nothing but zeros they make zeros.
KEEP_ZERO = {*shapes.RULES, *elements.LINEAR, "convert_element_type", "add", "sub", "mul", "reduce_sum"}
