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
    """A compiled step, by its audit, or what the compiler says of one that does not fit. target: what it is for;
    seconds: how long that took, tracing included."""

    target: str
    seconds: float
    audit: Audit | None
    refusal: str = ""


def compile_step(config: Config, cluster: Cluster) -> CompiledStep:
    """The training step of a config, its own stage's, compiled for the cluster. Raises UserError where the compiler is
    not installed."""
    devices = _devices(cluster)
    target = f"{cluster.num_devices} {getattr(devices[0], 'device_kind', cluster.platform)}"
    start = time.perf_counter()
    blueprint = blueprint_of(config, devices)
    try:
        program = blueprint.program(abstract_batch(config, cluster.num_devices))
    except jax.errors.JaxRuntimeError as error:
        # XLA:TPU compiles nothing that does not fit.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return CompiledStep(target, time.perf_counter() - start, None, str(error).partition("\n")[0])
    return CompiledStep(target, time.perf_counter() - start, audit_program(program))


def compiled_report(step: CompiledStep, predicted: Prediction) -> RenderableType:
    """predicted: for the same config."""
    told = f"Stage {predicted.plan.stage} compiled for {step.target} in {step.seconds:.0f} s"
    expected = f"predicted {human_bytes(predicted.total)}"
    if step.audit is None:
        return Text(f"{told}: it does not fit, {expected}: {step.refusal}", style="bold")
    peak = step.audit.memory.peak
    against = f"{human_bytes(peak)} a device, {expected} ({predicted.total / peak - 1:+.0%})"
    return Group(Text(f"{told}: {against}", style="bold"), step.audit)


def compiled_record(step: CompiledStep, predicted: Prediction) -> dict[str, Any]:
    """As `compiled_report`, as plain data; bytes are of one device."""
    about = {"stage": predicted.plan.stage, "target": step.target, "seconds": step.seconds}
    if step.audit is None:
        return {**about, "refusal": step.refusal}
    memory, sizes, per_node = step.audit.memory, predicted.plan.axis_sizes, predicted.cluster.devices_per_node
    fields = ("kind", "dtype", "shape", "axes", "group", "runs", "phase", "source", "payload_bytes", "sent_bytes")
    collectives = [
        {
            **{name: getattr(one, name) for name in fields},
            "crosses_nodes": crosses_nodes(one.axes, sizes, per_node),
            "loops": len(one.loops),
        }
        for one in step.audit.collectives
    ]
    return {
        **about,
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
