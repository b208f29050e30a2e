"""What is told of a loss before it is compiled: which of its results are sums over the rows of its batch.

Whatever the table says is checked against numbers: what is called a sum is one, what is called MIXED is none.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_real_models
import toys
from flax import linen as nn
from flax import nnx

import jzero
from jzero.blueprint import prepare
from jzero.config import ModelConfig
from jzero.grads import make_loss_fn
from jzero.mixing import Effect, batch_flow
from jzero.models import build_model

INDEPENDENT, ROWS, SUM, SHIFTED, MIXED, UNKNOWN = Effect
B, T, D, V, E = 6, 4, 8, 11, 3  # rows, tokens a row, width, vocabulary, experts
RNG = np.random.default_rng(0)


def batch_of(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    return {
        "x": rng.normal(size=(rows, D)).astype(np.float32),
        "y": rng.normal(size=(rows, D)).astype(np.float32),
        "h": rng.normal(size=(rows, T, D)).astype(np.float32),
        "image": rng.normal(size=(rows, 8, 8, 3)).astype(np.float32),
        "tokens": rng.integers(0, V, (rows, T + 1)).astype(np.int32),
        "labels": rng.integers(-1, V, (rows, T)).astype(np.int32),
        "counts": rng.random((rows, T)) < 0.7,
        "lengths": rng.integers(1, T + 1, rows).astype(np.int32),
        "segments": np.sort(rng.integers(0, 2, (rows, T)), axis=1).astype(np.int32),
        "negative": rng.normal(size=(rows, 3, D)).astype(np.float32),
    }


BATCH = batch_of(RNG, B)
WEIGHTS = {
    "w": RNG.normal(size=(D, D)).astype(np.float32),
    "layers": RNG.normal(size=(3, D, D)).astype(np.float32),
    "head": RNG.normal(size=(D, V)).astype(np.float32),
    "table": RNG.normal(size=(V, D)).astype(np.float32),
    "router": RNG.normal(size=(D, E)).astype(np.float32),
    "experts": RNG.normal(size=(E, D, D)).astype(np.float32),
    "kernel": RNG.normal(size=(3, 3, 3, 5)).astype(np.float32),
    "mean": RNG.normal(size=D).astype(np.float32),
    "count": np.int32(3),
    "key": jax.random.key(0),
}


def told(fn: Callable[..., Any], weights: Any, batch: Any) -> list[Effect]:
    program = jax.make_jaxpr(fn)(weights, batch)
    rows = [False] * len(jax.tree.leaves(weights)) + [True] * len(jax.tree.leaves(batch))
    return [flow.effect for flow in batch_flow(program, rows)]


class Case(NamedTuple):
    loss: Callable[[dict[str, Any], dict[str, Any]], Any]
    expected: tuple[Effect, ...]


CASES: dict[str, Case] = {}


def case(*expected: Effect):
    def register(loss):
        CASES[loss.__name__] = Case(loss, expected)
        return loss

    return register


def token_losses(w, b):
    logits = w["table"][b["tokens"][:, :-1]] @ w["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, b["tokens"][:, 1:])


def normalised(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


# Sums.


@case(SUM)
def mean_square(w, b):
    return jnp.mean(jnp.square(b["x"] @ w["w"] - b["y"]))


@case(SHIFTED, INDEPENDENT)
def weight_decay(w, b):
    return jnp.mean(jnp.square(b["x"] @ w["w"])) + 1e-3 * jnp.sum(jnp.square(w["w"])), w["count"] + 1


@case(SUM, SUM)
def cross_entropy(w, b):
    sums = jzero.cross_entropy(w["table"][b["tokens"][:, :-1]] @ w["head"], b["labels"])
    return sums.total, sums.weight


@case(SUM, SUM, SUM)
def several_losses(w, b):
    """sum() of Python begins with a zero, and so do these sums."""
    first, second = token_losses(w, b), jnp.square(b["x"] @ w["w"])
    losses = first.mean(), second.mean()
    return sum([first.sum(), second.sum()]), jnp.stack(losses).sum(), jnp.zeros(3).at[1].add(losses[0]).sum()


@case(SUM, SUM)
def folded_tokens(w, b):
    flat = b["h"].reshape(-1, D) @ w["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(flat, b["tokens"][:, 1:].reshape(-1))
    return losses.reshape(-1, T).mean(-1).sum(), b["counts"].reshape(-1).sum()


@case(SUM)
def tokens_first(w, b):
    folded = jnp.swapaxes(b["h"], 0, 1).reshape(-1, D) @ w["w"]
    return jnp.tanh(folded.reshape(T, -1, D)).mean(0).sum()


@case(SUM)
def triplets(w, b):
    anchor, positive, negative = b["x"] @ w["w"], b["y"] @ w["w"], b["negative"] @ w["w"]
    near = jnp.sum(jnp.square(anchor - positive), -1)
    far = jnp.sum(jnp.square(anchor[:, None] - negative), -1).min(1)
    return jnp.mean(jax.nn.relu(near - far + 1.0))


@case(SUM)
def contrast_within_a_row(w, b):
    scores = jnp.einsum("bd,bnd->bn", normalised(b["x"] @ w["w"]), normalised(b["negative"]))
    return -jnp.mean(jax.nn.log_softmax(scores)[:, 0])


@case(SUM)
def contrast_with_a_queue(w, b):
    near = jnp.sum(b["x"] * b["y"], -1, keepdims=True)
    return -jnp.mean(jax.nn.log_softmax(jnp.concatenate([near, b["x"] @ w["table"].T], 1))[:, 0])


@case(SUM, SUM)
def an_average_broadcast_into_losses(w, b):
    penalty = jnp.mean(jnp.square(b["x"] @ w["w"]))
    return jnp.mean(token_losses(w, b) + 0.1 * penalty), jnp.sum(b["x"] - jnp.mean(b["x"], 0))


@case(SUM)
def outer_product_of_shapes(w, b):
    """[B, 1] + [B] by mistake: still twice a mean."""
    return jnp.square(b["x"].sum(1, keepdims=True)).mean() + jnp.square(b["y"]).mean()


@case(SUM)
def layers_scanned(w, b):
    layer = jax.checkpoint(lambda x, kernel: (x + jnp.tanh(x @ kernel), None))
    return jnp.sum(jnp.square(jax.lax.scan(layer, b["h"], w["layers"])[0]))


@case(SUM, SUM)
def a_penalty_of_each_layer(w, b):
    def layer(carry, kernel):
        x, penalty = carry
        x = jnp.tanh(x @ kernel)
        return (x, penalty + jnp.mean(jnp.square(x))), jnp.mean(jnp.abs(x))

    (x, penalty), each = jax.lax.scan(layer, (b["h"], jnp.zeros(())), w["layers"])
    return jnp.mean(x) + penalty, each.sum()


@case(SUM)
def recurrent(w, b):
    cell = lambda state, x: (jnp.tanh(state @ w["w"] + x),) * 2
    _, states = jax.lax.scan(cell, jnp.zeros_like(b["x"]), jnp.swapaxes(b["h"], 0, 1))
    return jnp.mean(jnp.square(jnp.swapaxes(states, 0, 1)[:, -1]))


@case(SUM)
def loop_of_a_fixed_number(w, b):
    grow = lambda i, x: jnp.tanh(x @ w["w"]) + i.astype(x.dtype)
    return jnp.mean(jax.lax.fori_loop(0, w["count"], grow, b["x"]))


@case(SUM, SUM)
def chunked_losses(w, b):
    """A part of each row at a time, so that not all logits are held."""

    def chunk(sums, tokens):
        logits, labels = tokens
        new = jzero.cross_entropy(logits @ w["head"], labels)
        return jax.tree.map(jnp.add, sums, (new.total, new.weight)), None

    parts = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (b["h"], b["labels"]))
    return jax.lax.scan(chunk, (jnp.zeros(()), jnp.zeros(())), parts)[0]


def attention(w, b, mask):
    q, k, v = (b["h"] @ kernel for kernel in w["layers"])
    scores = jnp.where(mask, jnp.einsum("btd,bsd->bts", q, k), -1e9)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), v)


@case(SUM)
def causal_attention(w, b):
    return jnp.sum(jnp.square(attention(w, b, jnp.tri(T, dtype=bool))))


@case(SUM)
def attention_within_segments(w, b):
    same = b["segments"][:, :, None] == b["segments"][:, None]
    return jnp.sum(jnp.square(attention(w, b, same & jnp.tri(T, dtype=bool))))


@case(SUM)
def attention_of_jax(w, b):
    q, k, v = ((b["h"] @ kernel).reshape(-1, T, 2, D // 2) for kernel in w["layers"])
    lengths = {"query_seq_lengths": b["lengths"], "key_value_seq_lengths": b["lengths"]}
    return jnp.sum(jnp.square(jax.nn.dot_product_attention(q, k, v, is_causal=True, **lengths)))


@case(SUM)
def dropout(w, b):
    keep = jax.random.bernoulli(w["key"], 0.9, b["x"].shape)
    return jnp.sum(jnp.square(jnp.where(keep, b["x"] / 0.9, 0.0) @ w["w"]))


@case(SUM)
def convolutions(w, b):
    x = jax.lax.conv_general_dilated(
        b["image"], w["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = nn.max_pool(jax.nn.relu(x), (2, 2), (2, 2))
    x = jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")
    return jnp.sum(jnp.square(x.mean((1, 2))))


@case(SUM)
def norms_within_a_row(w, b):
    group = nnx.GroupNorm(D, 2, rngs=nnx.Rngs(0))
    layer = nnx.LayerNorm(D, rngs=nnx.Rngs(0))
    rms = nnx.RMSNorm(D, rngs=nnx.Rngs(0))
    return jnp.sum(jnp.square(rms(layer(group(b["h"])) @ w["w"]))) + jnp.sum(jax.nn.standardize(b["x"]) ** 4)


@case(SUM, SUM)
def half_precision(w, b):
    x = (b["x"].astype(jnp.float16) @ w["w"].astype(jnp.float16)).astype(jnp.float32)
    return jnp.mean(jnp.square(x)), jnp.sum(x).astype(jnp.bfloat16)


@case(SUM, SUM)
def branches(w, b):
    x = jax.lax.cond(w["count"] > 2, lambda x: jnp.tanh(x @ w["w"]), lambda x: 2 * x, b["x"])
    return jnp.sum(x), jax.lax.cond(w["count"] > 2, lambda x: jnp.sum(x), lambda x: jnp.zeros(()), b["x"])


@case(SUM)
def prefix_and_shift(w, b):
    prefix = jnp.broadcast_to(w["mean"], b["h"][:, :1].shape)
    x = jnp.concatenate([prefix, b["h"][:, :-1]], 1).at[:, 1].set(0.0)
    x = jax.lax.dynamic_update_slice_in_dim(x, b["h"][:, :1], w["count"], 1)
    return jnp.sum(jnp.square(jnp.flip(jnp.roll(x, 1, 1), 1) + jnp.cumsum(jnp.sort(x, 1), 1)))


@case(SUM)
def two_views(w, b):
    """One pass over both, one behind the other, then apart again."""
    both = jnp.tanh(jnp.concatenate([b["x"], b["y"]]) @ w["w"])
    one, other = jnp.split(both, 2)
    return jnp.mean(jnp.square(one - other) + jnp.square(both[: len(b["x"])]))


@case(SUM)
def gradient_penalty(w, b):
    slope = jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w["w"])))(b["x"])
    return jnp.mean(jnp.square(jnp.linalg.norm(slope, axis=-1) - 1))


@case(SUM)
def row_by_row(w, b):
    """Each row adapts weights of its own."""

    def one(x, y):
        loss = lambda kernel: jnp.mean(jnp.square(jnp.tanh(x @ kernel) - y))
        return loss(w["w"] - 0.1 * jax.grad(loss)(w["w"]))

    return jnp.mean(jax.vmap(one)(b["x"], b["y"]))


@case(SUM)
def dense_mixture_of_experts(w, b):
    probabilities = jax.nn.softmax(b["h"] @ w["router"])
    chosen, which = jax.lax.top_k(probabilities, 2)
    gates = jnp.sum(jax.nn.one_hot(which, E) * (chosen / chosen.sum(-1, keepdims=True))[..., None], -2)
    each = jnp.tanh(jnp.einsum("btd,edf->btef", b["h"], w["experts"]))
    z_loss = jnp.mean(jnp.square(jax.nn.logsumexp(b["h"] @ w["router"], -1)))
    return jnp.mean(jnp.square(jnp.einsum("btef,bte->btf", each, gates))) + z_loss


# No sums.


@case(MIXED, SUM, SUM)
def mean_over_what_counts(w, b):
    losses, count = jnp.where(b["counts"], token_losses(w, b), 0), b["counts"].sum()
    return losses.sum() / count.astype(jnp.float32), losses.sum(), count


@case(MIXED, MIXED, MIXED, MIXED)
def guarded_means(w, b):
    counts = b["counts"].astype(jnp.float32)
    total, count = jnp.sum(token_losses(w, b) * counts), counts.sum()
    return (
        total / jnp.maximum(count, 1.0),
        total / jnp.where(count > 0, count, 1.0),
        jnp.where(count > 0, total / count, 0.0),
        total * (1 / (count + 1e-6)),
    )


@case(MIXED, MIXED)
def normalised_weights(w, b):
    weights = b["counts"].astype(jnp.float32)
    return jnp.sum(token_losses(w, b) * (weights / weights.sum())), jnp.mean(token_losses(w, b), where=b["counts"])


@case(MIXED)
def root_of_a_mean_square(w, b):
    return jnp.sqrt(jnp.mean(jnp.square(b["x"] @ w["w"])))


@case(MIXED, MIXED)
def info_nce(w, b):
    scores = normalised(b["x"] @ w["w"]) @ normalised(b["y"]).T / 0.1
    return (
        optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(b["x"]))).mean(),
        -jnp.mean(jnp.diag(jax.nn.log_softmax(scores))),
    )


@case(MIXED, MIXED, MIXED)
def simclr(w, b):
    z = normalised(jnp.tanh(jnp.concatenate([b["x"], b["y"]]) @ w["w"]))
    near = jnp.sum(z * jnp.roll(z, len(z) // 2, 0), -1)
    own = jnp.eye(len(z), dtype=bool)
    scores = z @ z.T / 0.1
    return (
        jnp.mean(jax.nn.logsumexp(jnp.where(own, -jnp.inf, scores), -1) - near),
        jnp.mean(jax.nn.logsumexp(scores - 1e9 * own.astype(jnp.float32), -1) - near),
        jnp.mean(jax.nn.logsumexp(scores.at[jnp.diag_indices(len(z))].set(-1e9), -1) - near),
    )


@case(MIXED)
def sigmoid_pairs(w, b):
    scores = jnp.einsum("id,jd->ij", b["x"] @ w["w"], b["y"])
    return -jnp.mean(jax.nn.log_sigmoid(scores * (2 * jnp.eye(len(scores)) - 1)))


@case(MIXED, MIXED)
def distances_between_rows(w, b):
    x = b["x"] @ w["w"]
    squares = jnp.sum(jnp.square(x), -1)
    return (
        jnp.mean(jnp.abs(x[:, None] - x[None])),
        jnp.mean(jnp.sqrt(jnp.maximum(squares[:, None] + squares[None] - 2 * x @ x.T, 1e-6))),
    )


@case(MIXED, MIXED)
def covariance(w, b):
    """Barlow twins and VICReg."""
    x, y = (v - v.mean(0) for v in (b["x"] @ w["w"], b["y"]))
    correlation = (x / x.std(0)).T @ (y / y.std(0)) / len(x)
    spread = jnp.sqrt(jnp.var(b["x"] @ w["w"], axis=0) + 1e-4)
    return jnp.sum(jnp.square(correlation - jnp.eye(D))), jnp.mean(jax.nn.relu(1 - spread))


@case(MIXED)
def adapted_to_the_batch(w, b):
    """One step of gradient descent first."""
    loss = lambda kernel: jnp.mean(jnp.square(b["x"] @ kernel - b["y"]))
    return loss(w["w"] - 0.1 * jax.grad(loss)(w["w"]))


@case(MIXED, MIXED)
def balance_of_experts(w, b):
    probabilities = jax.nn.softmax(b["h"].reshape(-1, D) @ w["router"])
    picked = jax.nn.one_hot(jnp.argmax(probabilities, -1), E)
    balance = E * jnp.sum(picked.mean(0) * probabilities.mean(0))
    sums = jzero.cross_entropy(b["h"] @ w["head"], b["labels"])
    return balance, sums.total + balance * sums.weight


@case(MIXED)
def attention_across_rows(w, b):
    weights = jax.nn.softmax(b["x"] @ b["x"].T)
    return jnp.sum(jnp.square(weights @ b["y"]))


@case(MIXED)
def variance_over_layers(w, b):
    """Batch statistics in a loop."""

    def layer(x, kernel):
        x = x @ kernel
        return jnp.tanh((x - x.mean(0)) / jnp.sqrt(jnp.var(x, 0) + 1e-5)), None

    return jnp.sum(jax.lax.scan(layer, b["x"], w["layers"])[0])


@case(MIXED)
def mean_of_the_round_before(w, b):
    """The first round of the loop is a sum still."""

    def layer(carry, kernel):
        x, mean = carry
        return (jnp.tanh((x - mean) @ kernel), jnp.mean(x, 0)), None

    return jnp.sum(jax.lax.scan(layer, (b["x"], jnp.zeros(D)), w["layers"])[0][0])


# What is not told, and what must not be called MIXED: these are sums in the end.


@case(UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)
def a_mean_times_what_counts(w, b):
    """Back to the total."""
    losses, counts = token_losses(w, b), b["counts"].astype(jnp.float32)
    count = counts.sum()
    total = jnp.sum(losses * counts)
    penalty = total / count
    return (
        total / count * count,
        jnp.sum(losses * (counts / count)) * count,
        jnp.sum((losses + penalty) * counts),
        jnp.where(count > 0, total / jnp.maximum(count, 1.0), 0.0) * count,
    )


@case(UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)
def guarded_sums(w, b):
    """What a guard never changes."""
    squares = jnp.square(b["x"])
    return (
        jnp.maximum(b["counts"].sum().astype(jnp.float32), 1.0),
        jnp.abs(jnp.sum(squares)),
        jnp.sum(jnp.where(b["counts"].sum() > 0, squares, 0.0)),
        jnp.sum(jnp.maximum(b["x"], -jnp.sum(squares))),
    )


@case(UNKNOWN)
def places_after_all_others_and_back(w, b):
    start = b["lengths"].sum()
    place = b["lengths"] + start
    return jnp.sum(jnp.square(w["table"][place - start]))


@case(UNKNOWN)
def rows_times_rows_and_only_the_diagonal(w, b):
    return jnp.mean(jnp.diag((b["x"] @ w["w"]) @ b["y"].T))


@case(UNKNOWN)
def broadcast_by_mistake(w, b):
    """[B, 1] + [B]: a mean of each, still."""
    return jnp.mean(jnp.square(b["x"]).sum(1, keepdims=True) + jnp.square(b["y"]).sum(1))


@case(UNKNOWN)
def rows_packed_into_one(w, b):
    """A mask keeps each row's tokens to themselves."""
    x, row = b["h"].reshape(-1, D), jnp.repeat(jnp.arange(len(b["x"])), T)
    scores = jnp.where(row[:, None] == row, (x @ w["w"]) @ x.T, -1e9)
    return jnp.sum(jnp.square(jax.nn.softmax(scores) @ x))


