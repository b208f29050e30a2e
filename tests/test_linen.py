"""Any Flax Linen module, and plain functions, unchanged: they train at any stage as plain Flax and optax do without
jzero."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from toys import HIDDEN, LAYERS, LENGTH, VOCAB, WIDTH

import jzero
from jzero.adapt import adapt
from jzero.errors import ConfigError, ModelError, PlanError

STEPS, ROWS, SEED, CLIP_NORM = 8, 96, 3, 1.0
ADAM = optax.adam(4e-3)
token_batch = cache(toys.token_batch)


class Block(nn.Module):
    """Causal mean of what came before, and an MLP whose share is scaled by a learnable scalar."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        seen = jnp.cumsum(nn.LayerNorm()(x), axis=1) / jnp.arange(1, 1 + x.shape[1], dtype=jnp.float32)[:, None]
        x = x + nn.Dense(WIDTH, use_bias=False)(seen)
        gain = self.param("gain", nn.initializers.ones, ())
        return x + gain * nn.Dense(WIDTH)(nn.gelu(nn.Dense(HIDDEN)(nn.LayerNorm()(x)))), None


class Decoder(nn.Module):
    """Tokens int [B, T] -> logits [B, T, VOCAB]; tied embedding; rematerialised blocks, scanned or one by one."""

    scanned: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB, WIDTH)
        x = embed(tokens)
        block = nn.remat(Block, prevent_cse=not self.scanned)
        if self.scanned:
            stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            x, _ = stack(name="blocks")(x, None)
        else:
            for i in range(LAYERS):
                x, _ = block(name=f"block_{i}")(x)
        return embed.attend(nn.LayerNorm()(x))


def function_init(key: jax.Array) -> dict[str, Any]:
    normal = lambda i, *shape: 0.3 * jax.random.normal(jax.random.fold_in(key, i), shape)
    blocks = {"up": normal(1, LAYERS, WIDTH, HIDDEN), "down": normal(2, LAYERS, HIDDEN, WIDTH)}
    blocks |= {"shift": normal(3, LAYERS, HIDDEN), "gain": jnp.ones(LAYERS)}
    return {"embedding": normal(0, VOCAB, WIDTH), "blocks": blocks, "norms": [jnp.ones(WIDTH), jnp.zeros(())]}


def function_apply(params: dict[str, Any], tokens: jax.Array, gather: Callable[[Any], Any] = lambda p: p) -> jax.Array:
    def block(x: jax.Array, layer: dict[str, Any]) -> tuple[jax.Array, None]:
        layer = gather(layer)
        hidden = jax.lax.dot_general(x, layer["up"], (((2,), (0,)), ((), ()))) + layer["shift"]
        return x + layer["gain"] * (jnp.tanh(hidden) @ layer["down"]), None

    embedding, (scale, temperature) = gather((params["embedding"], params["norms"]))
    x, _ = jax.lax.scan(jax.checkpoint(block, prevent_cse=False), embedding[tokens], params["blocks"])
    return (x * scale) @ embedding.T * jnp.exp(temperature)


def gathering_apply(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    return function_apply(params, tokens, jzero.gather)


EXAMPLE = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)


def plain_linen(scanned: bool) -> tuple[Any, Any]:
    module = Decoder(scanned)
    init = lambda key: module.init(key, jnp.zeros(EXAMPLE.shape, EXAMPLE.dtype))["params"]
    return init, lambda params, tokens: module.apply({"params": params}, tokens)


# What jzero is given, and the same model as plain functions init(key) and apply(params, tokens).
MODELS = {
    "linen scanned": (jzero.Linen(Decoder(True), (EXAMPLE,)), plain_linen(True)),
    "linen listed": (jzero.Linen(Decoder(False), (EXAMPLE,)), plain_linen(False)),
    "function": (jzero.Function(function_init, function_apply, ["blocks/*"]), (function_init, function_apply)),
    "function that gathers": (
        jzero.Function(function_init, gathering_apply, ["blocks/*"], gathers=True),
        (function_init, function_apply),
    ),
}


def flat(tree: Any) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): np.asarray(leaf) for keys, leaf in leaves}


