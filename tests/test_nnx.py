"""Any Flax NNX module, unchanged: it trains at stage 3 on three devices, padding and all, as plain NNX does on one."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jzero
from jzero.errors import ModelError, PlanError
from jzero.usepoint import Gathered, UsePoint

ROWS = 6
RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(ROWS, 4, 5)).astype(np.float32),
    "image": RNG.normal(size=(ROWS, 4, 4, 5)).astype(np.float32),
    "tokens": RNG.integers(0, 13, size=(ROWS, 4)).astype(np.int32),
}
SPLIT = {"stage": 3, "min_shard_elements": 0}


def start(model: Any, loss: Any, optimizer: Any = None, devices: int = 3, **config: Any) -> jzero.Engine:
    """An engine on the first devices, every array split that can be, no clipping."""
    config = {"zero": SPLIT, "optimizer": {"clip_norm": None}} | config
    return jzero.initialize(model, loss, optimizer or optax.sgd(0.1), config, jax.devices()[:devices])


# Layers: every kind that flax.nnx has, and the transformations that run them.


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(5, 5, rngs=rngs)
        self.norm = nnx.LayerNorm(5, rngs=rngs)
        self.average = nnx.BatchNorm(5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.linear(self.norm(self.average(x))))


class Stack(nnx.Module):
    """Blocks made by nnx.vmap and run by nnx.scan; seven of them, so that the stack is the largest dim."""

    def __init__(self, rngs: nnx.Rngs, remat: bool = False):
        self.remat = remat
        self.blocks = nnx.vmap(Block, in_axes=(0,), out_axes=0)(rngs.split(7))

    def __call__(self, x: jax.Array) -> jax.Array:
        run = nnx.remat(lambda block, x: block(x)) if self.remat else lambda block, x: block(x)
        return nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)


class Pair(nnx.Module):
    """Two layers, and a way to run them."""

    def __init__(self, rngs: nnx.Rngs, run: Callable[[Any, jax.Array], jax.Array]):
        self.run = run
        self.a = nnx.Linear(5, 5, rngs=rngs)
        self.b = nnx.Linear(5, 5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.run(self, x)


class Shared(nnx.Module):
    """One layer under two names, in the order that NNX does not sort them; one parameter in two layers; tied ends."""

    def __init__(self, rngs: nnx.Rngs):
        self.z = nnx.Linear(5, 5, rngs=rngs)
        self.a = self.z
        self.c = nnx.Linear(5, 5, rngs=rngs)
        self.c.kernel = self.z.kernel
        self.embed = nnx.Embed(13, 5, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.embed.attend(self.c(jnp.tanh(self.a(self.z(self.embed(tokens))))))


class Ensemble(nnx.Module):
    """A stack that is not scanned but mapped over."""

    def __init__(self, rngs: nnx.Rngs):
        self.members = nnx.vmap(lambda rngs: nnx.Linear(5, 3, rngs=rngs))(rngs.split(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.vmap(lambda member, x: member(x), in_axes=(0, None), out_axes=0)(self.members, x)


class Halves(nnx.Module):
    """A stack of four, cut in two by hand before it is scanned."""

    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.vmap(lambda rngs: nnx.Linear(5, 5, rngs=rngs))(rngs.split(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(self.blocks)
        for half in (slice(0, 2), slice(2, 4)):
            blocks = nnx.merge(graphdef, jax.tree.map(lambda leaf, half=half: leaf[half], state))
            x = nnx.scan(lambda block, x: jnp.tanh(block(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(blocks, x)
        return x


class Arrays(nnx.Module):
    """Arrays that are no variables, a variable of another kind, a random key, and an attribute that is nothing."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(5, 5, use_bias=False, rngs=rngs)
        self.table = nnx.data(jnp.arange(5.0))
        self.listed = nnx.List([nnx.data(jnp.ones(5))])
        self.host = np.arange(5, dtype=np.float32)
        self.offset = nnx.Variable(jnp.full(5, 0.5))
        self.key = nnx.data(jax.random.key(3))
        self.nothing = None

    def __call__(self, x: jax.Array) -> jax.Array:
        noise = jax.random.normal(self.key, (5,))
        return self.linear(x) + self.table + self.listed[0] + self.host + self.offset + noise


def sow(pair: Pair, x: jax.Array) -> jax.Array:
    y = pair.a(x)
    pair.perturbed = nnx.Intermediate(y)  # what Module.sow leaves behind
    return pair.b(y)


x_of = lambda layer, batch: layer(batch["x"])
image_of = lambda layer, batch: layer(batch["image"])
tokens_of = lambda layer, batch: layer(batch["tokens"])
pair = lambda run: (lambda rngs: Pair(rngs, run), x_of)

