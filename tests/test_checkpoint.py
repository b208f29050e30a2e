"""What is saved comes back bit for bit on any devices and padding, or not at all with a message that says why."""

import contextlib
import dataclasses
import errno
import logging
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jzero
from jzero.checkpoint import ArrayTarget, Checkpointer
from jzero.errors import CheckpointError
from jzero.manifest import complete_steps, retained

P = PartitionSpec
KEYS = jax.random.key(0).dtype

# name: (true shape, dtype, sharded dim or None)
LEAVES = {
    "params/bias": ((7,), jnp.float32, 0),
    "params/embed": ((13, 5), jnp.bfloat16, 0),
    "params/head/kernel": ((4, 129), jnp.int32, 1),
    "params/head": ((3, 3), jnp.float32, None),
    "adam.mu[0]": ((16, 2), jnp.float32, 0),
    "rng/streams": ((11,), KEYS, 0),
    "rng/key": ((), KEYS, None),
    "temperature": ((), jnp.float32, None),
    "none left": ((0, 4), jnp.float32, None),
}


def sharding_on(num_devices: int, dim: int | None) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[:num_devices]).reshape(1, num_devices, 1), ("replica", "data", "tensor"))
    return NamedSharding(mesh, P() if dim is None else P(*[None] * dim, ("data", "replica")))


