"""Every optimizer of optax, of optax.contrib and of jzero: sharded, it trains as on one device, its state split."""

import inspect
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import toys
import yaml
from optax import contrib

import jzero
from jzero.adam8bit import scale_by_adam8bit
from jzero.adapt import adapt
from jzero.config import OptimizerConfig, load_config, make_config
from jzero.models import build_model
from jzero.optim import make_optimizer, settings_by_path
from jzero.trainer import language_model_loss

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
STEPS, ROWS, DEVICES = 10, 24, 8


def by_name(name: str) -> optax.GradientTransformation:
    """The optimizer of that name with optax's own defaults, a learning rate and a seed where it wants one."""
    make = getattr(contrib if name.startswith("contrib.") else optax, name.removeprefix("contrib."))
    parameters = inspect.signature(make).parameters
    required = {name for name, p in parameters.items() if p.default is inspect.Parameter.empty}
    arguments: dict[str, Any] = {"learning_rate": 0.01} if "learning_rate" in required else {}
    return make(**arguments, **({"key": 0} if "key" in parameters else {}))


def by_config(**fields: Any) -> optax.GradientTransformation:
    """What a config's `optimizer` section makes for the perceptron."""
    return make_optimizer(OptimizerConfig(learning_rate=0.01, **fields), STEPS, adapt(toys.mlp).params)


OPTAX = (
    "adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw noisy_sgd "
    "novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum sm3 yogi "
    "contrib.acprop contrib.ademamix contrib.adopt contrib.cocob contrib.dadapt_adamw contrib.dog contrib.dowg "
    "contrib.madgrad contrib.muon contrib.prodigy contrib.schedule_free_adamw contrib.schedule_free_sgd "
    "contrib.simplified_ademamix"
)
MAKERS: dict[str, Callable[[], Any]] = {
    **{name: partial(by_name, name) for name in OPTAX.split()},
    "adafactor": lambda: optax.adafactor(0.05, min_dim_size_to_factor=4),
    "adafactor, momentum": lambda: optax.adafactor(0.05, min_dim_size_to_factor=4, momentum=0.9),
    "adam, bfloat16 momentum": lambda: optax.adam(0.01, mu_dtype="bfloat16"),
    "sgd, momentum": lambda: optax.sgd(0.01, momentum=0.9),
    "contrib.galore": lambda: contrib.galore(0.01, rank=3, update_proj_gap=4),
    "contrib.mechanize": lambda: contrib.mechanize(optax.adam(0.01)),
    "contrib.sam": lambda: contrib.sam(optax.adam(0.01), optax.sgd(0.05)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.01), 3),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.01), 2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(0.01, 0, 10)
    ),
    "masked": lambda: optax.masked(optax.adam(0.01), {path: "up" in path for path in PATHS}),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(0.01), "b": optax.sgd(0.01)}, {path: "a" if "up" in path else "b" for path in PATHS}
    ),
    "adamw8bit": lambda: optax.chain(scale_by_adam8bit(0.9, 0.999, 1e-8, min_elements=1), optax.scale(-0.01)),
    "name: lamb": lambda: by_config(name="lamb", weight_decay=0.1),
    "name: muon": lambda: by_config(name="muon", weight_decay=0.1),
    "name: schedule_free": lambda: by_config(name="schedule_free", warmup_steps=2),
    "chain": lambda: optax.chain(optax.clip_by_block_rms(1.0), optax.add_noise(0.01, 0.5, 0), optax.adam(0.01)),
}
PATHS = ("down/bias", "down/kernel", "up/bias", "up/kernel")
# By default at stage 3; of the others the update is the same at stage 1, where parameters are whole.
BY_DEFAULT = ("adafactor", "lamb", "name: muon", "adamw8bit", "MultiSteps")


def train(name: str, stage: int, devices: int) -> tuple[jzero.Engine, np.ndarray]:
    config = {
        "zero": {"stage": stage, "min_shard_elements": 0},
        "optimizer": {"clip_norm": None},
        "train": {"global_batch_size": ROWS},
    }
    engine = jzero.initialize(toys.mlp, toys.square_loss, MAKERS[name](), config, jax.devices()[:devices])
    return engine, np.array([engine.step(toys.square_batch(ROWS, i))["loss"] for i in range(STEPS)], float)


