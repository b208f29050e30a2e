"""What a user finds in metrics.jsonl, in TensorBoard and on the console."""

import io
import json
import math
import os
import pty
import re
import resource
import select
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from jzero.display import LineSink, ProgressSink, console_sink, summary_table
from jzero.errors import DataError
from jzero.metrics import JsonlSink, MetricWriter, TensorBoardSink, Throughput, set_aside, take_back


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def row(step, loss=1.0, **more):
    return {"step": step, "loss": loss, "grad_norm": 0.5, **more}


class ListSink:
    def __init__(self):
        self.rows, self.closed = [], False

    def write(self, row):
        self.rows.append(row)

    def close(self):
        self.closed = True


class Clock:
    def __init__(self, *times):
        self.times = list(times)

    def __call__(self):
        return self.times.pop(0)


# metrics.jsonl


@pytest.mark.parametrize(
    "value", [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, float(jnp.float32(0.1)), -0.0, math.inf, -math.inf]
)
def test_floats_read_back_bit_equal(tmp_path, value):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(row(1, value))
    sink.close()
    assert struct.pack("d", read(tmp_path / "metrics.jsonl")[0]["loss"]) == struct.pack("d", value)


def test_nan_reads_back_as_nan(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(row(1, math.nan))
    sink.close()
    assert math.isnan(read(tmp_path / "metrics.jsonl")[0]["loss"])


def test_rows_are_on_file_before_the_sink_is_closed(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        sink.write(row(step))
        assert [r["step"] for r in read(tmp_path / "metrics.jsonl")] == list(range(1, step + 1))
    sink.close()


WHOLE = '{"step": 1}\n{"step": 2}\n{"step": 2, "eval_loss": 3.5}\n'


@pytest.mark.parametrize(
    ("text", "step", "left"),
    [
        (WHOLE, 2, WHOLE),
        (WHOLE + '{"step": 3}\n', 2, WHOLE),
        (WHOLE + '{"step": 3}\n{"step": 3, "eval_loss": 1.0}\n{"step": 4}\n', 2, WHOLE),
        (WHOLE + '{"step": 3, "lo', 2, WHOLE),
        (WHOLE + '{"step": 3}', 3, WHOLE),  # cut between the row and its line end
        (WHOLE + '{"step": 3, "loss": NaN}\n', 3, WHOLE + '{"step": 3, "loss": NaN}\n'),
        (WHOLE, 0, ""),
        ("", 5, ""),
        ('{"st', 5, ""),
    ],
)
def test_take_back_leaves_the_rows_up_to_a_step(tmp_path, text, step, left):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    take_back(path, step)
    assert path.read_text() == left
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_take_back_does_not_touch_a_file_with_nothing_to_drop(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(WHOLE)
    before = path.stat()
    take_back(path, 2)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_take_back_of_a_missing_file_makes_none(tmp_path):
    take_back(tmp_path / "metrics.jsonl", 3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bad", ["loss=3\n", "[1, 2]\n", '{"loss": 3}\n', "\n", '{"step": null}\n'])
def test_a_broken_line_inside_the_file_is_named(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    text = '{"step": 1}\n' + bad + '{"step": 2}\n'
    path.write_text(text)
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: .* delete the line"):
        take_back(path, 1)
    assert path.read_text() == text


def test_a_resumed_sink_states_each_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path)
    for step in (1, 2, 3):
        first.write(row(step, loss=10.0))
    first.close()
    second = JsonlSink(path, start_step=2)
    for step in (3, 4):
        second.write(row(step, loss=20.0))
    second.close()
    assert [(r["step"], r["loss"]) for r in read(path)] == [(1, 10.0), (2, 10.0), (3, 20.0), (4, 20.0)]


def test_a_file_set_aside_never_takes_the_place_of_another(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert set_aside(path) is None
    path.touch()
    assert set_aside(path) is None
    for number in (1, 2, 3):
        path.write_text(f"{number}\n")
        assert set_aside(path).exists()
    found = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert found == {"metrics.jsonl.old": "1\n", "metrics.jsonl.old.2": "2\n", "metrics.jsonl.old.3": "3\n"}


@pytest.mark.parametrize("kind", [JsonlSink, TensorBoardSink])
def test_a_full_disk_is_told_with_the_file(tmp_path, kind):
    sink, unlimited = kind(tmp_path / "written"), resource.getrlimit(resource.RLIMIT_FSIZE)
    write_more = lambda: [sink.write(row(step)) for step in range(2, 1000)]  # more than any buffer holds
    sink.write(row(1))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
        for call in (write_more, sink.close):
            with pytest.raises(OSError, match=r"File too large: '.*/written"):
                call()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    if kind is JsonlSink:
        take_back(tmp_path / "written", 1000)
        steps = [r["step"] for r in read(tmp_path / "written")]
        assert steps == list(range(1, len(steps) + 1))


# the writer


def test_a_row_is_written_when_the_next_comes_or_when_asked_for(tmp_path):
    sink = ListSink()
    writer = MetricWriter([sink], Throughput(100, Clock(0.0, 2.0, 2.5)))
    steps = lambda: [r["step"] for r in sink.rows]

    assert writer.write_step(1, {"loss": jnp.float32(3)}) is None
    assert steps() == []
    first = writer.write_step(2, {"loss": jnp.float32(2)})
    assert first == {"step": 1, "loss": 3.0, "tokens_per_second": None}
    assert steps() == [1]
    assert writer.flush() == {"step": 2, "loss": 2.0, "tokens_per_second": 50.0}
    assert writer.flush() is None
    writer.write({"step": 2, "eval_loss": 1.5})
    writer.write_step(3, {"loss": jnp.float32(1)})
    assert steps() == [1, 2, 2]
    writer.close()
    assert steps() == [1, 2, 2, 3]
    assert sink.closed


def test_an_evaluation_row_never_overtakes_its_step():
    sink = ListSink()
    writer = MetricWriter([sink], Throughput(1, Clock(0.0)))
    writer.write_step(1, {"loss": jnp.float32(3)})
    writer.write({"step": 1, "eval_loss": 2.0})
    assert ["eval_loss" in r for r in sink.rows] == [False, True]


def test_rows_hold_plain_numbers_of_the_full_device_value():
    sink = ListSink()
    writer = MetricWriter([sink], Throughput(1, Clock(0.0)))
    loss = jax.jit(lambda: jnp.float32(0.1))()
    writer.write_step(1, {"loss": loss, "skipped": jnp.int32(4), "good": jnp.bool_(True)})
    written = writer.flush()
    assert written == {"step": 1, "loss": float(loss), "skipped": 4, "good": True, "tokens_per_second": None}
    assert written["loss"] != 0.1  # float32's tenth, not rounded for show
    assert [type(written[name]) for name in ("loss", "skipped", "good")] == [float, int, bool]


def test_close_closes_every_sink_though_one_fails():
    class Failing(ListSink):
        def write(self, row):
            raise OSError("disk full")

    sinks = [Failing(), ListSink()]
    writer = MetricWriter(sinks, Throughput(1, Clock(0.0)))
    writer.write_step(1, {"loss": jnp.float32(3)})
    with pytest.raises(OSError, match="disk full"):
        writer.close()
    assert [sink.closed for sink in sinks] == [True, True]


# throughput


def test_throughput_leaves_out_the_first_step_and_what_came_before_a_restart():
    # compile ends at 60 s, a step of 2 s, an evaluation from 62 to 162, a step of 4 s
    speed = Throughput(1000, Clock(60.0, 62.0, 162.0, 166.0))
    assert speed.mean is None
    assert speed.step_finished() is None
    assert speed.step_finished() == 500.0
    speed.restart()
    assert speed.step_finished() == 250.0
    assert speed.mean == pytest.approx(2000 / 6)


def test_a_restart_before_the_first_step_does_not_count_compiling():
    speed = Throughput(1000, Clock(60.0, 62.0))
    speed.restart()
    assert speed.step_finished() is None
    assert speed.step_finished() == 500.0


# TensorBoard


def tensorboard_events(directory):
    """(tag, step, value) of each scalar, ("START", step, None) of each mark that hides what is there from
    step on.
    """
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[12 + length + 4 :]
            if event.HasField("session_log"):
                yield "START", event.step, None
            for value in event.summary.value:
                yield value.tag, event.step, value.simple_value


def test_tensorboard_has_every_number_and_hides_what_a_resumed_run_repeats(tmp_path):
    for start, steps in ((0, (1, 2, 3)), (2, (3,))):
        sink = TensorBoardSink(tmp_path, start_step=start)
        for step in steps:
            sink.write(row(step, loss=step + 0.5, tokens_per_second=None))
        sink.close()
    scalars = lambda step: [("loss", step, step + 0.5), ("grad_norm", step, 0.5)]
    assert list(tensorboard_events(tmp_path)) == [
        ("START", 1, None),
        *scalars(1),
        *scalars(2),
        *scalars(3),
        ("START", 3, None),
        *scalars(3),
    ]


def test_tensorboard_takes_non_finite_numbers_without_a_word(tmp_path, caplog):
    sink = TensorBoardSink(tmp_path)
    sink.write(row(1, loss=math.nan))
    sink.close()
    (_, loss, _) = tensorboard_events(tmp_path)
    assert math.isnan(loss[2])
    assert caplog.text == ""


def test_importing_metrics_does_not_import_tensorboard():
    check = "import sys, jzero.metrics; sys.exit('tensorboardX' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


# the console


def test_plain_output_is_a_line_each_so_many_steps_without_control_characters(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as CI does; the file still is no terminal
    out = io.StringIO()
    sink = console_sink(Console(file=out, width=40, color_system=None), start_step=0, num_steps=25, every=10)
    assert isinstance(sink, LineSink)
    for step in range(1, 26):
        sink.write(row(step, loss=1 / step, learning_rate=1e-3, tokens_per_second=12345.6, skipped=step // 20))
    sink.write({"step": 25, "eval_loss": 0.25})
    sink.close()
    text = out.getvalue()
    lines = text.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "step 1/25",
        "step 10/25",
        "step 20/25",
        "step 25/25",
        "step 25/25",
    ]
    assert lines[1].startswith("step 10/25  loss 0.1000  grad_norm 0.5  lr 0.001  12,346 tokens/s  ETA 0:00:0")
    assert lines[2].count("skipped 1") == 1
    assert lines[4] == "step 25/25  eval_loss 0.2500"
    assert text.replace("\n", "").isprintable()


def test_rows_without_learning_rate_or_speed_still_make_a_line():
    out = io.StringIO()
    LineSink(Console(file=out), num_steps=5, every=10).write(row(3, learning_rate=None, tokens_per_second=None))
    assert out.getvalue() == "step 3/5  loss 1.0000  grad_norm 0.5\n"


SHOW_CURSOR = b"\x1b[?25h"


def test_a_terminal_gets_a_live_bar_that_ends_on_the_last_numbers():
    ours, theirs = pty.openpty()
    with open(theirs, "w") as terminal:
        console = Console(file=terminal, width=80, force_terminal=True, force_interactive=True)
        sink = console_sink(console, start_step=2, num_steps=4, every=10)
        assert isinstance(sink, ProgressSink)
        sink.write(row(3, loss=0.75, tokens_per_second=2000.0))
        sink.write({"step": 3, "eval_loss": 0.5})
        sink.write(row(4, loss=0.625, tokens_per_second=2000.0))
        sink.close()
        seen = b""
        # A read returns what has come so far.
        while not seen.endswith(SHOW_CURSOR) and select.select([ours], [], [], 10)[0]:
            seen += os.read(ours, 100_000)
    os.close(ours)
    assert seen.endswith(SHOW_CURSOR)
    seen = seen.decode()
    assert "step 4/4 " in re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", seen)
    assert "loss 0.6250  eval_loss 0.5000  2,000 tokens/s" in seen


def test_the_summary_leaves_out_what_is_not_known():
    out = io.StringIO()
    Console(file=out, width=60).print(summary_table({"steps": "3", "validation loss": None, "sample": "a\nb"}))
    assert "steps" in out.getvalue()
    assert "validation" not in out.getvalue()
