"""Each dtype where the config puts it: float16's loss scale, bytes of every preset, rounding, what stays float32."""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import toys
from flax import nnx
from optax import contrib

import jzero
from jzero.blueprint import prepare
from jzero.config import LossScaleConfig, PrecisionConfig, make_config
from jzero.errors import ConfigError
from jzero.loss_scale import init_loss_scale, update_loss_scale
from jzero.rounding import round_stochastically

ROWS = 72
README = (Path(__file__).parent.parent / "README.md").read_text()


def start(
    model: Any, loss: Any, optimizer: Any, stage: int = 3, devices: int = 8, micro_batches: int = 1, /, **config: Any
) -> jzero.Engine:
    train = {"global_batch_size": ROWS, "accumulation_steps": micro_batches} | config.pop("train", {})
    optimizer_config = {"clip_norm": None} | config.pop("optimizer", {})
    zero = {"stage": stage, "min_shard_elements": 0}
    return jzero.initialize(
        model, loss, optimizer, {"zero": zero, "train": train, "optimizer": optimizer_config} | config,
        jax.devices()[:devices],
    )  # fmt: skip


# float16 and its loss scale.


@pytest.mark.parametrize(
    ("fields", "overflows", "scales"),
    [
        ({"window": 4}, {2, 3, 9}, [65536] * 3 + [32768] * 5 + [65536] * 6 + [131072] * 2),
        (
            {"window": 4, "consecutive_hysteresis": True},
            {2, 4, 5},
            [65536] * 5 + [32768] * 5 + [65536] * 4 + [131072] * 2,
        ),
        ({"window": 4, "hysteresis": 1}, {1, 2}, [65536, 32768] + [16384] * 5 + [32768] * 4 + [65536]),
        ({"window": 3}, set(), [65536] * 3 + [131072] * 3 + [262144] * 3 + [524288] * 3),
        ({"window": 4, "hysteresis": 1, "initial": 4}, {0, 1, 2}, [2, 1, "exhausted"]),
        ({"dynamic": False, "initial": 128}, {1, 2, 3}, [128] * 8),
    ],
    ids=["overflows", "consecutive", "no hysteresis", "none", "floor", "static"],
)
def test_loss_scale_follows_deepspeeds_traces(fields, overflows, scales):
    """Golden traces of DeepSpeed 0.19.6's DynamicLossScaler: the scale after each step."""
    config = LossScaleConfig(**fields)
    update = jax.jit(lambda state, overflow: update_loss_scale(config, state, overflow))
    state, seen = init_loss_scale(config), []
    for step in range(len(scales)):
        state, exhausted = update(state, step in overflows)
        seen.append("exhausted" if exhausted else float(state["scale"]))
    assert seen == scales


