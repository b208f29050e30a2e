"""Which stage to take, and why."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jzero.config import Config, with_fields
from jzero.errors import UserError
from jzero.hardware import Cluster
from jzero.planning.candidates import Stage, abstract_batch, batch_plan, blueprint_of
from jzero.planning.prediction import Prediction, predict
from jzero.report import human_bytes

_MOST_DEVICES = 64  # times as many are tried
_MUCH_FASTER = 1.05  # times as fast: below, the figures do not tell


@dataclass(frozen=True)
class Recommendation:
    """number: of the stage recommended among those tried; None where none fits, or that cannot be said."""

    number: int | None
    reason: str


def predict_config(config: Config, cluster: Cluster) -> Prediction:
    """The prediction for the built-in model. Raises UserError for what the cluster cannot do."""
    blueprint = blueprint_of(config, cluster.num_devices)
    return predict(config, blueprint, abstract_batch(config, cluster.num_devices), cluster)


def recommend(tried: Sequence[Stage], predictions: Sequence[Prediction]) -> Recommendation:
    """The first stage that fits, in the order tried. Where none does, the reason says what would."""
    usable, last = predictions[0].usable, predictions[-1]
    if usable is None:
        told = "The devices' memory is not known: name them (--devices h100:8), or set hardware.memory."
        return Recommendation(None, told)
    room = f"of {human_bytes(usable)} usable"
    number = next((n for n, prediction in enumerate(predictions) if prediction.fits), None)
    if number is None:
        told = f"No stage fits: stage {tried[-1].name} takes {human_bytes(last.total)} {room}"
        return Recommendation(None, f"{told}; {what_would_fit(last.config, last.cluster)}.")
    needed = f"{human_bytes(predictions[number].total)} {room}"
    if number == 0:
        told = f"Plain data parallelism (stage 0) fits, with {needed}, so nothing needs to be split"
    else:
        before = f"stage {tried[number - 1].name} takes {human_bytes(predictions[number - 1].total)}"
        told = f"Stage {tried[number].name} is the smallest that fits, with {needed}; {before}"
    return Recommendation(number, f"{told}{_faster(tried, predictions, number)}.")


def _faster(tried: Sequence[Stage], predictions: Sequence[Prediction], number: int) -> str:
    """What to add where a stage with less on a device should be quicker all the same."""
    speeds = [prediction.tokens_per_second or 0.0 for prediction in predictions]
    best = max(range(number, len(speeds)), key=lambda n: speeds[n])
    if speeds[best] <= _MUCH_FASTER * speeds[number]:
        return ""
    return f", though stage {tried[best].name} should be {speeds[best] / speeds[number] - 1:.0%} faster"


def what_would_fit(config: Config, cluster: Cluster) -> str:
    """The smallest change with which a config that does not fit would."""
    for told, changed, grown in _changes(config, cluster):
        try:
            prediction = predict_config(changed, grown)
        except UserError:
            continue
        if prediction.fits:
            return f"it takes {human_bytes(prediction.total)} with {told}"
    return f"nor do {_MOST_DEVICES} times as many devices help: take a smaller model or shorter rows"


def _changes(config: Config, cluster: Cluster) -> Iterator[tuple[str, Config, Cluster]]:
    """Changes that save memory, mildest first: a smaller micro-batch, rematerialisation, both, both on more devices."""
    batch = batch_plan(config, cluster.num_devices)
    smaller = cut_batch(batch.global_batch_size, 1, batch.micro_batch_size * batch.accumulation_steps)
    smaller = smaller if batch.micro_batch_size > 1 else {}
    full = {"model.remat": "full"} if config.model.remat != "full" else {}
    for fields in (smaller, full, smaller | full if smaller and full else {}):
        if fields:
            yield _told(fields), with_fields(config, fields), cluster
    factor = 2
    while factor <= _MOST_DEVICES:
        grown = _grown(cluster, factor)
        rows = -(-batch.micro_batch_size * batch.accumulation_steps // factor)  # a device has one at least
        whole = rows * factor * batch.global_batch_size // (batch.micro_batch_size * batch.accumulation_steps)
        wider = {**cut_batch(whole, 1, rows), **full}
        more = f"train.global_batch_size={whole} " if whole != batch.global_batch_size else ""
        yield (
            f"{more}{_told(wider)} on {grown.num_devices} devices",
            with_fields(config, {"mesh.data": -1, **wider}),
            grown,
        )
        factor *= 2


def cut_batch(rows: int, micro_batch_size: int, accumulation_steps: int) -> dict[str, object]:
    """The fields for a global batch cut into micro-batches of so many rows a device."""
    return {
        "train.global_batch_size": rows,
        "train.micro_batch_size": micro_batch_size,
        "train.accumulation_steps": accumulation_steps,
    }


def _told(fields: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items() if name != "train.global_batch_size")


def _grown(cluster: Cluster, factor: int) -> Cluster:
    count, per_node = cluster.num_devices * factor, cluster.hardware.devices_per_node
    if per_node is None or count <= per_node:
        return replace(cluster, nodes=1, devices_per_node=count)
    return replace(cluster, nodes=-(-count // per_node), devices_per_node=per_node)
