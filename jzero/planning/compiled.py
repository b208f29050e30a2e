"""The configured step, compiled ahead of time for devices that need not be there."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from rich.console import Group, RenderableType
from rich.text import Text

from jzero.auditing import Audit, audit_program
from jzero.config import Config
from jzero.errors import MeshError
from jzero.hardware import Cluster
from jzero.hlo import crosses_nodes
from jzero.mesh import Device, topology
from jzero.planning.candidates import abstract_batch, blueprint_of
from jzero.planning.prediction import Prediction
from jzero.report import human_bytes


@dataclass(frozen=True)
class CompiledStep:
    """A compiled step, by its audit. target: what it is for; seconds: how long that took, tracing included."""

    target: str
    seconds: float
    audit: Audit


def compile_step(config: Config, cluster: Cluster) -> CompiledStep:
    """The training step of a config, its own stage's, compiled for the cluster. Raises UserError where the compiler is
    not installed."""
    devices = _devices(cluster)
    start = time.perf_counter()
    blueprint = blueprint_of(config, devices)
    program = blueprint.program(abstract_batch(config, cluster.num_devices))
    seconds = time.perf_counter() - start
    target = f"{cluster.num_devices} {getattr(devices[0], 'device_kind', cluster.platform)}"
    return CompiledStep(target, seconds, audit_program(program))


def compiled_report(step: CompiledStep, predicted: Prediction) -> RenderableType:
    """predicted: for the same config."""
    peak, stage = step.audit.memory.peak, predicted.plan.stage
    told = (
        f"Stage {stage} compiled for {step.target} in {step.seconds:.0f} s: {human_bytes(peak)} a device, predicted "
        f"{human_bytes(predicted.total)} ({predicted.total / peak - 1:+.0%})"
    )
    return Group(Text(told, style="bold"), step.audit)


def compiled_record(step: CompiledStep, predicted: Prediction) -> dict[str, Any]:
    """As `compiled_report`, as plain data; bytes are of one device."""
    memory, sizes, per_node = step.audit.memory, predicted.plan.axis_sizes, predicted.cluster.devices_per_node
    collectives = [
        {
            **{
                name: getattr(one, name)
                for name in ("kind", "dtype", "shape", "axes", "group", "runs", "phase", "source")
            },
            "crosses_nodes": crosses_nodes(one.axes, sizes, per_node),
            "loops": len(one.loops),
            "payload_bytes": one.payload_bytes,
            "sent_bytes": one.sent_bytes,
        }
        for one in step.audit.collectives
    ]
    return {
        "stage": predicted.plan.stage,
        "target": step.target,
        "seconds": step.seconds,
        "bytes": {**vars(memory), "peak": memory.peak},
        "collectives": collectives,
        "findings": [vars(finding) for finding in [*step.audit.findings, *step.audit.notes]],
    }


def _devices(cluster: Cluster) -> Sequence[Device]:
    if cluster.topology is not None:
        return topology(cluster.platform, cluster.topology)
    if cluster.platform != "cpu":
        example = "h100:8" if cluster.platform == "gpu" else "v5e:4x4"
        raise MeshError(f"--compile needs to know the {cluster.platform}: name it, as in --devices {example}")
    devices = jax.devices()
    if len(devices) < cluster.num_devices:
        raise MeshError(
            f"--devices {cluster.spec}: XLA_FLAGS asks for {len(devices)} CPU devices; unset it, or plan for as many"
        )
    return devices[: cluster.num_devices]
