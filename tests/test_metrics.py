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
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from rich.console import Console

from jzero.adapt import adapt
from jzero.config import make_config
from jzero.display import LineSink, ProgressSink, console_sink, summary_table
from jzero.errors import ConfigError, DataError
from jzero.gradstats import HISTOGRAM_EDGES
from jzero.hardware import published_peak
from jzero.metrics.csv_file import CsvSink
from jzero.metrics.flops import tokens_at_peak
from jzero.metrics.jsonl import JsonlSink
from jzero.metrics.memory import memory_in_use
from jzero.metrics.profiler import ProfilerWindow
from jzero.metrics.row_files import set_aside, take_back
from jzero.metrics.tensorboard import TensorBoardSink
from jzero.metrics.throughput import Throughput
from jzero.metrics.weights_and_biases import WandbSink
from jzero.metrics.writer import MetricWriter
from jzero.models import build_model
from jzero.plan import make_plan


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


# metrics.csv


def test_a_table_grows_a_column_when_a_row_brings_one(tmp_path):
    path = tmp_path / "metrics.csv"
    sink = CsvSink(path)
    sink.write({"step": 1, "loss": 0.1, "speed": None, "histogram": [1.0, 2.0]})
    sink.write({"step": 2, "loss": math.nan, "speed": 1 / 3})
    assert path.read_text() == f"step,loss,speed\n1,0.1,\n2,nan,{1 / 3!r}\n"
    sink.write({"step": 2, "eval_loss": 5e-324})
    sink.write({"step": 3, "speed": 2.0, "loss": 1e16})
    sink.close()
    assert path.read_text() == f"step,loss,speed,eval_loss\n1,0.1,,\n2,nan,{1 / 3!r},\n2,,,5e-324\n3,1e+16,2.0,\n"
    assert os.listdir(tmp_path) == ["metrics.csv"]


@pytest.mark.parametrize(("cut", "start"), [(0, 2), (1, 2), (4, 2), (0, 0), (34, 0), (39, 0)])
def test_a_resumed_table_states_each_step_once(tmp_path, cut, start):
    """Also after a kill in the middle of a line, the header's too."""
    path = tmp_path / "metrics.csv"
    straight = CsvSink(tmp_path / "straight.csv")
    rows = [row(1), row(2), {"step": 2, "eval_loss": 3.0}, row(3)]
    first = CsvSink(path)
    for r in rows:
        straight.write(r)
        first.write(r)
    first.close()
    path.write_bytes(path.read_bytes()[: -cut or None])
    for again in (start, start):  # a second start without a row in between
        CsvSink(path, again).close()
    second = CsvSink(path, start)
    for r in [r for r in rows if r["step"] > start] + [row(4, learning_rate=0.5)]:
        second.write(r)
    straight.write(row(4, learning_rate=0.5))
    second.close()
    straight.close()
    assert path.read_text() == (tmp_path / "straight.csv").read_text()


@pytest.mark.parametrize(
    ("text", "line"),
    [("a;b\n1;2\n", 1), ("1,2\n", 1), ("step,loss\n\n", 2), ("step,loss\n1,0.5\n,0.5\n", 3), ("loss,step\n", 1)],
)
def test_a_table_that_someone_changed_is_named_and_left(tmp_path, text, line):
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(DataError, match=rf"metrics\.csv, line {line}: .*is no row of metrics\.csv.*mend or delete"):
        CsvSink(tmp_path / "metrics.csv", 1)
    assert (tmp_path / "metrics.csv").read_text() == text


@pytest.mark.parametrize("kind", [JsonlSink, CsvSink, TensorBoardSink])
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


def test_a_sink_that_fails_is_named():
    class Failing(ListSink):
        def write(self, row):
            raise ValueError("no")

    writer = MetricWriter([ListSink(), Failing()], Throughput(1, Clock(0.0)))
    writer.write_step(7, {"loss": jnp.float32(3)})
    with pytest.raises(ValueError, match="no") as caught:
        writer.close()
    assert caught.value.__notes__ == ["Failing could not take the row of step 7"]


def test_only_sinks_that_offer_it_are_told_to_sync():
    class Durable(ListSink):
        synced = 0

        def sync(self):
            self.synced += 1

    sinks = [ListSink(), Durable()]
    MetricWriter(sinks, Throughput(1)).sync()
    assert sinks[1].synced == 1


def test_memory_is_told_with_the_first_row_and_every_so_many_steps(monkeypatch):
    class Device:
        def __init__(self, peak):
            self.peak = peak

        def memory_stats(self):
            return self.peak and {"peak_bytes_in_use": self.peak, "bytes_in_use": 1}

    sink = ListSink()
    writer = MetricWriter([sink], Throughput(1), memory_every=5)
    for step in range(3, 12):
        writer.write_step(step, {"loss": jnp.float32(3)})
    writer.write({"step": 11, "eval_loss": 1.5})
    assert [r["step"] for r in sink.rows if "host_memory_bytes" in r] == [3, 5, 10]
    assert not any("device_memory_bytes" in r for r in sink.rows)  # CPU devices do not say
    assert 50e6 < sink.rows[0]["host_memory_bytes"] < 100e9
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(70), Device(90), Device(None)])
    assert memory_in_use()["device_memory_bytes"] == 90


