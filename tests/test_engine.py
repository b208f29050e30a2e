"""The library's surface: what `import jzero` gives, how an engine is made, fed, read, saved and restored."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from flax import nnx

import jzero
from jzero import engine as engine_module
from jzero.config import ZeroConfig
from jzero.errors import CheckpointError, ConfigError, PlanError, UserError

ROWS = 24
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 7)).astype(np.float32)
BATCH = {"x": X, "y": np.sin(3 * X[:, :5])}


class Layer(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.linear(x))


class Net(nnx.Module):
    """x [., 7] -> [., 5] with a stack, batch statistics, dropout and a scalar; nothing divides by 8 or 3."""

    def __init__(self, rngs: nnx.Rngs, depth: int = 3, width: int = 10, head: str = "head"):
        self.embed = nnx.Linear(7, width, rngs=rngs)
        self.layers = nnx.vmap(lambda rngs: Layer(width, rngs))(rngs.split(depth))
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.head_name = head
        setattr(self, head, nnx.Linear(width, 5, rngs=rngs))
        self.gain = nnx.Param(jnp.ones(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        run = lambda layer, x: layer(x)
        x = nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, self.embed(x))
        return getattr(self, self.head_name)(self.dropout(self.norm(x))) * self.gain


def linear(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Linear(7, 5, rngs=rngs)


def loss(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


def start(stage: int = 3, devices: int = 8, model: Any = Net, optimizer: Any = None, **config: Any) -> jzero.Engine:
    config = {"zero": {"stage": stage, "min_shard_elements": 0}} | config
    build = (lambda rngs: model(rngs)) if isinstance(model, type) else model
    return jzero.initialize(build, loss, optimizer or optax.adam(0.02), config, jax.devices()[:devices])


def true_arrays(engine: jzero.Engine) -> dict[str, np.ndarray]:
    """Every array of the state in its true shape, keys as their integers."""
    arrays = {}
    for name, shape in engine.shapes().items():
        array = engine.arrays()[name]
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        arrays[name] = np.array(array)[tuple(slice(0, n) for n in shape)]
    return arrays


def assert_same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, Any]:
    """An engine on 8 devices at stage 3, saved after three steps; what it held then, and its later losses."""
    directory = tmp_path_factory.mktemp("trained")
    engine = start()
    for _ in range(3):
        engine.step(BATCH)
    engine.save(directory, record={"note": "third"})
    held, params, evaluated = true_arrays(engine), engine.params(), float(engine.evaluate(BATCH)["loss"])
    losses = [float(engine.step(BATCH)["loss"]) for _ in range(3)]
    return {
        "engine": engine,
        "directory": directory,
        "held": held,
        "params": params,
        "evaluated": evaluated,
        "losses": losses,
    }


# The surface.


def test_import_starts_nothing():
    """A process that reads configs, or asks for help, never pays for JAX."""
    code = """
import sys, json
import jzero
jzero.Config, jzero.load_config(None), jzero.UserError, dir(jzero)
print(json.dumps(sorted({"jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorboardX"} & set(sys.modules))))
import jzero.engine, jzero.models, jzero.bench
import jax
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend has started
print(len(jax.devices("cpu")))
"""
    env = {"JAX_PLATFORMS": "cpu", "PATH": "", "PYTHONPATH": str(Path(jzero.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    loaded, devices = done.stdout.splitlines()
    assert json.loads(loaded) == []
    assert devices == "3"


def test_planning_needs_no_devices():
    """A model for 64 devices is planned where JAX can start none."""
    code = """
import jax, optax
import jzero
from jzero.config import ModelConfig, make_config
from jzero.adapt import adapt
from jzero.models import build_model
config = make_config({"precision": "bf16"})
model = adapt(build_model(ModelConfig(hidden_size=512), 1024))
sizes = {"replica": 8, "data": 8, "tensor": 1}
plan = jzero.make_plan(model.params, sizes, config.zero, config.precision, optax.adamw(1e-3), model.model_state)
print(plan.num_parameters, plan.bytes_per_device()["parameters"])
try:
    jax.devices()
