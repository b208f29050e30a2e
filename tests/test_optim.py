"""Schedules and optimizers against formulas; weight decay's targets; how far each optax optimizer looks."""

import inspect
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from jzero.config import OptimizerConfig
from jzero.elementwise import is_elementwise
from jzero.errors import ConfigError, ModelError
from jzero.leaf import AbstractParam
from jzero.optim import averaged_weights, make_optimizer, settings_by_path
from jzero.schedules import make_schedule


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
            {"name": "adam", "groups": [{"match": ["*"]}, {"match": ["*"], "weight_decay": 0.1}]},
            r"optimizer\.groups\[1\]\.weight_decay = 0\.1.*adamw",
        ),
        ({"groups": [{"weight_decay": 0.1}]}, r"optimizer\.groups\[0\]\.match = \[\]: give patterns"),
        (
            {"groups": [{"match": ["*"], "learning_rat_factor": 2}]},
            r"optimizer\.groups\[0\]\.learning_rat_factor = 2: unknown key; did you mean .*learning_rate_factor",
        ),
        ({"name": "schedule_free", "schedule": "cosine"}, r"schedule = cosine.*set optimizer\.schedule: constant"),
        ({"name": "schedule_free", "b1": 0.0}, r"optimizer\.b1 = 0\.0.*raise it"),
        ({"name": "lion", "eps": 1e-6}, r"optimizer\.eps = 1e-06: not read by optimizer\.name = lion"),
        ({"name": "adafactor", "b2": 0.9}, r"optimizer\.b2 = 0\.9: not read by optimizer\.name = adafactor"),
        ({"muon_exclude": ["head"]}, r'muon_exclude = \["head"\]: not read by optimizer\.name = adamw'),
        (
            {"name": "sgd", "nesterov": True, "momentum": 0.0},
            r"optimizer\.nesterov.*optimizer\.momentum = 0\.0",
        ),
    ],
)
def test_settings_without_a_meaning_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        make_optimizer(OptimizerConfig(**fields), 10, {})


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
    tx, schedule = make_optimizer(config, 6, abstract({"kernel": (2, 3), "bias": (3,)})), make_schedule(config, 6)
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


def abstract(shapes: dict[str, tuple[int, ...]], stacks: dict[str, int] | None = None) -> dict[str, AbstractParam]:
    return {path: AbstractParam(shape, "float32", (stacks or {}).get(path, 0)) for path, shape in shapes.items()}


def run(tx: optax.GradientTransformation, params: dict[str, jax.Array], gradients: list[dict[str, jax.Array]]):
    """(parameters, state) after an update for each of the gradients."""
    update, state = jax.jit(tx.update), tx.init(params)
    with jax.numpy_dtype_promotion("standard"):
        for g in gradients:
            updates, state = update(g, state, params)
            params = optax.apply_updates(params, updates)
    return params, state