@cache
def plain_training(name: str) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Initial parameters, losses, gradient norms and parameters of a training without jzero."""
    _, (init, apply) = MODELS[name]

    def mean_loss(params: Any, batch: Any) -> jax.Array:
        sums = toys.token_loss(lambda tokens: apply(params, tokens), batch)
        return sums.total / sums.weight

    optimizer = optax.chain(optax.clip_by_global_norm(CLIP_NORM), ADAM)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(mean_loss)(params, batch)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss, optax.tree.norm(gradients)

    params = start = jax.jit(init)(jax.random.key(SEED))
    state, losses, norms = optimizer.init(params), [], []
    for i in range(STEPS):
        params, state, loss, norm = step(params, state, token_batch(ROWS, i))
        losses.append(float(loss))
        norms.append(float(norm))
    return flat(start), np.array(losses), np.array(norms), flat(params)


QUICK, PLACE = ("linen scanned", "function that gathers"), (2, 3, 4)
PLACES = [PLACE] + [
    (stage, devices, (1, 4)[(stage + i) % 2])
    for stage in range(4)
    for i, devices in enumerate((1, 2, 3, 8))
    if (stage, devices) != (2, 3)
]


def marks(name: str, place: tuple[int, int, int]) -> Any:
    if place == PLACE:
        return () if name in QUICK else pytest.mark.slow
    return pytest.mark.slow if name in QUICK and place[0] % 2 else pytest.mark.thorough


ARMS = [pytest.param(name, *place, marks=marks(name, place)) for name in MODELS for place in PLACES]


@pytest.mark.parametrize(("name", "stage", "devices", "accumulation"), ARMS)
def test_every_placement_trains_as_without_jzero(name, stage, devices, accumulation):
    start, losses, norms, params = plain_training(name)
    assert losses[-1] < losses[0] - 0.1
    assert norms.max() > CLIP_NORM
    config = {
        "zero": {"stage": stage, "min_shard_elements": 0},
        "optimizer": {"clip_norm": CLIP_NORM},
        "train": {"global_batch_size": ROWS, "accumulation_steps": accumulation, "seed": SEED},
    }
    engine = jzero.initialize(MODELS[name][0], toys.token_loss, ADAM, config, jax.devices()[:devices])
    split = {path for path, array in engine.state.params.items() if array.addressable_shards[0].data.size < array.size}
    scalars = {path for path in start if start[path].size == 1 or path.endswith("gain")}
    assert split == (set(start) - scalars if stage == 3 and devices > 1 else set())
    assert any(leaf.padded for leaf in engine.plan.params.values()) == (devices > 1 and stage > 0)
    assert engine.params().keys() == start.keys()
    for path, value in engine.params().items():
        np.testing.assert_array_equal(value, start[path], err_msg=path)
    metrics = jax.device_get([engine.step(token_batch(ROWS, i)) for i in range(STEPS)])
    np.testing.assert_allclose([m["loss"] for m in metrics], losses, rtol=1e-5)
    np.testing.assert_allclose([m["grad_norm"] for m in metrics], norms, rtol=1e-5)
    for path, value in engine.params().items():
        scale = np.abs(params[path]).max() or 1.0
        np.testing.assert_allclose(value / scale, params[path] / scale, atol=1e-5, err_msg=path)
    tokens = token_batch(ROWS, 0)["tokens"][:, :-1]
    np.testing.assert_allclose(
        engine.model()(tokens),
        MODELS[name][1][1](
            jax.tree.map(jnp.asarray, engine.model().params if "function" in name else nested(engine)), tokens
        ),
        rtol=1e-4,
        atol=1e-5,
    )


def nested(engine: jzero.Engine) -> Any:
    return engine.model().variables["params"]


# Kinds of layers and of reading


def mlp_like(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential([nn.Dense(13), nn.tanh, layer(), nn.Dense(5)])


class Setup(nn.Module):
    def setup(self):
        self.up, self.down = nn.Dense(13), nn.Dense(5)
        self.scale = self.param("scale", nn.initializers.normal(1.0), (13,))

    def __call__(self, x):
        return self.down(self.hidden(x) * self.scale)

    def hidden(self, x):
        return nn.tanh(self.up(x))


class OwnReads(nn.Module):
    """Reads a parameter in ways that no layer does, the raw collection included."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(0.5), (7, 13))
        x = nn.tanh(jax.lax.dot(x, w) + w.mean() + w.T.reshape(-1)[3])
        return nn.Dense(5)(x) + self.variables["params"]["w"][:5, 0] * self.get_variable("params", "w").size


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(14)(x)[:, None, :] * jnp.ones((1, 3, 1))
        return nn.Dense(5)(nn.MultiHeadDotProductAttention(num_heads=2)(x).mean(1))


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(5)(nn.RNN(nn.LSTMCell(13))(x[:, :, None])[:, -1])