except RuntimeError:
    print("no devices")
"""
    env = {"JAX_PLATFORMS": "nonsense", "PATH": "", "PYTHONPATH": str(Path(jzero.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    planned, devices = done.stdout.splitlines()
    elements, a_device = map(int, planned.split())
    assert elements / 64 <= a_device / 2 < 1.1 * elements / 64
    assert devices == "no devices"


def test_exported_names_are_there_and_say_what_they_are():
    documented = {"initialize", "Engine", "Config", "load_config", "WeightedLoss", "cross_entropy", "Plan", "make_plan"}
    assert documented | {"JzeroError", "UserError", "__version__"} <= set(jzero.__all__)
    assert dir(jzero) == sorted(jzero.__all__)
    for name in jzero.__all__:
        public = getattr(jzero, name)
        assert name == "__version__" or (public.__doc__ and public.__module__.startswith("jzero."))
    with pytest.raises(AttributeError, match="module 'jzero' has no attribute 'initialise'"):
        jzero.initialise  # noqa: B018


# Making an engine.


def test_config_comes_in_any_form(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("zero: {stage: 2}\noptimizer: {learning_rate: 1e-2}\n")
    mapping = {"zero": {"stage": 2}, "optimizer": {"learning_rate": 1e-2}}
    forms = [mapping, path, str(path), jzero.load_config(path), jzero.Config(zero=ZeroConfig(stage=2))]
    engines = [jzero.initialize(linear, loss, None, form, jax.devices()[:2]) for form in forms]
    assert {engine.config for engine in engines[:4]} == {jzero.load_config(path)}
    assert [engine.config.optimizer.learning_rate for engine in engines] == [1e-2] * 4 + [1e-3]
    assert {engine.plan.stage for engine in engines} == {2}
    assert {tuple(engine.mesh.shape.values()) for engine in engines} == {(1, 2, 1)}


def test_defaults_serve_any_number_of_devices():
    """Who owns the loop brings the batch: the default of train.global_batch_size binds nobody."""
    losses = []
    for devices in (1, 3, 8):
        engine = jzero.initialize(linear, loss, devices=jax.devices()[:devices])
        assert engine.config == jzero.Config()
        losses.append([float(engine.step(BATCH)["loss"]) for _ in range(3)])
    np.testing.assert_allclose(losses[1:], losses[:1] * 2, rtol=1e-5)
    assert len(set(losses[0])) == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero": {"stage": 4}}, r"zero\.stage"),
        ({"zero": {"stagee": 3}}, r"zero\.stagee"),
        ({"mesh": {"data": 5}}, r"mesh\.data = 5.*8 devices"),
        ({"runtime": {"platform": "gpu"}}, r"runtime\.platform = gpu, but JAX runs on cpu"),
        ({"train": {"global_batch_size": 20}}, r"train\.global_batch_size = 20: must be a multiple of 8 shards"),
        ({"train": {"global_batch_size": 32, "micro_batch_size": 3}}, r"train\.global_batch_size = 32"),
        (
            {"train": {"global_batch_size": 64, "micro_batch_size": 2, "accumulation_steps": 2}},
            r"train\.global_batch_size = 64: must be train\.micro_batch_size \(2\) .*steps \(2\) \* 8 shards = 32",
        ),
        ("no/such/file.yaml", r"no/such/file\.yaml"),
    ],
)
def test_configs_that_cannot_work_are_refused_before_the_model_is_built(config, message):
    def build(rngs: nnx.Rngs) -> nnx.Module:
        raise AssertionError("the model was built")

    with pytest.raises(UserError, match=message):
        jzero.initialize(build, loss, optax.sgd(0.1), config)


@pytest.mark.parametrize(
    ("optimizer", "config", "message"),
    [
        (optax.adam, {}, "optimizer is <function adam .*optax.adamw.1e-3., called"),
        (optax.lbfgs(), {}, "raised TypeError: .*jzero passes these three only"),
        (optax.lookahead(optax.sgd(0.1), 5, 0.5), {}, "parameters of another kind cannot be driven"),
        (optax.adam(1e-3), {"optimizer": {"learning_rate": 7.0}}, "optimizer.learning_rate = 7.0: has no say"),
        (optax.adam(1e-3), {"optimizer": {"name": "sgd"}}, "optimizer.name = sgd: has no say"),
    ],
    ids=["not called", "lbfgs", "lookahead", "learning rate", "name"],
)
def test_optimizers_that_cannot_work_are_refused_before_anything_is_placed(optimizer, config, message, monkeypatch):
    monkeypatch.setattr(engine_module, "init_values", pytest.fail)
    with pytest.raises(jzero.UserError, match=message):
        jzero.initialize(toys.mlp, toys.square_loss, optimizer, config)


def test_a_loss_that_is_no_function_is_refused():
    with pytest.raises(jzero.UserError, match="loss is 3: give a function"):
        jzero.initialize(toys.mlp, 3, optax.sgd(0.1), {})


def test_text_in_a_batch_is_refused():
    engine = jzero.initialize(toys.mlp, toys.square_loss, optax.sgd(0.1), {})
    with pytest.raises(jzero.UserError, match="an array of <U1; JAX takes numbers only"):
        engine.step(toys.square_batch(8, 0) | {"names": np.array(["a"] * 8)})


def test_a_model_function_that_takes_no_rngs_is_refused():
    with pytest.raises(jzero.UserError, match="lambda rngs: MyModel"):
        jzero.initialize(lambda: toys.mlp(nnx.Rngs(0)), toys.square_loss, optax.sgd(0.1), {})


def test_integers_that_jax_would_wrap_around_are_refused():
    engine = jzero.initialize(toys.mlp, lambda model, batch: model.up.bias.sum() + 0 * batch.sum(), optax.sgd(0.1), {})
    rows = np.arange(8, dtype=np.int64)
    assert engine.place(rows).dtype == jnp.int32
    with pytest.raises(UserError, match=r"int64 from 1 to 4294967299, and JAX keeps int32"):
        engine.step(np.where(rows == 0, 2**32 + 3, rows))


@pytest.mark.parametrize(
    ("train", "rows", "parts"),
    [
        ({}, 32, 1),
        ({"global_batch_size": 32, "accumulation_steps": 4}, 32, 4),
        ({"micro_batch_size": 2}, 32, 2),
        ({"micro_batch_size": 2}, 40, 5),  # 5 rows a device: as they divide
        ({"micro_batch_size": 2}, 8, 1),
        ({"accumulation_steps": 4}, 16, 2),
    ],
)
def test_an_evaluation_takes_no_more_rows_at_once_than_training(train, rows, parts):
    """What fits while it trains fits while it evaluates, and gives the mean over all rows."""
    seen = set()

    def loss(model, batch):
        seen.add(batch["x"].shape[0])
        return toys.square_loss(model, batch)

    engine = jzero.initialize(toys.mlp, loss, optax.sgd(0.1), {"train": train})
    batch = toys.square_batch(rows, 0)
    evaluated = engine.evaluate(batch)
    assert seen == {rows // parts}
    with jax.default_matmul_precision("highest"):
        assert float(evaluated["loss"]) == pytest.approx(float(toys.square_loss(engine.model(), batch)), rel=1e-5)


# Batches.


@pytest.mark.parametrize("method", ["step", "evaluate"])
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": X[:20], "y": X[:20]}, r"the batch has 20 rows, .* over 8 devices .*; give 16 or 24"),
        ({"x": X[:5], "y": X[:5]}, r"the batch has 5 rows, .* over 8 devices .*; give 8 or 8"),
        ({"x": X[:0], "y": X[:0]}, r"the batch has no rows"),
        ({"x": X, "y": X[:16]}, r"leading dimensions \[\(16,\), \(24,\)\]; they must be one and the same"),
        ({"x": X, "y": np.float32(1)}, r"leading dimensions \[\(\), \(24,\)\]; they must"),
        ({"x": np.float32(1)}, r"leading dimensions \[\(\)\]; they must"),
        ({}, r"leading dimensions \[\]; they must"),
    ],
    ids=["20 rows", "5 rows", "no rows", "ragged", "a scalar", "only scalars", "nothing"],
)
def test_batches_that_do_not_fit_are_refused(trained, method, batch, message):
    before = int(trained["engine"].state.step)
    with pytest.raises(ConfigError, match=message):
        getattr(trained["engine"], method)(batch)
    assert int(trained["engine"].state.step) == before


@pytest.mark.parametrize(
    ("train", "rows", "micro_rows"),
    [
        ({}, 32, 32),
        ({}, 8, 8),
        ({"micro_batch_size": 2}, 32, 16),
        ({"micro_batch_size": 2}, 48, 16),
        ({"micro_batch_size": 4}, 32, 32),
        ({"accumulation_steps": 4}, 32, 8),
        ({"accumulation_steps": 4}, 64, 16),
        ({"global_batch_size": 32, "micro_batch_size": 2, "accumulation_steps": 2}, 32, 16),
    ],
)
def test_micro_batches_are_cut_as_configured(train, rows, micro_rows):
    seen = []

    def record(model: Any, batch: Any) -> jzero.WeightedLoss:
        seen.append(batch.shape[0])
        return jzero.WeightedLoss(model(batch).sum(), jnp.float32(1))

    build = lambda rngs: nnx.Linear(1, 1, use_bias=False, kernel_init=nnx.initializers.ones, rngs=rngs)
    engine = jzero.initialize(build, record, optax.sgd(0.0), {"train": train})
    metrics = engine.step(np.ones((rows, 1), np.float32))
    assert set(seen) == {micro_rows}
    assert float(metrics["weight"]) == rows // micro_rows
    assert float(metrics["loss"]) == micro_rows


@pytest.mark.parametrize(
    ("train", "rows", "message"),
    [
        ({"micro_batch_size": 2}, 40, r"40: must be a multiple of train\.micro_batch_size \(2\) \* 8 shards = 16"),
        ({"accumulation_steps": 4}, 24, r"24: must be a multiple of train\.accumulation_steps \(4\) \* 8 shards = 32"),
        ({"micro_batch_size": 2, "accumulation_steps": 2}, 64, r"64: must be train\.micro_batch_size \(2\) \* .* = 32"),
    ],
)
def test_batches_that_contradict_the_config_are_refused(train, rows, message):
    engine = start(train=train)
    with pytest.raises(ConfigError, match=message):
        engine.step({"x": np.zeros((rows, 7), np.float32), "y": np.zeros((rows, 5), np.float32)})


def test_batches_may_be_any_tree_of_host_or_device_arrays(trained):
    engine = trained["engine"]
    expected = float(engine.evaluate(BATCH)["loss"])
    on_one_device = jax.tree.map(jnp.asarray, BATCH)
    placed = engine.place(BATCH)
    assert placed["x"].addressable_shards[0].data.shape == (3, 7)
    for batch in (on_one_device, placed):
        assert float(engine.evaluate(batch)["loss"]) == expected


LONGER = {"x": np.resize(X, (32, 7)), "y": np.ones((32, 5), np.float32)}


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ((lambda rngs: Net(rngs), loss, LONGER), {"train": {"global_batch_size": 32, "accumulation_steps": 4}}),
        pytest.param(
            (toys.scanned_decoder, toys.token_loss, toys.token_batch(16, 0)),
            {"precision": "bf16"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["batch statistics, dropout, k=4", "bf16"],
)
def test_one_compilation_serves_a_whole_run(model, config, caplog, tmp_path):
    """Evaluations between, and going on from a checkpoint, included."""
    build, loss, batch = model
    engine = jzero.initialize(build, loss, None, {"zero": {"stage": 3, "min_shard_elements": 0}} | config)

    def compiled() -> list[str]:
        told = [r.getMessage() for r in caplog.records]
        return [t.split("jit(")[1].split(")")[0] for t in told if t.startswith("Finished XLA compilation of jit(")]

    with jax.log_compiles():
        for _ in range(2):
            engine.step(batch)
            engine.evaluate(batch)
        engine.save(tmp_path)
        engine.step(batch)
        engine.restore(tmp_path)
        for _ in range(2):
            engine.step(batch)
            engine.evaluate(batch)
    names = compiled()
    assert (names.count("step"), names.count("evaluate")) == (1, 1), names


# Looking at the model.


def test_evaluation_changes_nothing_now_or_later(trained):
    """Nor does looking: the next steps are those of a run that never evaluated, dropout and all."""
    engine = trained["engine"]
    engine.restore(trained["directory"])
    losses = []
    for _ in range(3):
        before = true_arrays(engine)
        for rows in (BATCH, {name: -array[:8] for name, array in BATCH.items()}):
            engine.evaluate(rows)
        engine.apply(lambda model, x: model(x), X)
        engine.model()(X)
        engine.params()
        assert_same(true_arrays(engine), before)
        losses.append(float(engine.step(BATCH)["loss"]))
    assert losses == trained["losses"]


def test_apply_is_the_model_as_it_stands(trained):
    engine, traces = trained["engine"], []

    def outputs(model: Net, x: jax.Array, scale: float) -> dict[str, Any]:
        traces.append(x.shape)
        return {"y": model(x) * scale, "shape": jnp.asarray(model.embed.kernel.shape)}

    first, again = engine.apply(outputs, X, 2.0), engine.apply(outputs, X, 3.0)
    assert len(traces) == 1
    np.testing.assert_allclose(first["y"] * 1.5, again["y"], rtol=1e-6)
    assert again["shape"].tolist() == [7, 10]
    mean = float(np.mean(np.square(first["y"] / 2 - BATCH["y"])))
    assert mean == pytest.approx(float(engine.evaluate(BATCH)["loss"]), rel=1e-5)
    engine.step(BATCH)
    assert not np.allclose(engine.apply(outputs, X, 2.0)["y"], first["y"])
    assert len(traces) == 1


# Saving and restoring.


@pytest.mark.parametrize(("stage", "devices"), [(1, 2), (0, 1), (3, 6), (2, 3)])
def test_checkpoint_opens_at_any_stage_on_any_number_of_devices(trained, stage, devices):
    engine = start(stage, devices, train={"seed": 9})
    assert not np.array_equal(engine.params()["embed/kernel"], trained["params"]["embed/kernel"])
    assert engine.restore(trained["directory"]) == {"note": "third"}
    assert_same(true_arrays(engine), trained["held"])
    assert_same(engine.params(), trained["params"])
    for name, array in engine.arrays().items():
        if array.shape != engine.shapes()[name]:
            assert np.count_nonzero(array) <= np.prod(engine.shapes()[name]), name
            padded = np.array(array)
            padded[tuple(slice(0, n) for n in engine.shapes()[name])] = 0
            assert not padded.any(), f"{name} holds something in its padding"
    assert float(engine.evaluate(BATCH)["loss"]) == pytest.approx(trained["evaluated"], rel=1e-5)
    losses = [float(engine.step(BATCH)["loss"]) for _ in range(3)]
    np.testing.assert_allclose(losses, trained["losses"], rtol=1e-5)


def test_checkpoint_of_one_device_opens_on_eight(tmp_path, trained):
    one, eight = start(0, 1), trained["engine"]
    one.step(BATCH)
    one.save(tmp_path)
    eight.restore(tmp_path)
    assert_same(true_arrays(eight), true_arrays(one))
    losses = [[float(engine.step(BATCH)["loss"]) for _ in range(2)] for engine in (one, eight)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


class Pair(nnx.Module):
    """Two layers whose sizes pad on 3 and on 8 devices; `split`: the model itself splits them over the tensor axis."""

    def __init__(self, rngs: nnx.Rngs, split: bool):
        init = nnx.initializers.lecun_normal()
        place = lambda *spec: nnx.with_partitioning(init, spec) if split else init
        self.up = nnx.Linear(7, 38, kernel_init=place(None, "tensor"), rngs=rngs)
        self.down = nnx.Linear(38, 5, kernel_init=place("tensor", None), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.tanh(self.up(x)))


NODES, GLOBAL = {"group": "node"}, {"group": "node", "optimizer_group": "all"}
PLANS = [  # stage, devices, mesh, zero
    *((stage, devices, {}, {}) for stage in range(4) for devices in (1, 2, 3, 8)),
    (3, 8, {"replica": 2}, NODES),
    (2, 8, {"replica": 4}, GLOBAL),
    (3, 8, {"replica": 4}, GLOBAL),
    (3, 8, {"tensor": 2}, {}),
]


def restore_each_others(plans: list[tuple[int, int, dict[str, int], dict[str, str]]], directory: Path) -> None:
    engines, held = [], []
    for i, (stage, devices, mesh, zero) in enumerate(plans):
        engine = start(
            model=lambda rngs, split="tensor" in mesh: Pair(rngs, split),
            devices=devices,
            mesh=mesh,
            zero={"stage": stage, "min_shard_elements": 0} | zero,
            train={"seed": i},
        )
        engine.step(BATCH)
        engine.save(directory / str(i), {"plan": i})
        engines.append(engine)
        held.append(true_arrays(engine))
    assert len({arrays["opt_state/0/mu/up/kernel"].tobytes() for arrays in held}) == len(plans)
    for engine in engines:
        for i, arrays in enumerate(held):
            assert engine.restore(directory / str(i)) == {"plan": i}
            assert_same(true_arrays(engine), arrays)


@pytest.mark.slow
def test_every_plan_restores_every_other(tmp_path):
    restore_each_others([PLANS[i] for i in (0, 5, 10, 15, 16, 17, 19)], tmp_path)


@pytest.mark.slow
def test_every_stage_on_every_number_of_devices_restores_every_other(tmp_path):
    restore_each_others(PLANS, tmp_path)


NUMBERS = {
    f"p{size[0]}": np.arange(np.prod(size), dtype=np.float32).reshape(size) for size in ((7,), (9,), (30, 50), (13, 3))
}


class Counting(nnx.Module):
    """Parameters that hold 0, 1, 2, ..., of sizes that pad."""

    def __init__(self, rngs: nnx.Rngs):
        for name, value in NUMBERS.items():
            setattr(self, name, nnx.Param(jnp.asarray(value)))


@pytest.mark.parametrize("precision", ["fp32", {"preset": "bf16", "params": "bfloat16"}])
def test_counted_numbers_survive_padding_from_eight_devices_to_three(tmp_path, precision):
    eight = start(3, 8, Counting(nnx.Rngs(0)), precision=precision)
    assert any(leaf.padded for leaf in eight.plan.params.values())
    eight.save(tmp_path)
    three = start(3, 3, Counting, precision=precision)
    three.load({name: jnp.zeros_like(array) for name, array in three.arrays().items()})
    assert all(not value.any() for value in three.params().values())
    three.restore(tmp_path)
    for engine in (eight, three):
        assert_same(engine.params(), NUMBERS)
        assert {value.dtype for value in engine.params().values()} == {np.dtype(np.float32)}


OTHER_MODELS = {
    "deeper": (
        {"model": lambda rngs: Net(rngs, depth=5)},
        [
            "of another shape",
            "params/layers/linear/kernel: (3, 10, 10) in the checkpoint, (5, 10, 10) here",
            "mu/layers",
        ],
    ),
    "shallower": (
        {"model": lambda rngs: Net(rngs, depth=2)},
        ["of another shape", "params/layers/linear/kernel: (3, 10, 10) in the checkpoint, (2, 10, 10) here"],
    ),
    "wider": (
        {"model": lambda rngs: Net(rngs, width=11)},
        ["of another shape", "params/embed/kernel: (7, 10) in the checkpoint, (7, 11) here"],
    ),
    "renamed": (
        {"model": lambda rngs: Net(rngs, head="lm_head")},
        ["missing in the checkpoint", "params/lm_head/kernel", "only in the checkpoint", "params/head/kernel"],
    ),
    "optimizer": (
        {"optimizer": optax.sgd(0.1)},
        ["only in the checkpoint", "opt_state/0/mu/embed/kernel"],
    ),
    "precision": (
        {"precision": "bf16"},
        [
            "missing in the checkpoint",
            "master/embed/kernel",
            "params/embed/kernel: float32 in the checkpoint, bfloat16 here",
        ],
    ),
}


@pytest.mark.parametrize("other", OTHER_MODELS)
def test_checkpoint_of_another_model_is_refused_by_name(trained, other):
    arguments, told = OTHER_MODELS[other]
    engine = start(**arguments)
    before = true_arrays(engine)
    with pytest.raises(CheckpointError) as refused:
        engine.restore(trained["directory"])
    for words in told:
        assert words in str(refused.value)
    assert_same(true_arrays(engine), before)


def test_restoring_names_the_step_or_what_is_missing(tmp_path, trained):
    engine = trained["engine"]
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        engine.restore(tmp_path)
    with pytest.raises(CheckpointError, match=r"step 7 of .* is not there"):
        engine.restore(trained["directory"], step=7)
    engine.restore(trained["directory"], step=3)
    assert int(engine.state.step) == 3


def test_arrays_that_are_no_state_are_refused_by_name(trained):
    engine = trained["engine"]
    arrays = engine.arrays()
    before = true_arrays(engine)
    some = {name: array for name, array in arrays.items() if name != "params/gain"}
    with pytest.raises(PlanError, match="params/gain"):
        engine.load(some)
    with pytest.raises(PlanError, match="params/extra"):
        engine.load(arrays | {"params/extra": arrays["params/gain"]})
    with pytest.raises(PlanError, match=r"params/embed/bias: float32\(10,\), planned float32\(16,\)"):
        engine.load(arrays | {"params/embed/bias": arrays["params/embed/bias"][:10]})
    whole = jax.device_put(np.zeros((7, 16), np.float32), jax.devices()[0])
    with pytest.raises(PlanError, match="params/embed/kernel"):
        engine.load(arrays | {"params/embed/kernel": whole})
    assert_same(true_arrays(engine), before)


# How the code hangs together.

PACKAGE = Path(jzero.__file__).parent
ORDER = [
    *("errors", "paths", "files", "config.section", "config.batch", "config.files", "config.model", "config.data"),
    *("config.zero", "config.precision", "config.optimizer", "config.run", "config.hardware", "config"),
    "hardware",
    *("runtime", "mesh", "rounding", "loss_scale", "leaf", "plan", "gradstats", "jaxprs"),
    *("mixing.flow", "mixing.elements", "mixing.shapes", "mixing.products", "mixing.programs", "mixing"),
    *("elementwise", "schedules"),
    *("adam8bit", "optim", "loss", "scopes", "usepoint", "gathered", "reads", "residuals"),
    *("hlo.lines", "hlo.trips", "hlo.parse", "hlo.groups", "hlo.frames", "hlo.collectives", "hlo.loops"),
    *("hlo.tpu_executable", "hlo.memory"),
    "hlo",
    *("model_api", "model_nnx", "model_linen", "model_function", "adapt"),
    *("apart", "grads", "grads_xla", "grads_explicit", "collectives", "state", "step"),
    *("manifest", "checkpoint", "report", "blueprint", "traffic"),
    *("footprint.rules", "footprint.operations", "footprint.rewrites", "footprint.standing", "footprint.schedule"),
    *("footprint.peak", "footprint", "warm_start", "out_of_memory", "engine"),
    *("auditing.finding", "auditing.placement", "auditing.explain", "auditing.report", "auditing"),
    *("data.tokenizer", "data.documents", "data.paths", "data.rows", "data.ids", "data.sources"),
    *("data.cache", "data.encode", "data.corpus", "data.windows", "data.pipeline", "data.own", "data.loader", "data"),
    *("rundir", "metrics.rows", "metrics", "metrics.row_files", "metrics.jsonl", "metrics.csv_file"),
    *("metrics.tensorboard", "metrics.weights_and_biases", "metrics.flops", "metrics.throughput", "metrics.memory"),
    *("metrics.writer", "metrics.profiler", "metrics.plot", "metrics.__main__", "display", "signals", "sinks"),
    *("models.rotary", "models.layers", "models.decoder", "models.build", "models.generate", "models"),
    *("sample", "trainer", "train", "bench", "deepspeed_estimates"),
    *("planning.work", "planning.links", "planning.times", "planning.prediction"),
    *("planning.candidates", "planning.recommendation", "planning.ranking", "planning.tables", "planning.record"),
    *("planning.compiled", "planning.plot", "planning.command", "planning", "planner"),
]
HOMES = {
    "orbax": {"checkpoint"},
    "grain": {"data.pipeline", "data.own"},
    "tensorboardX": {"metrics.tensorboard"},
    "wandb": {"metrics.weights_and_biases"},
    "matplotlib": {"metrics.plot", "planning.plot"},
    "omegaconf": {"config.files"},
    "tokenizers": {"data.tokenizer"},
    "datasets": {"data.rows"},
    "zstandard": {"data.paths"},
    "google": {"hlo.tpu_executable"},
}


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text())
    return found


def imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Everything imported, dotted, names from a module included, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def test_every_module_has_its_place_in_the_order():
    assert sorted(modules()) == sorted(["", *ORDER])


@pytest.mark.parametrize("name", ORDER)
def test_module_imports_only_what_comes_before_it(name):
    for imported, line in imports(modules()[name]):
        if imported.split(".")[0] == "jzero":
            parts = imported.split(".")[1:]
            target = max((m for m in ORDER if parts[: m.count(".") + 1] == m.split(".")), key=len)
            assert ORDER.index(target) < ORDER.index(name), f"line {line}: {name} comes before {target}"


def test_heavy_dependencies_have_one_home():
    users: dict[str, set[str]] = {package: set() for package in HOMES}
    for name, tree in modules().items():
        for imported, _ in imports(tree):
            users.get(imported.split(".")[0], set()).add(name)
    assert users == HOMES


def test_nothing_private_of_others_is_used():
    for name, tree in modules().items():
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        own |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
        for imported, line in imports(tree):
            private = [p for p in imported.split(".") if p.startswith("_") and not p.endswith("__")]
            assert not private, f"{name}, line {line}: {imported}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
                assert node.attr in own or ast.unparse(node) == "os._exit", (
                    f"{name}, line {node.lineno}: {ast.unparse(node)}"
                )


def test_modules_and_functions_stay_short():
    for name, tree in modules().items():
        path = PACKAGE.joinpath(*name.split("."))
        text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        assert text.count("\n") <= 400, f"{name} has {text.count(chr(10))} lines"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 60, f"{name}.{node.name} has {length} lines"
