"""Norms by group and the histogram of a gradient as it lies: sharded, padded, of any magnitude."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

from jzero.config import PrecisionConfig, ZeroConfig
from jzero.errors import ConfigError
from jzero.gradstats import HISTOGRAM_EDGES, gradient_stats, norm_groups
from jzero.leaf import AbstractParam
from jzero.plan import make_plan

SHAPES = {
    "embed/embedding": (129, 7),
    "layers/q_proj/kernel": (3, 13, 10),  # a stack of three
    "layers/q_proj/bias": (3, 13),
    "layers/up_proj/kernel": (3, 13, 16),
    "gain": (),
}
GROUPS = {"layers/*": tuple(path for path in SHAPES if path.startswith("layers/")), "*/embedding": ("embed/embedding",)}
AXES = {"replica": 1, "data": 8, "tensor": 1}


@pytest.fixture(scope="module")
def plan():
    params = {
        path: AbstractParam(shape, jnp.dtype("float32"), stack_ndim=int(path.startswith("layers")))
        for path, shape in SHAPES.items()
    }
    zero = ZeroConfig(stage=3, min_shard_elements=0)
    return make_plan(params, AXES, zero, PrecisionConfig(), optax.sgd(0.1))


def gradients() -> dict[str, np.ndarray]:
    """Of many magnitudes, some exactly zero."""
    rng = np.random.default_rng(0)
    wide = lambda shape: rng.normal(size=shape) * np.exp2(rng.integers(-50, 15, shape)) * rng.integers(0, 4, shape)
    return {path: np.asarray(wide(shape), np.float32) for path, shape in SHAPES.items()}


def stored(plan, true: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    mesh = jax.make_mesh((1, 8, 1), tuple(AXES), axis_types=(AxisType.Auto,) * 3)
    return {
        path: jax.device_put(leaf.pad(true[path]), NamedSharding(mesh, leaf.spec))
        for path, leaf in plan.gradients.items()
    }


def expected_histogram(values: np.ndarray) -> np.ndarray:
    """By comparing, where jzero reads exponents."""
    sizes = np.abs(values[values != 0])
    edges = np.exp2(np.array(HISTOGRAM_EDGES[2:-1], np.float64))
    counts = [np.sum((sizes >= low) & (sizes < high)) for low, high in zip([0, *edges], [*edges, np.inf], strict=True)]
    return np.array([np.sum(values == 0), *counts])


def test_padded_shards_say_what_the_true_gradient_does(plan):
    assert any(leaf.padded for leaf in plan.gradients.values())
    assert any(leaf.spec for leaf in plan.gradients.values())
    true = gradients()
    program = jax.jit(lambda g: gradient_stats(g, plan.gradients, GROUPS, histogram=True))
    placed = stored(plan, true)
    stats = jax.device_get(program(placed))
    assert list(stats) == ["grad_histogram", "grad_norm/*/embedding", "grad_norm/layers/*"]
    for pattern, paths in GROUPS.items():
        norm = math.sqrt(sum(np.sum(np.square(true[path], dtype=np.float64)) for path in paths))
        assert stats[f"grad_norm/{pattern}"] == pytest.approx(norm, rel=1e-5)
    everything = np.concatenate([array.ravel() for array in true.values()])
    expected = expected_histogram(everything)
    assert (expected > 0).all()
    np.testing.assert_array_equal(stats["grad_histogram"], expected)
    assert stats["grad_histogram"].sum() == everything.size
    compiled = program.lower(placed).compile().as_text()
    assert not re.search("all-gather|all-to-all|collective-permute", compiled)


@pytest.mark.parametrize(
    ("value", "exponent"),
    [
        (0.0, -41),
        (1.0, 0),
        (-1.0, 0),
        (1 - 2.0**-8, -1),
        (2.0**-40, -40),
        (2.0**-41, -40),
        (1e-37, -40),
        (2.0**7, 7),
        (1e30, 7),
        (math.inf, 7),
        (math.nan, 7),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_magnitude_falls_between_its_edges(plan, value, exponent, dtype):
    gradient = {"gain": jnp.asarray(value, dtype)}
    counts = jax.jit(lambda g: gradient_stats(g, plan.gradients, {}, histogram=True))(gradient)["grad_histogram"]
    assert [HISTOGRAM_EDGES[bin] for bin in np.flatnonzero(counts)] == [exponent]
    assert counts.sum() == 1


def test_nothing_is_computed_that_was_not_asked_for(plan):
    assert gradient_stats({}, plan.gradients, {}, histogram=False) == {}


def test_patterns_name_groups_of_paths():
    assert norm_groups(["layers/*", "*/embedding"], SHAPES) == GROUPS
    assert norm_groups([], SHAPES) == {}
    assert norm_groups(["*/q_proj/*"], SHAPES) == {"*/q_proj/*": ("layers/q_proj/kernel", "layers/q_proj/bias")}


@pytest.mark.parametrize(
    ("pattern", "near"),
    [("layers/k_proj/*", "layers/q_proj/bias"), ("Layers/q_proj/*", "layers/q_proj"), ("?", "embed")],
)
def test_a_pattern_that_matches_nothing_is_told_with_near_paths(pattern, near):
    with pytest.raises(ConfigError) as caught:
        norm_groups(["gain", pattern], SHAPES)
    told = str(caught.value)
    assert told.startswith(f"log.grad_norms names {pattern!r}, which matches no trained parameter. There are ")
    assert near in told
