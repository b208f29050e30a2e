"""Decoder-only language model. Its parts are chosen by config fields; module and field names are Hugging Face's.

Parameters are created in float32. The model computes in whatever dtype its parameters are read in:
activations take the embedding's dtype; norms, rotary embedding and softmax run in float32, cast back after.
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jzero.config import ModelConfig
from jzero.errors import ModelError
from jzero.models.layers import make_layers, run_layers
from jzero.models.rotary import apply_rotary, rotary_angles

ACTIVATIONS = {"silu": nnx.silu, "gelu_new": nnx.gelu}


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dimension, in float32, returned in x's dtype."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        rms_inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return (x32 * rms_inverse * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean(x)) / std(x) * scale + bias over the last dimension, in float32, returned in x's dtype."""

    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((size,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        std_inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        scale, bias = self.scale[...].astype(jnp.float32), self.bias[...].astype(jnp.float32)
        return (centred * std_inverse * scale + bias).astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention; query heads share key/value heads in groups where there are fewer of those.

    angles: turns queries and keys, as `apply_rotary` does. segments: int [B, T]; a token sees its own segment only.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        hidden, self.head_dim = config.hidden_size, _head_dim(config)
        self.implementation: Literal["xla", "cudnn"] = config.attention
        self.sliding_window = config.sliding_window
        query_size = config.num_attention_heads * self.head_dim
        key_value_size = (config.num_key_value_heads or config.num_attention_heads) * self.head_dim
        spread, bias = config.initializer_range, config.attention_bias
        self.q_proj = _linear(hidden, query_size, spread, bias, rngs)
        self.k_proj = _linear(hidden, key_value_size, spread, bias, rngs)
        self.v_proj = _linear(hidden, key_value_size, spread, bias, rngs)
        self.o_proj = _linear(query_size, hidden, _residual_range(config), config.attention_out_bias, rngs)
        self.q_norm = _norm(config, self.head_dim) if config.use_qk_norm else None
        self.k_norm = _norm(config, self.head_dim) if config.use_qk_norm else None

    def __call__(self, x: Array, angles: Array | None = None, segments: Array | None = None) -> Array:
        split_heads = lambda y: y.reshape(*y.shape[:-1], -1, self.head_dim)

        def place(heads: Array, norm: RMSNorm | LayerNorm | None) -> Array:
            heads = heads if norm is None else norm(heads)
            return heads if angles is None else apply_rotary(heads, angles)

        query = place(split_heads(self.q_proj(x)), self.q_norm)
        key = place(split_heads(self.k_proj(x)), self.k_norm)
        value = split_heads(self.v_proj(x))
        mixed = _attend(
            query,
            key,
            value,
            mask=None if segments is None else (segments[:, :, None] == segments[:, None, :])[:, None],
            is_causal=True,
            local_window_size=None if self.sliding_window is None else (self.sliding_window - 1, 0),
            implementation=self.implementation,
        )
        return self.o_proj(mixed.reshape(*x.shape[:-1], -1))


def _attend(query: Array, key: Array, value: Array, **how: Any) -> Array:
    # Under a caller's strict dtype promotion this cannot be differentiated with bfloat16 inputs (jax 0.10.2, 0.12).
    attend = lambda *heads: jax.nn.dot_product_attention(*heads, **how)
    if query.dtype != jnp.float16:
        return attend(query, key, value)
    # jax asks for float16 products added up in float32, which XLA has not on CPUs.
    wide = lambda *heads: attend(*(x.astype(jnp.float32) for x in heads)).astype(jnp.float16)
    return jax.lax.platform_dependent(query, key, value, cpu=wide, default=attend)


class MLP(nnx.Module):
    """down(act(gate(x)) * up(x)), which is SwiGLU with act = silu; without a gate down(act(up(x)))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        hidden, spread, bias = config.hidden_size, config.initializer_range, config.mlp_bias
        intermediate = config.intermediate_size or _default_intermediate(config)
        self.act = ACTIVATIONS[config.hidden_act]
        self.gate_proj = _linear(hidden, intermediate, spread, bias, rngs) if config.gated_mlp else None
        self.up_proj = _linear(hidden, intermediate, spread, bias, rngs)
        self.down_proj = _linear(intermediate, hidden, _residual_range(config), bias, rngs)

    def __call__(self, x: Array) -> Array:
        if self.gate_proj is None:
            return self.down_proj(self.act(self.up_proj(x)))
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = _norm(config, config.hidden_size)
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = _norm(config, config.hidden_size)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: Array, **shared: Array) -> Array:
        x = x + self.self_attn(self.input_layernorm(x), **shared)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nnx.Module):
    """Tokens int32 [B, T] -> logits [B, T, vocab_size] in the parameters' dtype.

    Parameter paths are those of Hugging Face's Llama, Qwen and Mistral with "/" and Flax's leaf names:
    "layers/self_attn/q_proj/kernel" of shape [L, in, out] when `scan_layers`, "layers/0/self_attn/q_proj/kernel"
    [in, out] otherwise. Both layouts start from the same numbers for the same `rngs`. With `tie_word_embeddings`
    there is no "lm_head/kernel".

    A GPT-2 has the same names. Hugging Face's are, kernels [in, out] as here: wte = embed_tokens/embedding,
    wpe = embed_positions/embedding, ln_1 = input_layernorm, ln_2 = post_attention_layernorm, ln_f = norm,
    attn.c_attn = q_proj, k_proj and v_proj side by side, attn.c_proj = o_proj, mlp.c_fc = up_proj,
    mlp.c_proj = down_proj.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        self.max_position_embeddings = config.max_position_embeddings
        self.head_dim = _head_dim(config)
        self.rope_theta = config.rope_theta
        self.scan_layers = config.scan_layers
        self.remat: Literal["none", "dots", "full"] = config.remat
        self.tie_word_embeddings = config.tie_word_embeddings
        # What cuDNN's kernel cannot do is known when a call brings segments.
        self.attention, self.sliding_window = config.attention, config.sliding_window
        spread = config.initializer_range
        self.embed_tokens = _embed(vocab_size, config.hidden_size, spread, rngs)
        learned = config.position_embedding_type == "absolute"
        self.embed_positions = (
            _embed(config.max_position_embeddings, config.hidden_size, spread, rngs) if learned else None
        )
        self.layers = make_layers(
            lambda rngs: DecoderLayer(config, rngs=rngs), config.num_hidden_layers, config.scan_layers, rngs
        )
        self.norm = _norm(config, config.hidden_size)
        if not config.tie_word_embeddings:
            self.lm_head = _linear(config.hidden_size, vocab_size, spread, False, rngs)

    def __call__(self, tokens: Array, positions: Array | None = None, segments: Array | None = None) -> Array:
        """Logits of rows of tokens, each row one text, or several one after the other.

        positions: int32 [B, T], where each token stands in its text, below `max_position_embeddings`; None: 0..T-1.
        segments: int32 [B, T], which text of its row each token belongs to; it sees only that one. None: one text.

        Raises ModelError for T > max_position_embeddings, for positions or segments of another shape or dtype, and
        for segments that the attention kernel cannot take.
        """
        self._assert_fits(tokens, positions, segments)
        x, length, shared = self.embed_tokens(tokens), tokens.shape[-1], {}
        if self.embed_positions is None:
            places = jnp.arange(length, dtype=jnp.float32) if positions is None else positions
            shared["angles"] = rotary_angles(places, self.head_dim, self.rope_theta)
        elif positions is None:
            x = x + self.embed_positions.embedding[...][:length]
        else:
            x = x + self.embed_positions(positions)
        if segments is not None:
            shared["segments"] = segments
        x = run_layers(self.layers, x, shared, scan=self.scan_layers, remat=self.remat)
        x = self.norm(x)
        return self.embed_tokens.attend(x) if self.tie_word_embeddings else self.lm_head(x)

    def _assert_fits(self, tokens: Array, positions: Array | None, segments: Array | None) -> None:
        length = tokens.shape[-1]
        if length > self.max_position_embeddings:
            raise ModelError(
                f"model.max_position_embeddings = {self.max_position_embeddings}: rows hold {length} tokens; "
                "raise it or shorten data.sequence_length"
            )
        for name, ids in (("positions", positions), ("segments", segments)):
            if ids is not None and (ids.shape != tokens.shape or not jnp.issubdtype(ids.dtype, jnp.integer)):
                raise ModelError(f"{name}: {ids.dtype}{ids.shape}; want int32{tokens.shape}, one for each token")
        if segments is None or self.attention != "cudnn":
            return
        if self.sliding_window is not None:
            raise ModelError(
                f"model.attention = cudnn: takes no segments together with model.sliding_window = "
                f"{self.sliding_window}; set model.attention: xla"
            )
        if length % 2:
            raise ModelError(
                f"model.attention = cudnn: takes segments in rows of even length only, and rows hold {length} tokens; "
                "set another data.sequence_length, or model.attention: xla"
            )


def _linear(in_size: int, out_size: int, stddev: float, bias: bool, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(in_size, out_size, use_bias=bias, kernel_init=nnx.initializers.normal(stddev), rngs=rngs)


def _embed(num_rows: int, size: int, stddev: float, rngs: nnx.Rngs) -> nnx.Embed:
    init = nnx.initializers.normal(stddev)
    return nnx.Embed(num_rows, size, embedding_init=init, promote_dtype=_as_read, rngs=rngs)


def _norm(config: ModelConfig, size: int) -> RMSNorm | LayerNorm:
    if config.norm == "rmsnorm":
        return RMSNorm(size, config.rms_norm_eps)
    return LayerNorm(size, config.layer_norm_epsilon)


def _head_dim(config: ModelConfig) -> int:
    return config.head_dim or config.hidden_size // config.num_attention_heads


def _default_intermediate(config: ModelConfig) -> int:
    """A gate is a third matrix: with 8/3 of the width instead of 4 the parameters stay about as many."""
    return 32 * math.ceil(8 / 3 * config.hidden_size / 32) if config.gated_mlp else 4 * config.hidden_size


def _residual_range(config: ModelConfig) -> float:
    """GPT-2's rule: 2 L projections add to the residual stream, so each starts smaller by its root."""
    return config.initializer_range / (2 * config.num_hidden_layers) ** 0.5


def _as_read(arrays, *, dtype=None, inexact=True):
    """`nnx.Embed` fixes its dtype when it is built, so it would cast a bfloat16 table back to float32."""
    del dtype, inexact
    return arrays
