"""Any Flax NNX module, unchanged: it trains at stage 3 on three devices, padding and all, as plain NNX does on one."""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jzero
from jzero.adapt import adapt
from jzero.errors import ModelError, PlanError
from jzero.gathered import Gathered
from jzero.usepoint import UsePoint

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
        self.norm = nnx.BatchNorm(5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.linear(self.norm(x)))


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


def rnn(cell: type[nnx.RNNCellBase], rngs: nnx.Rngs) -> nnx.RNN:
    # The default, orthogonal kernels, takes long to compile.
    return nnx.RNN(cell(5, 7, recurrent_kernel_init=nnx.initializers.lecun_normal(), rngs=rngs))


def penalty(pair: Pair, x: jax.Array) -> jax.Array:
    """A function of all parameters at once. (The leaves of nnx.state alone would be the stored, padded arrays.)"""
    params = jax.tree.leaves(nnx.to_pure_dict(nnx.state(pair, nnx.Param)))
    return x + sum(jnp.mean(jnp.exp(p)) for p in params)


def slope(pair: Pair, x: jax.Array) -> jax.Array:
    """Derivatives by the input: the loss then differentiates the reads twice."""
    run = lambda x: jnp.tanh(pair.b(jnp.tanh(pair.a(x))))
    return jax.grad(lambda x: jnp.sum(run(x)))(x) + jax.jvp(run, (x,), (jnp.ones_like(x),))[1]


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
    "simple_rnn": (lambda rngs: rnn(nnx.SimpleCell, rngs), x_of),
    "lstm": (lambda rngs: rnn(nnx.LSTMCell, rngs), x_of),
    "optimized_lstm": (lambda rngs: rnn(nnx.OptimizedLSTMCell, rngs), x_of),
    "gru": (lambda rngs: rnn(nnx.GRUCell, rngs), x_of),
    "bidirectional": (lambda rngs: nnx.Bidirectional(*(rnn(nnx.SimpleCell, rngs) for _ in range(2))), x_of),
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
    "penalty": pair(penalty),
    "slope": pair(slope),
    "cond": pair(lambda m, x: nnx.cond(x.sum() > 0, lambda m, x: m.a(m.b(x)), lambda m, x: m.b(m.a(x)), m, x)),
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
    "astype": lambda w: w.astype(jnp.float32) * 2.0,
    "sum": lambda w: w.sum(axis=1),
    "mean": lambda w: w.mean(),
    "swapaxes": lambda w: w.swapaxes(0, 1),
    "ravel": lambda w: w.ravel(),
    "at": lambda w: w.at[0].set(1.0),
    "size": lambda w: w[...] / w.size,
    "shape": lambda w: w[...] * jnp.ones(w.shape),
    "ndim_len_nbytes": lambda w: w[...] * (w.ndim + len(w) + w.nbytes) / 100.0,
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
        self.w = nnx.Param(jnp.cos(jnp.arange(35.0)).reshape(5, 7))


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


