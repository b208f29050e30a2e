"""A run from its config to its run directory: what it leaves, how it goes on, and what it refuses."""

import csv
import errno
import fcntl
import io
import json
import logging
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jzero import trainer as trainer_module
from jzero.config import Config, load_config, make_config
from jzero.data import make_data
from jzero.engine import Engine
from jzero.errors import CheckpointError, ConfigError, MeshError, NonFiniteError
from jzero.loss import WeightedLoss
from jzero.manifest import complete_steps
from jzero.metrics import Row
from jzero.rundir import find_differences, find_start, locked, open_run_directory, write_config
from jzero.signals import stop_signals
from jzero.train import main
from jzero.trainer import Trainer, run_training

TINY = {
    "model": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "data": {"source": "synthetic", "synthetic_tokens": 20_000, "sequence_length": 16},
    "zero": {"stage": 3, "min_shard_elements": 64},
    "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2},
    "train": {"num_steps": 6, "global_batch_size": 8, "eval_every": 3, "eval_batches": 2, "sample_tokens": 0},
    "checkpoint": {"save_every": 2, "keep_last": 100},
    "log": {"tensorboard": False, "audit": "off"},  # test_audit.py
}


def tiny(run_dir, **sections) -> Config:
    """TINY in `run_dir`, with fields of some sections replaced."""
    sections.setdefault("train", {})
    sections["train"] = {"run_dir": str(run_dir), **sections["train"]}
    merged = {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in {**TINY, **sections}}
    merged["data"] = {"cache_dir": str(run_dir.parent / "cache"), **merged["data"]}
    return make_config(merged)


def train(config: Config) -> tuple[int, str]:
    """The exit code and what stood on the console, which is no terminal."""
    out = io.StringIO()
    code = run_training(config, Console(file=out, width=100))
    return code, out.getvalue()


MEASURED = ("tokens_per_second", "host_memory_bytes")  # no two runs share it


def read_rows(run_dir) -> list[Row]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def train_rows(run_dir) -> list[Row]:
    return [row for row in read_rows(run_dir) if "eval_loss" not in row]


def snapshot(directory) -> dict:
    """Content and time of change of every file but the lock, which names the last process that looked."""
    files = [path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != "lock"]
    return {path: (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) for path in files}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """An undisturbed run of six steps: its directory and its console output."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    code, output = train(tiny(run_dir, train={"sample_tokens": 5, "sample_prompt": "ab"}))
    assert code == 0
    return run_dir, output


@pytest.fixture
def copy_of_straight(straight, tmp_path):
    shutil.copytree(straight[0], tmp_path / "run")
    return tmp_path / "run"


# what a run leaves


def test_each_step_has_one_row_and_each_evaluation_another(straight):
    rows = read_rows(straight[0])
    assert [(row["step"], "eval_loss" in row) for row in rows] == [
        (1, False), (2, False), (3, False), (3, True), (4, False), (5, False), (6, False), (6, True),
    ]  # fmt: skip
    for row in train_rows(straight[0]):
        assert row["skipped"] == row["skipped_in_a_row"] == 0
        assert 0 < row["loss"] < 2 * math.log(257)
        assert row["grad_norm"] > 0
    # Two steps of warm-up to 1e-2, then a cosine to zero at step 6: the rate that made each step.
    cosine = [0.0, 0.5, 1.0, *(0.5 + 0.5 * math.cos(math.pi * done / 4) for done in (1, 2, 3))]
    rates = [row["learning_rate"] for row in train_rows(straight[0])]
    assert rates == pytest.approx([1e-2 * part for part in cosine], rel=1e-5, abs=1e-9)


class OwnSink:
    """A user's: keeps rows, and fails at a step if told to."""

    def __init__(self, fail_at=None):
        self.rows, self.closed, self.fail_at = [], 0, fail_at

    def write(self, row):
        if row["step"] == self.fail_at:
            raise RuntimeError("lost the connection")
        self.rows.append(row)

    def close(self):
        self.closed += 1


