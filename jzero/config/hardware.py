"""The devices to plan for, and what the planner assumes of them."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from jzero.config.section import Decay, Number, Positive, Section, Size


class HardwareConfig(Section):
    """Figures of one device; null: those published (jzero/hardware.py). Bandwidths are in one direction."""

    path: ClassVar[str] = "hardware"

    memory: Positive | None = None  # bytes
    peak_flops: Positive | None = None  # FLOP/s at best, for mfu and the planner; null: as published for bfloat16
    memory_bandwidth: Positive | None = None  # bytes/s
    intra_bandwidth: Positive | None = None  # bytes/s to the devices of its node, over all links together
    inter_bandwidth: Positive | None = None  # bytes/s to other nodes
    devices_per_node: Size | None = None  # devices that reach each other at intra_bandwidth
    # The planner's assumptions. Share of the peak that matrix products reach: well-tuned training has model FLOPs
    # utilisations of 0.4 to 0.55 (PaLM 0.46, Llama 3 0.38 to 0.43), communication and updates included.
    efficiency: Annotated[Number, Field(gt=0, le=1)] = 0.5
    # Share of the time of transfers that runs beside matrix products. 0 errs on the slow side: what XLA overlaps hangs
    # on flags and loops, and jzero has not been timed on accelerators yet.
    overlap: Annotated[Number, Field(ge=0, le=1)] = 0.0
    # Share of the memory to leave free: JAX takes 3/4 of a GPU, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
    headroom: Decay = 0.25
