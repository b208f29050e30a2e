"""A new run from the weights of another: which arrays of its checkpoint, and what becomes of the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jzero.checkpoint import ArrayTarget, Checkpointer, assert_none, differences
from jzero.errors import CheckpointError
from jzero.manifest import ArrayEntry
from jzero.paths import matching
from jzero.plan import Plan
from jzero.rounding import cast
from jzero.state import weight_shardings

MODEL_STATE = "model_state/"


@dataclass(frozen=True)
class WarmStart:
    """What was taken from a checkpoint. kept: paths that stayed as they were. converted: by path, from and to dtype."""

    step: int
    kept: list[str]
    converted: dict[str, tuple[str, str]]


def take_weights(
    checkpointer: Checkpointer, step: int | None, plan: Plan, mesh: Mesh, *, averaged: bool, skip: Sequence[str]
) -> tuple[WarmStart, dict[str, jax.Array]]:
    """The widest copy of every weight in a step (None: the newest intact one), and its model state, as a run of this
    plan starts from them: by path, those of model state under model_state/.

    averaged: the moving average; CheckpointError where there is none. skip: path patterns, of paths here or there, to
    leave out.

    Raises CheckpointError, listing all of them, for weights that are missing, of another shape, or only there, and
    ConfigError for a pattern that matches none.
    """
    manifest, wanted = checkpointer.find(step), _wanted(plan, mesh)
    where, sources = checkpointer.words_for(manifest), _sources(manifest.arrays, averaged)
    if averaged and not any(name.startswith("ema/") for name in sources.values()):
        raise CheckpointError(
            f"{where} holds no moving average (train.ema_decay); take the weights in training instead, which are all "
            "that can be taken of a schedule-free run too."
        )
    skipped = matching("skip", skip, {**wanted, **sources})
    here = {path: target for path, target in wanted.items() if path not in skipped}
    there = {path: manifest.arrays[name] for path, name in sources.items() if path not in skipped}
    assert_none(where, differences(there, here), "Name what is meant to differ in `skip`, by patterns.")
    if not here:
        raise CheckpointError(f"{where}: skip = {list(skip)} leaves nothing to take.")
    stored = {sources[path]: replace(x, dtype=jnp.dtype(there[path].dtype)) for path, x in here.items()}
    read = checkpointer.read(manifest, stored)
    converted = {
        path: (there[path].dtype, x.dtype.name) for path, x in here.items() if there[path].dtype != x.dtype.name
    }
    taken = WarmStart(manifest.step, [path for path in wanted if path in skipped], converted)
    return taken, _converted({path: read[sources[path]] for path in here}, {path: here[path] for path in converted})


def _sources(entries: Mapping[str, ArrayEntry], averaged: bool) -> dict[str, str]:
    """The checkpoint's name of what to take for each path of weights and model state."""
    trees = ["ema/", "master/", "params/"] if averaged else ["master/", "params/"]
    paths = [name.removeprefix("params/") for name in entries if name.startswith("params/")]
    weights = {path: next(tree + path for tree in trees if tree + path in entries) for path in paths}
    state = [name for name, entry in entries.items() if name.startswith(MODEL_STATE) and entry.key_impl is None]
    return weights | {name: name for name in state}


def _wanted(plan: Plan, mesh: Mesh) -> dict[str, ArrayTarget]:
    """What a run starts from, by path; random keys are its own."""
    places = weight_shardings(plan, mesh)
    weights = {
        path: ArrayTarget(leaf.shape, leaf.stored_shape, leaf.dtype, places[path])
        for path, leaf in plan.initial.items()
    }
    state = {
        f"{MODEL_STATE}{path}": ArrayTarget(leaf.shape, leaf.stored_shape, leaf.dtype, NamedSharding(mesh, leaf.spec))
        for path, leaf in plan.model_state.items()
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    }
    return weights | state


def _converted(arrays: dict[str, jax.Array], targets: Mapping[str, ArrayTarget]) -> dict[str, jax.Array]:
    """The arrays, those that have a target in its dtype."""
    convert = jax.jit(
        lambda odd: {path: cast(x, targets[path].dtype) for path, x in odd.items()},
        out_shardings={path: target.sharding for path, target in targets.items()},
    )
    return arrays | convert({path: arrays[path] for path in targets})
