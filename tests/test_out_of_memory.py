"""Where a device's memory does not hold a step, the message says whose bytes lie there and what takes fewer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import mlp, square_batch, square_loss

import jzero
from jzero.blueprint import prepare
from jzero.config import ModelConfig, make_config, with_fields
from jzero.errors import OutOfMemoryError
from jzero.footprint import estimate_footprint
from jzero.models import build_model
from jzero.out_of_memory import explain
from jzero.trainer import language_model_loss

CONFIG = {"zero": {"stage": 1, "min_shard_elements": 32}}


def vast(model, batch):
    """A loss that adds up 2**42 numbers of each row, one after the other. (A sort of as many crashes XLA:CPU 0.12.)"""
    rows = jnp.mean(model(batch["x"]), axis=1)
    return jnp.mean(jnp.cumsum(jnp.broadcast_to(rows[:, None], (len(rows), 2**42)), axis=1)[:, -1])


def test_a_step_that_finds_no_memory_tells_whose_bytes_lie_there_and_what_takes_fewer():
    engine = jzero.initialize(mlp, vast, optax.adam(1e-3), CONFIG)
    with pytest.raises(OutOfMemoryError, match="RESOURCE_EXHAUSTED: Out of memory allocating") as raised:
        engine.step(square_batch(32, 0))
    told = str(raised.value)
    assert isinstance(raised.value, MemoryError)
    assert raised.value.exit_code == 2
    assert "up/kernel 1.12 kB" in told  # whole at stage 1: 7 x 35 float32, padded to 40
    optimizer = engine.plan.bytes_per_device()["optimizer"]
    assert f"optimizer   {optimizer:>8} B" in told
    assert told.endswith(
        "train.accumulation_steps: 2 takes about 70368.74 GB\n  train.accumulation_steps: 4 takes about 35184.37 GB\n"
        "  zero.stage: 2, train.accumulation_steps: 2 takes about 70368.74 GB"
    )


@pytest.mark.parametrize(
    ("fits", "advice"),
    [
        pytest.param({"zero.stage": 2}, "zero.stage: 2 takes about", marks=pytest.mark.slow),
        ({"zero.stage": 3}, "zero.stage: 3 takes about"),
        ({"zero.stage": 3, "train.accumulation_steps": 4}, "zero.stage: 3, train.accumulation_steps: 4 takes about"),
        (None, "No stage and no smaller micro-batch would do: take more devices"),
    ],
)
def test_the_smallest_change_that_fits_is_told(fits, advice, monkeypatch):
    """Of a device with room for that one exactly, or for none."""
    config = make_config({"zero": {"stage": 1, "collectives": "explicit"}})
    model, batch = build_model(ModelConfig(), 257), {"tokens": jax.ShapeDtypeStruct((64, 65), np.int32)}
    made = prepare(model, language_model_loss, optax.adam(1e-3), config, jax.devices())
    room = 1
    if fits:
        changed = made.replanned(with_fields(config, fits))
        room = estimate_footprint(changed, changed.trace_step(batch), "cpu").peak
    monkeypatch.setattr("jzero.out_of_memory._room", lambda blueprint: room)
    lines = explain(made, batch)
    assert lines[0].endswith("on a device:")
    assert lines[-1].startswith(advice)


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