class Slope(nnx.Module):
    """y = w x, with as little else as may be; in float16 its gradient, x, is rounded and overflows at 65504."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.ones((3, 16)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x.astype(self.w.dtype) * self.w).astype(jnp.float32).sum((1, 2))


def slope_loss(model: Slope, batch: jax.Array) -> jax.Array:
    return jnp.mean(model(batch))


def slopes(value: float) -> np.ndarray:
    return np.full((ROWS, 3, 16), value, np.float32)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("stage", "devices"), [(0, 1), (1, 8), (3, 3)])
def test_overflowing_steps_follow_the_trace_and_change_nothing_else(stage, devices, micro_batches):
    """Steps 0, 1 and 4 overflow at whatever scale: halved after the first two, doubled after two good ones."""
    engine = start(
        lambda rngs: Slope(rngs), slope_loss, None, stage, devices, micro_batches,
        precision="fp16",
        loss_scale={"initial": 1024, "window": 2, "hysteresis": 2},
        train={"ema_decay": 0.5},
        optimizer={"schedule": "linear", "learning_rate": 1e-3, "warmup_steps": 2, "weight_decay": 0.1},
    )  # fmt: skip
    seen = []
    for value in (3e38, 3e38, 0.5, 0.5, 3e38, 0.5):
        before = {name: np.array(array) for name, array in engine.arrays().items()}
        metrics = engine.step(slopes(value))
        seen.append((float(metrics["loss_scale"]), float(metrics["learning_rate"])))
        if value > 1:
            assert not np.isfinite(metrics["grad_norm"])
            for name, array in engine.arrays().items():
                if name.partition("/")[0] not in ("step", "skipped", "skipped_in_a_row", "loss_scale"):
                    np.testing.assert_array_equal(array, before[name], err_msg=name)
        else:
            assert float(metrics["grad_norm"]) == pytest.approx(0.5 * np.sqrt(48), rel=5e-3)
            changed = {n for n, array in engine.arrays().items() if not np.array_equal(array, before[n])}
            assert {"opt_state/0/mu/w", "opt_state/0/nu/w", "opt_state/0/count"} <= changed
            if metrics["learning_rate"] > 0:
                assert {"master/w", "ema/w"} <= changed
    scales, rates = zip(*seen, strict=True)
    assert scales == (1024, 1024, 512, 512, 512, 256)
    assert rates == pytest.approx([0, 0, 0, 5e-4, 1e-3, 1e-3], rel=1e-6)
    assert float(engine.state.loss_scale["scale"]) == 256
    assert int(engine.state.skipped) == 3


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_static_scale_changes_neither_norm_nor_clipping_nor_update(micro_batches):
    """The gradient is 1e-6 and clipped to a norm of 1e-9: a scaled one would be clipped a thousand times more."""
    moved = {}
    for scale in (4096.0, 65536.0):
        engine = start(
            lambda rngs: Slope(rngs), slope_loss, optax.sgd(1e3), 3, 8, micro_batches,
            precision="fp16",
            loss_scale={"dynamic": False, "initial": scale},
            optimizer={"clip_norm": 1e-9},
        )  # fmt: skip
        metrics = engine.step(slopes(1e-3) * np.float32(1e-3))
        moved[scale] = (float(metrics["grad_norm"]), 1 - engine.params()["w"].mean())
    norm = 1e-6 * np.sqrt(48)
    assert moved[4096.0] == pytest.approx((norm, 1e-6 / np.sqrt(48)), rel=1e-2, abs=1e-7)
    assert moved[65536.0] == pytest.approx(moved[4096.0], rel=1e-2, abs=1e-7)


def test_small_gradients_vanish_in_float16_unless_scaled():
    """The gradient of the mean loss by a row's output is 2e-11; float16's smallest number is 6e-8."""

    def loss(model: Slope, batch: jax.Array) -> jax.Array:
        return jnp.mean(model(batch) * 1e-7 / ROWS)

    norms = {}
    for scale in (1.0, 65536.0):
        engine = start(
            lambda rngs: Slope(rngs), loss, optax.sgd(0.0), precision="fp16",
            loss_scale={"dynamic": False, "initial": scale},
        )  # fmt: skip
        norms[scale] = float(engine.step(slopes(0.25))["grad_norm"])
    assert norms[1.0] == 0
    assert norms[65536.0] == pytest.approx(0.25e-7 / ROWS * np.sqrt(48), rel=0.1)


def test_the_loss_scale_goes_on_from_a_checkpoint(tmp_path):
    fields = {"precision": "fp16", "loss_scale": {"initial": 1024, "window": 3, "hysteresis": 1}}
    begun = start(lambda rngs: Slope(rngs), slope_loss, optax.sgd(0.1), 3, 8, **fields)
    for value in (3e38, 0.5):
        begun.step(slopes(value))
    begun.save(tmp_path)
    engine = start(lambda rngs: Slope(rngs), slope_loss, optax.sgd(0.1), 1, 3, **fields)
    engine.restore(tmp_path)
    scales = [float(engine.step(slopes(0.5))["loss_scale"]) for _ in range(4)]
    assert scales == [512, 512, 512, 1024]


# Bytes.

PSI = 2 * 256 * 512


class Matrices(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.a = nnx.Param(jnp.ones((256, 512)))
        self.b = nnx.Param(jnp.ones((512, 256)))


MOMENTS = {"moments": "bfloat16"}
NO_MASTER = {"preset": "bf16", "master": None, "stochastic_rounding": True}
SCALES = 2 * 4 / 256  # of 8-bit Adam's blocks
# Of semantics 3.1: parameters, gradients, optimizer, in bytes a parameter.
ROWS_OF_BYTES = {
    "| `fp32` | adamw |": ("fp32", "adamw", 1, (4, 4, 8)),
    "| `bf16`, `fp16` | adamw |": ("bf16", "adamw", 1, (2, 2, 12)),
    "float16": ("fp16", "adamw", 1, (2, 2, 12)),
    "| `bf16`, several micro-batches | adamw |": ("bf16", "adamw", 3, (2, 4, 12)),
    "| `{compute: bfloat16}`: float32 parameters, gathered in bfloat16 | adamw |": (
        {"compute": "bfloat16"}, "adamw", 1, (4, 4, 8),
    ),
    "| `{preset: bf16, moments: bfloat16}` | adamw |": (
        {"preset": "bf16", "moments": "bfloat16"}, "adamw", 1, (2, 2, 8),
    ),
    "| `{preset: bf16, master: null, stochastic_rounding: true}` | adamw |": (NO_MASTER, "adamw", 1, (2, 2, 4)),
    "a master as narrow as the parameters is no copy": (
        NO_MASTER | {"master": "bfloat16", "moments": "bfloat16"}, "adamw", 1, (2, 2, 4),
    ),
    "| `bf16` | lion, sgd |": ("bf16", "lion", 1, (2, 2, 8)),
    "momentum": ("bf16", "sgd", 1, (2, 2, 8)),
    "| `bf16` | adamw8bit |": ("bf16", "adamw8bit", 1, (2, 2, 4 + 2 + SCALES)),
    "| `{preset: bf16, master: null, stochastic_rounding: true}` | adamw8bit |": (
        NO_MASTER, "adamw8bit", 1, (2, 2, 2 + SCALES),
    ),
}  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("row", ROWS_OF_BYTES)
def test_bytes_of_each_precision_are_the_tables(row, stage):
    """Planned, for eight devices; the state's are those of the arrays' own shards. README has the rows."""
    precision, optimizer, micro_batches, (params, gradients, state) = ROWS_OF_BYTES[row]
    loss = lambda model, batch: (model.a.sum() + model.b.sum()).astype(jnp.float32) * batch.sum()
    engine = start(
        lambda rngs: Matrices(rngs), loss, None, stage, 8, micro_batches,
        precision=precision,
        optimizer={"name": optimizer},
    )  # fmt: skip
    ways = [8 if stage >= from_stage else 1 for from_stage in (3, 2, 1)]
    wanted = [int(bytes_each * PSI) // way for bytes_each, way in zip((params, gradients, state), ways, strict=True)]
    held = toys.bytes_a_device
    scalars = sum(array.nbytes for array in jax.tree.leaves(engine.state.opt_state) if array.ndim == 0)
    assert list(engine.plan.bytes_per_device().values()) == [*wanted[:2], wanted[2] + scalars]
    assert held(engine.state.params) == wanted[0]
    assert held((engine.state.master, engine.state.opt_state)) == wanted[2] + scalars
    if row.startswith("|"):
        assert f"{row} {params} + {gradients} + {round(float(state), 2):g} |" in README


# Rounding.


def test_stochastic_rounding_is_right_on_the_mean_and_exact_where_it_can_be():
    exact = jnp.array([0.0, -0.0, 1.0, -1.5, 2.0**-130, 3.3895314e38, jnp.inf, -jnp.inf, jnp.nan])
    bits = jnp.full(exact.shape, 0xFFFF, jnp.uint16)
    np.testing.assert_array_equal(round_stochastically(exact, bits).astype(jnp.float32), exact)
    for value in (1 + 2**-9, -0.3, 1e-20):
        x = jnp.full(40_000, value, jnp.float32)
        rounded = round_stochastically(x, jax.random.bits(jax.random.key(0), x.shape, jnp.uint16)).astype(jnp.float32)
        near = sorted(set(np.unique(rounded)))
        assert len(near) == 2
        assert near[0] < value < near[1]
        assert float(rounded.mean()) == pytest.approx(value, abs=4 * float(near[1] - near[0]) / 400)


class Ones(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.ones((37, 41)))


def sum_of_weights(model: Ones, batch: Any) -> jzero.WeightedLoss:
    return jzero.WeightedLoss(model.w[...].astype(jnp.float32).sum(), jnp.float32(1))


def test_without_a_master_stochastic_rounding_keeps_small_updates_on_any_devices():
    """A hundred steps of 1e-3 from 1.0: to nearest nothing would move. The same bits on any device count."""
    precision = {"preset": "bf16", "master": None, "stochastic_rounding": True}
    weights = {}
    for stage, devices in ((0, 1), (3, 8), (1, 3)):
        engine = start(lambda rngs: Ones(rngs), sum_of_weights, optax.sgd(1e-3), stage, devices, precision=precision)
        for _ in range(100):
            engine.step(np.zeros(ROWS, np.float32))
        weights[stage, devices] = engine.params()["w"].astype(np.float32)
    assert engine.plan.params["w"].padded
    assert weights[0, 1].mean() == pytest.approx(0.9, abs=2e-3)
    assert len(np.unique(weights[0, 1])) > 5
    for other in weights.values():
        np.testing.assert_array_equal(other, weights[0, 1])


@pytest.mark.filterwarnings("ignore:precision.master = null")
@pytest.mark.parametrize("precision", [{"moments": "bfloat16"}, {"params": "bfloat16", "master": None}], ids=str)
def test_moments_at_rest_in_bfloat16_are_computed_in_float32_and_fall(precision):
    """Adam's second moment falls by a thousandth a step, which rounding to nearest would undo each time."""
    loss = lambda model, batch: sum_of_weights(model, batch).total * jnp.mean(batch)
    engine = start(lambda rngs: Ones(rngs), loss, optax.adam(0.0), precision=precision)
    mean = lambda: float(engine.state.opt_state[0].nu["w"][:37].astype(jnp.float32).mean())
    engine.step(np.ones(ROWS, np.float32))
    first = mean()
    for _ in range(100):
        engine.step(np.zeros(ROWS, np.float32))
    assert engine.state.opt_state[0].nu["w"].dtype == jnp.bfloat16
    assert mean() / first == pytest.approx(0.999**100, rel=0.02)