def zoo_loss(model: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The sum over layers of a number that depends on every element of its output and where it stands; and these."""
    place = lambda output: jnp.cos(jnp.arange(float(output.size))).reshape(output.shape)
    numbers = {name: jnp.mean(jnp.sin(output) * place(output)) for name, output in model(batch).items()}
    return sum(numbers.values()), numbers


def train_plainly(build: Any, loss: Any, batch: Any, optimizer: Any, steps: int) -> tuple[nnx.Module, list[Any]]:
    """The same by NNX and optax alone, on one device: the trained model and what the loss returned in each step."""
    with nnx.use_eager_sharding(False):
        graphdef, params, state = nnx.split(build(nnx.Rngs(jax.random.key(0))), nnx.Param, ...)

    @jax.jit
    def step(params, state, opt_state, batch):
        def value(params):
            model = nnx.merge(graphdef, params, state, copy=True)
            result = loss(model, batch)
            total = result[0] if isinstance(result, tuple) else result
            return total, (result, nnx.state(model, nnx.Not((nnx.Param, nnx.Intermediate))))

        gradients, (result, state) = jax.grad(value, has_aux=True)(params)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, result

    opt_state, results = optimizer.init(params), []
    for _ in range(steps):
        params, state, opt_state, result = step(params, state, opt_state, batch)
        results.append(jax.tree.map(float, result))
    return nnx.merge(graphdef, params, state), results


def params_of(model: nnx.Module) -> dict[str, np.ndarray]:
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): np.asarray(param.get_raw_value()) for path, param in state}


@dataclass(frozen=True)
class Trained:
    """The zoo before and after two steps by jzero, and after the same by hand; and the numbers of both steps."""

    engine: jzero.Engine
    first: dict[str, np.ndarray]
    params: dict[str, np.ndarray]
    numbers: list[dict[str, float]]
    plain_params: dict[str, np.ndarray]
    plain_numbers: list[dict[str, float]]


@pytest.fixture(scope="module")
def zoo() -> Trained:
    engine = start(lambda rngs: Zoo(rngs), zoo_loss)
    first = engine.params()
    numbers = [jax.tree.map(float, engine.step(BATCH)) for _ in range(2)]
    plain, results = train_plainly(lambda rngs: Zoo(rngs), zoo_loss, BATCH, optax.sgd(0.1), 2)
    plain_numbers = [{"loss": loss, **extras} for loss, extras in results]
    return Trained(engine, first, engine.params(), numbers, params_of(plain), plain_numbers)


@pytest.mark.parametrize("name", ["loss", *LAYERS, *(f"read_{name}" for name in READS)])
def test_layer_trains_as_plain_nnx(zoo, name):
    assert zoo.numbers[0][name] != zoo.numbers[1][name]
    for ours, plain in zip(zoo.numbers, zoo.plain_numbers, strict=True):
        np.testing.assert_allclose(ours[name], plain[name], rtol=1e-5, atol=1e-6)
    assert zoo.params.keys() == zoo.plain_params.keys()
    for path in [path for path in zoo.params if path.split("/")[0] == name]:
        leaf = zoo.engine.plan.params[path]
        assert leaf.zero_axes == ("data",) or leaf.reason == "whole: scalar"
        assert zoo.params[path].shape == leaf.shape == zoo.plain_params[path].shape
        assert not np.array_equal(zoo.params[path], zoo.first[path]), f"{path} was not trained"
        np.testing.assert_allclose(zoo.params[path], zoo.plain_params[path], rtol=1e-5, atol=1e-5, err_msg=path)


def test_remat_stack_trains_as_plain_nnx():
    """A block that recomputes its gathers: no policy of jzero's around it."""
    build = lambda rngs: Stack(rngs, remat=True)
    loss = lambda model, batch: jnp.mean(jnp.sin(model(batch["x"])))
    engine = start(build, loss)
    first = engine.params()
    losses = [float(engine.step(BATCH)["loss"]) for _ in range(2)]
    plain, plain_losses = train_plainly(build, loss, BATCH, optax.sgd(0.1), 2)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    for path, value in params_of(plain).items():
        assert not np.array_equal(value, first[path])
        np.testing.assert_allclose(engine.params()[path], value, rtol=1e-5, atol=1e-5, err_msg=path)


# Reading a stored parameter.


@pytest.fixture
def weight(monkeypatch) -> tuple[np.ndarray, Gathered, list[str]]:
    """A parameter [5, 7] stored as [5, 9] with nines in the padding; and a list that grows with every gather."""
    value = RNG.uniform(0.5, 2.0, size=(5, 7)).astype(np.float32)
    dtype, as_it_is = np.dtype("float32"), lambda array, dropped: array
    use = UsePoint("w", (5, 7), (5, 9), (5, 9), 1, dtype, dtype, as_it_is, as_it_is)
    reads, read = [], UsePoint.read
    monkeypatch.setattr(UsePoint, "read", lambda self, *held: reads.append(self.path) or read(self, *held))
    return value, Gathered(jnp.pad(value, ((0, 0), (0, 2)), constant_values=9.0), use), reads


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda w: w.shape, (5, 7)),
        (lambda w: w.ndim, 2),
        (lambda w: w.dtype, np.dtype("float32")),
        (lambda w: w.size, 35),
        (len, 5),
        (jnp.shape, (5, 7)),
    ],
    ids=["shape", "ndim", "dtype", "size", "len", "jnp.shape"],
)
def test_questions_about_shape_never_gather(weight, ask, answer):
    _, gathered, reads = weight
    assert ask(gathered) == answer
    assert reads == []


BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "ne", "lt", "le", "gt", "ge"]


@pytest.mark.parametrize("name", BINARY)
def test_operators_on_both_sides(weight, name):
    value, gathered, reads = weight
    apply = getattr(operator, name)
    others = {"scalar": 1.25, "array": jnp.float32(value[0]), "itself": gathered}
    for kind, other in others.items():
        plain = value if kind == "itself" else other
        np.testing.assert_allclose(apply(gathered, other), apply(jnp.asarray(value), plain), rtol=1e-6)
        np.testing.assert_allclose(apply(other, gathered), apply(plain, jnp.asarray(value)), rtol=1e-6)
    assert len(reads) == 8


@pytest.mark.parametrize("name", ["neg", "pos", "abs"])
def test_unary_operators(weight, name):
    value, gathered, reads = weight
    np.testing.assert_array_equal(getattr(operator, name)(gathered), getattr(operator, name)(value))
    assert len(reads) == 1


def test_matmul_on_both_sides(weight):
    value, gathered, _ = weight
    np.testing.assert_allclose(gathered @ jnp.ones((7, 2)), value @ np.ones((7, 2)), rtol=1e-6)
    np.testing.assert_allclose(jnp.ones((2, 5)) @ gathered, np.ones((2, 5)) @ value, rtol=1e-6)
    np.testing.assert_allclose(gathered @ gathered.T, value @ value.T, rtol=1e-6)


# Models that cannot work say so by name.


class Custom(nnx.Module):
    """A weight x [., 5] -> [., 3], and something done to it in each forward pass."""

    def __init__(self, rngs: nnx.Rngs, forward: Any = None, **variables: Any):
        self.w = nnx.Param(jnp.ones((5, 3)))
        self.forward = forward
        for name, value in variables.items():
            setattr(self, name, value)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x @ self.w
        if self.forward:
            self.forward(self)
        return y


def mean_output(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model(batch["x"]))


def _replace(model: Custom) -> None:
    model.w = nnx.Param(jnp.ones((5, 3)))


def _write(model: Custom) -> None:
    model.w[...] = jnp.ones((5, 3))


def _write_row(model: Custom) -> None:
    model.w[0] = jnp.ones(3)


def _new_param(model: Custom) -> None:
    model.late = nnx.Param(jnp.ones(3))


