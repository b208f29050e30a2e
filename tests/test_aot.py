"""Programs for absent accelerators, compiled ahead of time: gathers and reduce-scatters as the papers count them.

pip install libtpu              # for TPU v5e:2x4
pip install jax-cuda12-plugin   # for 8 H100; or jzero[gpu], which brings that of CUDA 13
pytest -m aot
"""

import math
from collections import Counter
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from programs import collectives

import jzero
from jzero.blueprint import prepare
from jzero.mesh import topology

pytestmark = pytest.mark.aot

ROWS, LENGTH, VOCAB, WIDTH, HIDDEN = 24, 11, 512, 1024, 2560
SMALL = 32768  # norm scales and biases are below, all layers together, and the shards of weights above
PLATFORMS = [
    pytest.param(
        *("tpu", "v5e:2x4"),
        marks=pytest.mark.skipif(not find_spec("libtpu"), reason="libtpu is not installed"),
        id="tpu",
    ),
    pytest.param(
        *("gpu", "h100:8"),
        marks=pytest.mark.skipif(
            not any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
            reason="no CUDA plugin is installed",
        ),
        id="gpu",
    ),
]


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        h = self.norm(x)
        x = x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.einsum("btd,bsd->bts", self.mix(h), h)), h)
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Decoder(nnx.Module):
    """Scanned or listed, rematerialised blocks; tied embedding."""

    def __init__(self, layers: int, scanned: bool, rngs: nnx.Rngs):
        self.scanned = scanned
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        keys = jax.random.split(rngs.params(), layers)
        make = lambda key: Block(nnx.Rngs(params=key))
        self.blocks = nnx.vmap(make)(keys) if scanned else nnx.List([make(key) for key in keys])

    def __call__(self, tokens):
        x, run = self.embed(tokens), nnx.remat(lambda block, x: block(x))
        if self.scanned:
            x = nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for block in self.blocks:
                x = run(block, x)
        return x @ self.embed.embedding.T


def loss(model, tokens):
    return jzero.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "listed"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("platform", "name"), PLATFORMS)
def test_weights_are_gathered_and_gradients_scattered_layer_by_layer(platform, name, stage, scanned):
    layers = 4 if scanned else 2
    made = prepare(
        lambda rngs: Decoder(layers, scanned, rngs),
        loss,
        optax.adam(1e-3),
        {"zero": {"stage": stage}, "train": {"global_batch_size": ROWS}},
        topology(platform, name),
    )
    program = made.lower_step(jax.ShapeDtypeStruct((ROWS, LENGTH + 1), np.int32)).compile()
    found = [c for c in collectives(program.as_text()) if c.size > SMALL]
    assert {c.kind for c in found} <= {"all-gather", "reduce-scatter"}

    layer = Counter([WIDTH * WIDTH, WIDTH * HIDDEN, WIDTH * HIDDEN])
    block = Counter({size: count * (1 if scanned else layers) for size, count in layer.items()})
    table = Counter([VOCAB * WIDTH])
    scattered = Counter(c.size * 8 for c in found if c.kind == "reduce-scatter")
    assert scattered == block + table
    assert all(bool(c.loops) == scanned for c in found if c.kind == "reduce-scatter" and c.size * 8 != VOCAB * WIDTH)

    gathered = Counter(c.size for c in found if c.kind == "all-gather")
    if (
        stage == 3
    ):  # once forward, once backward; the tied table once, as it is needed at both ends of the backward pass
        assert gathered == block + block + table
        assert all(bool(c.loops) == scanned for c in found if c.kind == "all-gather" and c.size != VOCAB * WIDTH)
    else:  # the updated parameters, once a step
        assert sum(size * n for size, n in gathered.items()) == sum(
            math.prod(leaf.shape) for leaf in made.plan.params.values() if leaf.dim is not None
        )
        assert not any(c.loops for c in found if c.kind == "all-gather")
