"""How long a step takes, from the work, the bytes and a device's figures."""

from dataclasses import dataclass

from jzero.config import Config
from jzero.hardware import Cluster
from jzero.plan import Plan


@dataclass(frozen=True)
class Times:
    """Seconds of a step on one device. update: of the optimizer; communication: all of it; exposed: what of that does
    not run beside the matrix products."""

    compute: float
    update: float
    communication: float
    exposed: float

    @property
    def step(self) -> float:
        return self.compute + self.update + self.exposed


def step_times(config: Config, plan: Plan, cluster: Cluster, flops: float, communication: float | None) -> Times | None:
    """flops: of matrix products. communication: seconds. None where a figure is not known."""
    hardware, assumed = cluster.hardware, config.hardware
    if communication is None or hardware.peak_flops is None or hardware.memory_bandwidth is None:
        return None
    # XLA:GPU computes float32 products in TF32, half as fast as bfloat16 on the GPUs in question; XLA:TPU in bfloat16.
    slower = 0.5 if cluster.platform == "gpu" and config.precision.compute == "float32" else 1.0
    compute = flops / (hardware.peak_flops * slower * assumed.efficiency)
    update = updated_bytes(plan) / hardware.memory_bandwidth
    return Times(compute, update, communication, exposed(communication, compute, assumed.overlap))


def exposed(communication: float, compute: float, overlap: float) -> float:
    """Seconds of communication that a step waits for, where a share of it, overlap, may run beside the compute."""
    return (1 - overlap) * communication + max(0.0, overlap * communication - compute)


def updated_bytes(plan: Plan) -> int:
    """Bytes of device memory that an update moves: gradients read, the rest of the trained state read and written."""
    sizes = plan.bytes_per_device()
    state = sum(size for tree, size in sizes.items() if tree not in ("gradients", "model_state"))
    return sizes["gradients"] + 2 * state


def bandwidth_needed(sent_bytes: float, compute_seconds: float, efficiency: float, overlap: float = 0.0) -> float:
    """Bytes/s in one direction that a device needs for compute to take that share, efficiency, of compute and exposed
    communication together.

    sent_bytes: by one device in compute_seconds. overlap: the share of communication that runs beside the compute, for
    which it must not be longer than that. Without overlap, 16-bit weights gathered twice and 16-bit gradients reduced
    once, at an efficiency of 75 %, this is the well-known 18 parameters (N - 1) / (N seconds).
    """
    return max((1 - overlap) * efficiency / (1 - efficiency), overlap) * sent_bytes / compute_seconds
