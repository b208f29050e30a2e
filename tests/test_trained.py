"""Which parameters train and which averages are kept: frozen ones by pattern, the moving average of the weights."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from flax import nnx

import jzero
from jzero.blueprint import prepare
from jzero.errors import ConfigError

ROWS = 48
PLACES = [(0, 1), (1, 8), (3, 3)]
places = pytest.mark.parametrize(("stage", "devices"), PLACES)
FROZEN = ["up/*"]


def square_loss(model: Any, batch: Any) -> jax.Array:
    """In the parameters' dtype, which a float32 batch would widen."""
    y = model(batch["x"].astype(model.up.kernel.dtype)).astype(jnp.float32)
    return jnp.mean(jnp.square(y - batch["y"]))


def start(stage: int = 3, devices: int = 8, train: Any = None, /, **config: Any) -> jzero.Engine:
    """The small perceptron under Adam, every array split that can be."""
    config = {"zero": {"stage": stage, "min_shard_elements": 0}, "train": train or {}} | config
    return jzero.initialize(toys.mlp, square_loss, optax.adam(0.01), config, jax.devices()[:devices])


def train(engine: jzero.Engine, first: int, last: int) -> list[float]:
    return [float(engine.step(toys.square_batch(ROWS, step))["loss"]) for step in range(first, last)]


# Frozen parameters.


@places
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_parameters_stay_bit_by_bit_and_have_no_other_state(stage, devices, precision):
    engine = start(stage, devices, {"frozen": FROZEN, "ema_decay": 0.9, "accumulation_steps": 2}, precision=precision)
    names = [name for name in engine.arrays() if "up/" in name]
    assert names == ["params/up/bias", "params/up/kernel"]
    assert list(engine.plan.gradients) == list(engine.plan.weights) == ["down/bias", "down/kernel"]
    before = engine.params()
    train(engine, 0, 3)
    after = engine.params()
    assert {path: np.array_equal(after[path], before[path]) for path in before} == {
        "down/bias": False, "down/kernel": False, "up/bias": True, "up/kernel": True,
    }  # fmt: skip
    assert engine.plan.bytes_per_device()["parameters"] == toys.bytes_a_device(engine.state.params)
    state = (engine.state.master, engine.state.opt_state)
    assert engine.plan.bytes_per_device()["optimizer"] == toys.bytes_a_device(state)


@places
def test_the_others_train_as_if_the_frozen_ones_were_constants(stage, devices):
    def loss(trained: Any, frozen: Any, batch: Any) -> jax.Array:
        hidden = jnp.tanh(batch["x"] @ frozen["up/kernel"] + frozen["up/bias"])
        return jnp.mean(jnp.square(hidden @ trained["down/kernel"] + trained["down/bias"] - batch["y"]))

    engine = start(stage, devices, {"frozen": FROZEN}, optimizer={"clip_norm": None})
    given = engine.params()
    frozen = {path: value for path, value in given.items() if path.startswith("up/")}
    weights = {path: value for path, value in given.items() if path not in frozen}
    tx = optax.adam(0.01)
    state, expected = tx.init(weights), []
    for step in range(10):
        batch = toys.square_batch(ROWS, step)
        value, gradients = jax.value_and_grad(loss)(weights, frozen, batch)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(gradients, state)
        weights = optax.apply_updates(weights, updates)
        expected.append(float(value))
    np.testing.assert_allclose(train(engine, 0, 10), expected, rtol=1e-5)
    for path, value in weights.items():
        np.testing.assert_allclose(engine.params()[path], value, rtol=1e-4, atol=1e-6)


class Adapted(nnx.Module):
    """A wide layer with adapters of rank 2 beside it."""

    def __init__(self, rngs: nnx.Rngs):
        self.base = nnx.Linear(256, 264, rngs=rngs)
        self.down = nnx.Linear(256, 2, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(2, 264, use_bias=False, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_frozen_base_costs_neither_gradients_nor_moments(stage):
    def prepared(*frozen: str) -> Any:
        config = {"zero": {"stage": stage}, "train": {"frozen": frozen}}
        loss = lambda model, batch: jnp.mean(jnp.square(model(batch)))
        return prepare(lambda rngs: Adapted(rngs), loss, optax.adam(1e-3), config, jax.devices())

    def base_gradients(made: Any) -> int:
        text = made.lower_step(jax.ShapeDtypeStruct((ROWS, 256), jnp.float32)).as_text()
        return len(re.findall(r"dot_general.* -> tensor<(?:256x264|264x256)xf32>", text))

    adapters, everything = prepared("base/*"), prepared()
    assert base_gradients(everything) == 1
    assert base_gradients(adapters) == 0
    sizes = adapters.plan.bytes_per_device()
    assert sizes["gradients"] == 4 * (2 * 256 + 2 * 264)
    assert sizes["optimizer"] == 2 * sizes["gradients"] + 4
    assert sizes["parameters"] == everything.plan.bytes_per_device()["parameters"]


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (["ups/*"], r"train\.frozen names 'ups/\*', which matches no parameter.*up/kernel"),
        (["up/*", "Down/*"], r"train\.frozen names 'Down/\*'.*down/kernel"),
        (["*"], r"train\.frozen = \['\*'\]: matches every parameter"),
    ],
)
def test_patterns_that_freeze_nothing_or_everything_are_refused(frozen, message):
    with pytest.raises(ConfigError, match=message):
        start(3, 8, {"frozen": frozen})


