"""Micro-batch, accumulation, rematerialisation and mesh shapes, tried and ranked."""

from collections.abc import Iterator
from typing import Any

from jzero.config import BatchPlan, Config, with_fields
from jzero.config.batch import divisors
from jzero.errors import ConfigError, UserError
from jzero.hardware import Cluster
from jzero.planning.candidates import batch_plan, free_engine
from jzero.planning.prediction import Prediction
from jzero.planning.recommendation import cut_batch, predict_config

_REMAT = ("full", "dots", "none")  # from least memory to most


def search(config: Config, cluster: Cluster) -> list[Prediction]:
    """What fits, the fastest first; of equals, those of fewer micro-batches. The global batch stays.

    Raises ConfigError where a figure of the devices is missing that times or memory hang on.
    """
    _assert_known(cluster)
    found = []
    for placement in _placements(config, cluster):
        placed = with_fields(config, placement)
        batch = batch_plan(placed, cluster.num_devices)
        too_large: list[tuple[int, int]] = []
        for micro, kept in _steps(batch):
            if any(_takes_more(batch, micro, kept, *other) for other in too_large):
                continue
            try:
                prediction = predict_config(_cut(placed, batch, micro, _REMAT[kept]), cluster)
            except UserError:
                continue  # not every optimizer and loss is for every engine
            if prediction.fits:
                found.append(prediction)
            else:
                too_large.append((micro, kept))
    # To three digits: what the figures do not tell apart goes by the number of micro-batches, then by memory.
    speed = lambda one: float(f"{one.tokens_per_second:.3g}")
    return sorted(found, key=lambda one: (-speed(one), one.config.train.accumulation_steps, one.total))


def _placements(config: Config, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Every stage over all devices, and within as many whole nodes as make equal groups."""
    for replicas in divisors(cluster.nodes):
        for stage in range(4) if replicas == 1 else range(1, 4):
            group = "all" if replicas == 1 else "node"
            yield {
                "mesh.replica": replicas,
                "mesh.data": -1,
                "zero.stage": stage,
                "zero.group": group,
                "zero.optimizer_group": config.zero.optimizer_group if group == "node" else None,
                **free_engine(config),
            }


def _takes_more(batch: BatchPlan, micro: int, kept: int, other: int, less: int) -> bool:
    """Whether more rows at a time, or less rematerialised, take at least as much memory as others did. Without
    accumulation no gradients are kept beside, so that says nothing then."""
    alone = micro == batch.micro_batch_size * batch.accumulation_steps
    return kept >= less and (micro == other or (micro > other and not alone))


def _steps(batch: BatchPlan) -> Iterator[tuple[int, int]]:
    """Rows a device and micro-batch, halved from all of them, and how much is kept; least memory first."""
    sizes = [batch.micro_batch_size * batch.accumulation_steps]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return ((micro, kept) for micro in reversed(sizes) for kept in range(len(_REMAT)))


def _cut(config: Config, batch: BatchPlan, micro: int, remat: str) -> Config:
    rows = batch.micro_batch_size * batch.accumulation_steps
    return with_fields(config, {**cut_batch(batch.global_batch_size, micro, rows // micro), "model.remat": remat})


def _assert_known(cluster: Cluster) -> None:
    needed = ["memory", "peak_flops", "memory_bandwidth", "intra_bandwidth"]
    needed += ["inter_bandwidth"] if cluster.nodes > 1 else []
    missing = [f"hardware.{name}" for name in needed if getattr(cluster.hardware, name) is None]
    if missing:
        raise ConfigError(
            f"--search ranks by speed, and --devices {cluster.spec} leaves {', '.join(missing)} unknown; "
            "name the hardware (--devices h100:8), or set these"
        )
