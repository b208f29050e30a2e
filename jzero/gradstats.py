"""What a step's gradient looks like: a norm for each group of parameters, and a histogram of magnitudes.

The gradient lies sharded and padded as stored; nothing here gathers it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jzero.leaf import LeafPlan
from jzero.paths import matching

_LOWEST, _HIGHEST = -40, 8  # powers of two: float32 gradients of averaged losses seldom leave them

# log2 of the magnitudes between which a bin of `grad_histogram` counts. The first bin holds exact zeros, the second
# also all that is smaller, the last also all that is larger or not finite.
HISTOGRAM_EDGES: tuple[int, ...] = tuple(range(_LOWEST - 1, _HIGHEST + 1))


def norm_groups(patterns: Sequence[str], paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The parameters that each pattern of `log.grad_norms` takes together ("*" matches "/" too).

    Raises ConfigError, with the nearest paths, for a pattern that matches none.
    """
    paths = list(paths)
    found = {pattern: matching("log.grad_norms", [pattern], paths, "trained parameter") for pattern in patterns}
    return {pattern: tuple(path for path in paths if path in found[pattern]) for pattern in patterns}


def gradient_stats(
    gradients: Mapping[str, jax.Array],
    leaves: Mapping[str, LeafPlan],
    groups: Mapping[str, Sequence[str]],
    histogram: bool,
) -> dict[str, jax.Array]:
    """`grad_norm/<pattern>`, float32, for each group; `grad_histogram`, float32 [bins], where asked for: how many
    elements of the true shapes have a magnitude between two of HISTOGRAM_EDGES.

    gradients: mean gradients by path in their stored shapes, zeros where padded.
    """
    squares = {path: jnp.sum(jnp.square(gradients[path].astype(jnp.float32))) for path in set().union(*groups.values())}
    stats = {
        f"grad_norm/{pattern}": jnp.sqrt(sum(squares[path] for path in paths)) for pattern, paths in groups.items()
    }
    if histogram:
        padding = sum(math.prod(leaves[path].stored_shape) - math.prod(leaves[path].shape) for path in gradients)
        stats["grad_histogram"] = _histogram(list(gradients.values())).at[0].add(-float(padding))
    return stats


def _histogram(gradients: Sequence[jax.Array]) -> jax.Array:
    """Elements of all arrays in each bin, padding among the zeros; float32 [bins].

    A pass over one byte an element for each bin: a one-hot reduction would hold every element once a bin (measured on
    CPU, jax 0.10.2).
    """
    bins = [_bins(gradient) for gradient in gradients]
    count = lambda number: sum(_count(array == number) for array in bins)
    return jax.lax.map(count, jnp.arange(len(HISTOGRAM_EDGES) - 1, dtype=jnp.int8))


def _bins(gradient: jax.Array) -> jax.Array:
    """The number of each element's bin, int8 in the gradient's shape and placement."""
    gradient = gradient.astype(jnp.float32)
    exponent = (jax.lax.bitcast_convert_type(gradient, jnp.int32) >> 23 & 255) - 127  # log2, rounded down
    above = jnp.clip(exponent, _LOWEST, _HIGHEST - 1) - _LOWEST + 1
    return jnp.where(gradient == 0, 0, above).astype(jnp.int8)


def _count(where: jax.Array) -> jax.Array:
    """Elements that are true: summed in int32, told in float32, which holds whole numbers to 2^24."""
    axes = None if where.size < 2**31 else tuple(range(1, where.ndim))
    return jnp.sum(jnp.sum(where, axis=axes, dtype=jnp.int32).astype(jnp.float32))