def test_frozen_parameters_come_back_from_a_checkpoint_of_another_seed(tmp_path):
    begun = start(3, 8, {"frozen": FROZEN, "seed": 1})
    train(begun, 0, 2)
    begun.save(tmp_path)
    engine = start(1, 3, {"frozen": FROZEN, "seed": 2})
    assert not np.array_equal(engine.params()["up/kernel"], begun.params()["up/kernel"])
    engine.restore(tmp_path)
    for path, value in begun.params().items():
        np.testing.assert_array_equal(engine.params()[path], value)
    np.testing.assert_allclose(train(engine, 2, 4), train(begun, 2, 4), rtol=1e-5)


# The moving average.

DECAY = 0.9


@pytest.mark.parametrize(
    ("stage", "devices", "precision"),
    [
        (0, 4, "fp32"),
        (3, 4, "bf16"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((0, 1, "bf16"), (3, 8, "fp32"), (1, 3, "bf16"))),
    ],
)
def test_the_average_follows_the_float32_weights(stage, devices, precision, tmp_path):
    """Against numpy, across a checkpoint; float32, split like the optimizer's state; evaluated on request only."""
    settings = {"ema_decay": DECAY, "frozen": ["down/bias"]}
    engine = start(stage, devices, settings, precision=precision)
    expected = {path: value.astype(np.float32) for path, value in engine.params().items() if path != "down/bias"}
    for step in range(6):
        if step == 3:
            engine.save(tmp_path)
            engine = start(stage, devices, settings | {"seed": 5}, precision=precision)
            engine.restore(tmp_path)
        train(engine, step, step + 1)
        weights = engine.params()
        expected = {path: DECAY * x + (1 - DECAY) * weights[path] for path, x in expected.items()}
    averaged = engine.params(averaged=True)
    for path, value in expected.items():
        np.testing.assert_allclose(averaged[path], value, rtol=1e-5, atol=1e-7)
        assert not np.allclose(averaged[path], weights[path], rtol=1e-3)
    np.testing.assert_array_equal(averaged["down/bias"], weights["down/bias"])
    for path, array in engine.state.ema.items():
        assert (array.dtype, array.sharding) == (jnp.float32, engine.state.opt_state[0].mu[path].sharding)
    assert engine.plan.bytes_per_device()["ema"] == toys.bytes_a_device(engine.state.ema)

    batch, before = toys.square_batch(ROWS, 99), {name: np.array(x) for name, x in engine.arrays().items()}
    read = lambda model: model.up.kernel[...].astype(jnp.float32)
    at_rest = averaged["up/kernel"].astype(engine.state.params["up/kernel"].dtype).astype(np.float32)
    np.testing.assert_array_equal(engine.apply(read, averaged=True), at_rest)
    np.testing.assert_array_equal(read(engine.model(averaged=True)), at_rest)
    assert float(engine.evaluate(batch, averaged=True)["loss"]) == pytest.approx(
        float(square_loss(engine.model(averaged=True), batch)), rel=1e-2 if precision == "bf16" else 1e-5
    )
    assert float(engine.evaluate(batch, averaged=True)["loss"]) != float(engine.evaluate(batch)["loss"])
    for name, array in engine.arrays().items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_average_starts_as_a_copy_in_memory_of_its_own(precision):
    """One buffer donated twice ends the process on eight devices."""
    engine = start(0, 8, {"ema_decay": DECAY}, precision=precision)
    arrays = [*engine.state.params.values(), *engine.state.master.values(), *engine.state.ema.values()]
    pointers = [s.data.unsafe_buffer_pointer() for array in arrays for s in array.addressable_shards]
    assert len(set(pointers)) == len(pointers)
    for path, value in engine.params().items():
        np.testing.assert_array_equal(engine.params(averaged=True)[path], value)
    train(engine, 0, 2)


def test_there_is_no_average_unless_one_is_kept():
    engine = start()
    assert engine.state.ema == {}
    for call in (
        engine.params,
        engine.model,
        lambda averaged: engine.evaluate(toys.square_batch(ROWS, 0), averaged=averaged),
    ):
        with pytest.raises(ConfigError, match=r"train\.ema_decay = null: keeps no averaged weights"):
            call(averaged=True)
