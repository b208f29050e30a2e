"""What devices cannot compute each on its own rows is refused by the explicit engine, before anything is compiled, by a
message that names the engine that can. Without these refusals the numbers would be others, silently."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jzero
from jzero.config import MeshConfig
from jzero.errors import CollectivesError
from jzero.mesh import make_mesh

ROWS = 16


def step(
    model: Any, loss: Any, collectives: str, batch: Any, stage: int = 1, k: int = 1, **mesh: int
) -> dict[str, Any]:
    """The metrics of one step on 8 devices."""
    config = {
        "zero": {"stage": stage, "collectives": collectives, "min_shard_elements": 0},
        "mesh": mesh,
        "train": {"global_batch_size": len(jax.tree.leaves(batch)[0]), "accumulation_steps": k},
    }
    return jzero.initialize(model, loss, optax.adam(1e-3), config).step(batch)


class Normalised(nnx.Module):
    """An MLP with batch statistics, its BatchNorm in training or not."""

    def __init__(self, rngs: nnx.Rngs, frozen: bool = False):
        self.up, self.down = nnx.Linear(7, 16, rngs=rngs), nnx.Linear(16, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(16, use_running_average=frozen, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.tanh(self.norm(self.up(x))))


def normalised(rngs):
    return Normalised(rngs)


def frozen_statistics(rngs):
    return Normalised(rngs, frozen=True)


def contrastive(model, batch):
    """InfoNCE: each row against all others."""
    x, y = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (model(batch["x"]), batch["y"]))
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(x @ y.T)))


def errors(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean(-1), (batch["y"][:, 0] > 0).astype(jnp.float32)


def mean_of_counted(model, batch):
    error, counts = errors(model, batch)
    return (error * counts).sum() / jnp.maximum(counts.sum(), 1)


def sum_and_count(model, batch):
    error, counts = errors(model, batch)
    return jzero.WeightedLoss((error * counts).sum(), counts.sum())


def weight_of_one(model, batch):
    return jzero.WeightedLoss(squared_errors(model, batch).sum(), jnp.float32(1))


MIXES = [
    (normalised, toys.square_loss, r"norm/mean: the model computes this state from the batch"),
    (toys.mlp, contrastive, r"no sum over the rows of its batch: dot_general at .*test_apart\.py:\d+"),
    (toys.mlp, mean_of_counted, r"no sum over the rows of its batch: div at .*jzero\.WeightedLoss\(total, weight\)"),
    (toys.mlp, weight_of_one, r"a weight of 1 however many rows the batch has"),
]


@pytest.mark.parametrize("rows_a_device", [1, 3])
@pytest.mark.parametrize(
    ("model", "loss", "told"), MIXES, ids=["BatchNorm", "contrastive", "mean of counted", "constant weight"]
)
def test_a_loss_that_mixes_rows_is_refused_and_xla_does_it(model, loss, told, rows_a_device):
    batch = toys.square_batch(8 * rows_a_device, 0)
    assert np.isfinite(step(model, loss, "xla", batch)["loss"])
    with pytest.raises(CollectivesError, match=rf"(?s){told}.*zero\.collectives: xla"):
        step(model, loss, "explicit", batch)


def squared_errors(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean(-1)


def penalty_in_the_total(model, batch):
    sums = sum_and_count(model, batch)
    return jzero.WeightedLoss(sums.total + jnp.square(model.up.kernel[...]).sum(), sums.weight)


def one_more_in_the_weight(model, batch):
    sums = sum_and_count(model, batch)
    return jzero.WeightedLoss(sums.total, sums.weight + 1)


def chosen_and_rejected(model, batch):
    """The first half of the rows against the second."""
    chosen, rejected = jnp.split(squared_errors(model, batch), 2)
    return jax.nn.softplus(chosen - rejected).mean()


def gradient_penalty(model, batch):
    """By the model itself: the gradient would go where no one looks."""
    inner = nnx.grad(lambda model: jnp.square(model(jnp.ones((2, 7)))).mean())(model)
    return toys.square_loss(model, batch) + jnp.square(inner["up"]["kernel"][...]).sum()


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (penalty_in_the_total, "the total of the loss is a sum over rows with something added"),
        (one_more_in_the_weight, "the weight of the loss is a sum over rows with something added"),
        (chosen_and_rejected, "takes a micro-batch of 24 rows, but not the 3 .*does not result in an equal division"),
        (gradient_penalty, r"(down|up)/\w+: the loss differentiates by the model itself"),
        (lambda model, batch: jnp.var(model(batch["x"]), axis=0).mean(), r"no sum .*: \w+ at .*test_apart\.py:\d+"),
    ],
)
def test_other_losses_that_devices_cannot_compute_apart_are_refused(loss, told):
    batch = toys.square_batch(24, 0)
    assert np.isfinite(step(toys.mlp, loss, "xla", batch)["loss"])
    with pytest.raises(CollectivesError, match=rf"(?s){told}.*zero\.collectives: xla"):
        step(toys.mlp, loss, "explicit", batch)


def test_a_bound_on_the_weight_is_warned_of():
    def loss(model, batch):
        sums = sum_and_count(model, batch)
        return jzero.WeightedLoss(sums.total, jnp.maximum(sums.weight, 1))

    with pytest.warns(UserWarning, match=r"the weight of the loss has a bound"):
        step(toys.mlp, loss, "explicit", toys.square_batch(24, 0))


def test_auto_takes_xla_for_it_and_says_so():
    """Two micro-batches at stage 1: explicit, if only it could."""
    batch = toys.square_batch(ROWS, 0)
    assert step(toys.mlp, toys.square_loss, "auto", batch, k=2)["loss"] > 0
    with pytest.warns(UserWarning, match=r"zero\.collectives = auto takes xla: norm/mean"):
        found = step(normalised, toys.square_loss, "auto", batch, k=2)
    assert found["loss"] == step(normalised, toys.square_loss, "xla", batch, k=2)["loss"]


@pytest.mark.parametrize(
    ("model", "loss"),
    [(frozen_statistics, toys.square_loss), (toys.mlp, sum_and_count)],
    ids=["frozen BatchNorm", "WeightedLoss"],
)
def test_what_keeps_rows_apart_is_not_refused(model, loss):
    batch = toys.square_batch(ROWS, 0)
    xla, explicit = (step(model, loss, engine, batch) for engine in ("xla", "explicit"))
    np.testing.assert_allclose(explicit["grad_norm"], xla["grad_norm"], rtol=1e-5)
    np.testing.assert_allclose(explicit["loss"], xla["loss"], rtol=1e-5)


@pytest.mark.slow
def test_the_refused_would_be_other_numbers(monkeypatch):
    """The refusals are not for nothing: without them these losses differ from xla's."""
    monkeypatch.setattr("jzero.apart._assert_sums", lambda *_: None)
    batch = toys.square_batch(3 * 8, 0)
    for model, loss, _ in MIXES:
        xla, explicit = (float(step(model, loss, engine, batch)["loss"]) for engine in ("xla", "explicit"))
        assert abs(explicit - xla) > 1e-4 * xla, loss


