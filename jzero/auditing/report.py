"""An audit for people: tables of at most 100 columns."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jzero.auditing.finding import Finding, LeafAudit
from jzero.hlo import Collective, Memory
from jzero.report import human_bytes

_WIDTH = 100
_SHOWN = 8


def audit_report(
    leaves: Sequence[LeafAudit],
    whole: Sequence[LeafAudit],
    findings: Sequence[Finding],
    collectives: Sequence[Collective],
    memory: Memory,
) -> RenderableType:
    """Bytes by tree as planned and as compiled, what stayed whole, what travels, the findings, the memory."""
    parts = [_trees(leaves), _travels(collectives)]
    parts += [_whole(whole)] if whole else []
    told = [f"{finding.severity}: {finding}" for finding in findings] or ["nothing that the plan does not explain"]
    held = (
        f"a device holds {human_bytes(memory.peak)} at most: arguments {human_bytes(memory.arguments)}, temporaries "
        f"{human_bytes(memory.temporaries)}, outputs of their own {human_bytes(memory.outputs - memory.aliased)}"
    )
    return Group(*parts, Text(held), *(Text(line) for line in told))


def _trees(leaves: Sequence[LeafAudit]) -> Table:
    table = _table("state, bytes of one device", "tree", "arrays", "planned", "compiled", "not shown by the program")
    for tree in dict.fromkeys(leaf.tree for leaf in leaves):
        own = [leaf for leaf in leaves if leaf.tree == tree]
        seen = [leaf.found_bytes for leaf in own if leaf.found_bytes is not None]
        planned, hidden = sum(leaf.asked_bytes for leaf in own), len(own) - len(seen)
        table.add_row(tree, str(len(own)), f"{planned:,}", f"{sum(seen):,}" if seen else "-", str(hidden or ""))
    return table


def _travels(collectives: Sequence[Collective]) -> Table:
    """By kind, phase and axes."""
    table = _table("what travels in a step", "kind", "phase", "over", "arrays", "bytes a device sends")
    count: Counter[tuple[str, str, str]] = Counter()
    sent: Counter[tuple[str, str, str]] = Counter()
    unknown = set()
    for c in collectives:
        axes = " x ".join(c.axes) if c.axes is not None else f"groups of {c.group}"
        key = (c.kind, c.phase or "-", axes)
        count[key] += 1
        sent[key] += c.sent_bytes or 0
        if c.sent_bytes is None:
            unknown.add(key)
    for key in sorted(count, key=lambda key: -sent[key]):
        table.add_row(*key, str(count[key]), f"{'at least ' if key in unknown else ''}{sent[key]:,}")
    return table


def _whole(whole: Sequence[LeafAudit]) -> Table:
    table = _table("whole on every device", "array", "bytes", "reason")
    for leaf in whole[:_SHOWN]:
        table.add_row(leaf.path, f"{leaf.asked_bytes:,}", leaf.reason.removeprefix("whole: "))
    if len(whole) > _SHOWN:
        table.add_row(f"... and {len(whole) - _SHOWN} more", "", "")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", width=None)
    for column in columns:
        right = column in ("arrays", "planned", "compiled", "bytes", "bytes a device sends", "not shown by the program")
        table.add_column(column, justify="right" if right else "left", overflow="fold", max_width=_WIDTH // 2)
    return table
