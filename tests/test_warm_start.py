"""A new run from another's weights: any stage, optimizer and precision; what differs is refused unless it is named."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from flax import nnx

import jzero
from jzero.errors import CheckpointError, ConfigError

ROWS = 24


class Normed(nnx.Module):
    """A perceptron with BatchNorm and dropout, whose head has `out` outputs."""

    def __init__(self, rngs: nnx.Rngs, out: int = 5, head: str = "head"):
        self.up = nnx.Linear(7, 35, rngs=rngs)
        self.norm = nnx.BatchNorm(35, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        setattr(self, head, nnx.Linear(35, out, rngs=rngs))
        self.head_name = head

    def __call__(self, x: jax.Array) -> jax.Array:
        return getattr(self, self.head_name)(self.drop(nnx.tanh(self.norm(self.up(x)))))


def loss(model: Normed, batch: Any) -> jax.Array:
    y = model(batch["x"])
    return jnp.mean(jnp.square(y - jnp.tile(batch["y"], 2)[:, : y.shape[1]]))


def start(stage: int, devices: int, optimizer: Any, model: Any = Normed, **config: Any) -> jzero.Engine:
    config = {"zero": {"stage": stage, "min_shard_elements": 0}} | config
    return jzero.initialize(lambda rngs: model(rngs), loss, optimizer, config, jax.devices()[:devices])


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Any, jzero.Engine]:
    directory = tmp_path_factory.mktemp("saved")
    engine = start(3, 8, optax.adam(0.1), train={"ema_decay": 0.5})
    for step in range(3):
        engine.step(toys.square_batch(ROWS, step))
    engine.save(directory)
    return directory, engine


@pytest.mark.parametrize("averaged", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("stage", "devices", "config"),
    [(1, 3, {}), (0, 1, {"train": {"seed": 4, "frozen": ["up/*"], "ema_decay": 0.9}})],
)
def test_weights_and_statistics_come_the_rest_starts_anew(saved, averaged, stage, devices, config):
    directory, before = saved
    engine = start(stage, devices, optax.sgd(0.1, momentum=0.9), **config)
    fresh = {name: np.array(array) for name, array in engine.arrays().items() if array.dtype != jax.random.key(0).dtype}
    taken = engine.load_weights(directory, averaged=averaged)
    assert (taken.step, taken.kept, taken.converted) == (3, [], {})
    for path, value in before.params(averaged=averaged).items():
        np.testing.assert_array_equal(engine.params()[path], value)
        assert not np.array_equal(fresh[f"params/{path}"], engine.arrays()[f"params/{path}"])
    for path in engine.state.ema:
        np.testing.assert_array_equal(engine.params(averaged=True)[path], engine.params()[path])
    statistics = before.state.model_state["norm/mean"]
    assert np.abs(np.array(statistics)).max() > 0
    np.testing.assert_array_equal(engine.state.model_state["norm/mean"], statistics)
    for name in ("step", "skipped", "opt_state/0/trace/head/kernel"):
        np.testing.assert_array_equal(engine.arrays()[name], fresh[name])
    engine.step(toys.square_batch(ROWS, 9))


def test_the_widest_copy_is_taken_and_a_narrower_one_said(tmp_path):
    begun = jzero.initialize(toys.scanned_decoder, toys.token_loss, optax.adam(0.1), {"precision": "bf16"})
    begun.step(toys.token_batch(ROWS, 0))
    begun.save(tmp_path)
    wide = jzero.initialize(toys.scanned_decoder, toys.token_loss, optax.sgd(0.1), {"train": {"seed": 2}})
    assert wide.load_weights(tmp_path).converted == {}
    for path, value in begun.params().items():
        np.testing.assert_array_equal(wide.params()[path], value)
    precision = {"params": "bfloat16", "master": "bfloat16"}
    narrow = jzero.initialize(
        toys.scanned_decoder, toys.token_loss, optax.sgd(0.1),
        {"precision": precision | {"stochastic_rounding": True}, "train": {"seed": 2}},
    )  # fmt: skip
    converted = narrow.load_weights(tmp_path).converted
    assert converted == dict.fromkeys(begun.plan.params, ("float32", "bfloat16"))
    for path, value in begun.params().items():
        np.testing.assert_array_equal(narrow.params()[path], value.astype(jnp.bfloat16))


def test_what_differs_is_refused_and_may_be_left_out(saved):
    directory, before = saved
    engine = start(2, 8, optax.sgd(0.1), lambda rngs: Normed(rngs, out=9))
    fresh = engine.params()
    with pytest.raises(CheckpointError, match=r"head/kernel: \(35, 5\) in the checkpoint, \(35, 9\) here") as caught:
        engine.load_weights(directory)
    assert "2 of another shape" in str(caught.value)
    assert engine.load_weights(directory, skip=["head/*"]).kept == ["head/bias", "head/kernel"]
    np.testing.assert_array_equal(engine.params()["head/kernel"], fresh["head/kernel"])
    np.testing.assert_array_equal(engine.params()["up/kernel"], before.params()["up/kernel"])
    engine.step(toys.square_batch(ROWS, 0))

    renamed = start(3, 3, optax.sgd(0.1), lambda rngs: Normed(rngs, head="top"))
    with pytest.raises(CheckpointError) as caught:
        renamed.load_weights(directory)
    assert "missing in the checkpoint:\n    top/bias\n    top/kernel" in str(caught.value)
    assert "only in the checkpoint:\n    head/bias\n    head/kernel" in str(caught.value)
    assert renamed.load_weights(directory, skip=["top/*", "head/*"]).kept == ["top/bias", "top/kernel"]
    with pytest.raises(ConfigError, match=r"skip names 'tops/\*', which matches no parameter.*top/bias"):
        renamed.load_weights(directory, skip=["tops/*"])


def test_an_average_that_is_not_there_is_refused(tmp_path):
    engine = start(3, 8, optax.sgd(0.1))
    engine.save(tmp_path)
    with pytest.raises(CheckpointError, match="holds no moving average"):
        engine.load_weights(tmp_path, averaged=True)
