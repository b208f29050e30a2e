"""Adam whose moments rest in 8 bits: block-wise dynamic quantisation (arXiv 2110.02861, section 2)."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

# The seven decades below 1. The n-th is cut into 2 ** n cells for the signed first moment, whose codes spend a bit on
# the sign, and into twice as many for the second. A code stands for the middle of its cell; the topmost for 1, so that
# a block's largest magnitude is kept as it is and does not shrink from step to step.
_DECADES = 7
_SHORTEST = 32  # elements of a block


def _magnitudes(signed: bool) -> np.ndarray:
    """What the cells stand for, in parts of the block's largest magnitude, rising to 1."""
    counts = [2**n * (1 if signed else 2) for n in range(_DECADES)]
    decades = [10.0 ** (n + 1 - _DECADES) * (0.1 + 0.9 * (np.arange(c) + 0.5) / c) for n, c in enumerate(counts)]
    return np.append(np.concatenate(decades)[:-1], 1.0).astype(np.float32)


def code_map(signed: bool) -> np.ndarray:
    """What the codes from -127 on stand for, float32 [255] or [254], rising: of both signs with a zero, or positive.

    The second moment has no zero: an element whose second moment rounds to 0 and whose first does not would move
    without bound.
    """
    magnitudes = _magnitudes(signed)
    return np.concatenate([-magnitudes[::-1], [0], magnitudes]).astype(np.float32) if signed else magnitudes


class Quantised(NamedTuple):
    """An array in 8 bits. codes: int8 of the array's shape. scales: float32, a block's largest magnitude; the array's
    shape but for the dim that the blocks run along, which has one element a block."""

    codes: Any
    scales: Any


class Adam8bitState(NamedTuple):
    """count: int32 scalar, updates so far. mu, nu: of the parameters' structure, Quantised or float32 arrays."""

    count: Any
    mu: Any
    nu: Any


def scale_by_adam8bit(
    b1: float,
    b2: float,
    eps: float,
    *,
    block_size: int = 256,
    min_elements: int = 4096,
    num_stack_dims: Mapping[str, int] | None = None,
) -> optax.GradientTransformation:
    """optax.scale_by_adam with both moments at rest in 8 bits, about 2 bytes an element instead of 8.

    An update is computed from the new moments in float32 before they are quantised. Blocks run along one dim (see
    `block_dim`) and divide it as evenly as whole elements allow, none longer than `block_size`.

    Args:
        min_elements: parameters with fewer elements (a layer) keep float32 moments.
        num_stack_dims: leading dims of a parameter that only stack layers, by path; none where absent. Blocks never
            run along those.
    """
    stacks = num_stack_dims or {}

    def init(params: Any) -> Adam8bitState:
        def zeros(keys: Any, p: Any) -> Any:
            dim = _quantised_dim(keys, p)
            if dim is None:
                return jnp.zeros(p.shape, jnp.float32)
            return Quantised(jnp.zeros(p.shape, jnp.int8), jnp.zeros(_scales_shape(p.shape, dim, block_size)))

        moments = [jax.tree_util.tree_map_with_path(zeros, params) for _ in range(2)]
        return Adam8bitState(jnp.zeros((), jnp.int32), *moments)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count = optax.safe_increment(state.count)
        paths, structure = jax.tree_util.tree_flatten_with_path(updates)
        stored = zip(structure.flatten_up_to(state.mu), structure.flatten_up_to(state.nu), strict=True)
        results = [one(keys, g, mu, nu, count) for (keys, g), (mu, nu) in zip(paths, stored, strict=True)]
        updates, mu, nu = (structure.unflatten(column) for column in zip(*results, strict=True))
        return updates, Adam8bitState(count, mu, nu)

    def one(keys: Any, gradient: Any, mu: Any, nu: Any, count: Any) -> tuple[Any, Any, Any]:
        dim, g = _quantised_dim(keys, gradient), gradient.astype(jnp.float32)
        if dim is not None:
            mu, nu = dequantise(mu, dim, signed=True), dequantise(nu, dim, signed=False)
        mu, nu = b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * jnp.square(g)
        step = (mu / (1 - b1**count)) / (jnp.sqrt(nu / (1 - b2**count)) + eps)
        if dim is not None:
            mu, nu = quantise(mu, dim, block_size, signed=True), quantise(nu, dim, block_size, signed=False)
        return step.astype(gradient.dtype), mu, nu

    def _quantised_dim(keys: Any, array: Any) -> int | None:
        stacked = stacks.get(jax.tree_util.keystr(keys, simple=True, separator="/"), 0)
        own = array.shape[stacked:]
        return stacked + block_dim(own) if own and math.prod(own) >= max(min_elements, 1) else None

    return optax.GradientTransformation(init, update)