@cache
def on_one_device(name: str) -> tuple[jzero.Engine, np.ndarray]:
    return train(name, 0, 1)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        *(pytest.param(name, 3, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in MAKERS),
        *(pytest.param(n, 1, marks=pytest.mark.slow if n in BY_DEFAULT else pytest.mark.thorough) for n in MAKERS),
    ],
)
def test_sharded_it_trains_as_on_one_device(name, stage):
    reference, losses = on_one_device(name)
    engine, sharded_losses = train(name, stage, DEVICES)
    assert len(set(losses)) > 1
    assert any(leaf.padded for leaf in engine.plan.weights.values())
    np.testing.assert_allclose(sharded_losses, losses, rtol=1e-5)
    for path, expected in reference.params().items():
        # acprop divides by the second moment of one step before: 5e-5 measured, of others less than 1e-5.
        error = np.abs(engine.params()[path] - expected).max() / np.abs(expected).max()
        assert error <= (1e-4 if name == "contrib.acprop" else 2e-5), f"{path}: differs by {error:.1e}"
    for array in jax.tree.leaves(engine.state.opt_state):
        assert array.addressable_shards[0].data.size < array.size or array.size <= 1, array.shape
    held = [toys.bytes_a_device(e.state.opt_state) for e in (reference, engine)]
    assert f"| {name} | {held[0]:,} | {held[1]:,} |" in README


def test_the_readme_lists_no_other():
    listed = [line.split("|")[1].strip() for line in README.splitlines() if line.count("|") == 4 and line[-3].isdigit()]
    assert [name for name in listed if name in MAKERS] == list(MAKERS)


# optimizer.name -> the fields that the README's table of the quickstart is made with, beside the config's own.
LISTED = {
    "adamw": {},
    "adamw8bit": {},
    "muon": {},
    "adafactor": {"learning_rate": 0.1},
    "lion": {"learning_rate": 6e-4, "weight_decay": 0.5},
    "lamb": {"learning_rate": 0.01},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LISTED)
def test_the_readme_has_the_bytes_of_the_quickstart_at_stage_1(name):
    overrides = [f"optimizer.{field}={value}" for field, value in LISTED[name].items()]
    config = load_config(ROOT / "configs/quickstart.yaml", ["zero.stage=1", f"optimizer.name={name}", *overrides])
    engine = jzero.initialize(build_model(config.model, 257), language_model_loss, None, config)
    held = toys.bytes_a_device(engine.state.opt_state)
    both = toys.bytes_a_device(engine.state.params) + engine.plan.bytes_per_device()["gradients"] + held
    row = f"| `{name}` | {config.optimizer.learning_rate:g} | {held:,} | {both:,} |"
    print(row)
    assert row in README


def test_the_readmes_groups_are_what_they_seem():
    (example,) = re.findall(r"^```yaml\n(optimizer:.*?)^```$", README, re.M | re.S)
    config = make_config(yaml.safe_load(example))
    settings = settings_by_path(config.optimizer, adapt(build_model(config.model, 257)).params)
    assert settings["embed_tokens/embedding"] == settings["lm_head/kernel"] == (1.0, 0.0)
    assert settings["layers/mlp/up_proj/kernel"] == (0.5, 0.1)
    assert settings["layers/input_layernorm/scale"] == (0.5, 0.0)
    assert settings["norm/scale"] == (1.0, 0.0)


REFUSED: dict[str, Callable[[], Any]] = {
    "lbfgs": optax.lbfgs,
    "lookahead": lambda: optax.lookahead(optax.sgd(0.1), 5, 0.5),
    "polyak_sgd": optax.polyak_sgd,
    "contrib.dpsgd": lambda: contrib.dpsgd(0.01, 1.0, 1.0, 0),
    "contrib.momo": contrib.momo,
    "contrib.momo_adam": contrib.momo_adam,
    "contrib.reduce_on_plateau": contrib.reduce_on_plateau,
    "contrib.sophia": lambda: contrib.sophia(0.01),
}


@pytest.mark.filterwarnings("ignore:.seed. is deprecated")
@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_more_than_gradients_is_refused_at_once(name):
    with pytest.raises(jzero.UserError, match=r"optimizer.update\(gradients, state, params\) raised"):
        jzero.initialize(toys.mlp, toys.square_loss, REFUSED[name](), {})
    assert f"`{name}`" in README