def test_a_run_leaves_what_its_log_asks_for(tmp_path):
    log = {"csv": True, "every": 2, "profile_start": 2, "profile_steps": 1}
    settings = {"train": {"num_steps": 3}, "log": log, "hardware": {"peak_flops": 1e9}}
    config, sink, out = tiny(tmp_path / "run", **settings), OwnSink(), io.StringIO()
    assert run_training(config, Console(file=out, width=100), sinks=[sink]) == 0
    rows = read_rows(tmp_path / "run")
    assert (sink.rows, sink.closed) == (rows, 1)
    table = list(csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines()))
    assert [(line["loss"], line["eval_loss"]) for line in table] == [
        (str(row.get("loss", "")), str(row.get("eval_loss", ""))) for row in rows
    ]
    num_parameters = 2 * (4 * 16 * 16 + 3 * 16 * 64 + 2 * 16) + 16 + 16 * 257  # the embedding is only looked up
    work = 6 * num_parameters + 12 * 2 * 16 * 16
    for row in train_rows(tmp_path / "run")[1:]:
        assert row["mfu"] == pytest.approx(row["tokens_per_second"] * work / (8 * 1e9))
        assert f"mfu {row['mfu']:.1%}" in out.getvalue()
    assert ["host_memory_bytes" in row for row in rows] == [True, True, False, False]
    (trace,) = (tmp_path / "run" / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 1000
    late = OwnSink()
    assert run_training(config, Console(file=out), sinks=[late]) == 0  # already complete
    assert (late.rows, late.closed) == ([], 1)


def test_a_users_sink_that_fails_ends_the_run_by_name_and_what_is_saved_is_gone_on_from(tmp_path):
    trainer, _ = scripted(tmp_path, [3] * 6, checkpoint={"save_every": 2}, train={"eval_every": 0})
    trainer.sinks = [OwnSink(fail_at=4)]
    with pytest.raises(RuntimeError, match="lost the connection") as caught:
        trainer.run()
    assert caught.value.__notes__ == ["OwnSink could not take the row of step 4"]
    assert [row["step"] for row in train_rows(tmp_path / "run")] == [1, 2, 3, 4]
    assert trainer.checkpointer.saved == [2]


def test_speed_is_stated_from_the_second_step_on(straight):
    speeds = [row["tokens_per_second"] for row in train_rows(straight[0])]
    assert speeds[0] is None
    assert all(speed > 0 for speed in speeds[1:])


def test_the_run_directory_holds_the_resolved_config_and_checkpoints(straight):
    run_dir, _ = straight
    assert load_config(run_dir / "config.yaml") == tiny(run_dir, train={"sample_tokens": 5, "sample_prompt": "ab"})
    found = complete_steps(run_dir / "checkpoints")
    assert list(found) == [2, 4, 6]
    assert found[6].eval_loss == read_rows(run_dir)[-1]["eval_loss"]
    assert found[4].eval_loss is None  # evaluated at 3 and 6 only
    record = found[4].record
    assert (record["step"], record["next_sample"]) == (4, 4 * 8)
    assert record["eval_loss"] == read_rows(run_dir)[3]["eval_loss"]
    assert record["config"]["model"]["hidden_size"] == 16
    assert record["versions"]["jax"]


def test_the_console_says_what_came_out(straight):
    run_dir, output = straight
    last, evaluation = read_rows(run_dir)[-2:]
    summary = output[output.index("summary") :]
    for fact in (
        f"{last['loss']:.4f}",
        f"{evaluation['eval_loss']:.4f}",
        "unigram baseline",
        "parameters",
        "optimizer",
        str(run_dir / "checkpoints" / "6")[-20:],
    ):
        assert fact in summary
    assert int(re.search(r"│ tokens per second +│ ([\d,]+) ", summary)[1].replace(",", "")) > 0
    sample = re.sub(r"[│└─┴┘\s]", "", summary.partition("│ sample ")[2])
    assert sample.startswith("ab")  # its prompt
    assert len(sample) > len("ab")  # and what the model wrote
    assert "ZeRO stage 3" in output
    assert "step 0 of 6" in output
    assert "\x1b" not in output


# going on


def test_another_stage_and_split_goes_on_with_the_same_losses(copy_of_straight, straight):
    for step in (4, 6):
        shutil.rmtree(copy_of_straight / "checkpoints" / str(step))
    config = tiny(
        copy_of_straight,
        zero={"stage": 1},
        mesh={"replica": 2, "data": 4},
        train={"eval_every": 0},
        checkpoint={"save_every": 100, "asynchronous": False, "keep_last": 100},
    )
    code, output = train(config)
    assert code == 0
    assert f"going on from {copy_of_straight}/checkpoints/2\n" in output
    rows, expected = train_rows(copy_of_straight), train_rows(straight[0])
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[:2] == expected[:2]
    for name in ("loss", "grad_norm", "learning_rate"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in expected], rel=1e-5)
    # No evaluation at step 3 this time, which changed nothing; at the end one always takes place, and a save.
    last, before = read_rows(copy_of_straight)[-1], read_rows(straight[0])[-1]
    assert last == pytest.approx(before, rel=1e-5)
    assert sum("eval_loss" in row for row in read_rows(copy_of_straight)) == 1
    assert complete_steps(copy_of_straight / "checkpoints")[6].record["next_sample"] == 6 * 8
    assert load_config(copy_of_straight / "config.yaml") == config


