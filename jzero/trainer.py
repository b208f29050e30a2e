"""The training run: wires the parts and runs the loop.

A run can be stopped at any moment, by a signal or by pulling the plug, and started again with the same
command: the parameters, the data and the rows in metrics.jsonl go on as if nothing had happened.
"""

import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jzero.auditing import audit
from jzero.checkpoint import Checkpointer
from jzero.config import Config, make_config, plan_batch
from jzero.data import Feed, OwnData, make_data
from jzero.display import say, summary_table
from jzero.engine import Engine, initialize
from jzero.errors import AuditError, CheckpointError, DataError, NonFiniteError, UserError
from jzero.loss import WeightedLoss, cross_entropy
from jzero.manifest import clear_leftovers, listing
from jzero.mesh import batch_shards, make_mesh
from jzero.metrics import Row, Sink
from jzero.metrics.flops import tokens_at_peak
from jzero.metrics.profiler import ProfilerWindow
from jzero.metrics.throughput import Throughput
from jzero.metrics.writer import MetricWriter
from jzero.models import build_model
from jzero.report import human_bytes
from jzero.rundir import RunDirectory, assert_usable, find_start, locked, open_run_directory, write_config
from jzero.runtime import start
from jzero.sample import sample
from jzero.signals import StopSignal, stop_signals
from jzero.sinks import open_sinks


def run_training(
    config: Mapping[str, Any] | str | Path | Config,
    console: Console | None = None,
    sinks: Sequence[Sink] = (),
    *,
    data: OwnData | None = None,
) -> int:
    """Trains up to `train.num_steps`, going on from the run directory's newest checkpoint if there is one.

    config: as `initialize` takes it. sinks: take the rows too, beside those of `log`; closed at the end, however it
    comes. data: takes the place of what the config's data section names, windows and batches aside.

    Returns the exit code: 0 when the run is complete, now or already; 128 plus its number after SIGINT or SIGTERM, with
    everything saved.

    Raises UserError, before anything compiles, for what cannot work or is under way in another process, and
    NonFiniteError when `train.max_skipped_steps` steps in a row had no finite loss and gradient.
    """
    console = console or Console()
    with ExitStack() as stack:
        for sink in sinks:
            stack.callback(sink.close)
        config = make_config(config)
        start(config.runtime)
        directory = open_run_directory(config.train.run_dir)
        stack.enter_context(locked(directory))
        return _run(config, console, directory, sinks, data)


def _run(config: Config, console: Console, directory: RunDirectory, sinks: Sequence[Sink], own: OwnData | None) -> int:
    mesh = make_mesh(config.mesh)
    batch = plan_batch(config.train, batch_shards(mesh.shape))
    latest = find_start(config, directory)
    clear_leftovers(directory.checkpoints)
    if latest is not None and latest >= config.train.num_steps:
        say(console, f"already complete: {directory.checkpoint(latest)} of {config.train.num_steps} steps")
        return 0
    data = _make_feed(config, own, batch.global_batch_size)
    model = build_model(config.model, data.vocab_size)
    engine = initialize(model=model, loss=language_model_loss, optimizer=None, config=config)
    console.print(engine.report(), soft_wrap=True)
    say(console, data.description)
    keep = config.checkpoint
    checkpointer = Checkpointer(directory.checkpoints, keep.keep_last, keep.keep_best, keep.asynchronous)
    with closing(checkpointer):
        checkpointer.claim()
        trainer = Trainer(config, console, directory, checkpointer, data, engine, batch.global_batch_size, sinks)
        if latest is not None:
            trainer.restore()
        elif config.checkpoint.start_from is not None:
            trainer.take_weights(config.checkpoint.start_from)
        assert_counted(data, config.train.eval_batches)
        return trainer.run()


def _make_feed(config: Config, own: OwnData | None, batch_size: int) -> Feed:
    if own is not None:
        return own.batched(config, batch_size)
    return make_data(config.data, seed=config.train.seed, batch_size=batch_size, vocab_size=config.model.vocab_size)


