"""The compiled programs are those the stages promise: what travels, where, how often, and the memory they want.

Read from XLA:CPU programs, which hold an all-reduce and a slice where GPUs and TPUs have a reduce-scatter
(`test_aot.py` reads those).
"""

import math
import os
import subprocess
import sys
from collections import Counter
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from programs import Collective, collectives, makers, sizes, temporary_bytes

import jzero
from jzero.blueprint import Blueprint, prepare
from jzero.config import ModelConfig
from jzero.grads import make_loss_fn
from jzero.models import build_model
from jzero.residuals import forget_weights

# The extents of activations occur in no parameter: 24 rows of 11 (or 12) tokens, 3 or 8 rows a device.
ROWS, LENGTH, WIDTH, HIDDEN, VOCAB, LAYERS = 24, 11, 256, 640, 320, 4
LAYER = WIDTH * WIDTH + 2 * WIDTH * HIDDEN  # the weights of a block; biases and norms stay whole
TABLE = VOCAB * WIDTH


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int, hidden: int):
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.mix = nnx.Linear(width, width, rngs=rngs)
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x):
        h = self.norm(x)
        x = x + jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.einsum("btd,bsd->bts", self.mix(h), h)), h)
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Decoder(nnx.Module):
    """Plain Flax: scanned or listed blocks, rematerialised or not, tied embedding. tokens -> logits."""

    def __init__(self, rngs: nnx.Rngs, layers: int, scan: bool, remat: bool, width: int, hidden: int, vocab: int):
        self.scan, self.remat = scan, remat
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        make = lambda key: Block(nnx.Rngs(params=key), width, hidden)
        keys = jax.random.split(rngs.params(), layers)
        self.blocks = nnx.vmap(make)(keys) if scan else nnx.List([make(key) for key in keys])

    def __call__(self, tokens):
        x, run = self.embed(tokens), lambda block, x: block(x)
        run = nnx.remat(run) if self.remat else run
        if self.scan:
            x = nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for block in self.blocks:
                x = run(block, x)
        return x @ self.embed.embedding.T


def loss(model, tokens):
    return jzero.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def decoder(layers=LAYERS, scan=True, remat=True, width=WIDTH, hidden=HIDDEN, vocab=VOCAB):
    return lambda rngs: Decoder(rngs, layers, scan, remat, width, hidden, vocab)


def llama(layers=LAYERS, scan=True, remat="full", width=WIDTH, hidden=HIDDEN, vocab=VOCAB):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    sizes = {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers}
    return build_model(ModelConfig(**sizes, **heads, scan_layers=scan, remat=remat), vocab)


def blueprint(model, stage: int, k: int = 1, devices: int = 8, replica: int = 1, **zero) -> Blueprint:
    config = {
        "zero": {"stage": stage, "group": "node" if replica > 1 else "all", **zero},
        "mesh": {"replica": replica},
        "train": {"global_batch_size": ROWS * k, "accumulation_steps": k},
    }
    return prepare(model, loss, optax.adam(1e-3), config, jax.devices()[:devices])


def compile_step(made: Blueprint):
    rows = made.config.train.global_batch_size
    return made.lower_step(jax.ShapeDtypeStruct((rows, LENGTH + 1), np.int32)).compile()


@cache
def _step(stage: int, k: int, devices: int, replica: int, layers: int, remat: bool):
    return compile_step(blueprint(decoder(layers, remat=remat), stage, k, devices, replica))


def step(stage: int, k: int = 1, devices: int = 8, replica: int = 1, layers: int = LAYERS, remat: bool = True):
    """The compiled step of the scanned decoder."""
    return _step(stage, k, devices, replica, layers, remat)


@cache
def llama_step(stage: int, layers: int):
    return compile_step(blueprint(llama(layers), stage))


def strays(found: list[Collective], devices: int = 8) -> list[Collective]:
    """What never may travel: activations, and anything by another pattern than gather and reduce."""
    rows = ROWS // devices
    extents = {ROWS, rows, LENGTH, LENGTH + 1, ROWS * LENGTH, rows * LENGTH} - {1}
    honest = {"all-gather", "all-reduce", "reduce-scatter"}
    return [c for c in found if c.kind not in honest or extents & set(c.shape)]


def stack_gathers(found: list[Collective], layers: int) -> list[Collective]:
    return [c for c in found if c.kind == "all-gather" and len(c.shape) == 3 and c.shape[0] == layers]


def sent(found: list[Collective], kind: str) -> int:
    """Elements of block weights or of their gradients that a step sends, counting every run of every loop."""
    return sum(c.size * c.runs for c in found if c.kind == kind and c.size >= WIDTH * WIDTH and c.size != TABLE)


