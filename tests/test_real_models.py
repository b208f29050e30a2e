"""Models that nobody here wrote, unchanged from their packages: sharded they train as on one device.

pip install -e '.[dev,real-models]' && pytest -m slow tests/test_real_models.py
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import jzero
from jzero.errors import CollectivesError

# Others' models rely on promotion, and warn of what is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, STEPS, VOCAB, LENGTH, CLASSES, NODES = 24, 5, 61, 12, 7, 9
# A token between two experts goes by a rounding to either: in batches from this seed on the nearest tie is 1e-3 wide.
SEED = 500


@pytest.fixture(autouse=True)
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


class Case(NamedTuple):
    model: Any
    loss: Callable[..., Any]
    batch: Callable[[np.random.Generator], dict[str, np.ndarray]]


def token_batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """tokens int32 [ROWS, LENGTH], mostly a fixed map of the token before."""
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH))
    for t in range(1, LENGTH):
        tokens[:, t] = np.where(rng.random(ROWS) < 0.9, (5 * tokens[:, t - 1] + 1) % VOCAB, tokens[:, t])
    return {"tokens": tokens.astype(np.int32)}


def image_batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """x float32 [ROWS, 16, 16, 3], brighter by class; y int32 [ROWS]."""
    y = rng.integers(0, CLASSES, ROWS)
    x = rng.normal(size=(ROWS, 16, 16, 3)) + y[:, None, None, None] / 3
    return {"x": x.astype(np.float32), "y": y.astype(np.int32)}


def ring_batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Rings of nodes. x float32 [ROWS, NODES, 7]; y int32 [ROWS, NODES], of a node's own values and its neighbour's."""
    x = rng.normal(size=(ROWS, NODES, 7)).astype(np.float32)
    y = (x.sum(-1) > 0) + 2 * (np.roll(x, 1, axis=1)[..., 0] > 0)
    return {"x": x, "y": y.astype(np.int32)}


def next_token_loss(model, batch):
    return jzero.cross_entropy(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])


def class_loss(model, batch):
    return jzero.cross_entropy(model(batch["x"]), batch["y"])


def mixture_of_experts(dropout: float = 0.1, balanced: float = 0.01) -> Case:
    """Linen: experts and a router, dropout, a loss of the router besides: a product of means over the batch."""
    nano_moe = pytest.importorskip("nano_moe.model")
    sizes = {"vocab_size": VOCAB, "n_layers": 2, "n_heads": 2, "d_model": 20, "d_ff": 36, "block_size": LENGTH}
    config = nano_moe.NanoMoEConfig(**sizes, n_experts=3, top_k=2, dropout_rate=dropout)
    tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)

    def loss(model, batch):
        logits, balance = model(batch["tokens"][:, :-1], deterministic=not model.train)
        tokens = jzero.cross_entropy(logits, batch["tokens"][:, 1:])
        return jzero.WeightedLoss(tokens.total + balanced * balance * tokens.weight, tokens.weight)

    return Case(jzero.Linen(nano_moe.NanoMoE(config), inputs=(tokens,)), loss, token_batch)


def resnet() -> Case:
    """Linen: convolutions and BatchNorm, which trains where its collection is mutable."""
    package = pytest.importorskip("jax_resnet")
    net = package.ResNet(
        package.ResNetBlock,
        stage_sizes=[1, 1],
        hidden_sizes=(10, 18),
        n_classes=CLASSES,
        stem_cls=package.ResNetStem,
    )
    image = jax.ShapeDtypeStruct((1, 16, 16, 3), jnp.float32)
    return Case(jzero.Linen(net, inputs=(image,)), class_loss, image_batch)


def mamba() -> Case:
    """NNX: a state-space language model, tied, with scalars a head."""
    package = pytest.importorskip("mamba2_jax")
    sizes = {"hidden_size": 20, "state_size": 6, "head_dim": 10, "chunk_size": 4, "num_hidden_layers": 2}
    config = package.Mamba2Config(vocab_size=VOCAB, **sizes)
    loss = lambda model, batch: next_token_loss(lambda tokens: model(tokens)["logits"], batch)
    return Case(lambda rngs: package.Mamba2ForCausalLM(config, rngs=rngs), loss, token_batch)


def graph_network(kind: str, norm: str | None = "batch_norm", dropout: float = 0.1) -> Case:
    """NNX: messages along the edges of a batch of graphs, BatchNorm over all of their nodes, dropout."""
    network = getattr(pytest.importorskip("jraphx.nn.models"), kind)

    def loss(model, batch):
        rows = batch["x"].shape[0]
        first = NODES * jnp.arange(rows)[:, None]
        edges = [(first + (jnp.arange(NODES) + shift) % NODES).reshape(-1) for shift in (0, 1)]
        logits = model(batch["x"].reshape(rows * NODES, -1), jnp.stack(edges))
        return jzero.cross_entropy(logits.reshape(rows, NODES, -1), batch["y"])

    build = lambda rngs: network(7, 18, 3, 4, dropout_rate=dropout, norm=norm, rngs=rngs)
    return Case(build, loss, ring_batch)