def test_another_batch_size_goes_on_with_the_sample_after_the_last(copy_of_straight, monkeypatch):
    """The position in the data counts samples: after 2 steps of 8 and 4 of 16, none is left out, none comes twice."""
    for step in (4, 6):
        shutil.rmtree(copy_of_straight / "checkpoints" / str(step))
    seen, step_engine = [], Engine.step
    monkeypatch.setattr(Engine, "step", lambda self, batch: seen.append(batch["tokens"]) or step_engine(self, batch))
    config = tiny(copy_of_straight, train={"global_batch_size": 16})
    code, output = train(config)
    assert code == 0
    assert f"going on from {copy_of_straight}/checkpoints/2\n" in output
    data = make_data(config.data, seed=0, batch_size=8)
    expected = [batch["tokens"] for batch in data.train_batches(start_sample=2 * 8, num_steps=8)]
    assert [len(rows) for rows in seen] == [16] * 4
    np.testing.assert_array_equal(np.concatenate(seen), np.concatenate(expected))
    assert [row["step"] for row in train_rows(copy_of_straight)] == [1, 2, 3, 4, 5, 6]
    found = complete_steps(copy_of_straight / "checkpoints")
    assert {step: found[step].record["next_sample"] for step in found} == {2: 16, 4: 16 + 2 * 16, 6: 16 + 4 * 16}


TWO_EPOCHS = {
    "data": {"source": "synthetic", "synthetic_tokens": 1000, "sequence_length": 16},
    "train": {"num_steps": 6, "global_batch_size": 16, "eval_every": 0, "eval_batches": 1, "sample_tokens": 0},
    "checkpoint": {"save_every": 1, "keep_last": 100},
}


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory):
    """Six steps of 16 windows; the first epoch ends within step 4."""
    run_dir = tmp_path_factory.mktemp("epochs") / "run"
    config = tiny(run_dir, **TWO_EPOCHS)
    assert 3 * 16 < make_data(config.data, seed=0, batch_size=16).num_train_windows < 4 * 16
    assert train(config)[0] == 0
    return run_dir


def go_on(run_dir, after: int, copy, **train_fields) -> list[Row]:
    """All rows, less what is measured, of a copy of the run that goes on after that step."""
    shutil.copytree(run_dir, copy)
    for step in range(after + 1, 7):
        shutil.rmtree(copy / "checkpoints" / str(step))
    sections = {**TWO_EPOCHS, "train": TWO_EPOCHS["train"] | train_fields}
    code, output = train(tiny(copy, **sections))
    assert code == 0
    assert f"going on from {copy}/checkpoints/{after}\n" in output
    assert complete_steps(copy / "checkpoints")[6].record["next_sample"] == 6 * 16
    return rows_as_computed(copy)


def rows_as_computed(run_dir) -> list[Row]:
    return [{name: row[name] for name in row if name not in MEASURED} for row in read_rows(run_dir)]


@pytest.mark.parametrize("after", [pytest.param(3, marks=pytest.mark.slow), 5])
def test_a_run_goes_on_across_the_end_of_an_epoch_and_within_the_second(two_epochs, tmp_path, after):
    assert go_on(two_epochs, after, tmp_path / "run") == rows_as_computed(two_epochs)


def test_other_micro_batches_go_on_with_the_same_losses(two_epochs, tmp_path):
    rows, expected = go_on(two_epochs, 2, tmp_path / "run", accumulation_steps=2), rows_as_computed(two_epochs)
    assert rows != expected  # another order of addition
    assert rows[:2] == expected[:2]
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("num_steps", [6, 5])
def test_a_finished_run_is_left_untouched(copy_of_straight, num_steps, monkeypatch):
    before = snapshot(copy_of_straight)
    monkeypatch.setattr(trainer_module, "initialize", pytest.fail)
    code, output = train(tiny(copy_of_straight, train={"num_steps": num_steps}))
    assert code == 0
    assert output.startswith(f"already complete: {copy_of_straight}/checkpoints/6")
    assert snapshot(copy_of_straight) == before