def test_a_metric_that_is_no_mean_over_rows_is_warned_of():
    def loss(model, batch):
        return toys.square_loss(model, batch), {"counted": mean_of_counted(model, batch)}

    batch = toys.square_batch(ROWS, 0)
    with pytest.warns(UserWarning, match=r"metric 'counted' is no sum over the rows of its batch: div at"):
        found = step(toys.mlp, loss, "explicit", batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = step(toys.mlp, loss, "xla", batch)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)


# Raw reads: the stored array instead of the parameter.


def decayed(squares):
    """token_loss with weight decay as `squares` of the model has it."""

    def loss(model, batch):
        sums = toys.token_loss(model, batch)
        return jzero.WeightedLoss(sums.total + 0.01 * squares(model) * sums.weight, sums.weight)

    return loss


def by_taking_the_state_apart(model):
    return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def by_raw_values(model):
    return jnp.sum(jnp.square(model.norm.scale.get_raw_value().stored))


def by_reading(model):
    return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param))))


def in_a_loop(model):
    """A layer taken raw inside a scan over the stack."""

    def add(total, block):
        return total + jnp.sum(jnp.square(block.get_raw_value().stored)), None

    return jax.lax.scan(add, 0.0, model.blocks.up.kernel)[0]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("squares", "path"),
    [(by_taking_the_state_apart, "blocks/down/bias"), (by_raw_values, "norm/scale"), (in_a_loop, "blocks/up/kernel")],
)
def test_a_raw_read_is_caught(squares, path, stage):
    """Its gradient would be lost, and at stage 3 it would see a device's part only."""
    batch = toys.token_batch(ROWS, 0)
    told = rf"{path}: .*takes the stored array instead of reading the parameter \(\w+ at .*test_apart\.py:\d+"
    with pytest.raises(CollectivesError, match=told):
        step(toys.scanned_decoder, decayed(squares), "explicit", batch, stage)