@case(UNKNOWN)
def tokens_packed_into_one(w, b):
    """The same, the first token of each row first."""
    x, row = jnp.swapaxes(b["h"], 0, 1).reshape(-1, D), jnp.tile(jnp.arange(len(b["x"])), T)
    scores = jnp.where(row[:, None] == row, (x @ w["w"]) @ x.T, -1e9)
    return jnp.sum(jnp.square(jax.nn.softmax(scores) @ x))


@case(UNKNOWN)
def permuted_by_a_matrix(w, b):
    return jnp.sum(jnp.square(jnp.eye(len(b["x"]))[::-1] @ b["x"]))


@case(UNKNOWN)
def dropless_mixture_of_experts(w, b):
    """Tokens in the order of their experts, each expert's share in one product; then back."""
    x = b["h"].reshape(-1, D)
    expert = jnp.argmax(x @ w["router"], -1)
    order = jnp.argsort(expert)
    sizes = jnp.sum(jax.nn.one_hot(expert, E, dtype=jnp.int32), 0)
    out = jax.lax.ragged_dot(x[order], w["experts"], sizes)
    return jnp.sum(jnp.square(out[jnp.argsort(order)]))


@case(UNKNOWN)
def experts_of_a_capacity(w, b):
    """Places in an expert's queue come of all tokens before."""
    x = b["h"].reshape(-1, D)
    picked = jax.nn.one_hot(jnp.argmax(x @ w["router"], -1), E)
    place = jnp.sum(jnp.cumsum(picked, 0) * picked, -1).astype(jnp.int32)
    queue = jnp.einsum("ne,nc->nec", picked, jax.nn.one_hot(place, len(x)))
    out = jnp.tanh(jnp.einsum("ecd,edf->ecf", jnp.einsum("nec,nd->ecd", queue, x), w["experts"]))
    return jnp.sum(jnp.square(jnp.einsum("nec,ecf->nf", queue, out)))


