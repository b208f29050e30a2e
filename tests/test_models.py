"""The decoder's families against numpy implementations, and what scanning, remat, dtypes and packing may not change."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from flax import nnx

import jzero
from jzero.config import ModelConfig, load_config, make_config
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
}
LLAMA = {"rope_theta": 500.0, "rms_norm_eps": 1e-3}
GPT2 = {"family": "gpt2", "num_key_value_heads": None, "max_position_embeddings": 12, "layer_norm_epsilon": 1e-3}
QWEN3 = {"family": "qwen", "head_dim": 10}
QWEN2 = {"family": "qwen", "use_qk_norm": False, "attention_bias": True}
MISTRAL = {"family": "mistral", "sliding_window": 4}
FAMILIES = {"llama": {}, "gpt2": GPT2, "qwen3": QWEN3, "qwen2": QWEN2, "mistral": MISTRAL}
FAMILIES |= {"mixed": GPT2 | {"use_qk_norm": True, "sliding_window": 4, "head_dim": 7}}
TOKENS = np.random.default_rng(0).integers(0, VOCAB, size=(2, 9)).astype(np.int32)

every_family = pytest.mark.parametrize("fields", FAMILIES.values(), ids=FAMILIES)


def small_config(**fields) -> ModelConfig:
    return ModelConfig(**SMALL | ({} if fields.get("family") == "gpt2" else LLAMA) | fields)


def build(**fields) -> nnx.Module:
    return build_model(small_config(**fields), VOCAB)(nnx.Rngs(0))


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
def _forward(graphdef, state, *inputs):
    return nnx.merge(graphdef, state)(*inputs)


def run(model: nnx.Module, *inputs) -> jax.Array:
    return _forward(*nnx.split(model), *map(jnp.asarray, inputs))


def build_random(**fields) -> nnx.Module:
    """Parameters large enough, and norm scales far enough from 1, for each to matter to the logits."""
    rng = np.random.default_rng(1)
    model = nnx.eval_shape(lambda: build(**fields))
    draw = lambda path, p: jnp.float32(rng.normal(size=p.shape, scale=0.3) + path.endswith("scale"))
    return set_params(model, {path: draw(path, p) for path, p in get_params(model).items()})


def numpy_llama(config: ModelConfig, params: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Hugging Face's LlamaForCausalLM, loops and all, in float64; with what Qwen and Mistral have besides."""
    params = {path: np.asarray(p, np.float64) for path, p in params.items()}
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    head_dim = config.head_dim or config.hidden_size // heads
    length = tokens.shape[1]
    query_positions, key_positions = np.indices((length, length))
    hidden = key_positions > query_positions
    if config.sliding_window:
        hidden |= key_positions <= query_positions - config.sliding_window

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
        q, k, v = (x @ params[f"{path}/{n}_proj/kernel"] + params.get(f"{path}/{n}_proj/bias", 0) for n in "qkv")
        norm_head = lambda x, name: norm(x, f"{path}/{name}/scale") if config.use_qk_norm else x
        outputs = []
        for head in range(heads):
            kv = head // (heads // kv_heads)
            mine, theirs = (slice(h * head_dim, (h + 1) * head_dim) for h in (head, kv))
            query, key = norm_head(q[:, mine], "q_norm"), norm_head(k[:, theirs], "k_norm")
            scores = rotate(query) @ rotate(key).T / np.sqrt(head_dim)
            scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            outputs.append(weights / weights.sum(-1, keepdims=True) @ v[:, theirs])
        return np.hstack(outputs) @ params[f"{path}/o_proj/kernel"]

    def mlp(x, path):
        gate = x @ params[f"{path}/gate_proj/kernel"]
        wide = gate / (1 + np.exp(-gate)) * (x @ params[f"{path}/up_proj/kernel"])
        return wide @ params[f"{path}/down_proj/kernel"]

    def row(tokens):
        x = params["embed_tokens/embedding"][tokens]
        for i in range(config.num_hidden_layers):
            x = x + attention(norm(x, f"layers/{i}/input_layernorm/scale"), f"layers/{i}/self_attn")
            x = x + mlp(norm(x, f"layers/{i}/post_attention_layernorm/scale"), f"layers/{i}/mlp")
        tied = config.tie_word_embeddings
        head = params["embed_tokens/embedding"].T if tied else params["lm_head/kernel"]
        return norm(x, "norm/scale") @ head

    return np.stack([row(t) for t in tokens])