@pytest.mark.slow
def test_reading_all_parameters_is_no_raw_read():
    batch = toys.token_batch(ROWS, 0)
    xla, explicit = (
        step(toys.scanned_decoder, decayed(by_reading), engine, batch, 3) for engine in ("xla", "explicit")
    )
    np.testing.assert_allclose(explicit["grad_norm"], xla["grad_norm"], rtol=1e-5)
    assert xla["grad_norm"] != step(toys.scanned_decoder, toys.token_loss, "xla", batch, 3)["grad_norm"]


def test_a_frozen_copy_of_the_model_is_no_raw_read():
    """A teacher made of the student's own parameters: stop_gradient is handed the stored arrays."""

    def loss(model, batch):
        graphdef, state = nnx.split(model)
        teacher = nnx.merge(graphdef, jax.lax.stop_gradient(state))
        return jnp.mean(jnp.square(model(batch["x"]) - 0.9 * teacher(batch["x"]) - batch["y"]))

    batch = toys.square_batch(ROWS, 0)
    found = [step(toys.mlp, loss, engine, batch, 3) for engine in ("xla", "explicit")]
    np.testing.assert_allclose(found[1]["grad_norm"], found[0]["grad_norm"], rtol=1e-5)
    np.testing.assert_allclose(found[1]["loss"], found[0]["loss"], rtol=1e-5)


# Placement by the model itself.


def pinned(sharding):
    def loss(model, batch):
        return jnp.mean(jnp.square(jax.lax.with_sharding_constraint(model(batch["x"]), sharding) - batch["y"]))

    return loss


@pytest.mark.parametrize("spec", [PartitionSpec("data"), PartitionSpec(("replica", "data"), None)])
@pytest.mark.parametrize("named", [True, False])
def test_activations_pinned_to_the_batch_axes_are_refused(spec, named):
    """By a NamedSharding, or by a spec alone, which JAX itself refuses under shard_map."""
    sharding = NamedSharding(make_mesh(MeshConfig()), spec) if named else spec
    with pytest.raises(CollectivesError, match=r"places an array itself: .*data.*zero\.collectives: xla"):
        step(toys.mlp, pinned(sharding), "explicit", toys.square_batch(ROWS, 0))


def test_activations_pinned_to_the_tensor_axis_are_not():
    sharding = NamedSharding(make_mesh(MeshConfig(tensor=2)), PartitionSpec(None, "tensor"))
    batch = toys.square_batch(ROWS, 0)
    losses = [
        float(step(toys.mlp, pinned(sharding), engine, batch, tensor=2)["loss"]) for engine in ("xla", "explicit")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
