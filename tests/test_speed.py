"""What jzero costs beside a hand-written step. The figures are ratios within one run: this machine's speed drifts."""

import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jzero.bench import main, make_arms
from jzero.config import load_config

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
ARMS = r"│ (.+?) +│ ([\d.]+) ms +│ ([\d.]+) +│"
# A step of a third of a second or so, so that computing it outweighs calling it.
SMALLER = ["data.sequence_length=64", "train.global_batch_size=16", "model.num_hidden_layers=2"]
TINY = ["model.hidden_size=32", "model.intermediate_size=64"]


def test_one_device_at_stage_0_costs_no_more_than_a_plain_jitted_step():
    ratios = []
    for _ in range(3):  # the median of three: a burst of other work on the machine spoils one
        table = _bench("--rounds", "60", *SMALLER)
        assert list(table) == ["plain jax.jit, one device", "jzero, one device, stage 0", "jzero, 8 devices, stage 3"]
        ratios.append(table["jzero, one device, stage 0"][1])
        print(table)
    assert statistics.median(ratios) <= 1.03, f"jzero / plain: {ratios}"


def test_the_arms_of_the_benchmark_train_alike():
    """They end on the same loss, so none of them does less work."""
    config = load_config(
        ROOT / "configs/quickstart.yaml", ["model.hidden_size=32", "optimizer.warmup_steps=1", *SMALLER]
    )
    with jax.numpy_dtype_promotion("standard"):  # as optax relies on
        losses = {name: [float(step()) for _ in range(4)] for name, step in make_arms(config).items()}
    plain, *others = losses.values()
    assert plain[-1] < plain[0] - 0.01
    for other in others:
        np.testing.assert_allclose(other, plain, rtol=1e-5)


def test_the_benchmark_times_three_arms_in_turn_and_those_it_is_held_against():
    other = "zero.stage=1 train.accumulation_steps=2"
    table = _bench(*("--rounds", "2", "--against", other), *TINY, *SMALLER)
    assert table["plain jax.jit, one device"][1] == 1.0
    assert all(milliseconds > 0 for milliseconds, _ in table.values())
    assert list(table)[2:] == ["jzero, 8 devices, stage 3", other]


def test_an_arm_is_the_configured_run_with_its_own_settings_on_top(monkeypatch, capsys):
    configs = {}
    monkeypatch.setattr("jzero.bench.make_arms", lambda config, others: configs.update(others, configured=config) or {})
    monkeypatch.setattr("jzero.bench.measure", lambda arms, rounds: {"none": [1.0]})
    quickstart = ["--config", str(ROOT / "configs/quickstart.yaml"), "zero.stage=2"]
    assert main([*quickstart, "--against", "zero.collectives=explicit", "--against", "zero.stage=1"]) == 0
    seen = {name: (config.zero.stage, config.zero.collectives) for name, config in configs.items()}
    explicit = {"zero.collectives=explicit": (2, "explicit")}
    assert seen == {"configured": (2, "xla"), **explicit, "zero.stage=1": (1, "xla")}
    assert main([*quickstart, "--against", "zero.stag=1"]) == 2
    assert "zero.stag" in capsys.readouterr().err


def _bench(*arguments: str) -> dict[str, tuple[float, float]]:
    """(median milliseconds, ratio to the first arm) by arm."""
    # Optimised machine code, unlike the rest of the suite.
    flags = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-m", "jzero.bench", "--config", str(ROOT / "configs/quickstart.yaml"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=flags, cwd=ROOT, check=True)
    return {name: (float(ms), float(ratio)) for name, ms, ratio in re.findall(ARMS, done.stdout)}