@pytest.mark.parametrize("model", ["decoder", "llama"])
def test_stage_3_gathers_each_weight_once_in_each_loop(model):
    made = blueprint(decoder() if model == "decoder" else llama(), 3)
    found = collectives((step(3) if model == "decoder" else llama_step(3, LAYERS)).as_text())
    gathers = [c for c in found if c.kind == "all-gather"]
    layer = Counter(math.prod(p.shape[1:]) for p in made.plan.params.values() if p.dim is not None and p.shape[0] == 4)
    loops = {c.loops for c in gathers if c.loops}
    assert len(loops) == 2  # forward and backward
    for loop in loops:
        assert sizes(c for c in gathers if c.loops == loop) == layer
        assert {c.runs for c in gathers if c.loops == loop} == {LAYERS}
    # Outside, embedding and head alone: no gather of all layers was hoisted out.
    assert {c.size for c in gathers if not c.loops} == {TABLE}


EIGHT = [(stage, k, 8, 1) for stage, k in [(0, 1), (1, 1), (1, 4), (2, 1), (2, 4), (3, 1), (3, 4)]]
NODES = [(2, 1, 8, 2), (3, 4, 8, 2)]
PADDED = [(2, 1, 3, 1), (3, 4, 3, 1)]


@pytest.mark.parametrize(("stage", "k", "devices", "replica"), EIGHT + NODES + PADDED)
def test_no_activation_travels(stage, k, devices, replica):
    assert strays(collectives(step(stage, k, devices, replica).as_text()), devices) == []


def test_no_activation_of_the_built_in_model_travels():
    for stage in (2, 3):
        assert strays(collectives(llama_step(stage, LAYERS).as_text())) == []


# Elements a step over k micro-batches sends, in weights of all blocks: reduced (twice that on the wire) and gathered.
@pytest.mark.parametrize(
    ("stage", "k", "reduced", "gathered"),
    [(0, 1, 1, 0), (1, 1, 1, 1), (1, 4, 4, 1), (2, 1, 1, 1), (2, 4, 4, 1), (3, 1, 1, 2), (3, 4, 4, 8)],
)
def test_volume(stage, k, reduced, gathered):
    """Engine xla reduces in every micro-batch at every stage; what is gathered, and how often, is the stage's."""
    found = collectives(step(stage, k).as_text())
    assert sent(found, "all-reduce") == reduced * LAYERS * LAYER
    assert sent(found, "all-gather") == gathered * LAYERS * LAYER


def test_a_node_group_gathers_within_the_node_and_reduces_over_all():
    found = collectives(step(3, 4, 8, 2).as_text())
    weights = [c for c in found if c.size >= WIDTH * WIDTH]
    assert {c.group for c in weights if c.kind == "all-gather"} == {4}
    assert {c.group for c in weights if c.kind == "all-reduce"} == {8}


# In whole weights of a layer, 8 devices. A shard is 1/8: stage 3 keeps that of the gradient; stage 2 also cuts the old
# weights to shards for the update and makes the new ones as shards, before they are gathered. A kept gradient or a kept
# gathered weight adds 1.
@pytest.mark.parametrize(("stage", "most"), [(2, 3 / 8 + 0.2), (3, 1 / 8 + 0.2)])
@pytest.mark.parametrize("model", ["decoder", pytest.param("llama", marks=pytest.mark.slow)])
def test_temporaries_grow_by_a_gradient_shard_a_layer_and_little_more(model, stage, most):
    build, of = (decoder, step) if model == "decoder" else (llama, llama_step)
    weights = blueprint(build(), stage).plan.params.values()
    layer = sum(math.prod(p.shape[1:]) for p in weights if p.shape[0] == LAYERS) * 4
    growth = temporary_bytes(of(stage, layers=8)) - temporary_bytes(of(stage, layers=LAYERS))
    assert 0 < growth / 4 <= most * layer


@pytest.mark.parametrize("k", [1, 4])
def test_no_whole_gradient_of_the_stack_stands_at_stage_2(k):
    stack = (LAYERS, WIDTH, HIDDEN)
    # The updated parameters are gathered whole after all loops, the old ones copied before; a gradient is made in them.
    assert makers(step(2, k).as_text(), stack)
    assert [op for op in makers(step(2, k).as_text(), stack) if op.loops] == []
    assert makers(step(3, k).as_text(), stack) == []
    assert [op for op in makers(step(1, 4).as_text(), stack) if op.loops]  # stage 1 does accumulate whole ones


def test_without_rematerialised_blocks_a_scan_gathers_twice_and_keeps_no_weight():
    program = step(3, remat=False).as_text()
    found = collectives(program)
    assert makers(program, (LAYERS, WIDTH, HIDDEN)) == []
    assert sent(found, "all-gather") == 2 * LAYERS * LAYER
    assert strays(found) == []