def test_a_finished_run_whose_last_checkpoint_was_altered_goes_on_from_the_one_before(copy_of_straight, caplog):
    """Its size is right; only the checksum tells."""
    data = max((copy_of_straight / "checkpoints" / "6").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    code, output = train(tiny(copy_of_straight))
    assert code == 0
    assert "already complete" not in output
    assert f"going on from {copy_of_straight}/checkpoints/4" in output
    assert "damaged" in caplog.text
    assert [row["step"] for row in read_rows(copy_of_straight) if "loss" in row] == list(range(1, 7))


def test_changed_text_is_not_gone_on_with(copy_of_straight, monkeypatch):
    make = trainer_module.make_data

    def changed(*args, **kwargs):
        data = make(*args, **kwargs)
        return SimpleNamespace(vocab_size=data.vocab_size, description=data.description, fingerprint="other")

    monkeypatch.setattr(trainer_module, "make_data", changed)
    stub = SimpleNamespace(report=lambda: "", targets=dict)
    monkeypatch.setattr(trainer_module, "initialize", lambda **_: stub)
    record = complete_steps(copy_of_straight / "checkpoints")[6].record
    monkeypatch.setattr(
        trainer_module.Checkpointer, "restore", lambda *_: SimpleNamespace(step=6, record=record, arrays={})
    )
    with pytest.raises(CheckpointError, match=r"the data that .* was trained on has changed"):
        train(tiny(copy_of_straight, train={"num_steps": 9}))


def test_a_run_goes_on_with_another_learning_rate_and_says_so(copy_of_straight):
    """The remedy that the message of a run gone wrong names."""
    before = train_rows(copy_of_straight)[-1]["learning_rate"]
    optimizer = {"learning_rate": 1e-4, "warmup_steps": 2, "clip_norm": 0.5}
    code, output = train(tiny(copy_of_straight, train={"num_steps": 8}, optimizer=optimizer))
    assert code == 0
    assert "optimizer.clip_norm was 1.0, is 0.5 from here on" in output
    assert "optimizer.learning_rate was" in output
    assert train_rows(copy_of_straight)[-1]["learning_rate"] < before


@pytest.mark.parametrize(("schedule", "ends"), [("cosine", True), ("inverse_sqrt", False)])
def test_only_a_schedule_that_ends_is_said_to_end_elsewhere(tmp_path, schedule, ends):
    """The others take no optimizer.decay_steps, which the message names."""
    trainer, out = scripted(tmp_path, [3, 3, 3, 3], optimizer={"schedule": schedule})
    earlier = tiny(tmp_path / "run", optimizer={"schedule": schedule}, train={"num_steps": 3}).model_dump(mode="json")
    record = {"data": "", "next_sample": 8, "eval_loss": None, "config": earlier}
    trainer.checkpointer.restore = lambda targets: SimpleNamespace(step=2, record=record, arrays={})
    trainer.engine.targets, trainer.engine.load = dict, lambda arrays: None
    trainer.restore()
    assert ("optimizer.decay_steps=3 keeps the old one" in " ".join(out.getvalue().split())) is ends


# whose run is it


@pytest.mark.parametrize(
    "section",
    [
        {"model": {"hidden_size": 32}},
        {"model": {"scan_layers": False}},
        {"data": {"sequence_length": 8}},
        {"data": {"synthetic_tokens": 30_000}},
        {"data": {"validation_fraction": 0.1}},
        {"train": {"seed": 1}},
        {"optimizer": {"b1": 0.8, "warmup_steps": 2}},
        {"precision": {"preset": "bf16"}},
        {"train": {"frozen": ("norm/*",)}},
        {"train": {"ema_decay": 0.9}},
        {"checkpoint": {"start_from": "elsewhere"}},
    ],
)
def test_what_makes_another_run(tmp_path, section):
    ((name, fields),) = section.items()
    field, value = next(iter(fields.items()))
    before, after = tiny(tmp_path / "run"), tiny(tmp_path / "run", **section)
    differences = find_differences(before, after)
    old = before.model_dump(mode="json")[name][field]
    value = list(value) if isinstance(value, tuple) else value
    if name != "precision":  # its preset is spelt out
        assert differences == [f"{name}.{field}: {old!r} in the directory, {value!r} now"]
    else:
        assert [line.split(":")[0] for line in differences] == [
            "precision.params", "precision.compute", "precision.master",
        ]  # fmt: skip


@pytest.mark.parametrize(
    "section",
    [
        {"zero": {"stage": 0, "min_shard_elements": 0}},
        {"mesh": {"replica": 2}},
        {"train": {"num_steps": 9, "global_batch_size": 16, "accumulation_steps": 2, "eval_every": 1}},
        {"checkpoint": {"save_every": 1, "resume": "must"}},
        {"runtime": {"fake_devices": 4}},
        {"train": {"num_steps": 9}, "optimizer": {"decay_steps": 6}},  # as a run with more steps is advised to
        {"log": {"every": 1}},
        {"model": {"remat": "none"}},
        {"data": {"num_workers": 1, "prefetch_batches": 7, "cache_dir": "elsewhere"}},
        {"precision": {"preset": "bf16", "params": "float32", "compute": "float32", "master": None}},
    ],
)
def test_what_may_change_within_a_run(tmp_path, section):
    before, after = tiny(tmp_path / "run"), tiny(tmp_path / "run", **section)
    assert before != after
    assert find_differences(before, after) == []


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        (
            {"model": {"hidden_size": 32}},
            "holds another run.*\n  model.hidden_size: 16 in the directory, 32 now",
        ),
        ({"train": {"seed": 7}}, "\n  train.seed: 0 in the directory, 7 now"),
        ({"checkpoint": {"resume": "never"}}, r"resume=never.* checkpoints \(steps 2, 4, 6\); name another"),
    ],
)
def test_a_directory_with_another_run_is_refused(copy_of_straight, sections, error, monkeypatch):
    monkeypatch.setattr(trainer_module, "initialize", pytest.fail)
    before = snapshot(copy_of_straight)
    with pytest.raises(CheckpointError, match=error):
        train(tiny(copy_of_straight, **sections))
    assert snapshot(copy_of_straight) == before