class Convolution(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.GroupNorm(num_groups=3)(nn.Conv(9, (3,))(x[:, :, None]))
        return nn.Dense(5)(nn.tanh(x).mean(1))


class Ensemble(nn.Module):
    """Members side by side, stacked by nn.vmap, with one shared layer."""

    @nn.compact
    def __call__(self, x):
        members = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=4)
        return members(5, name="members")(nn.tanh(nn.Dense(13)(x))).mean(0)


class Shared(nn.Module):
    @nn.compact
    def __call__(self, x):
        twice = nn.Dense(7)
        return nn.Dense(5)(twice(nn.tanh(twice(x))))


LAYER_KINDS: dict[str, Callable[[], nn.Module]] = {
    "dense": mlp_like(lambda: nn.Dense(13)),
    "general": mlp_like(lambda: nn.DenseGeneral(13)),
    "einsum": mlp_like(lambda: nn.Einsum((13, 11), "...a,ab->...b")),
    "norms": mlp_like(lambda: nn.Sequential([nn.LayerNorm(), nn.RMSNorm()])),
    "prelu": mlp_like(nn.PReLU),
    "setup": Setup,
    "own reads": OwnReads,
    "attention": Attention,
    "recurrent": Recurrent,
    "convolution": Convolution,
    "ensemble": Ensemble,
    "shared": Shared,
    "jit": lambda: nn.jit(Setup)(),
    "remat": lambda: nn.remat(Shared)(),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if n % 2 else ()) for n, kind in enumerate(LAYER_KINDS)]
)
def test_layers_of_every_kind_train_alike_on_three_devices_and_on_one(kind):
    batches = [toys.square_batch(12, i) for i in range(3)]
    losses = []
    for stage, devices in ((0, 1), (3, 3)):
        model = jzero.Linen(LAYER_KINDS[kind](), (jnp.zeros((1, 7)),))
        config = {"zero": {"stage": stage, "min_shard_elements": 0}}
        engine = jzero.initialize(model, toys.square_loss, optax.sgd(0.1), config, jax.devices()[:devices])
        assert any(leaf.padded for leaf in engine.plan.params.values()) == (devices == 3)
        losses.append([float(engine.step(batch)["loss"]) for batch in batches])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert len(set(losses[0])) == 3


# State, random streams, modes


class NoisyBlock(nn.Module):
    train: bool

    @nn.compact
    def __call__(self, x, _):
        x = nn.Dropout(0.3, deterministic=not self.train)(nn.Dense(13, use_bias=False)(x))
        return nn.BatchNorm(use_running_average=not self.train, momentum=0.5, name="norm")(x), None


class Noisy(nn.Module):
    """Dropout and BatchNorm, a layer loop in which both differ from layer to layer, and a counter."""

    @nn.compact
    def __call__(self, x, train: bool):
        calls = self.variable("counters", "calls", lambda: jnp.zeros((), jnp.int32))
        if train and not self.is_initializing():
            calls.value += 1

        split = {"params": True, "dropout": True}
        stack = nn.scan(NoisyBlock, variable_axes={"params": 0, "batch_stats": 0}, split_rngs=split, length=3)
        x, _ = stack(train, name="blocks")(nn.Dense(13)(x), None)
        return nn.Dense(5)(x)


