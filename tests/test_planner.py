"""What the planner says: exact bytes, work and links, a recommendation with its reason, and files that hold it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import pytest
import toys
from rich.console import Console

import jzero
from jzero.blueprint import Blueprint
from jzero.config import load_config, make_config, with_fields
from jzero.config.hardware import HardwareConfig
from jzero.engine import Engine
from jzero.errors import ConfigError
from jzero.hardware import parse_devices
from jzero.metrics.flops import flops_per_token
from jzero.planner import main
from jzero.planning import abstract_batch, blueprint_of, recommend, search, stages
from jzero.planning.candidates import batch_plan
from jzero.planning.compiled import compile_step, compiled_record, compiled_report
from jzero.planning.links import crossing_share, traffic
from jzero.planning.prediction import state_bytes
from jzero.planning.recommendation import predict_config, what_would_fit
from jzero.planning.tables import assumptions, search_table
from jzero.planning.times import exposed
from jzero.planning.work import product_flops
from jzero.traffic import Transfer

REPOSITORY = Path(__file__).parent.parent
QUICKSTART = str(REPOSITORY / "configs" / "quickstart.yaml")
MODEL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY = {
    "model": {**MODEL, "max_position_embeddings": 16},
    "data": {"sequence_length": 16},
    "zero": {"min_shard_elements": 64},
    "train": {"global_batch_size": 32},
}


@pytest.fixture(autouse=True)
def _standard_promotion():
    """The built-in model's attention promotes inside, which strict promotion refuses in bfloat16."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def tiny(**sections: dict | str):
    tree = {name: dict(section) for name, section in TINY.items()}
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section} if isinstance(section, dict) else section
    return make_config(tree)


# bytes


STATES = [
    {"zero": {"stage": 2}, "precision": {"preset": "fp16"}, "train": {"accumulation_steps": 2, "ema_decay": 0.9}},
    {
        "zero": {"stage": 3, "group": "node", "optimizer_group": "all", "collectives": "explicit"},
        "mesh": {"replica": 2},
        "optimizer": {"name": "adafactor"},
    },
    {"zero": {"stage": 3}, "optimizer": {"name": "adamw8bit"}, "train": {"frozen": ["embed_tokens/*"]}},
]
MORE_STATES = [
    {"zero": {"stage": 1}, "precision": {"preset": "bf16"}},
    {"zero": {"stage": 0}},
    {"zero": {"stage": 3, "min_shard_elements": 0}, "precision": {"preset": "bf16", "moments": "bfloat16"}},
    {"zero": {"stage": 3, "group": "node"}, "mesh": {"replica": 2}, "optimizer": {"name": "lion"}},
    {"zero": {"stage": 2}, "optimizer": {"name": "muon"}, "precision": {"preset": "bf16"}},
    {"zero": {"stage": 1}, "optimizer": {"name": "schedule_free"}},
    {"zero": {"stage": 3}, "mesh": {"tensor": 2}, "optimizer": {"name": "sgd", "momentum": 0.0}},
]


@pytest.mark.parametrize(
    "sections",
    [*STATES, *(pytest.param(sections, marks=pytest.mark.slow) for sections in MORE_STATES)],
    ids=lambda sections: "-".join(str(value) for section in sections.values() for value in section.values()),
)
def test_predicted_state_is_what_lies_on_a_device(sections):
    config = tiny(**sections)
    prediction = predict_config(config, parse_devices("8", config.hardware))
    engine = Engine(blueprint_of(config, jax.devices()))
    state, held = prediction.state, toys.bytes_a_device
    assert sum(state.values()) == held(engine.state)
    assert state["parameters"] == held(engine.state.params)
    assert state["optimizer"] == held((engine.state.master, engine.state.opt_state))
    assert state.get("ema", 0) == held(engine.state.ema)
    counters = engine.state.step, engine.state.skipped, engine.state.skipped_in_a_row, engine.state.loss_scale
    assert state["counters"] == held(counters)
    assert sum(prediction.bytes.values()) == prediction.total
    rows = 32 // (engine.mesh.shape["replica"] * engine.mesh.shape["data"])
    assert prediction.bytes["batch"] == rows * 17 * 4


