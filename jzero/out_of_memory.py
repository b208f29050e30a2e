"""What is told where a device's memory does not hold a step: whose bytes lie there, and the smallest change of the
config that would fit."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import Mesh

from jzero.blueprint import Blueprint
from jzero.config import with_fields
from jzero.errors import JzeroError, OutOfMemoryError
from jzero.footprint import Footprint, estimate_footprint
from jzero.footprint.rules import Platform
from jzero.mesh import batch_shards, platform_of
from jzero.plan import Plan
from jzero.report import human_bytes

_LEAVES = 3  # largest arrays told of each tree
# Where the memory of a device is not known, so many changes are told that take at most this share.
_CHANGES, _LESS = 3, 0.9


@contextmanager
def memory_told(blueprint: Blueprint, batch: Any) -> Iterator[None]:
    """Raises OutOfMemoryError in place of XLA's RESOURCE_EXHAUSTED, whether it comes from compiling or from running a
    step over a batch of (abstract) arrays."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        told, _, _ = str(error).partition("\n")
        if "RESOURCE_EXHAUSTED" not in told:
            raise
        lines = [f"a device's memory does not hold this program ({told})", *explain(blueprint, batch)]
        raise OutOfMemoryError("\n  ".join(lines)) from error


def explain(blueprint: Blueprint, batch: Any) -> list[str]:
    """Lines: the bytes of a device by tree, those that a step adds, and what would take fewer. By estimate, but for the
    state."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    platform, room = platform_of(blueprint.mesh), _room(blueprint)
    takes = lambda blueprint: _footprint(blueprint, shapes, platform)
    needed = takes(blueprint)
    of = "" if room is None else f" of {human_bytes(room)}"
    lines = [f"A step takes about {human_bytes(needed.peak)}{of} on a device:", *_table(blueprint.plan)]
    for name in ("gathered", "activations", "temporaries"):
        lines.append(f"{name:<12}{human_bytes(getattr(needed, name)):>10}")
    return [*lines, *_advice(blueprint, shapes, takes, needed.peak, room)]


def _table(plan: Plan) -> list[str]:
    """A line for each tree of the state, with its largest arrays."""
    lines = []
    for tree, leaves in plan.trees().items():
        sizes = sorted(((leaf.bytes_per_device(plan.axis_sizes), leaf.path) for leaf in leaves), reverse=True)
        if sizes and tree != "gradients":  # those are among the temporaries
            largest = ", ".join(f"{path} {human_bytes(size)}" for size, path in sizes[:_LEAVES])
            lines.append(f"{tree:<12}{human_bytes(sum(size for size, _ in sizes)):>10}  {largest}")
    return lines


def _advice(
    blueprint: Blueprint, batch: Any, takes: Callable[[Blueprint], Footprint], needed: int, room: int | None
) -> list[str]:
    told = []
    for changes in _changes(blueprint, batch):
        try:
            changed = takes(blueprint.replanned(with_fields(blueprint.config, changes))).peak
        except JzeroError:
            continue  # what this model or this batch cannot do
        if changed <= (_LESS * needed if room is None else room):
            fields = ", ".join(f"{name}: {value}" for name, value in changes.items())
            told.append(f"{fields} takes about {human_bytes(changed)}")
            if len(told) == (_CHANGES if room is None else 1):
                break
    tried = "No stage and no smaller micro-batch would "
    tried += "do" if room is not None else f"save {1 - _LESS:.0%} of it"
    otherwise = "take more devices, rematerialise (model.remat, nnx.remat), or make the rows shorter"
    return told or [f"{tried}: {otherwise}"]


def _changes(blueprint: Blueprint, batch: Any) -> Iterator[dict[str, Any]]:
    """Fields to change, mildest first: a later stage, more micro-batches, both."""
    config, sizes = blueprint.config, blueprint.plan.axis_sizes
    rows = jax.tree.leaves(batch)[0].shape[0] // batch_shards(sizes)
    steps = blueprint.micro_batches(batch)
    splits = math.prod(sizes.values()) > 1
    stages = [{"zero.stage": stage} for stage in range(config.zero.stage + 1, 4)] if splits else []
    cuts: list[dict[str, Any]] = []
    for more in range(2 * steps, rows + 1, steps):
        if rows % more == 0:
            micro = {} if config.train.micro_batch_size is None else {"train.micro_batch_size": rows // more}
            cuts.append({"train.accumulation_steps": more, **micro})
    yield from stages
    yield from cuts
    yield from ({**stage, **cut} for stage in stages for cut in cuts)


def _footprint(blueprint: Blueprint, batch: Any, platform: str | None) -> Footprint:
    known: Platform = "cpu" if platform == "cpu" else "tpu" if platform == "tpu" else "gpu"
    return estimate_footprint(blueprint, blueprint.trace_step(batch), known)


def _room(blueprint: Blueprint) -> int | None:
    """The memory of a device that JAX may use, bytes; None where the device does not say."""
    assert isinstance(blueprint.mesh, Mesh)
    return (blueprint.mesh.devices.flat[0].memory_stats() or {}).get("bytes_limit")
