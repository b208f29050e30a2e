"""Where a run's numbers go, and how fast it runs.

A row is a mapping from names to scalars and always has `step`, the number of optimizer steps done
(1-based). Training rows carry `loss`, `grad_norm`, `tokens_per_second` and whatever else the step reports;
evaluation rows carry `eval_loss`. A sink takes finished rows; `MetricWriter` finishes them without making
the device wait.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jzero.errors import DataError
from jzero.files import replacing, sync

Row = dict[str, Any]

_FLUSH_SECONDS = 5  # how late TensorBoard may see a row


class Sink(Protocol):
    """Takes rows of host scalars in the order of their steps."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """Appends one JSON object a line and hands each to the operating system at once: a killed process loses
    none. After `sync` a machine that loses power has lost none either.

    Floats are written in Python's shortest exact form, so they read back bit-equal. What is not finite is
    written NaN, Infinity or -Infinity: `json.loads` reads these, other readers of JSON may not. Rows of
    steps after `start_step`, the step the run continues from, are taken back first (see `take_back`).
    """

    def __init__(self, path: Path, start_step: int = 0):
        take_back(path, start_step)
        self._path = path
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        sync(path.parent)

    def write(self, row: Row) -> None:
        with _naming(self._path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def sync(self) -> None:
        with _naming(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with _naming(self._path):
            self._file.close()


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """What fails on an open file does not say on which."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


class TensorBoardSink:
    """Writes each number of a row under its own name. A killed process may lose its last seconds here.

    Of an earlier process's events in the same directory TensorBoard hides those after `start_step`.
    """

    def __init__(self, directory: Path, start_step: int = 0):
        # Brings protobuf along: only for those who ask for it. Its SummaryWriter would write from a thread that ends
        # without a word at the first error, a full disk say, and then wait for that thread for ever.
        from tensorboardX import RecordWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a directory in the order of their names.
        self._path = directory / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{start_step}"
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._file = RecordWriter(str(self._path))
        self._flushed = time.monotonic()
        self._add(0, file_version="brain.Event:2")
        self._add(start_step + 1, session_log=self._events.SessionLog(status=self._events.SessionLog.START))

    def write(self, row: Row) -> None:
        make = self._summaries.Summary
        values = [
            make.Value(tag=name, simple_value=float(value))
            for name, value in row.items()
            if name != "step" and value is not None
        ]
        self._add(row["step"], summary=make(value=values))

    def close(self) -> None:
        with _naming(self._path):
            self._file.close()

    def _add(self, step: int, **content: Any) -> None:
        event = self._events.Event(wall_time=time.time(), step=step, **content)
        with _naming(self._path):
            self._file.write(event.SerializeToString())
            if time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self._file.flush()
                self._flushed = time.monotonic()


def set_aside(path: Path) -> Path | None:
    """Renames a file with something in it: .old, .old.2 and so on, whatever is free. Returns its new path."""
    if not path.is_file() or path.stat().st_size == 0:
        return None
    names = (path.with_name(f"{path.name}.old{f'.{number}' if number > 1 else ''}") for number in count(1))
    return path.rename(next(name for name in names if not name.exists()))


def take_back(path: Path, step: int) -> None:
    """Drops the rows of steps after `step` from a file of rows, and a last line that a kill cut short, so
    that a run resumed from `step` states each step once. Replaces the file in one move; leaves it alone if
    nothing goes.

    Raises DataError for any other line that is no row.
    """
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for number, line in enumerate(lines, 1) if _row_step(path, number, line) <= step]
    if kept != lines:
        with replacing(path) as file:
            file.writelines(kept)


def _row_step(path: Path, number: int, line: bytes) -> float:
    """The step of a line; infinity for one without its line end, which is never a whole row."""
    if not line.endswith(b"\n"):
        return float("inf")
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError) as error:
        shown = line[:60].decode(errors="replace").rstrip()
        raise DataError(
            f"{path}, line {number}: {shown!r} is no row of metrics (a JSON object with a step); "
            "mend or delete the line, then resume"
        ) from error


class Throughput:
    """Tokens per second of wall time between finished steps.

    The first step only starts the clock, since it compiles. `restart` after anything that is not training
    leaves the time until then out.
    """

    def __init__(self, tokens_per_step: int, clock: Callable[[], float] = time.perf_counter):
        self._tokens_per_step = tokens_per_step
        self._clock = clock
        self._since: float | None = None
        self._tokens = 0
        self._seconds = 0.0

    def step_finished(self) -> float | None:
        """Tokens per second since the step before; None where there is none to measure from."""
        now = self._clock()
        since, self._since = self._since, now
        if since is None or now <= since:
            return None
        self._tokens += self._tokens_per_step
        self._seconds += now - since
        return self._tokens_per_step / (now - since)

    def restart(self) -> None:
        if self._since is not None:
            self._since = self._clock()

    @property
    def mean(self) -> float | None:
        """Tokens per second over all measured steps; None if there are none."""
        return self._tokens / self._seconds if self._seconds else None


class MetricWriter:
    """Hands rows to the sinks in order, training rows one step late.

    Reading a device scalar waits for its step. So `write_step` holds the new row back and finishes the one
    before it, while the device already works on the new step. `flush` finishes the held row; call it before
    anything that relies on it being written (a checkpoint of that step, an evaluation). `close` flushes
    too.
    """

    def __init__(self, sinks: Sequence[Sink], throughput: Throughput, leaves: Sequence[str] = ()):
        """leaves: names behind the number `non_finite_leaf`; no sink gets it, the row handed back does."""
        self._sinks = sinks
        self._leaves = leaves
        self._throughput = throughput
        self._held: Row | None = None

    def write_step(self, step: int, metrics: Mapping[str, jax.Array]) -> Row | None:
        """Takes the device scalars of `step`; returns the finished row of the step before, if it was held."""
        held, self._held = self._held, {"step": step, **metrics}
        return self._finish(held)

    def flush(self) -> Row | None:
        """Waits for the held step; returns its finished row, None if none was held."""
        held, self._held = self._held, None
        return self._finish(held)

    def sync(self) -> None:
        """Waits until the rows written so far are on the disk."""
        for sink in self._sinks:
            if isinstance(sink, JsonlSink):
                sink.sync()

    def write(self, row: Row) -> None:
        """Passes on a row of host scalars, after the one that is held."""
        self._finish(self._held)
        self._held = None
        self._pass_on(row)

    def close(self) -> None:
        with ExitStack() as stack:  # every sink is closed, whichever step of this fails
            for sink in self._sinks:
                stack.callback(sink.close)
            self.flush()

    def _finish(self, held: Row | None) -> Row | None:
        if held is None:
            return None
        # In lists, since JAX would sort a dict by its keys.
        values = jax.device_get(list(held.values()))
        row = {name: np.asarray(value).item() for name, value in zip(held, values, strict=True)}
        row["tokens_per_second"] = self._throughput.step_finished()
        broken = row.pop("non_finite_leaf", -1)
        self._pass_on(row)
        return row if broken < 0 else {**row, "non_finite_leaf": self._leaves[broken]}

    def _pass_on(self, row: Row) -> None:
        for sink in self._sinks:
            sink.write(row)
