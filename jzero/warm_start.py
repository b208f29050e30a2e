"""A new run from the weights of another: which arrays of its checkpoint, and what becomes of the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jzero.checkpoint import ArrayTarget
from jzero.errors import CheckpointError
from jzero.leaf import LeafPlan
from jzero.manifest import ArrayEntry, listing
from jzero.paths import matching
from jzero.plan import Plan
from jzero.state import weight_shardings

MODEL_STATE = "model_state/"


@dataclass(frozen=True)
class WarmStart:
    """What was taken from a checkpoint. kept: paths that stayed as they were. converted: by path, from and to dtype."""

    step: int
    kept: list[str]
    converted: dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Choice:
    """What to read for a plan. sources: the checkpoint's name for each path here (weights, and model state under
    model_state/). kept: paths not read."""

    sources: dict[str, str]
    targets: dict[str, ArrayTarget]
    kept: list[str]


def choose(
    where: str,
    entries: Mapping[str, ArrayEntry],
    plan: Plan,
    mesh: Mesh,
    *,
    averaged: bool,
    skip: Sequence[str],
) -> Choice:
    """The widest copy of every weight that a checkpoint has, and its model state, by the paths of this plan.

    averaged: the moving average; CheckpointError where there is none. skip: path patterns, of paths here or there, to
    leave out.

    Raises CheckpointError, listing all of them, for weights that are missing, of another shape, or only there, and
    ConfigError for a pattern that matches none.
    """
    here = _wanted(plan, mesh)
    there = {name.removeprefix("params/"): name for name in entries if name.startswith("params/")}
    there |= {name: name for name in entries if name.startswith(MODEL_STATE) and entries[name].key_impl is None}
    if averaged and not any(name.startswith("ema/") for name in entries):
        raise CheckpointError(
            f"{where} holds no moving average (train.ema_decay); take the weights in training instead, which are all "
            "that can be taken of a schedule-free run too."
        )
    for path in list(there):
        better = [f"master/{path}", *([f"ema/{path}"] if averaged else [])]
        there[path] = next((name for name in reversed(better) if name in entries), there[path])
    skipped = matching("skip", skip, {**here, **there})
    faults = {
        "missing in the checkpoint": [path for path in here if path not in there],
        "only in the checkpoint": [path for path in there if path not in here],
        "of another shape": [
            f"{path}: {entries[there[path]].shape} in the checkpoint, {here[path][0].shape} here"
            for path in here
            if path in there and entries[there[path]].shape != here[path][0].shape
        ],
    }
    faults = {kind: [f for f in found if f.partition(":")[0] not in skipped] for kind, found in faults.items()}
    if any(faults.values()):
        told = [f"{len(found)} {kind}:\n    " + listing(found, "\n    ") for kind, found in faults.items() if found]
        raise CheckpointError(
            f"{where} does not fit:\n  " + "\n  ".join(told) + "\nName what is meant to differ in `skip`, by patterns."
        )
    sources = {path: there[path] for path in here if path not in skipped}
    if not sources:
        raise CheckpointError(f"{where}: skip = {list(skip)} leaves nothing to take.")
    targets = {
        name: ArrayTarget(
            here[path][0].shape, here[path][0].stored_shape, jnp.dtype(entries[name].dtype), here[path][1]
        )
        for path, name in sources.items()
    }
    return Choice(sources, targets, [path for path in here if path in skipped])


def convert(choice: Choice, arrays: Mapping[str, jax.Array], plan: Plan, mesh: Mesh) -> dict[str, Any]:
    """The arrays read, by path and in the dtypes of this plan."""
    here = _wanted(plan, mesh)

    def cast(values: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {path: value.astype(here[path][0].dtype) for path, value in values.items()}

    values = {path: arrays[name] for path, name in choice.sources.items()}
    odd = {path: value for path, value in values.items() if value.dtype != here[path][0].dtype}
    return values | jax.jit(cast, out_shardings={path: here[path][1] for path in odd})(odd)


def conversions(choice: Choice, plan: Plan, mesh: Mesh) -> dict[str, tuple[str, str]]:
    """The dtypes of paths that change, from and to."""
    here = _wanted(plan, mesh)
    dtypes = {path: (choice.targets[name].dtype, here[path][0].dtype) for path, name in choice.sources.items()}
    return {path: (before.name, after.name) for path, (before, after) in dtypes.items() if before != after}


def _wanted(plan: Plan, mesh: Mesh) -> dict[str, tuple[LeafPlan, NamedSharding]]:
    """What a run starts from, by path, and where it lies; random keys are its own."""
    places = weight_shardings(plan, mesh)
    state = {
        f"{MODEL_STATE}{path}": (leaf, NamedSharding(mesh, leaf.spec))
        for path, leaf in plan.model_state.items()
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    }
    return {path: (leaf, places[path]) for path, leaf in plan.initial.items()} | state