def draw(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {path: jnp.asarray(rng.normal(size=shape), jnp.float32) for path, shape in shapes.items()}


# Large enough to be factored and quantised; a matrix that muon leaves to adam and that does not decay; a vector.
SHAPES = {"w": (130, 136), "embed/scale": (6, 10), "b": (7,)}
DECAYS = {"w": True, "embed/scale": False, "b": False}
MUON_DIMS = {"w": contrib.MuonDimensionNumbers(), "embed/scale": None, "b": None}
RATE = optax.linear_schedule(0.1, 0.0, 6)
# optimizer.* beside the name -> what optax has under it.
BY_NAME: dict[str, list[tuple[dict[str, Any], optax.GradientTransformation]]] = {
    "adamw": [({"weight_decay": 0.1}, optax.adamw(RATE, weight_decay=0.1, mask=DECAYS))],
    "adam": [({"b1": 0.8}, optax.adam(RATE, b1=0.8))],
    "sgd": [({}, optax.sgd(RATE, 0.9)), ({"nesterov": True}, optax.sgd(RATE, 0.9, nesterov=True))],
    "lion": [({"weight_decay": 0.1}, optax.lion(RATE, weight_decay=0.1, mask=DECAYS))],
    "lamb": [({"weight_decay": 0.1}, optax.lamb(RATE, weight_decay=0.1, mask=DECAYS))],
    "adagrad": [({}, optax.adagrad(RATE)), ({"eps": 0.1}, optax.adagrad(RATE, eps=0.1))],
    "adafactor": [
        (
            {"schedule": "constant", "momentum": momentum, "weight_decay": 0.1},
            # Its decay takes no learning rate.
            optax.adafactor(0.1, momentum=momentum or None, weight_decay_rate=0.01, weight_decay_mask=DECAYS),
        )
        for momentum in (0.0, 0.9)
    ],
    "muon": [
        (
            {"weight_decay": 0.1},
            contrib.muon(RATE, weight_decay=0.1, muon_weight_dimension_numbers=MUON_DIMS, consistent_rms=0.2),
        ),
        (
            {"momentum": 0.8, "nesterov": False, "b2": 0.9, "muon_exclude": ("b",)},
            contrib.muon(
                *(RATE, (3.4445, -4.7750, 2.0315), 5, 0.8),
                nesterov=False,
                adam_b2=0.9,
                consistent_rms=0.2,
                muon_weight_dimension_numbers=MUON_DIMS | {"embed/scale": MUON_DIMS["w"]},
            ),
        ),
    ],
    "schedule_free": [({"warmup_steps": 2, "b1": 0.8}, contrib.schedule_free_adamw(0.1, warmup_steps=2, b1=0.8))],
}


@pytest.mark.parametrize(
    ("name", "fields", "reference"), [(name, *case) for name, cases in BY_NAME.items() for case in cases]
)
def test_each_name_has_the_numbers_of_optax(name, fields, reference):
    schedule = {} if name == "schedule_free" else {"schedule": "linear"}
    config = OptimizerConfig(**{"name": name, "learning_rate": 0.1} | schedule | fields)
    gradients = [draw(SHAPES, seed) for seed in range(1, 5)]
    start = draw(SHAPES, 0)
    ours, _ = run(make_optimizer(config, 6, abstract(SHAPES)), start, gradients)
    theirs, _ = run(reference, start, gradients)
    for path, p in ours.items():
        assert np.abs(p - start[path]).max() > 1e-3
        np.testing.assert_allclose(p, theirs[path], rtol=1e-5, atol=1e-6, err_msg=path)


def test_a_name_brings_defaults_of_its_own_which_any_word_overrides():
    defaults = {name: OptimizerConfig(name=name) for name in [*BY_NAME, "adamw8bit"]}
    changed = {name: config.model_dump(exclude_defaults=True) for name, config in defaults.items()}
    assert {name: fields for name, fields in changed.items() if len(fields) > 1} == {
        "lion": {"name": "lion", "b2": 0.99},
        "lamb": {"name": "lamb", "eps": 1e-6},
        "adagrad": {"name": "adagrad", "eps": 1e-7},
        "adafactor": {"name": "adafactor", "momentum": 0.0},
        "muon": {"name": "muon", "momentum": 0.95, "nesterov": True},
        "schedule_free": {"name": "schedule_free", "schedule": "constant"},
    }
    assert OptimizerConfig(name="lion", b2=0.95).b2 == 0.95


def test_every_name_but_the_one_of_jzero_has_a_row():
    assert {*BY_NAME, "adamw8bit"} == {*get_args(OptimizerConfig.model_fields["name"].annotation)}


@pytest.mark.parametrize("name", ["lamb", "adafactor", "muon", "adamw8bit"])
def test_a_layer_of_a_stack_moves_as_a_layer_of_its_own(name):
    """Norms, factored moments, orthogonalisation and blocks of 8 bits are a layer's."""
    shapes = {"layers/w": (2, 130, 136), "layers/b": (2, 2500), "head": (6, 10)}
    stacked = abstract(shapes, {"layers/w": 1, "layers/b": 1})
    apart = lambda tree: (
        {"head": tree["head"]} | {f"{p}/{i}": tree[p][i] for p in shapes if p != "head" for i in (0, 1)}
    )
    config = OptimizerConfig(name=name, learning_rate=0.1, weight_decay=0.1)
    gradients = [draw(shapes, seed) for seed in (1, 2, 3)]
    gradients = [g | {"layers/w": g["layers/w"] * jnp.array([1.0, 9.0])[:, None, None]} for g in gradients]
    start = draw(shapes, 0)
    together, _ = run(make_optimizer(config, 6, stacked), start, gradients)
    expected, _ = run(
        make_optimizer(config, 6, abstract({path: x.shape for path, x in apart(start).items()})),
        apart(start),
        list(map(apart, gradients)),
    )
    for path, p in apart(together).items():
        np.testing.assert_allclose(p, expected[path], rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"name": "sgd", "momentum": 0.0}, 0),
        ({"name": "sgd"}, 130 * 136),
        ({"name": "lion"}, 130 * 136),
        ({"name": "adagrad"}, 130 * 136),
        ({"name": "muon"}, 130 * 136),
        ({"name": "adamw"}, 2 * 130 * 136),
        ({"name": "lamb"}, 2 * 130 * 136),
        ({"name": "schedule_free"}, 2 * 130 * 136),
        ({"name": "adafactor"}, 130 + 136),
        ({"name": "adafactor", "momentum": 0.9}, 130 + 136 + 130 * 136),
    ],
    ids=lambda fields: "-".join(map(str, fields.values())) if isinstance(fields, dict) else None,
)
def test_the_numbers_that_an_optimizer_keeps(fields, numbers):
    """Of a matrix, without counters and the like."""
    tx = make_optimizer(OptimizerConfig(**fields), 10, abstract({"w": (130, 136)}))
    assert (
        numbers
        <= sum(x.size for x in jax.tree.leaves(jax.eval_shape(tx.init, {"w": jnp.zeros((130, 136))})))
        <= numbers + 8
    )


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
    stacked = {path: 1 for path in shapes if path.startswith("layers/")}
    config = OptimizerConfig(weight_decay=0.1)
    decayed = {path for path, own in settings_by_path(config, abstract(shapes, stacked)).items() if own.weight_decay}
    assert decayed == {"embed/embedding", "layers/mlp/kernel", "conv/kernel", "bias_proj/kernel"}
    unstacked = settings_by_path(config, abstract(shapes))
    assert unstacked["layers/gate"].weight_decay, "without the stack dims a stack of vectors passes for a matrix"


