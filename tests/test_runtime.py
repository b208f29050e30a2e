"""What comes of `runtime` and `mesh`: the devices asked for, in order along named axes, or a refusal."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jzero import mesh, runtime
from jzero.config import MeshConfig, RuntimeConfig
from jzero.errors import ConfigError, MeshError

ROOT = Path(__file__).parents[1]
COUNT = "--xla_force_host_platform_device_count"


def python(code):
    """Runs code in a fresh process without JAX's variables; returns what it printed, as JSON."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# runtime: before JAX starts. The process is the thing tested: its environment, and what JAX makes of it.

START = """
import json, os
from jzero import runtime
from jzero.config import RuntimeConfig
from jzero.errors import ConfigError
results = []
for config in {configs}:
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        os.environ.pop(name, None)
    os.environ.update(config.pop("env", {{}}))
    try:
        runtime.start(RuntimeConfig(**config))
        results.append([os.environ.get("JAX_PLATFORMS"), os.environ.get("XLA_FLAGS")])
    except ConfigError as error:
        results.append(str(error))
print(json.dumps(results))
"""


def test_start_sets_the_environment_that_jax_will_read():
    cases = [
        ({}, [None, None]),
        ({"platform": "cpu"}, ["cpu", None]),
        ({"platform": "gpu"}, ["cuda", None]),
        ({"platform": "tpu"}, ["tpu", None]),
        ({"fake_devices": 3}, ["cpu", f"{COUNT}=3"]),
        ({"xla_flags": ["--xla_a=1", "--xla_b"]}, [None, "--xla_a=1 --xla_b"]),
        # The environment wins, and keeps what it says.
        ({"fake_devices": 3, "env": {"XLA_FLAGS": f"{COUNT}=5"}}, ["cpu", f"{COUNT}=5"]),
        ({"xla_flags": ["--xla_a=1"], "env": {"XLA_FLAGS": "--xla_a=2"}}, [None, "--xla_a=2"]),
        ({"xla_flags": ["--xla_a=1"], "env": {"XLA_FLAGS": "--xla_ab=2"}}, [None, "--xla_ab=2 --xla_a=1"]),
        ({"platform": "gpu", "env": {"JAX_PLATFORMS": "rocm,cpu"}}, ["rocm,cpu", None]),
        ({"platform": "auto", "env": {"JAX_PLATFORMS": "tpu"}}, ["tpu", None]),
        (
            {"platform": "gpu", "env": {"JAX_PLATFORMS": "cpu"}},
            "runtime.platform = gpu: JAX_PLATFORMS = cpu contradicts it; unset one of the two",
        ),
        (
            {"fake_devices": 8, "env": {"JAX_PLATFORMS": "cuda"}},
            "runtime.platform = auto with runtime.fake_devices = 8: JAX_PLATFORMS = cuda contradicts it; "
            "unset one of the two",
        ),
    ]
    results = python(START.format(configs=[config for config, _ in cases]))
    for (config, expected), result in zip(cases, results, strict=True):
        assert result == expected, config


@pytest.mark.parametrize("import_jax_first", [False, True])
def test_jax_makes_the_fake_devices_asked_for(import_jax_first):
    code = f"""
import json
{"import jax" if import_jax_first else ""}
from jzero import runtime
from jzero.config import RuntimeConfig
runtime.start(RuntimeConfig(fake_devices=5, xla_flags=["--xla_cpu_enable_fast_math=false"]))
runtime.start(RuntimeConfig(fake_devices=5))
import jax
made = [jax.default_backend(), jax.device_count()]
runtime.start(RuntimeConfig(platform="cpu", fake_devices=5))
print(json.dumps(made))
"""
    assert python(code) == ["cpu", 5]


def test_a_platform_that_is_not_there_is_refused_and_never_the_cpu_instead():
    code = """
import json
from jzero import mesh, runtime
from jzero.config import MeshConfig, RuntimeConfig
from jzero.errors import MeshError
runtime.start(RuntimeConfig(platform="gpu"))
try:
    print(json.dumps(mesh.make_mesh(MeshConfig()).devices.flat[0].platform))
except MeshError as error:
    print(json.dumps(str(error)))
"""
    told = python(code)
    assert told == "gpu" or told.startswith("JAX finds no devices for JAX_PLATFORMS = cuda (")