def gpt2_names(params: dict[str, np.ndarray], num_layers: int) -> dict[str, np.ndarray]:
    """A GPT-2's parameters by the names of Hugging Face's checkpoints, as the Decoder's docstring tells them."""
    hf = {"wte.weight": params["embed_tokens/embedding"], "wpe.weight": params["embed_positions/embedding"]}
    hf |= {"ln_f.weight": params["norm/scale"], "ln_f.bias": params["norm/bias"]}
    modules = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn/o_proj": "attn.c_proj"}
    modules |= {"mlp/up_proj": "mlp.c_fc", "mlp/down_proj": "mlp.c_proj"}
    for i in range(num_layers):
        for ours, theirs in modules.items():
            weight = "scale" if "norm" in ours else "kernel"
            hf[f"h.{i}.{theirs}.weight"] = params[f"layers/{i}/{ours}/{weight}"]
            hf[f"h.{i}.{theirs}.bias"] = params[f"layers/{i}/{ours}/bias"]
        for leaf, name in (("kernel", "weight"), ("bias", "bias")):
            parts = [params[f"layers/{i}/self_attn/{n}_proj/{leaf}"] for n in "qkv"]
            hf[f"h.{i}.attn.c_attn.{name}"] = np.concatenate(parts, -1)
    return hf


def numpy_gpt2(config: ModelConfig, params: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Hugging Face's GPT2LMHeadModel in float64, on parameters by its names."""
    width, heads, length = config.hidden_size, config.num_attention_heads, tokens.shape[1]
    hf = {name: np.asarray(p, np.float64) for name, p in gpt2_names(params, config.num_hidden_layers).items()}
    conv1d = lambda x, name: x @ hf[f"{name}.weight"] + hf[f"{name}.bias"]

    def layer_norm(x, name):
        scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.layer_norm_epsilon)
        return scaled * hf[f"{name}.weight"] + hf[f"{name}.bias"]

    def attention(x, name):
        q, k, v = (y.reshape(length, heads, -1) for y in np.split(conv1d(x, f"{name}.c_attn"), 3, -1))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(width // heads)
        weights = np.where(np.tri(length), np.exp(scores), 0)
        mixed = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
        return conv1d(mixed.reshape(length, -1), f"{name}.c_proj")

    def mlp(x, name):
        x = conv1d(x, f"{name}.c_fc")
        gelu = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        return conv1d(gelu, f"{name}.c_proj")

    def row(tokens):
        x = hf["wte.weight"][tokens] + hf["wpe.weight"][:length]
        for i in range(config.num_hidden_layers):
            x = x + attention(layer_norm(x, f"h.{i}.ln_1"), f"h.{i}.attn")
            x = x + mlp(layer_norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp")
        return layer_norm(x, "ln_f") @ hf["wte.weight"].T

    return np.stack([row(t) for t in tokens])


def numpy_logits(config: ModelConfig, params: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    params = unstack_layers(params) if config.scan_layers else params
    return (numpy_gpt2 if config.family == "gpt2" else numpy_llama)(config, params, tokens)


@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "listed"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": True},
        {"num_attention_heads": 2, "num_key_value_heads": None},
        GPT2,
        QWEN3,
        QWEN2,
        MISTRAL,
    ],
    ids=["one key head", "grouped, own head size, tied", "all heads", "gpt2", "qwen3", "qwen2", "mistral"],
)
def test_logits_are_those_of_a_numpy_implementation(fields, scan_layers):
    config = small_config(**fields, scan_layers=scan_layers)
    model = build_random(**fields, scan_layers=scan_layers)
    expected = numpy_logits(config, get_params(model), TOKENS)
    logits = run(model, TOKENS)
    assert np.abs(expected).max() > 3, "logits near zero would agree by accident"
    assert (logits.shape, logits.dtype) == ((2, 9, VOCAB), jnp.float32)
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())