def test_the_checkpoint_says_whose_run_it_is_when_the_config_file_is_gone_or_edited(copy_of_straight):
    config = tiny(copy_of_straight, train={"num_steps": 9})
    directory = open_run_directory(str(copy_of_straight))
    assert find_start(config, directory) == 6
    write_config(directory, tiny(copy_of_straight, train={"seed": 3}))
    assert find_start(config, directory) == 6
    directory.config.unlink()
    assert find_start(config, directory) == 6
    with pytest.raises(CheckpointError, match=r"train\.seed"):
        find_start(tiny(copy_of_straight, train={"seed": 3}), directory)


def test_a_run_without_checkpoints_yet_is_known_by_its_config_file(tmp_path):
    directory = open_run_directory(str(tmp_path / "run"))
    config = tiny(tmp_path / "run")
    assert find_start(config, directory) is None
    write_config(directory, config)
    assert find_start(config, directory) is None
    assert find_start(tiny(tmp_path / "run", checkpoint={"resume": "never"}), directory) is None
    with pytest.raises(CheckpointError, match=r"model\.hidden_size: 16 in the directory, 64 now"):
        find_start(tiny(tmp_path / "run", model={"hidden_size": 64}), directory)
    directory.config.write_text("model: {width: 3}\n")
    with pytest.raises(CheckpointError, match=r"cannot be read here.*\n?.*width"):
        find_start(config, directory)


@pytest.mark.parametrize("resume", ["auto", "must", "never"])
def test_damaged_checkpoints_alone_are_neither_ignored_nor_overwritten(copy_of_straight, resume):
    for manifest in copy_of_straight.glob("checkpoints/*/jzero.json"):
        manifest.unlink()
    with pytest.raises(CheckpointError, match="steps 2, 4, 6"):
        find_start(tiny(copy_of_straight, checkpoint={"resume": resume}), open_run_directory(str(copy_of_straight)))


# what cannot work is told before anything compiles


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"train": {"global_batch_size": 12}}, ConfigError, r"train\.global_batch_size = 12.* 8 shards"),
        ({"mesh": {"data": 3}}, MeshError, r"mesh\.data = 3.*8 devices"),
        ({"model": {"vocab_size": 100}}, ConfigError, r"model\.vocab_size.*100.*257"),
        ({"checkpoint": {"resume": "must"}}, CheckpointError, r"resume=must.* no complete checkpoint"),
    ],
)
def test_what_cannot_work_is_told_before_anything_compiles(tmp_path, sections, error, message, monkeypatch):
    monkeypatch.setattr(trainer_module, "initialize", pytest.fail)
    with pytest.raises(error, match=message):
        train(tiny(tmp_path / "run", **sections))
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize("inside", [False, True])
def test_a_file_in_place_of_the_run_directory_is_named(tmp_path, inside):
    (tmp_path / "file").write_text("mine")
    run_dir = tmp_path / "file" / "run" if inside else tmp_path / "file"
    with pytest.raises(ConfigError, match=r"train\.run_dir='.*file.*' cannot be a directory"):
        open_run_directory(str(run_dir))
    assert (tmp_path / "file").read_text() == "mine"


# the loop, with an engine that does as it is told


class SendSignal(float):
    """A loss whose step gets the process a signal."""

    def __new__(cls, number):
        self = super().__new__(cls, 3.0)
        self.number = number
        return self


class ScriptedEngine:
    """Step k does what script[k - 1] says: it has that loss, or is skipped ("skip")."""

    def __init__(self, script):
        self.script, self.step_number, self.in_a_row, self.skipped = script, 0, 0, 0
        self.plan = SimpleNamespace(bytes_per_device=lambda: {"parameters": 4}, gradients={"some/leaf": None})

    def step(self, batch):
        act, self.step_number = self.script[self.step_number], self.step_number + 1
        if isinstance(act, SendSignal):
            signal.raise_signal(act.number)
        skip = act == "skip"
        self.in_a_row, self.skipped = (self.in_a_row + 1, self.skipped + 1) if skip else (0, self.skipped)
        loss = math.nan if skip else float(act)
        return {
            "loss": jnp.float32(loss),
            "grad_norm": jnp.float32(loss),
            "skipped": jnp.int32(self.skipped),
            "skipped_in_a_row": jnp.int32(self.in_a_row),
            "non_finite_leaf": jnp.int32(0 if skip else -1),
        }

    has_average = False

    def evaluate(self, batch, averaged):
        assert not averaged
        rows = batch["tokens"]
        return {"loss": jnp.float32(rows.mean()), "weight": jnp.float32(rows.size)}

    def arrays(self):
        return {"step": self.step_number}

    def shapes(self):
        return {}