# throughput

NO_SPEED = {"tokens_per_second": None}


def test_throughput_leaves_out_the_first_step_and_what_came_before_a_restart():
    # compile ends at 60 s, a step of 2 s, an evaluation from 62 to 162, a step of 4 s
    speed = Throughput(1000, Clock(60.0, 62.0, 162.0, 166.0))
    assert speed.mean is None
    assert speed.step_finished() == NO_SPEED
    assert speed.step_finished() == {"tokens_per_second": 500.0}
    speed.restart()
    assert speed.step_finished() == {"tokens_per_second": 250.0}
    assert speed.mean == pytest.approx(2000 / 6)


def test_a_restart_before_the_first_step_does_not_count_compiling():
    speed = Throughput(1000, Clock(60.0, 62.0))
    speed.restart()
    assert speed.step_finished() == NO_SPEED
    assert speed.step_finished() == {"tokens_per_second": 500.0}


def test_utilisation_is_the_share_of_the_peak():
    speed = Throughput(1000, Clock(0.0, 2.0), tokens_at_peak=4000.0)
    assert speed.step_finished() == {"tokens_per_second": None, "mfu": None}
    assert speed.step_finished() == {"tokens_per_second": 500.0, "mfu": 0.125}


@pytest.mark.parametrize(
    ("device_kind", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("cpu", None),
        ("NVIDIA A10G", None),  # not the A10
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),  # a slice
        ("Tesla V100-SXM2-16GB", None),  # has no bfloat16
    ],
)
def test_the_peak_of_a_device_is_the_published_one(device_kind, tflops):
    found = published_peak(device_kind)
    assert found is None if tflops is None else found == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize("tied", [False, True])
def test_model_flops_are_those_of_its_matrix_products(tied):
    """Six for every weight a token is multiplied with, and attention's two products, forward and twice backward."""
    model = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = make_config(
        {"model": model | {"head_dim": 8, "tie_word_embeddings": tied}, "data": {"sequence_length": 32}}
    )
    params = adapt(build_model(config.model, vocab_size=100)).params
    plan = make_plan(params, {"replica": 1, "data": 2, "tensor": 1}, config.zero, config.precision, optax.sgd(0.1))
    norms = 7 * 64
    products = 3 * (4 * 64 * 32 + 3 * 64 * 96) + 64 * 100
    work = 6 * (products + norms) + 3 * 12 * 32 * 32
    assert tokens_at_peak(config, plan, "TPU v4") == pytest.approx(2 * 275e12 / work)
    frozen = make_plan(params, plan.axis_sizes, config.zero, config.precision, optax.sgd(0.1), frozen=["layers/mlp/*"])
    assert tokens_at_peak(config, frozen, "TPU v4") == pytest.approx(2 * 275e12 / (work - 2 * 3 * 3 * 64 * 96))
    assert tokens_at_peak(config, plan, "cpu") is None
    said = make_config({"hardware": {"peak_flops": 1e10}, "log": {"flops_per_token": 1e4}})
    assert tokens_at_peak(said, plan, "TPU v4") == 2e6


# TensorBoard


def tensorboard_events(directory):
    """(tag, step, value) of each scalar, ("START", step, None) of each mark that hides what is there from
    step on.
    """
    return ((tag, step, value and value.simple_value) for tag, step, value in tensorboard_values(directory))


def tensorboard_values(directory):
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
                yield value.tag, event.step, value


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


def test_nothing_heavy_is_imported_for_those_who_do_not_ask_for_it():
    check = """
import sys
import jzero.metrics.__main__
print({"jax", "matplotlib"} & set(sys.modules))
import jzero.trainer
print({"tensorboardX", "wandb", "matplotlib"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\nset()\n"


def test_tensorboard_shows_a_histogram_as_one(tmp_path):
    counts = [0.0] * (len(HISTOGRAM_EDGES) - 1)
    counts[0], counts[5] = 3.0, 7.0
    sink = TensorBoardSink(tmp_path)
    sink.write(row(1, grad_histogram=counts))
    sink.close()
    (histogram,) = [value.histo for _, _, value in tensorboard_values(tmp_path) if value and value.HasField("histo")]
    assert (list(histogram.bucket), list(histogram.bucket_limit)) == (counts, list(HISTOGRAM_EDGES[1:]))
    assert (histogram.num, histogram.min, histogram.max) == (10, HISTOGRAM_EDGES[0], HISTOGRAM_EDGES[5 + 1])


# Weights & Biases


@pytest.fixture
def wandb_offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    return pytest.importorskip("wandb", reason="needs the extra wandb")


def wandb_records(run_dir):
    """(kind, content) of each record in the files that wait for `wandb sync`, oldest file first.

    A log of LevelDB's kind: blocks of 32 KiB, each piece behind a checksum, its length and whether more follows.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        data, position, record = path.read_bytes(), 7, b""
        while position + 7 <= len(data):
            if (rest := 32768 - position % 32768) < 7:
                position += rest
                continue
            _, length, piece = struct.unpack("<IHB", data[position : position + 7])
            record += data[position + 7 : position + 7 + length]
            position += 7 + length
            if piece in (1, 4):  # whole, or the last piece
                parsed = Record.FromString(record)
                kind = parsed.WhichOneof("record_type")
                yield kind, getattr(parsed, kind)
                record = b""


