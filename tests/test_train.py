"""The command line as a process: help, mistakes, exit codes, and a run that is interrupted at any step."""

import json
import os
import random
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


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=300
    )


# help and mistakes


def test_help_has_an_example_and_says_where_the_fields_are(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "python -m jzero.train --config" in told
    assert (REPOSITORY / "jzero" / "config.py").exists()
    assert "jzero/config.py" in told


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
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    override = "runtime={platform: gpu, fake_devices: null}"
    command = [sys.executable, "-m", "jzero.train", "--config", str(config_file), override]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
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


# interrupted


def read_rows(run_dir: Path) -> list[dict]:
    """The rows, less the speed, which no two runs share."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows]


def last_step(run_dir: Path) -> int:
    """The step of the last whole row on file while a process is writing; 0 if there is none."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"\n")), default=0)


def interrupt(config_file: Path, run_dir: Path, step: int, number: signal.Signals) -> int:
    """Starts a run, sends it a signal once the row of `step` is there, and returns its exit code."""
    command = [sys.executable, "-m", "jzero.train", "--config", str(config_file)]
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


def test_a_run_stopped_and_killed_at_any_step_ends_as_if_it_had_not_been(config_file, tmp_path):
    """SIGTERM, then `kill -9`, then to the end: every row is the undisturbed run's, bit for bit, and is
    there once.
    """
    straight, disturbed = tmp_path / "straight", tmp_path / "run"
    assert run_python("-m", "jzero.train", "--config", str(config_file), f"train.run_dir={straight}").returncode == 0
    expected = read_rows(straight)
    assert [row["step"] for row in expected if "eval_loss" not in row] == list(range(1, 41))

    stop, kill = random.randint(1, 10), random.randint(16, 24)
    print(f"SIGTERM after step {stop}, SIGKILL after step {kill}")
    assert interrupt(config_file, disturbed, stop, signal.SIGTERM) == 143
    stopped = last_step(disturbed)
    assert stop <= stopped < 40
    assert (disturbed / "checkpoints" / str(stopped)).exists()
    assert read_rows(disturbed) == [row for row in expected if row["step"] <= stopped]

    assert interrupt(config_file, disturbed, kill, signal.SIGKILL) == -signal.SIGKILL
    assert kill <= last_step(disturbed) < 40

    finish = run_python("-m", "jzero.train", "--config", str(config_file))
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