def noisy_loss(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(jnp.square(model(batch["x"], train=model.train) - batch["y"]))


NOISY = jzero.Linen(Noisy(), (jnp.zeros((1, 7)),), {"train": False})


def noisy_engine(stage: int = 3, devices: int = 8, **train: Any) -> jzero.Engine:
    config = {"zero": {"stage": stage, "min_shard_elements": 0}, "train": train}
    return jzero.initialize(NOISY, noisy_loss, optax.sgd(0.1), config, jax.devices()[:devices])


@pytest.mark.parametrize(
    "accumulation", [pytest.param(1, marks=pytest.mark.thorough), pytest.param(4, marks=pytest.mark.slow)]
)
def test_dropout_and_batch_norm_draw_and_count_alike_on_any_devices(accumulation):
    batches = [toys.square_batch(96, i) for i in range(3)]
    found = []
    for stage, devices in ((0, 1), (1, 2), (2, 3), (3, 3), (3, 8)):
        engine = noisy_engine(stage, devices, accumulation_steps=accumulation)
        losses = [float(engine.step(batch)["loss"]) for batch in batches]
        again = noisy_engine(stage, devices, accumulation_steps=accumulation, seed=1)
        assert float(again.step(batches[0])["loss"]) != losses[0]
        assert int(engine.state.model_state["counters/calls"]) == 3 * accumulation
        found.append(
            [
                *losses,
                float(engine.evaluate(batches[0])["loss"]),
                engine.state.model_state["batch_stats/blocks/norm/mean"],
            ]
        )
    for other in found[1:]:
        np.testing.assert_allclose(other[:4], found[0][:4], rtol=1e-5)
        np.testing.assert_allclose(other[4], found[0][4], atol=1e-6)
    assert found[0][4].shape == (3, 13)
    assert np.abs(found[0][4]).max() > 1e-3


def test_masks_differ_by_layer_step_micro_batch_and_call():
    class Mask(nn.Module):
        @nn.compact
        def __call__(self, x):
            scale = self.param("scale", nn.initializers.ones, (8,))
            drop = lambda x: nn.Dropout(0.5, deterministic=self.is_initializing())(x)
            return jnp.stack([drop(x), drop(x)]) * scale

    def loss(model: Any, batch: Any) -> Any:
        seen = jnp.concatenate([model(jnp.ones(8)), model(jnp.ones(8))])
        masks = (seen > 0).astype(jnp.float32) @ (2.0 ** jnp.arange(8.0))
        return seen.sum() + 0 * batch.sum(), {f"mask_{i}": jax.lax.stop_gradient(masks[i]) for i in range(4)}

    model = jzero.Linen(Mask(), (jnp.ones(8),))
    engine = jzero.initialize(model, loss, optax.sgd(0.0), {})
    masks = [[float(metrics[f"mask_{i}"]) for i in range(4)] for metrics in (engine.step(np.ones(8)) for _ in range(3))]
    assert len(set(np.ravel(masks))) >= 11  # of 12; two of 256 may meet


def test_evaluation_changes_nothing_and_uses_running_statistics():
    engine = noisy_engine()
    batch = toys.square_batch(24, 0)
    engine.step(batch)
    before = {name: np.array(array) for name, array in engine.arrays().items() if not name.endswith("rng")}
    losses = {float(engine.evaluate(batch)["loss"]) for _ in range(3)}
    assert len(losses) == 1
    for name, value in before.items():
        np.testing.assert_array_equal(engine.arrays()[name], value, err_msg=name)
    assert losses != {float(engine.step(batch)["loss"])}


def test_collections_and_streams_are_saved_and_restored(tmp_path):
    batches = [toys.square_batch(24, i) for i in range(4)]
    straight = noisy_engine(3, 8)
    losses = [float(straight.step(batch)["loss"]) for batch in batches]
    first = noisy_engine(3, 8)
    for batch in batches[:2]:
        first.step(batch)
    first.save(tmp_path)
    second = noisy_engine(1, 3, seed=5)  # whose own streams would be others
    second.restore(tmp_path)
    np.testing.assert_allclose([float(second.step(batch)["loss"]) for batch in batches[2:]], losses[2:], rtol=1e-5)


def test_a_loss_that_trains_in_evaluation_too_is_told_how_to_ask():
    engine = jzero.initialize(NOISY, lambda m, b: jnp.mean(m(b["x"], train=True)), optax.sgd(0.1), {})
    batch = toys.square_batch(8, 0)
    engine.step(batch)
    with pytest.raises(ModelError, match=r"model\(x, train=model.train\)"):
        engine.evaluate(batch)


def test_a_stream_that_is_not_named_is_told_where_to_name():
    class Jitter(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(5)(x)
            return x if self.is_initializing() else x + jax.random.normal(self.make_rng("jitter"), x.shape)

    start = lambda **rngs: jzero.initialize(
        jzero.Linen(Jitter(), (jnp.zeros((1, 7)),), **rngs), toys.square_loss, optax.sgd(0.1), {}
    )
    with pytest.raises(ModelError, match=r'"jitter".*jzero.Linen\(rngs=...\)'):
        start().step(toys.square_batch(8, 0))
    start(rngs=("jitter",)).step(toys.square_batch(8, 0))


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        hidden = nn.Dense(13)(x)
        self.sow("losses", "penalty", jnp.square(hidden).mean())
        self.sow("intermediates", "hidden", hidden)
        return nn.Dense(5)(hidden)


def test_what_a_module_sows_is_handed_to_who_asks_and_not_carried():
    def loss(model: Any, batch: Any) -> Any:
        y, sown = model(batch["x"], mutable=["losses"])
        (penalty,) = sown["losses"]["penalty"]
        return jnp.mean(jnp.square(y - batch["y"])) + 0.1 * penalty, {"penalty": penalty}

    engine = jzero.initialize(jzero.Linen(Sowing(), (jnp.zeros((1, 7)),)), loss, optax.sgd(0.1), {})
    assert set(engine.state.model_state) == {"rng"}
    first = engine.step(toys.square_batch(8, 0))
    assert float(first["penalty"]) > 0
    assert np.isfinite(engine.evaluate(toys.square_batch(8, 1))["penalty"])


def test_state_that_changes_its_shape_is_refused():
    class Growing(nn.Module):
        @nn.compact
        def __call__(self, x):
            kept = self.variable("cache", "kept", lambda: jnp.zeros((1, 5)))
            y = nn.Dense(5)(x)
            if not self.is_initializing():
                kept.value = jnp.concatenate([kept.value, y[:1]])
            return y

    engine = jzero.initialize(jzero.Linen(Growing(), (jnp.zeros((1, 7)),)), toys.square_loss, optax.sgd(0.1), {})
    with pytest.raises(ModelError, match=r"cache/kept: the model turns float32\(1, 5\) into float32\(2, 5\)"):
        engine.step(toys.square_batch(8, 0))


# Stacks, specs and refusals


def test_stacks_are_told_by_flax_and_never_split():
    params = adapt(jzero.Linen(Decoder(True), (EXAMPLE,))).params
    stacks = {path: p.stack_ndim for path, p in params.items()}
    assert {path for path, n in stacks.items() if n == 1} == {path for path in params if path.startswith("blocks/")}
    assert params["blocks/gain"].shape == (LAYERS,)
    nested = nn.vmap(Ensemble, variable_axes={"params": 0}, split_rngs={"params": True}, axis_size=6)
    params = adapt(jzero.Linen(nested(), (jnp.zeros((6, 1, 7)),))).params
    assert {path: (p.shape, p.stack_ndim) for path, p in params.items() if "bias" in path} == {
        "Dense_0/bias": ((6, 13), 1),
        "members/bias": ((6, 4, 5), 2),
    }


def test_a_stack_along_another_axis_is_refused():
    stack = nn.vmap(nn.Dense, variable_axes={"params": 1}, split_rngs={"params": True}, in_axes=None, axis_size=4)
    with pytest.raises(ModelError, match="bias: layers are stacked along axis 1"):
        adapt(jzero.Linen(stack(5), (jnp.zeros((1, 7)),)))


def test_a_stack_of_a_function_that_is_not_named_is_refused_where_it_matters():
    model = jzero.Function(
        lambda key: {"w": jnp.ones((16, 7, 7))},
        lambda p, x: jax.lax.scan(lambda x, w: (x @ jzero.gather(w), None), x, p["w"])[0],
        gathers=True,
    )
    loss = lambda model, batch: jnp.mean(model(batch["x"]))
    config = {"zero": {"min_shard_elements": 0}}
    with pytest.raises(PlanError, match=r"w: dim 0 of \(16, 7, 7\) is split over devices.*stacked"):
        jzero.initialize(model, loss, optax.sgd(0.1), config).step(toys.square_batch(8, 0))


class AnnotatedBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "tensor"))
        x = nn.tanh(nn.Dense(16, kernel_init=kernel, name="up")(x))
        logical = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("mlp", "embed"))
        return nn.Dense(8, kernel_init=logical, name="down")(x), None