def test_groups_set_parameters_apart_and_the_last_that_matches_holds():
    shapes = {"layers/up/kernel": (2, 8, 16), "layers/up/bias": (2, 16), "layers/norm/scale": (2, 8), "head": (8, 51)}
    params = abstract(shapes, {path: 1 for path in shapes if path.startswith("layers/")})
    groups = [
        {"match": ["layers/*"], "learning_rate_factor": 0.5},
        {"match": ["*/bias", "*norm*"], "weight_decay": 0.3},
        {"match": ["head"], "weight_decay": 0.0, "learning_rate_factor": 2.0},
    ]
    config = OptimizerConfig(weight_decay=0.1, learning_rate=0.1, schedule="constant", groups=groups)
    assert settings_by_path(config, params) == {
        "layers/up/kernel": (0.5, 0.1),
        "layers/up/bias": (1.0, 0.3),
        "layers/norm/scale": (1.0, 0.3),
        "head": (2.0, 0.0),
    }
    gradients, start = [draw(shapes, seed) for seed in (1, 2)], draw(shapes, 0)
    ours, _ = run(make_optimizer(config, 10, params), start, gradients)
    for path, own in settings_by_path(config, params).items():
        adamw = optax.adamw(0.1 * own.learning_rate_factor, weight_decay=own.weight_decay)
        alone, _ = run(adamw, {path: start[path]}, [{path: g[path]} for g in gradients])
        np.testing.assert_allclose(ours[path], alone[path], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        # transformers#18273: names that do not exist decayed everything.
        (
            "*layernorm*",
            r"groups\[1\]\.match names '\*layernorm\*', which matches no trained parameter.*layers/norm/scale",
        ),
        (
            "layers/norm/weight",
            r"names 'layers/norm/weight', which matches no trained parameter. There are layers/norm/scale",
        ),
    ],
)
def test_a_group_that_matches_nothing_is_told_with_what_there_is(pattern, told):
    groups = [{"match": ["*"]}, {"match": ["*/bias", pattern], "weight_decay": 0.0}]
    with pytest.raises(ConfigError, match=told):
        make_optimizer(OptimizerConfig(groups=groups), 10, abstract({"layers/norm/scale": (8,), "layers/bias": (8,)}))