def test_a_window_as_long_as_the_row_hides_nothing_and_a_shorter_one_the_far_past():
    full = run(build_random(), TOKENS)
    for window in (9, 100):
        np.testing.assert_array_equal(run(build_random(sliding_window=window), TOKENS), full)
    difference = np.abs(run(build_random(sliding_window=4), TOKENS) - full).max((0, 2))
    assert (difference[:4] == 0).all()
    assert (difference[4:] > 1e-3).all()


@pytest.mark.parametrize("fields", [*FAMILIES.values(), {"scan_layers": False}], ids=[*FAMILIES, "listed"])
def test_texts_packed_in_a_row_have_the_logits_they_have_alone(fields):
    """Also where a window ends inside a text, and where a row ends in padding."""
    model = build_random(**fields)
    lengths = [[5, 1, 3], [2, 6, 1]]
    segments = np.stack([np.repeat([1, 2, 0], sizes) for sizes in lengths]).astype(np.int32)
    positions = np.stack([np.concatenate([np.arange(n) for n in sizes]) for sizes in lengths]).astype(np.int32)
    packed, unaware = run(model, TOKENS, positions, segments), run(model, TOKENS)
    texts = [(row, sum(sizes[:i]), size) for row, sizes in enumerate(lengths) for i, size in enumerate(sizes)]
    # What comes after a text cannot touch it, so one shape does for all of them alone.
    alone = run(model, np.stack([np.roll(TOKENS[row], -start) for row, start, _ in texts]))
    for (row, start, size), expected in zip(texts, alone, strict=True):
        found = packed[row, start : start + size]
        np.testing.assert_allclose(found, expected[:size], rtol=1e-5, atol=1e-5 * np.abs(expected).max())
        minds = np.abs(unaware[row, start : start + size] - expected[:size]).max()
        assert minds > 1 or start == 0, "a text that does not mind its neighbours shows nothing"


@every_family
def test_positions_and_segments_of_one_text_change_nothing(fields):
    model = build_random(**fields)
    positions = np.broadcast_to(np.arange(9, dtype=np.int32), (2, 9))
    expected = run(model, TOKENS)
    np.testing.assert_array_equal(run(model, TOKENS, positions), expected)
    np.testing.assert_array_equal(run(model, TOKENS, positions, np.zeros_like(TOKENS)), expected)
    # Rotation knows distances only, a table knows places.
    moved = np.abs(run(model, TOKENS, positions + 2) - expected).max()
    assert moved > 1 if "gpt2" in fields.values() else moved < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "listed"])
def test_a_token_changes_no_logits_before_it(scan_layers):
    model = build_random(scan_layers=scan_layers)
    changed = TOKENS.copy()
    changed[:, 5] = (changed[:, 5] + 1) % VOCAB
    difference = np.abs(run(model, TOKENS) - run(model, changed)).max((0, 2))
    assert (difference[:5] == 0).all()
    assert (difference[5:] > 1e-3).all()


QWEN2_HALF_B = ["use_qk_norm=false", "attention_bias=true", "hidden_size=896", "intermediate_size=4864"]
QWEN2_HALF_B += ["num_hidden_layers=24", "num_attention_heads=14", "num_key_value_heads=2", "head_dim=64"]


@pytest.mark.parametrize(
    ("config", "overrides", "vocab_size", "count"),
    [
        ("gpt2", [], 50257, 124_439_808),
        ("qwen3", [], 151936, 596_049_920),
        ("qwen3", QWEN2_HALF_B, 151936, 494_032_768),
        ("mistral", [], 32000, 7_241_732_096),
        ("llama_1b", [], 128256, 1_235_814_400),
    ],
    ids=["GPT-2 small", "Qwen3 0.6B", "Qwen2 0.5B", "Mistral 7B", "Llama 3.2 1B"],
)
def test_models_of_known_sizes_have_their_known_number_of_parameters(config, overrides, vocab_size, count):
    path = Path(__file__).parent.parent / "configs" / f"{config}.yaml"
    build = build_model(load_config(path, [f"model.{field}" for field in overrides]).model, vocab_size)
    params = get_params(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
    assert sum(p.size for p in params.values()) == count


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


@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["scanned", "listed"])
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