class ScriptedCheckpointer:
    """Remembers saves; a step's row must be on file by then."""

    def __init__(self, run_dir):
        self.run_dir, self.saved, self.losses = run_dir, [], {}

    def save(self, step, arrays, shapes, record, eval_loss=None):
        assert arrays["step"] == record["step"] == step
        assert train_rows(self.run_dir)[-1]["step"] == step
        self.saved.append(step)
        self.losses[step] = eval_loss

    def wait(self):
        pass

    def latest_step(self):
        return self.saved[-1] if self.saved else None


class ScriptedData:
    tokenizer, fingerprint, unigram_loss, closed = None, "", 5.0, False

    def train_batches(self, start_sample, num_steps):
        try:
            for _ in range(num_steps):
                yield {"tokens": np.zeros((4, 17), np.int32)}
        finally:
            self.closed = True

    def validation_batches(self, num_batches):
        # Mean 1 over 4 rows and mean 4 over 2: together 2.
        yield {"tokens": np.full((4, 17), 1, np.int32)}
        yield {"tokens": np.full((2, 17), 4, np.int32)}


def scripted(tmp_path, script, **sections):
    """A trainer of len(script) steps whose parts are scripted, and its console."""
    sections["train"] = {"num_steps": len(script), **sections.get("train", {})}
    out = io.StringIO()
    run_dir = tmp_path / "run"
    trainer = Trainer(
        config=tiny(run_dir, **sections),
        console=Console(file=out, width=100),
        directory=open_run_directory(str(run_dir)),
        checkpointer=ScriptedCheckpointer(run_dir),
        data=ScriptedData(),
        engine=ScriptedEngine(script),
        batch_size=4,
    )
    return trainer, out


def test_evaluation_weighs_batches_by_their_tokens_and_rates_the_checkpoint(tmp_path):
    trainer, _ = scripted(tmp_path, [3, 3, 3, 3], train={"eval_every": 2}, checkpoint={"save_every": 1})
    assert trainer.run() == 0
    assert [row for row in read_rows(tmp_path / "run") if "eval_loss" in row] == [
        {"step": 2, "eval_loss": 2.0},
        {"step": 4, "eval_loss": 2.0},
    ]
    assert trainer.checkpointer.losses == {1: None, 2: 2.0, 3: None, 4: 2.0}


@pytest.mark.parametrize(
    ("script", "save_every", "saved"),
    [
        ([3, 3, 3, 3, 3], 2, [2, 4, 5]),
        ([3, 3, 3, 3], 2, [2, 4]),
        ([3, 3, 3], 100, [3]),
        ([3, "skip", "skip", 3, 3, 3], 2, [4, 6]),  # due at 2: waits for 4, which is due itself
        ([3, "skip", 3, 3, 3], 2, [3, 4, 5]),
        ([3, 3, "skip"], 1, [1, 2, 3]),  # the last save takes place: a skipped step changed nothing
    ],
)
def test_saves_are_due_every_so_often_and_wait_for_a_good_step(tmp_path, script, save_every, saved):
    trainer, out = scripted(tmp_path, script, checkpoint={"save_every": save_every})
    assert trainer.run() == 0
    assert trainer.checkpointer.saved == saved
    skips = [step for step, act in enumerate(script, 1) if act == "skip" and script[step - 2] != "skip"]
    for step in skips:
        assert f"step {step} skipped" in out.getvalue()
    assert out.getvalue().count(" skipped: loss nan, gradient of some/leaf not finite") == len(skips)


