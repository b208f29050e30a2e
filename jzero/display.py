"""What a run shows: a live bar on a terminal, plain lines anywhere else, and the table at the end."""

import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from jzero.metrics import Row, Sink


def console_sink(console: Console, *, start_step: int, num_steps: int, every: int) -> Sink:
    """A progress bar if the console is a terminal, else a line every `every` steps.

    Asks the file itself: rich also takes FORCE_COLOR, which CI sets, for a terminal.
    """
    if console.is_interactive and console.file.isatty():
        return ProgressSink(console, start_step=start_step, num_steps=num_steps)
    return LineSink(console, num_steps=num_steps, every=every)


def say(console: Console, text: str) -> None:
    """One line as it stands: paths and brackets are not markup, long lines are not broken."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class LineSink:
    """One line of text for the first row, every `every`-th step, the last one, and each evaluation."""

    def __init__(self, console: Console, *, num_steps: int, every: int):
        self._console = console
        self._num_steps = num_steps
        self._every = every
        self._first: tuple[int, float] | None = None

    def write(self, row: Row) -> None:
        step = row["step"]
        if "eval_loss" in row:
            say(self._console, f"step {step}/{self._num_steps}  eval_loss {row['eval_loss']:.4f}")
            return
        first = self._first is None
        self._first = self._first or (step, time.perf_counter())
        if first or step % self._every == 0 or step == self._num_steps:
            parts = [
                f"step {step}/{self._num_steps}",
                f"loss {row['loss']:.4f}",
                f"grad_norm {row['grad_norm']:.3g}",
                "" if row.get("learning_rate") is None else f"lr {row['learning_rate']:.3g}",
                _speed(row),
                "" if row.get("mfu") is None else f"mfu {row['mfu']:.1%}",
                _skipped(row),
                self._remaining(step),
            ]
            say(self._console, _joined(parts))

    def close(self) -> None:
        pass

    def _remaining(self, step: int) -> str:
        """The time left at the pace since the first row, evaluations and saves included."""
        first_step, since = self._first or (step, 0.0)
        if step in (first_step, self._num_steps):
            return ""
        seconds = (time.perf_counter() - since) / (step - first_step) * (self._num_steps - step)
        return f"ETA {timedelta(seconds=round(seconds))}"


class ProgressSink:
    """A live bar with the latest numbers; anything else printed to the same console scrolls above it."""

    def __init__(self, console: Console, *, start_step: int, num_steps: int):
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=12),  # what fits beside the numbers in 80 columns
            TextColumn("{task.fields[numbers]}", markup=False),
            TimeRemainingColumn(),
            console=console,
        )
        self._eval_loss = ""
        self._task = self._progress.add_task("train", total=num_steps, completed=start_step, numbers="")
        self._progress.start()

    def write(self, row: Row) -> None:
        if "eval_loss" in row:
            self._eval_loss = f"eval_loss {row['eval_loss']:.4f}"
            return
        parts = [f"loss {row['loss']:.4f}", self._eval_loss, _speed(row), _skipped(row)]
        self._progress.update(self._task, completed=row["step"], numbers=_joined(parts))

    def close(self) -> None:
        self._progress.stop()


def _speed(row: Row) -> str:
    speed = row.get("tokens_per_second")
    return "" if speed is None else f"{speed:,.0f} tokens/s"


def _skipped(row: Row) -> str:
    return f"skipped {row['skipped']}" if row.get("skipped") else ""


def _joined(parts: list[str]) -> str:
    return "  ".join(part for part in parts if part)


def summary_table(rows: dict[str, str | None]) -> Table:
    """What came out of a run, one fact a line; a fact that is None has no line."""
    table = Table(title="summary", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, value)
    return table