@pytest.mark.parametrize(
    "fields",
    [{}, {"scan_layers": False, "tie_word_embeddings": True}, GPT2, QWEN3, QWEN2, MISTRAL],
    ids=["scanned", "listed, tied", "gpt2", "qwen3", "qwen2", "mistral"],
)
def test_bfloat16_parameters_give_bfloat16_products(fields):
    model = build_random(**fields)
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
        (
            lambda: build()(jnp.asarray(TOKENS), jnp.arange(9)),
            ModelError,
            r"positions: int32\(9,\); want int32\(2, 9\)",
        ),
        (
            lambda: build()(jnp.asarray(TOKENS), None, jnp.ones((2, 9))),
            ModelError,
            r"segments: float32\(2, 9\); want int32\(2, 9\)",
        ),
        (
            lambda: build(**MISTRAL, head_dim=8, attention="cudnn")(jnp.asarray(TOKENS), None, jnp.asarray(TOKENS)),
            ModelError,
            r"model\.attention = cudnn.*model\.sliding_window = 4.*model\.attention: xla",
        ),
        (
            lambda: build(attention="cudnn")(jnp.asarray(TOKENS), None, jnp.asarray(TOKENS)),
            ModelError,
            r"model\.attention = cudnn.*even length.*9 tokens.*model\.attention: xla",
        ),
        (
            lambda: build(attention="cudnn", head_dim=12),
            ConfigError,
            r"model\.head_dim = 12: model\.attention = cudnn takes multiples of 8",
        ),
        (
            lambda: build(attention="cudnn", head_dim=264),
            ConfigError,
            r"model\.head_dim = 264: .*up to 256",
        ),
        (
            lambda: ModelConfig(hidden_size=15, num_attention_heads=3),
            ConfigError,
            r"model\.head_dim = 5 .*must be even, since rotary",
        ),
        (
            lambda: ModelConfig(family="gpt2", rope_theta=5e5),
            ConfigError,
            r"model\.rope_theta = 500000\.0: not read by model\.position_embedding_type = absolute",
        ),
        (
            lambda: ModelConfig(family="gpt2", rms_norm_eps=1e-6),
            ConfigError,
            r"model\.rms_norm_eps = 1e-06: not read by model\.norm = layernorm",
        ),
        (
            lambda: ModelConfig(family="qwen", layer_norm_epsilon=1e-6),
            ConfigError,
            r"model\.layer_norm_epsilon = 1e-06: not read by model\.norm = rmsnorm",
        ),
    ],
    ids=[
        "too long",
        "vocabulary too small",
        "positions of another shape",
        "segments that are no integers",
        "cudnn, segments and window",
        "cudnn, segments and odd length",
        "cudnn, head of no multiple of 8",
        "cudnn, head too wide",
        "rotary, odd head",
        "gpt2, rope",
        "gpt2, rmsnorm",
        "qwen, layernorm",
    ],
)
def test_what_cannot_work_says_why(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_family_fills_in_defaults_and_leaves_what_is_given():
    assert ModelConfig(family="llama") == ModelConfig()
    gpt2 = ModelConfig(family="gpt2")
    assert (gpt2.norm, gpt2.hidden_act, gpt2.mlp_bias, gpt2.tie_word_embeddings) == (
        "layernorm",
        "gelu_new",
        True,
        True,
    )
    other = ModelConfig(family="gpt2", tie_word_embeddings=False, position_embedding_type="rotary", rope_theta=1e6)
    assert (other.norm, other.tie_word_embeddings, other.rope_theta) == ("layernorm", False, 1e6)
    # A head that rotates nothing may be odd.
    assert build(**GPT2, head_dim=7)(jnp.asarray(TOKENS)).shape == (2, 9, VOCAB)
    assert ModelConfig(family="mistral", sliding_window=None).sliding_window is None
    for family in ("gpt2", "qwen", "mistral"):
        config = make_config({"model": {"family": family}})
        assert make_config(config.model_dump()) == config, "a dumped config is read back"
        assert load_config(None, [f"model.family={family}"]) == config


STEPS, ROWS = 4, 24


@functools.cache
def train(family: str, stage: int, devices: int, scan_layers: bool, precision: str = "fp32"):
    """Losses of a few steps on packed rows, the parameters before and after, by the listed model's paths."""

    def loss(model, batch):
        logits = model(batch["tokens"], positions=batch["positions"], segments=batch["segments"])
        return jzero.cross_entropy(logits, batch["labels"])

    sizes = {"num_hidden_layers": 2, "initializer_range": 0.2, "scan_layers": scan_layers}
    model = build_model(small_config(**sizes, **FAMILIES[family]), VOCAB)
    config = {"zero": {"stage": stage, "min_shard_elements": 0}, "train": {"global_batch_size": ROWS}}
    # Biases of keys that nothing rotates have no gradient but roundings, which Adam's usual eps would blow up.
    optimizer = optax.adam(4e-3, eps=1e-4)
    engine = jzero.initialize(model, loss, optimizer, config | {"precision": precision}, jax.devices()[:devices])
    start, losses = toys.unstack(engine.params(), "layers"), []
    for step in range(STEPS):
        rng = np.random.default_rng(step)
        segments = np.sort(rng.integers(0, 3, (ROWS, 9)), axis=1).astype(np.int32)
        starts = np.maximum.accumulate(np.where(np.diff(segments, prepend=-1) > 0, np.arange(9), 0), axis=1)
        tokens = rng.integers(0, VOCAB, (ROWS, 9)).astype(np.int32)
        batch = {"tokens": tokens, "segments": segments, "positions": np.arange(9, dtype=np.int32) - starts}
        losses.append(float(engine.step(batch | {"labels": (5 * tokens + 1) % VOCAB})["loss"]))
    return np.array(losses), start, toys.unstack(engine.params(), "layers")


@pytest.mark.parametrize(
    ("family", "devices", "scan_layers"),
    [
        ("mixed", 8, False),
        *(
            pytest.param(family, devices, scan_layers, marks=pytest.mark.slow)
            for family in ("gpt2", "qwen3", "qwen2", "mistral")
            for devices, scan_layers in ((8, True), (3, False))
        ),
    ],
)
def test_families_train_at_stage_3_as_on_one_device(family, devices, scan_layers):
    losses, start, params = train(family, 0, 1, True)
    assert losses[-1] < losses[0] - 0.1
    sharded_losses, sharded_start, sharded_params = train(family, 3, devices, scan_layers)
    np.testing.assert_allclose(sharded_losses, losses, rtol=1e-5)
    assert sharded_start.keys() == sharded_params.keys() == start.keys()
    for path, values in start.items():
        np.testing.assert_array_equal(sharded_start[path], values, err_msg=path)
        tolerance = 1e-4 * np.abs(params[path]).max() + 1e-6
        np.testing.assert_allclose(sharded_params[path], params[path], rtol=0, atol=tolerance, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_train_in_bfloat16(family):
    # jax.nn.dot_product_attention itself promotes bfloat16, which strict mode forbids.
    with jax.numpy_dtype_promotion("standard"):
        losses, _, params = train(family, 3, 8, True, precision="bf16")
    assert {p.dtype.name for p in params.values()} == {"float32"}, "the master weights"
    assert losses[-1] < losses[0] - 0.1


PROMPT = jnp.asarray(TOKENS[:, :4])


@pytest.mark.parametrize(
    "fields",
    [{}, {"scan_layers": False}, GPT2, MISTRAL | {"sliding_window": 3}],
    ids=["scanned", "listed", "gpt2", "mistral"],
)
def test_greedy_generation_takes_the_likeliest_token_each_time(fields):
    """Past `sequence_length` the oldest tokens slide out of view."""
    model = build_random(**fields)
    expected = np.asarray(PROMPT)
    for _ in range(8):
        logits = numpy_logits(small_config(**fields), get_params(model), expected[:, -6:])
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