@pytest.mark.parametrize("stage", [1, 3])
def test_predicted_state_of_padded_leaves_and_other_models(stage):
    config = {"zero": {"stage": stage, "min_shard_elements": 0}}
    engine = jzero.initialize(toys.mlp, toys.square_loss, None, config, jax.devices()[:3])
    assert any(leaf.padded for leaf in engine.plan.params.values())
    assert state_bytes(engine.plan) == toys.bytes_a_device(engine.state)


def test_the_batch_is_the_trainers():
    within = tiny(data={"sequence_length": 16, "document_attention": True})
    shapes = {name: (array.shape, str(array.dtype)) for name, array in abstract_batch(within, 8).items()}
    marks = {"weights": ((32, 16), "bool"), "segments": ((32, 16), "int32"), "positions": ((32, 16), "int32")}
    assert shapes == {"tokens": ((32, 17), "int32"), **marks}
    from jzero.data import make_data

    data = make_data(within.data, seed=0, batch_size=32)
    (real,) = data.train_batches(0, 1)
    assert {name: (array.shape, str(array.dtype)) for name, array in real.items()} == shapes
    assert list(abstract_batch(tiny(), 8)) == ["tokens"]
    answers = {"source": "jsonl", "paths": ["a"], "prompt_field": "question", "answer_field": "answer"}
    assert list(abstract_batch(tiny(data=answers), 8)) == ["tokens", "weights"]


# work


def counted(blueprint: Blueprint, config) -> float:
    """FLOPs that one device runs, to those of the model on its share of the tokens."""
    program = blueprint.trace_step(abstract_batch(config, 8)).jaxpr
    tokens = 32 * config.data.sequence_length
    return product_flops(program, 8) / (flops_per_token(config.model, blueprint.plan, 16) * tokens / 8)


@pytest.mark.parametrize(("engine", "steps", "scanned"), [("xla", 1, True), ("xla", 2, False), ("explicit", 2, True)])
def test_work_is_the_models_without_rematerialisation_and_a_forward_pass_more_with_it(engine, steps, scanned):
    train = {"global_batch_size": 32, "accumulation_steps": steps}
    kept, again = (
        tiny(model={"remat": remat, "scan_layers": scanned}, zero={"collectives": engine}, train=train)
        for remat in ("none", "full")
    )
    plain = counted(blueprint_of(kept, 8), kept)
    assert plain == pytest.approx(1, abs=0.01)  # the scales of norms are counted there, and are no products
    # Of the blocks alone, and not their last product, whose result no gradient needs.
    assert 1.1 < counted(blueprint_of(again, 8), again) < 4 / 3


def test_attention_by_cudnn_is_planned_as_xlas():
    config = tiny(model={"attention": "cudnn", "head_dim": 16}, precision="bf16")
    prediction = predict_config(config, parse_devices("h100:8", config.hardware))
    assert "(model.attention = cudnn: less)" in assumptions(prediction)
    assert prediction.config.model.attention == "cudnn"


# links and time


@pytest.mark.parametrize(
    ("axes", "replica", "data", "per_node", "share"),
    [
        (("data",), 1, 8, 8, 0),  # one node
        (("data",), 1, 64, 8, 1 / 8),  # 8 of 64 hops
        (("data",), 8, 8, 8, 0),  # within nodes
        (("replica",), 8, 8, 8, 1),  # one of each node
        (("replica", "data"), 8, 8, 8, 1 / 8),
        (("data",), 2, 16, 8, 1 / 8),
        (("data",), 2, 6, 8, 1 / 3),  # a node ends within a ring
    ],
)
def test_share_of_a_ring_that_crosses_nodes(axes, replica, data, per_node, share):
    sizes = {"replica": replica, "data": data, "tensor": 1}
    assert crossing_share(axes, sizes, per_node) == pytest.approx(share)


