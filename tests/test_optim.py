"""Schedules and optimizers against formulas; weight decay's targets; how far each optax optimizer looks."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jzero.config import OptimizerConfig
from jzero.errors import ConfigError, ModelError
from jzero.optim import decay_mask, is_elementwise, make_optimizer, make_schedule


@pytest.mark.parametrize(
    ("fields", "num_steps", "expected"),
    [
        ({"schedule": "constant"}, 10, {0: 2.0, 5: 2.0, 99: 2.0}),
        ({"schedule": "constant", "warmup_steps": 4}, 10, {0: 0.0, 1: 0.5, 3: 1.5, 4: 2.0, 99: 2.0}),
        ({"schedule": "linear"}, 10, {0: 2.0, 5: 1.0, 9: 0.2, 10: 0.0, 99: 0.0}),
        (
            {"schedule": "linear", "warmup_steps": 4, "final_learning_rate": 1.0},
            14,
            {0: 0.0, 2: 1.0, 4: 2.0, 9: 1.5, 13: 1.1, 14: 1.0, 99: 1.0},
        ),
        ({"schedule": "linear", "decay_steps": 5}, 10, {0: 2.0, 4: 0.4, 5: 0.0, 9: 0.0}),
        ({"schedule": "cosine"}, 10, {0: 2.0, 5: 1.0, 9: 1 + np.cos(0.9 * np.pi), 10: 0.0, 99: 0.0}),
        (
            {"schedule": "cosine", "warmup_steps": 2, "decay_steps": 8, "final_learning_rate": 0.5},
            100,
            {0: 0.0, 1: 1.0, 2: 2.0, 4: 0.5 + 0.75 * (1 + np.cos(np.pi / 3)), 5: 1.25, 8: 0.5, 99: 0.5},
        ),
        ({"schedule": "cosine", "learning_rate": 0.0, "warmup_steps": 2}, 10, {0: 0.0, 2: 0.0, 10: 0.0}),
        ({"schedule": "wsd", "warmup_steps": 4}, 40, {0: 0.0, 4: 2.0, 36: 2.0, 38: 1.0, 40: 0.0, 99: 0.0}),
        (
            {"schedule": "wsd", "cooldown_steps": 5, "decay_steps": 20, "final_learning_rate": 1.0},
            40,
            {0: 2.0, 15: 2.0, 16: 1.8, 20: 1.0, 39: 1.0},
        ),
        ({"schedule": "inverse_sqrt", "warmup_steps": 4}, 10, {0: 0.0, 2: 1.0, 4: 2.0, 16: 1.0, 64: 0.5}),
        ({"schedule": "inverse_sqrt"}, 10, {0: 2.0, 3: 1.0, 15: 0.5}),
        (
            {"schedule": "piecewise", "warmup_steps": 2, "boundaries": (5, 8), "factors": (0.5, 0.1)},
            10,
            {0: 0.0, 1: 1.0, 2: 2.0, 4: 2.0, 5: 1.0, 7: 1.0, 8: 0.2, 99: 0.2},
        ),
    ],
)
def test_learning_rate_by_count(fields, num_steps, expected):
    schedule = make_schedule(OptimizerConfig(**{"learning_rate": 2.0} | fields), num_steps)
    counts = list(expected)
    np.testing.assert_allclose([schedule(c) for c in counts], list(expected.values()), atol=1e-6)
    traced = jax.jit(jax.vmap(schedule))(jnp.array(counts, jnp.int32))
    assert traced.dtype == jnp.float32
    np.testing.assert_allclose(traced, list(expected.values()), atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"warmup_steps": 10}, r"optimizer\.warmup_steps = 10.*train\.num_steps = 10"),
        ({"warmup_steps": 7, "decay_steps": 5, "schedule": "linear"}, r"= 7.*optimizer\.decay_steps = 5"),
        ({"warmup_steps": 7, "schedule": "wsd", "cooldown_steps": 4}, r"= 7 and optimizer\.cooldown_steps = 4.*= 10"),
        ({"schedule": "piecewise"}, r"optimizer\.boundaries = \[\].*give as many"),
        ({"schedule": "piecewise", "boundaries": (5, 3), "factors": (1, 1)}, r"boundaries = \[5, 3\].*rising"),
        (
            {"schedule": "piecewise", "boundaries": (3,), "factors": (1,), "warmup_steps": 4},
            r"none before optimizer\.warmup_steps = 4",
        ),
        ({"boundaries": (3,)}, r"boundaries = \[3\]: not read by optimizer\.schedule = cosine"),
        ({"schedule": "inverse_sqrt", "decay_steps": 3}, r"decay_steps = 3: not read by"),
        ({"name": "adam", "weight_decay": 0.1}, r"optimizer\.weight_decay = 0\.1.*adamw"),
        (
            {"name": "sgd", "nesterov": True, "momentum": 0.0},
            r"optimizer\.nesterov.*optimizer\.momentum = 0\.0",
        ),
    ],
)
def test_settings_without_a_meaning_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        make_optimizer(OptimizerConfig(**fields), 10, None)


def adam_step(p, g, memory, count, decay, lr):
    m, v = memory
    m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
    step = (m / (1 - 0.8 ** (count + 1))) / (np.sqrt(v / (1 - 0.9 ** (count + 1))) + 1e-3)
    return p - lr * (step + decay * p), (m, v)


def sgd_step(momentum, nesterov):
    def step(p, g, memory, count, decay, lr):
        g = g + decay * p
        trace = g + momentum * memory[0]
        return p - lr * (g + momentum * trace if nesterov else trace), (trace, memory[1])

    return step


@pytest.mark.parametrize(
    ("fields", "reference_step"),
    [
        ({"name": "adamw", "b1": 0.8, "b2": 0.9, "eps": 1e-3, "weight_decay": 0.5}, adam_step),
        ({"name": "adam", "b1": 0.8, "b2": 0.9, "eps": 1e-3}, adam_step),
        ({"name": "sgd", "momentum": 0.0, "weight_decay": 0.5}, sgd_step(0.0, False)),
        ({"name": "sgd", "momentum": 0.7, "weight_decay": 0.5}, sgd_step(0.7, False)),
        ({"name": "sgd", "momentum": 0.7, "nesterov": True}, sgd_step(0.7, True)),
    ],
    ids=["adamw", "adam", "sgd", "momentum", "nesterov"],
)
def test_optimizers_follow_their_formulas(fields, reference_step):
    """Four steps with warm-up, weight decay on the kernel only, gradients far above any clipping norm."""
    config = OptimizerConfig(learning_rate=0.1, schedule="linear", warmup_steps=1, **fields)
    tx, schedule = make_optimizer(config, 6, {"kernel": True, "bias": False}), make_schedule(config, 6)
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(2, 3)), "bias": rng.normal(size=(3,))}
    expected, memory = dict(params), dict.fromkeys(params, (0.0, 0.0))
    params = jax.tree.map(jnp.float32, params)
    state = tx.init(params)
    for count in range(4):
        gradients = {path: 50 * rng.normal(size=p.shape) for path, p in params.items()}
        for path, decay in (("kernel", config.weight_decay), ("bias", 0.0)):
            expected[path], memory[path] = reference_step(
                expected[path], gradients[path], memory[path], count, decay, float(schedule(count))
            )
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(jax.tree.map(jnp.float32, gradients), state, params)
        params = optax.apply_updates(params, updates)
        if count == 0:
            assert all((updates[path] == 0).all() for path in updates), "the first update of a warm-up moves nothing"
    for path in params:
        np.testing.assert_allclose(params[path], expected[path], rtol=1e-4, atol=1e-5)


def test_sgd_without_momentum_keeps_no_copy_of_the_parameters():
    params = {"w": jnp.zeros((3, 5))}
    sizes = {
        momentum: sum(x.size for x in jax.tree.leaves(make_optimizer(config, 10, None).init(params)))
        for momentum in (0.0, 0.9)
        for config in [OptimizerConfig(name="sgd", momentum=momentum)]
    }
    assert sizes[0.9] - sizes[0.0] == 15


def test_matrices_decay_and_vectors_do_not():
    shapes = {
        "embed/embedding": (51, 8),
        "layers/mlp/kernel": (4, 8, 16),
        "layers/norm/scale": (4, 8),
        "layers/mlp/bias": (4, 16),
        "layers/gate": (4, 8),
        "heads/bias": (4, 4),
        "conv/kernel": (3, 3, 8, 8),
        "temperature": (),
        "bias_proj/kernel": (8, 8),
    }
    stacked = {"layers/mlp/kernel": 1, "layers/norm/scale": 1, "layers/mlp/bias": 1, "layers/gate": 1}
    decayed = {path for path, decays in decay_mask(stacked, shapes).items() if decays}
    assert decayed == {"embed/embedding", "layers/mlp/kernel", "conv/kernel", "bias_proj/kernel"}
    assert decay_mask({}, shapes)["layers/gate"], "without the stack dims a stack of vectors passes for a matrix"


# Rank 2 for what works on matrices, sizes of 1 and a second leaf to tell "one element" from "one leaf".
PARAMS = {
    "w": jax.ShapeDtypeStruct((3, 5), jnp.float32),
    "one": jax.ShapeDtypeStruct((1, 4), jnp.float32),
    "b": jax.ShapeDtypeStruct((1,), jnp.float32),
}
ELEMENTWISE = {
    "adamw": optax.adamw(1e-2),
    "adam": optax.adam(1e-2),
    "nesterov": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "lion": optax.lion(1e-2),
    "adagrad": optax.adagrad(1e-2),
    "rmsprop": optax.rmsprop(1e-2, centered=True, momentum=0.9),
    "masked decay": optax.adamw(1e-2, weight_decay=0.1, mask={"w": True, "one": False, "b": False}),
    "chain": optax.chain(optax.clip(1.0), optax.trace(0.9), optax.scale(-0.1)),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(1e-2),
    "scheduled": optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 9)),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "partition": optax.partition({"a": optax.adam(1e-2), "s": optax.sgd(0.1)}, {"w": "a", "one": "s", "b": "s"}),
    "jzero": make_optimizer(OptimizerConfig(warmup_steps=2), 9, {"w": True, "one": True, "b": False}),
}
NOT_ELEMENTWISE = {
    "adafactor": optax.adafactor(1e-2),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2)),
    "centralize": optax.chain(optax.centralize(), optax.sgd(1e-2)),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-2), 3),
    "noisy_sgd": optax.noisy_sgd(1e-2, key=0),
    "cumsum in scan": optax.stateless(lambda g, _: jax.tree.map(lambda x: jnp.cumsum(x, -1), g)),
    "transpose": optax.stateless(lambda g, _: jax.tree.map(lambda x: x.T.reshape(x.shape), g)),
    "flip": optax.stateless(lambda g, _: jax.tree.map(lambda x: jnp.flip(x), g)),
    "by position": optax.stateless(lambda g, _: jax.tree.map(lambda x: x * jnp.arange(x.shape[-1], dtype=x.dtype), g)),
    "by a captured array": optax.stateless(
        lambda g, _: g | {"w": g["w"] * np.arange(15, dtype=np.float32).reshape(3, 5)}
    ),
    "by size": optax.stateless(lambda g, _: jax.tree.map(lambda x: x / x.size, g)),
    "by shape, at some size": optax.scale_by_factored_rms(),
}
# What only an array of another shape would show, and noise, which repeats itself.
INVISIBLE_TO_THE_PROBE = {
    *(
        "noisy_sgd",
        "by position",
        "by a captured array",
        "by size",
        "by shape, at some size",
        "apply_if_finite",
    )
}


def looks_across_elements(tx: optax.GradientTransformation, abstract=PARAMS) -> bool:
    """Whether changing one element's gradient once moves another element's update, then or later."""
    rng = np.random.default_rng(0)
    draw = lambda: {path: jnp.asarray(rng.normal(size=p.shape), p.dtype) for path, p in abstract.items()}
    start, gradients = draw(), [draw() for _ in range(5)]
    changed = list(gradients)
    changed[2] = changed[2] | {"w": changed[2]["w"].at[0, 1].mul(-3.0)}
    update = jax.jit(tx.update)

    def other_updates(gradients):
        state, params, history = tx.init(start), start, []
        for g in gradients:
            updates, state = update(g, state, params)
            params = optax.apply_updates(params, updates)
            history.append(updates | {"w": updates["w"].at[0, 1].set(0.0)})
        return jax.tree.leaves(history)

    with jax.numpy_dtype_promotion("standard"):
        return not all(map(np.array_equal, other_updates(gradients), other_updates(changed)))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_are_recognised(name):
    assert is_elementwise(ELEMENTWISE[name], PARAMS)
    assert not looks_across_elements(ELEMENTWISE[name])


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_optimizers_that_look_further_are_recognised(name):
    assert not is_elementwise(NOT_ELEMENTWISE[name], PARAMS)
    assert looks_across_elements(NOT_ELEMENTWISE[name]) or name in INVISIBLE_TO_THE_PROBE


def optax_defaults(params) -> dict[str, optax.GradientTransformation]:
    """The transformations that need a learning rate at most, and run on gradients and params alone."""
    found = {}
    modules = (optax, optax.contrib)
    for name, make in [item for module in modules for item in inspect.getmembers(module, inspect.isfunction)]:
        parameters = inspect.signature(make).parameters.values()
        required = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        if len(required) > 1:
            continue
        try:
            tx = make(*[1e-2 for _ in required])
            jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)
        except Exception:  # Not a transformation, or one that wants more.
            continue
        found[name] = tx
    return found


def test_no_optax_transformation_is_taken_for_elementwise_that_is_not():
    matrix = {"w": PARAMS["w"]}
    with jax.numpy_dtype_promotion("standard"):
        transformations = optax_defaults(matrix)
    elementwise = {name for name, tx in transformations.items() if is_elementwise(tx, matrix)}
    assert len(elementwise) >= 40
    assert len(transformations) - len(elementwise) >= 15
    assert [n for n in sorted(elementwise) if looks_across_elements(transformations[n], matrix)] == []


def test_the_answer_depends_on_the_parameters():
    vectors = {"b": jax.ShapeDtypeStruct((7,), jnp.float32)}
    assert is_elementwise(optax.contrib.muon(1e-2), vectors), "muon leaves vectors to adam"
    assert not is_elementwise(optax.contrib.muon(1e-2), PARAMS)
    scalars = {"s": jax.ShapeDtypeStruct((), jnp.float32)}
    assert is_elementwise(optax.clip_by_global_norm(1.0), scalars), "a scalar has no elements to look across"


def test_an_optimizer_that_wants_the_loss_is_named():
    with pytest.raises(ModelError, match=r"optimizer\.update.*'value'"):
        is_elementwise(optax.polyak_sgd(), PARAMS)
