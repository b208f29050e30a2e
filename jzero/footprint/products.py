"""What XLA:CPU adds around matrix products: copies of their operands in float32 and in one order of dims."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jzero.footprint.operations import Op, Scope, Value

_FLOAT32 = np.dtype("float32")


def with_copies(scope: Scope) -> Scope:
    """The scope with an operation for each copy that a product reads, standing where its operand is made, and one that
    rounds the product. A loop reads float32 copies of narrower stacks, made before it."""
    ops: list[Op] = []
    own = {id(x) for op in scope.ops for x in op.makes}
    copies: dict = {}
    after: dict[int, list[Op]] = {}
    rounded: dict[int, Value] = {}
    for op in scope.ops:
        if op.name == "dot_general":
            new = [_operand(op, side, own, copies, after, ops) for side in (0, 1)]
            reads = [a or b for a, b in zip(new, op.reads, strict=True)]
            (out,) = op.makes
            product = replace_op(op, reads)
            ops.append(product)
            if out.bytes < 4 * out.elements:
                wide = Value(out.elements, _FLOAT32, product, False, out.of_batch)
                product.makes = [wide]
                rounding = Op("round", [wide], [out], backward=op.backward)
                out.made = rounding
                ops.append(rounding)
            else:
                out.made = product
        elif op.name == "scan":
            ops += _widen(op)
            op.bodies = [with_copies(body) for body in op.bodies]
            ops.append(op)
        else:
            op.bodies = [with_copies(body) for body in op.bodies]
            ops.append(op)
    placed: list[Op] = []
    for op in ops:
        placed.append(op)
        for x in op.makes:
            placed += after.get(id(x), [])
    return Scope(placed, scope.takes, scope.gives)


def replace_op(op: Op, reads: list[Value]) -> Op:
    return replace(op, reads=reads)


def _operand(op: Op, side: int, own: set[int], copies: dict, after: dict, ops: list[Op]) -> Value | None:
    """The copy that a product reads instead of its operand; None: it reads the operand itself."""
    value = op.reads[side]
    (summed, batch) = op.params["dimension_numbers"]
    in_order = _in_order(batch[side], summed[side], len(op.shapes[side]), side)
    if in_order and value.dtype == _FLOAT32:
        return None
    key = (id(value), tuple(batch[side]), tuple(summed[side]), side)
    if key not in copies:
        copy = Op("copy_operand", [value], [], backward=op.backward)
        copy.makes = [Value(value.elements, _FLOAT32, copy, value.gathered, value.of_batch)]
        copies[key] = copy.makes[0]
        if id(value) in own:
            after.setdefault(id(value), []).append(copy)
        else:
            ops.append(copy)
    return copies[key]


def _in_order(batch: Sequence[int], summed: Sequence[int], ndim: int, side: int) -> bool:
    """batch, own, summed on the left; batch, summed, own on the right."""
    own = [d for d in range(ndim) if d not in (*batch, *summed)]
    order = [*batch, *own, *summed] if side == 0 else [*batch, *summed, *own]
    return order == list(range(ndim))


def _widen(scan: Op) -> list[Op]:
    first = scan.params["num_consts"] + scan.params["num_carry"]
    made: list[Op] = []
    for number in range(first, len(scan.reads)):
        stack = scan.reads[number]
        if stack.dtype not in (np.dtype("bfloat16"),):
            continue
        op = Op("widen", [stack], [], backward=scan.backward)
        wide = Value(stack.elements, _FLOAT32, op, stack.gathered, stack.of_batch)
        op.makes = [wide]
        scan.reads[number] = wide
        for inner in scan.bodies[0].ops:
            inner.reads = [wide if x is stack else x for x in inner.reads]
        made.append(op)
    return made


_REDUCTIONS = ("scatter_part", "reduce_scatter", "psum", "psum2", "psum_invariant")


def joined(scope: Scope) -> Scope:
    """One operation for all that reduce over devices in a scope."""
    parts = [op for op in scope.ops if op.name in _REDUCTIONS]
    rest = [op for op in scope.ops if op.name not in _REDUCTIONS]
    for op in rest:
        op.bodies = [joined(body) for body in op.bodies]
    if len(parts) < 2 or not _independent(parts):
        return Scope(scope.ops, scope.takes, scope.gives)
    one = Op("reduce_over_devices", [x for op in parts for x in op.reads], [x for op in parts for x in op.makes])
    one.backward = True
    for x in one.makes:
        x.made = one
    return Scope(_ordered([*rest, one]), scope.takes, scope.gives)


def _independent(parts: list[Op]) -> bool:
    names = {id(op) for op in parts}
    for op in parts:
        seen, pending = set(), list(op.reads)
        while pending:
            x = pending.pop()
            if x.made is None or id(x) in seen:
                continue
            seen.add(id(x))
            if id(x.made) in names:
                return False
            pending += x.made.reads
    return True


def _ordered(ops: list[Op]) -> list[Op]:
    """The operations in an order in which none reads what a later one makes, else as they were."""
    maker = {id(x): op for op in ops for x in op.makes}
    done: set[int] = set()
    order: list[Op] = []
    for first in ops:
        stack = [first]
        while stack:
            op = stack[-1]
            missing = [maker[id(x)] for x in op.reads if id(x) in maker and id(maker[id(x)]) not in done]
            if missing:
                stack += missing
                continue
            stack.pop()
            if id(op) not in done:
                done.add(id(op))
                order.append(op)
    return order
