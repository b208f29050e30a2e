"""The collectives placed by jzero itself (zero.collectives: explicit): everything else a training step does stays as it
was under xla."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from flax import linen as nn
from flax import nnx

import jzero
from jzero.adam8bit import scale_by_adam8bit
from jzero.blueprint import prepare
from jzero.config import make_config
from jzero.errors import CollectivesError, ConfigError

ROWS, STEPS = 72, 4  # 72 rows divide over 3 micro-batches on 3 and on 8 devices
ADAM = optax.adam(4e-3)


class Place(NamedTuple):
    stage: int
    devices: int
    micro_batches: int


ONE = Place(0, 1, 1)


def start(
    model: Any,
    loss: Any,
    optimizer: Any,
    place: Place,
    collectives: str = "explicit",
    /,
    **config: Any,
) -> jzero.Engine:
    """An engine on the first devices, every array split that can be; no clipping unless asked for."""
    zero = {"stage": place.stage, "min_shard_elements": 0, "collectives": collectives} | config.pop("zero", {})
    train = {"global_batch_size": ROWS, "accumulation_steps": place.micro_batches} | config.pop("train", {})
    config = {"zero": zero, "train": train, "optimizer": {"clip_norm": None}} | config
    return jzero.initialize(model, loss, optimizer, config, jax.devices()[: place.devices])


def host(engine: jzero.Engine) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in engine.arrays().items()}


def assert_same(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


# The same numbers: whatever the model is written in, the loss returns, the config asks for.


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        gain = self.param("gain", nn.initializers.ones, ())
        return x + gain * nn.Dense(13)(nn.gelu(nn.Dense(35)(nn.LayerNorm()(x)))), None


class LinenStack(nn.Module):
    """x [B, 7] -> [B, 5] through two scanned, rematerialised blocks."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = nn.remat(LinenBlock, prevent_cse=False)
        stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = stack(name="blocks")(nn.Dense(13)(x), None)
        return nn.Dense(5)(x)


def function_init(key: jax.Array) -> dict[str, Any]:
    normal = lambda i, *shape: 0.3 * jax.random.normal(jax.random.fold_in(key, i), shape)
    blocks = {"up": normal(1, 2, 7, 35), "down": normal(2, 2, 35, 7), "gain": jnp.ones(2)}
    return {"blocks": blocks, "head": [normal(3, 7, 5), jnp.zeros(())]}