def transfer(kind: str, elements: int, axes: tuple[str, ...], group: int) -> Transfer:
    return Transfer(kind, None, "backward", np.dtype("float32"), elements, axes, group, 3, 1)


def test_the_slower_link_sets_the_pace():
    cluster = parse_devices("h100:16", HardwareConfig())
    sizes = {"replica": 2, "data": 8, "tensor": 1}
    gather, reduce = transfer("all-gather", 8000, ("data",), 8), transfer("all-reduce", 1000, ("replica",), 2)
    both = traffic([gather, reduce], sizes, cluster)
    assert both.elements == 3 * 7000 + 3 * 1000
    assert (both.intra_bytes, both.inter_bytes, both.bytes) == (84000, 12000, 96000)
    assert both.seconds == pytest.approx(84000 / 450e9 + 12000 / 50e9)
    # A ring over all sends an eighth of its bytes across, over all cards of a node together: as fast as 400 GB/s.
    whole = traffic([transfer("all-gather", 16000, ("replica", "data"), 16)], sizes, cluster)
    assert whole.inter_bytes * 7 == whole.intra_bytes
    assert whole.seconds == pytest.approx(whole.bytes / 400e9)


def test_what_a_link_is_not_known_for_has_no_time():
    sizes = {"replica": 1, "data": 8, "tensor": 1}
    gather = transfer("all-gather", 8000, ("data",), 8)
    assert traffic([gather], sizes, parse_devices("8", HardwareConfig())).seconds is None
    assert traffic([], sizes, parse_devices("8", HardwareConfig())).seconds == 0
    within = parse_devices("8", HardwareConfig(intra_bandwidth=1e9))
    assert traffic([gather], sizes, within).seconds == pytest.approx(84000 / 1e9)


@pytest.mark.parametrize(
    ("communication", "compute", "overlap", "waiting"), [(2, 3, 0, 2), (2, 3, 1, 0), (2, 3, 0.5, 1), (8, 3, 1, 5)]
)
def test_what_does_not_hide_behind_compute_is_waited_for(communication, compute, overlap, waiting):
    assert exposed(communication, compute, overlap) == waiting


def test_a_prediction_of_a_cluster_adds_up():
    config = tiny(precision="bf16")
    cluster = parse_devices("h100:2x4", config.hardware)
    names, predictions = zip(
        *((s.name, predict_config(s.config, cluster)) for s in stages(config, cluster)), strict=True
    )
    assert names == ("0", "1", "2", "3 HSDP", "3")
    for prediction in predictions:
        times, hardware = prediction.times, cluster.hardware
        assert times.step == times.compute + times.update + times.exposed
        assert times.compute == pytest.approx(prediction.flops / (989.4e12 * 0.5))
        assert prediction.tokens_per_second == pytest.approx(32 * 16 / times.step)
        work = flops_per_token(config.model, prediction.plan, 16)
        assert prediction.mfu == pytest.approx(prediction.tokens_per_second * work / (8 * hardware.peak_flops))
    by_name = dict(zip(names, predictions, strict=True))
    assert by_name["3 HSDP"].engine == "explicit"  # auto's choice
    assert by_name["3 HSDP"].traffic.inter_bytes < by_name["3"].traffic.inter_bytes
    assert by_name["3 HSDP"].state["parameters"] > by_name["3"].state["parameters"]
    hidden = predict_config(with_fields(predictions[0].config, {"hardware.overlap": 1.0}), cluster).times
    assert hidden.exposed == max(0, hidden.communication - hidden.compute) < predictions[0].times.exposed


# recommendation

# 24 layers of 2048 and GPT-2's vocabulary, bf16: 1.3 billion parameters.
BILLION = {
    "model": {"family": "gpt2", "vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": 24}
    | {"num_attention_heads": 16},
    "data": {"sequence_length": 1024},
    "precision": "bf16",
    "train": {"global_batch_size": 32},
}


