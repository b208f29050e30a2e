"""Batch arithmetic on plain numbers: global = micro * accumulation * shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchPlan:
    """A global batch of rows, cut: global = micro * accumulation * shards; micro counts rows a shard."""

    global_batch_size: int
    micro_batch_size: int
    accumulation_steps: int


def batch_fault(whole: int, micro: int | None, steps: int | None, num_shards: int | None) -> str | None:
    """Why a global batch of `whole` rows cannot be cut so, with the nearest that can be; None if it can.

    `micro` and `steps` may be open (None), and so may the number of shards, before the devices are known.
    """
    shards = num_shards or 1
    unit = (micro or 1) * (steps or 1) * shards
    settled = None not in (micro, steps, num_shards)
    if whole == unit if settled else whole % unit == 0:
        return None
    factors = [
        f"train.micro_batch_size ({micro})" if micro else "",
        f"train.accumulation_steps ({steps})" if steps else "",
        f"{num_shards} shards" if num_shards else "",
    ]
    below, above = whole // unit * unit, (whole // unit + 1) * unit
    fixes = [f"train.global_batch_size: {either([unit] if settled else [below or above, above])}"]
    per_step, per_row = whole / (shards * (steps or 1)), whole / (shards * (micro or 1))
    if micro and per_step.is_integer():
        exact = [int(per_step)] if settled else neighbours(int(per_step), micro)
        fixes.append(f"train.micro_batch_size: {either(exact)}")
    if steps and per_row.is_integer():
        exact = [int(per_row)] if settled else neighbours(int(per_row), steps)
        fixes.append(f"train.accumulation_steps: {either(exact)}")
    must = "be" if settled else "be a multiple of"
    product = " * ".join(filter(None, factors))
    return f"must {must} {product}{f' = {unit}' if ' * ' in product else ''}; set {', or '.join(fixes)}"


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def neighbours(number: int, near: int) -> list[int]:
    """The divisors of `number` next to `near`, below and above."""
    below = [n for n in divisors(number) if n < near]
    above = [n for n in divisors(number) if n > near]
    return below[-1:] + above[:1]


def either(choices: Sequence[object]) -> str:
    return " or ".join(dict.fromkeys(map(str, choices)))