@case(UNKNOWN, SUM)
def packed_results(w, b):
    """One array for all results: what of it is mixed is not what is taken."""
    total, count = jnp.sum(token_losses(w, b)), b["counts"].sum().astype(jnp.float32)
    return jnp.stack([total / count, total])[1], jnp.stack([total, count])[1]


@case(UNKNOWN)
def statistics_that_a_flag_turns_off(w, b):
    mean = jnp.where(w["count"] > 100, jnp.mean(b["x"], 0), w["mean"])
    return jnp.sum(jnp.square(b["x"] - mean))


@case(UNKNOWN)
def last_token(w, b):
    return jnp.sum(jnp.square(b["h"][jnp.arange(len(b["x"])), b["lengths"] - 1]))


@pytest.mark.parametrize("name", CASES)
def test_what_is_told(name):
    assert told(CASES[name].loss, WEIGHTS, BATCH) == [*CASES[name].expected]


@pytest.fixture(scope="module")
def exchanged():
    """The results of each loss on two batches, and on two of their halves exchanged."""
    halves = [[batch_of(np.random.default_rng(seed), B // 2) for seed in pair] for pair in ((1, 2), (3, 4))]
    (a, b), (c, d) = halves
    run = jax.jit(lambda w, batch: {name: jax.tree.leaves(case.loss(w, batch)) for name, case in CASES.items()})
    join = lambda one, other: jax.tree.map(lambda *parts: np.concatenate(parts), one, other)
    return jax.device_get([run(WEIGHTS, join(*pair)) for pair in ((a, b), (c, d), (a, d), (c, b))])


@pytest.mark.parametrize("name", CASES)
def test_what_is_told_is_so(name, exchanged):
    """A sum over rows, and nothing else, is the same in all when batches exchange rows. So is here what is not told:
    MIXED would be wrong."""
    for expected, *results in zip(CASES[name].expected, *(part[name] for part in exchanged), strict=True):
        rtol = 1e-2 if results[0].dtype == jnp.bfloat16 else 1e-5
        one, other, *mixed = (float(x) for x in results)
        same = abs(one + other - sum(mixed)) <= rtol * (1 + abs(one) + abs(other))
        assert same == (expected is not MIXED), (expected, results)
        assert (len({one, other, *mixed}) == 1) == (expected is INDEPENDENT)


# Models, as an engine runs them.


def told_of(model: Any, loss: Any, batch: Any, **config: Any) -> dict[str, Effect]:
    """Of the total and the weight of a loss, its metrics and the model's new state, by their names."""
    made = prepare(model, loss, optax.sgd(0.1), config, jax.devices()[:2])
    params = {path: jax.ShapeDtypeStruct(leaf.stored_shape, leaf.dtype) for path, leaf in made.plan.params.items()}
    weights = (params, dict(made.model.model_state), jax.ShapeDtypeStruct((2,), jnp.int32))
    loss_fn = make_loss_fn(made.model, loss, made.points, train=True)

    def run(weights, batch):
        params, state, fold = weights
        sums, state = loss_fn(params, {}, state, batch, fold)
        return {"total": sums.loss.total, "weight": sums.loss.weight, **state, **sums.extras}

    effects = told(run, weights, batch)
    names = jax.tree.leaves_with_path(jax.eval_shape(run, weights, batch))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): e for (path, _), e in zip(names, effects, strict=True)
    }


TOKENS = toys.token_batch(6, 0)
SQUARES = toys.square_batch(6, 0)


def decoder(**fields: Any) -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return build_model(ModelConfig(**{**sizes, **fields}), toys.VOCAB)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("build", [toys.scanned_decoder, toys.listed_decoder])
def test_toys_of_tokens_are_told(build, precision):
    found = told_of(build, toys.token_loss, TOKENS, precision=precision)
    assert {found.pop("total"), found.pop("weight")} == {SUM}
    assert set(found.values()) <= {INDEPENDENT}


def test_a_scalar_loss_weighs_its_rows():
    found = told_of(toys.mlp, toys.square_loss, SQUARES)
    assert found == {"total": SUM, "weight": INDEPENDENT}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"scan_layers": False, "remat": "none"},
        {"remat": "dots", "use_qk_norm": True, "sliding_window": 3},
        {"family": "gpt2", "num_key_value_heads": 4},
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_the_built_in_models_are_told(fields, packed):
    def loss(model, batch):
        shared = {name: batch[name] for name in ("positions", "segments") if packed}
        return toys.token_loss(lambda tokens: model(tokens, **shared), batch)

    places = np.tile(np.arange(toys.LENGTH, dtype=np.int32), (6, 1))
    batch = {**TOKENS, "positions": places, "segments": places // 4}
    found = told_of(decoder(**fields), loss, batch if packed else TOKENS)
    assert {found["total"], found["weight"]} == {SUM}


def test_attention_of_cudnn_is_told(monkeypatch):
    """Traced only: nothing public traces it where there is no GPU."""
    for name in ("check_cudnn_version", "check_compute_capability"):
        monkeypatch.setattr(f"jax._src.cudnn.fused_attention_stablehlo.{name}", lambda *_, **__: 91000)

    def loss(weights, batch):
        q, k, v = ((batch["h"].astype(jnp.bfloat16) @ w).reshape(-1, T, 1, D) for w in weights)
        same = (batch["segments"][:, :, None] == batch["segments"][:, None])[:, None]
        out = jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True, implementation="cudnn")
        return jnp.sum(jnp.square(out))

    assert told(loss, jnp.ones((3, D, D), jnp.bfloat16), BATCH) == [SUM]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("nano-moe-jax", MIXED),  # its router's balance
        ("jax-resnet", MIXED),  # BatchNorm
        ("mamba2-jax", SUM),
        ("jraphx GCN", UNKNOWN),  # messages along edges, whose nodes are given by number
        ("jraphx GAT", UNKNOWN),
        ("long-range-models", SUM),
    ],
)
def test_models_of_others_are_told(name, total):
    """pip install -e '.[dev,real-models]'"""
    with jax.numpy_dtype_promotion("standard"):
        case = test_real_models.CASES[name]()
        found = told_of(case.model, case.loss, case.batch(np.random.default_rng(0)))
    assert (found["total"], found["weight"]) == (total, SUM)


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear, self.norm = nnx.Linear(7, 5, rngs=rngs), nnx.BatchNorm(5, rngs=rngs)
        self.dropout, self.calls = nnx.Dropout(0.1, rngs=rngs), nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.dropout(nnx.relu(self.norm(self.linear(x))))


