"""The README is true: its commands run, its snippets print what stands below them, its numbers are jzero's own."""

import ast
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
from jzero.blueprint import Blueprint, prepare
from jzero.config import load_config
from jzero.data import make_data
from jzero.engine import Engine
from jzero.leaf import LeafPlan
from jzero.models import build_model
from jzero.trainer import language_model_loss

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.M | re.S)
PYTHON = [code for kind, code in BLOCKS if kind == "python"]
# A text block right below a Python block is what that prints.
PRINTED = {block: follower if kind == "text" else "" for (_, block), (kind, follower) in itertools.pairwise(BLOCKS)}
COMMANDS = [line for kind, block in BLOCKS if kind == "sh" for line in block.splitlines()]
SET_UP = [command for command in COMMANDS if command.startswith("python3 -m venv")]

# So small that only the time to start and compile is left.
TINY = shlex.split("""
model.hidden_size=16 model.intermediate_size=32 model.num_hidden_layers=2 model.num_attention_heads=2
zero.min_shard_elements=64 data.source=synthetic data.synthetic_tokens=20000 data.sequence_length=16
optimizer.warmup_steps=0 train.num_steps=4 train.global_batch_size=8 train.eval_every=2 train.eval_batches=2
train.sample_tokens=0 checkpoint.save_every=2
""")