def linear_recurrence() -> Case:
    """Linen: a state-space language model that computes in complex numbers."""
    package = pytest.importorskip("long_range_models")
    layer = functools.partial(package.LRULayer, state_dim=14)
    net = package.SequenceModel(package.S4Module(dim=20, depth=2, sequence_layer=layer), num_tokens=VOCAB)
    tokens = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)
    return Case(jzero.Linen(net, inputs=(tokens,)), next_token_loss, token_batch)


CASES = {
    "nano-moe-jax": mixture_of_experts,
    "jax-resnet": resnet,
    "mamba2-jax": mamba,
    "jraphx GCN": lambda: graph_network("GCN"),
    "jraphx GAT": lambda: graph_network("GAT"),
    "long-range-models": linear_recurrence,
}


# Under explicit each device's rows are on their own. Left out: jax-resnet and the graph networks as they stand, which
# train with statistics of the batch, the router's loss, and dropout, whose masks are others there.
APART = {
    "nano-moe-jax, apart": lambda: mixture_of_experts(dropout=0.0, balanced=0.0),
    "mamba2-jax": mamba,
    "jraphx GCN, apart": lambda: graph_network("GCN", norm=None, dropout=0.0),
    "jraphx GAT, apart": lambda: graph_network("GAT", norm="layer_norm", dropout=0.0),
    "long-range-models": linear_recurrence,
}


@functools.cache
def train(name: str, stage: int, devices: int, collectives: str = "xla") -> tuple[Any, np.ndarray]:
    """The engine, and its losses: of some steps, and in the end of an evaluation."""
    case = (CASES | APART)[name]()
    zero = {"stage": stage, "min_shard_elements": 0, "collectives": collectives}
    config = {"zero": zero, "train": {"global_batch_size": ROWS}}
    # A bias before BatchNorm has no gradient but roundings, which Adam's usual eps would blow up.
    engine = jzero.initialize(case.model, case.loss, optax.adam(3e-3, eps=1e-4), config, jax.devices()[:devices])
    *batches, held_back = (case.batch(np.random.default_rng(SEED + step)) for step in range(STEPS + 1))
    losses = [engine.step(batch)["loss"] for batch in batches]
    return engine, np.array([*losses, engine.evaluate(held_back)["loss"]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "collectives", "stage", "devices"),
    [
        (name, collectives, stage, devices)
        for collectives, cases in (("xla", CASES), ("explicit", APART))
        for name in cases
        for stage in (1, 3)
        for devices in (3, 8)
    ],
)
def test_a_model_of_others_trains_sharded_as_on_one_device(name, collectives, stage, devices):
    _, expected = train(name, 0, 1)
    assert expected[STEPS - 1] < expected[0], "it learns nothing"
    engine, losses = train(name, stage, devices, collectives)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for tree in (engine.state.opt_state, engine.state.params)[: 1 + (stage == 3)]:
        whole = sum(np.size(x) * x.dtype.itemsize for x in jax.tree.leaves(tree))
        assert toys.bytes_a_device(tree) < 1.5 * whole / devices


@pytest.mark.parametrize("stage", [1, 3])
def test_complex_numbers_inside_a_model_train(stage):
    """JAX rounds the residuals that it saves, and cannot round complex ones."""

    def apply(params, x):
        y = jax.lax.complex(x * jnp.cos(params["w"]), x * jnp.sin(params["w"]))
        return jnp.real(y * y) - 1

    loss = lambda model, batch: jnp.mean(jnp.square(model(batch)))
    model = jzero.Function(lambda key: {"w": jnp.linspace(0.1, 1, 16)}, apply)
    config = {"zero": {"stage": stage, "min_shard_elements": 0}}
    engine = jzero.initialize(model, loss, optax.adam(1e-2), config, jax.devices()[:8])
    batch = 3 * np.ones((8, 16), np.float32)
    assert float(engine.step(batch)["loss"]) > float(engine.step(batch)["loss"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("jax-resnet", "computes this state from the batch"),
        ("jraphx GCN", "computes this state from the batch"),
        ("jraphx GAT", "computes this state from the batch"),
        ("nano-moe-jax", "no sum over the rows of its batch"),
    ],
)
def test_a_model_of_others_that_mixes_rows_is_refused_by_explicit(name, told):
    with pytest.raises(CollectivesError, match=told):
        train(name, 1, 8, "explicit")