def _new_state(model: Custom) -> None:
    model.late = nnx.Variable(jnp.ones(3))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda rngs: nnx.SpectralNorm(nnx.Linear(5, 3, rngs=rngs), rngs=rngs),
            "layer_instance/kernel: the model writes",
        ),
        (
            lambda rngs: nnx.WeightNorm(nnx.Linear(5, 3, rngs=rngs), rngs=rngs),
            "layer_instance/kernel: the model writes",
        ),
        (lambda rngs: Custom(rngs, _write), "w: the model writes"),
        (lambda rngs: Custom(rngs, _write_row), "w: the model writes"),
        (lambda rngs: Custom(rngs, lambda m: m.w.set_value(jnp.ones((5, 3)))), "w: the model writes"),
        (lambda rngs: Custom(rngs, lambda m: m.w.copy_from(nnx.Param(jnp.ones((5, 3))))), "w: the model writes"),
        (lambda rngs: Custom(rngs, lambda m: m.w.set_raw_value(jnp.ones((5, 3)))), "w: the model writes"),
        (lambda rngs: Custom(rngs, _replace), "w: the model writes or makes"),
        (lambda rngs: Custom(rngs, _new_param), "late: the model writes or makes"),
        (lambda rngs: Custom(rngs, _new_state), "late: the model makes this while it runs"),
        (
            lambda rngs: Custom(rngs, lambda m: m.s.set_value(jnp.ones(3)), s=nnx.Variable(jnp.ones(5))),
            r"s: the model turns float32\(5,\) into float32\(3,\)",
        ),
        (
            lambda rngs: Custom(rngs, lambda m: m.s.set_value(jnp.ones(5)), s=nnx.Variable(jnp.ones(5, jnp.int32))),
            r"s: the model turns int32\(5,\) into float32\(5,\)",
        ),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_models_that_write_are_refused_when_they_do(build, message):
    engine = start(build, mean_output)
    with pytest.raises(ModelError, match=f"^{message}"):
        engine.step(BATCH)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda rngs: Custom(rngs, i=nnx.Param(jnp.arange(3))), "i: an nnx.Param of dtype int32 has no gradient"),
        (Custom(nnx.Rngs(0), i=nnx.Param(jnp.arange(3))), "i: an nnx.Param of dtype int32 has no gradient"),
        (lambda rngs: Custom(rngs, note=nnx.Variable("a text")), "note: holds a str, not an array"),
        (Custom(nnx.Rngs(0), note=nnx.Variable("a text")), "note: holds a str, not an array"),
        (lambda rngs: Custom(rngs, table=jnp.arange(3)), r"table: an array that is no variable.*nnx\.data"),
        (lambda rngs: nnx.Dropout(0.5, rngs=rngs), "the model has no parameters"),
        (lambda rngs: 3, "the model function returned int"),
        (lambda rngs: None, "the model function returned NoneType"),
        (nnx.Linear, "model is <class .*Linear'>: give .* lambda rngs: MyModel"),
        ("my_model", "model is 'my_model': give .* lambda rngs: MyModel"),
        (
            lambda rngs: nnx.vmap(lambda rngs: nnx.Linear(5, 3, rngs=rngs), out_axes=1)(rngs.split(4)),
            r"bias: layers of \(3,\) are stacked to \(3, 4\)",
        ),
    ],
)
def test_what_is_no_model_is_refused_at_once(model, message):
    with pytest.raises(ModelError, match=f"^{message}"):
        adapt(model)


# Stacks of layers.


class Gains(nnx.Module):
    """A stack made by hand: nothing tells its [7, 2] from a matrix."""

    def __init__(self, rngs: nnx.Rngs):
        self.gains = nnx.Param(jnp.ones((7, 2)))
        self.linear = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, gain: (x * gain, None), self.linear(x), self.gains.get_raw_value())[0]


