"""Which arrays of a step stand in memory: those that no fusion computes on the way to where they are read."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jzero.footprint.operations import Op, Scope, Value

_CHEAP = (
    "abs add add_any and broadcast_in_dim ceil clamp complex concatenate conj convert_element_type copy_sign div "
    "dynamic_slice eq floor ge gt imag integer_pow iota is_finite le lt max min mul ne neg not or pad real rem rev "
    "round select_n shift_left shift_right_arithmetic shift_right_logical sign slice split square stack sub transpose "
    "xor nextafter population_count clz empty full random_bits random_wrap random_unwrap random_fold_in threefry2x32 "
    "random_seed random_split"
)
_DEAR = "acos asin atan atan2 cbrt cos cosh erf erf_inv erfc exp exp2 expm1 lgamma digamma log log1p logistic pow rsqrt "
_DEAR += "sin sinh sqrt tan tanh"
_REDUCTIONS = "argmax argmin reduce reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor"

CHEAP, DEAR, REDUCTIONS = (frozenset(names.split()) for names in (_CHEAP, _DEAR, _REDUCTIONS))
FUSED = CHEAP | DEAR
TRIVIAL = frozenset("broadcast_in_dim iota slice dynamic_slice split transpose full empty".split())


@dataclass(frozen=True)
class Rules:
    """How a compiler differs from the others in what it lets stand.

    products_fuse: what a matrix product reads may be computed inside it. keeps_dear: a function like exp that is read
    more than once is computed once and kept. wide_products: matrix products are in float32, which their operands are
    copied to. one_layout: operands of products are copied unless their dims are in order. sinks: what a loop reads and
    can be computed from nothing is computed in it.
    """

    products_fuse: bool = False
    keeps_dear: bool = False
    wide_products: bool = False
    ordered_products: bool = False
    sinks: bool = False
    late_products: bool = False
    breadth_first: bool = False
    joins: bool = False
    whole_scatters: bool = False


RULES = {
    "cpu": Rules(keeps_dear=True, wide_products=True, breadth_first=True, joins=True),
    "gpu": Rules(ordered_products=True, late_products=True, joins=True),
    "tpu": Rules(products_fuse=True, sinks=True),
}


@dataclass
class Standing:
    """Which values of one scope stand, and which of them an operation reads, through all that is computed on the way."""

    values: set[int]
    readers: dict[int, list[Op]]

    def __contains__(self, value: Value) -> bool:
        return value.made is None or id(value) in self.values


def standing(scope: Scope, rules: Rules) -> Standing:
    readers: dict[int, list[Op]] = defaultdict(list)
    own = {id(x) for op in scope.ops for x in op.makes}
    stand: set[int] = {id(x) for x in scope.gives if x is not None}
    for op in scope.ops:
        for x in op.reads:
            readers[id(x)].append(op)
    for op in scope.ops:
        if op.name not in FUSED:
            stand |= {id(x) for x in op.makes}
        elif rules.keeps_dear and op.name not in TRIVIAL and len(readers[id(op.makes[0])]) > 1:
            stand |= {id(x) for x in op.makes}
        if op.name == "dot_general" and rules.products_fuse:
            stand |= {id(x) for x in op.reads if x.made is not None and x.made.name == "convert_element_type" and not x.gathered and x.bytes < x.made.reads[0].bytes}
        if _reads_memory(op, rules):
            stand |= {id(x) for x in op.reads if not (rules.sinks and op.name == "scan" and _from_nothing(x))}
    return Standing(stand & own | (stand - own), readers)


def _reads_memory(op: Op, rules: Rules) -> bool:
    if op.name in FUSED or op.name in REDUCTIONS or op.name in ("copy_operand", "widen", "round"):
        return False
    return not (op.name == "dot_general" and rules.products_fuse)


def _from_nothing(value: Value, depth: int = 12) -> bool:
    """Whether it is computed from constants alone."""
    made = value.made
    if made is None or made.name not in FUSED or depth == 0:
        return False
    return all(_from_nothing(x, depth - 1) or 64 * x.elements < value.elements for x in made.reads)


def sources(op: Op, stand: Standing, own: set[int]) -> list[Value]:
    """The standing values that an operation reads."""
    found: dict[int, Value] = {}
    seen: set[int] = set()
    pending = list(op.reads)
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if id(value) in stand.values or value.made is None or id(value) not in own:
            found[id(value)] = value
        else:
            pending += value.made.reads
    return list(found.values())


def working_bytes(op: Op, rules: Rules) -> int:
    """What a product takes beside its operands and its result while it runs."""
    if rules.whole_scatters and op.name in ("scatter_part", "reduce_over_devices"):
        return sum(4 * x.elements for x in op.reads) - sum(x.bytes for x in op.makes)
    if op.name != "dot_general" or not rules.ordered_products:
        return 0
    out = op.makes[0]
    copies = 0
    for value, in_order in zip(op.reads, _in_order(op), strict=True):
        narrow = rules.wide_products and value.bytes < 4 * value.elements
        if narrow or (rules.ordered_products and not in_order):
            copies += value.elements * (4 if rules.wide_products else value.dtype.itemsize)
    if not rules.wide_products:
        return copies
    wide = 4 * out.elements
    return copies if out.bytes >= wide else max(copies + wide, wide + out.bytes) - out.bytes


def _in_order(op: Op) -> tuple[bool, bool]:
    """Whether the dims of each operand of a product lie as batch, own, summed, or batch, summed, own."""
    (summed, batch) = op.params["dimension_numbers"]
    return tuple(_grouped(b, s, len(shape)) for b, s, shape in zip(batch, summed, op.shapes, strict=True))


def _grouped(batch: Sequence[int], summed: Sequence[int], ndim: int) -> bool:
    own = [d for d in range(ndim) if d not in (*batch, *summed)]
    orders = ([*batch, *own, *summed], [*batch, *summed, *own])
    return list(range(ndim)) in orders
