"""What is published about accelerators, and the clusters made of them that `--devices` names. Imports no JAX."""

import difflib
import math
import re
from dataclasses import dataclass, replace
from typing import Literal

from jzero.config import HardwareConfig
from jzero.errors import ConfigError

Platform = Literal["cpu", "gpu", "tpu"]

# FLOP/s of dense bfloat16 matrix products on one JAX device, by the beginning of `device.device_kind`. NVIDIA's sheets
# name them with sparsity, which doubles them. Not here: what has no bfloat16 (V100, T4), and slices of a GPU (MIG).
_PEAKS = {
    # NVIDIA A100 Tensor Core GPU datasheet (2022); A10, A30, A40 datasheets
    "NVIDIA A100": 312e12,
    "NVIDIA A10": 125e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A40": 149.7e12,
    # NVIDIA H100 datasheet (2024) and Hopper architecture whitepaper; H200 and GH200 datasheets
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA GH200": 989.4e12,
    # HGX B200 and GB200 NVL72 datasheets
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    # NVIDIA L4, L40 and L40S datasheets
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    # Ada and Ampere GA102 architecture whitepapers, float32 accumulation
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    # cloud.google.com/tpu/docs/system-architecture-tpu-vm, a page for each version; v3 and 7x show two devices a chip
    "TPU v3": 123e12 / 2,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,
}


def published_peak(device_kind: str) -> float | None:
    """The published dense bfloat16 peak of one device, FLOP/s; None where it is not known here."""
    if "MIG" in device_kind:
        return None
    known = [kind for kind in _PEAKS if f"{device_kind} ".replace("-", " ").startswith(f"{kind} ")]
    return _PEAKS[max(known, key=len)] if known else None


@dataclass(frozen=True)
class Hardware:
    """One device, by the fields of `HardwareConfig`; None: not known. devices_per_node of a TPU: of the largest slice,
    all of which its interconnect reaches."""

    memory: float | None = None
    peak_flops: float | None = None
    memory_bandwidth: float | None = None
    intra_bandwidth: float | None = None
    inter_bandwidth: float | None = None
    devices_per_node: int | None = None


def _published(kind: str, *figures: float | None, per_node: int) -> Hardware:
    memory, memory_bandwidth, intra, inter = figures
    return Hardware(memory, published_peak(kind), memory_bandwidth, intra, inter, per_node)


# Memory, its bandwidth, and half of what the sheets name for links, which counts both directions. A GPU's share of its
# node's network cards: one card each. A slice of TPUs sends nothing beyond itself.
_GPUS = {
    # NVIDIA A100 datasheet: HBM2 40 GB 1555 GB/s, HBM2e 80 GB 2039 GB/s, NVLink 600 GB/s. DGX A100: 8 x 200 Gb/s
    "a100-40": _published("NVIDIA A100", 40e9, 1555e9, 300e9, 25e9, per_node=8),
    "a100-80": _published("NVIDIA A100", 80e9, 2039e9, 300e9, 25e9, per_node=8),
    # NVIDIA H100 datasheet, SXM: 80 GB, 3.35 TB/s, NVLink 900 GB/s. DGX H100: 8 x 400 Gb/s
    "h100": _published("NVIDIA H100 80GB HBM3", 80e9, 3350e9, 450e9, 50e9, per_node=8),
    # NVIDIA H200 datasheet, SXM: 141 GB, 4.8 TB/s, NVLink 900 GB/s. DGX H200: 8 x 400 Gb/s
    "h200": _published("NVIDIA H200", 141e9, 4800e9, 450e9, 50e9, per_node=8),
    # NVIDIA DGX B200 datasheet, for 8: 1440 GB, 64 TB/s, NVLink 14.4 TB/s, 8 x 400 Gb/s
    "b200": _published("NVIDIA B200", 180e9, 8000e9, 900e9, 50e9, per_node=8),
}
_TPUS = {
    # cloud.google.com/tpu/docs/v4: 32 GiB, 1200 GB/s; interconnect 2400 Gb/s (of the v5p announcement); pods of 4096
    "v4": _published("TPU v4", 32 * 2**30, 1200e9, 300e9, None, per_node=4096),
    # cloud.google.com/tpu/docs/v5e: 16 GB, 819 GB/s, interconnect 400 GB/s; pods of 256
    "v5e": _published("TPU v5e", 16e9, 819e9, 200e9, None, per_node=256),
    # cloud.google.com/tpu/docs/v5p: 95 GB, 2765 GB/s, interconnect 1200 GB/s; slices of up to 6144
    "v5p": _published("TPU v5p", 95e9, 2765e9, 600e9, None, per_node=6144),
    # cloud.google.com/tpu/docs/v6e: 32 GB, 1600 GB/s, interconnect 800 GB/s; pods of 256
    "v6e": _published("TPU v6e", 32e9, 1600e9, 400e9, None, per_node=256),
}
_GRID_AXES = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2}