def _nested(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.vmap(nnx.vmap(lambda rngs: nnx.Linear(5, 3, rngs=rngs)))(rngs.split((7, 9)))


@pytest.mark.parametrize(
    ("model", "stacks"),
    [
        (lambda rngs: nnx.Linear(5, 3, rngs=rngs), {"kernel": 0, "bias": 0}),
        (lambda rngs: nnx.Conv(5, 3, (3, 3), rngs=rngs), {"kernel": 0, "bias": 0}),
        (_nested, {"kernel": 2, "bias": 2}),
        (
            lambda rngs: Stack(rngs).blocks,
            dict.fromkeys(["linear/kernel", "linear/bias", "norm/scale", "norm/bias"], 1),
        ),
        # A built module does not tell: wherever a first dim costs nothing, it is left alone.
        (
            Stack(nnx.Rngs(0)).blocks,
            dict.fromkeys(["linear/kernel", "linear/bias", "norm/scale", "norm/bias"], 1),
        ),
        (Gains(nnx.Rngs(0)), {"gains": 0, "linear/kernel": 0, "linear/bias": 0}),
    ],
    ids=["linear", "conv", "nested", "stack", "built_stack", "built_by_hand"],
)
def test_stack_dims_are_found(model, stacks):
    assert {path: param.stack_ndim for path, param in adapt(model).params.items()} == stacks


def test_stack_dim_is_never_split_even_where_it_is_the_largest(zoo):
    plans = {path: leaf for path, leaf in zoo.engine.plan.params.items() if path.startswith("stack/")}
    assert all(max(leaf.shape) == leaf.shape[0] == 7 for leaf in plans.values())
    assert {leaf.dim for leaf in plans.values()} == {1}


def test_split_stack_is_refused_where_it_is_scanned():
    engine = start(Gains(nnx.Rngs(0)), mean_output)
    assert engine.plan.params["gains"].dim == 0
    with pytest.raises(
        PlanError, match=r"^gains: dim 0 of \(7, 2\) is split over devices, but the model loops over it"
    ):
        engine.step(BATCH)


# The model's own sharding.


class Tensor(nnx.Module):
    """Megatron's pair of matrices by NNX's own metadata, then a stack with its layer axis named."""

    def __init__(self, rngs: nnx.Rngs):
        split = lambda *spec: nnx.with_partitioning(nnx.initializers.lecun_normal(), spec)
        self.up = nnx.Linear(5, 8, kernel_init=split(None, "tensor"), rngs=rngs)
        self.down = nnx.Linear(8, 5, kernel_init=split("tensor", None), rngs=rngs)
        make = lambda rngs: nnx.Linear(5, 6, kernel_init=split(None, "tensor"), rngs=rngs)
        self.stack = nnx.vmap(make, transform_metadata={nnx.PARTITION_NAME: "layers"})(rngs.split(3))

    def __call__(self, x: jax.Array) -> jax.Array:
        layer = lambda layer, x: jnp.tanh(layer(x))[..., :5]
        return nnx.scan(layer, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.stack, self.down(nnx.gelu(self.up(x))))


def test_tensor_parallel_metadata_stays_and_zero_goes_on_top():
    batch = {"x": np.concatenate([BATCH["x"], -2 * BATCH["x"][:2]])}
    loss = lambda model, batch: jnp.mean(jnp.square(model(batch["x"]) - 1))
    engine = start(lambda rngs: Tensor(rngs), loss, optax.adam(0.01), 8, mesh={"data": 4, "tensor": 2})
    specs = {path: leaf.spec for path, leaf in engine.plan.params.items()}
    assert specs["up/kernel"] == P("data", "tensor")
    assert specs["down/kernel"] == P("tensor", "data")
    assert specs["up/bias"] == P("data")
    assert specs["stack/kernel"] == P(None, "data", "tensor")
    assert engine.state.params["stack/kernel"].addressable_shards[0].data.shape == (3, 2, 3)
    losses = [float(engine.step(batch)["loss"]) for _ in range(3)]
    plain, plain_losses = train_plainly(lambda rngs: Tensor(rngs), loss, batch, optax.adam(0.01), 3)
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
    for path, value in params_of(plain).items():
        np.testing.assert_allclose(engine.params()[path], value, rtol=1e-5, atol=1e-6, err_msg=path)


# Randomness.


class Masks(nnx.Module):
    """Its gradient is the dropout mask, row by row."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.zeros((72, 8)))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, rows: jax.Array) -> jax.Array:
        return self.dropout(jnp.ones((rows.size, 8))) * self.w[rows]


@functools.cache
def masks(devices: int, stage: int, micro_batches: int, seed: int = 0) -> np.ndarray:
    """The masks of two steps [2, 72, 8], by global row."""
    engine = start(
        lambda rngs: Masks(rngs),
        lambda model, batch: jzero.WeightedLoss(jnp.sum(model(batch)), jnp.float32(1)),
        optax.sgd(float(micro_batches)),
        devices,
        zero=SPLIT | {"stage": stage},
        train={"global_batch_size": 72, "accumulation_steps": micro_batches, "seed": seed},
    )
    found = [engine.params()["w"]]
    for _ in range(2):
        engine.step(np.arange(72, dtype=np.int32))
        found.append(engine.params()["w"])
    return -np.diff(np.stack(found), axis=0)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("devices", "stage"), [(2, 1), (3, 3), (8, 3)])
def test_dropout_masks_are_those_of_one_device(devices, stage, micro_batches):
    np.testing.assert_array_equal(masks(devices, stage, micro_batches), masks(1, 0, micro_batches))


def test_dropout_masks_differ_between_steps_rows_micro_batches_and_seeds():
    first, second = masks(8, 3, 3)
    assert set(np.unique(first)) == {0.0, 2.0}
    assert 0.3 < np.mean(first == 0) < 0.7
    assert not np.array_equal(first, second)
    micro = [first[j::3] for j in range(3)]
    assert len({m.tobytes() for m in micro}) == 3
    assert len({row.tobytes() for row in first}) > 50  # of 72 rows of 8 bits
    assert not np.array_equal(first, masks(1, 0, 1)[0])
    assert not np.array_equal(masks(1, 0, 1), masks(1, 0, 1, seed=1))


class Noisy(nnx.Module):
    """Batch statistics and dropout, in a stack too."""

    def __init__(self, rngs: nnx.Rngs):
        self.stack = nnx.vmap(NoisyBlock)(rngs.split(3))
        self.rngs = rngs  # a stream the model keeps for itself

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + 0.1 * jax.random.normal(self.rngs.noise(), x.shape)
        return nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.stack, x)


class NoisyBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(5, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.linear(x)))


ROWS_24 = RNG.normal(size=(24, 5)).astype(np.float32)


def host(engine: jzero.Engine) -> dict[str, np.ndarray]:
    """Every array of the state, keys as their integers."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return {n: np.array(jax.random.key_data(x) if is_key(x) else x) for n, x in engine.arrays().items()}


def assert_same_arrays(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def test_resumed_run_repeats_its_randomness_to_the_bit(tmp_path):
    loss = lambda model, batch: jnp.mean(jnp.square(model(batch) - 1))
    make = lambda seed: start(lambda rngs: Noisy(rngs), loss, optax.adam(0.01), 8, train={"seed": seed})
    engine = make(0)
    for _ in range(5):
        engine.step(ROWS_24)
    engine.save(tmp_path)
    straight = [float(engine.step(ROWS_24)["loss"]) for _ in range(5)]
    resumed = make(1)
    assert not np.array_equal(resumed.params()["stack/linear/kernel"], engine.params()["stack/linear/kernel"])
    resumed.restore(tmp_path)
    assert [float(resumed.step(ROWS_24)["loss"]) for _ in range(5)] == straight
    assert len(set(straight)) == 5
    assert_same_arrays(host(resumed), host(engine))


# Model state.


class Averages(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(5, momentum=0.9, rngs=rngs)
        self.linear = nnx.Linear(5, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(self.norm(x))


def running_statistics(batches: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    mean, variance = np.zeros(5), np.ones(5)
    for x in batches:
        mean = 0.9 * mean + 0.1 * x.mean(0, dtype=np.float64)
        variance = 0.9 * variance + 0.1 * x.var(0, dtype=np.float64)
    return mean, variance


@functools.cache
def averages(devices: int, stage: int, micro_batches: int) -> jzero.Engine:
    """Two steps over the same rows, the second time doubled."""
    engine = start(
        lambda rngs: Averages(rngs),
        lambda model, batch: jnp.mean(jnp.square(model(batch) - 1)),
        None,
        devices,
        zero=SPLIT | {"stage": stage},
        train={"global_batch_size": 24, "accumulation_steps": micro_batches},
    )
    engine.step(ROWS_24)
    engine.step(2 * ROWS_24)
    return engine


@pytest.mark.parametrize(
    ("devices", "stage", "micro_batches"), [(1, 0, 1), (2, 1, 1), (3, 3, 1), (8, 3, 1), (1, 0, 3), (8, 2, 3)]
)
def test_batch_statistics_are_those_of_the_global_batch(devices, stage, micro_batches):
    """Of the micro-batch where there are several: each moves the running average, in order."""
    state = averages(devices, stage, micro_batches).state.model_state
    batches = [x[j::micro_batches] for x in (ROWS_24, 2 * ROWS_24) for j in range(micro_batches)]
    mean, variance = running_statistics(batches)
    np.testing.assert_allclose(state["norm/mean"], mean, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(state["norm/var"], variance, rtol=1e-5)
    assert all(np.array_equal(shard.data, state["norm/mean"]) for shard in state["norm/mean"].addressable_shards)


def test_batch_statistics_move_with_the_checkpoint(tmp_path):
    engine, other = averages(8, 3, 1), averages(3, 3, 1)
    engine.save(tmp_path)
    other.step(5 * ROWS_24)
    assert not np.array_equal(other.state.model_state["norm/mean"], engine.state.model_state["norm/mean"])
    other.restore(tmp_path)
    for name in ("norm/mean", "norm/var"):
        np.testing.assert_array_equal(other.state.model_state[name], engine.state.model_state[name])
    averages.cache_clear()


def test_evaluation_uses_running_statistics_and_changes_nothing():
    engine = averages(8, 3, 1)
    before, params = host(engine), engine.params()
    x = 3 * ROWS_24 + 1
    mean, variance = (before[f"model_state/norm/{name}"] for name in ("mean", "var"))
    normed = (x - mean) / np.sqrt(variance + 1e-5) * params["norm/scale"] + params["norm/bias"]
    output = normed @ params["linear/kernel"] + params["linear/bias"]
    np.testing.assert_allclose(engine.evaluate(x)["loss"], np.mean(np.square(output - 1)), rtol=1e-5)
    np.testing.assert_allclose(engine.apply(lambda model, x: model(x), x), output, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(engine.model()(x), output, rtol=1e-5, atol=1e-5)
    assert_same_arrays(host(engine), before)


# What goes in and comes out.


def test_model_in_hand_is_a_snapshot():
    """It can be called after later steps, which consume the arrays of the state it was taken from."""
    engine = averages(8, 3, 1)
    model = engine.model()
    before = np.asarray(model(ROWS_24))
    np.testing.assert_allclose(engine.apply(lambda model, x: model(x), ROWS_24), before, rtol=1e-5, atol=1e-6)
    assert nnx.state(model, nnx.Param)["linear"]["kernel"].get_raw_value().shape == (5, 2)
    engine.step(ROWS_24)
    np.testing.assert_array_equal(model(ROWS_24), before)
    assert not np.allclose(engine.model()(ROWS_24), before)
    averages.cache_clear()


@pytest.mark.parametrize(("devices", "stage"), [(1, 0), (8, 0), (8, 3)])
@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
def test_built_module_is_the_start_and_stays_untouched(devices, stage, kind):
    module = Averages(nnx.Rngs(7))
    for _, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Variable):
            variable.set_raw_value(kind(np.array(variable.get_raw_value())))
    module.norm.mean.set_value(kind(np.full(5, 0.25, np.float32)))
    before = {path: value.copy() for path, value in params_of(module).items()}
    engine = start(module, lambda model, batch: jnp.mean(model(batch)), None, devices, zero=SPLIT | {"stage": stage})
    np.testing.assert_array_equal(engine.state.model_state["norm/mean"], np.full(5, 0.25))
    assert engine.params().keys() == before.keys()
    for path, value in engine.params().items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)
        assert value.shape == before[path].shape
    engine.step(ROWS_24)
    engine.step(ROWS_24)
    assert not np.array_equal(engine.params()["linear/kernel"], before["linear/kernel"])
    for path, value in params_of(module).items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)
    np.testing.assert_array_equal(module.norm.mean[...], np.full(5, 0.25))
    assert module.norm.mean.get_metadata().get("on_set_value") is None


class Undecided(nnx.Module):
    """Attention whose `deterministic` nobody has set, and a BatchNorm whose statistics are frozen."""

    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, dropout_rate=0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.attention(x))


def test_undecided_layers_train_and_decided_ones_stay():
    loss = lambda model, x: jnp.mean(jnp.square(model(x) - 1))
    engine = jzero.initialize(lambda rngs: Undecided(rngs), loss, optax.sgd(0.0), {})
    x = np.random.default_rng(0).normal(size=(8, 3, 8)).astype(np.float32)
    mean = np.array(engine.state.model_state["norm/mean"])
    losses = {float(engine.step(x)["loss"]) for _ in range(3)}
    assert len(losses) == 3  # other masks each time
    assert len({float(engine.evaluate(x)["loss"]) for _ in range(3)} - losses) == 1
    np.testing.assert_array_equal(engine.state.model_state["norm/mean"], mean)