# runtime: after JAX has started, as in this process.


@pytest.fixture
def started(monkeypatch):
    """The number of CPU devices that JAX has started in this process, under no XLA_FLAGS."""
    count = jax.device_count()
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    return count


def test_settings_in_force_are_accepted_late(started):
    before = dict(os.environ)
    for config in ({}, {"platform": "cpu"}, {"fake_devices": started}):
        runtime.start(RuntimeConfig(**config))
    assert dict(os.environ) == before
    assert jax.config.jax_num_cpu_devices == -1


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"platform": "gpu"}, "runtime.platform = gpu, but JAX runs on cpu: JAX has started already"),
        ({"platform": "tpu"}, "runtime.platform = tpu, but JAX runs on cpu: JAX has started already"),
        ({"fake_devices": 999}, "runtime.fake_devices = 999, but there are N CPU devices: JAX has started"),
        (
            {"xla_flags": ["--xla_a=1"]},
            "runtime.xla_flags = [--xla_a=1]: not in XLA_FLAGS, and JAX has started",
        ),
    ],
)
def test_settings_that_come_too_late_are_refused(started, config, told):
    with pytest.raises(ConfigError) as caught:
        runtime.start(RuntimeConfig(**config))
    assert str(caught.value).startswith(told.replace("N", str(started)))
    assert "call jzero.runtime.start before any use of JAX" in str(caught.value)
    assert "XLA_FLAGS" not in os.environ


# mesh


