"""Devices along named axes: `replica` outermost, then `data`, then `tensor`, in the devices' order."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jzero.config import MeshConfig
from jzero.config.batch import divisors, either, neighbours
from jzero.errors import MeshError

Device: TypeAlias = Any  # jax.Device, for which jaxlib ships no types

AnyMesh: TypeAlias = Mesh | AbstractMesh  # of devices, or of none: to plan and trace only

AXES = ("replica", "data", "tensor")
BATCH_AXES = ("replica", "data")

# Auto: XLA spreads the shardings that jzero sets. jax.make_mesh would default to Explicit.
_AXIS_TYPES = (AxisType.Auto,) * len(AXES)


# What XLA must know of a GPU that is not there. Per device; sizes in bytes, bandwidth in bytes a second.
_GPU_TARGET = """
    gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
      shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared_optin}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: {clock}
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: {bandwidth} device_memory_size: {memory} l2_cache_size: {cache}
      cuda_compute_capability {{ major: {capability} }}
    }}
    platform_name: "CUDA"
    device_description_str: "{name}"
    runtime_version {{ major: 12 minor: 8 }}
    dnn_version_info {{ major: 9 minor: 10 }}
"""
# Their memory as the driver counts it, a little more than is published.
_AMPERE = {"capability": 8, "shared": 167936, "shared_optin": 166912, "fpus": 64, "cores": 108, "clock": 1.41}
_AMPERE |= {"cache": 41943040}
_HOPPER = {"capability": 9, "shared": 233472, "shared_optin": 232448, "fpus": 128, "cores": 132, "clock": 1.98}
_HOPPER |= {"cache": 52428800}
_BLACKWELL = _HOPPER | {"capability": 10, "cores": 148, "clock": 1.965, "cache": 132644864}
_GPU_CHIPS = {
    "a100-40": _AMPERE | {"name": "NVIDIA A100-SXM4-40GB", "memory": 42331013120, "bandwidth": 1555200000000},
    "a100-80": _AMPERE | {"name": "NVIDIA A100-SXM4-80GB", "memory": 85100068864, "bandwidth": 2039040000000},
    "h100": _HOPPER | {"name": "NVIDIA H100 80GB HBM3", "memory": 84942979072, "bandwidth": 3352320000000},
    "h200": _HOPPER | {"name": "NVIDIA H200", "memory": 151397597184, "bandwidth": 4800000000000},
    "b200": _BLACKWELL | {"name": "NVIDIA B200", "memory": 191514411008, "bandwidth": 7672320000000},
}


def axis_sizes(config: MeshConfig, num_devices: int) -> dict[str, int]:
    """Devices along each axis of AXES. Raises MeshError unless their product is `num_devices`."""
    sizes = {axis: int(getattr(config, axis)) for axis in AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if num_devices < 1:
        raise MeshError(f"a mesh needs devices, and there are {num_devices}")
    if -1 in sizes.values():
        if num_devices % fixed == 0:
            return {axis: num_devices // fixed if size == -1 else size for axis, size in sizes.items()}
        trouble = f"{num_devices} devices do not divide by {fixed}, the product of the sizes that are set"
    else:
        if num_devices == fixed:
            return sizes
        trouble = f"their product is {fixed}, and there are {num_devices} devices"
    told = ", ".join(f"mesh.{axis} = {size}" for axis, size in sizes.items())
    raise MeshError(f"{told}: {trouble}; {_fix(sizes, num_devices)}")


def _fix(sizes: dict[str, int], num_devices: int) -> str:
    """The changes of one axis that would do, else the products that would."""
    fixes = []
    for axis, size in sizes.items():
        rest = math.prod(other for name, other in sizes.items() if name != axis and other != -1)
        if size != -1 and num_devices % rest == 0:
            room = num_devices // rest
            fixes.append(f"mesh.{axis}: {either(neighbours(room, size) if -1 in sizes.values() else [room])}")
    if fixes:
        return f"set {', or '.join(fixes)}"
    return f"their product must divide {num_devices}: {either(divisors(num_devices))}"


def make_mesh(config: MeshConfig, devices: Sequence[Device] | None = None) -> Mesh:
    """The mesh of `devices` (None: all); neighbours in the sequence are neighbours along `tensor`.

    Raises MeshError where the sizes do not fit, and where JAX finds no devices.
    """
    devices = _all_devices() if devices is None else devices
    sizes = axis_sizes(config, len(devices))
    grid = np.array(devices, dtype=object).reshape(tuple(sizes.values()))
    return Mesh(grid, AXES, axis_types=_AXIS_TYPES)


def _all_devices() -> list[Device]:
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # a bare assertion where the platform has no plugin
        told = f"JAX finds no devices for JAX_PLATFORMS = {os.environ.get('JAX_PLATFORMS')}"
        why = _first_line(error) or "its plugin is not installed"
        raise MeshError(f"{told} ({why}); install jzero[gpu] or jzero[tpu], or change runtime.platform") from error


def abstract_mesh(config: MeshConfig, num_devices: int) -> AbstractMesh:
    """The same mesh without devices, for planning."""
    return AbstractMesh(tuple(axis_sizes(config, num_devices).values()), AXES, axis_types=_AXIS_TYPES)


def batch_shards(axis_sizes: Mapping[str, int]) -> int:
    """The devices that share the rows of a batch: those of the batch axes."""
    return math.prod(axis_sizes[axis] for axis in BATCH_AXES)


def platform_of(mesh: AnyMesh) -> str | None:
    """The platform of a mesh's devices; None where it has none."""
    return mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else None