def naive(spec) -> list[Collective]:
    """The gradient's program where nothing but shardings of inputs and outputs is said: parameters by `spec`."""
    made = blueprint(decoder(8), 3)
    placement = {path: NamedSharding(made.mesh, spec(leaf)) for path, leaf in made.plan.params.items()}
    params = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement[path])
        for path, leaf in made.plan.params.items()
    }
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH + 1), np.int32, sharding=made.batch_sharding)

    def gradient(params, tokens):
        total = lambda params: loss(made.model.bind(params, {}, jnp.zeros(2, jnp.int32), train=True), tokens).total
        return jax.grad(total)(params)

    return collectives(jax.jit(gradient, out_shardings=placement).lower(params, tokens).compile().as_text())


def test_these_tests_see_a_plan_without_use_points():
    found = naive(lambda leaf: leaf.spec)
    assert {c.kind for c in strays(found)} >= {"all-gather", "all-to-all"}
    assert sent(found, "all-gather") != 2 * 8 * LAYER


def test_these_tests_see_a_stack_split_over_its_layers():
    found = naive(lambda leaf: PartitionSpec("data") if leaf.dim is not None else PartitionSpec())
    assert len(stack_gathers(found, layers=8)) >= 3
    assert stack_gathers(collectives(step(3, layers=8).as_text()), layers=8) == []


def kept_weights(made: Blueprint, forget: bool) -> set[tuple[int, ...]]:
    """Extents, in order, of the split weights that the backward pass keeps as the forward pass read them, at JAX level.

    Extents are such that every stored weight is padded: what has a true shape was gathered and cut.
    """
    split = [leaf for leaf in made.plan.params.values() if leaf.dim is not None]
    assert all(leaf.padded for leaf in split)
    fn = make_loss_fn(made.model, loss, made.points, train=True)
    params = {path: jax.ShapeDtypeStruct(leaf.stored_shape, leaf.dtype) for path, leaf in made.plan.params.items()}
    tokens = jnp.zeros((ROWS, LENGTH + 1), jnp.int32)
    fn = partial(fn, carriers={}, model_state={}, batch=tokens, fold=jnp.int32(0))
    fn = forget_weights(fn, made.points, gathers=True) if forget else fn
    backward = jax.eval_shape(lambda p: jax.vjp(lambda p: fn(p)[0].loss.total, p)[1], params)
    kept = {tuple(sorted(x.shape)) for x in jax.tree.leaves(backward)}  # transposed or not
    return kept & {tuple(sorted(leaf.shape)) for leaf in split}


ODD = {"width": 112, "hidden": 140, "vocab": 130}


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("model", [decoder, llama])
def test_no_gathered_weight_is_kept_for_the_backward_pass(model, scan):
    made = blueprint(model(3, scan, "none" if model is llama else False, **ODD), 3, devices=3, min_shard_elements=1024)
    assert len(kept_weights(made, forget=False)) >= 3  # What JAX would keep.
    assert kept_weights(made, forget=True) == set()


@pytest.mark.parametrize("remat", ["dots", "full"])
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_rematerialised_blocks_keep_none_but_the_head(scan, remat):
    """The head comes last forward and first backward: kept in between it costs nothing, gathered again it would."""
    made = blueprint(llama(3, scan, remat, **ODD), 3, devices=3, min_shard_elements=1024)
    assert kept_weights(made, forget=True) == {(112, 130)}


def test_a_run_compiles_its_step_once(caplog):
    engine = jzero.initialize(decoder(2, width=32, hidden=64), loss, optax.adam(1e-3), {"zero": {"stage": 3}})
    tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    with jax.log_compiles():
        for _ in range(4):
            engine.step(tokens)
    steps = [r for r in caplog.records if "Finished XLA compilation of jit(step)" in r.getMessage()]
    assert len(steps) == 1


@pytest.mark.slow
def test_unrolled_layers_free_their_weights_too_where_xla_lets_them():
    """XLA:CPU merges all gradient reductions of an unrolled model into one and hoists its gathers out of the loop over
    micro-batches, so that every whole gradient and weight is live at once. Without these passes the program is lean."""
    passes = "cpu-all-reduce-combiner,while-loop-invariant-code-motion,cse_barrier_expander"
    flags = [
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        f"--xla_disable_hlo_passes={passes}",
        "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    ]
    code = (
        "from test_programs import *\n"
        "b = [temporary_bytes(compile_step(blueprint(decoder(n, scan=False), 3, 2))) for n in (4, 8)]\n"
        "print((b[1] - b[0]) / 16 / LAYER)"
    )
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent)])
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    # Accumulator and gradient are a shard each; a weight or gradient that stays whole adds 1.
    assert float(ran.stdout) < 2 / 8 + 0.3