@pytest.mark.parametrize(
    ("given", "num_devices", "sizes"),
    [
        ({}, 8, (1, 8, 1)),
        ({}, 3, (1, 3, 1)),
        ({}, 1, (1, 1, 1)),
        ({"tensor": 2}, 8, (1, 4, 2)),
        ({"replica": 2, "tensor": 2}, 8, (2, 2, 2)),
        ({"replica": -1, "data": 4}, 8, (2, 4, 1)),
        ({"data": 1, "tensor": -1}, 6, (1, 1, 6)),
        ({"replica": 2, "data": 3, "tensor": 4}, 24, (2, 3, 4)),
        ({"tensor": 8}, 8, (1, 1, 8)),
    ],
)
def test_one_axis_takes_what_remains(given, num_devices, sizes):
    config = MeshConfig(**given)
    assert mesh.axis_sizes(config, num_devices) == dict(zip(mesh.AXES, sizes, strict=True))
    abstract = mesh.abstract_mesh(config, num_devices)
    assert abstract.axis_names == mesh.AXES == ("replica", "data", "tensor")
    assert abstract.axis_sizes == sizes
    assert set(abstract.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(
    ("given", "num_devices", "told"),
    [
        ({"data": 3}, 8, "mesh.replica = 1, mesh.data = 3, mesh.tensor = 1: their product is 3, and "),
        ({"data": 3}, 8, "there are 8 devices; set mesh.data: 8"),
        ({"replica": 2, "data": 2}, 8, "set mesh.replica: 4, or mesh.data: 4, or mesh.tensor: 2"),
        ({"tensor": 3}, 8, "mesh.replica = 1, mesh.data = -1, mesh.tensor = 3: 8 devices do not divide by 3"),
        ({"tensor": 3}, 8, "the product of the sizes that are set; set mesh.tensor: 2 or 4"),
        ({"tensor": 16}, 8, "set mesh.tensor: 8"),
        ({"replica": 2, "tensor": 3}, 8, "8 devices do not divide by 6"),
        ({"replica": 3, "data": 1, "tensor": 5}, 8, "their product must divide 8: 1 or 2 or 4 or 8"),
        ({}, 0, "a mesh needs devices, and there are 0"),
    ],
)
def test_sizes_that_do_not_fit_the_devices_are_told_with_the_nearest_that_do(given, num_devices, told):
    for make in (mesh.axis_sizes, mesh.abstract_mesh):
        with pytest.raises(MeshError) as caught:
            make(MeshConfig(**given), num_devices)
        assert told in str(caught.value)


def test_every_remedy_for_a_mesh_works():
    for given in ({"data": 3}, {"replica": 2, "data": 2}, {"tensor": 3}, {"replica": 2, "tensor": 3}):
        with pytest.raises(MeshError) as caught:
            mesh.axis_sizes(MeshConfig(**given), 8)
        remedies = [fix.split(": ") for fix in str(caught.value).partition("; set ")[2].split(", or ")]
        assert remedies
        for axis, numbers in remedies:
            for number in numbers.split(" or "):
                sizes = mesh.axis_sizes(MeshConfig(**{**given, axis.removeprefix("mesh."): int(number)}), 8)
                assert math.prod(sizes.values()) == 8


def test_neighbouring_devices_are_neighbours_along_tensor():
    devices = jax.devices()[: jax.device_count() // 2 * 2]
    made = mesh.make_mesh(MeshConfig(tensor=2), devices)
    assert made.axis_names == mesh.AXES
    assert set(made.axis_types) == {AxisType.Auto}
    assert made.devices.shape == (1, len(devices) // 2, 2)
    assert made.devices.ravel().tolist() == devices
    assert mesh.abstract_mesh(MeshConfig(tensor=2), len(devices)).shape == made.abstract_mesh.shape


def test_a_mesh_takes_all_devices_or_those_given():
    assert mesh.make_mesh(MeshConfig()).size == jax.device_count()
    last = jax.devices()[-1:]
    made = mesh.make_mesh(MeshConfig(), last)
    assert made.devices.ravel().tolist() == last
    with pytest.raises(MeshError, match="there are 1 devices"):
        mesh.make_mesh(MeshConfig(data=2), last)


def test_a_batch_is_split_over_replica_and_data_and_copied_along_tensor():
    devices = jax.devices()[: jax.device_count() // 2 * 2]
    made = mesh.make_mesh(MeshConfig(replica=2 if len(devices) % 4 == 0 else 1, tensor=2), devices)
    rows = np.arange(len(devices) // 2)
    placed = jax.device_put(rows, NamedSharding(made, PartitionSpec(mesh.BATCH_AXES)))
    held = {shard.device: shard.data.tolist() for shard in placed.addressable_shards}
    assert [held[device] for device in devices] == [[row] for row in rows for _ in range(2)]


# topology: hardware that is not there


@pytest.mark.parametrize(
    ("platform", "name", "told"),
    [
        ("gpu", "h100", "no GPU topology 'h100'; take h100:8"),
        (
            "gpu",
            "b999:8",
            "no GPU topology 'b999:8'; take h100:8, or slices x hosts x GPUs as in h100:1x2x8, of a100-40",
        ),
        ("gpu", "h100:0", "no GPU topology 'h100:0'"),
        ("gpu", "h100:2x4", "no GPU topology 'h100:2x4'"),
        ("cpu", "8", "no topology for platform 'cpu'; take tpu or gpu (fake devices serve for cpu)"),
    ],
)
def test_an_unknown_topology_is_refused(platform, name, told):
    with pytest.raises(MeshError) as caught:
        mesh.topology(platform, name)
    assert str(caught.value).startswith(told)


@pytest.mark.parametrize(
    ("platform", "name"),
    [("tpu", "v5e:2x4"), ("gpu", "h100:8")],
)
def test_without_its_compiler_a_topology_says_what_to_install(monkeypatch, platform, name):
    def unavailable(*args, **kwargs):
        raise NotImplementedError(f"topology not implemented for {platform}")

    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", unavailable)
    with pytest.raises(MeshError, match=rf"pip install 'jzero\[{platform}\]'"):
        mesh.topology(platform, name)


def test_a_device_count_that_does_not_hold_is_told(caplog, monkeypatch):
    """XLA_FLAGS wins, whoever set it: the caller, or an earlier engine in the same notebook."""
    monkeypatch.setenv("XLA_FLAGS", f"{COUNT}={jax.device_count()}")
    runtime.start(RuntimeConfig(fake_devices=jax.device_count()))
    assert not caplog.text
    runtime.start(RuntimeConfig(fake_devices=99))
    assert f"runtime.fake_devices = 99: XLA_FLAGS has {jax.device_count()}" in caplog.text