def target_on(num_devices: int, shape, dtype, dim, multiple: int = 1) -> ArrayTarget:
    """The sharded dim padded to the next multiple of `num_devices * multiple`."""
    block = num_devices * multiple
    stored = tuple(-(-size // block) * block if d == dim else size for d, size in enumerate(shape))
    return ArrayTarget(shape, stored, dtype, sharding_on(num_devices, dim))


def targets_on(num_devices: int, multiple: int = 1, leaves=None) -> dict[str, ArrayTarget]:
    leaves = LEAVES if leaves is None else leaves
    return {name: target_on(num_devices, *leaf, multiple) for name, leaf in leaves.items()}


def values_of(leaves, seed: int = 0) -> dict[str, np.ndarray]:
    """True values; of typed keys the integers behind them."""
    rng = np.random.default_rng(seed)
    values = {}
    for name, (shape, dtype, _) in leaves.items():
        if dtype == KEYS:
            values[name] = rng.integers(0, 2**32, (*shape, 2), np.uint32)
        elif dtype == jnp.int32:
            values[name] = rng.integers(-1000, 1000, shape, np.int32)
        else:
            values[name] = np.asarray(rng.standard_normal(shape), dtype)
    return values


def place(values, targets, rubbish=0) -> dict[str, jax.Array]:
    """The values in the targets' stored layout, with `rubbish` in the padding."""
    arrays = {}
    for name, target in targets.items():
        shape = target.stored_shape + values[name].shape[len(target.shape) :]
        value = np.full(shape, rubbish, values[name].dtype)
        value[tuple(slice(0, size) for size in target.shape)] = values[name]
        if target.dtype == KEYS:
            keys = jax.random.wrap_key_data(jnp.asarray(value), impl="threefry2x32")
            arrays[name] = jax.device_put(keys, target.sharding)
        else:
            arrays[name] = jax.device_put(value, target.sharding)
    return arrays


def host(array: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(array) if array.dtype == KEYS else array)


def shapes_of(targets) -> dict[str, tuple[int, ...]]:
    return {name: target.shape for name, target in targets.items()}


def open_checkpoints(directory, keep_last=10, keep_best=0, asynchronous=True):
    return contextlib.closing(Checkpointer(directory, keep_last, keep_best, asynchronous))


def assert_restored(arrays, targets, values) -> None:
    assert arrays.keys() == targets.keys()
    for name, target in targets.items():
        array, data = arrays[name], host(arrays[name])
        assert (array.shape, array.dtype, array.sharding) == (
            target.stored_shape,
            target.dtype,
            target.sharding,
        )
        shard_shape = target.sharding.shard_shape(target.stored_shape)
        assert {shard.data.shape for shard in array.addressable_shards} == {shard_shape}
        assert {shard.device for shard in array.addressable_shards} == target.sharding.device_set
        true_part = tuple(slice(0, size) for size in target.shape)
        np.testing.assert_array_equal(data[true_part], values[name], err_msg=name)
        beyond = np.ones(data.shape, bool)
        beyond[true_part] = False
        assert not data[beyond].any(), f"{name}: {data} is not zero beyond {target.shape}"


VALUES = values_of(LEAVES)
RECORD = {"step": 3, "seen": [1, 2], "config": {"name": "ü", "rate": 1e-3, "none": None}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Step 3, saved on 8 devices with rubbish in the padding."""
    directory = tmp_path_factory.mktemp("saved")
    targets = targets_on(8)
    arrays = place(VALUES, targets, rubbish=9)
    assert host(arrays["params/bias"])[7] == 9
    with open_checkpoints(directory) as checkpoints:
        checkpoints.save(3, arrays, shapes_of(targets), RECORD, eval_loss=2.5)
    return directory


@pytest.mark.parametrize("multiple", [1, 3])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 6, 8])
def test_a_checkpoint_of_8_devices_restores_on_any_devices_and_padding(saved, num_devices, multiple):
    targets = targets_on(num_devices, multiple)
    with open_checkpoints(saved) as checkpoints:
        restored = checkpoints.restore(targets)
    assert (restored.step, restored.record) == (3, RECORD)
    assert_restored(restored.arrays, targets, VALUES)
    drawn = [jax.random.uniform(key) for key in (restored.arrays["rng/key"], place(VALUES, targets)["rng/key"])]
    assert drawn[0] == drawn[1]


def test_a_checkpoint_restores_on_more_devices_than_it_was_saved_on(tmp_path):
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, place(VALUES, targets_on(3), rubbish=7), shapes_of(targets_on(3)), {})
        assert_restored(checkpoints.restore(targets_on(8)).arrays, targets_on(8), VALUES)


def test_a_step_that_is_not_there_is_told_with_those_that_are(saved):
    with open_checkpoints(saved) as checkpoints:
        assert (checkpoints.steps(), checkpoints.latest_step()) == ([3], 3)
        with pytest.raises(CheckpointError, match=r"step 4 of .* is not there\. Complete steps there: 3"):
            checkpoints.restore(targets_on(8), 4)


def test_orbax_alone_opens_a_step(saved):
    with ocp.StandardCheckpointer() as orbax:
        restored = orbax.restore(saved / "3")
    np.testing.assert_array_equal(np.asarray(restored["params/embed"])[:13], VALUES["params/embed"])


def test_arrays_may_be_donated_right_after_an_asynchronous_save_and_after_a_restore(tmp_path):
    leaves = {f"{dim}/{size}": ((size, size), jnp.float32, dim) for dim in (None, 0) for size in (8, 512)}
    values, targets = values_of(leaves), targets_on(8, leaves=leaves)
    step = jax.jit(lambda arrays: jax.tree.map(lambda x: 2 * x + 1, arrays), donate_argnums=0)
    with open_checkpoints(tmp_path) as checkpoints:
        arrays = place(values, targets)
        jax.block_until_ready(arrays)
        checkpoints.save(1, arrays, shapes_of(targets), {})
        jax.block_until_ready(step(step(arrays)))
        for _ in range(5):
            restored = checkpoints.restore(targets).arrays
            assert_restored(restored, targets, values)
            buffers = [s.data.unsafe_buffer_pointer() for a in restored.values() for s in a.addressable_shards]
            assert len(set(buffers)) == len(buffers) == 8 * len(leaves)
            moved = step(step(restored))
            assert all(array.is_deleted() for array in restored.values())
            assert_restored(moved, targets, {name: 2 * (2 * value + 1) + 1 for name, value in values.items()})


SMALL = {"w": ((7, 3), jnp.float32, 0), "b": ((5,), jnp.bfloat16, None)}
SMALL_TARGETS = targets_on(8, leaves=SMALL)


def save_small(checkpoints: Checkpointer, step: int, eval_loss: float | None = None, seed: int | None = None) -> None:
    arrays = place(values_of(SMALL, step if seed is None else seed), SMALL_TARGETS)
    checkpoints.save(step, arrays, shapes_of(SMALL_TARGETS), {"step": step}, eval_loss)


def assert_small(restored, step: int, seed: int | None = None) -> None:
    assert (restored.step, restored.record) == (step, {"step": step})
    assert_restored(restored.arrays, SMALL_TARGETS, values_of(SMALL, step if seed is None else seed))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_last_and_the_best_steps_are_kept(tmp_path, asynchronous):
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: float("nan"), 6: 4.0}
    kept = []
    with open_checkpoints(tmp_path, keep_last=2, keep_best=1, asynchronous=asynchronous) as checkpoints:
        for step, loss in losses.items():
            save_small(checkpoints, step, loss)
            checkpoints.wait()
            kept.append(checkpoints.steps())
        assert_small(checkpoints.restore(SMALL_TARGETS, 2), 2)
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 5, 6]]
    assert {path.name for path in tmp_path.iterdir()} == {"JZERO_CHECKPOINTS", "2", "5", "6"}


@pytest.mark.parametrize(
    ("losses", "keep_last", "keep_best", "kept"),
    [
        ({}, 3, 1, set()),
        ({1: None}, 1, 1, {1}),
        ({1: 0.1, 2: 0.2, 3: 0.3}, 1, 0, {3}),
        ({1: 0.1, 2: 0.2, 3: 0.3}, 1, 1, {1, 3}),
        ({1: 0.1, 2: 0.2, 3: 0.3}, 1, 2, {1, 2, 3}),
        ({1: 0.5, 2: 0.5, 3: 0.9}, 1, 1, {2, 3}),
        ({1: None, 2: None, 10: None}, 2, 3, {2, 10}),
        ({8: 0.1, 9: 0.2, 10: 0.3, 11: None}, 2, 1, {8, 10, 11}),
        ({1: 0.1, 2: None, 3: None, 4: 0.2}, None, 0, {1, 2, 3, 4}),
        ({1: 0.1, 2: None, 3: None, 4: 0.2, 5: None}, 1, None, {1, 4, 5}),
    ],
)
def test_which_steps_are_kept(losses, keep_last, keep_best, kept):
    assert retained(losses, keep_last, keep_best) == kept


def test_saving_a_step_twice(tmp_path):
    with open_checkpoints(tmp_path) as checkpoints:
        save_small(checkpoints, 2, seed=20)
        save_small(checkpoints, 2, seed=21)  # the same run: nothing to do
        assert_small(checkpoints.restore(SMALL_TARGETS), 2, seed=20)
        shutil.rmtree(tmp_path / "2")
        save_small(checkpoints, 2, seed=22)  # the same run, but someone took it away
        assert_small(checkpoints.restore(SMALL_TARGETS), 2, seed=22)
        save_small(checkpoints, 4)
    with open_checkpoints(tmp_path) as checkpoints:
        save_small(checkpoints, 4, seed=40)  # another run: replaced
        assert_small(checkpoints.restore(SMALL_TARGETS), 4, seed=40)
        save_small(checkpoints, 4, seed=41)  # restored from it: nothing to do
        assert_small(checkpoints.restore(SMALL_TARGETS), 4, seed=40)
        checkpoints.restore(SMALL_TARGETS, 2)
        with pytest.raises(CheckpointError, match=r"step 3 cannot be saved to .*: it has the later steps 4"):
            save_small(checkpoints, 3)
        assert checkpoints.steps() == [2, 4]
        save_small(checkpoints, 4, seed=42)  # gone back to 2 and come here anew: replaced
        assert_small(checkpoints.restore(SMALL_TARGETS), 4, seed=42)


def test_a_record_is_saved_as_it_was_and_must_be_json(tmp_path):
    arrays, shapes = place(values_of(SMALL), SMALL_TARGETS), shapes_of(SMALL_TARGETS)
    record = {"losses": [1.0]}
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, arrays, shapes, record)
        record["losses"].append(2.0)
        checkpoints.wait()
        assert complete_steps(tmp_path)[1].record == {"losses": [1.0]}
        with pytest.raises(CheckpointError, match=r"must be JSON: .*ndarray"):
            checkpoints.save(2, arrays, shapes, {"loss": np.ones(1)})


def data_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip_a_bit(path: Path, position: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(position * len(data))] ^= 4
    path.write_bytes(data)


def rename_record(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 6}', '"step": 7}'))


FAULTS = {  # name: (what befalls the directory after steps 2, 4, 6; step restored; steps listed; warning)
    "empty folder": (lambda d: (d / "8").mkdir(), 6, [2, 4, 6], "step 8 of .* has no jzero.json"),
    "a file for a step": (lambda d: (d / "8").touch(), 6, [2, 4, 6], "step 8 .*jzero.json cannot be read"),
    "truncated data": (
        lambda d: truncate(data_file(d / "6" / "d")),
        4,
        [2, 4],
        r"step 6 of .* bytes instead of \d+",
    ),
    "no data": (lambda d: data_file(d / "6" / "d").unlink(), 4, [2, 4], "step 6 of .* is missing"),
    "no Orbax metadata": (
        lambda d: (d / "6" / "_METADATA").unlink(),
        4,
        [2, 4],
        "step 6 .*_METADATA is missing",
    ),
    "no manifest": (lambda d: (d / "6" / "jzero.json").unlink(), 4, [2, 4], "step 6 of .* has no jzero.json"),
    "truncated manifest": (
        lambda d: truncate(d / "6" / "jzero.json"),
        4,
        [2, 4],
        "step 6 .*jzero.json cannot be read",
    ),
    "altered manifest": (
        lambda d: rename_record(d / "6" / "jzero.json"),
        4,
        [2, 4],
        "step 6 .*jzero.json was altered",
    ),
    "renamed step": (lambda d: (d / "6").rename(d / "8"), 4, [2, 4], "step 8 .*jzero.json is that of step 6"),
    "flipped bit": (lambda d: flip_a_bit(data_file(d / "6" / "d")), 4, [2, 4, 6], "step 6 of .* was altered"),
    "flipped metadata": (
        lambda d: flip_a_bit(d / "6" / "_METADATA"),
        4,
        [2, 4, 6],
        "step 6 .*_METADATA was altered",
    ),
    "latest file": (lambda d: (d / "latest").write_text("12"), 6, [2, 4, 6], None),
    "unfinished save": (lambda d: shutil.copytree(d / "6", d / "8.saving"), 6, [2, 4, 6], None),
    "unfinished Orbax save": (lambda d: (d / "8.saving.orbax-checkpoint-tmp").mkdir(), 6, [2, 4, 6], None),
    "unfinished deletion": (lambda d: (d / "2").rename(d / "2.deleting"), 6, [4, 6], None),
}


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("three") / "run"
    with open_checkpoints(directory) as checkpoints:
        for step in (2, 4, 6):
            save_small(checkpoints, step)
    return directory


@pytest.mark.parametrize("fault", FAULTS)
def test_the_newest_intact_step_is_restored_and_the_others_named(three_steps, tmp_path, caplog, fault):
    befall, intact, listed, warning = FAULTS[fault]
    shutil.copytree(three_steps, tmp_path, dirs_exist_ok=True)
    befall(tmp_path)
    with open_checkpoints(tmp_path) as checkpoints:
        assert (checkpoints.steps(), checkpoints.latest_step()) == (listed, listed[-1])
        with caplog.at_level(logging.INFO, "jzero.checkpoint"):
            assert_small(checkpoints.restore(SMALL_TARGETS), intact)
        messages = [r.getMessage() for r in caplog.records if r.name == "jzero.checkpoint"]
        assert len(messages) == (warning is not None)
        if warning is not None:
            assert re.search(f"{warning}.*; passed over", messages[0])
            assert str(tmp_path) in messages[0]
            with pytest.raises(CheckpointError, match=warning):
                checkpoints.restore(SMALL_TARGETS, 8 if "step 8" in warning else 6)
        save_small(checkpoints, 8)  # takes the place of whatever is broken there
        assert_small(checkpoints.restore(SMALL_TARGETS), 8)
        assert not list(tmp_path.glob("*.saving*")) + list(tmp_path.glob("*.deleting"))


def test_after_a_damaged_step_the_run_goes_on_from_the_one_before(tmp_path):
    with open_checkpoints(tmp_path) as checkpoints:
        save_small(checkpoints, 4)
        save_small(checkpoints, 6)
    flip_a_bit(data_file(tmp_path / "6" / "d"))
    with open_checkpoints(tmp_path, keep_last=1) as checkpoints:
        assert_small(checkpoints.restore(SMALL_TARGETS), 4)
        assert checkpoints.steps() == [4]
        save_small(checkpoints, 5)
        assert_small(checkpoints.restore(SMALL_TARGETS), 5)
        save_small(checkpoints, 6)
        assert_small(checkpoints.restore(SMALL_TARGETS), 6)
        assert checkpoints.steps() == [6]


def test_without_an_intact_step_nothing_is_restored(tmp_path):
    with open_checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() is None
        checkpoints.claim()
        with pytest.raises(CheckpointError, match=f"{tmp_path} has no complete checkpoint"):
            checkpoints.restore(SMALL_TARGETS)
        (tmp_path / "1").mkdir()
        with pytest.raises(CheckpointError, match=f"{tmp_path} has no complete checkpoint"):
            checkpoints.restore(SMALL_TARGETS)


@pytest.mark.parametrize("call", ["save", "wait", "close", "restore"])
def test_an_error_in_the_background_reaches_the_next_call(tmp_path, monkeypatch, call):
    def fail(folder, manifest):
        raise OSError(errno.EIO, "the disk is on fire")

    checkpoints = Checkpointer(tmp_path, keep_last=1, keep_best=0, asynchronous=True)
    save_small(checkpoints, 2)
    checkpoints.wait()
    with monkeypatch.context() as patched:
        patched.setattr("jzero.checkpoint.seal", fail)
        save_small(checkpoints, 4)
        with pytest.raises(CheckpointError, match=f"saving step 4 to {tmp_path} failed: OSError: .*on fire") as caught:
            {
                "save": lambda: save_small(checkpoints, 6),
                "wait": checkpoints.wait,
                "close": checkpoints.close,
                "restore": lambda: checkpoints.restore(SMALL_TARGETS),
            }[call]()
    assert "Older checkpoints are untouched" in str(caught.value)
    if call == "close":
        checkpoints = Checkpointer(tmp_path, keep_last=1, keep_best=0, asynchronous=True)
    assert_small(checkpoints.restore(SMALL_TARGETS), 2)  # told once, then it works again
    save_small(checkpoints, 4)
    assert_small(checkpoints.restore(SMALL_TARGETS), 4)
    checkpoints.close()
    assert {path.name for path in tmp_path.iterdir()} == {"JZERO_CHECKPOINTS", "4"}


def test_a_directory_that_turns_into_a_file_stops_the_save(tmp_path):
    directory, aside = tmp_path / "run", tmp_path / "aside"
    with open_checkpoints(directory) as checkpoints:
        save_small(checkpoints, 2)
        checkpoints.wait()
        directory.rename(aside)
        directory.touch()
        with pytest.raises(CheckpointError, match=f"saving step 4 to {directory} failed: NotADirectoryError"):
            save_small(checkpoints, 4)
        directory.unlink()
        aside.rename(directory)
        assert_small(checkpoints.restore(SMALL_TARGETS), 2)


def test_a_full_disk_loses_no_older_step(tmp_path):
    leaves = {"w": ((512, 513), jnp.float32, 0)}
    targets = targets_on(1, leaves=leaves)  # one write: of several that fail Orbax leaves some to warn at random
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save(checkpoints, step):
        checkpoints.save(step, place(values_of(leaves, step), targets), shapes_of(targets), {})

    with open_checkpoints(tmp_path, keep_last=1, asynchronous=False) as checkpoints:
        save(checkpoints, 2)
        message = r"saving step 4 .* failed: (.|\n)*1,050,624 bytes; [\d,]+ bytes are free"
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, unlimited[1]))
            with pytest.raises(CheckpointError, match=message):
                save(checkpoints, 4)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert_restored(checkpoints.restore(targets).arrays, targets, values_of(leaves, 2))
        save(checkpoints, 6)
        assert_restored(checkpoints.restore(targets).arrays, targets, values_of(leaves, 6))
        assert {path.name for path in tmp_path.iterdir()} == {"JZERO_CHECKPOINTS", "6"}


@pytest.mark.parametrize(
    ("path", "made", "message"),
    [
        ("file", "", "file cannot be used: File exists"),
        ("file/below", "", "file/below cannot be used: Not a directory"),
        ("/proc/nowhere/run", None, "/proc/nowhere/run cannot be used: No such file or directory"),
        ("/proc/sys", None, "/proc/sys cannot be used: "),  # even root writes no files there
        ("foreign", "foreign/100/model.bin", r"did not write \(100\)"),
        ("orbax", "orbax/_CHECKPOINT_METADATA", r"did not write \(_CHECKPOINT_METADATA\)"),
        ("run/6", "run/6/jzero.json", "run/6 is one step .* give its parent .*run"),
    ],
)
def test_a_directory_that_cannot_serve_is_refused_at_once(tmp_path, path, made, message):
    if made is not None:
        file = tmp_path / (made or "file")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    with open_checkpoints(tmp_path / path) as checkpoints, pytest.raises(CheckpointError, match=message):
        save_small(checkpoints, 1)
    assert not list(tmp_path.rglob("JZERO_CHECKPOINTS"))


def test_a_directory_with_other_files_can_serve(tmp_path, monkeypatch):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "metrics.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    with open_checkpoints("runs/a") as checkpoints:
        save_small(checkpoints, 1)
    shutil.copytree("runs/a/1", "moved/1")
    for directory in (tmp_path / "runs" / "a", "moved"):
        with open_checkpoints(directory) as checkpoints:
            assert_small(checkpoints.restore(SMALL_TARGETS), 1)
    with pytest.raises(CheckpointError, match="keep_last=0"):
        Checkpointer(tmp_path, keep_last=0, keep_best=0, asynchronous=True)


BASE = {f"blocks/{i}/w": ((8, 4), jnp.float32, 0) for i in range(3)} | {"key": ((), KEYS, None)}
OTHER_KEYS = jax.random.key(0, impl="rbg").dtype
MISFITS = {  # name: (leaves of the target, lines of the message)
    "fewer layers": (
        {k: v for k, v in BASE.items() if k != "blocks/2/w"},
        ["1 only in the checkpoint:", "    blocks/2/w"],
    ),
    "more layers": (
        BASE | {f"blocks/{i}/w": BASE["blocks/0/w"] for i in (3, 4)},
        ["2 missing in the checkpoint:", "    blocks/3/w", "    blocks/4/w"],
    ),
    "renamed": (
        {k.replace("blocks/1", "block/1"): v for k, v in BASE.items()},
        ["1 missing in the checkpoint:", "    block/1/w", "1 only in the checkpoint:", "    blocks/1/w"],
    ),
    "other width": (
        BASE | {"blocks/0/w": ((8, 5), jnp.float32, 0), "blocks/1/w": ((7, 4), jnp.float32, 0)},
        [
            "2 of another shape:",
            "    blocks/0/w: (8, 4) in the checkpoint, (8, 5) here",
            "    blocks/1/w: (8, 4) in the checkpoint, (7, 4) here",
        ],
    ),
    "scanned": (
        {"blocks/w": ((3, 8, 4), jnp.float32, 1), "key": BASE["key"]},
        ["1 missing in the checkpoint:", "    blocks/w", "3 only in the checkpoint:", "    blocks/2/w"],
    ),
    "other dtypes": (
        BASE | {"blocks/2/w": ((8, 4), jnp.bfloat16, 0), "key": ((), OTHER_KEYS, None)},
        [
            "2 of another dtype:",
            "    blocks/2/w: float32 in the checkpoint, bfloat16 here",
            "    key: key<fry> in the checkpoint, key<rbg> here",
        ],
    ),
    "all at once": (
        {"blocks/0/w": ((9, 4), jnp.bfloat16, 0), "other": ((), jnp.int32, None)},
        [
            "1 missing in the checkpoint:",
            "3 only in the checkpoint:",
            "    blocks/0/w: (8, 4) in the checkpoint, (9, 4) here",
            "    blocks/0/w: float32 in the checkpoint, bfloat16 here",
        ],
    ),
    "long lists": (
        BASE | {f"new/{i:02}": ((), jnp.float32, None) for i in range(40)},
        ["40 missing in the checkpoint:", "    new/00", "    new/11", "    and 28 more"],
    ),
}


@pytest.fixture(scope="module")
def base_saved(tmp_path_factory) -> Path:
    directory, targets = tmp_path_factory.mktemp("base"), targets_on(8, leaves=BASE)
    with open_checkpoints(directory) as checkpoints:
        checkpoints.save(5, place(values_of(BASE), targets), shapes_of(targets), {})
    return directory


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_checkpoint_that_does_not_fit_is_refused_with_every_difference(base_saved, misfit):
    leaves, expected = MISFITS[misfit]
    with open_checkpoints(base_saved) as checkpoints:
        assert_restored(
            checkpoints.restore(targets_on(2, leaves=BASE)).arrays,
            targets_on(2, leaves=BASE),
            values_of(BASE),
        )
        with pytest.raises(CheckpointError) as caught:
            checkpoints.restore(targets_on(2, leaves=leaves))
    lines = str(caught.value).splitlines()
    assert lines[0] == f"step 5 of {base_saved} does not fit:"
    assert [line.strip() for line in expected if line.strip() not in [found.strip() for found in lines]] == []
    assert "Use the model, optimizer and precision it was saved with" in lines[-1]
    assert len(lines) < 20


def test_a_true_shape_must_fit_into_the_stored_one(base_saved, tmp_path):
    targets = targets_on(2, leaves=BASE)
    narrow = targets | {"blocks/0/w": ArrayTarget((8, 4), (6, 4), jnp.float32, sharding_on(2, 0))}
    message = r"blocks/0/w: the true shape \(8, 4\) does not fit into the stored shape \(6, 4\)"
    with open_checkpoints(base_saved) as checkpoints, pytest.raises(CheckpointError, match=message):
        checkpoints.restore(narrow)
    arrays = place(values_of(BASE), targets)
    with open_checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=r"blocks/0/w: the true shape \(8, 6\) does not fit"):
            checkpoints.save(1, arrays, shapes_of(targets) | {"blocks/0/w": (8, 6)}, {})
        with pytest.raises(CheckpointError, match="same names; not in both: extra"):
            checkpoints.save(1, arrays, shapes_of(targets) | {"extra": (8, 6)}, {})


KILLED = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp
from jzero.checkpoint import Checkpointer
checkpoints = Checkpointer(sys.argv[1], keep_last=2, keep_best=0, asynchronous=True)
step = checkpoints.latest_step() or 0
while True:
    step += 1
    arrays = {str(i): jnp.full((300, 50 + i), step, jnp.int32) for i in range(8)}
    checkpoints.save(step, arrays, {name: array.shape for name, array in arrays.items()}, {"step": step})
"""


def test_a_process_killed_while_saving_leaves_a_whole_step(tmp_path):
    leaves = {str(i): ((300, 50 + i), jnp.int32, None) for i in range(8)}
    targets, last = targets_on(1, leaves=leaves), 0
    for delay in (0.0, 0.03):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path(__file__).parents[1])
        deadline = time.monotonic() + 60
        while not (tmp_path / str(last + 5)).exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(delay)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        with open_checkpoints(tmp_path) as checkpoints:
            restored = checkpoints.restore(targets)
        assert restored.step >= last + 5
        assert restored.record == {"step": restored.step}
        for array in restored.arrays.values():
            np.testing.assert_array_equal(np.asarray(array), restored.step)
        last = restored.step


# what a kill, a power cut or a file system in a bad way leave


@pytest.mark.parametrize("killed_at", ["set aside", "named"])
def test_a_kill_while_a_step_is_replaced_loses_neither(tmp_path, monkeypatch, killed_at):
    """Killed between the two renames there is but the sealed folder; it is restored and then gets its name."""

    class Killed(BaseException):
        pass

    def kill(path, *args, **kwargs):
        if killed_at == "named" or path.name.endswith(".saving"):
            raise Killed
        return rename(path, *args)

    rename, directory = Path.rename, tmp_path / "run"
    with open_checkpoints(directory) as checkpoints:
        save_small(checkpoints, 4, seed=40)
    with open_checkpoints(directory) as checkpoints, monkeypatch.context() as patched:
        patched.setattr(*((shutil, "rmtree") if killed_at == "named" else (Path, "rename")), kill)
        patched.setattr("jzero.checkpoint.clear_leftovers", lambda directory: None)
        save_small(checkpoints, 4, seed=41)
        with pytest.raises(Killed):
            checkpoints.wait()
    names = {path.name for path in directory.iterdir()}
    assert names == {"JZERO_CHECKPOINTS", "4.deleting", "4" if killed_at == "named" else "4.saving"}
    before = snapshot(directory)
    with open_checkpoints(directory) as checkpoints:
        assert checkpoints.steps() == [4]
        assert_small(checkpoints.restore(SMALL_TARGETS), 4, seed=41)
        assert snapshot(directory) == before
        save_small(checkpoints, 6)
        assert_small(checkpoints.restore(SMALL_TARGETS, 4), 4, seed=41)
    assert {path.name for path in directory.iterdir()} == {"JZERO_CHECKPOINTS", "4", "6"}


def snapshot(directory: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in [directory, *directory.rglob("*")]}


def test_a_restore_writes_nothing(three_steps):
    before = snapshot(three_steps)
    with open_checkpoints(three_steps) as checkpoints:
        assert_small(checkpoints.restore(SMALL_TARGETS), 6)
    assert snapshot(three_steps) == before


def test_a_restore_from_nowhere_makes_nothing(tmp_path):
    with open_checkpoints(tmp_path / "typo" / "run") as checkpoints:
        with pytest.raises(CheckpointError, match=r"typo/run cannot be used: No such file .* that holds checkpoints"):
            checkpoints.restore(SMALL_TARGETS)
        assert (checkpoints.steps(), checkpoints.latest_step()) == ([], None)
    assert not list(tmp_path.iterdir())


def test_a_step_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Every file and folder of it; and its name is before the step it replaces is deleted."""
    done, fsync, rename, rmtree = [], os.fsync, Path.rename, shutil.rmtree

    def noting(act, call):
        def noted(what, *args, **kwargs):
            path = Path(os.readlink(f"/proc/self/fd/{what}")) if isinstance(what, int) else what
            done.append((act, path.relative_to(tmp_path).as_posix()))
            return call(what, *args, **kwargs)

        return noted

    with open_checkpoints(tmp_path) as checkpoints:
        save_small(checkpoints, 4, seed=40)
    with open_checkpoints(tmp_path) as checkpoints, monkeypatch.context() as patched:
        patched.setattr(os, "fsync", noting("fsync", fsync))
        patched.setattr(Path, "rename", noting("rename", rename))
        patched.setattr(shutil, "rmtree", noting("rmtree", rmtree))
        save_small(checkpoints, 4, seed=41)
        checkpoints.wait()
    named = done.index(("rename", "4.saving"))
    within = {path.relative_to(tmp_path / "4").as_posix() for path in (tmp_path / "4").rglob("*")} - {"jzero.json"}
    assert len(within) > 5
    synced = [path for act, path in done[:named] if act == "fsync"]
    assert {"4.saving", *(f"4.saving/{path}" for path in within)} <= set(synced)
    assert max(synced.index(f"4.saving/{path}") for path in within) < next(
        number for number, path in enumerate(synced) if path.startswith("4.saving/jzero.json")
    )
    assert done[named + 1 :] == [("fsync", "."), ("rmtree", "4.deleting")]


@pytest.mark.parametrize(("number", "saved"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_file_system_that_cannot_sync_folders_serves_but_not_a_failing_disk(tmp_path, monkeypatch, number, saved):
    def refuse(file):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(file)

    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", refuse)
    with open_checkpoints(tmp_path) as checkpoints:
        save_small(checkpoints, 2)
        with contextlib.nullcontext() if saved else pytest.raises(CheckpointError, match="Input/output error"):
            checkpoints.wait()
        assert checkpoints.steps() == ([2] if saved else [])


@pytest.mark.parametrize("what", ["rename", "rmtree"])
def test_an_old_step_that_cannot_be_deleted_fails_no_save(tmp_path, monkeypatch, caplog, what):
    def refuse(path, *args, **kwargs):
        if path.name.startswith("2"):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        return rename(path, *args)

    rename = Path.rename
    with open_checkpoints(tmp_path, keep_last=1) as checkpoints:
        save_small(checkpoints, 2)
        checkpoints.wait()
        with monkeypatch.context() as patched:
            patched.setattr(*((Path, "rename") if what == "rename" else (shutil, "rmtree")), refuse)
            save_small(checkpoints, 4)
            checkpoints.wait()
        assert re.search(rf"{tmp_path}/2.* could not be deleted: .*not permitted.*by hand", caplog.text)
        assert_small(checkpoints.restore(SMALL_TARGETS), 4)
        save_small(checkpoints, 6)
        checkpoints.wait()
        assert {path.name for path in tmp_path.iterdir()} == {"JZERO_CHECKPOINTS", "6"}


def test_an_engine_deletes_nothing_unless_asked_and_never_a_step_with_an_evaluation_loss(tmp_path):
    config = {"checkpoint": {"keep_last": 1, "keep_best": 0}}
    engine = jzero.initialize(lambda rngs: nnx.Linear(8, 8, rngs=rngs), lambda m, b: m(b).mean(), None, config)
    with open_checkpoints(tmp_path) as checkpoints:
        for step, loss in ((1, 2.0), (2, 3.0), (3, None)):
            checkpoints.save(step, engine.arrays(), engine.shapes(), {}, eval_loss=loss)
    for step in (4, 5):
        engine.state = dataclasses.replace(engine.state, step=engine.state.step + (step - int(engine.state.step)))
        engine.save(tmp_path)
    assert list(complete_steps(tmp_path)) == [1, 2, 3, 4, 5]
    engine.state = dataclasses.replace(engine.state, step=engine.state.step + 1)
    engine.save(tmp_path, keep_last=2)
    assert list(complete_steps(tmp_path)) == [1, 2, 5, 6]
