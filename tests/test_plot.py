"""`python -m jzero.metrics plot`: curves of runs, done or under way, and one message for what cannot be drawn."""

import json
import math
import sys

import pytest

from jzero.metrics.__main__ import main
from jzero.metrics.plot import draw_runs, smoothed


def run_of(directory, num_steps=40, scale=1.0, evaluated=True, cut=""):
    """A run directory with rows as the trainer leaves them; `cut` is the beginning of a row being written."""
    rows = []
    for step in range(1, num_steps + 1):
        speed = None if step == 1 else 1000.0 + step
        rows.append({"step": step, "loss": math.nan if step == 7 else scale / step, "tokens_per_second": speed})
        if evaluated and step % 20 == 0:
            rows.append({"step": step, "eval_loss": scale / step + 1})
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + cut)
    return str(directory)


@pytest.fixture(autouse=True)
def _matplotlib():
    pytest.importorskip("matplotlib", reason="needs the extra plot")


@pytest.mark.parametrize(
    ("ending", "starts"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")]
)
def test_a_picture_is_written(tmp_path, capsys, ending, starts):
    out = tmp_path / f"curves.{ending}"
    assert main(["plot", run_of(tmp_path / "run"), "--out", str(out)]) == 0
    assert out.read_bytes().startswith(starts)
    assert capsys.readouterr().out == f"wrote {out}\n"


def test_without_a_name_it_goes_to_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_of(tmp_path / "run")
    assert main(["plot", "run"]) == 0
    assert (tmp_path / "metrics.png").exists()


def curves(figure):
    """(axis, legend) -> points, of what has a legend; the legends shown."""
    loss, speed = figure.axes
    lines = {
        (axes.get_ylabel(), line.get_label()): list(zip(*line.get_data(), strict=True))
        for axes in (loss, speed)
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
    }
    return lines, [text.get_text() for text in loss.get_legend().get_texts()]


def test_the_curves_are_those_of_the_rows(tmp_path):
    """A run under way: the last line is cut short, and no evaluation of it counts."""
    run = run_of(tmp_path / "run", cut='{"step": 41, "loss": 999')
    lines, legend = curves(draw_runs([run]))
    assert legend == ["train", "evaluation"]
    assert lines["loss", "evaluation"] == [(20, 1 / 20 + 1), (40, 1 / 40 + 1)]
    assert lines["tokens/s", "run"] == [(step, 1000.0 + step) for step in range(2, 41)]
    train = dict(lines["loss", "train"])
    assert (train[1], len(train)) == (1.0, 40)


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["a", "b"], ["a", "b"]),
        (["a/seed0", "b/seed0"], ["a/seed0", "b/seed0"]),
        (["x/a/seed0", "x/b/seed1"], ["seed0", "seed1"]),
        (["a", "a"], ["a"]),  # the same run is drawn once
    ],
)
def test_several_runs_are_told_apart_by_the_ends_of_their_paths(tmp_path, names, labels):
    runs = [str(tmp_path / name) for name in names]
    for number, run in enumerate(dict.fromkeys(runs)):
        run_of(tmp_path / run, scale=number + 1.0, evaluated=number == 0)
    lines, legend = curves(draw_runs(runs))
    assert [label for axis, label in lines if axis == "tokens/s"] == labels
    if len(labels) > 1:
        assert legend == [f"{labels[0]} train", f"{labels[0]} evaluation", f"{labels[1]} train"]


def test_the_smoothed_loss_is_a_mean_that_skipped_steps_leave_alone():
    assert smoothed([3.0] * 1000) == pytest.approx([3.0] * 1000)
    noisy = [2.0 + (-1) ** step for step in range(1000)]
    assert max(abs(value - 2) for value in smoothed(noisy)[100:]) < 0.1
    assert smoothed([math.nan, 1.0, math.nan, math.inf, 5.0])[1:] == [1.0, 1.0, 1.0, 5.0]  # a short run: as it is
    assert math.isnan(smoothed([math.nan])[0])


def empty(directory, text=""):
    directory.mkdir()
    (directory / "metrics.jsonl").write_text(text)
    return str(directory)


@pytest.mark.parametrize(
    ("run", "out", "told"),
    [
        (lambda path: str(path / "none"), "a.png", "none: holds no metrics.jsonl; name a run's directory"),
        (
            lambda path: run_of(path / "run") + "/metrics.jsonl",
            "a.png",
            "holds no metrics.jsonl; name a run's directory",
        ),
        (lambda path: empty(path / "run"), "a.png", "metrics.jsonl: has no rows yet"),
        (lambda path: empty(path / "run", '{"step": 1, "lo'), "a.png", "metrics.jsonl: has no rows yet"),
        (lambda path: empty(path / "run", 'what\n{"step": 1}\n'), "a.png", "metrics.jsonl, line 1: 'what' is no row"),
        (lambda path: run_of(path / "run"), "a.jpg", "--out a.jpg: its ending must be one of .png, .svg, .pdf"),
        (lambda path: run_of(path / "run"), "a", "--out a: its ending must be one of .png, .svg, .pdf"),
        (
            lambda path: run_of(path / "run"),
            "none/a.png",
            "--out none/a.png: there is no directory none; make it first",
        ),
    ],
)
def test_what_cannot_be_drawn_is_one_message_and_exit_code_2(tmp_path, capsys, monkeypatch, run, out, told):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", run_of(tmp_path / "good"), run(tmp_path), "--out", out]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert told in output.err
    assert output.err.count("\n") == 1
    assert not (tmp_path / "a.png").exists()


def test_without_matplotlib_the_command_that_installs_it_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["plot", run_of(tmp_path / "run"), "--out", str(tmp_path / "a.png")]) == 2
    assert "not installed: pip install matplotlib" in capsys.readouterr().err