def test_skipping_that_does_not_end_ends_the_run(tmp_path):
    script = [3, 2.5, "skip", 2.25, "skip", "skip", "skip", "skip", 3, 3]
    trainer, out = scripted(
        tmp_path, script, train={"max_skipped_steps": 3, "eval_every": 0}, checkpoint={"save_every": 2}
    )
    with pytest.raises(NonFiniteError) as caught:
        trainer.run()
    message = str(caught.value)
    assert "step 7 is the last of 3 in a row" in message
    assert "Last finite loss: 2.25." in message
    assert f"Last good checkpoint: {tmp_path}/run/checkpoints/4." in message
    assert trainer.checkpointer.saved == [2, 4]
    steps = [row["step"] for row in read_rows(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 7
    assert "step 3 skipped" in out.getvalue()
    assert caught.value.exit_code == 1


def test_a_loss_that_no_scale_mends_ends_a_float16_run(tmp_path, monkeypatch):
    """Fault D06: a real NaN halves the scale down to its floor; the run stops there and says what is to blame."""
    honest = trainer_module.language_model_loss

    def broken(model, batch):
        loss = honest(model, batch)
        return WeightedLoss(loss.total * jnp.where((model.norm.scale[...] == 1).all(), 1.0, jnp.nan), loss.weight)

    monkeypatch.setattr(trainer_module, "language_model_loss", broken)
    config = tiny(
        tmp_path / "run",
        precision={"preset": "fp16", "keep_float32": ["norm/*"]},
        loss_scale={"initial": 4, "hysteresis": 1},
        train={"num_steps": 20, "eval_every": 0},
        optimizer={"warmup_steps": 0},
    )
    with jax.numpy_dtype_promotion("standard"), pytest.raises(NonFiniteError) as caught:
        train(config)
    rows = train_rows(tmp_path / "run")
    assert [row["skipped"] for row in rows][:4] == [0, 1, 2, 3]
    assert [row["loss_scale"] for row in rows][:4] == [4, 4, 2, 1]
    message = str(caught.value)
    assert "step 4 is the last of 3 in a row" in message
    assert "(loss_scale.minimum=1.0: the scale is not to blame): loss nan" in message
    assert f"Last finite loss: {rows[0]['loss']}" in message


# averages and other runs' weights


def test_averaged_weights_are_evaluated_beside_those_in_training(tmp_path):
    code, _ = train(tiny(tmp_path / "run", train={"ema_decay": 0.5}))
    assert code == 0
    rows = [row for row in read_rows(tmp_path / "run") if "eval_loss" in row]
    assert [row["step"] for row in rows] == [3, 6]
    assert all(row["averaged_eval_loss"] != row["eval_loss"] for row in rows)
    kept = complete_steps(tmp_path / "run" / "checkpoints")
    assert kept[6].eval_loss == rows[-1]["averaged_eval_loss"]


def test_a_run_starts_from_the_weights_of_another(straight, tmp_path):
    """At another stage, with another optimizer; a rate of zero leaves them as they are."""
    fields = {"name": "sgd", "learning_rate": 0.0, "warmup_steps": 0}
    start = {"start_from": str(straight[0])}
    config = tiny(tmp_path / "run", optimizer=fields, zero={"stage": 1}, train={"num_steps": 2}, checkpoint=start)
    code, output = train(config)
    assert code == 0
    assert f"starting from the weights of {straight[0]}/checkpoints/6" in output
    last = [row["eval_loss"] for run in (straight[0], tmp_path / "run") for row in read_rows(run)[-1:]]
    assert last[1] == pytest.approx(last[0], rel=1e-6)
    code, output = train(tiny(tmp_path / "run", optimizer=fields, train={"num_steps": 3}, checkpoint=start))
    assert "starting from" not in output
    assert "going on from" in output


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"start_from": "nowhere"}, CheckpointError, r"checkpoint\.start_from='nowhere'.*nowhere/checkpoints"),
        ({"start_skip": ["a"]}, ConfigError, r"checkpoint\.start_skip = .*start_from, which is null"),
        ({"start_averaged": True}, ConfigError, r"checkpoint\.start_averaged = true.*start_from, which is null"),
    ],
)
def test_what_cannot_be_started_from_is_refused(fields, error, message, tmp_path):
    with pytest.raises(error, match=message):
        train(tiny(tmp_path / "run", checkpoint=fields))


def test_weights_of_another_model_are_refused_unless_named(straight, tmp_path):
    config = tiny(tmp_path / "run", model={"num_hidden_layers": 3}, checkpoint={"start_from": str(straight[0])})
    with pytest.raises(CheckpointError, match=r"checkpoint\.start_from=.*does not fit") as caught:
        train(config)
    assert "of another shape" in str(caught.value)
    assert "(skip: checkpoint.start_skip)" in str(caught.value)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_step_saves_and_leaves_the_handlers_as_they_were(tmp_path, number, code):
    trainer, out = scripted(
        tmp_path, [3, SendSignal(number), 3, 3], train={"eval_every": 0}, checkpoint={"save_every": 100}
    )
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    assert trainer.run() == code
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert [row["step"] for row in read_rows(tmp_path / "run")] == [1, 2]
    assert trainer.checkpointer.saved == [2]
    assert trainer.data.closed
    assert f"{number.name}: stopped after step 2, saved {tmp_path}/run/checkpoints/2" in out.getvalue()
    assert "summary" not in out.getvalue()


def test_a_signal_in_the_last_step_changes_nothing(tmp_path):
    trainer, out = scripted(tmp_path, [3, SendSignal(signal.SIGTERM)])
    assert trainer.run() == 0
    assert "summary" in out.getvalue()


def test_a_trainer_runs_outside_the_main_thread(tmp_path):
    trainer, _ = scripted(tmp_path, [3, 3])
    codes = []
    thread = threading.Thread(target=lambda: codes.append(trainer.run()))
    thread.start()
    thread.join()
    assert codes == [0]


# one process a directory, a disk that fails, and what power cuts leave


