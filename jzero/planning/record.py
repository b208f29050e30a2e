"""Predictions as plain data, for JSON."""

from collections.abc import Sequence
from typing import Any

from jzero.planning.candidates import Stage
from jzero.planning.prediction import Prediction
from jzero.planning.recommendation import Recommendation
from jzero.planning.tables import EFFICIENCIES
from jzero.planning.times import bandwidth_needed


def plan_record(
    tried: Sequence[Stage], predictions: Sequence[Prediction], recommendation: Recommendation
) -> dict[str, Any]:
    """What the tables say. Bytes are of one device; what is not known is None."""
    first, chosen = predictions[0], recommendation.number
    config, cluster, hardware = first.config, first.cluster, first.cluster.hardware
    return {
        "parameters": first.plan.num_parameters,
        "devices": cluster.num_devices,
        "nodes": cluster.nodes,
        "hardware": {"name": cluster.name, **vars(hardware), "memory": hardware.memory and int(hardware.memory)},
        "assumptions": config.hardware.model_dump(include={"efficiency", "overlap", "headroom"}),
        "usable_bytes": first.usable,
        "tokens_per_step": first.rows * config.data.sequence_length,
        "stages": [
            {"name": stage.name, **prediction_record(prediction)}
            for stage, prediction in zip(tried, predictions, strict=True)
        ],
        "recommended": {
            "stage": None if chosen is None else predictions[chosen].config.zero.stage,
            "name": None if chosen is None else tried[chosen].name,
            "reason": recommendation.reason,
        },
    }


def prediction_record(prediction: Prediction) -> dict[str, Any]:
    """One of the tried ways. Of its bytes, gradients are among temporaries; all others add up to total."""
    config, traffic, times = prediction.config, prediction.traffic, prediction.times
    return {
        "stage": config.zero.stage,
        "mesh": dict(prediction.plan.axis_sizes),
        "group": config.zero.group,
        "collectives": prediction.engine,
        "micro_batch_size": config.train.micro_batch_size,
        "accumulation_steps": config.train.accumulation_steps,
        "remat": config.model.remat,
        "bytes": {**prediction.bytes, "gradients": prediction.gradients, "total": prediction.total},
        "elementwise_optimizer": prediction.elementwise,
        "sent_elements": traffic.elements,
        "sent_bytes": traffic.bytes,
        "sent_bytes_within_nodes": traffic.intra_bytes,
        "sent_bytes_across_nodes": traffic.inter_bytes,
        "seconds": None if times is None else vars(times),
        "step_seconds": None if times is None else times.step,
        "tokens_per_second": prediction.tokens_per_second,
        "mfu": prediction.mfu,
        "bandwidth_needed": None
        if times is None
        else {
            str(share): bandwidth_needed(traffic.bytes, times.compute, share, config.hardware.overlap)
            for share in EFFICIENCIES
        },
        "fits": prediction.fits,
    }
