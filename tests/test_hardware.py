"""Clusters that `--devices` names, and the figures of their devices."""

import subprocess
import sys
from pathlib import Path

import pytest

from jzero.config import HardwareConfig
from jzero.errors import ConfigError
from jzero.hardware import parse_devices

NOTHING_SAID = HardwareConfig()


@pytest.mark.parametrize(
    ("spec", "nodes", "per_node", "platform", "topology"),
    [
        ("8", 1, 8, "cpu", None),
        ("2x8", 2, 8, "cpu", None),
        ("h100:64", 8, 8, "gpu", "h100:1x8x8"),
        ("h100:4", 1, 4, "gpu", "h100:1x1x4"),
        ("h100:2x4", 2, 4, "gpu", "h100:1x2x4"),
        ("a100-80:16", 2, 8, "gpu", "a100-80:1x2x8"),
        ("h200:8", 1, 8, "gpu", "h200:1x1x8"),
        ("v5e:8x8", 1, 64, "tpu", "v5e:8x8"),
        ("v5p:4x4x4", 1, 64, "tpu", "v5p:4x4x4"),
        ("v6e:16x16", 1, 256, "tpu", "v6e:16x16"),
    ],
)
def test_a_spec_names_a_cluster(spec, nodes, per_node, platform, topology):
    cluster = parse_devices(spec, NOTHING_SAID)
    assert (cluster.nodes, cluster.devices_per_node, cluster.num_devices) == (nodes, per_node, nodes * per_node)
    assert (cluster.platform, cluster.topology) == (platform, topology)
    assert cluster.name == (spec.partition(":")[0] if ":" in spec else None)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("h10:8", "no figures of 'h10'; did you mean h100:8?"),
        ("H100:8", "did you mean h100:8?"),
        ("a100:8", "did you mean a100-40:8?"),
        ("tpu:8", "they are of a100-40, a100-80, h100, h200, b200, v4, v5e, v5p, v6e"),
        ("h100", "say how many, such as h100:8"),
        ("v5e", "say how many, such as v5e:4x4"),
        ("v5e:8", "give the 2 sides of a slice of v5e, such as v5e:4x4"),
        ("v5p:4x4", "give the 3 sides"),
        ("v5e:32x32", "1024 chips; the largest slice of v5e has 256"),
        ("h100:12", "12 devices fill no nodes of 8; give 8 or 16"),
        ("h100:2x2x2", "give a number of devices, or nodes x devices: h100:8"),
        ("0", "give a number of devices, or nodes x devices: 8 or 2x8"),
        ("", "give a number of devices"),
        ("eight", "give a number of devices"),
        ("2x", "give a number of devices"),
    ],
)
def test_what_names_none_is_told_with_what_would(spec, told):
    with pytest.raises(ConfigError, match="--devices") as error:
        parse_devices(spec, NOTHING_SAID)
    assert told in str(error.value)


def test_figures_of_the_config_go_before_the_published():
    published = parse_devices("h100:16", NOTHING_SAID).hardware
    assert (published.memory, published.peak_flops) == (80e9, 989.4e12)
    said = parse_devices("h100:16", HardwareConfig(memory=40e9, devices_per_node=4))
    assert (said.hardware.memory, said.hardware.peak_flops, said.nodes) == (40e9, 989.4e12, 4)


def test_devices_without_a_name_have_the_figures_that_the_config_says_alone():
    assert parse_devices("8", NOTHING_SAID).hardware.memory is None
    assert parse_devices("16", HardwareConfig(memory=24e9, devices_per_node=8)).nodes == 2


@pytest.mark.parametrize("name", ["a100-40:8", "a100-80:8", "h100:8", "h200:8", "b200:8", "v5e:4x4", "v5p:2x2x2"])
def test_every_figure_of_a_named_device_is_known(name):
    hardware = parse_devices(name, NOTHING_SAID).hardware
    unknown = {field for field, value in vars(hardware).items() if value is None}
    assert unknown == (set() if name[0] in "abh" else {"inter_bandwidth"})


def test_figures_are_read_without_jax():
    code = "import sys, jzero.hardware; print('jax' in sys.modules)"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
