"""Where a device's memory does not hold a step, the message says whose bytes lie there and what takes fewer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import mlp, square_batch, square_loss

import jzero
from jzero.errors import OutOfMemoryError

CONFIG = {"zero": {"stage": 1, "min_shard_elements": 32}}


def vast(model, batch):
    """A loss that sorts 2**44 numbers of each row."""
    rows = jnp.mean(model(batch["x"]), axis=1)
    return jnp.mean(jnp.sort(jnp.broadcast_to(rows[:, None, None], (len(rows), 2**22, 2**22)), axis=1)[:, 0, 0])


def test_a_step_that_finds_no_memory_tells_whose_bytes_lie_there_and_what_takes_fewer():
    engine = jzero.initialize(mlp, vast, optax.adam(1e-3), CONFIG)
    with pytest.raises(OutOfMemoryError, match="RESOURCE_EXHAUSTED: Out of memory allocating") as raised:
        engine.step(square_batch(8, 0))
    told = str(raised.value)
    assert isinstance(raised.value, MemoryError)
    assert raised.value.exit_code == 2
    assert "up/kernel 1.12 kB" in told  # whole at stage 1: 7 x 35 float32, padded to 40
    optimizer = engine.plan.bytes_per_device()["optimizer"]
    assert f"optimizer   {optimizer:>8} B" in told
    for fix in ("zero.stage: 2", "train.accumulation_steps: 2", "precision: bf16"):
        assert fix in told


def test_so_does_one_that_does_not_compile(monkeypatch):
    engine = jzero.initialize(mlp, square_loss, optax.adam(1e-3), {"zero": {"stage": 3}})

    def refuse(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.\nUsed 21G of 15G")

    monkeypatch.setattr("jax.stages.Lowered.compile", refuse)
    with pytest.raises(OutOfMemoryError, match=r"memory space hbm\.\)\n") as raised:
        engine.step(square_batch(8, 0))
    assert "zero.stage" not in str(raised.value)  # there is no higher one


def test_other_faults_of_xla_stay_as_they_are(monkeypatch):
    engine = jzero.initialize(mlp, square_loss, optax.adam(1e-3), CONFIG)

    def refuse(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")

    monkeypatch.setattr("jax.stages.Lowered.compile", refuse)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RET_CHECK"):
        engine.step(square_batch(8, 0))
    monkeypatch.undo()
    assert np.isfinite(engine.step(square_batch(8, 0))["loss"])