def run(command: Sequence[str] | str, directory: Path) -> str:
    """What a command prints; it must succeed. A string is the shell's to read."""
    shell = isinstance(command, str)
    done = subprocess.run(
        command,
        cwd=directory,
        shell=shell,
        env=os.environ | {"PYTHONPATH": "" if shell else str(REPOSITORY)},  # this jzero, or the one the shell installs
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def assert_same_but_for_last_digits(printed: str, told: str) -> None:
    decimal = re.compile(r"\d+\.(\d+)")
    assert decimal.sub("#", printed) == decimal.sub("#", told), f"the README says\n{told}\nbut it prints\n{printed}"
    for now, before in zip(decimal.finditer(printed), decimal.finditer(told), strict=True):
        assert abs(float(now[0]) - float(before[0])) <= 2.01 * 10 ** -len(now[1]), f"{before[0]} is {now[0]}: {printed}"


# what stands at the top


def test_one_command_trains_and_one_tests():
    trains, tests = SET_UP
    assert trains.endswith(".venv/bin/python -m jzero.train --config configs/quickstart.yaml")
    assert re.search(r"pip install -e '\.\[dev\]' && \.venv/bin/pytest\b", tests)
    first_screen = README.splitlines()[:50]
    assert trains in first_screen
    assert tests in README.partition("\n## ")[0]


def test_ci_runs_the_tests_as_the_readme_does():
    invocation = SET_UP[1].rpartition(".venv/bin/")[2]
    assert f".ci/venv/bin/{invocation}" in (REPOSITORY / ".ci" / "run").read_text().splitlines()


def test_the_output_shown_is_the_quickstarts(capsys):
    """The start-up report, which no machine changes; the rest is of one run on one machine."""
    from rich.console import Console

    from jzero.report import plan_report

    blueprint = quickstart_blueprint(3, "fp32")
    Console(width=80).print(plan_report(blueprint.plan, blueprint.collectives()), soft_wrap=True)
    report = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = next(block for kind, block in BLOCKS if kind == "text").splitlines()
    assert shown[: shown.index("...")] == report[: shown.index("...")]


def test_the_plan_shown_is_the_planners(capsys, monkeypatch):
    from jzero.planner import main

    (command,) = (command for command in COMMANDS if "jzero.planner" in command)
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("COLUMNS", "100")
    with jax.numpy_dtype_promotion("standard"):  # as for the gradients below
        assert main(shlex.split(command)[3:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = next(follower for (_, block), (_, follower) in itertools.pairwise(BLOCKS) if block == f"{command}\n")
    before, after = shown.split("...\n")
    assert before.splitlines() == printed[: len(before.splitlines())]
    assert after.splitlines() == printed[-len(after.splitlines()) :]


@pytest.mark.slow
def test_set_up_commands_work_in_a_fresh_clone(tmp_path):
    """Clone, environment, packages, training and tests, all as a newcomer would; less to train on, fewer tests.

    What is cloned is the last commit.
    """
    if not (REPOSITORY / ".git").exists():
        pytest.skip("not a git repository, so there is nothing to clone")
    run(["git", "clone", "--quiet", str(REPOSITORY), str(tmp_path / "clone")], tmp_path)
    trains, tests = SET_UP
    shorter = f"train.num_steps=30 train.eval_batches=2 data.cache_dir={shlex.quote(str(tmp_path / 'cache'))}"
    printed = run(f"{trains} {shorter}", tmp_path / "clone")
    assert "step 30/30  eval_loss" in printed
    assert float(re.search(r"step 1/30  loss ([\d.]+)", printed)[1]) == pytest.approx(5.58, abs=0.05)
    assert "standard library of Python" in printed
    printed = run(f"{tests} tests/test_config.py tests/test_loss.py", tmp_path / "clone")
    assert re.search(r"^=+ \d+ passed in [\d.]+s", printed.splitlines()[-1])


# the table


def quickstart_blueprint(stage: int, precision: str) -> Blueprint:
    config = load_config(REPOSITORY / "configs" / "quickstart.yaml", [f"zero.stage={stage}", f"precision={precision}"])
    return prepare(build_model(config.model, vocab_size=257), language_model_loss, config=config)


ARMS = [(precision, stage) for precision in ("bf16", "fp32") for stage in range(4)]
# Bytes a parameter: at rest, of its gradient, of master weights and moments.
PAPER = {"bf16": (2, 2, 12), "fp32": (4, 4, 8)}


def table_row(precision: str, stage: int, placed: dict[str, int], num_parameters: int) -> str:
    trees = placed["parameters"], placed["gradients"], placed["optimizer"]
    split = (stage >= 3, stage >= 2, stage >= 1)
    terms = [f"{size}Ψ/N" if cut else f"{size}Ψ" for size, cut in zip(PAPER[precision], split, strict=True)]
    paper = sum(size * num_parameters // (8 if cut else 1) for size, cut in zip(PAPER[precision], split, strict=True))
    numbers = " | ".join(f"{number:,}" for number in (*trees, sum(trees)))
    return f"| {precision} | {stage} | {numbers} | {' + '.join(terms)} = {paper:,} |"


def test_table_of_stages_is_what_is_planned():
    """If placement or the quickstart's model has changed for a reason, put in the rows that this prints."""
    plans = [quickstart_blueprint(stage, precision).plan for precision, stage in ARMS]
    rows = [
        table_row(precision, stage, plan.bytes_per_device(), plan.num_parameters)
        for (precision, stage), plan in zip(ARMS, plans, strict=True)
    ]
    assert [line for line in README.splitlines() if re.match(r"\| (bf16|fp32) ", line)] == rows, "\n" + "\n".join(rows)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "stage"), ARMS)
def test_table_of_stages_is_what_lies_on_the_devices(precision, stage):
    blueprint = quickstart_blueprint(stage, precision)
    engine = Engine(blueprint)
    grad_fn = blueprint.grad_fn("xla", 1)
    batch = engine.place({"tokens": np.zeros((8, 17), np.int32)})
    state = engine.state
    with jax.numpy_dtype_promotion("standard"):  # jax's own attention refuses bfloat16 under strict promotion
        _, gradients, _, _ = jax.jit(grad_fn)(state.params, state.model_state, batch, jnp.int32(0), None)
    trees = {"parameters": state.params, "gradients": gradients, "optimizer": (state.master, state.opt_state)}
    placed = {name: bytes_on_a_device(tree) for name, tree in trees.items()}
    assert table_row(precision, stage, placed, engine.num_parameters) in README


def bytes_on_a_device(tree: object) -> int:
    on = [[shard.data.nbytes for shard in array.addressable_shards] for array in jax.tree.leaves(tree)]
    totals = set(map(sum, zip(*on, strict=True)))
    assert len(totals) == 1, "all 8 devices hold the same"
    return totals.pop()


def test_the_two_reasons_for_exceeding_the_paper_are_all():
    for precision, stage in ARMS:
        plan = quickstart_blueprint(stage, precision).plan
        split = (stage >= 3, stage >= 2, stage >= 1)
        excess = sum(plan.bytes_per_device().values()) - sum(
            size * plan.num_parameters // (8 if cut else 1) for size, cut in zip(PAPER[precision], split, strict=True)
        )
        whole = sum(size for size, cut in zip(PAPER[precision], split, strict=True) if cut)
        assert excess == 1152 * whole * 7 // 8 + 2 * 4, (precision, stage)
    whole_leaves: list[LeafPlan] = list(plan.whole_leaves().values())
    assert sum(int(np.prod(leaf.shape)) for leaf in whole_leaves) == 1152
    assert all("norm" in leaf.path and "min_shard_elements 4096" in leaf.reason for leaf in whole_leaves)


# snippets and commands


def test_snippets_print_what_the_readme_says(tmp_path):
    """All of them in one process, in order, as a reader would paste them."""
    mark = "\x1e"
    printed = run([sys.executable, "-c", f"\nprint({mark!r}, end='')\n".join(PYTHON)], tmp_path).split(mark)
    for code, output in zip(PYTHON, printed, strict=True):
        assert_same_but_for_last_digits(output, PRINTED[code])


def test_your_own_model_takes_15_lines():
    assert len([line for line in PYTHON[0].splitlines() if line.strip()]) <= 15


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The run directory after all other commands of the README, each on something tiny."""
    directory = tmp_path_factory.mktemp("readme")
    rest = [shlex.split(command) for command in COMMANDS if command not in SET_UP]
    assert any("zero.stage=2" in command for command in rest)
    for program, *arguments in rest:
        assert program == "python"
        if arguments[0].startswith("examples/"):
            assert (REPOSITORY / arguments[0]).exists()  # test_examples runs it
            continue
        if arguments[:3] == ["-m", "jzero.metrics", "plot"]:
            run([sys.executable, *arguments[:3], str(directory / "run"), "--out", str(directory / "a.png")], REPOSITORY)
            continue
        cache, run_dir = f"data.cache_dir={directory / 'cache'}", f"train.run_dir={directory / 'run'}"
        run([sys.executable, *arguments, *TINY, cache, run_dir], REPOSITORY)
    return directory / "run"


def test_run_directory_is_laid_out_as_shown(trained):
    layout = next(block for kind, block in BLOCKS if kind == "text" and block.startswith("runs/"))
    paths = [line.split()[0] for line in layout.splitlines()[1:]]
    assert len(paths) >= 5
    for path in paths:
        assert (trained / path.replace("/300/", "/4/")).exists(), path


def test_an_engine_restores_what_the_trainer_saved(trained):
    config = load_config(trained / "config.yaml", ["zero.stage=1"])
    model = build_model(config.model, vocab_size=257)
    engine = jzero.initialize(model, language_model_loss, config=config, devices=jax.devices()[:2])
    engine.restore(trained / "checkpoints")
    assert int(engine.state.step) == 4
    data = make_data(config.data, seed=config.train.seed, batch_size=config.train.global_batch_size)
    with jax.numpy_dtype_promotion("standard"):  # as for the gradients above
        losses = [engine.evaluate(batch)["loss"] for batch in data.validation_batches(config.train.eval_batches)]
    last_row = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    assert float(np.mean(losses)) == pytest.approx(last_row["eval_loss"], rel=1e-3)


# the rest


def test_links_lead_somewhere():
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", README) if not target.startswith("http")]
    assert len(targets) > 10
    missing = [target for target in targets if not (REPOSITORY / target).exists()]
    assert not missing


def test_modules_are_in_the_order_in_which_they_import_each_other():
    order = [
        name.removesuffix("/__init__.py").removesuffix(".py")
        for name in re.findall(r"^\| .*\(jzero/(\S+)\)", README, re.M)
    ]
    assert len(order) > 10
    for position, name in enumerate(order):
        package = REPOSITORY / "jzero" / name
        for file in package.glob("*.py") if package.is_dir() else [package.with_suffix(".py")]:
            imported = {
                node.module for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)
            }
            later = [
                other for other in order[position + 1 :] if any(f"{m}.".startswith(f"jzero.{other}.") for m in imported)
            ]
            assert not later, f"{file} imports {later}, which the README lists after it"
