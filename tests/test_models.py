"""The Llama family against a numpy implementation, and what scanning, remat and dtypes may not change."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jzero.config import ModelConfig
from jzero.errors import ConfigError, ModelError
from jzero.jaxprs import equations
from jzero.models import build_model, generate, stack_layers, unstack_layers

VOCAB = 51
SMALL = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-3,
}
TOKENS = np.random.default_rng(0).integers(0, VOCAB, size=(2, 9)).astype(np.int32)


def build(**fields) -> nnx.Module:
    return build_model(ModelConfig(**SMALL | fields), VOCAB)(nnx.Rngs(0))


def get_params(model: nnx.Module) -> dict[str, jax.Array]:
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): param.get_raw_value() for path, param in state}


def abstract_shapes(**fields) -> dict[str, tuple[int, ...]]:
    params = get_params(nnx.eval_shape(lambda: build(**fields)))
    assert {p.dtype for p in params.values()} == {jnp.dtype(jnp.float32)}
    return {path: p.shape for path, p in params.items()}


def set_params(model: nnx.Module, params: dict[str, jax.Array]) -> nnx.Module:
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    new = [(path, param.replace(params["/".join(map(str, path))])) for path, param in state]
    nnx.update(model, nnx.from_flat_state(new))
    return model


@functools.partial(jax.jit, static_argnums=0)
def _forward(graphdef, state, tokens):
    return nnx.merge(graphdef, state)(tokens)


def run(model: nnx.Module, tokens) -> jax.Array:
    return _forward(*nnx.split(model), jnp.asarray(tokens))


def build_random(**fields) -> nnx.Module:
    """Parameters large enough, and norm scales far enough from 1, for each to matter to the logits."""
    rng = np.random.default_rng(1)
    model = nnx.eval_shape(lambda: build(**fields))
    draw = lambda path, p: jnp.float32(rng.normal(size=p.shape, scale=0.3) + path.endswith("scale"))
    return set_params(model, {path: draw(path, p) for path, p in get_params(model).items()})


def numpy_llama(config: ModelConfig, params: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Hugging Face's LlamaForCausalLM, loops and all, in float64."""
    params = {path: np.asarray(p, np.float64) for path, p in params.items()}
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    head_dim = config.head_dim or config.hidden_size // heads
    length = tokens.shape[1]

    def norm(x, path):
        variance = (x**2).mean(-1, keepdims=True)
        return params[path] * x / np.sqrt(variance + config.rms_norm_eps)

    def rotate(x):
        inverse_frequency = 1.0 / config.rope_theta ** (np.arange(0, head_dim, 2) / head_dim)
        angles = np.outer(np.arange(length), inverse_frequency)
        cos, sin = np.cos(np.hstack([angles, angles])), np.sin(np.hstack([angles, angles]))
        half = head_dim // 2
        return x * cos + np.concatenate([-x[:, half:], x[:, :half]], -1) * sin

    def attention(x, path):
        q, k, v = (x @ params[f"{path}/{n}_proj/kernel"] for n in "qkv")
        outputs = []
        for head in range(heads):
            kv = head // (heads // kv_heads)
            mine, theirs = (slice(h * head_dim, (h + 1) * head_dim) for h in (head, kv))
            scores = rotate(q[:, mine]) @ rotate(k[:, theirs]).T / np.sqrt(head_dim)
            scores[np.triu_indices(length, 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            outputs.append(weights / weights.sum(-1, keepdims=True) @ v[:, theirs])
        return np.hstack(outputs) @ params[f"{path}/o_proj/kernel"]

    def mlp(x, path):
        gate = x @ params[f"{path}/gate_proj/kernel"]
        hidden = gate / (1 + np.exp(-gate)) * (x @ params[f"{path}/up_proj/kernel"])
        return hidden @ params[f"{path}/down_proj/kernel"]

    def row(tokens):
        x = params["embed_tokens/embedding"][tokens]
        for i in range(config.num_hidden_layers):
            x = x + attention(norm(x, f"layers/{i}/input_layernorm/scale"), f"layers/{i}/self_attn")
            x = x + mlp(norm(x, f"layers/{i}/post_attention_layernorm/scale"), f"layers/{i}/mlp")
        tied = config.tie_word_embeddings
        head = params["embed_tokens/embedding"].T if tied else params["lm_head/kernel"]
        return norm(x, "norm/scale") @ head

    return np.stack([row(t) for t in tokens])


@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "listed"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": True},
        {"num_attention_heads": 2, "num_key_value_heads": None},
    ],
    ids=["one key head", "grouped, own head size, tied", "all heads"],
)
def test_logits_are_those_of_a_numpy_llama(fields, scan_layers):
    config = ModelConfig(**SMALL | fields, scan_layers=scan_layers)
    model = build_random(**fields, scan_layers=scan_layers)
    params = get_params(model)
    expected = numpy_llama(config, unstack_layers(params) if scan_layers else params, TOKENS)
    logits = run(model, TOKENS)
    assert np.abs(expected).max() > 3, "logits near zero would agree by accident"
    assert (logits.shape, logits.dtype) == ((2, 9, VOCAB), jnp.float32)
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "listed"])
def test_a_token_changes_no_logits_before_it(scan_layers):
    model = build_random(scan_layers=scan_layers)
    changed = TOKENS.copy()
    changed[:, 5] = (changed[:, 5] + 1) % VOCAB
    difference = np.abs(run(model, TOKENS) - run(model, changed)).max((0, 2))
    assert (difference[:5] == 0).all()
    assert (difference[5:] > 1e-3).all()