@cache
def billion():
    config = make_config(BILLION)
    cluster = parse_devices("a100-80:8", config.hardware)
    tried = stages(config, cluster)
    return tried, [predict_config(stage.config, cluster) for stage in tried]


def with_memory(predictions, size: float):
    return [
        replace(p, cluster=replace(p.cluster, hardware=replace(p.cluster.hardware, memory=size))) for p in predictions
    ]


def test_1_3_billion_parameters_on_8_devices_of_80_gb_need_no_sharding():
    tried, predictions = billion()
    assert predictions[0].plan.num_parameters == pytest.approx(1.3e9, rel=0.02)
    found = recommend(tried, predictions)
    assert found.number == 0
    assert "Plain data parallelism (stage 0) fits" in found.reason
    assert "of 60.00 GB usable" in found.reason


def test_as_memory_shrinks_the_smallest_sufficient_stage_grows():
    """Of a single micro-batch, stages 1 and 2 hold as much under `xla`: gradients are scattered where they arise."""
    tried, predictions = billion()
    totals = [prediction.total for prediction in predictions]
    assert totals == sorted(totals, reverse=True)
    number = None
    for memory in np.geomspace(1.1 * totals[0], 1.001 * totals[-1], 25):
        found = recommend(tried, with_memory(predictions, memory / 0.75))
        assert found.number == next(n for n, total in enumerate(totals) if total <= int(memory))
        if found.number != number and number is not None:
            assert f"Stage {found.number} is the smallest that fits" in found.reason
            assert f"stage {found.number - 1} takes" in found.reason
        number = found.number
    assert number == 3


def test_where_nothing_fits_it_says_what_would(monkeypatch):
    monkeypatch.setattr(
        "jzero.planning.recommendation.what_would_fit", lambda config, cluster: f"{config.zero.stage} would"
    )
    tried, predictions = billion()
    found = recommend(tried, with_memory(predictions, predictions[-1].total * 0.9 / 0.75))
    assert found.number is None
    assert found.reason.startswith("No stage fits: stage 3 takes ")
    assert found.reason.endswith("; 3 would.")


SMALLER = "train.micro_batch_size=1 train.accumulation_steps=8"
ALONE = "train.micro_batch_size=1 train.accumulation_steps=1"


# 2 GB of state on each of 8 devices, and for each row 1 GB kept or 0.2 GB recomputed, on devices of so much to use.
@pytest.mark.parametrize(
    ("remat", "rows", "usable", "told"),
    [
        ("none", 64, 5e9, f"it takes 3.00 GB with {SMALLER}"),
        ("none", 8, 2.5e9, "it takes 2.20 GB with model.remat=full"),
        ("none", 64, 2.5e9, f"it takes 2.20 GB with {SMALLER} model.remat=full"),
        ("full", 64, 1.3e9, "it takes 1.20 GB with train.micro_batch_size=1 train.accumulation_steps=4 on 16 devices"),
        ("full", 8, 0.5e9, f"it takes 450.00 MB with train.global_batch_size=64 {ALONE} on 64 devices"),
        ("full", 8, 0.1e9, "nor do 64 times as many devices help: take a smaller model or shorter rows"),
    ],
)
def test_the_mildest_change_that_fits_is_told(monkeypatch, remat, rows, usable, told):
    config = tiny(model={"remat": remat}, train={"global_batch_size": rows}, hardware={"memory": usable / 0.75})
    cluster = parse_devices("h100:8", config.hardware)
    real = predict_config(config, cluster)

    def made_up(config, cluster):
        micro = batch_plan(config, cluster.num_devices).micro_batch_size
        size = int(16e9 / cluster.num_devices + micro * (0.2e9 if config.model.remat == "full" else 1e9))
        foot = replace(real.footprint, activations=real.footprint.activations + size - real.total)
        return replace(real, config=config, cluster=cluster, footprint=foot)

    monkeypatch.setattr("jzero.planning.recommendation.predict_config", made_up)
    assert what_would_fit(config, cluster) == told


# search