@dataclass(frozen=True)
class Cluster:
    """Devices to plan for: nodes x devices_per_node of one kind, consecutive ones within a node.

    spec: as it was named. hardware: its figures, those of the config first. topology: its name for
    `jzero.mesh.topology`; None for devices without a name.
    """

    spec: str
    name: str | None
    hardware: Hardware
    nodes: int
    devices_per_node: int
    platform: Platform
    topology: str | None = None

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node


def parse_devices(spec: str, config: HardwareConfig, platform: Platform = "cpu") -> Cluster:
    """The cluster that a SPEC names: `8`, `2x8` (nodes x devices), `h100:64`, `h100:2x4`, `v5e:8x8`.

    config: its figures go before the published ones. platform: of devices without a name. Raises ConfigError.
    """
    name, colon, shape = spec.rpartition(":")
    sizes = [int(size) for size in shape.split("x")] if re.fullmatch(r"[1-9]\d{0,6}(x[1-9]\d{0,6})*", shape) else []
    known = {**_GPUS, **_TPUS}
    if colon and name not in known:
        raise ConfigError(f"--devices {spec}: {_unknown(name)}")
    if not colon and not sizes and spec in known:
        raise ConfigError(f"--devices {spec}: say how many, such as {_example(spec)}")
    hardware = _with(known[name] if colon else Hardware(), config)
    if name in _TPUS:
        return _slice(spec, name, sizes, hardware)
    if len(sizes) not in (1, 2):
        raise ConfigError(
            f"--devices {spec}: give a number of devices, or nodes x devices: {_example(name) if colon else '8 or 2x8'}"
        )
    nodes, per_node = sizes if len(sizes) == 2 else _nodes(spec, sizes[0], hardware.devices_per_node)
    if not colon:
        return Cluster(spec, None, hardware, nodes, per_node, platform)
    return Cluster(spec, name, hardware, nodes, per_node, "gpu", f"{name}:1x{nodes}x{per_node}")


def _nodes(spec: str, count: int, per_node: int | None) -> tuple[int, int]:
    if per_node is None or count <= per_node:
        return 1, count
    if count % per_node:
        below = count - count % per_node
        raise ConfigError(
            f"--devices {spec}: {count} devices fill no nodes of {per_node}; give {below} or {below + per_node}, "
            "nodes x devices, or set hardware.devices_per_node"
        )
    return count // per_node, per_node


def _slice(spec: str, name: str, sizes: list[int], hardware: Hardware) -> Cluster:
    axes, most = _GRID_AXES[name], hardware.devices_per_node
    if len(sizes) != axes:
        raise ConfigError(f"--devices {spec}: give the {axes} sides of a slice of {name}, such as {_example(name)}")
    if most is not None and math.prod(sizes) > most:
        raise ConfigError(f"--devices {spec}: {math.prod(sizes)} chips; the largest slice of {name} has {most}")
    return Cluster(spec, name, hardware, 1, math.prod(sizes), "tpu", spec)


def _with(published: Hardware, config: HardwareConfig) -> Hardware:
    said = {name: getattr(config, name) for name in Hardware.__dataclass_fields__}
    return replace(published, **{name: value for name, value in said.items() if value is not None})


def _example(name: str) -> str:
    return f"{name}:8" if name in _GPUS else f"{name}:{'x'.join(['4'] * _GRID_AXES[name])}"


def _unknown(name: str) -> str:
    known = [*_GPUS, *_TPUS]
    longer = [other for other in known if name and other.startswith(name.lower())]
    if near := longer or difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5):
        return f"no figures of {name!r}; did you mean {_example(near[0])}?"
    return (
        f"no figures of {name!r}; they are of {', '.join(known)}. For another device give a number of devices, and its "
        "figures in hardware.*"
    )