def assert_counted(data: Feed, num_batches: int) -> None:
    """Raise DataError where an evaluation would count no target: before the first step, not after the last."""
    uncounted = 0
    with closing(data.validation_batches(num_batches)) as batches:
        for batch in batches:
            if np.any(batch.get("weights", True)):
                return
            uncounted += 1
    if uncounted:
        raise DataError(
            f"the loss counts no target of {uncounted} validation batches: raise train.eval_batches or "
            "data.validation_fraction, or put longer answers there"
        )


def language_model_loss(model: Any, batch: dict[str, jax.Array]) -> WeightedLoss:
    """Cross-entropy of each token given those before it.

    batch["tokens"] is int32 [B, T + 1]. Where the batch has them, batch["weights"], bool or float32 [B, T], says which
    targets count, and "positions" and "segments", int32 [B, T], go to the model by name.
    """
    tokens = batch["tokens"]
    places = {name: batch[name] for name in ("positions", "segments") if name in batch}
    return cross_entropy(model(tokens[:, :-1], **places), tokens[:, 1:], batch.get("weights"))


@dataclass
class Progress:
    """How far a run is: `step` counts optimizer steps, `next_sample` the windows taken from the data."""

    step: int = 0
    next_sample: int = 0
    train_loss: float | None = None
    last_finite_loss: float | None = None
    skipped_in_a_row: int = 0
    eval_loss: float | None = None
    evaluated_at: int | None = None
    saved_at: int | None = None


