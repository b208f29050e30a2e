"""Predictions as a picture: bytes of each stage against a device's memory, and what a step's time is made of."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jzero.errors import DataError
from jzero.metrics.plot import FORMATS
from jzero.planning.prediction import Prediction
from jzero.planning.tables import shown_trees

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def assert_drawable(file: str) -> None:
    """Raises DataError for a file that cannot be written, or where matplotlib is missing."""
    if Path(file).suffix.lower() not in FORMATS:
        raise DataError(f"--plot {file}: its ending must be one of {', '.join(FORMATS)}")
    if not Path(file).absolute().parent.is_dir():
        raise DataError(f"--plot {file}: there is no directory {Path(file).parent}; make it first")
    _figure_class()


def draw(names: Sequence[str], predictions: Sequence[Prediction]) -> "Figure":
    """On the left a bar of bytes on a device for each stage, with lines for its memory and for what of it is usable;
    on the right, where the hardware's figures are known, one of the seconds of a step."""
    times = [prediction.times for prediction in predictions]
    timed = [time for time in times if time is not None]
    figure = _figure_class()(figsize=(11 if timed else 5.5, 4.5), layout="constrained")
    memory, *rest = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
    trees = shown_trees(predictions)
    _stack(memory, names, {tree: [prediction.bytes[tree] / 1e9 for prediction in predictions] for tree in trees})
    whole, usable = predictions[0].cluster.hardware.memory, predictions[0].usable
    if whole and usable:
        memory.axhline(whole / 1e9, color="black", linewidth=1, label="memory")
        memory.axhline(usable / 1e9, color="black", linewidth=1, linestyle="--", label="usable")
    memory.set(ylabel="GB on a device")
    if timed:
        parts = {
            "matrix products": [time.compute for time in timed],
            "optimizer": [time.update for time in timed],
            "waiting for transfers": [time.exposed for time in timed],
        }
        _stack(rest[0], names, parts)
        rest[0].set(ylabel="seconds a step")
    for axes in (memory, *rest):
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
        axes.set(xlabel="stage")
        axes.set_ylim(0, 1.3 * axes.get_ylim()[1])  # room for the legend
        axes.legend(fontsize="small", loc="upper right", ncols=3)
    return figure


def _stack(axes: Any, names: Sequence[str], parts: dict[str, list[float]]) -> None:
    below = [0.0] * len(names)
    for number, (name, sizes) in enumerate(parts.items()):
        axes.bar(names, sizes, bottom=below, width=0.6, color=f"C{number % 10}", label=name)
        below = [under + size for under, size in zip(below, sizes, strict=True)]


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DataError("plots need the package matplotlib, which is not installed: pip install matplotlib") from error
    return Figure
