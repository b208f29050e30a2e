"""Saves and restores a flat dict of global arrays with Orbax, on any device count and padding, all or nothing.

Orbax writes each device's part of every stored array and reads each device's part of the layout asked for. What it does
not do is here and in `manifest`: true shapes under the padding, dtypes compared rather than cast, typed PRNG keys,
checksums, and steps that exist only once they are complete. A step folder is an Orbax checkpoint all the same:
`ocp.StandardCheckpointer().restore(directory / "100")` opens it.

Every process calls every method; process 0 alone writes manifests, renames and deletes. The directory must be on a file
system that all processes see and whose renames are atomic.
"""

import json
import logging
import math
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jzero.errors import CheckpointError
from jzero.manifest import (
    SAVING,
    ArrayEntry,
    BrokenStepError,
    Manifest,
    assert_intact,
    assert_readable,
    claim,
    clear_leftovers,
    complete_steps,
    delete,
    listing,
    publish,
    read_manifest,
    retained,
    seal,
    step_folder,
    step_numbers,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ArrayTarget:
    """One array as a restore shall return it.

    shape: the true shape; must be the checkpoint's. stored_shape: the shape of the array returned, in no dim smaller
    than `shape`; zeros fill it up. dtype: must be the checkpoint's; typed PRNG keys have theirs.
    """

    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    dtype: Any
    sharding: Sharding


@dataclass(frozen=True)
class Restored:
    """The step restored, its arrays with exactly the targets' stored shapes, dtypes and shardings, and its record."""

    step: int
    arrays: dict[str, jax.Array]
    record: dict[str, Any]


class Checkpointer:
    """The checkpoints of one run, in one directory.

    keep_last: how many of the newest complete steps stay. keep_best: how many of the lowest eval losses stay besides
    (0: none). None: all of them. Others are deleted once a new step is complete; broken ones are left to the user.
    asynchronous: `save` returns when the arrays may be donated, otherwise when the step is complete. What fails in the
    background is raised by the next save, restore, wait or close: so end with `close`.
    """

    def __init__(
        self, directory: str | os.PathLike[str], keep_last: int | None, keep_best: int | None, asynchronous: bool
    ):
        if (keep_last is not None and keep_last < 1) or (keep_best is not None and keep_best < 0):
            raise CheckpointError(f"keep_last={keep_last} must be at least 1, keep_best={keep_best} at least 0")
        self.directory = Path(directory).absolute()
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._asynchronous = asynchronous
        self._claimed = False
        # Compression takes an eighth off random float32 numbers and makes a save three to six times as long.
        # A directory that Orbax fails to make in the background leaves its threads waiting for minutes.
        self._orbax = ocp.AsyncCheckpointer(
            ocp.PyTreeCheckpointHandler(use_compression=False),
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jzero_checkpoint")
        self._pending: tuple[int, int, Future[None]] | None = None
        self._held: set[int] = set()  # steps that hold what this run had at that step
        self._damaged: set[int] = set()  # steps that look complete, but whose contents a restore found altered

    def claim(self) -> None:
        """Makes the directory and marks it as ours, as the first save does otherwise.

        Raises CheckpointError if it cannot be made or written, or holds checkpoints of another program.
        """
        if not self._claimed:
            claim(self.directory)
            self._claimed = True

    def save(
        self,
        step: int,
        arrays: Mapping[str, jax.Array],
        shapes: Mapping[str, tuple[int, ...]],
        record: Mapping[str, Any],
        eval_loss: float | None = None,
    ) -> None:
        """Saves a step. `shapes`: the true shapes; what an array holds beyond is not kept. `record`: JSON.

        A step that this object saved or restored is left as it is; one of the same number from an earlier run is
        replaced. Raises CheckpointError if this or the last save fails, or if the directory has later steps or cannot
        be claimed.
        """
        self.wait()
        self.claim()
        steps = self.steps()
        if step in self._held and step in steps:
            return
        if later := [other for other in steps if other > step]:
            raise CheckpointError(
                f"step {step} cannot be saved to {self.directory}: it has the later steps {listing(later)}, and a "
                "restore would take those. Save to another directory, or delete their folders."
            )
        loss = float(eval_loss) if eval_loss is not None and math.isfinite(eval_loss) else None
        manifest = Manifest(step, loss, _describe(arrays, shapes), _as_json(record))
        # Orbax stores no empty arrays; their shapes in the manifest are all there is to know.
        stored = {name: _plain(array) for name, array in arrays.items() if array.size}
        num_bytes = sum(array.nbytes for array in stored.values())
        try:
            if jax.process_index() == 0:
                clear_leftovers(self.directory)
            self._orbax.save(self.directory / f"{step}{SAVING}", args=ocp.args.PyTreeSave(stored))
        except Exception as error:
            raise self._save_error(step, num_bytes, error) from error
        self._damaged.discard(step)
        self._pending = (step, num_bytes, self._writer.submit(self._commit, manifest))
        if not self._asynchronous:
            self.wait()

    def restore(self, targets: Mapping[str, ArrayTarget], step: int | None = None) -> Restored:
        """Reads all of `step`, or of the newest intact one, into the targets' layout (see `find` and `read`).

        Raises CheckpointError, listing all differences, if names, true shapes or dtypes are not the targets'.
        """
        manifest = self.find(step)
        _assert_fits(self.words_for(manifest), manifest.arrays, targets)
        arrays = self.read(manifest, targets)
        self._held = {manifest.step}
        return Restored(manifest.step, arrays, manifest.record)

    def find(self, step: int | None = None) -> Manifest:
        """What `step`, or the newest intact one, holds.

        Without `step`, newer steps that are incomplete or damaged are passed over, each with a logged warning. Raises
        CheckpointError if there is no such step or `step` is broken. Writes nothing: the directory may be read-only.
        """
        self.wait()
        assert_readable(self.directory)
        for candidate in reversed(step_numbers(self.directory)) if step is None else [step]:
            try:
                manifest = read_manifest(self.directory, candidate)
                assert_intact(self.directory, manifest)
                return manifest
            except BrokenStepError as broken:
                self._damaged.add(candidate)
                if step is not None:
                    raise self._broken(broken) from broken
                logger.warning("%s; passed over", broken)
        inside = self.directory / "checkpoints"
        hint = f"; a trainer's are in {inside}" if inside.is_dir() else ""
        raise CheckpointError(f"{self.directory} has no complete checkpoint to restore{hint}")

    def steps(self) -> list[int]:
        """The complete steps in order: every file is there, with its size. Contents are checked by `restore` alone."""
        return list(self._complete())

    def latest_step(self) -> int | None:
        """The newest of `steps()`."""
        return max(self.steps(), default=None)

    def wait(self) -> None:
        """Returns once the last save is complete; raises CheckpointError, naming directory and step, if it failed."""
        if self._pending is None:
            return
        step, num_bytes, commit = self._pending
        try:
            commit.result()
        except Exception as error:
            raise self._save_error(step, num_bytes, error) from error
        finally:
            if commit.done():  # and not interrupted by Ctrl-C
                self._pending = None
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices(f"jzero checkpoint {step}")
        self._held.add(step)

    def close(self) -> None:
        """Waits for the last save, as `wait` does, and ends the background threads."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            self._orbax.close()

    def _commit(self, manifest: Manifest) -> None:
        """In the background, after Orbax: seals the step, gives it its name, deletes steps not to be kept."""
        primary = jax.process_index() == 0
        try:
            self._orbax.wait_until_finished()
            if primary:
                seal(self.directory / f"{manifest.step}{SAVING}", manifest)
                publish(self.directory, manifest.step)
        except BaseException:
            if primary:
                clear_leftovers(self.directory)  # a full disk needs the room
            raise
        if primary:
            losses = {step: found.eval_loss for step, found in self._complete().items()}
            for step in losses.keys() - retained(losses, self._keep_last, self._keep_best):
                delete(self.directory / str(step))

    def words_for(self, manifest: Manifest) -> str:
        return f"step {manifest.step} of {self.directory}"

    def read(self, manifest: Manifest, targets: Mapping[str, ArrayTarget]) -> dict[str, jax.Array]:
        """Some or all of a step's arrays by name, in the layout asked for; each device reads only its part. The targets
        must have the step's names, true shapes and dtypes."""
        for name, target in targets.items():
            _assert_within(name, target.shape, target.stored_shape)
        plain = {name: _plain_target(target) for name, target in targets.items()}
        empty = {name for name, target in targets.items() if 0 in target.shape}
        # strict=False: each device's part is cut, or filled up with zeros, to the stored shape asked for.
        requests = {
            name: ocp.ArrayRestoreArgs(sharding=target.sharding, global_shape=target.stored_shape, strict=False)
            for name, target in plain.items()
            if name not in empty
        }
        try:
            arrays = self._orbax.restore(
                step_folder(self.directory, manifest.step),
                args=ocp.args.PyTreeRestore(dict.fromkeys(requests, 0), requests, partial_restore=True),
            )
        except Exception as error:
            raise CheckpointError(f"{self.words_for(manifest)} could not be read: {error}") from error
        for name in empty:
            arrays[name] = jnp.zeros(plain[name].stored_shape, plain[name].dtype, device=plain[name].sharding)
        padded = {name: arrays.pop(name) for name, target in plain.items() if target.stored_shape != target.shape}
        # On CPUs several devices may have got one and the same host buffer; to be donated, each needs its own.
        owned = {name: jax.device_put(arrays.pop(name), plain[name].sharding, may_alias=False) for name in list(arrays)}
        owned |= _zero_beyond(padded, {name: plain[name] for name in padded})
        return {name: _typed(owned[name], manifest.arrays[name], target) for name, target in targets.items()}

    def _complete(self) -> dict[int, Manifest]:
        found = complete_steps(self.directory)
        return {step: manifest for step, manifest in found.items() if step not in self._damaged}

    def _broken(self, broken: BrokenStepError) -> CheckpointError:
        steps = self.steps()
        return CheckpointError(f"{broken}. Complete steps there: {listing(steps) if steps else 'none'}.")

    def _save_error(self, step: int, num_bytes: int, error: Exception) -> CheckpointError:
        try:
            free = f"{shutil.disk_usage(self.directory).free:,} bytes are free"
        except OSError as unreadable:
            free = str(unreadable)
        return CheckpointError(
            f"saving step {step} to {self.directory} failed: {type(error).__name__}: {error}\n"
            f"It needs up to {num_bytes:,} bytes; {free}. Older checkpoints are untouched."
        )


def _describe(arrays: Mapping[str, jax.Array], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, ArrayEntry]:
    if odd := sorted(arrays.keys() ^ shapes.keys()):
        raise CheckpointError(f"arrays and true shapes must have the same names; not in both: {listing(odd)}")
    entries = {}
    for name, array in arrays.items():
        _assert_within(name, tuple(shapes[name]), array.shape)
        impl = jax.random.key_impl(array) if _is_key(array.dtype) else None
        if not isinstance(impl, str | None):
            raise CheckpointError(f"{name}: keys of the custom generator {impl} cannot be saved; use one of JAX's own")
        entries[name] = ArrayEntry(tuple(shapes[name]), _dtype_name(array.dtype), impl)
    return entries


def _assert_within(name: str, shape: tuple[int, ...], stored_shape: tuple[int, ...]) -> None:
    if len(shape) != len(stored_shape) or any(true > stored for true, stored in zip(shape, stored_shape, strict=True)):
        raise CheckpointError(f"{name}: the true shape {shape} does not fit into the stored shape {stored_shape}")


def _as_json(record: Mapping[str, Any]) -> dict[str, Any]:
    """A copy, for it is written later."""
    try:
        return json.loads(json.dumps(dict(record)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the record of a checkpoint must be JSON: {error}") from error


def differences(there: Mapping[str, ArrayEntry], here: Mapping[str, ArrayTarget]) -> dict[str, list[str]]:
    """What a checkpoint lacks, has too much, and has in another shape than wanted here, by kind."""
    return {
        "missing in the checkpoint": [name for name in here if name not in there],
        "only in the checkpoint": [name for name in there if name not in here],
        "of another shape": [
            f"{name}: {there[name].shape} in the checkpoint, {here[name].shape} here"
            for name in here
            if name in there and there[name].shape != here[name].shape
        ],
    }


def assert_none(where: str, faults: Mapping[str, list[str]], remedy: str) -> None:
    """Raise CheckpointError, listing all of them by kind, if there are faults."""
    told = [f"{len(found)} {kind}:\n    " + listing(found, "\n    ") for kind, found in faults.items() if found]
    if told:
        raise CheckpointError(f"{where} does not fit:\n  " + "\n  ".join(told) + f"\n{remedy}")


def _assert_fits(where: str, entries: Mapping[str, ArrayEntry], targets: Mapping[str, ArrayTarget]) -> None:
    dtypes = [
        f"{name}: {entries[name].dtype} in the checkpoint, {_dtype_name(target.dtype)} here"
        for name, target in targets.items()
        if name in entries and entries[name].dtype != _dtype_name(target.dtype)
    ]
    assert_none(
        where,
        differences(entries, targets) | {"of another dtype": dtypes},
        "Use the model, optimizer and precision it was saved with, or start anew in another directory; from its "
        "weights, if you like: engine.load_weights, checkpoint.start_from.",
    )


def _zero_beyond(arrays: dict[str, jax.Array], targets: Mapping[str, ArrayTarget]) -> dict[str, jax.Array]:
    """The arrays with zeros beyond the targets' true shapes, each device seeing to its own part."""

    def zero(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        for dim, size in enumerate(shape):
            if size < array.shape[dim]:
                within = jax.lax.broadcasted_iota(jnp.int32, array.shape, dim) < size
                array = jnp.where(within, array, jnp.zeros((), array.dtype))
        return array

    if not arrays:
        return {}
    zero_all = jax.jit(
        lambda arrays: {name: zero(array, targets[name].shape) for name, array in arrays.items()},
        out_shardings={name: targets[name].sharding for name in arrays},
        donate_argnums=0,
    )
    return zero_all(arrays)


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _dtype_name(dtype: Any) -> str:
    return str(dtype) if _is_key(dtype) else jnp.dtype(dtype).name


def _plain(array: jax.Array) -> jax.Array:
    """The array, or the integers behind typed keys."""
    return jax.random.key_data(array) if _is_key(array.dtype) else array


def _plain_target(target: ArrayTarget) -> ArrayTarget:
    """The target of `_plain` of an array: for typed keys one more dim, which is whole on every device."""
    if not _is_key(target.dtype):
        return target
    ndim = len(target.stored_shape)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(target.stored_shape, target.dtype))
    sharding = target.sharding
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(*sharding.spec, *[None] * (data.ndim - len(sharding.spec)))
        sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    return ArrayTarget((*target.shape, *data.shape[ndim:]), data.shape, data.dtype, sharding)


def _typed(array: jax.Array, entry: ArrayEntry, target: ArrayTarget) -> jax.Array:
    if entry.key_impl is None:
        return array
    return jax.device_put(jax.random.wrap_key_data(array, impl=entry.key_impl), target.sharding)
