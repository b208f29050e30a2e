"""Decoder-only language model of the Llama family, with Hugging Face's module and field names.

Parameters are created in float32. The model computes in whatever dtype its parameters are read in:
activations take the embedding's dtype; norms, rotary embedding and softmax run in float32, cast back after.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jzero.config import ModelConfig
from jzero.errors import ModelError
from jzero.models.layers import make_layers, run_layers
from jzero.models.rotary import apply_rotary, rotary_angles


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dimension, in float32, returned in x's dtype."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        rms_inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return (x32 * rms_inverse * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention; query heads share key/value heads in groups where there are fewer of those."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        hidden, self.head_dim = config.hidden_size, _head_dim(config)
        self.implementation: Literal["xla", "cudnn"] = config.attention
        query_size = config.num_attention_heads * self.head_dim
        key_value_size = (config.num_key_value_heads or config.num_attention_heads) * self.head_dim
        self.q_proj = _linear(hidden, query_size, config.initializer_range, rngs)
        self.k_proj = _linear(hidden, key_value_size, config.initializer_range, rngs)
        self.v_proj = _linear(hidden, key_value_size, config.initializer_range, rngs)
        self.o_proj = _linear(query_size, hidden, _residual_range(config), rngs)

    def __call__(self, x: Array, angles: Array) -> Array:
        split_heads = lambda y: y.reshape(*y.shape[:-1], -1, self.head_dim)
        query = apply_rotary(split_heads(self.q_proj(x)), angles)
        key = apply_rotary(split_heads(self.k_proj(x)), angles)
        value = split_heads(self.v_proj(x))
        # Under a caller's strict dtype promotion this cannot be differentiated with bfloat16 inputs (jax 0.10.2, 0.12).
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=self.implementation)
        return self.o_proj(mixed.reshape(*x.shape[:-1], -1))


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        hidden = config.hidden_size
        intermediate = config.intermediate_size or 32 * math.ceil(8 / 3 * hidden / 32)
        self.gate_proj = _linear(hidden, intermediate, config.initializer_range, rngs)
        self.up_proj = _linear(hidden, intermediate, config.initializer_range, rngs)
        self.down_proj = _linear(intermediate, hidden, _residual_range(config), rngs)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: Array, angles: Array) -> Array:
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    """Tokens int32 [B, T] -> logits [B, T, vocab_size] in the parameters' dtype.

    Parameter paths are Hugging Face's with "/" and Flax's leaf names: "layers/self_attn/q_proj/kernel" of
    shape [L, in, out] when `scan_layers`, "layers/0/self_attn/q_proj/kernel" [in, out] otherwise. Both
    layouts start from the same numbers for the same `rngs`. With `tie_word_embeddings` there is no
    "lm_head/kernel".

    Raises ModelError for T > max_position_embeddings.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        self.max_position_embeddings = config.max_position_embeddings
        self.head_dim = _head_dim(config)
        self.rope_theta = config.rope_theta
        self.scan_layers = config.scan_layers
        self.remat: Literal["none", "dots", "full"] = config.remat
        self.tie_word_embeddings = config.tie_word_embeddings
        self.embed_tokens = nnx.Embed(
            vocab_size,
            config.hidden_size,
            embedding_init=nnx.initializers.normal(config.initializer_range),
            promote_dtype=_as_read,
            rngs=rngs,
        )
        self.layers = make_layers(
            lambda rngs: DecoderLayer(config, rngs=rngs), config.num_hidden_layers, config.scan_layers, rngs
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = _linear(config.hidden_size, vocab_size, config.initializer_range, rngs)

    def __call__(self, tokens: Array) -> Array:
        length = tokens.shape[-1]
        if length > self.max_position_embeddings:
            raise ModelError(
                f"model.max_position_embeddings = {self.max_position_embeddings}: rows hold {length} tokens; "
                "raise it or shorten data.sequence_length"
            )
        x = self.embed_tokens(tokens)
        angles = rotary_angles(length, self.head_dim, self.rope_theta)
        x = run_layers(self.layers, x, angles, scan=self.scan_layers, remat=self.remat)
        x = self.norm(x)
        return self.embed_tokens.attend(x) if self.tie_word_embeddings else self.lm_head(x)


def _linear(in_size: int, out_size: int, stddev: float, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(in_size, out_size, use_bias=False, kernel_init=nnx.initializers.normal(stddev), rngs=rngs)


def _head_dim(config: ModelConfig) -> int:
    return config.head_dim or config.hidden_size // config.num_attention_heads


def _residual_range(config: ModelConfig) -> float:
    """GPT-2's rule: 2 L projections add to the residual stream, so each starts smaller by its root."""
    return config.initializer_range / (2 * config.num_hidden_layers) ** 0.5


def _as_read(arrays, *, dtype=None, inexact=True):
    """`nnx.Embed` fixes its dtype when it is built, so it would cast a bfloat16 table back to float32."""
    del dtype, inexact
    return arrays