@dataclass
class Trainer:
    """The parts of a run and how far it is; `run` takes it to its end."""

    config: Config
    console: Console
    directory: RunDirectory
    checkpointer: Checkpointer
    data: Feed
    engine: Engine
    batch_size: int
    sinks: Sequence[Sink] = ()
    progress: Progress = field(default_factory=Progress)

    def restore(self) -> None:
        """Goes back to the newest complete checkpoint."""
        restored = self.checkpointer.restore(self.engine.targets())
        record, progress = restored.record, self.progress
        if record["data"] != self.data.fingerprint:
            raise CheckpointError(
                f"the data that train.run_dir={self.config.train.run_dir!r} was trained on has changed; "
                "bring the old data back, or name another train.run_dir to start anew with the new"
            )
        self.engine.load(restored.arrays)
        progress.step = progress.saved_at = restored.step
        progress.next_sample = record["next_sample"]
        progress.eval_loss = record["eval_loss"]
        say(self.console, f"going on from {self.directory.checkpoint(restored.step)}")
        now, earlier, optimizer = self.config.model_dump(mode="json"), record["config"], self.config.optimizer
        for section in ("optimizer", "loss_scale"):
            before = earlier.get(section, {})  # an earlier version's checkpoint lacks later fields
            for name, value in now[section].items():
                if value != before.get(name, value):
                    say(self.console, f"{section}.{name} was {before[name]}, is {value} from here on")
        num_steps, before = self.config.train.num_steps, record["config"]["train"]["num_steps"]
        if num_steps != before and optimizer.decay_steps is None and optimizer.schedule in ("linear", "cosine", "wsd"):
            say(
                self.console,
                f"train.num_steps was {before}, is {num_steps}: the learning rate's schedule now ends there; "
                f"optimizer.decay_steps={before} keeps the old one",
            )

    def take_weights(self, run_dir: str) -> None:
        """Starts from the newest weights of another run."""
        settings, source = self.config.checkpoint, RunDirectory(Path(run_dir).expanduser().absolute())
        try:
            taken = self.engine.load_weights(
                source.checkpoints, averaged=settings.start_averaged, skip=settings.start_skip
            )
        except UserError as error:
            raise type(error)(f"checkpoint.start_from={run_dir!r}: {error} (skip: checkpoint.start_skip)") from error
        say(self.console, f"starting from the weights of {source.checkpoint(taken.step)}")
        if taken.kept:
            say(self.console, f"as the seed makes them: {', '.join(taken.kept)}")
        for before, after in sorted(set(taken.converted.values())):
            paths = [path for path, pair in taken.converted.items() if pair == (before, after)]
            say(self.console, f"{before} there, {after} here: {listing(paths)}")

    def run(self) -> int:
        """Trains to the last step or a signal and saves; returns the exit code."""
        progress, num_steps, log = self.progress, self.config.train.num_steps, self.config.log
        at_peak = tokens_at_peak(self.config, self.engine.plan, jax.devices()[0].device_kind)
        throughput = Throughput(self.batch_size * self.config.data.sequence_length, tokens_at_peak=at_peak)
        traced = range(log.profile_start, log.profile_start + log.profile_steps) if log.profile_start else range(0)
        leaves = list(self.engine.plan.gradients)
        with assert_usable(self.directory):
            write_config(self.directory, self.config)
        with (
            open_sinks(self.config, self.directory, self.console, progress.step) as sinks,
            closing(MetricWriter([*sinks, *self.sinks], throughput, leaves, log.every)) as writer,
            closing(self.data.train_batches(progress.next_sample, num_steps - progress.step)) as batches,
            closing(ProfilerWindow(self.directory.path / "profile", traced)) as profiler,
            stop_signals() as stop,
        ):
            say(self.console, f"step {progress.step} of {num_steps} in {self.directory.path}")
            self._loop(batches, writer, throughput, profiler, stop)
        if stop.number is not None and progress.step < num_steps:
            name = signal.Signals(stop.number).name
            saved = self.directory.checkpoint(progress.step)
            say(
                self.console,
                f"{name}: stopped after step {progress.step}, saved {saved}; the same command goes on",
            )
            return 128 + stop.number
        self._summarise(throughput)
        return 0

    def _loop(
        self,
        batches: Iterable[dict[str, np.ndarray]],
        writer: MetricWriter,
        throughput: Throughput,
        profiler: ProfilerWindow,
        stop: StopSignal,
    ) -> None:
        progress, train, save_every = self.progress, self.config.train, self.config.checkpoint.save_every
        save_due = False
        for number, batch in enumerate(batches):
            if number == 0:
                self._audit(batch)
            profiler.step_begins(progress.step + 1)
            metrics = self.engine.step(batch)
            progress.step += 1
            profiler.step_ends(progress.step, metrics)
            progress.next_sample += self.batch_size
            self._watch(writer.write_step(progress.step, metrics))
            if _due(progress.step, train.eval_every):
                self._watch(writer.flush())
                self._evaluate(writer)
                throughput.restart()
            save_due = save_due or _due(progress.step, save_every)
            if save_due:
                # A skipped step is not saved, the save waits for the next good one: a run gone wrong must not push
                # out its last good checkpoints.
                self._watch(writer.flush())
                if progress.skipped_in_a_row == 0:
                    self._save(writer)
                    save_due = False
                    throughput.restart()
            if stop.number is not None:
                break
        self._watch(writer.flush())
        if progress.step == train.num_steps and progress.evaluated_at != progress.step:
            self._evaluate(writer)
        if progress.saved_at != progress.step:
            self._save(writer)  # also after a skipped step, which left the parameters as they were
        self.checkpointer.wait()

    def _audit(self, batch: dict[str, np.ndarray]) -> None:
        """Says what the compiled step does otherwise than planned, before it runs."""
        if self.config.log.audit == "off":
            return
        findings = audit(self.engine, batch).findings
        if findings and self.config.log.audit == "error":
            listed = "\n  ".join(map(str, findings))
            raise AuditError(
                f"log.audit = error: the compiled step is not as planned (log.audit: warn goes on):\n  {listed}"
            )
        for finding in findings:
            say(self.console, f"audit: {finding}")

    def _watch(self, row: Row | None) -> None:
        """Looks at a finished training row: says when skipping begins, raises when it does not end."""
        if row is None:
            return
        progress, limit = self.progress, self.config.train.max_skipped_steps
        progress.train_loss, progress.skipped_in_a_row = row["loss"], row["skipped_in_a_row"]
        if progress.skipped_in_a_row == 0:
            progress.last_finite_loss = row["loss"]
        elif progress.skipped_in_a_row == 1:
            say(
                self.console,
                f"step {row['step']} skipped: {_non_finite(row)}",
            )
        if progress.skipped_in_a_row >= limit or row.get("loss_scale_exhausted"):
            raise NonFiniteError(self._non_finite_message(row))

    def _non_finite_message(self, row: Row) -> str:
        self.checkpointer.wait()
        progress, latest = self.progress, self.checkpointer.latest_step()
        saved = "none" if latest is None else self.directory.checkpoint(latest)
        finite = "none since this start" if progress.last_finite_loss is None else progress.last_finite_loss
        limit = f"train.max_skipped_steps={self.config.train.max_skipped_steps}"
        if row.get("loss_scale_exhausted"):
            limit = f"loss_scale.minimum={self.config.loss_scale.minimum}: the scale is not to blame"
        return (
            f"step {row['step']} is the last of {progress.skipped_in_a_row} in a row whose loss or gradients are "
            f"not finite ({limit}): {_non_finite(row)}.\n"
            f"Last finite loss: {finite}. Last good checkpoint: {saved}.\n"
            "Lower optimizer.learning_rate or optimizer.clip_norm and start it again, or look at the data from there "
            "on. Should that checkpoint have the fault in it, delete it to go on from the one before."
        )

    def _evaluate(self, writer: MetricWriter) -> None:
        progress, loss = self.progress, self._validation_loss(averaged=False)
        if loss is None:
            return  # there is no validation data
        row: Row = {"step": progress.step, "eval_loss": loss}
        if self.engine.has_average:
            row["averaged_eval_loss"] = self._validation_loss(averaged=True)
        # The best checkpoint is the one whose averaged weights are best, where there are any.
        progress.eval_loss, progress.evaluated_at = row.get("averaged_eval_loss", loss), progress.step
        writer.write(row)

    def _validation_loss(self, *, averaged: bool) -> float | None:
        batches = self.data.validation_batches(self.config.train.eval_batches)
        results = jax.device_get([self.engine.evaluate(batch, averaged=averaged) for batch in batches])
        if not results:
            return None
        weight = sum(float(result["weight"]) for result in results)
        return sum(float(result["loss"]) * float(result["weight"]) for result in results) / weight

    def _save(self, writer: MetricWriter) -> None:
        writer.sync()  # the row of a step is on the disk before its checkpoint is
        progress = self.progress
        evaluated = progress.evaluated_at == progress.step
        record = {
            "step": progress.step,
            "next_sample": progress.next_sample,
            "data": self.data.fingerprint,
            "eval_loss": progress.eval_loss,
            "config": self.config.model_dump(mode="json"),
            "versions": {name: _version(name) for name in ("jax", "flax", "optax", "jzero")},
        }
        self.checkpointer.save(
            progress.step,
            self.engine.arrays(),
            self.engine.shapes(),
            record,
            eval_loss=progress.eval_loss if evaluated else None,
        )
        progress.saved_at = progress.step

    def _summarise(self, throughput: Throughput) -> None:
        progress, placed = self.progress, self.engine.plan.bytes_per_device()
        unigram = _number(self.data.unigram_loss)
        rows = {
            "steps": str(progress.step),
            "final train loss": _number(progress.train_loss),
            "validation loss": _number(progress.eval_loss),
            "unigram baseline": unigram and f"{unigram} on the same text",
            "bytes per device": ", ".join(f"{tree} {human_bytes(size)}" for tree, size in placed.items()),
            "tokens per second": None if throughput.mean is None else f"{throughput.mean:,.0f}",
            "checkpoint": str(self.directory.checkpoint(progress.step)),
            "sample": sample(self.engine, self.config, self.data.tokenizer),
        }
        self.console.print(summary_table(rows))


def _non_finite(row: Row) -> str:
    leaf, scale = row.get("non_finite_leaf"), row.get("loss_scale")
    parts = [
        f"loss {row['loss']}",
        f"gradient of {leaf} not finite" if leaf else "",
        f"loss scale {scale:g}" if scale else "",
    ]
    return ", ".join(filter(None, parts))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree that is not installed
        return None