@pytest.fixture
def quick(monkeypatch):
    """A search whose predictions are made up: memory rises with the micro-batch, what is kept and by accumulation,
    sharding lowers it; time rises with the number of micro-batches and what is computed again. The configs tried."""
    config = tiny(precision="bf16")
    real = predict_config(config, parse_devices("h100:8", config.hardware))
    tried = []

    def made_up(config, cluster):
        tried.append(config)
        micro, kept = config.train.micro_batch_size, ["full", "dots", "none"].index(config.model.remat)
        added_up = 6 * (config.train.accumulation_steps > 1)
        size = int(1e9 * (micro * (1 + kept) + added_up + 8 - 2 * config.zero.stage))
        shape = {"replica": config.mesh.replica, "data": cluster.num_devices // config.mesh.replica, "tensor": 1}
        foot = replace(real.footprint, activations=real.footprint.activations + size - real.total)
        times = replace(real.times, compute=3.0 - kept + 0.1 * config.train.accumulation_steps)
        plan = replace(real.plan, axis_sizes=shape)
        return replace(real, config=config, cluster=cluster, footprint=foot, times=times, plan=plan)

    monkeypatch.setattr("jzero.planning.ranking.predict_config", made_up)
    return tried


def ways(found):
    return [
        (c.zero.stage, c.mesh.replica, c.train.micro_batch_size, c.model.remat)
        for c in (getattr(one, "config", one) for one in found)
    ]


def test_search_tries_every_stage_batch_remat_and_mesh_and_ranks(quick):
    config = tiny(precision="bf16", train={"global_batch_size": 64})
    ranked = search(config, parse_devices("h100:4x2", config.hardware))
    # Within one, two or four groups of whole nodes, of 8 rows a device.
    assert len(set(ways(ranked))) == len(ranked) == (4 + 3 + 3) * 4 * 3
    speeds = [prediction.tokens_per_second for prediction in ranked]
    assert speeds == sorted(speeds, reverse=True)
    assert {(p.config.train.micro_batch_size, p.config.model.remat) for p in ranked[:10]} == {(8, "none")}
    assert ranked[0].config.zero.stage == 3  # of equally fast ones that of least memory
    console = Console(width=80, record=True)
    console.print(search_table(ranked))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert "120 ways that fit 8 h100 of 80 GB in 4 nodes, the 12 fastest shown" in lines[0]
    assert [cell.strip() for cell in lines[4].strip("│").split("│")][:4] == ["3", "1 x 8", "8 x 1", "none"]
    assert not any("…" in line for line in lines)
    for prediction in ranked:
        train = prediction.config.train
        assert train.micro_batch_size * train.accumulation_steps * 8 == train.global_batch_size == 64


def test_search_tries_no_more_than_it_needs_and_leaves_out_what_does_not_fit(quick):
    config = tiny(precision="bf16", train={"global_batch_size": 64}, hardware={"memory": 14e9 / 0.75})
    ranked = search(config, parse_devices("h100:8", config.hardware))
    remats = ("full", "dots", "none")
    everything = [(stage, 1, micro, kept) for stage in range(4) for micro in (1, 2, 4, 8) for kept in range(3)]
    fitting = {
        (stage, one, micro, remats[kept])
        for stage, one, micro, kept in everything
        if micro * (1 + kept) + 6 * (micro < 8) + 8 - 2 * stage <= 14
    }
    assert set(ways(ranked)) == fitting
    assert len(fitting) < len(quick) < len(everything)
    assert (0, 1, 4, "none") not in ways(quick)  # 2 rows, all kept, were too much already
    assert (1, 1, 8, "full") in fitting  # without accumulation, although half the rows with it do not fit
    assert (1, 1, 4, "full") not in fitting


def test_search_says_which_figures_it_misses():
    config = tiny(train={"global_batch_size": 8})
    with pytest.raises(
        ConfigError, match=r"8 leaves hardware\.memory, hardware\.peak_flops, .*bandwidth unknown; name"
    ):
        search(config, parse_devices("8", config.hardware))


# command line


def plan(capsys, *arguments: str) -> str:
    assert main(["--config", QUICKSTART, *arguments]) == 0
    return capsys.readouterr().out


def assert_matches(value, schema, path: str = "") -> None:
    """schema: a type or several, a list of one schema, a mapping of schemas, each name of which must be there."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), path
        for name, inner in schema.items():
            assert name in value, f"{path}.{name}"
            assert_matches(value[name], inner, f"{path}.{name}")
    elif isinstance(schema, list):
        assert isinstance(value, list), path
        assert value, path
        for number, item in enumerate(value):
            assert_matches(item, schema[0], f"{path}[{number}]")
    else:
        assert type(value) in (schema if isinstance(schema, tuple) else (schema,)), f"{path} = {value!r}"


NONE = type(None)
SCHEMA = {
    "parameters": int,
    "devices": int,
    "hardware": {"name": (str, NONE), "memory": (int, NONE), "peak_flops": (float, NONE)},
    "stages": [
        {
            "stage": int,
            "bytes": dict.fromkeys(
                ("parameters", "gradients", "optimizer", "gathered", "activations", "temporaries", "total"), int
            ),
            "sent_elements": int,
            "sent_bytes": int,
            "step_seconds": (float, NONE),
            "tokens_per_second": (float, NONE),
            "fits": (bool, NONE),
        }
    ],
    "recommended": {"stage": (int, NONE), "reason": str},
}


def test_json_of_devices_without_figures(capsys, tmp_path):
    file = tmp_path / "chosen.yaml"
    assert main(["--config", QUICKSTART, "--json", "runtime.fake_devices=null", "--write", str(file)]) == 2
    printed = capsys.readouterr()
    assert "nothing to write. The devices' memory is not known" in printed.err
    assert not file.exists()
    record = json.loads(printed.out)
    assert_matches(record, SCHEMA)
    assert (record["devices"], record["hardware"]["name"]) == (8, None)  # as many without --devices
    assert [stage["stage"] for stage in record["stages"]] == [0, 1, 2, 3]
    assert {stage["step_seconds"] for stage in record["stages"]} == {None}
    assert {stage["fits"] for stage in record["stages"]} == {None}
    assert record["recommended"]["stage"] is None
    assert "set hardware.memory" in record["recommended"]["reason"]


def test_json_picture_and_config_of_a_cluster(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    picture, file = tmp_path / "plan.png", tmp_path / "chosen.yaml"
    arguments = ("--devices", "h100:16", "hardware.memory=10e6")
    record = json.loads(plan(capsys, "--json", *arguments, "--plot", str(picture), "--write", str(file)))
    assert_matches(record, SCHEMA)
    assert [stage["name"] for stage in record["stages"]] == ["0", "1", "2", "3 HSDP", "3"]
    for stage in record["stages"]:
        parts = {tree: size for tree, size in stage["bytes"].items() if tree not in ("gradients", "total")}
        assert sum(parts.values()) == stage["bytes"]["total"]
        assert stage["fits"] == (stage["bytes"]["total"] <= 7.5e6)
        assert stage["step_seconds"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")

    chosen, given = load_config(file), load_config(QUICKSTART)
    assert chosen.zero.stage == record["recommended"]["stage"] > 0
    assert chosen.hardware.memory == 10e6
    assert chosen.runtime.fake_devices is None  # they stood for the real ones
    same = {"model", "data", "optimizer", "precision", "train", "checkpoint", "log"}
    assert chosen.model_dump(include=same) == given.model_dump(include=same)
    before = file.read_text()
    assert main(["--config", QUICKSTART, *arguments, "--write", str(file)]) == 2
    assert "is there already" in capsys.readouterr().err
    assert file.read_text() == before


@pytest.mark.slow
def test_tables_fit_80_columns_and_a_search_is_written(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "chosen.yaml"
    arguments = ("--devices", "h100:8", "--search", "train.global_batch_size=8", "model.num_hidden_layers=2")
    printed = plan(capsys, *arguments, "--write", str(file))
    assert max(len(line) for line in printed.splitlines() if not line.startswith("wrote ")) <= 80
    assert "…" not in printed
    for row in ("parameters", "optimizer", "activations", "total", "tokens/s", "GB/s for 75%"):
        assert f"│ {row}" in printed
    assert "Plain data parallelism (stage 0) fits" in printed
    assert "12 ways that fit 8 h100 of 80 GB" in printed
    first = next(line for line in printed.partition("ways that fit")[2].splitlines() if "│" in line)
    chosen = load_config(file)
    cells = [cell.strip() for cell in first.strip("│").split("│")]
    assert cells[:2] == [str(chosen.zero.stage), "1 x 8"]
    assert chosen.model.remat == cells[3] == "dots"  # no product is computed twice, with least memory


def test_of_several_nodes_tables_fit_80_columns_too(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "chosen.yaml"
    arguments = ("runtime.fake_devices=8", "hardware.memory=1e9", "--devices", "2x2", "--write", str(file))
    printed = plan(capsys, *arguments)
    assert "853,376 parameters, 4 devices of 1 GB in 2 nodes, 32 x 128 tokens" in printed
    assert load_config(file).runtime.fake_devices == 4  # those planned for
    assert max(len(line) for line in printed.splitlines() if not line.startswith("wrote ")) <= 80
    assert "…" not in printed
    assert "│ sent across" in printed


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--devices", "h10:8"), "did you mean h100:8?"),
        (("--devices", "h100:24"), "train.global_batch_size = 32: must be a multiple of 24 shards"),
        (("--write", "plan.txt"), "the suffix must be .yaml or .yml"),
        (("--write", "missing/plan.yaml"), "there is no directory missing"),
        (("--plot", "plan.txt"), "its ending must be one of"),
        (("zero.stage=4",), "zero.stage = 4"),
    ],
)
def test_mistakes_cost_a_message_and_exit_code_2(capsys, monkeypatch, tmp_path, arguments, told):
    monkeypatch.chdir(tmp_path)
    assert main(["--config", QUICKSTART, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert told in error
    assert not list(tmp_path.iterdir())


# --compile

SMALL = ["model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=2", "train.global_batch_size=8"]


def assert_compiled(record: dict, devices: int) -> None:
    compiled = record["compiled"]
    planned = next(stage for stage in record["stages"] if stage["name"] == str(compiled["stage"]))
    sizes, rest = compiled["bytes"], ("gathered", "activations", "temporaries", "gradients", "total")
    arguments = sum(size for tree, size in planned["bytes"].items() if tree not in rest)
    tiled = "TPU" in compiled["target"]  # XLA:TPU pads arrays to its tiles
    assert sizes["arguments"] >= arguments if tiled else sizes["arguments"] == arguments
    assert sizes["peak"] == sizes["arguments"] + sizes["temporaries"] + sizes["outputs"] - sizes["aliased"]
    assert {one["axes"][0] for one in compiled["collectives"] if one["axes"]} == {"data"}
    assert any(one["kind"] == "all-gather" and one["group"] == devices for one in compiled["collectives"])


def test_devices_without_a_name_are_of_the_configs_platform_and_not_compiled_for(capsys):
    arguments = ("runtime.fake_devices=null", "runtime.platform=gpu", "--devices", "8", "--compile")
    assert main(["--config", QUICKSTART, *arguments, *SMALL]) == 2
    assert "--compile needs to know the gpu: name it, as in --devices h100:8" in capsys.readouterr().err


def test_compile_reports_the_compilers_bytes_and_the_collectives(capsys):
    arguments = ("--devices", "2x4", "--compile", *SMALL, "zero.min_shard_elements=64")
    record = json.loads(plan(capsys, *arguments, "--json"))
    assert_compiled(record, 8)
    assert record["compiled"]["target"] == "8 cpu"
    assert {one["crosses_nodes"] for one in record["compiled"]["collectives"]} == {True}
    assert not any(finding["severity"] == "warning" for finding in record["compiled"]["findings"])


def test_compiling_for_what_is_not_installed_says_how_to_install_it(capsys):
    missing = [
        ("v5e:2x4", "jzero[tpu]", ["libtpu"]),
        ("h100:8", "jzero[gpu]", ["jax_cuda12_plugin", "jax_cuda13_plugin"]),
    ]
    for spec, extra, wheels in missing:
        if not any(map(find_spec, wheels)):
            assert main(["--config", QUICKSTART, "--devices", spec, "--compile", *SMALL]) == 2
            assert f"pip install '{extra}'" in capsys.readouterr().err


@pytest.mark.aot
@pytest.mark.parametrize(
    ("spec", "wheels"),
    [
        ("v5e:2x4", ["libtpu"]),
        ("h100:2x4", ["jax_cuda12_plugin", "jax_cuda13_plugin"]),
        ("a100-40:8", ["jax_cuda12_plugin"]),
    ],
)
def test_compile_for_absent_devices(capsys, spec, wheels):
    if not any(map(find_spec, wheels)):
        pytest.skip(f"{' or '.join(wheels)} is not installed")
    record = json.loads(plan(capsys, "--devices", spec, "--compile", "--json", *SMALL, "zero.min_shard_elements=64"))
    assert_compiled(record, 8)
    crossing = {one["crosses_nodes"] for one in record["compiled"]["collectives"]}
    assert crossing == {spec == "h100:2x4"}
    if "libtpu" not in wheels:  # XLA:TPU does not tell how often a loop runs
        sent = sum(one["sent_bytes"] for one in record["compiled"]["collectives"])
        planned = next(stage["sent_bytes"] for stage in record["stages"] if stage["name"] == "3")
        assert sent == pytest.approx(planned, abs=100)  # of a few numbers of loss and norm


def test_what_the_compiler_has_no_room_for_is_told(capsys, monkeypatch):
    def refuse(self, batch):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM, 19.91G of 15.75G\nand more")

    monkeypatch.setattr(Blueprint, "program", refuse)
    config = tiny()
    cluster = parse_devices("8", config.hardware)
    step, predicted = compile_step(config, cluster), predict_config(config, cluster)
    Console(width=300).print(compiled_report(step, predicted))
    printed = capsys.readouterr().out.strip()
    assert "it does not fit, predicted" in printed
    assert printed.endswith("RESOURCE_EXHAUSTED: Ran out of memory on HBM, 19.91G of 15.75G")
    assert "19.91G of 15.75G" in compiled_record(step, predicted)["refusal"]


# picture


def test_the_picture_shows_what_is_predicted():
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    from jzero.planning.plot import draw

    tried, predictions = billion()
    memory, time = draw([stage.name for stage in tried], predictions).axes
    tops = [sum(bar.get_height() for bar in bars) for bars in zip(*memory.containers, strict=True)]
    assert tops == pytest.approx([prediction.total / 1e9 for prediction in predictions], rel=0.005)
    assert [line.get_ydata()[0] for line in memory.lines] == pytest.approx([80, 60])
    tops = [sum(bar.get_height() for bar in bars) for bars in zip(*time.containers, strict=True)]
    assert tops == pytest.approx([prediction.times.step for prediction in predictions])


def test_no_accelerator_is_touched_whatever_the_shell_says(tmp_path):
    """A process of its own: with another's choice of platform in the environment, and no more devices than it has."""
    code = "import sys, jzero.planner as p; code = p.main(sys.argv[1:]); import jax; print(jax.default_backend(), code)"
    environment = os.environ | {"JAX_PLATFORMS": "cuda,cpu", "XLA_FLAGS": "", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", code, "--config", QUICKSTART, "--devices", "v5e:4x4", "train.global_batch_size=16"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "cpu 0", done.stderr
    assert "16 v5e of 16 GB" in done.stdout
    assert not list(tmp_path.iterdir())  # no data was read or cached
