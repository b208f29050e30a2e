"""A loss as (total, weight), so that any split of a batch over micro-batches and devices averages right."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightedLoss:
    """A sum of losses and the weight it stands for: loss = total / weight.

    Both are float32 scalars. jzero adds the totals and the weights of every micro-batch and device first and
    divides once, so a micro-batch with few counted tokens weighs as little as it should. A weight of zero
    over the whole batch gives a loss of zero and no update.
    """

    total: Array
    weight: Array


def cross_entropy(logits: Array, labels: Array, weights: Array | None = None) -> WeightedLoss:
    """Softmax cross-entropy against integer labels, summed over tokens, in nats.

    Args:
        logits: [..., V] of any float dtype; the arithmetic is float32.
        labels: [...] of any integer dtype. A label < 0 is ignored: it adds nothing to the total or the
            weight. A label >= V gives a loss of NaN rather than a wrong number.
        weights: [...] float or bool, multiplies each token's loss and its count; None counts each token once.

    Returns:
        The weighted sum over the counted tokens, and the sum of their weights: the number of counted tokens
        where `weights` is None.

    Raises:
        ValueError: the shapes do not agree.
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(f"labels of shape {labels.shape} for logits of shape {logits.shape}: want {logits.shape[:-1]}")
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(f"weights of shape {weights.shape} for labels of shape {labels.shape}: want the same shape")
    counted = labels >= 0
    label_logits = jnp.take_along_axis(logits, jnp.where(counted, labels, 0)[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1) - label_logits.astype(jnp.float32)
    token_weights = counted.astype(jnp.float32)
    if weights is not None:
        token_weights *= weights.astype(jnp.float32)
    # A token of weight zero adds nothing even where its loss is infinite, hence `where` besides the product.
    losses = jnp.where(token_weights != 0, losses * token_weights, 0.0)
    return WeightedLoss(total=losses.sum(), weight=token_weights.sum())
