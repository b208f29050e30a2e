"""Rotary position embedding (arXiv 2104.09864, equation 34). Pure functions on arrays."""

import jax.numpy as jnp
from jax import Array


def rotary_angles(positions: Array, head_dim: int, theta: float) -> Array:
    """Angles [..., T, head_dim / 2] in radians, float32, of positions [..., T]: position t turns pair j by
    t * theta^(-2j / head_dim)."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    return positions.astype(jnp.float32)[..., None] * frequencies


def apply_rotary(x: Array, angles: Array) -> Array:
    """Rotates x [B, T, heads, head_dim] by `angles` [T, head_dim / 2], or [B, T, head_dim / 2] row by row.

    A pair is (x[j], x[j + head_dim / 2]), as in Hugging Face's checkpoints. Computed in float32, returned
    in x's dtype.
    """
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