def topology(platform: str, name: str) -> list[Device]:
    """Devices that are not there, to compile for: `topology("tpu", "v5e:2x4")`, `topology("gpu", "h100:8")`.

    A GPU name is the chip and either a number of GPUs or slices x hosts x GPUs a host ("h100:1x2x8"). Raises
    MeshError for an unknown name or where the compiler's wheel is not installed.
    """
    if platform == "tpu":
        return _tpu_topology(name)
    if platform == "gpu":
        return _gpu_topology(name)
    raise MeshError(f"no topology for platform {platform!r}; take tpu or gpu (fake devices serve for cpu)")


def _tpu_topology(name: str) -> list[Device]:
    from jax.experimental import topologies

    if importlib.util.find_spec("libtpu") is None:
        raise MeshError(f"compiling for tpu {name} needs libtpu: pip install 'jzero[tpu]'")
    # Without a TPU, libtpu would wait for a metadata server, and for other processes that hold it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return list(topologies.get_topology_desc(topology_name=name, platform="tpu").devices)
    except jax.errors.JaxRuntimeError as error:
        raise MeshError(f"libtpu knows no topology {name!r}, such as v5e:2x4: {_first_line(error)}") from error


def _gpu_topology(name: str) -> list[Device]:
    from jax.experimental import topologies

    chip, _, shape = name.partition(":")
    shape = shape if "x" in shape else f"1x1x{shape}"
    if chip not in _GPU_CHIPS or not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", shape):
        known = f"take h100:8, or slices x hosts x GPUs as in h100:1x2x8, of {', '.join(_GPU_CHIPS)}"
        raise MeshError(f"no GPU topology {name!r}; {known}")
    try:
        described = topologies.get_topology_desc(
            "", "cuda", target_config=_GPU_TARGET.format(**_GPU_CHIPS[chip]), topology=shape
        )
    except NotImplementedError as error:
        raise MeshError(f"compiling for gpu {name} needs the CUDA plugin: pip install 'jzero[gpu]'") from error
    except jax.errors.JaxRuntimeError as error:
        raise MeshError(f"no GPU topology {name!r}: {_first_line(error)}") from error
    return list(described.devices)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
