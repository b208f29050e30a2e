"""Curves of runs: losses and throughput over the steps, from their metrics.jsonl."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jzero.errors import DataError
from jzero.metrics.row_files import read_rows
from jzero.metrics.rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
_SMOOTHED_OVER = 50  # part of a run that its smoothed loss remembers


def plot_runs(run_dirs: Sequence[str], out: str) -> None:
    """Draws the curves of runs to a file of one of FORMATS.

    Raises DataError for a file that cannot be written, and as `draw_runs` does.
    """
    if Path(out).suffix.lower() not in FORMATS:
        raise DataError(f"--out {out}: its ending must be one of {', '.join(FORMATS)}")
    if not Path(out).absolute().parent.is_dir():
        raise DataError(f"--out {out}: there is no directory {Path(out).parent}; make it first")
    draw_runs(run_dirs).savefig(out, dpi=150)


def draw_runs(run_dirs: Sequence[str]) -> "Figure":
    """The curves of runs, under way or done: on the left losses, the one in training raw and smoothed, on the right
    tokens per second, all over steps.

    Raises DataError for a run without rows, or where matplotlib is missing.
    """
    paths = list(dict.fromkeys(Path(run_dir).resolve() for run_dir in run_dirs))
    runs = dict(zip(_labels(paths), map(_read, paths), strict=True))
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DataError("plots need the package matplotlib, which is not installed: pip install matplotlib") from error
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    loss, speed = figure.subplots(1, 2)
    for number, (label, rows) in enumerate(runs.items()):
        colour, prefix = f"C{number % 10}", f"{label} " if len(runs) > 1 else ""
        _draw_losses(loss, colour, prefix, rows)
        speed.plot(*_series(rows, "tokens_per_second"), color=colour, linewidth=0.8, label=label)
    loss.set(xlabel="step", ylabel="loss")
    speed.set(xlabel="step", ylabel="tokens/s", ylim=(0, None))
    for axes in (loss, speed):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure


def _draw_losses(axes: Any, colour: str, prefix: str, rows: list[Row]) -> None:
    steps, values = _series(rows, "loss")
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smoothed(values), color=colour, label=f"{prefix}train")
    steps, values = _series(rows, "eval_loss")
    if steps:
        style = {"linestyle": "--", "marker": "o", "markersize": 4}
        axes.plot(steps, values, color=colour, label=f"{prefix}evaluation", **style)


def _series(rows: list[Row], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows that have this number."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def smoothed(values: list[float]) -> list[float]:
    """The exponential mean of the values so far; those that are not finite (skipped steps) count for nothing."""
    keep = 1 - 1 / max(1, len(values) / _SMOOTHED_OVER)
    total = weight = 0.0
    means = []
    for value in values:
        if math.isfinite(value):
            total, weight = keep * total + value, keep * weight + 1
        means.append(total / weight if weight else math.nan)
    return means


def _read(run_dir: Path) -> list[Row]:
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise DataError(f"{run_dir}: holds no metrics.jsonl; name a run's directory, as train.run_dir did")
    rows = read_rows(path)
    if not rows:
        raise DataError(f"{path}: has no rows yet; wait for the first step")
    return rows


def _labels(paths: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in paths]