class LinenNormed(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(5)(x)))


def frozen(rngs: nnx.Rngs) -> Normed:
    model = Normed(rngs)
    model.norm.set_attributes(use_running_average=True)
    return model


def linen_loss(train: bool):
    return lambda model, batch: toys.square_loss(lambda x: model(x, train=train), batch)


LINEN = jzero.Linen(LinenNormed(), inputs=(SQUARES["x"],), kwargs={"train": False})


@pytest.mark.parametrize(
    ("model", "loss", "statistics", "total"),
    [
        (lambda rngs: Normed(rngs), toys.square_loss, ("norm/mean", "norm/var"), MIXED),
        (frozen, toys.square_loss, (), SUM),
        (LINEN, linen_loss(True), ("batch_stats/BatchNorm_0/mean", "batch_stats/BatchNorm_0/var"), MIXED),
        (LINEN, linen_loss(False), (), SUM),
    ],
    ids=["nnx", "nnx-frozen", "linen", "linen-frozen"],
)
def test_batch_statistics_are_told(model, loss, statistics, total):
    found = told_of(model, loss, SQUARES)
    assert found.pop("total") is total
    assert {name for name, effect in found.items() if effect is not INDEPENDENT} == set(statistics)


def test_metrics_are_told_by_themselves():
    """They may be anything; the loss beside them is what it is."""

    def loss(model, batch):
        errors = jnp.square(model(batch["x"]) - batch["y"])
        return errors.mean(), {"worst": errors.max(), "spread": errors.std(), "part": errors[:, 0].mean()}

    found = told_of(toys.mlp, loss, SQUARES)
    assert (found["total"], found["part/total"]) == (SUM, SUM)
    assert (found["worst/total"], found["spread/total"]) == (UNKNOWN, MIXED)