LAYER_SHAPES = {
    "input_layernorm/scale": (24,),
    "mlp/down_proj/kernel": (40, 24),
    "mlp/gate_proj/kernel": (24, 40),
    "mlp/up_proj/kernel": (24, 40),
    "post_attention_layernorm/scale": (24,),
    "self_attn/k_proj/kernel": (24, 8),
    "self_attn/o_proj/kernel": (24, 24),
    "self_attn/q_proj/kernel": (24, 24),
    "self_attn/v_proj/kernel": (24, 8),
}
TOP_SHAPES = {"embed_tokens/embedding": (VOCAB, 24), "norm/scale": (24,), "lm_head/kernel": (24, VOCAB)}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, TOP_SHAPES | {f"layers/{path}": (3, *shape) for path, shape in LAYER_SHAPES.items()}),
        (
            {"scan_layers": False},
            TOP_SHAPES | {f"layers/{i}/{path}": shape for i in range(3) for path, shape in LAYER_SHAPES.items()},
        ),
        (
            {"tie_word_embeddings": True},
            {path: shape for path, shape in TOP_SHAPES.items() if path != "lm_head/kernel"}
            | {f"layers/{path}": (3, *shape) for path, shape in LAYER_SHAPES.items()},
        ),
    ],
    ids=["scanned", "listed", "tied"],
)
def test_parameters_have_hugging_face_names(fields, expected):
    assert abstract_shapes(**fields) == expected


def test_sizes_left_out_follow_from_the_others():
    shapes = abstract_shapes(hidden_size=36, intermediate_size=None, num_key_value_heads=None)
    assert shapes["layers/mlp/up_proj/kernel"] == (3, 36, 96)
    assert shapes["layers/self_attn/k_proj/kernel"] == (3, 36, 36)
    assert abstract_shapes(vocab_size=64)["embed_tokens/embedding"] == (64, 24)


def test_initial_values_have_the_configured_spread():
    params = get_params(build(hidden_size=48, num_hidden_layers=8, initializer_range=0.1, intermediate_size=96))
    for path, p in params.items():
        spread = 0.1 / (4 if re.search("o_proj|down_proj", path) else 1)
        if path.endswith("scale"):
            assert (p == 1).all(), path
        else:
            # Each layer for itself: no two alike.
            assert np.std(p, axis=(-2, -1)) == pytest.approx(spread, rel=0.1), path
            assert len(np.unique(p)) > 0.99 * p.size, path


def test_scanned_and_listed_models_start_alike_and_agree():
    scanned, listed = build(), build(scan_layers=False)
    params = get_params(scanned)
    for path, p in unstack_layers(params).items():
        np.testing.assert_array_equal(p, get_params(listed)[path], err_msg=path)
    assert set(unstack_layers(params)) == set(get_params(listed))
    restacked = stack_layers(unstack_layers(params))
    assert set(restacked) == set(params)
    for path, p in restacked.items():
        np.testing.assert_array_equal(p, params[path], err_msg=path)
    scanned = build_random()
    set_params(listed, unstack_layers(get_params(scanned)))
    np.testing.assert_allclose(run(scanned, TOKENS), run(listed, TOKENS), rtol=1e-4, atol=1e-5)
    assert np.abs(run(scanned, TOKENS)).max() > 3


def test_more_than_ten_layers_keep_their_order():
    stacked = {"layers/norm/scale": jnp.arange(12.0)[:, None], "layers_norm/scale": jnp.ones(2)}
    listed = unstack_layers(stacked)
    assert float(listed["layers/11/norm/scale"][0]) == 11
    np.testing.assert_array_equal(stack_layers(dict(sorted(listed.items())))["layers/norm/scale"][:, 0], np.arange(12))