# What stays float32.


@pytest.mark.parametrize(
    ("precision", "stage", "devices"),
    [
        ("bf16", 3, 3),
        ("fp16", 1, 8),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("bf16", 0, 1), ("bf16", 1, 8), ("fp16", 0, 1), ("fp16", 3, 3))
        ),
    ],
)
def test_patterns_keep_parameters_float32_at_rest_and_in_the_model(precision, stage, devices):
    seen = {}

    def loss(model: toys.Decoder, batch: Any) -> Any:
        seen["norm"], seen["embedding"] = model.norm.scale.dtype, model.embedding.dtype
        return toys.token_loss(model, batch)

    fields = {"preset": precision, "keep_float32": ["norm/*", "blocks/norm_*"]}
    engine = start(toys.scanned_decoder, loss, optax.adam(1e-3), stage, devices, 3, precision=fields)
    engine.step(toys.token_batch(ROWS, 0))
    half = PrecisionConfig(preset=precision).params
    assert (seen["norm"], seen["embedding"]) == (jnp.float32, jnp.dtype(half))
    kept = {path for path, x in engine.state.params.items() if x.dtype == jnp.float32}
    assert kept == {"norm/scale", "blocks/norm_1/scale", "blocks/norm_2/scale"}
    assert engine.state.master.keys() == engine.state.params.keys() - kept
    assert {x.dtype for x in engine.params().values()} == {np.dtype("float32")}


