"""How compilers differ in what they let stand. Each rule is measured: buffer assignments of jax 0.10.2 for 8 H100, and
for 8 CPU devices, and what XLA:TPU reports in executables for v4, v5e, v5p and v6e (see `hlo.tpu_executable`)."""

from dataclasses import dataclass
from typing import Literal

import jax

from jzero.hardware import Platform

_CHEAP = """
    abs add add_any and broadcast_in_dim ceil clamp clz complex concatenate conj convert_element_type copy_sign div
    dynamic_slice empty eq floor full ge gt imag integer_pow iota is_finite le lt max min mul ne neg nextafter not or
    pad population_count random_bits random_fold_in random_seed random_split random_unwrap random_wrap real rem rev
    round select_n shift_left shift_right_arithmetic shift_right_logical sign slice slice_of_stack split square stack
    sub threefry2x32 transpose xor
"""
_DEAR = """
    acos asin atan atan2 cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1 lgamma log log1p logistic pow rsqrt sin
    sinh sqrt tan tanh
"""

# What a compiler computes on the way to where it is read. Whatever is not named here stands.
FUSED = frozenset((_CHEAP + _DEAR).split())
# Computed anew by every reader, even where others are not.
MOVES = frozenset(
    ("broadcast_in_dim", "dynamic_slice", "empty", "full", "iota", "slice", "slice_of_stack", "split", "transpose")
)
# Their results stand, but what they read may be computed on the way.
REDUCTIONS = frozenset(
    ("argmax", "argmin", "reduce", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum")
)


@dataclass(frozen=True)
class Rules:
    """What sets a compiler apart.

    shared_stand: what several operations read is computed once and stands. copied_operands: products are float32, and
    read copies of operands that are narrower or not in one order of dims; so do loops of narrower stacks. sorted_dims:
    a product copies operands whose dims lie not as batch, own and summed. fused_operands: a product computes what it
    reads, but for what is rounded first. sunk_constants: a loop computes in it what is made from nothing. joined_sums:
    all sums over devices of one scope are one operation. order: of operations; "late" takes products when they are
    read. scratchpad: bytes of arrays that lie beside the device's memory. operation_bytes: what each operation of the
    program, moves aside, takes in it.
    """

    shared_stand: bool = False
    copied_operands: bool = False
    sorted_dims: bool = False
    fused_operands: bool = False
    sunk_constants: bool = False
    joined_sums: bool = False
    order: Literal["program", "breadth first", "late"] = "program"
    scratchpad: int = 0
    operation_bytes: int = 0


RULES: dict[Platform, Rules] = {
    # Its scheduler for concurrency goes breadth first: with that the peak of a list of layers, which all recompute at
    # once, is predicted to 3 %, without to 70 %; not so from jax 0.12 on, where lists take half of that. Products of
    # bfloat16 are copied no more there.
    "cpu": Rules(
        shared_stand=True,
        copied_operands=jax.__version_info__ < (0, 12),
        joined_sums=True,
        order="breadth first",
    ),
    # Products that only a later operation reads run late, so that what they read stands longer: in Llama 1B's backward
    # pass the attention's probabilities beside two float32 arrays of scores, and four arrays of the MLP.
    "gpu": Rules(sorted_dims=True, joined_sums=True, order="late"),
    # Of XLA:TPU's heap 20 to 36 % lie idle (the larger shipped configs); that these rules let the probabilities'
    # gradient stand, which XLA does not, comes to about as much. Of v5e's vector memory 96 to 112 MiB hold temporaries
    # (of v5p's 47). Code, constants and what collectives reserve take 7 to 9 KiB an operation in 12 variants of the
    # quickstart, half of that at stages 0 and 1; 20 to 50 where products are wide, at most 1 % of such a step's memory.
    "tpu": Rules(fused_operands=True, sunk_constants=True, scratchpad=96 * 2**20, operation_bytes=8192),
}
