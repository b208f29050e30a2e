"""The examples and the configs: they run, they reach what they promise, and their comments' numbers are right."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jzero
from jzero.adapt import adapt
from jzero.config import load_config
from jzero.mesh import axis_sizes
from jzero.models import build_model
from jzero.optim import make_optimizer
from jzero.train import main

REPOSITORY = Path(__file__).parent.parent
CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))


def comments(config: Path) -> str:
    """The comment at the head of a config, without its marks."""
    lines = config.read_text().split("\nmodel:")[0].splitlines()
    assert all(line.startswith("#") for line in lines)
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)


# examples


def run_example(name: str, directory: Path, leaves: tuple[str, ...] = ()) -> list[str]:
    """The lines it prints. `leaves`: the files it leaves behind."""
    source = (REPOSITORY / "examples" / name).read_text()
    assert f"python examples/{name}" in source.split('"""')[1]
    assert len(source.splitlines()) < 85
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}  # this jzero, installed or not
    environment.pop("XLA_FLAGS", None)  # each says how many devices it wants
    command = [sys.executable, str(REPOSITORY / "examples" / name)]
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in directory.iterdir()) == sorted(leaves)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("name", "split"),
    [pytest.param("linen_resnet.py", "over 6", marks=pytest.mark.slow), ("functions.py", "over 8")],
)
def test_examples_learn_to_what_they_promise(name, split, tmp_path):
    lines = run_example(name, tmp_path)
    promised = re.search(
        r"accuracy\s+on 384 digits held back is about ([\d.]+)", (REPOSITORY / "examples" / name).read_text()
    )
    (*_, last) = [float(found[1]) for line in lines if (found := re.search(r"accuracy ([\d.]+)", line))]
    assert promised
    assert last == pytest.approx(float(promised[1]), abs=0.02)
    assert any(line.endswith(split) for line in lines)


@pytest.mark.slow
def test_text_by_a_hugging_face_tokenizer_learns_to_what_it_promises(tmp_path):
    printed = "\n".join(run_example("hf_text.py", tmp_path))
    told = (REPOSITORY / "examples" / "hf_text.py").read_text()
    for name, pattern, tolerance in (
        ("validation loss", r"validation loss is about ([\d.]+)", 0.15),
        ("unigram baseline", r"unigram baseline of ([\d.]+)", 0.15),
    ):
        reached = re.search(rf"{name} +│ ([\d.]+)", printed)
        promised = re.search(pattern, told)
        assert float(reached[1]) == pytest.approx(float(promised[1]), abs=tolerance)
    assert "library.jsonl: " in printed


@pytest.mark.slow
def test_adapters_learn_what_the_frozen_base_does_not_know(tmp_path):
    lines = run_example("lora.py", tmp_path)
    told = (REPOSITORY / "examples" / "lora.py").read_text()
    found = [float(match[1]) for line in lines if (match := re.search(r"accuracy ([\d.]+)", line))]
    promised = re.search(r"is about ([\d.]+)\s+after that, from ([\d.]+) before", told)
    assert promised
    assert found[-2:] == pytest.approx([float(promised[2]), float(promised[1])], abs=0.05)


@pytest.mark.slow
def test_finetuning_starts_where_pretraining_ended(tmp_path):
    printed = "\n".join(run_example("two_stage.py", tmp_path))
    told = " ".join((REPOSITORY / "examples" / "two_stage.py").read_text().split())
    first = re.search(r"first batch is about (\d+\.\d+) and (\d+\.\d+) nats", told)
    last = re.search(r"in the end about (\d+\.\d+) and (\d+\.\d+)", told)
    reached = re.findall(r"first loss (\d+\.\d+), validation loss (\d+\.\d+) in the end", printed)
    for (start, end), *promised in zip(reached, first.groups(), last.groups(), strict=True):
        # The text is jzero's own code, which changes.
        assert [float(start), float(end)] == pytest.approx(list(map(float, promised)), abs=0.6)


def test_digits_learns_and_restores(tmp_path):
    lines = run_example("digits.py", tmp_path)
    results = [tuple(map(float, re.search(r"loss ([\d.]+)  accuracy ([\d.]+)$", line).groups())) for line in lines]
    *epochs, restored = results
    assert len(epochs) == 5
    assert epochs[-1][1] > 0.95
    assert epochs[-1][0] < epochs[0][0]
    assert restored == pytest.approx(epochs[-1], abs=0.0021)


def test_memory_per_stage_draws_the_papers_numbers(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    lines = run_example("memory_per_stage.py", tmp_path, leaves=("memory_per_stage.png",))
    assert (tmp_path / "memory_per_stage.png").read_bytes().startswith(b"\x89PNG")
    assert sum(line.endswith("as planned") for line in lines) == 2
    sums = [float(line.split()[-1]) for line in lines if re.match(r" +[0-3] ", line)]
    assert sums == [119.9, 31.4, 16.6, 1.9]  # of the ZeRO paper: 120, 31.4, 16.6, 1.9


def test_a_loop_that_reads_no_results_does_not_pile_up_programs():
    """Fake devices wait for each other for ever once 32 programs are under way: jax 0.10.2 aborts the process."""

    def loss(model: nnx.Linear, batch: dict[str, jax.Array]) -> jax.Array:
        return optax.l2_loss(model(batch["x"])).mean()

    engine = jzero.initialize(lambda rngs: nnx.Linear(512, 512, rngs=rngs), loss, optax.sgd(0.1))
    batch = {"x": np.ones((64, 512), np.float32)}
    before = engine.step(batch)
    for _ in range(3):
        metrics = engine.step(batch)
        assert all(metric.is_ready() for metric in before.values()), "one step at a time is under way"
        assert all(metric.is_ready() for metric in engine.evaluate(batch).values())
        assert engine.apply(lambda model, x: model(x), batch["x"]).is_ready()
        before = metrics


# configs


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_printed_config_loads_back_equal(path, tmp_path, capsys):
    assert main(["--config", str(path), "--print-config"]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert load_config(tmp_path / "printed.yaml") == load_config(path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_says_how_to_run_it(path):
    told = comments(path)
    (command,) = re.findall(r"^  (python -m jzero\.train .*)$", told, re.M)
    _, _, _, option, file, *overrides = shlex.split(command)
    assert (option, REPOSITORY / file) == ("--config", path)
    assert load_config(path, overrides).train.run_dir == f"runs/{path.stem}"
    assert "Hardware: " in told


def test_llama_1b_takes_the_bytes_that_its_comment_says():
    path = REPOSITORY / "configs" / "llama_1b.yaml"
    config, told = load_config(path), comments(path)

    def plan(num_devices: int, vocab_size: int) -> jzero.Plan:
        params = adapt(build_model(config.model, vocab_size)).params
        axes = axis_sizes(config.mesh, num_devices)
        optimizer = make_optimizer(config.optimizer, config.train.num_steps, params)
        return jzero.make_plan(params, axes, config.zero, config.precision, optimizer)

    for name, size in plan(8, 257).bytes_per_device().items():
        assert re.search(rf"^ +{name} +{size:,}\b", told, re.M), f"{name} {size:,}"
    for number in (
        sum(plan(8, 257).bytes_per_device().values()),
        sum(plan(1, 257).bytes_per_device().values()),
        plan(8, 257).num_parameters,
        plan(8, 128_256).num_parameters,
    ):
        assert f"{number:,}" in told, f"{number:,}"