def test_a_resumed_run_goes_on_in_its_run_at_wandb(tmp_path, wandb_offline):
    counts = [1.0] * (len(HISTOGRAM_EDGES) - 1)
    for start, steps in ((0, (1, 2)), (2, (3,))):
        sink = WandbSink("team/project", tmp_path, {"zero": {"stage": 3}}, start)
        for step in steps:
            sink.write(row(step, loss=step / 3, tokens_per_second=None, grad_histogram=counts))
        sink.write({"step": steps[-1], "eval_loss": 0.5})
        sink.close()
    records = list(wandb_records(tmp_path))
    runs = [content for kind, content in records if kind == "run"]
    assert len({run.run_id for run in runs}) == 1
    assert {(run.entity, run.project) for run in runs} == {("team", "project")}
    assert json.loads(next(item.value_json for item in runs[0].config.update if item.key == "zero")) == {"stage": 3}
    rows = [
        {".".join([item.key, *item.nested_key]).strip("."): json.loads(item.value_json) for item in content.item}
        for kind, content in records
        if kind == "history"
    ]
    assert [(r["_step"], r["loss"], r.get("eval_loss")) for r in rows] == [
        (1, 1 / 3, None),
        (2, 2 / 3, 0.5),
        (3, 1.0, 0.5),
    ]
    assert rows[0]["grad_histogram.bins"] == list(HISTOGRAM_EDGES)
    assert "tokens_per_second" not in rows[0]
    before = (tmp_path / "wandb" / "run_id").read_text()
    assert before == runs[0].run_id
    WandbSink("project", tmp_path, {}).close()  # starts anew
    assert (tmp_path / "wandb" / "run_id").read_text() != before


def test_wandb_failing_under_way_is_one_warning(tmp_path, wandb_offline, monkeypatch, caplog):
    def fail(*args, **more):
        raise ConnectionResetError("Connection lost")

    logged = []
    log = lambda values, step: fail() if step == 5 else logged.append(step)
    run = SimpleNamespace(id="some", starting_step=3, log=log, finish=fail)  # it has steps 1 and 2 from before
    monkeypatch.setattr(wandb_offline, "init", lambda **more: run)
    sink = WandbSink("project", tmp_path, {})
    for step in range(1, 8):
        sink.write(row(step))
    sink.close()
    assert logged == [3, 4]
    assert [record.getMessage() for record in caplog.records] == [
        "W&B takes no more rows (Connection lost); the run goes on, metrics.jsonl has them all"
    ]


def test_wandb_that_cannot_start_is_told_with_the_way_out(tmp_path, wandb_offline, monkeypatch):
    def refuse(**more):
        raise wandb_offline.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb_offline, "init", refuse)
    with pytest.raises(ConfigError, match=r"log\.wandb = mine: .*No API key configured.*WANDB_MODE=offline"):
        WandbSink("mine", tmp_path, {})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"log\.wandb = mine: needs the package wandb, .* pip install wandb"):
        WandbSink("mine", tmp_path, {})


# the profiler


@pytest.mark.parametrize(
    ("steps", "start", "traced"),
    [
        (range(0), 0, []),
        (range(2, 4), 0, [2, 3]),
        (range(2, 4), 2, [3]),
        (range(2, 4), 3, []),
        (range(4, 9), 0, [4, 5]),
    ],
)
def test_the_profiler_traces_its_steps_and_no_others(tmp_path, monkeypatch, steps, start, traced):
    """Also of a run that starts or ends within them."""
    seen, tracing = [], []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: tracing.append(directory))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: tracing.remove(tmp_path))
    window = ProfilerWindow(tmp_path, steps)
    for step in range(start + 1, 6):
        window.step_begins(step)
        seen += [step] * len(tracing)
        window.step_ends(step, jnp.ones(()))
    window.close()
    assert (seen, tracing) == (traced, [])


def test_a_trace_is_on_file(tmp_path):
    window = ProfilerWindow(tmp_path / "profile", range(1, 2))
    window.step_begins(1)
    window.step_ends(1, jax.jit(lambda x: x + 1)(jnp.ones(8)))
    (trace,) = (tmp_path / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 1000


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
