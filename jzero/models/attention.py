"""Causal attention with grouped queries, and rotary position embedding. Pure functions on arrays."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array


def rotary_angles(length: int, head_dim: int, theta: float) -> Array:
    """Angles [T, head_dim / 2] in radians, float32: position t turns pair j by t * theta^(-2j / head_dim)."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    return jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies


def apply_rotary(x: Array, angles: Array) -> Array:
    """Rotates x [B, T, heads, head_dim] by `angles` [T, head_dim / 2].

    A pair is (x[j], x[j + head_dim / 2]), as in Hugging Face's checkpoints. Computed in float32, returned
    in x's dtype.
    """
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def causal_attention(query: Array, key: Array, value: Array, implementation: Literal["xla", "cudnn"]) -> Array:
    """Each position attends to itself and those before it.

    Args:
        query: [B, T, heads, head_dim].
        key, value: [B, T, kv_heads, head_dim]; query head h reads key/value head h // (heads / kv_heads).
        implementation: "xla" runs anywhere and holds the [T, T] scores of every head; "cudnn" is flash
            attention, on NVIDIA GPUs and for 16-bit dtypes.

    Returns:
        [B, T, heads, head_dim] in the query's dtype. Products take the inputs' dtype, scores and softmax
        float32.
    """
    if implementation == "cudnn":
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
    # jax.nn.dot_product_attention computes the same but cannot be differentiated with bfloat16 inputs under
    # strict dtype promotion (jax 0.10.2): the backward products mix float32 and bfloat16 operands.
    batch, length, heads, head_dim = query.shape
    grouped_query = query.reshape(batch, length, key.shape[2], heads // key.shape[2], head_dim)
    scores = _scores(grouped_query, key) / head_dim**0.5
    positions = jnp.arange(length)
    scores = jnp.where(positions[:, None] >= positions, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, value).reshape(query.shape)


@jax.custom_vjp
def _scores(query: Array, key: Array) -> Array:
    """Products [B, K, G, T, S] in float32 of query [B, T, K, G, D] with key [B, S, K, D].

    The cotangent is cast to the inputs' dtype first, as in flash attention, so that the backward products run
    at that dtype's speed.
    """
    return jnp.einsum("btkgd,bskd->bkgts", query, key, preferred_element_type=jnp.float32)


def _scores_forward(query: Array, key: Array) -> tuple[Array, tuple[Array, Array]]:
    return _scores(query, key), (query, key)


def _scores_backward(inputs: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    query, key = inputs
    cotangent = cotangent.astype(query.dtype)
    return (
        jnp.einsum("bkgts,bskd->btkgd", cotangent, key),
        jnp.einsum("bkgts,btkgd->bskd", cotangent, query),
    )


_scores.defvjp(_scores_forward, _scores_backward)
