"""The command line as a process: help, mistakes, exit codes, and a run that is interrupted at any step."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from jzero.config import load_config
from jzero.train import main

REPOSITORY = Path(__file__).parent.parent

CONFIG = """
model: {{hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2}}
data: {{source: synthetic, synthetic_tokens: 20000, sequence_length: 16, cache_dir: {cache}}}
zero: {{min_shard_elements: 64}}
optimizer: {{warmup_steps: 5}}
train: {{num_steps: 40, global_batch_size: 8, eval_every: 10, eval_batches: 2, sample_tokens: 0,
        run_dir: {run_dir}}}
checkpoint: {{save_every: 5}}
runtime: {{fake_devices: 8, xla_flags: [--xla_backend_optimization_level=0]}}  # compiles faster
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG.format(cache=tmp_path / "cache", run_dir=tmp_path / "run"))
    return path


def run_python(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False, timeout=300
    )


def users_environment() -> dict[str, str]:
    """The environment less what conftest put there: its device count would win over `fake_devices`."""
    return {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}


def train_as_user(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "jzero.train", *arguments, env=users_environment())


# help and mistakes


def test_help_has_an_example_and_says_where_the_fields_are(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "python -m jzero.train --config" in told
    assert (REPOSITORY / "jzero" / "config").is_dir()
    assert "jzero/config/" in told


def test_print_config_resolves_file_and_overrides(config_file, tmp_path, capsys):
    assert main(["--config", str(config_file), "zero.stage=1", "--print-config", "train.seed=7"]) == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    printed = load_config(tmp_path / "printed.yaml")
    assert printed == load_config(config_file, ["zero.stage=1", "train.seed=7"])
    assert printed.train.seed == 7
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["--stage=1", "--print", "-x"])
def test_an_unknown_option_is_a_usage_error(option, capsys):
    with pytest.raises(SystemExit) as ended:
        main([option])
    assert ended.value.code == 2
    assert f"unrecognized arguments: {option}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.num_step=3", "did you mean train.num_steps?"),
        ("zero.stage=4", "zero.stage = 4"),
        ("zero.stage", "section.field=value"),
        ("train.global_batch_size=12", "train.global_batch_size = 12"),  # found once the devices are known
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(config_file, override, told, capsys):
    assert main(["--config", str(config_file), override]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert told in output.err
    assert "Traceback" not in output.err
    assert output.out == ""


def test_a_missing_file_is_a_mistake(tmp_path, capsys):
    assert main(["--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err


@pytest.mark.skipif(any(find_spec(f"jax_cuda{v}_plugin") for v in (12, 13)), reason="this machine may have a GPU")
def test_a_platform_that_is_not_there_is_a_mistake(config_file):
    done = train_as_user("--config", str(config_file), "runtime={platform: gpu, fake_devices: null}")
    assert done.returncode == 2, done.stderr
    assert "error: JAX finds no devices for JAX_PLATFORMS = cuda" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_and_mistakes_do_not_wait_for_jax(config_file):
    check = (
        "import sys; from jzero.train import main\n"
        f"assert main(['--config', {str(config_file)!r}, 'zero.stage=9']) == 2\n"
        f"assert main(['--config', {str(config_file)!r}, '--print-config']) == 0\n"
        "heavy = {'jax', 'flax', 'orbax', 'grain', 'tensorboardX'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = run_python("-c", check)
    assert result.returncode == 0, result.stderr


def test_help_and_mistakes_answer_within_a_second(config_file):
    """Beyond what the libraries that read the config take to import, which is the machine's business."""

    def seconds(code: int, *arguments: str) -> float:
        took = []
        for _ in range(3):
            start = time.perf_counter()
            assert run_python(*arguments).returncode == code
            took.append(time.perf_counter() - start)
        return min(took)

    libraries = seconds(0, "-c", "import pydantic, omegaconf")
    assert seconds(0, "-m", "jzero.train", "--help") < libraries + 1
    assert seconds(2, "-m", "jzero.train", "--config", str(config_file), "zero.stage=9") < libraries + 1


def assert_one_message(arguments: list[str], told: str, capsys) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert told in error
    assert "Traceback" not in error
    assert len(error.splitlines()) <= 20


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("source: synthetic, synthetic_tokens: 150, validation_fraction: 0.2", "train.global_batch_size=8 needs 8"),
        ("source: text, paths: [none.txt]", "data.paths: none.txt cannot be found"),
        ("source: text, paths: [{directory}/latin.txt]", "latin.txt is not UTF-8: byte 0xe9 at line 1"),
    ],
)
def test_data_that_cannot_serve_is_one_message_too(config_file, tmp_path, source, told, capsys):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    synthetic = "source: synthetic, synthetic_tokens: 20000"
    config_file.write_text(config_file.read_text().replace(synthetic, source.format(directory=tmp_path)))
    assert_one_message(["--config", str(config_file)], told, capsys)


IN_THE_WAY = {  # what is in the run directory: how it comes there
    "nothing": lambda run_dir: None,
    "another run": lambda run_dir: shutil.copy(REPOSITORY / "configs" / "quickstart.yaml", run_dir / "config.yaml"),
    "an empty step": lambda run_dir: (run_dir / "checkpoints" / "5").mkdir(parents=True),
    "Orbax's own": lambda run_dir: (run_dir / "checkpoints" / "_METADATA").mkdir(parents=True),
}


@pytest.mark.parametrize(
    ("present", "told"),
    [
        ("nothing", "checkpoint.resume=must, but train.run_dir="),
        ("another run", "model.hidden_size: 128 in the directory, 16 now"),
        ("an empty step", "holds only damaged checkpoints (steps 5)"),
        ("Orbax's own", "holds checkpoints that jzero did not write"),
    ],
)
def test_a_run_directory_that_cannot_serve_is_one_message_too(config_file, tmp_path, present, told, capsys):
    (tmp_path / "run").mkdir()
    IN_THE_WAY[present](tmp_path / "run")
    policy = "must" if present == "nothing" else "auto"
    assert_one_message(["--config", str(config_file), f"checkpoint.resume={policy}"], told, capsys)


# interrupted


MEASURED = ("tokens_per_second", "host_memory_bytes")


def read_rows(run_dir: Path) -> list[dict]:
    """The rows, less what is measured, which no two runs share."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in rows]


def last_step(run_dir: Path) -> int:
    """The step of the last whole row on file while a process is writing; 0 if there is none."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"\n")), default=0)


def interrupt(command: list[str], run_dir: Path, step: int, number: signal.Signals) -> int:
    """Starts a run, sends it a signal once the row of `step` is there, and returns its exit code."""
    command = [sys.executable, *command]
    log = run_dir.with_suffix(".log")
    with open(log, "w") as output:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT)
        try:
            while last_step(run_dir) < step:
                assert process.poll() is None, f"ended before step {step}:\n{log.read_text()}"
                time.sleep(0.002)
            os.kill(process.pid, number)
            return process.wait(timeout=120)
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("number", "code", "overrides"),
    [
        pytest.param(signal.SIGTERM, 143, [], id="SIGTERM"),
        pytest.param(signal.SIGINT, 130, [], id="SIGINT", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, ["zero.stage=2"], id="stage 2", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, ["precision=bf16"], id="bf16", marks=pytest.mark.slow),
        pytest.param(
            signal.SIGTERM,
            143,
            ["train={global_batch_size: 16, accumulation_steps: 2}"],
            id="two micro-batches",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_stopped_and_killed_at_any_step_ends_as_if_it_had_not_been(
    config_file, tmp_path, number, code, overrides
):
    """SIGTERM or Ctrl-C, then `kill -9`, then to the end: every row is the undisturbed run's, bit for bit, and is
    there once.
    """
    straight, disturbed = tmp_path / "straight", tmp_path / "run"
    command = ["-m", "jzero.train", "--config", str(config_file), *overrides]
    undisturbed = run_python(*command, f"train.run_dir={straight}")
    assert undisturbed.returncode == 0, undisturbed.stderr
    expected = read_rows(straight)
    assert [row["step"] for row in expected if "eval_loss" not in row] == list(range(1, 41))

    stop, kill = random.randint(1, 10), random.randint(16, 24)
    print(f"{number.name} after step {stop}, SIGKILL after step {kill}")
    assert interrupt(command, disturbed, stop, number) == code
    stopped = last_step(disturbed)
    assert stop <= stopped < 40
    assert (disturbed / "checkpoints" / str(stopped)).exists()
    assert read_rows(disturbed) == [row for row in expected if row["step"] <= stopped]

    assert interrupt(command, disturbed, kill, signal.SIGKILL) == -signal.SIGKILL
    assert kill <= last_step(disturbed) < 40

    finish = run_python(*command)
    assert finish.returncode == 0, finish.stderr
    assert "going on from" in finish.stdout
    assert read_rows(disturbed) == expected


def test_a_second_signal_ends_the_process_at_once():
    check = (
        "import signal; from jzero.signals import stop_signals\n"
        "with stop_signals() as stop:\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print(stop.number, flush=True)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('still here', flush=True)"
    )
    result = run_python("-c", check)
    assert (result.returncode, result.stdout, result.stderr) == (130, "15\n", "")


# going on elsewhere


@pytest.fixture(scope="module")
def on_eight(tmp_path_factory):
    """The config file and the run directory of 12 steps on 8 devices, batch 24, saved at every second."""
    directory = tmp_path_factory.mktemp("eight")
    config_file = directory / "tiny.yaml"
    config_file.write_text(
        CONFIG.format(cache=directory / "cache", run_dir=directory / "run")
        .replace("num_steps: 40, global_batch_size: 8", "num_steps: 12, global_batch_size: 24")
        .replace("save_every: 5", "save_every: 2, keep_last: 6")
    )
    done = train_as_user("--config", str(config_file))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ZeRO stage 3, .*, data 8$", done.stdout, re.M)
    return config_file, directory / "run"


def forget_after(run_dir: Path, step: int) -> None:
    """Deletes the checkpoints of later steps; rows and events stay, as after a kill."""
    for later in range(step + 2, 14, 2):
        shutil.rmtree(run_dir / "checkpoints" / str(later))


def assert_goes_on(on_eight, run_dir: Path, step: int, num_devices: int, stage: int) -> None:
    """A new process on so many devices goes on from `step`; all rows are those of the run that stayed on 8."""
    config_file, straight = on_eight
    forget_after(run_dir, step)
    overrides = [f"train.run_dir={run_dir}", f"runtime.fake_devices={num_devices}", f"zero.stage={stage}"]
    done = train_as_user("--config", str(config_file), *overrides)
    assert done.returncode == 0, done.stderr
    axes = "one device" if num_devices == 1 else f"data {num_devices}"
    assert re.search(rf"^ZeRO stage {stage}, .*, {axes}$", done.stdout, re.M)
    assert f"going on from {run_dir}/checkpoints/{step}\n" in done.stdout
    rows, expected = read_rows(run_dir), read_rows(straight)
    assert rows != expected  # another order of addition
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-5)


ELSEWHERE = [(2, 1), (1, 0), (6, 3), (3, 2)]  # devices, stage


@pytest.mark.parametrize(
    ("num_devices", "stage"), [pytest.param(*e, marks=[pytest.mark.slow] * (e != (6, 3))) for e in ELSEWHERE]
)
def test_a_run_goes_on_with_the_same_data_on_another_number_of_devices(on_eight, tmp_path, num_devices, stage):
    run_dir = shutil.copytree(on_eight[1], tmp_path / "run")
    assert_goes_on(on_eight, run_dir, 4, num_devices, stage)


@pytest.mark.slow
def test_a_run_moves_from_devices_to_devices(on_eight, tmp_path):
    """Each process goes on from what the one before it saved: 8 devices, then 2, 1, 6 and 3."""
    run_dir = shutil.copytree(on_eight[1], tmp_path / "run")
    for step, (num_devices, stage) in zip((2, 4, 6, 8), ELSEWHERE, strict=True):
        assert_goes_on(on_eight, run_dir, step, num_devices, stage)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "told"),
    [pytest.param(truncate, "bytes instead of", marks=pytest.mark.slow), (flip_a_bit, "checksum differs")],
)
def test_a_damaged_checkpoint_is_passed_over_and_the_terminal_says_so(on_eight, tmp_path, damage, told):
    """The one before it serves, and in the end all is as if nothing had happened."""
    config_file, straight = on_eight
    run_dir = shutil.copytree(straight, tmp_path / "run")
    forget_after(run_dir, 8)
    newest = run_dir / "checkpoints" / "8"
    files = [path for path in (newest / "d").rglob("*") if path.is_file()]
    damage(max(files, key=lambda path: path.stat().st_size))
    done = train_as_user("--config", str(config_file), f"train.run_dir={run_dir}")
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "passed over" in line]
    assert len(warnings) == 1, done.stderr
    assert f"step 8 of {run_dir}/checkpoints is damaged" in warnings[0]
    assert told in warnings[0]
    assert f"going on from {run_dir}/checkpoints/6\n" in done.stdout
    assert read_rows(run_dir) == read_rows(straight)