def block_dim(shape: tuple[int, ...]) -> int:
    """The dim that blocks run along: the second largest (of two equal ones the later), unless it is so short that the
    scales would weigh; then the largest.

    It follows from the shape alone, so numbers do not depend on placement. ZeRO usually splits the largest dim (ties:
    the first): then every block lies on one device whole. Where it splits this one, an update costs a reduction or a
    gather of arrays as small as the scales.
    """
    largest, *others = sorted(range(len(shape)), key=lambda d: -shape[d])
    return others[0] if others and shape[others[0]] >= _SHORTEST else largest


def quantise(x: jax.Array, dim: int, block_size: int, *, signed: bool) -> Quantised:
    """float32 to 8 bits. Off by half a cell at most, by a whole one in the topmost."""
    shape = _scales_shape(x.shape, dim, block_size)
    size = -(-x.shape[dim] // shape[dim])
    missing = shape[dim] * size - x.shape[dim]
    padded = jnp.pad(jnp.abs(x), [(0, missing if d == dim else 0) for d in range(x.ndim)])
    scales = padded.reshape(*shape[: dim + 1], size, *shape[dim + 1 :]).max(dim + 1)
    spread = _spread(scales, x.shape, dim)
    parts = jnp.abs(x) / jnp.where(spread > 0, spread, 1)
    cells = _cells(parts, signed)
    if signed:
        codes = jnp.where(parts < _magnitudes(True)[0] / 2, 0, cells + 1) * jnp.sign(x).astype(jnp.int32)
    else:
        codes = cells - 127
    return Quantised(codes.astype(jnp.int8), scales)


def dequantise(x: Quantised, dim: int, *, signed: bool) -> jax.Array:
    """The float32 array that the codes stand for."""
    parts = jnp.take(jnp.asarray(code_map(signed)), x.codes.astype(jnp.int32) + 127, mode="clip")
    return parts * _spread(x.scales, x.codes.shape, dim)


def _cells(parts: jax.Array, signed: bool) -> jax.Array:
    """The number of the cell that each part (0 to 1) lies in, int32. Computed: a search costs ten times as much."""
    first = 1 if signed else 2
    decade = sum((parts >= 10.0**-n).astype(jnp.int32) for n in range(1, _DECADES))
    count = jnp.left_shift(first, decade)
    tens = jnp.asarray([10.0 ** (_DECADES - 1 - n) for n in range(_DECADES)], jnp.float32)
    within = (parts * jnp.take(tens, decade, mode="clip") - 0.1) / 0.9
    return count - first + jnp.clip((within * count.astype(jnp.float32)).astype(jnp.int32), 0, count - 1)


def _scales_shape(shape: tuple[int, ...], dim: int, block_size: int) -> tuple[int, ...]:
    return tuple(-(-n // block_size) if d == dim else n for d, n in enumerate(shape))


def _spread(scales: jax.Array, shape: tuple[int, ...], dim: int) -> jax.Array:
    """Each block's scale at all of its elements."""
    size = -(-shape[dim] // scales.shape[dim])
    return jax.lax.slice_in_dim(jnp.repeat(scales, size, dim), 0, shape[dim], axis=dim)