def function_apply(params: Any, x: jax.Array, gather: Callable[[Any], Any] = lambda p: p) -> jax.Array:
    def block(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        layer = gather(layer)
        return x + layer["gain"] * (jnp.tanh(x @ layer["up"]) @ layer["down"]), None

    x, _ = jax.lax.scan(jax.checkpoint(block, prevent_cse=False), x, params["blocks"])
    kernel, temperature = gather(params["head"])
    return x @ kernel * jnp.exp(temperature)


def gathering_apply(params: Any, x: jax.Array) -> jax.Array:
    return function_apply(params, x, jzero.gather)


def complex_apply(params: Any, x: jax.Array) -> jax.Array:
    """Multiplies by complex numbers of size one; [B, 7] -> [B, 5]."""
    y = jax.lax.complex(x @ jnp.cos(params["angle"]), x @ jnp.sin(params["angle"]))
    return jnp.real(y * y)


def weighted_loss(model: Any, batch: Any) -> tuple[jzero.WeightedLoss, dict[str, Any]]:
    """Rows weigh from nothing to a thousand, those of the first eighth of a batch nothing. Metrics of each kind."""
    errors, weights = jnp.square(model(batch["x"]) - batch["y"]).mean(-1), row_weights(batch["x"])
    loss = jzero.WeightedLoss((errors * weights).sum(), weights.sum())
    large = jzero.WeightedLoss((errors > 1).sum(), len(errors))
    return loss, {"large": large, "mean": loss.total / jnp.maximum(loss.weight, 1)}


def row_weights(x: jax.Array) -> jax.Array:
    return jnp.where(x[:, 0] > 50, 0.0, jnp.where(x[:, 1] > 1, 1000.0, 1.0))


def weighted_batch(rows: int, step: int) -> dict[str, np.ndarray]:
    batch = toys.square_batch(rows, step)
    batch["x"][: rows // 8, 0] += 100
    return batch


class Case(NamedTuple):
    """A model of x [B, 7] -> [B, 5] and what is asked of its training beside."""

    model: Any = toys.mlp
    loss: Callable[..., Any] = toys.square_loss
    optimizer: optax.GradientTransformation = ADAM
    batch: Callable[[int, int], dict[str, np.ndarray]] = toys.square_batch
    config: Mapping[str, Any] = {}
    mesh: Mapping[str, int] = {}


EXAMPLE = jax.ShapeDtypeStruct((1, 7), jnp.float32)
CASES = {
    "linen": Case(jzero.Linen(LinenStack(), (EXAMPLE,))),
    "function": Case(jzero.Function(function_init, function_apply, ["blocks/*"])),
    "function that gathers": Case(jzero.Function(function_init, gathering_apply, ["blocks/*"], gathers=True)),
    "complex": Case(
        jzero.Function(lambda key: {"angle": jax.random.normal(key, (7, 5))}, complex_apply), optimizer=optax.sgd(0.01)
    ),
    "weighted, with metrics": Case(loss=weighted_loss, batch=weighted_batch),
    "frozen, averaged, clipped": Case(
        config={"train": {"frozen": ["up/kernel"], "ema_decay": 0.5}, "optimizer": {"clip_norm": 0.5}}
    ),
    "some leaves whole, with statistics": Case(
        config={
            "zero": {"min_shard_elements": 100},
            "log": {"grad_norms": ["up/*", "*/bias"], "grad_histogram": True},
        }
    ),
    "tensor": Case(lambda rngs: toys.Megatron(rngs), mesh={"data": 4, "tensor": 2}),
    "tensor, nodes": Case(
        lambda rngs: toys.Megatron(rngs),
        mesh={"replica": 2, "data": 2, "tensor": 2},
        config={"zero": {"group": "node"}},
    ),
    "adafactor": Case(optimizer=optax.adafactor(0.05, min_dim_size_to_factor=4)),
    "adamw8bit": Case(optimizer=optax.chain(scale_by_adam8bit(0.9, 0.999, 1e-8, min_elements=1), optax.scale(-0.01))),
    "muon": Case(optimizer=optax.contrib.muon(0.01)),
}


@dataclass(frozen=True)
class Trained:
    engine: jzero.Engine
    rows: set[int]  # that the loss was traced for
    metrics: list[dict[str, np.ndarray]]


def train(name: str, place: Place, collectives: str) -> Trained:
    case, rows = CASES[name], set()

    def loss(model: Any, batch: Any) -> Any:
        rows.add(len(batch["x"]))
        return case.loss(model, batch)

    config = dict(case.config) | ({"mesh": case.mesh} if place.devices == 8 else {})
    engine = start(case.model, loss, case.optimizer, place, collectives, **config)
    return Trained(engine, rows, jax.device_get([engine.step(case.batch(ROWS, i)) for i in range(STEPS)]))


@cache
def on_one_device(name: str) -> Trained:
    return train(name, ONE, "xla")


PLACES = [Place(0, 8, 3), Place(1, 3, 3), Place(2, 8, 3), Place(3, 8, 1)]
# Which cases are tried by default, and where; of the rest every other one is slow, the others thorough.
QUICK = ("function that gathers", "weighted, with metrics", "frozen, averaged, clipped", "tensor")
BY_DEFAULT = {name: PLACES[i % len(PLACES)] for i, name in enumerate(CASES)} | {"tensor": PLACES[3]}


def marks(name: str, place: Place) -> Any:
    if place == BY_DEFAULT[name] and name in QUICK:
        return ()
    return (pytest.mark.slow, pytest.mark.thorough)[(list(CASES).index(name) + PLACES.index(place)) % 2]


ARMS = [
    pytest.param(name, place, id=f"{name}-{'-'.join(map(str, place))}", marks=marks(name, place))
    for name in CASES
    for place in PLACES
    if place.devices == 8 or not CASES[name].mesh
]


@pytest.mark.parametrize(("name", "place"), ARMS)
def test_it_trains_as_xla_does_on_one_device(name, place):
    expected, run = on_one_device(name), train(name, place, "explicit")
    shards = run.engine.mesh.shape["replica"] * run.engine.mesh.shape["data"]
    assert ROWS // place.micro_batches // shards in run.rows
    assert len({float(m["loss"]) for m in expected.metrics}) == STEPS
    for found, wanted in zip(run.metrics, expected.metrics, strict=True):
        assert list(found) == list(wanted)
        for metric, value in wanted.items():
            # A magnitude at an edge of the histogram may fall on either side.
            tolerance = {"atol": 2} if metric == "grad_histogram" else {"rtol": 1e-5}
            np.testing.assert_allclose(found[metric], value, err_msg=metric, **tolerance)
    averages = (False, True) if run.engine.has_average else (False,)
    for averaged in averages:
        assert_near(run.engine.params(averaged=averaged), expected.engine.params(averaged=averaged))
    assert_near(held_back(run.engine, CASES[name]), held_back(expected.engine, CASES[name]))


def assert_near(found: Mapping[str, Any], expected: Mapping[str, Any], rtol: float = 2e-5) -> None:
    """To rtol of the largest element of each array."""
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        error = np.abs(found[path] - value).max() / (np.abs(value).max() or 1.0)
        assert error <= rtol, f"{path}: differs by {error:.1e} of its largest element"


def held_back(engine: jzero.Engine, case: Case) -> dict[str, np.ndarray]:
    """An evaluation, and the model's outputs."""
    batch = case.batch(ROWS, 99)
    outputs = engine.apply(_outputs, batch["x"])
    return jax.device_get({**engine.evaluate(batch), "outputs": outputs})


def _outputs(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def test_the_weights_of_a_case_differ_much_between_devices():
    weights = np.asarray(row_weights(jnp.asarray(weighted_batch(ROWS, 0)["x"]))).reshape(8, -1).sum(1)
    assert weights[0] == 0
    assert weights.max() > 100 * weights[1:].min() > 0


@pytest.mark.parametrize("place", [Place(1, 8, 3), Place(3, 8, 1)], ids=str)
def test_a_batch_without_weight_changes_nothing(place):
    engine = start(toys.mlp, weighted_loss, ADAM, place)
    engine.step(weighted_batch(ROWS, 0))
    before, batch = host(engine), weighted_batch(ROWS, 1)
    batch["x"][:, 0] = 100
    metrics = engine.step(batch)
    assert (float(metrics["loss"]), float(metrics["weight"]), float(metrics["grad_norm"])) == (0, 0, 0)
    assert (int(metrics["skipped"]), int(metrics["skipped_in_a_row"])) == (1, 0)
    counters = {"step", "skipped"}
    assert {name for name, array in host(engine).items() if not np.array_equal(array, before[name])} == counters


# Checkpoints, and batches of several sizes.


@pytest.mark.parametrize(
    ("first", "then", "place"),
    [
        ("xla", "explicit", Place(1, 8, 3)),
        ("explicit", "xla", Place(3, 3, 1)),
    ],
)
def test_a_run_goes_on_under_the_other_engine(first, then, place, tmp_path):
    batches = [toys.square_batch(ROWS, i) for i in range(6)]
    begun = start(toys.mlp, toys.square_loss, ADAM, Place(3, 8, 1), first)
    for batch in batches[:3]:
        begun.step(batch)
    begun.save(tmp_path)
    engine = start(toys.mlp, toys.square_loss, ADAM, place, then)
    engine.restore(tmp_path)
    assert_same(engine.params(), begun.params())
    straight, losses = ([float(e.step(batch)["loss"]) for batch in batches[3:]] for e in (begun, engine))
    np.testing.assert_allclose(losses, straight, rtol=1e-5)
    assert_near(engine.params(), begun.params())


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_one_engine_steps_batches_of_several_sizes(stage):
    """Rows that a loop of the user's own hands over: of one micro-batch, of three, of one again."""
    losses = []
    for collectives, rows in (("xla", {24}), ("explicit", {3, 9}), ("auto", {24, 3, 9} if stage == 1 else {24})):
        seen = set()

        def loss(model: Any, batch: Any, seen: set[int] = seen) -> Any:
            seen.add(len(batch["x"]))
            return toys.square_loss(model, batch)

        config = {
            "zero": {"stage": stage, "min_shard_elements": 0, "collectives": collectives},
            "train": {"micro_batch_size": 3},
        }
        engine = jzero.initialize(toys.mlp, loss, ADAM, config, jax.devices()[:8])
        sizes = (24, 72, 24)
        losses.append([float(engine.step(toys.square_batch(n, i))["loss"]) for i, n in enumerate(sizes)])
        assert seen == rows
    for others in losses[1:]:
        np.testing.assert_allclose(others, losses[0], rtol=1e-5)


# float16: a device that overflows is every device's business.


class Slope(nnx.Module):
    """y = w x: the gradient of a row is x, which overflows in float16 at 65504."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.ones((3, 16)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return (x.astype(self.w.dtype) * self.w).astype(jnp.float32).sum((1, 2))


def slope_loss(model: Slope, batch: jax.Array) -> jzero.WeightedLoss:
    """Rows that begin with a six weigh a hundred times as much."""
    weights = jnp.where(batch[:, 0, 0] == 6, 100.0, 1.0)
    return jzero.WeightedLoss((model(batch) * weights).sum(), weights.sum())


@pytest.mark.parametrize(
    "place", [Place(1, 8, 3), Place(3, 3, 1), pytest.param(Place(2, 8, 3), marks=pytest.mark.slow)],
    ids=str,
)  # fmt: skip
def test_an_overflow_on_one_device_skips_the_step_and_lowers_the_scale_on_all(place):
    good = np.random.default_rng(0).normal(size=(ROWS, 3, 16)).astype(np.float32)
    good[:9, 0, 0] = 6
    mean = np.average(good, 0, np.where(np.arange(ROWS) < 9, 100, 1))
    bad = good.copy()
    bad[-1] = 3e38
    traces = []
    for collectives in ("xla", "explicit"):
        engine = start(
            lambda rngs: Slope(rngs), slope_loss, optax.sgd(0.1), place, collectives,
            precision="fp16",
            loss_scale={"initial": 1024, "window": 2, "hysteresis": 1},
        )  # fmt: skip
        trace = []
        for batch in (good, bad, good, good, good, bad, good):
            before = engine.params()["w"]
            metrics = jax.device_get(engine.step(batch))
            names = ("loss_scale", "skipped", "skipped_in_a_row", "loss_scale_exhausted")
            trace.append([float(metrics[name]) for name in names])
            assert np.array_equal(before, engine.params()["w"]) == (batch is bad)
            if batch is good:
                assert float(metrics["grad_norm"]) == pytest.approx(np.linalg.norm(mean), rel=5e-3)
        traces.append(trace)
    assert traces[0] == traces[1]
    assert [scale for scale, *_ in traces[1]] == [1024, 1024, 512, 512, 512, 1024, 512]


# Rounding.


class Ones(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.ones((37, 41)))


@pytest.mark.parametrize("place", [Place(1, 8, 3), pytest.param(Place(3, 3, 1), marks=pytest.mark.slow)], ids=str)
def test_stochastic_rounding_draws_the_same_bits(place):
    loss = lambda model, batch: model.w[...].astype(jnp.float32).sum()
    precision = {"preset": "bf16", "master": None, "stochastic_rounding": True}
    weights = []
    for where, collectives in ((ONE, "xla"), (place, "explicit")):
        engine = start(lambda rngs: Ones(rngs), loss, optax.sgd(1e-3), where, collectives, precision=precision)
        for _ in range(10):
            engine.step(np.zeros(ROWS, np.float32))
        weights.append(engine.params()["w"].astype(np.float32))
    assert len(np.unique(weights[0])) > 2
    np.testing.assert_array_equal(*weights)


# Randomness: each device draws its own, and the same again.


class Masks(nnx.Module):
    """Its gradient is the dropout mask, row by row."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.zeros((ROWS, 8)))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, rows: jax.Array) -> jax.Array:
        return self.dropout(jnp.ones((rows.size, 8))) * self.w[rows]


@cache
def masks(place: Place, collectives: str = "explicit", seed: int = 0) -> np.ndarray:
    """The masks of two steps, int [2, ROWS, 8], by global row: 0 or 2."""
    loss = lambda model, batch: jzero.WeightedLoss(jnp.sum(model(batch)), batch.size)
    engine = start(
        lambda rngs: Masks(rngs), loss, optax.sgd(float(ROWS)), place, collectives, train={"seed": seed}
    )  # fmt: skip
    streams = {name: array for name, array in engine.arrays().items() if name.startswith("model_state/")}
    assert len(streams) == 2, "a key and a count"
    streams = {name: np.asarray(jax.random.key_data(x) if "key" in name else x) for name, x in streams.items()}
    found = [engine.params()["w"]]
    for _ in range(2):
        engine.step(np.arange(ROWS, dtype=np.int32))
        found.append(engine.params()["w"])
    for name, before in streams.items():
        now = engine.arrays()[name]
        np.testing.assert_array_equal(jax.random.key_data(now) if "key" in name else now, before, err_msg=name)
    exact = -np.diff(np.stack(found), axis=0)
    assert np.abs(exact - exact.round()).max() < 1e-4
    return exact.round().astype(int)


def test_devices_draw_masks_of_their_own():
    first, second = masks(Place(2, 8, 3))
    assert set(np.unique(first)) == {0, 2}
    assert 0.3 < np.mean(first == 0) < 0.7
    assert not np.array_equal(first, second)
    a_device = first.reshape(8, 3, 3, 8)  # rows of a device: [row of a micro-batch, micro-batch]
    drawn = {a_device[device, :, micro].tobytes() for device in range(8) for micro in range(3)}
    assert len(drawn) == 8 * 3, "the same rows of 24 parts of the batch, drawn apart"


def test_masks_repeat_with_the_seed_at_every_stage_and_differ_from_those_of_xla():
    masks_of = lambda *place, **kwargs: masks(Place(*place), **kwargs)
    found = masks_of(2, 8, 3)
    np.testing.assert_array_equal(found, masks.__wrapped__(Place(2, 8, 3)))
    np.testing.assert_array_equal(found, masks_of(0, 8, 3))
    assert not np.array_equal(found, masks_of(2, 8, 3, seed=1))
    assert not np.array_equal(found, masks_of(2, 8, 3, collectives="xla"))
    assert not np.array_equal(found, masks_of(2, 8, 1))


def test_a_functions_key_is_another_on_each_device():
    function = jzero.Function(lambda key: {"w": jnp.zeros((ROWS, 8))}, lambda params, rows: params["w"][rows])

    def loss(model: Any, rows: jax.Array) -> jzero.WeightedLoss:
        return jzero.WeightedLoss(jnp.sum(model(rows) * jax.random.normal(model.rng, (rows.size, 8))), rows.size)

    engine = start(function, loss, optax.sgd(float(ROWS)), Place(3, 8, 1))
    engine.step(np.arange(ROWS, dtype=np.int32))
    assert len({part.tobytes() for part in engine.params()["w"].reshape(8, -1)}) == 8


# precision.reduce.


def two_products(params: Any, x: jax.Array) -> jax.Array:
    return sum((x.astype(w.dtype) @ w).astype(jnp.float32) for w in params.values())


def reduced(precision: Any, place: Place) -> set[tuple[str, str]]:
    """(operation, dtype) of every sum over devices that the step's program asks for, scalars aside. Before XLA: on CPUs
    that sums bfloat16 in float32."""
    model = jzero.Function(lambda key: {"a": jnp.ones((7, 5)), "b": jnp.ones((7, 5))}, two_products)
    config = {
        "zero": {"stage": place.stage, "min_shard_elements": 0, "collectives": "explicit"},
        "precision": precision,
        "train": {"global_batch_size": ROWS, "accumulation_steps": place.micro_batches},
    }
    made = prepare(model, toys.square_loss, ADAM, config, jax.devices()[: place.devices])
    text = made.lower_step(toys.square_batch(ROWS, 0)).as_text()
    sums = re.findall(r'"stablehlo\.(reduce_scatter|all_reduce)".*?\}\) : \(tensor<([^>]*)>', text, re.S)
    return {(operation, operand.split("x")[-1]) for operation, operand in sums if "x" in operand}


@pytest.mark.parametrize(
    ("precision", "stage", "micro_batches", "expected"),
    [
        ("bf16", 0, 1, [("all_reduce", "bf16")]),
        ("bf16", 3, 1, [("reduce_scatter", "bf16")]),
        ("bf16", 3, 3, [("reduce_scatter", "bf16")]),
        ("bf16", 1, 3, [("reduce_scatter", "f32")]),  # once a step, of what was accumulated
        ("fp16", 2, 1, [("reduce_scatter", "f16")]),
        ({"preset": "bf16", "reduce": "float32"}, 0, 1, [("all_reduce", "f32")]),
        ({"preset": "bf16", "reduce": "float32"}, 2, 3, [("reduce_scatter", "f32")]),
        ({"preset": "bf16", "reduce": "float16"}, 3, 1, [("reduce_scatter", "f16")]),
        ({"reduce": "bfloat16"}, 0, 3, [("all_reduce", "bf16")]),
        ({"reduce": "bfloat16"}, 1, 3, [("reduce_scatter", "bf16")]),
        ({"reduce": "bfloat16"}, 3, 3, [("reduce_scatter", "bf16")]),
        ({"reduce": "float16"}, 2, 1, [("reduce_scatter", "f16")]),
        (
            {"preset": "bf16", "reduce": "bfloat16", "keep_float32": ["b"]},
            3, 1, [("reduce_scatter", "bf16"), ("reduce_scatter", "f32")],
        ),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_are_summed_over_devices_in_precision_reduce(precision, stage, micro_batches, expected):
    assert reduced(precision, Place(stage, 8, micro_batches)) == set(expected)


@pytest.mark.parametrize(
    ("reduce", "total"), [("float32", 263.0), ("bfloat16", 264.0), (None, 264.0), ("float16", 263.0)]
)
@pytest.mark.parametrize("place", [Place(0, 8, 1), pytest.param(Place(3, 8, 1), marks=pytest.mark.slow)], ids=str)
def test_a_wider_sum_keeps_what_bfloat16_rounds_off(reduce, total, place):
    """256 of one device and 1 of seven others: bfloat16 tells even numbers only."""
    rows = np.where(np.arange(ROWS) < 9, 256, 1).astype(np.float32) / 9
    loss = lambda model, batch: jzero.WeightedLoss(
        (model.w[...].astype(jnp.float32) * batch.sum()).sum(), batch.size / ROWS
    )
    precision = {"preset": "bf16", "reduce": reduce}
    engine = start(lambda rngs: Ones(rngs), loss, optax.sgd(1.0), place, precision=precision)
    engine.step(rows)
    np.testing.assert_array_equal(engine.params()["w"], np.full((37, 41), 1 - total))


@pytest.mark.parametrize("reduce", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_narrow_sum_trains_nearly_as_a_wide_one(reduce):
    losses = []
    for precision in ({}, {"reduce": reduce}):
        engine = start(toys.mlp, toys.square_loss, optax.sgd(0.1), Place(3, 8, 3), precision=precision)
        losses.append([float(engine.step(toys.square_batch(ROWS, i))["loss"]) for i in range(STEPS)])
    assert losses[0][1:] != losses[1][1:]
    np.testing.assert_allclose(*losses, rtol=1e-3)


def test_xla_refuses_another_dtype_to_sum_in():
    for precision in ({"reduce": "bfloat16"}, {"preset": "bf16", "reduce": "float32"}):
        with pytest.raises(ConfigError, match=r"precision\.reduce = .*collectives = xla.*explicit or auto"):
            make_config({"precision": precision})
    make_config({"precision": {"preset": "bf16", "reduce": "bfloat16"}})


# zero.collectives: auto, and what explicit cannot.


@pytest.mark.parametrize(
    ("stage", "micro_batches", "replica", "group", "precision", "engine"),
    [
        (0, 1, 1, "all", "fp32", "xla"),
        (0, 3, 1, "all", "fp32", "explicit"),
        (1, 1, 1, "all", "fp32", "xla"),
        (1, 3, 1, "all", "fp32", "explicit"),
        (2, 3, 1, "all", "fp32", "xla"),
        (3, 3, 1, "all", "fp32", "xla"),
        (0, 1, 2, "node", "fp32", "xla"),
        (1, 1, 2, "node", "fp32", "explicit"),
        (2, 1, 2, "node", "fp32", "explicit"),
        (2, 3, 2, "node", "fp32", "explicit"),
        (3, 3, 2, "node", "fp32", "explicit"),
        (2, 3, 2, "all", "fp32", "xla"),
        (3, 3, 2, "all", "fp32", "xla"),
        (3, 1, 1, "all", {"preset": "bf16", "reduce": "bfloat16"}, "xla"),
        (3, 1, 1, "all", {"preset": "bf16", "reduce": "float32"}, "explicit"),
        (0, 1, 1, "all", {"reduce": "bfloat16"}, "explicit"),
    ],
)
def test_auto_takes_what_sends_less(stage, micro_batches, replica, group, precision, engine):
    config = {
        "mesh": {"replica": replica},
        "zero": {"stage": stage, "group": group, "min_shard_elements": 0, "collectives": "auto"},
        "precision": precision,
        "train": {"global_batch_size": ROWS, "accumulation_steps": micro_batches},
    }
    made = prepare(toys.mlp, toys.square_loss, ADAM, config, jax.devices()[:8])
    assert made.collectives(micro_batches).engine == made.collectives().engine == engine
    assert made.collectives().reason
    if precision == "fp32":
        alone = prepare(toys.mlp, toys.square_loss, ADAM, {**config, "mesh": {}}, jax.devices()[:1])
        assert alone.collectives().engine == "xla"


class OverData(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        split = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", None))
        self.linear = nnx.Linear(8, 5, kernel_init=split, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(jnp.pad(x, ((0, 0), (0, 1))))


def test_a_parameter_that_the_model_splits_over_data_is_left_to_xla():
    made = lambda collectives, **config: start(
        lambda rngs: OverData(rngs), toys.square_loss, ADAM, Place(1, 8, 3), collectives, **config
    )
    told = r"^linear/kernel: the model's own sharding .*names data.*zero\.collectives: xla can"
    with pytest.raises(CollectivesError, match=told):
        made("explicit")
    with pytest.raises(CollectivesError, match=f"{told}, with precision.reduce: null"):
        made("auto", precision={"reduce": "bfloat16"})
    losses = [
        [float(engine.step(toys.square_batch(ROWS, i))["loss"]) for i in range(2)]
        for engine in (made("auto"), made("xla"))
    ]
    assert losses[0] == losses[1]