def test_muon_takes_the_matrices_that_are_no_embeddings():
    shapes = {"Embed_0/embedding": (51, 8), "layers/up": (4, 8, 16), "layers/norm": (4, 8), "lm_head/kernel": (8, 51)}
    shapes |= {"conv/kernel": (3, 3, 8, 8), "out/kernel": (8, 9)}
    params = abstract(shapes, {"layers/up": 1, "layers/norm": 1})

    def orthogonalised(**fields):
        tx = make_optimizer(OptimizerConfig(name="muon", **fields), 10, params)
        state = jax.eval_shape(tx.init, {path: jnp.zeros(shape) for path, shape in shapes.items()})
        (muon,) = [
            x
            for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, contrib.MuonState))
            if isinstance(x, contrib.MuonState)
        ]
        return {path for path, mu in muon.mu.items() if not isinstance(mu, optax.MaskedNode)}

    assert orthogonalised() == {"layers/up", "out/kernel"}
    assert orthogonalised(muon_exclude=("out/*", "Embed*")) == {"layers/up", "lm_head/kernel"}
    assert orthogonalised(muon_exclude=()) == {"Embed_0/embedding", "layers/up", "lm_head/kernel", "out/kernel"}
    with pytest.raises(
        ConfigError, match=r"optimizer\.muon_exclude names 'head', which matches no trained parameter.*lm_head/kernel"
    ):
        orthogonalised(muon_exclude=("head",))


def test_averaged_weights_are_those_that_optax_would_evaluate():
    start, gradients = draw(SHAPES, 0), [draw(SHAPES, seed) for seed in range(1, 5)]
    config = OptimizerConfig(name="schedule_free", learning_rate=0.1)
    params, state = run(make_optimizer(config, 6, abstract(SHAPES)), start, gradients)
    averages, expected = averaged_weights(state, params), contrib.schedule_free_eval_params(state, params)
    wrapped = optax.chain(optax.clip(9.0), optax.masked(contrib.schedule_free_sgd(0.1), DECAYS))
    other, other_state = run(wrapped, start, gradients)
    other_averages, inner = averaged_weights(other_state, other), other_state[1].inner_state
    other_expected = contrib.schedule_free_eval_params(inner._replace(z={"w": inner.z["w"]}), {"w": other["w"]})
    for path in SHAPES:
        np.testing.assert_array_equal(averages[path], expected[path])
        np.testing.assert_array_equal(other_averages[path], other_expected.get(path, other[path]))
    assert np.abs(averages["w"] - params["w"]).max() > 1e-2 < np.abs(other_averages["w"] - other["w"]).max()
    assert averaged_weights(run(optax.adam(0.1), start, gradients)[1], start) is None


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
    "jzero": make_optimizer(
        OptimizerConfig(warmup_steps=2), 9, {path: AbstractParam(p.shape, p.dtype) for path, p in PARAMS.items()}
    ),
}
NOT_ELEMENTWISE = {
    "adafactor": optax.adafactor(1e-2),
    "lamb": optax.lamb(1e-2),
    "lars": optax.lars(1e-2),
    "muon": contrib.muon(1e-2),
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
    modules = (optax, contrib)
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
    assert is_elementwise(contrib.muon(1e-2), vectors), "muon leaves vectors to adam"
    assert not is_elementwise(contrib.muon(1e-2), PARAMS)
    scalars = {"s": jax.ShapeDtypeStruct((), jnp.float32)}
    assert is_elementwise(optax.clip_by_global_norm(1.0), scalars), "a scalar has no elements to look across"


def test_an_optimizer_that_wants_the_loss_is_named():
    with pytest.raises(ModelError, match=r"optimizer\.update.*'value'"):
        is_elementwise(optax.polyak_sgd(), PARAMS)