def loss_of(model: nnx.Module):
    """(sum of sines of the logits as a function of the parameters, the parameters)."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    loss = lambda p: jnp.sin(nnx.merge(graphdef, p, rest, copy=True)(jnp.asarray(TOKENS)).astype(jnp.float32)).sum()
    return loss, params


@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "listed"])
def test_remat_changes_what_is_computed_twice_and_no_gradient(scan_layers):
    gradients, products = {}, {}
    for remat in ("none", "dots", "full"):
        loss, params = loss_of(build_random(remat=remat, scan_layers=scan_layers, num_hidden_layers=2))
        traced = jax.jit(jax.grad(loss)).trace(params)
        products[remat] = sum(e.primitive.name == "dot_general" for e in equations(traced.jaxpr))
        gradients[remat] = dict(
            nnx.to_flat_state(traced.lower().compile({"xla_backend_optimization_level": 0})(params))
        )
    # Of a layer's products "dots" computes the two of attention again, "full" those with parameters as well.
    assert products["none"] < products["dots"] < products["full"], products
    for path, gradient in gradients["none"].items():
        assert np.abs(gradient[...]).max() > 1e-3, path
        for remat in ("dots", "full"):
            np.testing.assert_allclose(
                gradients[remat][path][...], gradient[...], rtol=1e-4, atol=1e-4, err_msg=f"{remat} {path}"
            )


@pytest.mark.parametrize(("scan_layers", "tied"), [(True, False), (False, True)], ids=["scanned", "listed, tied"])
def test_bfloat16_parameters_give_bfloat16_products(scan_layers, tied):
    model = build_random(scan_layers=scan_layers, tie_word_embeddings=tied)
    expected = run(model, TOKENS)
    set_params(model, {path: p.astype(jnp.bfloat16) for path, p in get_params(model).items()})
    # jax.nn.dot_product_attention itself promotes bfloat16, which strict mode forbids.
    with jax.numpy_dtype_promotion("standard"):
        logits = run(model, TOKENS)
        loss, params = loss_of(model)
        forward = list(equations(jax.make_jaxpr(loss)(params)))
        gradients = jax.eval_shape(jax.grad(loss), params)
    assert logits.dtype == jnp.bfloat16
    error = np.abs(logits.astype(jnp.float32) - expected).max()
    assert 0 < error < 0.05 * np.abs(expected).max()
    dtypes = {x.aval.dtype.name for e in forward if e.primitive.name == "dot_general" for x in e.invars}
    assert dtypes == {"bfloat16"}
    # Softmax, norms and rotation stay wide.
    wide = [e for e in forward if e.primitive.name in ("exp", "rsqrt", "cos", "sin")]
    assert {e.invars[0].aval.dtype.name for e in wide} == {"float32"}
    assert {p.dtype.name for p in jax.tree.leaves(gradients)} == {"bfloat16"}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: build(max_position_embeddings=8)(jnp.asarray(TOKENS)),
            ModelError,
            r"model\.max_position_embeddings = 8.*9 tokens.*data\.sequence_length",
        ),
        (lambda: build(vocab_size=50), ConfigError, r"model\.vocab_size = 50.*51"),
    ],
    ids=["too long", "vocabulary too small"],
)
def test_what_cannot_work_says_why(make, error, message):
    with pytest.raises(error, match=message):
        make()


PROMPT = jnp.asarray(TOKENS[:, :4])


@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "listed"])
def test_greedy_generation_takes_the_likeliest_token_each_time(scan_layers):
    """Past `sequence_length` the oldest tokens slide out of view."""
    config = ModelConfig(**SMALL, scan_layers=scan_layers)
    model = build_random(scan_layers=scan_layers)
    params = unstack_layers(get_params(model)) if scan_layers else get_params(model)
    expected = np.asarray(PROMPT)
    for _ in range(8):
        logits = numpy_llama(config, params, expected[:, -6:])
        expected = np.hstack([expected, np.argmax(logits[:, -1], -1)[:, None]])
    generate_greedily = functools.partial(generate, sequence_length=6, temperature=0.0, key=jax.random.key(0))
    tokens = generate_greedily(model, PROMPT, num_tokens=8)
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens, expected)


def test_generation_repeats_itself_by_key_and_keeps_the_prompt():
    model = build_random()
    graphdef, state = nnx.split(model)

    @jax.jit
    def sample(state, prompt, key):
        model = nnx.merge(graphdef, state)
        return generate(model, prompt, key, num_tokens=20, sequence_length=32, temperature=1.0)

    samples = [sample(state, PROMPT, jax.random.key(seed)) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(samples[0], samples[1])
    assert (samples[0] != samples[2]).any()
    assert samples[0].shape == (2, 24)
    assert all((tokens[:, :4] == PROMPT).all() for tokens in samples)
    assert all(((tokens >= 0) & (tokens < VOCAB)).all() for tokens in samples)


def test_samples_follow_the_model_and_the_temperature():
    """A model of fixed odds, so that frequencies have known values."""
    odds = np.array([0.6, 0.3, 0.1])
    model = lambda tokens: jnp.broadcast_to(jnp.log(jnp.float32(odds)), (*tokens.shape, 3))
    prompt = jnp.zeros((500, 1), jnp.int32)
    for temperature in (1.0, 0.5):
        tokens = generate(model, prompt, jax.random.key(0), num_tokens=8, sequence_length=9, temperature=temperature)
        expected = odds ** (1 / temperature) / (odds ** (1 / temperature)).sum()
        np.testing.assert_allclose(np.bincount(tokens[:, 1:].ravel()) / 4000, expected, atol=0.03)


@pytest.mark.parametrize(
    ("prompt", "temperature", "message"),
    [(PROMPT[:, :0], 1.0, "empty"), (PROMPT, -0.1, r"temperature=-0\.1")],
)
def test_generation_refuses_what_has_no_meaning(prompt, temperature, message):
    with pytest.raises(ValueError, match=message):
        generate(build(), prompt, jax.random.key(0), num_tokens=2, sequence_length=8, temperature=temperature)
