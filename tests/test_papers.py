"""The tables of the ZeRO paper (arXiv 1910.02054), from plans of Llama-like models of its sizes.

It counts bytes of 16-bit training with Adam in GB of 10^9, without activations.
"""

from functools import cache

import jax.numpy as jnp
import optax
import pytest

import jzero
from jzero.config import PrecisionConfig, ZeroConfig
from jzero.leaf import AbstractParam
from jzero.planning.times import bandwidth_needed

# parameters: width, layers; the vocabulary takes what remains
SHAPES = {7.5e9: (4096, 36), 128e9: (12288, 70), 1e12: (24576, 137)}


def llama(num_parameters: float, width: int, layers: int) -> dict[str, AbstractParam]:
    """Scanned layers of 12 width^2 weights and two norms, embedding and head; matrices split over the tensor axis as
    Megatron splits them."""
    hidden = 8 * width // 3

    def stacked(*shape: int, split: tuple[str | None, ...] = ()) -> AbstractParam:
        return AbstractParam((layers, *shape), jnp.dtype(jnp.float32), 1, (None, *split) if split else ())

    across, down = (None, "tensor"), ("tensor", None)
    blocks = {
        **{f"layers/{name}": stacked(width, width, split=across) for name in ("query", "key", "value")},
        "layers/out": stacked(width, width, split=down),
        "layers/gate": stacked(width, hidden, split=across),
        "layers/up": stacked(width, hidden, split=across),
        "layers/down": stacked(hidden, width, split=down),
        **{f"layers/norm_{n}": stacked(width) for n in (1, 2)},
    }
    in_blocks = layers * (4 * width**2 + 3 * width * hidden + 2 * width)
    tokens = round((num_parameters - in_blocks) / (2 * width) / 1024) * 1024
    assert tokens > 1024
    table = AbstractParam((tokens, width), jnp.dtype(jnp.float32), 0, down)
    return {**blocks, "embed": table, "head": table, "norm": AbstractParam((width,), jnp.dtype(jnp.float32))}


@cache
def bytes_per_device(num_parameters: float, stage: int, data: int, tensor: int = 1) -> tuple[int, int]:
    """Bytes of all trees together and the true number of parameters."""
    width, layers = SHAPES.get(num_parameters) or next(
        (width, round(0.9 * num_parameters / (12 * width**2)))
        for width in (1536, 3072, 6144, 12288, 24576, 49152)
        if num_parameters / (12 * width**2) < 150
    )
    plan = jzero.make_plan(
        llama(num_parameters, width, layers),
        {"replica": 1, "data": data, "tensor": tensor},
        ZeroConfig(stage=stage),
        PrecisionConfig(preset="bf16"),
        optax.adamw(1e-3),
    )
    assert plan.num_parameters == pytest.approx(num_parameters, rel=0.003)
    return sum(plan.bytes_per_device().values()), plan.num_parameters


def last_digit(printed: str) -> float:
    return 10.0 ** -len(printed.partition(".")[2])


# devices: stages 1, 2 and 3 of 7.5B, of 128B, of 1T; on one device all are the same
TABLE_1 = {
    4: ("52.5 41.3 30", "896 704 512", "7000 5500 4000"),
    16: ("35.6 21.6 7.5", "608 368 128", "4750 2875 1000"),
    64: ("31.4 16.6 1.88", "536 284 32", "4187 2218 250"),
    256: ("30.4 15.4 .47", "518 263 8", "4046 2054 62.5"),
    1024: ("30.1 15.1 .12", "513 257 2", "4011 2013 15.6"),
}


@pytest.mark.parametrize("devices", TABLE_1)
@pytest.mark.parametrize("size", SHAPES, ids=["7.5B", "128B", "1T"])
def test_table_1_bytes_of_each_stage(size, devices):
    column = list(SHAPES).index(size)
    for stage, printed in enumerate(TABLE_1[devices][column].split(), 1):
        found, parameters = bytes_per_device(size, stage, devices)
        # The table cuts digits off or rounds them.
        assert found / 1e9 * size / parameters == pytest.approx(float(printed), abs=last_digit(printed)), stage


@pytest.mark.parametrize("size", SHAPES, ids=["7.5B", "128B", "1T"])
def test_on_one_device_every_stage_takes_16_bytes_a_parameter(size):
    totals = {bytes_per_device(size, stage, 1)[0] for stage in (0, 1, 2, 3)}
    assert totals == {16 * bytes_per_device(size, 0, 1)[1] + 4}  # and a counter of steps
    assert totals.pop() / 1e9 == pytest.approx({7.5e9: 120, 128e9: 2048, 1e12: 16000}[size], rel=0.003)


# Devices of 32 GB, 64 data-parallel ones, each a model-parallel group of so many: the largest model in billions at
# stages 0 to 3.
TABLE_2 = {
    1: "2 7.6 14.4 128",
    2: "4 15.2 28.8 256",
    4: "8 30.4 57.6 500",
    8: "16 60.8 115.2 1000",
    16: "32 121.6 230.4 2000",
}


@pytest.mark.parametrize("tensor", TABLE_2)
def test_table_2_largest_model_of_each_stage(tensor):
    for stage, printed in enumerate(TABLE_2[tensor].split()):
        size = float(printed) * 1e9
        found, parameters = bytes_per_device(size, stage, 64, tensor)
        largest = 32 * parameters / found
        # It multiplies the rounded figures of the first line by the group, and rounds .512T and the like.
        tolerance = 0.025 * largest if float(printed) >= 500 else last_digit(printed) * tensor
        assert largest == pytest.approx(float(printed), abs=tolerance), stage


# Bandwidth. bytes a parameter on the wire: times the parameters for efficiencies of 50, 75 and 90 %
@pytest.mark.parametrize(
    ("wire", "times"),
    [
        (6, (6, 18, 54)),  # 16-bit weights gathered twice, 16-bit gradients reduced
        (8, (8, 24, 72)),  # float32 gradients
        (12, (12, 36, 108)),  # all in float32
        (4, (4, 12, 36)),  # stages 1 and 2, or weights kept
        (1.5, (1.5, 4.5, 13.5)),  # ZeRO++
    ],
)
def test_bandwidth_for_an_efficiency_without_overlap(wire, times):
    parameters, devices, seconds = 7.5e9, 64, 0.7
    sent = wire * parameters * (devices - 1) / devices
    for efficiency, factor in zip((0.5, 0.75, 0.9), times, strict=True):
        needed = bandwidth_needed(sent, seconds, efficiency)
        assert needed == pytest.approx(factor * parameters * (devices - 1) / (devices * seconds))


def test_bandwidth_under_overlap():
    """2048 tokens a micro-step at 400 TFLOP/s: 586 GB/s for 75 %, and where all is hidden 195, whatever the model."""
    for parameters in (1e9, 70e9):
        seconds, sent = 6 * parameters * 2048 / 400e12, 6 * parameters
        assert bandwidth_needed(sent, seconds, 0.75) == pytest.approx(586e9, rel=1e-3)
        assert bandwidth_needed(sent, seconds, 0.75, overlap=1.0) == pytest.approx(195.3e9, rel=1e-3)
        half = bandwidth_needed(sent, seconds, 0.75, overlap=0.5)
        assert half == pytest.approx(586e9 / 2, rel=1e-3)
        # What it takes, it takes: the exposed part of the time is a third of the compute.
        assert 0.5 * sent / half == pytest.approx(seconds / 3)