LAYERS: dict[str, tuple[Callable[[nnx.Rngs], nnx.Module], Callable[[Any, Any], jax.Array]]] = {
    "linear": (lambda rngs: nnx.Linear(5, 7, rngs=rngs), x_of),
    "linear_general": (lambda rngs: nnx.LinearGeneral(5, (3, 7), rngs=rngs), x_of),
    "einsum": (lambda rngs: nnx.Einsum("btd,dhk->bthk", (5, 3, 7), (3, 7), rngs=rngs), x_of),
    "conv": (lambda rngs: nnx.Conv(5, 7, (3, 3), rngs=rngs), image_of),
    "conv_transpose": (lambda rngs: nnx.ConvTranspose(5, 7, (3, 3), rngs=rngs), image_of),
    "embed": (lambda rngs: nnx.Embed(13, 5, rngs=rngs), tokens_of),
    "attend": (lambda rngs: nnx.Embed(13, 5, rngs=rngs), lambda layer, batch: layer.attend(batch["x"])),
    "batch_norm": (lambda rngs: nnx.BatchNorm(5, rngs=rngs), x_of),
    "layer_norm": (lambda rngs: nnx.LayerNorm(5, rngs=rngs), x_of),
    "rms_norm": (lambda rngs: nnx.RMSNorm(5, rngs=rngs), x_of),
    "group_norm": (lambda rngs: nnx.GroupNorm(5, num_groups=5, rngs=rngs), image_of),
    "instance_norm": (lambda rngs: nnx.InstanceNorm(5, rngs=rngs), image_of),
    "attention": (lambda rngs: nnx.MultiHeadAttention(3, 5, 9, decode=False, rngs=rngs), x_of),
    "simple_rnn": (lambda rngs: nnx.RNN(nnx.SimpleCell(5, 7, rngs=rngs)), x_of),
    "lstm": (lambda rngs: nnx.RNN(nnx.LSTMCell(5, 7, rngs=rngs)), x_of),
    "optimized_lstm": (lambda rngs: nnx.RNN(nnx.OptimizedLSTMCell(5, 7, rngs=rngs)), x_of),
    "gru": (lambda rngs: nnx.RNN(nnx.GRUCell(5, 7, rngs=rngs)), x_of),
    "bidirectional": (
        lambda rngs: nnx.Bidirectional(*(nnx.RNN(nnx.GRUCell(5, 4, rngs=rngs)) for _ in range(2))),
        x_of,
    ),
    "lora": (lambda rngs: nnx.LoRALinear(5, 7, lora_rank=2, rngs=rngs), x_of),
    "lora_alone": (lambda rngs: nnx.LoRA(5, 2, 7, rngs=rngs), x_of),
    "prelu": (lambda rngs: nnx.PReLU(), x_of),
    "sequential": (lambda rngs: nnx.Sequential(nnx.Linear(5, 4, rngs=rngs), nnx.relu), x_of),
    "stack": (Stack, x_of),
    "halves": (Halves, x_of),
    "ensemble": (Ensemble, x_of),
    "shared": (Shared, tokens_of),
    "arrays": (Arrays, x_of),
    "sow": pair(sow),
    "cond": pair(lambda m, x: nnx.cond(x.sum() > 0, lambda m, x: m.a(x), lambda m, x: m.b(m.a(x)), m, x)),
    "switch": pair(lambda m, x: nnx.switch(1, [lambda m, x: m.a(x), lambda m, x: m.a(m.b(x))], m, x)),
    "jit": pair(lambda m, x: nnx.jit(lambda m, x: m.a(m.b(x)))(m, x)),
    "loop": pair(lambda m, x: nnx.scan(lambda x, _: m.a(m.b(x)), length=3, out_axes=nnx.Carry)(x, None)),
}


# Reads: every way a model may get at a parameter w [5, 7].

READS: dict[str, Callable[[Any], Any]] = {
    "value": lambda w: w.get_value(),
    "dots": lambda w: w[...],
    "row": lambda w: w[0],
    "cut": lambda w: w[1:, -1],
    "rows_taken": lambda w: w[jnp.array([4, 4, 0])],
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "reshape": lambda w: w.reshape(-1),
    "astype": lambda w: w.astype(jnp.bfloat16).astype(jnp.float32),
    "sum": lambda w: w.sum(axis=1),
    "mean": lambda w: w.mean(),
    "swapaxes": lambda w: w.swapaxes(0, 1),
    "ravel": lambda w: w.ravel(),
    "at": lambda w: w.at[0].set(1.0),
    "size": lambda w: w[...] / w.size,
    "shape": lambda w: w[...] * jnp.ones(w.shape),
    "ndim_len_nbytes": lambda w: w[...] * float(w.ndim + len(w) + w.nbytes),
    "dtype": lambda w: w[...] * jnp.ones((), w.dtype),
    "iteration": lambda w: jnp.concatenate([row * i for i, row in enumerate(w)]),
    "matmul": lambda w: jnp.ones((3, 5)) @ w,
    "matmul_left": lambda w: w @ jnp.ones((7, 3)),
    "add": lambda w: w + 1.0,
    "radd": lambda w: 1.0 + w,
    "sub": lambda w: w - 1.0,
    "rsub": lambda w: 1.0 - w,
    "mul": lambda w: w * w,
    "rmul": lambda w: 2.0 * w,
    "div": lambda w: w / 3.0,
    "rdiv": lambda w: 3.0 / (2.0 + w),
    "rdiv_plain": lambda w: jnp.sin(1.0 / w) / 100,
    "pow": lambda w: w**2,
    "rpow": lambda w: 2.0**w,
    "neg": lambda w: -w,
    "abs": lambda w: abs(w),
    "raw_greater": lambda w: jnp.where(w.get_raw_value() > 0.1, w, 0.0),
    "raw_equal": lambda w: jnp.where(w.get_raw_value() == w, w, 0.0),
    "asarray": lambda w: jnp.asarray(w),
    "einsum": lambda w: jnp.einsum("ij,kj->ik", w, w),
    "transpose": lambda w: jnp.transpose(w),
    "take": lambda w: jnp.take(w, jnp.array([4]), axis=0),
    "concatenate": lambda w: jnp.concatenate([w, w]),
    "tanh": lambda w: jnp.tanh(w),
    "vmap": lambda w: jax.vmap(lambda row: row.sum())(w[...]),
    "dot": lambda w: jax.lax.dot(jnp.ones((3, 5)), w[...]),
    "raw_T": lambda w: w.get_raw_value().T,
    "raw_sub": lambda w: 1.0 - w.get_raw_value(),
    "raw_jnp": lambda w: jnp.sin(w.get_raw_value()),
}