# Against one device.


NARROW = {
    "fp16": ({"precision": "fp16", "loss_scale": {"initial": 1024}}, 3e-3),
    "bf16 moments": ({"precision": {"preset": "bf16", "moments": "bfloat16"}}, 2e-2),
}


@cache
def narrow_losses(name: str, stage: int, devices: int, micro_batches: int) -> np.ndarray:
    train, (config, _) = {"global_batch_size": 96}, NARROW[name]
    engine = start(
        toys.scanned_decoder, toys.token_loss, optax.adam(4e-3), stage, devices, micro_batches, train=train, **config
    )
    losses = [float(engine.step(toys.token_batch(96, step))["loss"]) for step in range(10)]
    assert int(engine.state.skipped) == 0
    return np.array(losses)


@pytest.mark.parametrize(
    ("name", "stage", "devices", "micro_batches"),
    [
        ("fp16", 3, 8, 4),
        *(
            pytest.param(name, *place, marks=pytest.mark.slow)
            for name in NARROW
            for place in ((1, 8, 1), (2, 3, 4), (3, 8, 4))
            if (name, *place) != ("fp16", 3, 8, 4)
        ),
    ],
)
def test_narrow_precisions_train_as_on_one_device(name, stage, devices, micro_batches):
    expected = narrow_losses(name, 0, 1, micro_batches)
    assert expected[-1] < expected[0] - 0.1
    np.testing.assert_allclose(narrow_losses(name, stage, devices, micro_batches), expected, rtol=NARROW[name][1])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"loss_scale": {"window": 5}}, r"loss_scale\.window = 5: only float16 needs a loss scale.*float32.*fp16"),
        ({"precision": "fp16", "loss_scale": {"minimum": 2, "initial": 1}}, r"minimum = 2.*initial = 1"),
        (
            {"precision": "fp16", "loss_scale": {"dynamic": False, "window": 5}},
            r"loss_scale\.window = 5: not read by loss_scale\.dynamic = false",
        ),
        ({"precision": {"accumulate": "float16"}}, r"precision\.accumulate = \"float16\": must be"),
        ({"precision": {"stochastic_rounding": True}}, r"the weights that the optimizer updates are float32"),
        ({"precision": {"preset": "bf16", "master": "float16"}}, r"master = float16: holds no more than.*bfloat16"),
    ],
)
def test_precisions_that_make_no_sense_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        make_config(config)


