"""Storing what was computed in float32."""

from typing import Any

import jax
import jax.numpy as jnp


def widened(dtype: Any) -> Any:
    """The dtype that updates are computed in: float32 for narrower floats, else the same."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if narrow else dtype


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """x in that dtype; what has it already, typed random keys included, as it is."""
    return x if x.dtype == dtype else x.astype(dtype)


def round_stochastically(x: jax.Array, bits: jax.Array) -> jax.Array:
    """float32 `x` as bfloat16: up or down, each with the probability that makes the mean right.

    bits: random uint16 of x's shape. What bfloat16 holds exactly stays; what is not finite stays.
    """
    assert x.dtype == jnp.float32, f"{x.dtype} has no 16 bits to drop"
    raised = jax.lax.bitcast_convert_type(x, jnp.uint32) + bits.astype(jnp.uint32)
    cut = jax.lax.bitcast_convert_type(raised & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), cut, x).astype(jnp.bfloat16)