def test_where_it_is_mixed_is_told():
    def loss(weights, batch):
        scores = batch["x"] @ batch["y"].T  # here
        return jax.nn.logsumexp(scores / 0.1, axis=-1).mean()

    (flow,) = batch_flow(jax.make_jaxpr(loss)(WEIGHTS, BATCH), [False] * len(WEIGHTS) + [True] * len(BATCH))
    line = loss.__code__.co_firstlineno + 1
    assert flow.effect is MIXED
    assert flow.where.startswith("dot_general at ")
    assert f"test_mixing.py:{line}" in flow.where
    assert "loss" in flow.where


@pytest.mark.parametrize("rows", [1, 2])
def test_of_a_single_row_nothing_is_told(rows):
    batch = {"x": BATCH["x"][:rows]}
    loss = lambda weights, batch: (jnp.mean(batch["x"] @ weights["w"]), jnp.sum(weights["w"]))
    assert told(loss, {"w": WEIGHTS["w"]}, batch) == [UNKNOWN if rows == 1 else SUM, INDEPENDENT]


def test_rounded_sums_are_none():
    """Integers that come of all rows lead anywhere."""

    def fn(weights, batch):
        count = batch["counts"].sum()
        return jnp.sum(batch["x"]).astype(jnp.int32), count // 2, count * count, count > 0, count + 1

    assert told(fn, WEIGHTS, BATCH) == [*[UNKNOWN] * 4, SHIFTED]


def test_rows_in_two_orders_are_not_paired():
    def fn(weights, batch):
        first, second = jnp.concatenate([batch["x"], batch["x"]]), jnp.repeat(batch["y"], 2, axis=0)
        return first * second, jnp.einsum("nd,ne->de", first, second), jnp.einsum("nd,nd->n", first, second)

    assert told(fn, WEIGHTS, BATCH) == [UNKNOWN] * 3


def test_rows_that_come_out_are_rows():
    def fn(weights, batch):
        h = jnp.swapaxes(batch["h"], 0, 1)
        return h, h - h.mean(1, keepdims=True), batch["tokens"] - batch["tokens"].max(), batch["x"][::-1]

    assert told(fn, WEIGHTS, BATCH) == [ROWS, MIXED, UNKNOWN, UNKNOWN]
