"""Which arrays of a step stand in memory: those that no operation computes on the way to where it reads them."""

from collections import Counter
from collections.abc import Sequence

from jzero.footprint.operations import Op, Scope, Value
from jzero.footprint.rules import FUSED, MOVES, REDUCTIONS, Rules

_COPIES = frozenset(("copy", "round"))


def standing(scope: Scope, rules: Rules) -> set[int]:
    """The ids of the values that stand in a scope, of those that its operations make or read."""
    num_readers = Counter(id(x) for op in scope.ops for x in op.reads)
    stand = {id(x) for x in scope.gives if x is not None}
    for op in scope.ops:
        shared = rules.shared_stand and op.name not in MOVES and any(num_readers[id(x)] > 1 for x in op.makes)
        if op.name not in FUSED or shared:
            stand |= {id(x) for x in op.makes}
        stand |= {id(x) for x in op.reads if _from_memory(op, x, rules)}
    return stand


def _from_memory(op: Op, value: Value, rules: Rules) -> bool:
    """Whether an operation reads a value from memory, and does not compute it."""
    if op.name in FUSED or op.name in REDUCTIONS or op.name in _COPIES:
        return False
    if op.name == "dot_general" and rules.fused_operands:
        return _is_rounded(value) and not value.gathered
    return not (rules.sunk_constants and op.name == "scan" and _from_nothing(value))


def _is_rounded(value: Value) -> bool:
    made = value.made
    return made is not None and made.name == "convert_element_type" and value.bytes < made.reads[0].bytes


def _from_nothing(value: Value, depth: int = 12) -> bool:
    """Whether it is spread from constants, or from what is small beside it."""
    if value.made is None or value.made.name not in FUSED or depth == 0:
        return False
    return all(64 * x.elements < value.elements or _from_nothing(x, depth - 1) for x in value.made.reads)


def sources(op: Op, stand: set[int], own: set[int]) -> list[Value]:
    """The standing values that an operation reads, through all that is computed on the way. own: made in its scope."""
    found: list[Value] = []
    seen: set[int] = set()
    pending = list(op.reads)
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if id(value) in stand or id(value) not in own or value.made is None:
            found.append(value)
        else:
            pending += value.made.reads
    return found


def copied_bytes(op: Op, rules: Rules) -> int:
    """Of the copies that a product makes of its operands."""
    if op.name != "dot_general" or not rules.sorted_dims:
        return 0
    dims = zip(*op.params["dimension_numbers"], op.shapes, op.reads, strict=True)
    return sum(x.bytes for summed, batch, shape, x in dims if not _sorted(batch, summed, len(shape)))


def _sorted(batch: Sequence[int], summed: Sequence[int], ndim: int) -> bool:
    """Whether a library takes the dims as they lie."""
    own = [d for d in range(ndim) if d not in (*batch, *summed)]
    return list(range(ndim)) in ([*batch, *own, *summed], [*batch, *summed, *own])