def test_a_run_gone_wrong_stops_and_its_last_good_checkpoint_goes_on(config_file, tmp_path, monkeypatch, capsys):
    """From step 6 on the loss is not a number: three such steps, then one message and exit code 1."""
    import jax.numpy as jnp

    from jzero import trainer
    from jzero.data import Data
    from jzero.loss import WeightedLoss

    loss, train_batches = trainer.language_model_loss, Data.train_batches

    def poisoned(self, start_sample, num_steps):
        for step, batch in enumerate(train_batches(self, start_sample, num_steps), start_sample // 8 + 1):
            yield batch if step < 6 else {"tokens": 0 * batch["tokens"]}

    def breakable(model, batch):
        whole = loss(model, batch)
        return WeightedLoss(jnp.where(batch["tokens"].any(), whole.total, jnp.nan), whole.weight)

    overrides = ["train={num_steps: 12, max_skipped_steps: 3, eval_every: 0}", "checkpoint.save_every=2"]
    command = ["--config", str(config_file), *overrides]
    with monkeypatch.context() as patch:
        patch.setattr(Data, "train_batches", poisoned)
        patch.setattr(trainer, "language_model_loss", breakable)
        assert main(command) == 1
    output = capsys.readouterr()
    assert output.err.startswith("error: step 8 is the last of 3 in a row whose loss or gradients are not finite")
    assert f"Last good checkpoint: {tmp_path}/run/checkpoints/4." in output.err
    assert len(output.err.splitlines()) == 3
    assert "Traceback" not in output.out + output.err
    assert output.out.count("step 6 skipped: loss nan") == 1
    before = read_rows(tmp_path / "run")
    assert [row["skipped"] for row in before][:8] == [0, 0, 0, 0, 0, 1, 2, 3]

    assert main(command) == 0  # the cause mended
    assert f"going on from {tmp_path}/run/checkpoints/4\n" in capsys.readouterr().out
    rows = read_rows(tmp_path / "run")
    assert [row["step"] for row in rows if "eval_loss" not in row] == list(range(1, 13))
    assert rows[:5] == before[:5]
    assert {row["skipped"] for row in rows if "eval_loss" not in row} == {0}


# what the README promises


@pytest.mark.slow
def test_the_quickstart_learns_within_minutes(tmp_path):
    """As a user runs it: a validation loss at least 1 nat a byte under the unigram baseline, in 300 s at most."""
    places = [f"train.run_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    start = time.perf_counter()
    done = train_as_user("--config", "configs/quickstart.yaml", *places)
    took = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ZeRO stage 3, .*, data 8$", done.stdout, re.M)
    assert last_step(tmp_path / "run") == 300
    figures = {name: re.search(rf"{name} +│ ([\d.]+)", done.stdout) for name in ("validation loss", "unigram baseline")}
    validation, baseline = (float(found[1]) for found in figures.values())
    print(f"{validation=} {baseline=} {took=:.0f} s")
    assert validation <= baseline - 1.0
    assert took < 300
