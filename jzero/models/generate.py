"""Samples from a model, to see what it has learnt. Not an inference engine: there is no key/value cache."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


def generate(
    model: Callable[[Array], Array],
    tokens: Array,
    key: Array,
    *,
    num_tokens: int,
    sequence_length: int,
    temperature: float,
) -> Array:
    """Appends `num_tokens` sampled tokens to `tokens`, one whole forward pass each.

    Pure and jittable, the keyword arguments being static. Every pass has the same shape, since in a causal
    model what stands after a position cannot touch it.

    Args:
        model: tokens int32 [B, T] -> logits [B, T, V]; an `nnx.Module` or any callable.
        tokens: the prompt, int32 [B, P] with P >= 1, all rows of the same length.
        key: a PRNG key. The same key, model and prompt give the same tokens.
        sequence_length: the most tokens the model sees at once; older ones slide out of view.
        temperature: divides the logits; 0 takes the likeliest token each time.

    Returns:
        int32 [B, P + num_tokens], the prompt first.

    Raises:
        ValueError: an empty prompt or a negative temperature.
    """
    batch_size, prompt_length = tokens.shape
    if prompt_length < 1:
        raise ValueError("tokens is empty: the model needs at least one token to continue")
    if temperature < 0:
        raise ValueError(f"temperature={temperature} is negative: want 0 (greedy) or more")
    total = prompt_length + num_tokens
    window = min(total, sequence_length)
    buffer = jnp.zeros((batch_size, total), jnp.int32).at[:, :prompt_length].set(tokens)
    rebuild = _detach(model)

    def write_token(position: Array, buffer: Array) -> Array:
        start = jnp.maximum(position - window, 0)
        seen = jax.lax.dynamic_slice_in_dim(buffer, start, window, axis=1)
        logits = rebuild()(seen)
        logits = jax.lax.dynamic_index_in_dim(logits, position - 1 - start, axis=1, keepdims=False)
        token = _sample(logits.astype(jnp.float32), jax.random.fold_in(key, position), temperature)
        return jax.lax.dynamic_update_slice_in_dim(buffer, token[:, None], position, axis=1)

    return jax.lax.fori_loop(prompt_length, total, write_token, buffer)


def _sample(logits: Array, key: Array, temperature: float) -> Array:
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.random.categorical(key, logits / temperature, axis=-1).astype(jnp.int32)


def _detach(model: Callable[[Array], Array]) -> Callable[[], Callable[[Array], Array]]:
    """NNX refuses to pass a module of an outer trace through its transforms (scan, remat) inside a loop's
    body, so the body builds its own from the state."""
    if not isinstance(model, nnx.Module):
        return lambda: model
    graphdef, state = nnx.split(model)
    return lambda: nnx.merge(graphdef, state, copy=True)
