"""The loss scale that keeps float16 gradients from vanishing: DeepSpeed's rules, as pure functions of four scalars."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.config import LossScaleConfig

LossScale = dict[str, Any]


def init_loss_scale(config: LossScaleConfig) -> LossScale:
    """scale: float32. steps, last_overflow (a step, -1: none yet), hysteresis (overflows until it halves): int32."""
    return {
        "scale": np.float32(config.initial),
        "steps": np.int32(0),
        "last_overflow": np.int32(-1),
        "hysteresis": np.int32(config.hysteresis),
    }


def update_loss_scale(config: LossScaleConfig, state: LossScale, overflow: jax.Array) -> tuple[LossScale, jax.Array]:
    """The loss scale after a step, and whether it is exhausted: it should halve, but is at its minimum already.

    An overflow first uses up the hysteresis, then halves the scale. `window` good steps after the last overflow (or
    doubling) the scale doubles and the hysteresis is full again; with `consecutive_hysteresis` any good step fills it.
    A halving does not. (DeepSpeed 0.19 DynamicLossScaler.)
    """
    scale, step, hysteresis = state["scale"], state["steps"], state["hysteresis"]
    if not config.dynamic:
        last = jnp.where(overflow, step, state["last_overflow"])
        return {**state, "steps": step + 1, "last_overflow": last}, jnp.bool_(False)
    halves = overflow & (hysteresis <= 1)
    good_steps = step - state["last_overflow"] - 1
    doubles = ~overflow & (good_steps > 0) & (good_steps % config.window == 0)
    fills = ~overflow if config.consecutive_hysteresis else doubles
    new_scale = jnp.where(halves, jnp.maximum(scale / 2, config.minimum), jnp.where(doubles, scale * 2, scale))
    return {
        "scale": new_scale.astype(jnp.float32),
        "steps": step + 1,
        "last_overflow": jnp.where(overflow, step, state["last_overflow"]),
        "hysteresis": jnp.where(
            fills, config.hysteresis, jnp.where(overflow & ~halves, hysteresis - 1, hysteresis)
        ).astype(jnp.int32),
    }, halves & (scale <= config.minimum)
