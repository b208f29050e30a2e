"""Predictions as tables of at most 100 columns."""

from collections.abc import Callable, Sequence

from rich.table import Table

from jzero.planning.prediction import Prediction
from jzero.planning.times import bandwidth_needed
from jzero.report import human_bytes

EFFICIENCIES = (0.5, 0.75, 0.9)  # to say the bandwidth for
_RANKED = 12  # rows of a search


def stage_table(names: Sequence[str], predictions: Sequence[Prediction]) -> Table:
    """A column for each stage: bytes on a device, then what a step sends, and how long it takes where that is known."""
    table = Table(title=_headline(predictions[0]), title_justify="left", title_style="bold")
    table.add_column("stage")
    for name in names:
        table.add_column(name, justify="right")

    def row(name: str, cell: Callable[[Prediction], str], end: bool = False) -> None:
        cells = [cell(prediction) for prediction in predictions]
        if any(cells):
            table.add_row(name, *cells, end_section=end)

    trees = shown_trees(predictions)
    for tree in trees:
        row(tree, lambda p, tree=tree: human_bytes(p.bytes[tree]), end=tree == trees[-1])
    row("total", lambda p: human_bytes(p.total))
    row("fits", lambda p: {None: "", True: "yes", False: "no"}[p.fits])
    row("(gradients)", lambda p: human_bytes(p.gradients), end=True)
    row("collectives", lambda p: p.engine)
    row("sent in nodes", lambda p: human_bytes(p.traffic.intra_bytes))
    row("sent across", lambda p: human_bytes(p.traffic.inter_bytes) if p.cluster.nodes > 1 else "")
    table.add_section()
    row("compute", lambda p: human_seconds(p.times.compute) if p.times else "")
    row("update", lambda p: human_seconds(p.times.update) if p.times else "")
    row("waiting", lambda p: human_seconds(p.times.exposed) if p.times else "")
    row("step", lambda p: human_seconds(p.times.step) if p.times else "", end=True)
    row("tokens/s", lambda p: f"{p.tokens_per_second:,.0f}" if p.tokens_per_second else "")
    row("MFU", lambda p: f"{p.mfu:.1%}" if p.mfu else "", end=True)
    for efficiency in EFFICIENCIES:
        row(f"GB/s for {efficiency:.0%}", lambda p, efficiency=efficiency: _bandwidth(p, efficiency))
    return table


def shown_trees(predictions: Sequence[Prediction]) -> list[str]:
    """The parts of the total, but those that are less than a thousandth of it everywhere."""
    trees = dict.fromkeys(tree for prediction in predictions for tree in prediction.bytes)
    return [tree for tree in trees if any(1000 * p.bytes[tree] >= p.total for p in predictions)]


LEGEND = """\
Bytes are of one device, when a step holds most; (gradients): of that tree, whether it is there then or not.
Sent: by one device in a step. Waiting: for transfers. GB/s: what a device must send for that share of compute.
"""


def assumptions(prediction: Prediction) -> str:
    """What the figures rest on, in words."""
    hardware, said = prediction.cluster.hardware, prediction.config.hardware
    told = [f"{said.headroom:.0%} of the memory stay free (hardware.headroom)"]
    if not prediction.elementwise:
        told.append(
            "nothing is sent for the update by an optimizer that looks beyond single elements, as this one does"
        )
    if prediction.cluster.platform == "cpu":
        told.append("what is sent is as programs for GPUs do: XLA:CPU all-reduces where they reduce-scatter")
    if prediction.times is not None and hardware.peak_flops:
        told += [
            f"matrix products reach {said.efficiency:.0%} of {hardware.peak_flops / 1e12:,.0f} TFLOP/s "
            "(hardware.efficiency)",
            f"{said.overlap:.0%} of the transfers run beside them (hardware.overlap)",
        ]
    if prediction.config.model.attention != "xla":
        told.append(
            f"attention takes as much as XLA's own (model.attention = {prediction.config.model.attention}: less)"
        )
    return f"Assumed: {'; '.join(told)}."


def search_table(ranked: Sequence[Prediction]) -> Table:
    """The fastest of what fits, a row each. batch: rows a device and micro-batch, times micro-batches a step."""
    first = ranked[0]
    shown = f", the {_RANKED} fastest shown" if len(ranked) > _RANKED else ""
    title = f"{len(ranked)} ways that fit {_devices(first)}{shown}"
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("stage", "mesh", "batch", "remat", "engine", "total", "tokens/s", "MFU"):
        table.add_column(column, justify="left" if column in ("remat", "engine") else "right")
    for prediction in ranked[:_RANKED]:
        table.add_row(*_choice(prediction))
    return table


def _choice(prediction: Prediction) -> list[str]:
    config, sizes = prediction.config, prediction.plan.axis_sizes
    return [
        str(config.zero.stage),
        f"{sizes['replica']} x {sizes['data']}",
        f"{config.train.micro_batch_size} x {config.train.accumulation_steps}",
        config.model.remat,
        prediction.engine,
        human_bytes(prediction.total),
        f"{prediction.tokens_per_second:,.0f}",
        f"{prediction.mfu:.1%}",
    ]


def human_seconds(seconds: float) -> str:
    """0.0123 -> '12.3 ms'."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.{2 if unit == 's' else 1}f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def _bandwidth(prediction: Prediction, efficiency: float) -> str:
    if prediction.times is None:
        return ""
    overlap = prediction.config.hardware.overlap
    needed = bandwidth_needed(prediction.traffic.bytes, prediction.times.compute, efficiency, overlap)
    return f"{needed / 1e9:.1f}"


def _headline(prediction: Prediction) -> str:
    step = f"{prediction.rows} x {prediction.config.data.sequence_length} tokens"
    return f"{prediction.plan.num_parameters:,} parameters, {_devices(prediction)}, {step}"


def _devices(prediction: Prediction) -> str:
    cluster, memory = prediction.cluster, prediction.cluster.hardware.memory
    each = f" of {memory / 1e9:.0f} GB" if memory and memory >= 1e9 else ""
    nodes = f" in {cluster.nodes} nodes" if cluster.nodes > 1 else ""
    return f"{cluster.num_devices} {cluster.name or 'devices'}{each}{nodes}"
