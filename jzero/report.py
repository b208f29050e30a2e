"""What a plan says, for people: bytes a device by tree, what stayed whole and why."""

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jzero.collectives import Collectives
from jzero.leaf import LeafPlan
from jzero.plan import Plan

_SHOWN = 8


def plan_report(plan: Plan, collectives: Collectives) -> RenderableType:
    """The start-up report: placement by tree, who places the collectives, the whole leaves with their reasons,
    padding."""
    table = Table(title=_headline(plan), title_justify="left", title_style="bold")
    for column in ("tree", "bytes a device", "of all", "whole on every device", "dtype"):
        table.add_column(column, justify="left" if column in ("tree", "dtype") else "right")
    for tree, leaves in plan.trees().items():
        if not leaves:
            continue
        a_device = sum(leaf.bytes_per_device(plan.axis_sizes) for leaf in leaves)
        everything = sum(_bytes(leaf) for leaf in leaves)
        whole = sum(_bytes(leaf) for leaf in leaves if not leaf.spec)
        dtypes = sorted({str(leaf.dtype) for leaf in leaves})
        table.add_row(tree, human_bytes(a_device), human_bytes(everything), human_bytes(whole), ", ".join(dtypes))
    return Group(table, Text(f"collectives: {collectives.engine}, {collectives.reason}"), *_notes(plan))


def human_bytes(count: int) -> str:
    """1234567 -> '1.23 MB' (powers of 1000, as the papers count)."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def _headline(plan: Plan) -> str:
    axes = " x ".join(f"{axis} {size}" for axis, size in plan.axis_sizes.items() if size > 1) or "one device"
    return f"ZeRO stage {plan.stage}, {plan.num_parameters:,} parameters, {axes}"


def _notes(plan: Plan) -> list[Text]:
    """The parameters that stay whole although the stage splits, and those that are padded."""
    notes = []
    if plan.stage and math.prod(plan.axis_sizes.values()) > 1:
        notes += _listing(
            "whole",
            [(leaf.path, leaf.reason.removeprefix("whole: "), _bytes(leaf)) for leaf in plan.whole_leaves().values()],
        )
    # As first computed: the parameters' own reason may be that their stage keeps them whole.
    padded = [
        (leaf.path, plan.initial[path].reason, _bytes(leaf) - math.prod(leaf.shape) * leaf.dtype.itemsize)
        for path, leaf in plan.params.items()
        if leaf.padded
    ]
    return notes + _listing("padded", padded) + _idle_axis(plan)


def _idle_axis(plan: Plan) -> list[Text]:
    """A tensor axis serves models that name it; for others its devices do the same work over again."""
    size = plan.axis_sizes.get("tensor", 1)
    if size == 1 or any("tensor" in leaf.own_axes for leaf in plan.params.values()):
        return []
    told = f"mesh.tensor = {size}: no parameter's own sharding names this axis, so its devices repeat each other's work"
    return [Text(told)]


def _listing(word: str, rows: list[tuple[str, str, int]]) -> list[Text]:
    if not rows:
        return []
    rows = sorted(rows, key=lambda row: -row[2])
    total = sum(size for *_, size in rows)
    lines = [f"{len(rows)} parameter{'s' if len(rows) > 1 else ''} {word}, {human_bytes(total)} in all:"]
    lines += [f"  {path}  {human_bytes(size)}  {reason}" for path, reason, size in rows[:_SHOWN]]
    if len(rows) > _SHOWN:
        lines.append(f"  ... and {len(rows) - _SHOWN} more")
    return [Text(line) for line in lines]


def _bytes(leaf: LeafPlan) -> int:
    return math.prod(leaf.stored_shape) * leaf.dtype.itemsize
