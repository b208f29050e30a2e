"""One step gives the same numbers wherever they lie: norms, clipping, weighted means, skipped steps, dtypes."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from flax import nnx

import jzero
from jzero.blueprint import prepare
from jzero.config import ModelConfig, make_config
from jzero.errors import ModelError, UserError
from jzero.jaxprs import equations
from jzero.leaf import map_leaves
from jzero.models import build_model
from jzero.schedules import make_schedule
from jzero.state import plan_tree

ROWS = 24
RNG = np.random.default_rng(0)
PLACES = [(0, 1), (0, 8), (1, 2), (2, 3), (3, 3), (3, 8)]  # stage, devices
places = pytest.mark.parametrize(("stage", "devices"), PLACES)


def start(
    model: Any, loss: Any, optimizer: Any, stage: int = 3, devices: int = 8, micro_batches: int = 1, /, **config: Any
) -> jzero.Engine:
    """An engine on the first devices, every array split that can be; no clipping unless asked for."""
    zero = {"stage": stage, "min_shard_elements": 0} | config.pop("zero", {})
    train = {"global_batch_size": ROWS, "accumulation_steps": micro_batches}
    config = {"zero": zero, "train": train, "optimizer": {"clip_norm": None}} | config
    return jzero.initialize(model, loss, optimizer, config, jax.devices()[:devices])


def host(engine: jzero.Engine) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in engine.arrays().items()}


def assert_same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


COUNTERS = ("step", "skipped", "skipped_in_a_row")


def but_counters(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array for name, array in arrays.items() if name not in COUNTERS}


# The gradient norm and clipping, in closed form: the loss is linear, so the gradient is the batch.


class Weights(nnx.Module):
    """A matrix, a vector and a number; nothing but the number is whole."""

    def __init__(self, rngs: nnx.Rngs):
        self.matrix = nnx.Param(jnp.ones((5, 7)))
        self.vector = nnx.Param(jnp.ones((9,)))
        self.number = nnx.Param(jnp.ones(()))


def linear_loss(model: Weights, batch: Any) -> jax.Array:
    per_row = jnp.einsum("rij,ij->r", batch["matrix"], model.matrix[...])
    per_row += batch["vector"] @ model.vector + batch["number"] * model.number
    return jnp.mean(per_row)


GRADIENTS = {
    "matrix": RNG.normal(size=(ROWS, 5, 7)).astype(np.float32),
    "vector": RNG.normal(size=(ROWS, 9)).astype(np.float32),
    "number": RNG.normal(size=ROWS).astype(np.float32),
}
MEANS = {name: rows.mean(0, dtype=np.float64) for name, rows in GRADIENTS.items()}
NORM = float(np.sqrt(sum(np.sum(mean**2) for mean in MEANS.values())))


@pytest.mark.parametrize(
    ("stage", "devices", "micro_batches", "clip_norm"),
    [
        (0, 1, 1, 0.5 * NORM),
        (0, 1, 3, 0.5 * NORM),
        (0, 8, 1, 0.5 * NORM),
        (1, 2, 3, 2.0 * NORM),
        (2, 8, 3, 0.5 * NORM),
        (3, 2, 1, 2.0 * NORM),
        (3, 8, 1, 0.5 * NORM),
        (3, 8, 3, None),
    ],
)
def test_norm_is_global_and_clips_the_mean_once(stage, devices, micro_batches, clip_norm):
    engine = start(
        lambda rngs: Weights(rngs),
        linear_loss,
        optax.sgd(1.0),
        stage,
        devices,
        micro_batches,
        optimizer={"clip_norm": clip_norm},
    )
    assert float(engine.step(GRADIENTS)["grad_norm"]) == pytest.approx(NORM, rel=1e-6)
    factor = min(1.0, (clip_norm or NORM) / NORM)
    for name, mean in MEANS.items():
        np.testing.assert_allclose(engine.params()[name], 1 - factor * mean, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 1, "group": "node"},
        {"stage": 2, "group": "node"},
        {"stage": 3, "group": "node"},
        {"stage": 3, "group": "node", "optimizer_group": "all"},
        {"stage": 3, "group": "all"},
    ],
    ids=lambda zero: " ".join(map(str, zero.values())),
)
def test_replica_groups_with_optima_of_their_own_train_on_the_whole_batch(zero):
    """Linear regression; the rows of the first replica group want other weights than those of the second."""
    x = RNG.normal(size=(ROWS, 5)).astype(np.float32)
    optima = np.where(np.arange(ROWS)[:, None] < ROWS // 2, 1.0, -2.0)
    y = (x * optima).sum(1, keepdims=True).astype(np.float32)
    start_at = np.full((5, 1), 0.5, np.float32)

    def stepped(rows: slice) -> np.ndarray:
        error = x[rows] @ start_at - y[rows]
        return start_at - 0.1 * 2 * x[rows].T @ error / len(error)

    engine = start(
        lambda rngs: nnx.Linear(5, 1, use_bias=False, kernel_init=nnx.initializers.constant(0.5), rngs=rngs),
        lambda model, batch: jnp.mean(jnp.square(model(batch["x"]) - batch["y"])),
        optax.sgd(0.1),
        zero=zero,
        mesh={"replica": 2, "data": 4},
    )
    engine.step({"x": x, "y": y})
    halves = [stepped(slice(0, ROWS // 2)), stepped(slice(ROWS // 2, ROWS))]
    assert min(np.abs(half - stepped(slice(None))).max() for half in halves) > 0.1
    np.testing.assert_allclose(engine.params()["kernel"], stepped(slice(None)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_tensor_axis_changes_neither_norm_nor_clipping(stage):
    """Elements that lie on two tensor shards, or in copies on both, count once."""
    batch = toys.square_batch(ROWS, 0)
    build = lambda rngs: toys.Megatron(rngs)
    one = start(build, toys.square_loss, optax.sgd(1.0), 0, 1)
    before = one.params()
    norm = float(one.step(batch)["grad_norm"])
    moved = {path: value - before[path] for path, value in one.params().items()}
    for clip_norm, factor in ((0.25 * norm, 0.25), (4 * norm, 1.0)):
        engine = start(
            build,
            toys.square_loss,
            optax.sgd(1.0),
            stage,
            mesh={"data": 4, "tensor": 2},
            optimizer={"clip_norm": clip_norm},
        )
        kernel = engine.state.params["up/kernel"]
        assert kernel.shape == (8, 10)
        assert kernel.addressable_shards[0].data.shape == (2 if stage == 3 else 8, 5)
        assert_same(engine.params(), before)
        assert float(engine.step(batch)["grad_norm"]) == pytest.approx(norm, rel=1e-6)
        for path, value in engine.params().items():
            np.testing.assert_allclose(value - before[path], factor * moved[path], rtol=1e-5, atol=1e-6, err_msg=path)


# Weight decay, as the config says it: no gradient, so decay alone moves what it moves.


class Shifts(nnx.Module):
    """Stacks of matrices and of vectors, one of which looks like a matrix by shape and name."""

    def __init__(self, rngs: nnx.Rngs):
        self.stack = nnx.vmap(Shift)(rngs.split(3))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jnp.ones((*tokens.shape, 5)) * tokens[..., None].astype(jnp.float32)
        return nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.stack, x)


class Shift(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(5, 5, rngs=rngs)
        self.shift = nnx.Param(jnp.ones(5))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.linear(x) + self.shift)


SMALL_LLAMA = {"hidden_size": 24, "intermediate_size": 35, "num_hidden_layers": 2, "num_attention_heads": 3}
DECAYING = {
    "shifts": (lambda rngs: Shifts(rngs), {"stack/shift", "stack/linear/bias"}),
    "scanned": (
        toys.scanned_decoder,
        {"norm/scale", "log_scale", "blocks/gain", "blocks/up/bias", "blocks/norm_1/scale"},
    ),
    "llama": (
        build_model(ModelConfig(**SMALL_LLAMA), toys.VOCAB),
        {"norm/scale", "layers/input_layernorm/scale", "layers/post_attention_layernorm/scale"},
    ),
}


@pytest.mark.parametrize("name", DECAYING)
def test_weight_decay_halves_kernels_and_embeddings_and_nothing_else(name):
    build, kept = DECAYING[name]
    loss = lambda model, batch: 0 * jnp.mean(jnp.square(model(batch["tokens"])))
    fields = {"name": "sgd", "learning_rate": 1, "momentum": 0, "schedule": "constant", "weight_decay": 0.5}
    engine = start(build, loss, None, 3, 8, optimizer=fields)
    # Ones and zeros would hide what moves by a multiple of itself, or not.
    values = {
        path: leaf.pad(np.random.default_rng(1).normal(size=leaf.shape).astype(np.float32) + 2)
        for path, leaf in engine.plan.params.items()
    }
    arrays = engine.arrays()
    weights = {
        f"params/{path}": jax.device_put(value, arrays[f"params/{path}"].sharding, may_alias=False)
        for path, value in values.items()
    }
    engine.load(arrays | weights)
    before = engine.params()
    metrics = engine.step(toys.token_batch(ROWS, 0))
    assert (float(metrics["grad_norm"]), int(metrics["skipped"])) == (0, 0)
    decayed = {path for path in before if path.endswith(("kernel", "embedding"))}
    assert kept <= before.keys() - decayed
    for path, value in engine.params().items():
        expected = before[path] / 2 if path in decayed else before[path]
        assert value.tobytes() == expected.tobytes(), path


# Weighted losses: two rows of 11 and 101 counted tokens, and others of none, however they are cut.


class Tokens(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (11, 5)))  # nnx.Embed would cast what it reads
        self.head = nnx.Linear(5, 11, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.head(self.embed[tokens])


TOKENS = {
    "tokens": RNG.integers(0, 11, size=(ROWS, 101)).astype(np.int32),
    "labels": RNG.integers(0, 11, size=(ROWS, 101)).astype(np.int32),
}
COUNTED = np.zeros((ROWS, 101), bool)
COUNTED[0, :11] = COUNTED[1, :] = True
TOKENS["labels"] = np.where(COUNTED, TOKENS["labels"], -1)


def token_loss(model: Tokens, batch: Any) -> tuple[jzero.WeightedLoss, dict[str, Any]]:
    """Cross-entropy, with three metrics: a weighted mean over tokens, one over rows, and a scalar."""
    logits, labels = model(batch["tokens"]), batch["labels"]
    counted = labels >= 0
    right = jnp.where(counted, logits.argmax(-1) == labels, False)
    loss = jzero.cross_entropy(logits, labels)
    return loss, {
        "accuracy": jzero.WeightedLoss(right.sum(), counted.sum()),
        "longest": jzero.WeightedLoss(counted.sum(1).max(), 1),
        "mean_accuracy": right.sum() / jnp.maximum(counted.sum(), 1),
    }


@functools.cache
def token_reference() -> tuple[float, dict[str, np.ndarray], float]:
    """Loss, parameters after one step of SGD and accuracy, by plain JAX over the 112 tokens at once."""
    model = Tokens(nnx.Rngs(jax.random.key(0)))
    graphdef, params = nnx.split(model)

    def loss(params):
        logits = nnx.merge(graphdef, params)(TOKENS["tokens"])[COUNTED]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS["labels"][COUNTED])
        return losses.mean(), (logits.argmax(-1) == TOKENS["labels"][COUNTED]).mean()

    (value, accuracy), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    stepped = nnx.to_flat_state(jax.tree.map(lambda p, g: p - g, params, gradients))
    return float(value), {"/".join(path): np.asarray(v.get_raw_value()) for path, v in stepped}, float(accuracy)


@pytest.mark.parametrize(
    ("stage", "devices", "micro_batches"),
    [(0, 1, 3), (0, 2, 1), (1, 2, 12), (2, 8, 3), (3, 3, 8), (3, 8, 1)],
)
def test_every_token_weighs_the_same_however_the_batch_is_cut(stage, devices, micro_batches):
    loss, params, accuracy = token_reference()
    engine = start(lambda rngs: Tokens(rngs), token_loss, optax.sgd(1.0), stage, devices, micro_batches)
    evaluated = engine.evaluate(TOKENS)
    metrics = engine.step(TOKENS)
    for found in (evaluated, metrics):
        assert float(found["loss"]) == pytest.approx(loss, rel=1e-6)
        assert float(found["weight"]) == 112
        assert float(found["accuracy"]) == pytest.approx(accuracy, rel=1e-6)
        assert float(found["mean_accuracy"]) == pytest.approx(accuracy, rel=1e-6)
        longest = [COUNTED[j::micro_batches].sum(1).max() for j in range(micro_batches)]
        assert float(found["longest"]) == pytest.approx(np.mean(longest))
    for path, value in params.items():
        np.testing.assert_allclose(engine.params()[path], value, atol=1e-6, rtol=1e-6, err_msg=path)


def test_two_rows_alone_in_one_micro_batch_or_two():
    """The mean of their means is another number."""
    loss, params, _ = token_reference()
    two = {name: rows[:2] for name, rows in TOKENS.items()}
    engines = [
        start(lambda rngs: Tokens(rngs), token_loss, optax.sgd(1.0), 3, devices, train={"micro_batch_size": micro})
        for devices, micro in ((1, 2), (1, 1), (2, 1))
    ]
    first = engines[0].evaluate({name: rows[[0, 0]] for name, rows in TOKENS.items()})["loss"]
    second = engines[0].evaluate({name: rows[[1, 1]] for name, rows in TOKENS.items()})["loss"]
    assert abs((first + second) / 2 - loss) > 0.01
    for engine in engines:
        assert float(engine.step(two)["loss"]) == pytest.approx(loss, rel=1e-6)
        for path, value in params.items():
            np.testing.assert_allclose(engine.params()[path], value, atol=1e-6, rtol=1e-6, err_msg=path)


def test_scalar_loss_is_a_mean_over_rows():
    losses = []
    for devices, micro_batches in ((1, 1), (8, 3)):
        engine = start(lambda rngs: Weights(rngs), linear_loss, optax.sgd(1.0), 3, devices, micro_batches)
        metrics = engine.step(GRADIENTS)
        assert float(metrics["weight"]) == ROWS
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, sum(mean.sum() for mean in MEANS.values()), rtol=1e-6)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_batch_that_weighs_nothing_changes_nothing(micro_batches):
    engine = start(lambda rngs: Tokens(rngs), token_loss, optax.adam(0.1), 3, 8, micro_batches)
    engine.step(TOKENS)
    before = host(engine)
    metrics = engine.step(TOKENS | {"labels": np.full_like(TOKENS["labels"], -1)})
    assert {name: float(metrics[name]) for name in ("loss", "weight", "grad_norm", "accuracy", "mean_accuracy")} == {
        "loss": 0, "weight": 0, "grad_norm": 0, "accuracy": 0, "mean_accuracy": 0
    }  # fmt: skip
    assert (int(metrics["skipped"]), int(metrics["skipped_in_a_row"])) == (1, 0)
    assert_same(but_counters(host(engine)), but_counters(before))
    assert int(engine.step(TOKENS)["skipped"]) == 1
    assert not np.array_equal(engine.params()["head/kernel"], before["params/head/kernel"][:5, :11])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda loss: (loss, {"loss": loss}), "extra metric 'loss' has the name of one of jzero's own"),
        (lambda loss: (loss, {"grad_norm/w": loss}), "extra metric 'grad_norm/w' has the name of one of jzero's own"),
        (lambda loss: (loss, {"a": loss, "skipped": loss}), "extra metric 'skipped' has the name"),
        (lambda loss: (loss, {"each": jnp.zeros(3)}), r"each has shape \(3,\): return a scalar"),
        (
            lambda loss: (loss, {"each": jzero.WeightedLoss(jnp.zeros(3), jnp.ones(3))}),
            r"each.total has shape \(3,\): return a scalar",
        ),
        (lambda loss: (loss, {"each": None}), "each is a NoneType: return a scalar"),
        (lambda loss: (loss, [loss]), r"the loss returned \(loss, list\); the second must be a dict of metrics"),
        (lambda loss: (loss, loss), r"the loss returned \(loss, .*\); the second must be a dict of metrics"),
        (lambda loss: loss + jnp.zeros(3), r"loss has shape \(3,\): return a scalar .* or jzero.WeightedLoss"),
        (lambda loss: jzero.WeightedLoss(loss + jnp.zeros(3), loss), r"loss.total has shape \(3,\)"),
        (lambda loss: jzero.WeightedLoss(loss, jnp.ones(3)), r"loss.weight has shape \(3,\)"),
        (lambda loss: None, "loss is a NoneType: return a scalar"),
        (lambda loss: {"loss": loss}, "loss is a dict: return a scalar"),
    ],
)
def test_results_a_loss_may_not_have(result, message):
    engine = start(lambda rngs: Weights(rngs), lambda model, batch: result(linear_loss(model, batch)), optax.sgd(1.0))
    for call in (engine.step, engine.evaluate):
        with pytest.raises(ModelError, match=f"^{message}"):
            call(GRADIENTS)


# Steps that are skipped.


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(5, dtype=jnp.float32, rngs=rngs)
        self.linear = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(self.norm(x).astype(self.linear.kernel.dtype))


def sometimes_broken_loss(model: Normed, batch: Any) -> jax.Array:
    y = model(batch["x"]).astype(jnp.float32)
    # Finite, but where `broken` is 1 its gradient is 0 / 0.
    fault = jnp.sqrt(1 - batch["broken"] + 0 * y.sum(-1))
    return jnp.mean(jnp.square(y - 1).sum(-1) + fault)


GOOD = {"x": RNG.normal(size=(ROWS, 5)).astype(np.float32), "broken": np.zeros(ROWS, np.float32)}
ONE_ROW = np.arange(ROWS) == 5  # on one device of several
BAD = {
    "loss": GOOD | {"x": np.where(ONE_ROW[:, None], np.float32(np.inf), GOOD["x"])},
    "gradient": GOOD | {"broken": ONE_ROW.astype(np.float32)},
}


@pytest.mark.parametrize(
    ("stage", "devices", "micro_batches", "precision"),
    [(0, 1, 1, "fp32"), (1, 2, 1, "fp32"), (2, 3, 8, "fp32"), (3, 8, 1, "fp32"), (3, 3, 1, "bf16")],
)
def test_non_finite_step_changes_nothing_anywhere(stage, devices, micro_batches, precision):
    optimizer = {"schedule": "linear", "learning_rate": 0.1, "weight_decay": 0.1}
    engine = start(
        lambda rngs: Normed(rngs),
        sometimes_broken_loss,
        None,
        stage,
        devices,
        micro_batches,
        optimizer=optimizer,
        precision=precision,
    )
    schedule = make_schedule(engine.config.optimizer, 300)
    engine.step(GOOD)
    before = host(engine)
    expected = engine.step(GOOD)  # what the third step would have been
    after = host(engine)
    engine.load({name: jax.device_put(before[name], array.sharding) for name, array in engine.arrays().items()})
    assert_same(host(engine), before)

    for count, kind in enumerate(["loss", "gradient", "gradient"], 1):
        metrics = engine.step(BAD[kind])
        assert np.isfinite(metrics["loss"]) == (kind == "gradient")
        assert not np.isfinite(metrics["grad_norm"])
        assert (int(metrics["skipped"]), int(metrics["skipped_in_a_row"])) == (count, count)
        assert float(metrics["learning_rate"]) == float(schedule(1))
        assert_same(but_counters(host(engine)), but_counters(before))
    assert int(engine.state.step) == 4

    metrics = engine.step(GOOD)
    assert (int(metrics["skipped"]), int(metrics["skipped_in_a_row"])) == (3, 0)
    assert float(metrics["learning_rate"]) == float(expected["learning_rate"]) == float(schedule(1))
    assert float(metrics["loss"]) == float(expected["loss"])
    assert_same(but_counters(host(engine)), but_counters(after))
    assert not np.array_equal(after["model_state/norm/mean"], before["model_state/norm/mean"])


class TwelveLayers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(5, 5, rngs=rngs) for _ in range(12)])


@pytest.mark.parametrize("broken", ["layers/0/bias", "layers/2/kernel", "layers/11/kernel"])
def test_the_first_leaf_whose_gradient_is_not_finite_is_told(broken):
    """By its place in the plan: twelve listed layers stand in another order there than their names sorted."""

    def loss(model, batch):
        layers = enumerate(model.layers)
        sums = {f"layers/{i}/{name}": getattr(layer, name).sum() for i, layer in layers for name in ("kernel", "bias")}
        return sum(sums.values()) + jnp.sqrt(batch[0] + 0 * sums[broken])  # at 0 its gradient is 0 * inf

    engine = start(lambda rngs: TwelveLayers(rngs), loss, None)
    for value, told in ((1.0, None), (0.0, broken)):
        number = int(engine.step(np.full(ROWS, value, np.float32))["non_finite_leaf"])
        assert (list(engine.plan.gradients)[number] if number >= 0 else None) == told


@pytest.mark.parametrize("weight", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_skips_the_step_and_shows(weight):
    loss = lambda model, batch: jzero.WeightedLoss(model.number.sum() * batch.sum(), batch.sum())
    engine = start(lambda rngs: Weights(rngs), loss, None)
    before = host(engine)
    metrics = engine.step(np.where(ONE_ROW, np.float32(weight), np.ones(ROWS, np.float32)))
    assert (int(metrics["skipped"]), int(metrics["skipped_in_a_row"])) == (1, 1)
    assert not (np.isfinite(metrics["loss"]) and np.isfinite(metrics["weight"]))
    assert_same(but_counters(host(engine)), but_counters(before))


@pytest.mark.parametrize(("stage", "devices"), [(3, 3), (0, 1)])
def test_skips_are_counted_on_from_a_checkpoint(stage, devices, tmp_path):
    """So the schedule, which leaves skipped steps out, goes on right too."""
    fields = {"schedule": "linear", "learning_rate": 0.5, "decay_steps": 10}
    build = lambda rngs: Normed(rngs)
    begun = start(build, sometimes_broken_loss, None, optimizer=fields)
    for batch in (GOOD, BAD["loss"], GOOD, BAD["gradient"]):
        begun.step(batch)
    begun.save(tmp_path)
    engine = start(build, sometimes_broken_loss, None, stage, devices, optimizer=fields)
    engine.restore(tmp_path)
    assert (int(engine.state.skipped), int(engine.state.skipped_in_a_row), int(engine.state.step)) == (2, 1, 4)
    schedule = make_schedule(engine.config.optimizer, 300)
    for count, (batch, skipped, in_a_row) in enumerate([(BAD["loss"], 3, 2), (GOOD, 3, 0), (GOOD, 3, 0)]):
        metrics = engine.step(batch)
        assert (int(metrics["skipped"]), int(metrics["skipped_in_a_row"])) == (skipped, in_a_row)
        assert float(metrics["learning_rate"]) == float(schedule(2 + max(0, count - 1)))


def test_learning_rate_metric_is_the_one_applied():
    """Of the schedule at the number of steps applied before, skipped ones not counted."""
    fields = {"name": "sgd", "momentum": 0, "schedule": "cosine", "learning_rate": 0.5, "warmup_steps": 2}
    engine = start(lambda rngs: Weights(rngs), linear_loss, None, optimizer={"clip_norm": None, **fields})
    broken = GRADIENTS | {"number": np.full(ROWS, np.nan, np.float32)}
    schedule = make_schedule(make_config({"optimizer": fields}).optimizer, 300)
    number, seen = 1.0, []
    for batch in (GRADIENTS, GRADIENTS, broken, GRADIENTS, GRADIENTS):
        metrics = engine.step(batch)
        moved = number - float(engine.params()["number"])
        number -= moved
        seen.append(float(metrics["learning_rate"]))
        wanted = 0.0 if batch is broken else seen[-1] * MEANS["number"]
        assert moved == pytest.approx(wanted, rel=1e-4, abs=1e-7)
    np.testing.assert_allclose(seen, [schedule(count) for count in (0, 1, 2, 2, 3)], rtol=1e-6)
    assert seen[0] == 0.0
    assert len(set(seen)) == 4
    own = start(lambda rngs: Weights(rngs), linear_loss, optax.sgd(0.5))
    assert "learning_rate" not in own.step(GRADIENTS)


# Precision.


class Ones(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.ones((5, 7)))


def sum_of_weights(model: Ones, batch: Any) -> jzero.WeightedLoss:
    return jzero.WeightedLoss(model.w.sum(), jnp.float32(1))


@places
def test_small_updates_add_up_in_the_master(stage, devices):
    """A hundred steps of 1e-3 down from 1.0, each of them less than bfloat16 can tell."""
    engine = start(lambda rngs: Ones(rngs), sum_of_weights, optax.sgd(1e-3), stage, devices, precision="bf16")
    for _ in range(100):
        engine.step(np.zeros(ROWS, np.float32))
    np.testing.assert_allclose(engine.params()["w"], 0.9, rtol=1e-5)
    assert engine.state.master["w"].dtype == jnp.float32
    assert engine.state.params["w"].dtype == jnp.bfloat16
    copy = engine.apply(lambda model: model.w[...])
    assert copy.dtype == jnp.bfloat16
    np.testing.assert_array_equal(copy, engine.params()["w"].astype(jnp.bfloat16))
    assert float(copy[0, 0]) == 0.8984375  # the bfloat16 nearest to 0.9


@pytest.mark.parametrize(("master", "told"), [(None, "null"), ("bfloat16", "bfloat16")])
def test_without_a_wider_master_small_updates_are_lost(master, told):
    precision = {"preset": "bf16", "master": master}
    with pytest.warns(UserWarning, match=f"precision.master = {told} with precision.params = bfloat16"):
        engine = start(lambda rngs: Ones(rngs), sum_of_weights, optax.sgd(1e-3), precision=precision)
    for _ in range(100):
        metrics = engine.step(np.zeros(ROWS, np.float32))
    assert float(metrics["grad_norm"]) == pytest.approx(np.sqrt(35), rel=1e-2)
    assert engine.state.master == {}
    np.testing.assert_array_equal(engine.params()["w"], np.ones((5, 7)))


F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


@pytest.mark.filterwarnings("ignore:precision.master = null")
@pytest.mark.parametrize(
    ("precision", "at_rest", "dots", "updated", "summed"),
    [
        ("fp32", F32, "f32", F32, F32),
        ("bf16", BF16, "bf16", F32, F32),
        ({"preset": "bf16", "accumulate": "bfloat16"}, BF16, "bf16", F32, BF16),
        ({"preset": "bf16", "compute": "float32"}, BF16, "f32", F32, F32),
        ({"preset": "bf16", "params": "float32"}, F32, "bf16", F32, F32),
        ({"preset": "fp32", "compute": "bfloat16"}, F32, "bf16", F32, F32),
        ({"preset": "bf16", "master": None}, BF16, "bf16", BF16, F32),
        ({"preset": "fp32", "params": "bfloat16", "master": "float32"}, BF16, "f32", F32, F32),
    ],
    ids=str,
)
def test_each_field_of_precision_acts(precision, at_rest, dots, updated, summed):
    engine = start(lambda rngs: Tokens(rngs), token_loss, optax.adam(0.1), 3, 8, 3, precision=precision)
    step = engine.lower_step(TOKENS)
    after, _ = step.out_info
    for state in (engine.state, after):
        assert {array.dtype for array in state.params.values()} == {at_rest}
        assert {array.dtype for array in (state.master or state.params).values()} == {updated}
        assert bool(state.master) == (at_rest != updated)
        assert {array.dtype for array in jax.tree.leaves(state.opt_state) if array.shape} == {updated}
    assert {leaf.dtype for leaf in engine.plan.gradients.values()} == {summed}
    operands = re.findall(r"dot_general.*: \(tensor<[^>]*x(\w+)>, tensor<[^>]*x(\w+)>\)", step.as_text())
    assert {dtype for pair in operands for dtype in pair} == {dots}


@pytest.mark.parametrize(("accumulate", "total"), [("float32", 258.0), ("bfloat16", 256.0)])
def test_micro_batches_add_up_in_the_accumulation_dtype(accumulate, total):
    """256 + 1 + 1: bfloat16 cannot tell 257 from 256."""
    rows = np.where(np.arange(ROWS) % 3 == 0, 256, 1).astype(np.float32) / 8
    engine = start(
        lambda rngs: Ones(rngs),
        lambda model, batch: jzero.WeightedLoss(
            model.w[...].astype(jnp.float32).sum() * batch.sum(), batch.size / ROWS
        ),
        optax.sgd(1.0),
        3,
        8,
        3,
        precision={"preset": "bf16", "accumulate": accumulate},
    )
    engine.step(rows)
    np.testing.assert_array_equal(engine.params()["w"], np.full((5, 7), 1 - total))


@pytest.mark.parametrize(
    ("precision", "gathered"),
    [("fp32", F32), ("bf16", BF16), ({"preset": "bf16", "params": "float32"}, BF16)],
    ids=["fp32", "bf16", "bf16 with float32 at rest"],
)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gathers_carry_the_compute_dtype(precision, gathered, micro_batches):
    """Cast first, then whole: the wire carries half the bytes. Read before optimisation, since CPUs widen bfloat16."""
    config = {
        "zero": {"stage": 3, "min_shard_elements": 0},
        "precision": precision,
        "optimizer": {"name": "adam"},
        "train": {"global_batch_size": ROWS, "accumulation_steps": micro_batches},
    }
    made = prepare(toys.mlp, lambda model, batch: jnp.mean(model(batch)), None, config)
    state = map_leaves(lambda leaf: jax.ShapeDtypeStruct(leaf.stored_shape, leaf.dtype), plan_tree(made.plan))
    batch = jax.ShapeDtypeStruct((ROWS, 7), gathered)
    traced = made.train_step(micro_batches, batch).trace(state, batch)
    to_whole: dict[tuple[int, ...], list[Any]] = {leaf.stored_shape: [] for leaf in made.plan.params.values()}
    assert len(to_whole) == 4, "shapes tell the parameters apart"
    for equation in equations(traced.jaxpr):
        if equation.primitive.name == "sharding_constraint" and equation.params["sharding"].is_fully_replicated:
            (operand,) = equation.invars
            if operand.aval.shape:  # not Adam's count
                to_whole[operand.aval.shape].append(operand.aval.dtype)
    for shape, dtypes in to_whole.items():
        # Forward, and the gradient on its way back.
        assert len(dtypes) >= 2, shape
        assert set(dtypes) == {gathered}, shape


# Leaves of a special kind.


class Tempered(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.temperature = nnx.Param(jnp.zeros(()))
        self.linear = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.exp(self.temperature[...]) * self.linear(x)


def train_tempered(stage: int, devices: int) -> jzero.Engine:
    loss = lambda model, batch: jnp.mean(jnp.square(model(batch) - 1))
    engine = start(lambda rngs: Tempered(rngs), loss, optax.adam(0.1), stage, devices)
    for _ in range(3):
        engine.step(GOOD["x"])
    return engine


def test_scalar_parameter_stays_whole_and_trains(tmp_path):
    reference = train_tempered(0, 1)
    assert reference.params()["temperature"] != 0
    for stage, devices in ((1, 4), (2, 4), (3, 4)):
        engine = train_tempered(stage, devices)
        assert engine.plan.params["temperature"].reason.startswith("whole: scalar")
        for name, array in engine.arrays().items():
            if "temperature" in name:
                assert array.shape == ()
                assert array.sharding.is_fully_replicated
        for path, value in reference.params().items():
            np.testing.assert_allclose(engine.params()[path], value, rtol=1e-5, atol=1e-6, err_msg=path)
    engine.save(tmp_path)
    before = host(engine)
    engine.step(GOOD["x"])
    engine.restore(tmp_path)
    assert_same(host(engine), before)


class Ends(nnx.Module):
    """An embedding and a head, tied or not."""

    def __init__(self, rngs: nnx.Rngs, tied: bool):
        self.embed = nnx.Embed(11, 5, rngs=rngs)
        self.head = None if tied else nnx.Linear(5, 11, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        return self.embed.attend(x) if self.head is None else self.head(x)


def test_tied_ends_are_one_leaf_with_one_set_of_moments(tmp_path):
    tied, untied = (
        start(lambda rngs, t=t: Ends(rngs, tied=t), token_loss, optax.adam(0.1), 3, 8) for t in (True, False)
    )
    assert untied.num_parameters - tied.num_parameters == 11 * 5
    assert [n for n in tied.arrays() if n.endswith("embedding")] == [
        "params/embed/embedding", "opt_state/0/mu/embed/embedding", "opt_state/0/nu/embed/embedding"
    ]  # fmt: skip
    assert "params/head/kernel" in untied.arrays()
    for engine, directory in ((tied, tmp_path / "tied"), (untied, tmp_path / "untied")):
        for _ in range(3):
            engine.step(TOKENS)
        engine.save(directory)
        straight = float(engine.step(TOKENS)["loss"])
        engine.step(TOKENS)
        engine.restore(directory)
        assert float(engine.step(TOKENS)["loss"]) == straight


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.contrib.schedule_free_sgd(0.1),
        lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    ],
    ids=["schedule_free", "ema"],
)
def test_optimizer_state_that_starts_as_the_parameters_is_a_copy(make, stage):
    """One buffer donated twice would end the process."""
    found = []
    for devices in (1, 8):
        engine = start(lambda rngs: Weights(rngs), linear_loss, make(), stage, devices)
        for _ in range(3):
            engine.step(GRADIENTS)
        found.append(engine.params())
    for name in MEANS:
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-5, atol=1e-6)


def test_state_from_before_a_step_is_refused():
    engine = start(lambda rngs: Weights(rngs), linear_loss, optax.sgd(1.0))
    consumed = engine.state
    engine.step(GRADIENTS)
    current = engine.state
    calls: list[Callable[[], Any]] = [
        lambda: engine.step(GRADIENTS),
        lambda: engine.evaluate(GRADIENTS),
        lambda: engine.apply(lambda model: model.number[...]),
        engine.model,
    ]
    engine.state = consumed
    for call in calls:
        with pytest.raises(UserError, match=r"engine\.state was consumed by a later step"):
            call()
    engine.state = current
    for call in calls:
        call()
