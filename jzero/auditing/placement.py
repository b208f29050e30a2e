"""Where a program has the arrays of the state and the gradients, beside where the plan put them."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jzero.auditing.finding import Finding, LeafAudit
from jzero.hlo import Loop
from jzero.leaf import LeafPlan
from jzero.mesh import AnyMesh
from jzero.plan import Plan
from jzero.scopes import MICRO_BATCHES
from jzero.state import named, plan_tree

_TREES = {"params": "parameters", "opt_state": "optimizer"}


def state_leaves(plan: Plan, mesh: AnyMesh, compiled: jax.stages.Compiled) -> list[LeafAudit]:
    """The arrays of the state, as the program leaves them to the next step."""
    placed, _ = compiled.output_shardings
    found = named(placed)
    return [_leaf(plan, name, leaf, mesh, found[name]) for name, leaf in named(plan_tree(plan)).items()]


def gradient_leaves(plan: Plan, loops: Iterable[Loop], num_micro_batches: int) -> list[LeafAudit]:
    """The gradients, as the loop over micro-batches adds them up; of a single micro-batch those that the loop over
    layers in the backward pass stacks. That loop holds activations too, as large as some gradients are: of a gradient
    it can show that it lies as asked, not that it stays whole."""
    held: Counter[int] = Counter()
    for loop in loops:
        name = loop.operation.op_name or ""
        adds_up = MICRO_BATCHES in name and not loop.operation.loops if num_micro_batches > 1 else "transpose(" in name
        if adds_up:
            held.update(math.prod(shape) for _, shape in loop.changed)
    leaves = {path: replace(leaf, dtype=_dtype(plan, path, num_micro_batches)) for path, leaf in plan.gradients.items()}
    asked = Counter(_elements(plan, leaf)[0] for leaf in leaves.values())
    beyond = held - asked if num_micro_batches > 1 else Counter()
    return [_gradient(plan, leaf, held, asked, beyond) for leaf in leaves.values()]


def misplaced(leaves: Iterable[LeafAudit]) -> Iterator[Finding]:
    """A finding for each that does not lie as asked."""
    for leaf in leaves:
        if leaf.found in (None, leaf.asked):
            continue
        what = f"{leaf.found}, {leaf.found_bytes:,} bytes a device; planned {leaf.asked}, {leaf.asked_bytes:,} bytes"
        if leaf.tree == "gradients":
            advice = "it is summed over devices too late: look for a constraint of the model's own on this parameter"
            yield Finding("gradient-placement", "warning", leaf.path, what, advice)
        else:
            advice = "the step does not keep it in place: look for a sharding constraint or an optimizer that moves it"
            yield Finding("placement", "warning", leaf.path, what, advice)


def stayed_whole(plan: Plan, leaves: Iterable[LeafAudit], tolerance: int) -> list[LeafAudit]:
    """Those of more than `tolerance` bytes that no axis splits, in trees that the stage splits; largest first."""
    split = {tree for tree, first in (("parameters", 3), ("gradients", 2)) if plan.stage >= first}
    split |= {"optimizer", "master", "ema"} if plan.stage >= 1 else set()
    if all(size == 1 for size in plan.axis_sizes.values()):
        return []
    whole = [x for x in leaves if x.tree in split and "whole" in (x.asked, x.found) and _bytes(x) > tolerance]
    return sorted(whole, key=_bytes, reverse=True)


def _bytes(leaf: LeafAudit) -> int:
    return leaf.asked_bytes if leaf.found_bytes is None else leaf.found_bytes


def _leaf(plan: Plan, name: str, leaf: LeafPlan, mesh: AnyMesh, found: Any) -> LeafAudit:
    tree, _, path = name.partition("/")
    asked = NamedSharding(mesh, leaf.spec)
    same = found.is_equivalent_to(asked, len(leaf.shape))
    held = math.prod(found.shard_shape(leaf.stored_shape)) * leaf.dtype.itemsize
    return LeafAudit(
        _TREES.get(tree, tree),
        f"{_TREES.get(tree, tree)}/{path}" if path else tree,
        _text(leaf.spec),
        _text(leaf.spec) if same else _text(getattr(found, "spec", found)),
        leaf.bytes_per_device(plan.axis_sizes),
        held,
        leaf.reason,
    )


def _gradient(
    plan: Plan, leaf: LeafPlan, held: Mapping[int, int], asked: Mapping[int, int], beyond: Mapping[int, int]
) -> LeafAudit:
    """held: elements of the arrays that the loop changes, how many there are of each; asked: as the plan has them;
    beyond: those that it does not ask for."""
    local, whole = _elements(plan, leaf)
    found = _text(leaf.spec) if held.get(local, 0) >= asked[local] else None
    if found is None and beyond.get(whole, 0):
        found = _text(leaf.whole.spec)
    count = {None: None, _text(leaf.spec): local}.get(found, whole)
    size = leaf.dtype.itemsize
    return LeafAudit(
        "gradients",
        f"gradients/{leaf.path}",
        _text(leaf.spec),
        found,
        local * size,
        None if count is None else count * size,
        leaf.reason,
    )


def _elements(plan: Plan, leaf: LeafPlan) -> tuple[int, int]:
    """Of a device's part, and of one that only the model's own axes split."""
    count = lambda leaf: leaf.bytes_per_device(plan.axis_sizes) // leaf.dtype.itemsize
    return count(leaf), count(leaf.whole)


def _dtype(plan: Plan, path: str, num_micro_batches: int) -> Any:
    return np.dtype(plan.accumulate[path] if num_micro_batches > 1 else plan.compute[path])


def _text(spec: Any) -> str:
    text = str(spec).removeprefix("PartitionSpec").removeprefix("P")
    return "whole" if text in ("()", "(,)") else text