HOLDER = """
import sys
from jzero.rundir import locked, open_run_directory
with locked(open_run_directory(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_run_under_way_in_another_process_is_left_alone(copy_of_straight, monkeypatch):
    monkeypatch.setattr(trainer_module, "find_start", pytest.fail)
    command = [sys.executable, "-c", HOLDER, str(copy_of_straight)]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            before = snapshot(copy_of_straight)
            told = rf"train\.run_dir='{copy_of_straight}' is in use by process {holder.pid} on .*; wait .*stop it, or"
            with pytest.raises(CheckpointError, match=told):
                train(tiny(copy_of_straight))
            assert snapshot(copy_of_straight) == before
        finally:
            holder.kill()
    monkeypatch.undo()
    assert train(tiny(copy_of_straight))[0] == 0  # kill -9 let go of it


def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch, caplog):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), locked(open_run_directory(str(tmp_path))):
        assert f"{tmp_path} cannot be locked ([Errno {errno.ENOLCK}] No locks available)" in caplog.text


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.csv", "config.yaml", "tensorboard", "lock"])
def test_what_lies_in_the_way_of_a_file_of_the_run_is_named(tmp_path, name):
    trainer, _ = scripted(tmp_path, [3, 3], log={"tensorboard": True, "csv": True})
    in_the_way = tmp_path / "run" / name
    in_the_way.touch() if name == "tensorboard" else in_the_way.mkdir()
    run = trainer.run if name != "lock" else partial(train, trainer.config)
    with pytest.raises(ConfigError, match=rf"train\.run_dir='{tmp_path}/run' cannot be used: .*{name}.*; mend that"):
        run()


def test_a_disk_that_fails_is_one_message_and_exit_code_1(monkeypatch, capsys, tmp_path):
    def fail(config):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.jsonl")

    monkeypatch.setattr(trainer_module, "run_training", fail)
    assert main(["runtime.fake_devices=8"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: [Errno 28] No space left on device: 'metrics.jsonl'\nThe same command goes on")


def test_rows_without_a_checkpoint_are_kept_aside(tmp_path):
    trainer, out = scripted(tmp_path, [3, 3], log={"csv": True})
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n')
    (tmp_path / "run" / "metrics.csv").write_text("step,loss\n1,9.0\n")
    assert trainer.run() == 0
    assert (tmp_path / "run" / "metrics.jsonl.old").read_text() == '{"step": 1, "loss": 9.0}\n'
    assert (tmp_path / "run" / "metrics.csv.old").read_text() == "step,loss\n1,9.0\n"
    assert [row["loss"] for row in train_rows(tmp_path / "run")] == [3.0, 3.0]
    assert f"no checkpoint goes with {tmp_path}/run/metrics.jsonl: it is now metrics.jsonl.old" in out.getvalue()


def test_rows_are_on_the_disk_before_their_checkpoint_is_saved(tmp_path, monkeypatch):
    done, fsync = [], os.fsync

    def noted(file):
        done.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    trainer, _ = scripted(tmp_path, [3, 3, 3], checkpoint={"save_every": 2}, train={"eval_every": 0})
    save = trainer.checkpointer.save
    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(trainer.checkpointer, "save", lambda *args, **more: (done.append(args[0]), save(*args, **more)))
    assert trainer.run() == 0
    assert [act for act in done if act in ("metrics.jsonl", 2, 3)] == ["metrics.jsonl", 2, "metrics.jsonl", 3]


def test_the_time_of_a_save_is_not_that_of_a_step(tmp_path, monkeypatch):
    class Clock:
        now = 0.0

        def __call__(self):
            self.now += 1.0
            return self.now

    clock = Clock()
    trainer, _ = scripted(tmp_path, [3] * 6, checkpoint={"save_every": 2}, train={"eval_every": 0})
    save = trainer.checkpointer.save

    def slow(*args, **more):
        clock.now += 1000
        save(*args, **more)

    monkeypatch.setattr(trainer.checkpointer, "save", slow)
    monkeypatch.setattr(trainer_module, "Throughput", partial(trainer_module.Throughput, clock=clock))
    assert trainer.run() == 0
    assert [row["tokens_per_second"] for row in train_rows(tmp_path / "run")] == [None, *[4 * 16.0] * 5]


def test_a_handler_that_python_cannot_put_back_ends_as_the_default(monkeypatch):
    install, before = signal.signal, signal.getsignal(signal.SIGTERM)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(signal, "signal", lambda number, handler: install(number, handler) and None)
            with stop_signals():
                patched.undo()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        install(signal.SIGTERM, before)
        install(signal.SIGINT, signal.default_int_handler)


def test_a_step_killed_before_it_had_its_name_is_gone_on_from(copy_of_straight):
    for step in (2, 4):
        shutil.rmtree(copy_of_straight / "checkpoints" / str(step))
    (copy_of_straight / "checkpoints" / "6").rename(copy_of_straight / "checkpoints" / "6.saving")
    code, output = train(tiny(copy_of_straight))
    assert code == 0
    assert output.startswith(f"already complete: {copy_of_straight}/checkpoints/6")
    assert [path.name for path in (copy_of_straight / "checkpoints").glob("6*")] == ["6"]
