"""Operations that a compiler adds to a program or joins."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jzero.footprint.operations import SLICE, Op, Scope, Value, bodies_by
from jzero.footprint.rules import Rules

_FLOAT32 = np.dtype("float32")
_SUMS = frozenset(("scatter_part", "reduce_scatter", "psum", "psum2", "psum_invariant"))
JOINED = "joined_sums"


def with_gathered_results(scope: Scope, held: Sequence[Value]) -> Scope:
    """With what brings results to the placement of the arguments that they replace: parameters updated in shards are
    gathered, and then copied to where they lie (measured on GPU: dims in another order), each while the next one is
    gathered (a Llama of 7.5 billion parameters on 64 H100 has two such arrays at a time)."""
    ops, gives = list(scope.ops), list(scope.gives)
    copies: list[Op] = []
    for number, (value, place) in enumerate(zip(gives, held, strict=False)):
        if value is not None and value.elements < place.elements:
            gather, copy = Op("gather_parts", [value], []), Op("copy", [], [])
            copy.reads = [gather.make(place.elements, place.dtype, like=place)]
            gives[number] = copy.make(place.elements, place.dtype, like=place)
            ops += [gather, *copies]
            copies = [copy]
    return Scope([*ops, *copies], scope.takes, gives)


def rewritten(scope: Scope, rules: Rules) -> Scope:
    """The scope as a compiler of such rules runs it."""
    if rules.joined_sums:
        scope = _with_joined_sums(scope)
    return _with_copies(scope) if rules.copied_operands else scope


def _with_copies(scope: Scope) -> Scope:
    """With an operation for each copy that a product or a loop reads, and one that rounds what a product gives. A copy
    is made where its operand is."""
    own = {id(x) for op in scope.ops for x in op.makes}
    copies: dict[Any, Value] = {}
    at_makers: dict[int, list[Op]] = {}
    ops: list[Op] = []

    def copy_of(value: Value, key: Any) -> Value:
        if key not in copies:
            op = Op("copy", [value], [], backward=value.made is not None and value.made.backward)
            copies[key] = op.make(value.elements, _FLOAT32, like=value)
            if id(value) in own:
                at_makers.setdefault(id(value), []).append(op)
            else:
                ops.append(op)
        return copies[key]

    for op in scope.ops:
        if op.name == "dot_general":
            ops += _wide_product(op, copy_of)
            continue
        if op.name == "scan":
            _widen_stacks(op, copy_of)
        ops.append(bodies_by(_with_copies, op))
    placed = []
    for op in ops:
        placed += [op, *(copy for x in op.makes for copy in at_makers.get(id(x), ()))]
    return Scope(placed, scope.takes, scope.gives)


def _wide_product(op: Op, copy_of: Any) -> list[Op]:
    reads, (out,) = list(op.reads), op.makes
    for side, (summed, batch) in enumerate(zip(*op.params["dimension_numbers"], strict=True)):
        order = _order(batch, summed, len(op.shapes[side]), side)
        if order or reads[side].dtype != _FLOAT32:
            reads[side] = copy_of(reads[side], (id(reads[side]), order))
    product = replace(op, reads=reads, makes=[out])
    if out.bytes >= 4 * out.elements:
        out.made = product
        return [product]
    product.makes = []
    rounding = Op("round", [product.make(out.elements, _FLOAT32, like=out)], [out], backward=op.backward)
    out.made = rounding
    return [product, rounding]


def _order(batch: Sequence[int], summed: Sequence[int], ndim: int, side: int) -> tuple[int, ...]:
    """The order that dims are brought into; empty where they lie so: batch, own, summed on the left, batch, summed, own
    on the right."""
    own = [d for d in range(ndim) if d not in (*batch, *summed)]
    order = (*batch, *own, *summed) if side == 0 else (*batch, *summed, *own)
    return () if order == tuple(range(ndim)) else order


def _widen_stacks(scan: Op, copy_of: Any) -> None:
    for op in scan.bodies[0].ops:
        if op.name == SLICE and np.dtype("bfloat16") == op.reads[0].dtype:
            stack = op.reads[0]
            op.reads = [copy_of(stack, (id(stack), ()))]
            scan.reads = [op.reads[0] if x is stack else x for x in scan.reads]


def _with_joined_sums(scope: Scope) -> Scope:
    ops = [bodies_by(_with_joined_sums, op) for op in scope.ops]
    sums = [op for op in ops if op.name in _SUMS]
    if len(sums) < 2 or _depend(sums):
        return Scope(ops, scope.takes, scope.gives)
    joined = Op(JOINED, [x for op in sums for x in op.reads], [x for op in sums for x in op.makes], backward=True)
    for x in joined.makes:
        x.made = joined
    return Scope(
        _sorted([joined if op is sums[-1] else op for op in ops if op not in sums[:-1]]), scope.takes, scope.gives
    )


def _depend(ops: list[Op]) -> bool:
    """Whether one of them reads, through others, what another makes."""
    seen: set[int] = set()
    pending = [x for op in ops for x in op.reads]
    while pending:
        x = pending.pop()
        if x.made is None or id(x) in seen:
            continue
        if any(x.made is op for op in ops):
            return True
        seen.add(id(x))
        pending += x.made.reads
    return False


def _sorted(ops: list[Op]) -> list[Op]:
    """In an order in which none reads what a later one makes, else as they are."""
    maker = {id(x): op for op in ops for x in op.makes}
    order: dict[int, Op] = {}
    for first in ops:
        pending = [first]
        while pending:
            op = pending[-1]
            missing = [maker[id(x)] for x in op.reads if id(x) in maker and id(maker[id(x)]) not in order]
            if missing:
                pending += missing
            else:
                order[id(pending.pop())] = op
    return list(order.values())