def test_numbers_of_the_optimizer_stay_float32_beside_narrow_weights():
    """Prodigy's estimate of the rate and its sums, kept in bfloat16, would stand still after some steps."""
    loss = lambda model, batch: model.a.sum().astype(jnp.float32) * batch.sum()
    engine = start(lambda rngs: Matrices(rngs), loss, contrib.prodigy(), precision=NO_MASTER)
    dtypes = {(array.ndim > 0, str(array.dtype)) for array in jax.tree.leaves(engine.state.opt_state)}
    assert dtypes == {(True, "bfloat16"), (False, "float32"), (False, "int32")}


SCHEDULE_FREE = optax.contrib.schedule_free_sgd(0.1)


@pytest.mark.parametrize(
    ("optimizer", "config", "message"),
    [
        (None, {"precision": MOMENTS, "optimizer": {"name": "adamw8bit"}}, r"moments = bfloat16: .*rest in 8 bits"),
        (SCHEDULE_FREE, {"precision": MOMENTS}, r"moments = bfloat16: .*state holds the weights themselves"),
        (optax.sgd(0.1), {"precision": MOMENTS}, r"moments = bfloat16: this optimizer keeps no arrays"),
        (SCHEDULE_FREE, {"train": {"ema_decay": 0.9}}, r"ema_decay = 0\.9: .*keeps an average of its own"),
        (SCHEDULE_FREE, {"precision": NO_MASTER}, r"precision\.master = null: .*which bfloat16 is too coarse for"),
    ],
)
def test_what_an_optimizers_state_cannot_bear_is_refused(optimizer, config, message):
    with pytest.raises(ConfigError, match=message):
        start(lambda rngs: Ones(rngs), sum_of_weights, optimizer, **config)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_of_float16_parameters_are_scaled_whatever_computes(micro_batches):
    """Of a total over half a million tokens they would overflow."""
    loss = lambda model, batch: jzero.WeightedLoss(model(batch).sum() * 1e4, jnp.float32(len(batch) * 1e4))
    engine = start(lambda rngs: Slope(rngs), loss, optax.sgd(0.0), 3, 8, micro_batches, precision={"params": "float16"})
    metrics = engine.step(slopes(0.5))
    assert (int(metrics["skipped"]), float(metrics["loss_scale"])) == (0, 65536)
    assert float(metrics["grad_norm"]) == pytest.approx(0.5 * np.sqrt(48), rel=5e-3)


def test_kept_gradients_are_summed_in_float32():
    fields = {"preset": "bf16", "accumulate": "bfloat16", "keep_float32": ["norm/*"]}
    config = {"precision": fields, "train": {"global_batch_size": ROWS, "accumulation_steps": 3}}
    made = prepare(toys.scanned_decoder, toys.token_loss, optax.sgd(0.1), config)
    grad_fn = made.grad_fn("xla", 3)
    state = made.abstract_state()
    _, summed, *_ = jax.eval_shape(grad_fn, state.params, state.model_state, toys.token_batch(ROWS, 0), 0, None)
    kept = {path for path, gradient in summed.items() if gradient.dtype == jnp.float32}
    assert kept == {"norm/scale"} == {path for path, leaf in made.plan.gradients.items() if leaf.dtype == jnp.float32}


def test_a_pattern_that_keeps_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"precision\.keep_float32 names 'norms/\*'.*norm/scale"):
        start(toys.scanned_decoder, toys.token_loss, None, precision={"preset": "bf16", "keep_float32": ["norms/*"]})