class Annotated(nn.Module):
    """Tensor-parallel kernels by Flax's metadata, in a stack."""

    @nn.compact
    def __call__(self, x):
        names = {nn.PARTITION_NAME: "layers"}
        stack = nn.scan(
            AnnotatedBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=3, metadata_params=names
        )
        return nn.Dense(5)(stack(name="blocks")(nn.Dense(8)(x), None)[0])


def test_sharding_metadata_stays_and_zero_goes_on_top():
    batches = [toys.square_batch(8, i) for i in range(3)]
    losses = []
    with nn.logical_axis_rules([("mlp", "tensor"), ("embed", None)]):
        for config, devices in (({"zero": {"stage": 0}}, 1), ({"mesh": {"tensor": 2}}, 8)):
            config = {"zero": {"min_shard_elements": 0, **config.pop("zero", {})}, **config}
            model = jzero.Linen(Annotated(), (jnp.zeros((1, 7)),))
            engine = jzero.initialize(model, toys.square_loss, optax.sgd(0.1), config, jax.devices()[:devices])
            losses.append([float(engine.step(batch)["loss"]) for batch in batches])
    assert engine.plan.params["blocks/up/kernel"].spec == P(None, "data", "tensor")
    assert engine.plan.params["blocks/down/kernel"].spec == P(None, "tensor", "data")
    assert engine.state.params["blocks/up/kernel"].addressable_shards[0].data.shape == (3, 2, 8)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_given_variables_are_the_start():
    module = Noisy()
    variables = module.init(jax.random.key(7), jnp.zeros((1, 7)), train=False)
    variables["batch_stats"]["blocks"]["norm"]["mean"] = jnp.full((3, 13), 0.25)
    model = jzero.Linen(module, NOISY.inputs, NOISY.kwargs, variables)
    engine = jzero.initialize(model, noisy_loss, optax.sgd(0.1), {"zero": {"min_shard_elements": 0}})
    for path, value in flat(variables["params"]).items():
        np.testing.assert_array_equal(engine.params()[path], value, err_msg=path)
    np.testing.assert_array_equal(engine.state.model_state["batch_stats/blocks/norm/mean"], 0.25)
    x = toys.square_batch(8, 0)["x"]
    np.testing.assert_allclose(
        engine.model()(x, train=False), module.apply(variables, x, train=False), rtol=1e-5, atol=1e-6
    )
    engine.step(toys.square_batch(8, 0))
    assert float(variables["params"]["Dense_0"]["kernel"].sum()) != 0  # the user's arrays are still theirs


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Dense(5), r"the Flax Linen module Dense: .*jzero.Linen\(module, inputs=\(example,\)\)"),
        (jzero.Linen(nn.Dropout(0.5, deterministic=True), (jnp.zeros(3),)), "Dropout has no parameters"),
        (
            jzero.Linen(
                nn.Dense(5),
                (jnp.zeros((1, 7)),),
                variables={"params": {"kernel": jnp.ones((6, 5)), "bias": jnp.ones(5)}},
            ),
            r"kernel: \(6, 5\) in variables, but the module makes \(7, 5\)",
        ),
        (
            jzero.Linen(nn.Dense(5), (jnp.zeros((1, 7)),), variables={"params": {"kernel": jnp.ones((7, 5))}}),
            "bias: missing in variables",
        ),
        (jzero.Function(lambda key: {"n": jnp.arange(3)}, None), "n: a parameter of dtype int32 has no gradient"),
        (jzero.Function(lambda key: {}, None), "returned no arrays"),
        (jzero.Function(function_init, None, ["layers/*"]), r"'layers/\*', which matches no parameter.*blocks/down"),
        (jzero.Linen(nn.WeightNorm(nn.Dense(5)), (jnp.zeros((1, 7)),)), "as nn.WeightNorm and nn.SpectralNorm do"),
        (7, "jzero.Function"),
    ],
)
def test_models_that_cannot_be_driven_are_refused(model, message):
    with pytest.raises((ModelError, ConfigError), match=message):
        adapt(model)


def test_a_function_has_a_random_key_for_each_micro_batch():
    def loss(model: Any, batch: Any) -> Any:
        drawn = jax.random.uniform(model.rng) if model.train else jnp.float32(-1)
        return model().sum() + 0 * batch.sum(), {"drawn": drawn}

    model = jzero.Function(lambda key: jnp.ones((8,)), lambda params: params)
    engine = jzero.initialize(model, loss, optax.sgd(0.1), {})
    drawn = {float(engine.step(np.ones(8))["drawn"]) for _ in range(3)}
    assert len(drawn) == 3
    assert min(drawn) >= 0
    assert float(engine.evaluate(np.ones(8))["drawn"]) == -1