class Weight(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (5, 7)))


class Zoo(nnx.Module):
    """Every layer and every read in one model, so that one program serves all of them."""

    def __init__(self, rngs: nnx.Rngs):
        for name, (make, _) in LAYERS.items():
            setattr(self, name, make(rngs))
        for name in READS:
            setattr(self, f"read_{name}", Weight(rngs))

    def __call__(self, batch: Any) -> dict[str, jax.Array]:
        outputs = {name: call(getattr(self, name), batch) for name, (_, call) in LAYERS.items()}
        return outputs | {f"read_{name}": read(getattr(self, f"read_{name}").w) for name, read in READS.items()}


def zoo_loss(model: Any, batch: Any) -> jax.Array:
    return sum(jnp.mean(jnp.sin(output)) for output in model(batch).values())


def train_plainly(build: Any, loss: Any, batch: Any, optimizer: Any, steps: int) -> tuple[nnx.Module, list[float]]:
    """The same by NNX and optax alone, on one device: the trained model and the losses."""
    graphdef, params, state = jax.jit(lambda: nnx.split(build(nnx.Rngs(jax.random.key(0))), nnx.Param, ...))()

    @jax.jit
    def step(params, state, opt_state, batch):
        def value(params):
            model = nnx.merge(graphdef, params, state, copy=True)
            total = loss(model, batch)
            return total, nnx.state(model, nnx.Not((nnx.Param, nnx.Intermediate)))

        (total, state), gradients = jax.value_and_grad(value, has_aux=True)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, total

    opt_state, losses = optimizer.init(params), []
    for _ in range(steps):
        params, state, opt_state, total = step(params, state, opt_state, batch)
        losses.append(float(total))
    return nnx.merge(graphdef, params, state), losses


def params_of(model: nnx.Module) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): np.asarray(param.get_raw_value()) for path, param in state}


@pytest.fixture(scope="module")
def zoo() -> dict[str, Any]:
    """The zoo trained for two steps by jzero and by hand."""
    engine = start(lambda rngs: Zoo(rngs), zoo_loss)
    first = engine.params()
    losses = [float(engine.step(BATCH)["loss"]) for _ in range(2)]
    plain, plain_losses = train_plainly(Zoo, zoo_loss, BATCH, optax.sgd(0.1), 2)
    plain.eval()
    return {
        "engine": engine,
        "losses": (losses, plain_losses),
        "first": first,
        "params": (engine.params(), params_of(plain)),
        "outputs": (engine.apply(lambda model, batch: model(batch), BATCH), nnx.jit(lambda m, b: m(b))(plain, BATCH)),
    }


def test_zoo_losses(zoo):
    np.testing.assert_allclose(*zoo["losses"], rtol=1e-6)


@pytest.mark.parametrize("name", [*LAYERS, *(f"read_{name}" for name in READS)])
def test_layer_trains_as_plain_nnx(zoo, name):
    params, plain = ({p: v for p, v in tree.items() if p.split("/")[0] == name} for tree in zoo["params"])
    plans = zoo["engine"].plan.params
    assert params.keys() == plain.keys()
    assert params
    assert all(plans[path].zero_axes == ("data",) or plans[path].reason == "whole: scalar" for path in params)
    for path, value in params.items():
        assert not np.array_equal(value, zoo["first"][path]), f"{path} was not trained"
        np.testing.assert_allclose(value, plain[path], rtol=1e-5, atol=1e-6, err_msg=path)
    outputs, plain_outputs = (tree[name] for tree in zoo["outputs"])
    assert outputs.shape == plain_outputs.shape
    np.testing.assert_allclose(outputs, plain_outputs, rtol=1e-5, atol=1e-5)
