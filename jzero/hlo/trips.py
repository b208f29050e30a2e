"""How often a loop of a compiled program runs."""

import re
from collections.abc import Mapping

from jzero.hlo.lines import BODY, Computation, Line

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_CONSTANT = re.compile(r" constant\((-?\d+)\)")


def trip_count(computations: Mapping[str, Computation], around: Computation, loop: Line) -> int | None:
    """How often a `while` runs its body; None where the program does not tell. around: the computation it stands in.

    XLA:CPU and XLA:GPU write it down. Of XLA:TPU's it is counted: from a constant, by a constant, below a constant.
    """
    if known := _KNOWN.search(loop.text):
        return int(known[1])
    condition, body = (
        computations.get(found[1]) if (found := p.search(loop.text)) else None for p in (_CONDITION, BODY)
    )
    test = condition and condition.root
    if not condition or not body or not test or test.opcode != "compare" or "direction=LT" not in test.text:
        return None
    counter, limit = condition.element(test.operands[0]), _constant(condition, test.operands[1])
    given, result = around.origin(loop.operands[0]), body.root
    if counter is None or limit is None or not given or not result or {given.opcode, result.opcode} != {"tuple"}:
        return None
    start, step = _constant(around, given.operands[counter]), _step(body, result.operands[counter], counter)
    return None if start is None or not step else max(0, -(-(limit - start) // step))


def _step(body: Computation, name: str, counter: int) -> int | None:
    """By how much the body raises its counter."""
    line = body.origin(name)
    if line is None or line.opcode != "add":
        return None
    one, other = line.operands
    if body.element(one) != counter:
        one, other = other, one
    return _constant(body, other) if body.element(one) == counter else None


def _constant(computation: Computation, name: str) -> int | None:
    line = computation.origin(name)
    match = _CONSTANT.search(line.text) if line else None
    return int(match[1]) if match else None
