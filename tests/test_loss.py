"""cross_entropy: the right number, whatever the dtype, the ignored tokens and the split of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero.loss import WeightedLoss, cross_entropy

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(4, 5, 11)).astype(np.float32) * 3
LABELS = RNG.integers(0, 11, size=(4, 5))
LABELS[0, 1:4] = -100
LABELS[3, 0] = -1
WEIGHTS = RNG.uniform(size=(4, 5)).astype(np.float32)


def reference(logits, labels, weights) -> tuple[float, float]:
    """One token at a time, in float64."""
    total = weight = 0.0
    for index in np.ndindex(labels.shape):
        if labels[index] >= 0:
            row = np.asarray(logits[index], np.float64)
            total += weights[index] * (np.log(np.exp(row - row.max()).sum()) + row.max() - row[labels[index]])
            weight += weights[index]
    return total, weight


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("weights", [None, WEIGHTS, WEIGHTS > 0.5], ids=["unweighted", "weights", "bool"])
def test_sums_the_counted_tokens_in_float32(dtype, weights):
    logits = jnp.asarray(LOGITS, dtype)
    expected = reference(logits, LABELS, np.ones(LABELS.shape) if weights is None else weights)
    loss = cross_entropy(logits, jnp.asarray(LABELS), None if weights is None else jnp.asarray(weights))
    assert (loss.total.dtype, loss.weight.dtype, loss.total.shape) == (jnp.float32, jnp.float32, ())
    np.testing.assert_allclose((loss.total, loss.weight), expected, rtol=1e-6)


@pytest.mark.parametrize("label_dtype", [jnp.int32, jnp.int8, jnp.uint8])
def test_any_integer_label_dtype(label_dtype):
    labels = jnp.asarray(np.abs(LABELS) % 11, label_dtype)
    loss = cross_entropy(jnp.asarray(LOGITS), labels)
    np.testing.assert_allclose(loss.total, reference(LOGITS, np.asarray(labels), np.ones((4, 5)))[0], rtol=1e-6)


def test_micro_batches_add_up_to_the_whole_batch():
    logits, labels = jnp.asarray(LOGITS), jnp.asarray(LABELS)
    whole = cross_entropy(logits, labels)
    parts = [cross_entropy(logits[i : i + 1], labels[i : i + 1]) for i in range(4)]
    summed = jax.tree.map(lambda *x: sum(x[1:], x[0]), *parts)
    assert isinstance(summed, WeightedLoss)
    np.testing.assert_allclose((summed.total, summed.weight), (whole.total, whole.weight), rtol=1e-6)
    # The rows count 2, 5, 5 and 4 tokens: the mean of their means is another number.
    mean_of_means = np.mean([part.total / part.weight for part in parts])
    assert abs(mean_of_means - whole.total / whole.weight) > 0.01


def test_a_batch_with_nothing_to_count_weighs_nothing():
    labels = jnp.full((4, 5), -100)
    loss, gradient = jax.value_and_grad(lambda x: cross_entropy(x, labels).total)(jnp.asarray(LOGITS))
    assert (loss, cross_entropy(jnp.asarray(LOGITS), labels).weight) == (0, 0)
    assert not gradient.any()


def test_the_gradient_is_softmax_minus_the_label_on_counted_tokens_only():
    gradient = jax.grad(lambda x: cross_entropy(x, jnp.asarray(LABELS)).total)(jnp.asarray(LOGITS))
    softmax = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    expected = (softmax - np.eye(11)[LABELS % 11]) * (LABELS >= 0)[..., None]
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_an_infinite_loss_of_weight_zero_adds_nothing():
    logits = jnp.zeros((2, 3)).at[0, 1].set(-jnp.inf)
    labels = jnp.array([1, 1])
    assert cross_entropy(logits, labels).total == jnp.inf
    np.testing.assert_allclose(cross_entropy(logits, labels, jnp.array([0.0, 1.0])).total, np.log(3), rtol=1e-6)


def test_a_label_outside_the_vocabulary_is_not_a_number():
    assert jnp.isnan(cross_entropy(jnp.asarray(LOGITS), jnp.full((4, 5), 11)).total)


@pytest.mark.parametrize(
    ("labels", "weights", "message"),
    [((4, 6), None, r"labels of shape \(4, 6\).*want \(4, 5\)"), ((4, 5), (4,), r"weights of shape \(4,\)")],
)
def test_shapes_that_would_broadcast_are_refused(labels, weights, message):
    with pytest.raises(ValueError, match=message):
        cross_entropy(jnp.zeros((4, 5, 11)), jnp.zeros(labels, int), None if weights is None else jnp.ones(weights))
