"""What comes of config files, overrides and mappings: one typed config, or every fault in plain words."""

import math
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from jzero.config import (
    BatchPlan,
    Config,
    DataConfig,
    MeshConfig,
    PrecisionConfig,
    TrainConfig,
    ZeroConfig,
    dump_config,
    load_config,
    make_config,
    plan_batch,
)
from jzero.config.section import subsections
from jzero.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write(text, name="config.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def faults(load, *args, **kwargs):
    """The lines of the ConfigError that a call must raise."""
    with pytest.raises(ConfigError) as caught:
        load(*args, **kwargs)
    return str(caught.value).splitlines()


# Reading


def test_three_formats_spell_one_config(write):
    yaml = write("zero: {stage: 2}\noptimizer:\n  learning_rate: 3e-4\ndata: {source: text, paths: [a, b]}\n")
    json = write(
        '{"zero": {"stage": 2}, "optimizer": {"learning_rate": 3e-4},\n\t"data":{"source":"text","paths":["a","b"]}}',
        "config.json",
    )
    toml = write(
        'zero.stage = 2\n[optimizer]\nlearning_rate = 3e-4\n[data]\nsource = "text"\npaths = ["a", "b"]\n',
        "config.toml",
    )
    expected = Config(
        zero=ZeroConfig(stage=2),
        optimizer={"learning_rate": 3e-4},
        data=DataConfig(source="text", paths=("a", "b")),
    )
    assert expected != Config()
    for path in (yaml, json, toml):
        assert load_config(path) == expected
        assert make_config(str(path)) == expected


@pytest.mark.parametrize("text", ["", "# only a comment\n", "{}"])
def test_an_empty_file_is_the_defaults(write, text):
    assert load_config(write(text)) == Config() == load_config(None) == make_config(None)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimizer.learning_rate=1e-5", 1e-5),
        ("optimizer.learning_rate='1e-5'", 1e-5),
        ("optimizer.weight_decay=1e-2", 0.01),
        ("optimizer.eps=1E-8", 1e-8),
        ("optimizer.learning_rate=3", 3.0),
        ("train.num_steps=1e3", 1000),
        ("train.num_steps='1e3'", 1000),
        ("train.num_steps=1_000", 1000),
        ("train.num_steps=0x10", 16),
        ("train.num_steps='12'", 12),
        ("zero.stage='2'", 2),
        ("train.sample_prompt='no'", "no"),
        ("train.sample_prompt=a=b", "a=b"),
        ("train.run_dir='2024'", "2024"),
        ("log.tensorboard=off", False),
        ("optimizer.clip_norm=null", None),
        ("runtime.xla_flags=[--xla_a=1, --xla_b]", ("--xla_a=1", "--xla_b")),
    ],
)
def test_values_are_read_as_meant(override, value):
    """L04: numbers in text form and integral floats are numbers, of the field's own type."""
    section, field = override.partition("=")[0].split(".")
    read = getattr(getattr(load_config(None, [override]), section), field)
    assert read == value
    assert type(read) is type(value)


def test_overrides_win_over_the_file_and_the_last_over_the_first(write):
    path = write("train: {num_steps: 5, seed: 7}\n")
    config = load_config(path, ["train.num_steps=6", "train.num_steps=8", "zero={stage: 1}", "zero.group=node"])
    assert (config.train.num_steps, config.train.seed) == (8, 7)
    assert config.zero == ZeroConfig(stage=1, group="node")


@pytest.mark.parametrize("override", ["train", "train.seed", "=3", "train.=3", ".seed=1", "train..seed=1"])
def test_an_override_without_name_or_value_is_refused(override):
    (line,) = faults(load_config, None, [override])
    assert f'override "{override}": must be section.field=value' in line


def test_interpolations_resolve_after_overrides(write, monkeypatch):
    monkeypatch.setenv("JZERO_TEST_NAME", "night")
    path = write(
        "train: {num_steps: 40, run_dir: 'runs/${oc.env:JZERO_TEST_NAME}'}\n"
        "optimizer: {decay_steps: '${train.num_steps}'}\n"
    )
    config = load_config(path, ["train.num_steps=50"])
    assert config.optimizer.decay_steps == 50
    assert config.train.run_dir == "runs/night"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "optimizer: {decay_steps: '${train.steps}'}",
            'optimizer.decay_steps = "${train.steps}": leads nowhere',
        ),
        ("data: {paths: ['${nowhere}'], source: text}", 'data.paths[0] = "${nowhere}": leads nowhere'),
        ("train: {run_dir: '???'}", 'train.run_dir = "???": must be given'),
        ("train: {run_dir: '${unclosed'}", "config.yaml: "),
        ("train: {sample_prompt: '${train.sample_prompt}'}", "train.sample_prompt = "),
    ],
)
def test_what_leads_nowhere_is_refused_by_name(write, text, told):
    (line,) = faults(load_config, write(text))
    assert told in line


# Files that cannot be read


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        (
            "c.yaml",
            "zero:\n  stage: 1\n  group: all\n  stage: 2\n",
            "zero.stage is given twice (lines 2 and 4)",
        ),
        (
            "c.yaml",
            "data:\n  mixture:\n  - {}\n  - weight: 1\n    weight: 2\n",
            "data.mixture[1].weight is given twice",
        ),
        ("c.yaml", "zero: {}\nmesh: {}\nzero: {}\n", "zero is given twice (lines 1 and 3)"),
        ("c.yaml", "zero:\n  stage: [1, 2\n", "not valid YAML (line 3)"),
        ("c.yaml", "zero: {stage: 1}\n  mesh: 3\n", "not valid YAML (line 2)"),
        ("c.yaml", "a: 1\n---\nb: 1\n", "not valid YAML (line 2)"),
        ("c.yaml", "train: {seed: !!python/object:os.system 1}\n", "not valid YAML (line 1)"),
        ("c.yaml", "- 1\n- 2\n", "must be a mapping of sections"),
        ("c.yaml", "zero", "must be a mapping of sections"),
        ("c.yaml", "train:\n  seed: 010\n", "train.seed = 010 (line 2): YAML reads this in base 8 or 60"),
        ("c.yaml", "train: {num_steps: 1:30}\n", "train.num_steps = 1:30 (line 1)"),
        ("c.yaml", "null: 3\n", "NoneType"),
        ("c.yaml", "train: &loop {seed: *loop}\n", "a YAML anchor contains itself"),
        (
            "c.json",
            '{"zero": {"stage": 1,\n "stage": 2}}',
            "stage is given twice in one object (lines 1 and 2)",
        ),
        ("c.json", '{"zero": {"stage": 1,}\n}', "not valid JSON (line 1)"),
        ("c.json", '{\n// words\n"zero": 1}', "not valid JSON (line 2)"),
        ("c.json", "[1]", "must be a mapping of sections"),
        ("c.toml", "[zero]\nstage = 1\nstage = 2\n", "line 3"),
        ("c.toml", "[zero]\nstage = \n", "line 2"),
        ("c.toml", "[train]\nseed = 2024-01-01\n", "train.seed"),
        ("c.ini", "", "the suffix must be one of .yaml, .yml, .json, .toml"),
    ],
)
def test_syntax_and_duplicates_are_told_with_their_place(write, name, text, told):
    (line,) = faults(load_config, write(text, name))
    assert told in line
    assert name in line or "train.seed" in line


def test_unreadable_files_are_named(tmp_path):
    (line,) = faults(load_config, tmp_path / "none.yaml")
    assert line == f"{tmp_path / 'none.yaml'}: cannot be read: No such file or directory"
    (tmp_path / "latin.yaml").write_bytes(b"train: {run_dir: \xe9}")
    (line,) = faults(load_config, tmp_path / "latin.yaml")
    assert "byte 17 is not UTF-8" in line


# Faults


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ({"train": {"num_step": 3}}, "train.num_step = 3: unknown key; did you mean train.num_steps?"),
        ({"learning_rate": 3}, "learning_rate = 3: unknown key; did you mean optimizer.learning_rate?"),
        (
            {"train": {"learning_rate": 3}},
            "train.learning_rate = 3: unknown key; did you mean optimizer.learning_rate?",
        ),
        ({"optimiser": {"b1": 0}}, 'optimiser = {"b1": 0}: unknown key; did you mean optimizer?'),
        (
            {"model": {"warmup_step": 1}},
            "model.warmup_step = 1: unknown key; did you mean optimizer.warmup_steps?",
        ),
        ({"gradient_accumulation_steps": 2}, "did you mean train.accumulation_steps?"),
        ({"zero": {"stag": None}}, "zero.stag = null: unknown key; did you mean zero.stage?"),
        ({"precision": {"param": "float32"}}, "did you mean precision.params?"),
        ({"zero.stage": 3}, "zero.stage = 3: unknown key; did you mean zero: {stage: ...}?"),
        ({"mesh": {"qqq": 1}}, "mesh.qqq = 1: unknown key; mesh has replica, data, tensor"),
        ({"qqq": {}}, "qqq = {}: unknown key; a config has model, data, mesh"),
        ({1: 2}, "1 = 2: unknown key"),
        (
            {"log": {"peak_flops": 1e12}},
            "log.peak_flops = 1000000000000.0: unknown key; did you mean hardware.peak_flops?",
        ),
        (
            {"data": {"source": "mixture", "mixture": [{}, {"wight": 2}]}},
            "data.mixture[1].wight = 2: unknown key; did you mean data.mixture[1].weight?",
        ),
        ({"data": {"source": "mixture", "mixture": [{"tokenizer": "a"}]}}, "did you mean data.tokenizer?"),
    ],
)
def test_an_unknown_key_is_refused_with_its_nearest_relative(tree, told):
    """L01: a mistyped key never does nothing."""
    (line,) = faults(make_config, tree)
    assert told in line


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.num_steps=abc", 'train.num_steps = "abc": must be a whole number, for example 300'),
        ("train.num_steps=1.5", "train.num_steps = 1.5: must be a whole number, for example 300"),
        ("train.num_steps=0", "train.num_steps = 0: must be at least 1, for example 300"),
        ("train.num_steps=yes", "train.num_steps = true: must be a whole number, for example 300"),
        ("train.num_steps=", "train.num_steps = null: must be a whole number, for example 300"),
        ("train.seed=-1", "train.seed = -1: must be at least 0, for example 0"),
        ("train.seed=4294967296", "train.seed = 4294967296: must be less than 4294967296, for example 0"),
        ("model.vocab_size=0", "model.vocab_size = 0: must be at least 1 or null"),
        (
            "optimizer.learning_rate=fast",
            'optimizer.learning_rate = "fast": must be a number, for example 0.001',
        ),
        (
            "optimizer.learning_rate=no",
            "optimizer.learning_rate = false: must be a number, for example 0.001",
        ),
        (
            "optimizer.learning_rate=.nan",
            "optimizer.learning_rate = NaN: must be a finite number, for example 0.001",
        ),
        ("optimizer.clip_norm=0", "optimizer.clip_norm = 0: must be more than 0 or null, for example 1.0"),
        ("optimizer.b1=1", "optimizer.b1 = 1: must be less than 1, for example 0.9"),
        ("optimizer.name=AdamW", "'schedule_free' or 'adamw8bit'; did you mean adamw?"),
        ("zero.stage=4", "zero.stage = 4: must be 0, 1, 2 or 3, for example 3"),
        ("zero.stage=yes", "zero.stage = true: "),
        ("log.tensorboard='true'", 'log.tensorboard = "true": must be true or false; remove the quotes'),
        ("log.tensorboard=1", "log.tensorboard = 1: must be true or false"),
        ("precision.params=no", "must be 'float32', 'bfloat16' or 'float16'; YAML reads a bare yes, no, on or off"),
        ("precision.accumulate=float16", "precision.accumulate = \"float16\": must be 'float32' or 'bfloat16'"),
        ("precision.params=null", "precision.params = null: must be 'float32', 'bfloat16' or 'float16'"),
        ("precision=bf17", "precision.preset = \"bf17\": must be 'fp32', 'bf16' or 'fp16'; did you mean bf16?"),
        ("train.run_dir=2024", "train.run_dir = 2024: must be text; put it in quotes"),
        ("data.paths=a.txt", 'data.paths = "a.txt": must be a list, such as [a, b]'),
        ("data.paths=[a, 3]", "data.paths[1] = 3: must be text"),
        (
            "runtime.xla_flags=[xla_a]",
            'runtime.xla_flags[0] = "xla_a": must be one flag such as --xla_dump_to=DIR',
        ),
        ("hardware.memory=0", "hardware.memory = 0: must be more than 0 or null"),
        ("hardware.headroom=1", "hardware.headroom = 1: must be less than 1, for example 0.25"),
        ("hardware.overlap=1.5", "hardware.overlap = 1.5: must be at most 1, for example 0.0"),
        ("mesh.data=0", "mesh.data = 0: must be at least 1, or -1 for all the devices that remain"),
        ("data={source: mixture, mixture: {a: 1}}", 'data.mixture = {"a": 1}: must be a list'),
        ("data={source: mixture, mixture: [{}, 4]}", "data.mixture[1] = 4: must be a mapping, such as {source: ...}"),
        ("data={source: mixture, mixture: [{}, {weight: 0}]}", "data.mixture[1].weight = 0: must be more than 0"),
        ("data={source: mixture, mixture: [{source: text}]}", "data.mixture[0].paths = []: data.mixture[0].source ="),
        ("mesh=3", "mesh = 3: must be a mapping, such as {replica: ...}"),
        ("mesh=null", "mesh = null: must be a mapping, such as {replica: ...}"),
    ],
)
def test_a_wrong_value_is_told_with_path_value_and_remedy(override, told):
    (line,) = faults(load_config, None, [override])
    assert told in line


TEXT_FIELDS = ["run_dir", "sample_prompt", "cache_dir", "text_field", "prompt_field", "answer_field"]
TEXT_FIELDS += ["tokenizer", "end_token", "start_from", "wandb"]


@pytest.mark.parametrize("section", subsections(Config))
def test_auto_reaches_no_arithmetic(section):
    """L03: 'auto' is a value where the field says so, else refused at load with the key's path."""
    for field, info in subsections(Config)[section].model_fields.items():
        if "auto" in (info.default, *get_args(info.annotation)) or field in TEXT_FIELDS:
            continue  # auto is a choice here, or text like any other
        lines = faults(make_config, {section: {field: "auto"}})
        assert any(line.startswith(f'{section}.{field} = "auto": must be') for line in lines)
        assert any("there is no auto here" in line for line in lines)


JUNK = [
    None,
    True,
    -7,
    0,
    3,
    10**30,
    0.5,
    math.nan,
    -math.inf,
    "",
    "junk",
    "???",
    [],
    [None],
    {},
    {"a": 1},
    b"\xff",
]


@pytest.mark.parametrize("section", subsections(Config))
def test_whatever_a_field_is_given_the_answer_is_a_config_or_our_own_words(section):
    refused = 0
    for field in subsections(Config)[section].model_fields:
        for value in JUNK:
            tree = {section: {field: value}}
            try:
                assert make_config(tree) == make_config(tree)
            except ConfigError as error:
                told = str(error)
                refused += 1
            else:
                continue
            assert f"{section}.{field}" in told
            assert not any(word in told for word in ("pydantic", "http", "Input should"))
    assert refused > 5


JSONL, TOKENS = {"source": "jsonl", "paths": ["a"]}, {"source": "tokens", "paths": ["a"]}
KV, HEADS = "num_key_value_heads", "num_attention_heads"
DEVICE_COUNT = "--xla_force_host_platform_device_count"


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        (
            {"model": {KV: 3}},
            f"model.{KV} = 3: must divide model.{HEADS} = 4; set model.{KV}: 1 or 2 or 4",
        ),
        (
            {"model": {HEADS: 6}},
            f"model.{HEADS} = 6: must divide model.hidden_size = 128; set it to 4 or 8, or give",
        ),
        ({"model": {"head_dim": 5}}, "model.head_dim = 5: must be even"),
        (
            {"model": {"hidden_size": 12}},
            "model.head_dim = 3 (hidden_size 12 / num_attention_heads 4): must be even",
        ),
        ({"data": {"source": "text"}}, "data.paths = []: data.source = text needs files"),
        (
            {"data": {"paths": ["a"]}},
            'data.paths = ["a"]: not read by data.source = stdlib; set data.source: text',
        ),
        ({"data": {"synthetic_tokens": 5}}, "data.synthetic_tokens = 5: not read by data.source = stdlib"),
        ({"data": {"source": "mixture"}}, "data.mixture = []: data.source = mixture needs parts, such as data.mixture"),
        ({"data": {"mixture": [{}]}}, "data.mixture: not read by data.source = stdlib; set data.source: mixture"),
        (
            {"data": {"source": "mixture", "mixture": [{}, {"source": "mixture"}]}},
            "data.mixture[1].source = mixture: a mixture has no mixtures within",
        ),
        (
            {"data": {"source": "jsonl", "paths": ["a"], "answer_field": "a"}},
            "data.answer_field = a: needs data.prompt_field beside it",
        ),
        (
            {"data": {**JSONL, "prompt_field": "q", "answer_field": "a", "text_field": "t"}},
            "data.text_field = t: not read beside data.prompt_field",
        ),
        ({"data": {"dtype": "uint8"}}, 'data.dtype = "uint8": not read by data.source = stdlib; drop it'),
        ({"data": {"tokenizer": None}, "model": {"vocab_size": 9}}, "data.tokenizer = null: data.source = stdlib is"),
        ({"data": {**TOKENS, "tokenizer": None}}, "model.vocab_size = null: data.tokenizer = null has no vocabulary"),
        (
            {"data": {**TOKENS, "tokenizer": None, "end_token_id": 9}, "model": {"vocab_size": 9}},
            "data.end_token_id = 9: must be less than model.vocab_size = 9",
        ),
        ({"data": {"end_token_id": 1}}, "data.end_token_id = 1: data.tokenizer = bytes has an end of its own"),
        ({"data": {"end_token": "</s>"}}, 'data.end_token = </s>: not read by data.tokenizer = "bytes"'),
        (
            {"data": {"sequence_length": 4096}},
            "data.sequence_length = 4096: longer than model.max_position_embeddings = 2048",
        ),
        ({"mesh": {"tensor": -1}}, "mesh.tensor = -1: mesh.data is -1 already"),
        (
            {"zero": {"optimizer_group": "node"}},
            "zero.optimizer_group = node: cannot be narrower than zero.group = all",
        ),
        (
            {"precision": {"master": "bfloat16"}},
            "precision.master = bfloat16: is narrower than precision.params = float32",
        ),
        (
            {"optimizer": {"warmup_steps": 301}},
            "optimizer.warmup_steps = 301: longer than train.num_steps = 300",
        ),
        (
            {"optimizer": {"warmup_steps": 30, "decay_steps": 20}},
            "optimizer.warmup_steps = 30: longer than optimizer.decay_steps = 20",
        ),
        (
            {"optimizer": {"name": "sgd", "b1": 0.8}},
            "optimizer.b1 = 0.8: not read by optimizer.name = sgd; drop it, or set optimizer.name",
        ),
        ({"optimizer": {"momentum": 0.5}}, "optimizer.momentum = 0.5: not read by optimizer.name = adamw"),
        (
            {"optimizer": {"schedule": "constant", "decay_steps": 9}},
            "optimizer.decay_steps = 9: not read by optimizer.schedule = constant",
        ),
        (
            {"train": {"global_batch_size": None}},
            "train.global_batch_size = null: give train.global_batch_size or train.micro_batch_size",
        ),
        (
            {"train": {"global_batch_size": 8, "micro_batch_size": 3}},
            "train.global_batch_size = 8: must be a multiple of train.micro_batch_size (3); "
            "set train.global_batch_size: 6 or 9, or train.micro_batch_size: 2 or 4",
        ),
        (
            {"runtime": {"platform": "gpu", "fake_devices": 8}},
            "runtime.fake_devices = 8: only CPU devices can be fake, and runtime.platform = gpu",
        ),
        ({"runtime": {"platform": "tpu", "fake_devices": 8}}, "runtime.platform = tpu"),
        (
            {"runtime": {"fake_devices": 8, "xla_flags": [f"{DEVICE_COUNT}=4"]}},
            "the device count is runtime.fake_devices = 8 already",
        ),
        (
            {"model": {"attention": "cudnn"}, "precision": "bf16", "runtime": {"fake_devices": 8}},
            "model.attention = cudnn: runs on GPUs only, and the platform is cpu",
        ),
        ({"model": {"attention": "cudnn"}}, "model.attention = cudnn: has no float32 kernels"),
        ({"log": {"profile_steps": 5}}, "log.profile_steps = 5: not read without log.profile_start"),
        ({"log": {"profile_start": 301}}, "log.profile_start = 301: after the last step, train.num_steps = 300"),
        ({"log": {"wandb": "team/"}}, 'log.wandb = "team/": '),
    ],
)
def test_fields_that_contradict_each_other_are_told_with_both_numbers(tree, told):
    (line,) = faults(make_config, tree)
    assert told in line


@pytest.mark.parametrize(
    "tree",
    [
        {"model": {"num_attention_heads": 6, "head_dim": 8, "num_key_value_heads": 2}},
        {"zero": {"group": "node", "optimizer_group": "all"}},
        {"zero": {"optimizer_group": "all"}},
        {"optimizer": {"warmup_steps": 300}},
        {"mesh": {"data": 4, "tensor": -1}},
        {"runtime": {"platform": "cpu", "fake_devices": 8}},
        {"model": {"attention": "cudnn"}, "precision": "bf16"},
        {"data": {"source": "synthetic", "synthetic_tokens": 5}},
        {"data": {"source": "text", "paths": ["a", "b*"]}},
        {"log": {"profile_start": 300, "profile_steps": 5, "wandb": "team/project", "grad_norms": ["layers/*"]}},
        {"data": {**JSONL, "prompt_field": "q", "answer_field": "a"}},
        {"data": {**TOKENS, "tokenizer": None, "end_token_id": 8}, "model": {"vocab_size": 9}},
        {"data": {**JSONL, "tokenizer": "tokenizer.json", "end_token": "</s>"}},
    ],
)
def test_neighbours_of_the_refused_are_accepted(tree):
    config = make_config(tree)
    for section, fields in tree.items():
        for field, value in fields.items() if isinstance(fields, dict) else []:
            assert getattr(getattr(config, section), field) == (tuple(value) if isinstance(value, list) else value)


def test_all_faults_of_file_and_overrides_come_at_once(write):
    path = write(
        "learning_rate: 3\n"
        "train: {num_steps: abc, global_batch_size: 8, micro_batch_size: 3, run_dir: '???'}\n"
        "model: {num_key_value_heads: 3, hidden_sise: 4}\n"
        "mesh: 4\n"
    )
    lines = faults(load_config, path, ["nonsense", "zero.stage=7", "optimizer.warmup_steps=1e4"])
    paths = [line.split()[0] for line in lines]
    assert sorted(paths) == [
        "learning_rate",
        "mesh",
        "model.hidden_sise",
        "model.num_key_value_heads",
        "override",
        "train.global_batch_size",
        "train.num_steps",
        "train.run_dir",
        "zero.stage",
    ]
    # The warm-up is judged against num_steps only when num_steps is a number.
    lines = faults(load_config, None, ["train.num_steps=20", "optimizer.warmup_steps=1e4", "zero.stage=7"])
    assert [line.split()[0] for line in lines] == ["zero.stage", "optimizer.warmup_steps"]


@pytest.mark.parametrize(
    "build",
    [
        lambda: MeshConfig(data=0),
        lambda: Config(mesh={"data": 0}),
        lambda: Config(mesh=MeshConfig(data=0)),
        lambda: make_config({"mesh": {"data": 0}}),
        lambda: load_config(None, ["mesh.data=0"]),
    ],
)
def test_every_way_to_build_a_config_checks_alike(build):
    (line,) = faults(build)
    assert line.startswith("mesh.data = 0: must be at least 1")


def test_python_values_are_taken_as_they_are(tmp_path):
    config = make_config(
        {
            "train": TrainConfig(seed=3, run_dir=tmp_path),
            "data": {"source": "text", "paths": [tmp_path / "a"], "sequence_length": np.int64(16)},
            "optimizer": {"learning_rate": np.float32(0.5)},
        }
    )
    assert config.train.run_dir == str(tmp_path)
    assert config.data.paths == (str(tmp_path / "a"),)
    assert type(config.data.sequence_length) is int
    assert type(config.optimizer.learning_rate) is float
    assert make_config(config) is config


def test_a_config_cannot_change_and_can_be_a_key():
    config = Config()
    with pytest.raises(ValueError, match="frozen"):
        config.zero.stage = 1  # pyright: ignore
    assert {config: 1}[Config()] == 1


# Precision


@pytest.mark.parametrize(
    ("given", "params", "compute", "master"),
    [
        ("fp32", "float32", "float32", None),
        ("bf16", "bfloat16", "bfloat16", "float32"),
        ({}, "float32", "float32", None),
        ({"preset": "bf16", "master": None}, "bfloat16", "bfloat16", None),
        ("fp16", "float16", "float16", "float32"),
        ({"params": "float16"}, "float16", "float32", "float32"),
        ({"compute": "bfloat16"}, "float32", "bfloat16", None),
        ({"params": "bfloat16", "master": "float32"}, "bfloat16", "float32", "float32"),
        # Updates of bfloat16 parameters are lost without a master: only the word null asks for that.
        ({"params": "bfloat16"}, "bfloat16", "float32", "float32"),
        ({"params": "bfloat16", "master": None}, "bfloat16", "float32", None),
        # Parameters as wide as the preset's master copy need no copy.
        ({"preset": "bf16", "params": "float32"}, "float32", "bfloat16", None),
    ],
)
def test_a_preset_fills_what_is_not_given(given, params, compute, master):
    precision = make_config({"precision": given}).precision
    assert (precision.params, precision.compute, precision.master) == (params, compute, master)
    assert precision.accumulate == "float32"


def test_single_fields_override_a_preset_named_by_a_word(write):
    path = write("precision: bf16\n")
    precision = load_config(path, ["precision.accumulate=bfloat16"]).precision
    assert precision == PrecisionConfig(preset="bf16", accumulate="bfloat16")
    assert precision.params == "bfloat16"
    assert load_config(path, ["precision=fp32"]).precision == PrecisionConfig()


# Dump


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"precision": "bf16", "zero": {"stage": 1, "optimizer_group": "all"}},
        {"precision": {"preset": "bf16", "master": None}},
        {"train": {"micro_batch_size": 4, "accumulation_steps": 2}},
        {"train": {"global_batch_size": 64, "accumulation_steps": 2}},
        {"optimizer": {"learning_rate": 1e-7, "clip_norm": None, "eps": 3e-30}},
        {"data": {"source": "mixture", "mixture": [{"weight": 2}, {"source": "text", "paths": ["a"]}]}},
        {"runtime": {"fake_devices": 3, "xla_flags": ["--xla_a=1", "--xla_b"]}},
        *(
            {"train": {"sample_prompt": text}, "data": {"source": "text", "paths": [text]}}
            for text in (
                "no",
                "1e-5",
                "010",
                "1:30",
                "null",
                "",
                "a: b",
                "${x}",
                r"\${x",
                "é\n \t",
                "#",
                "'\"",
            )
        ),
    ],
)
def test_a_dump_loads_back_equal(write, tree):
    config = make_config(tree)
    text = dump_config(config)
    again = load_config(write(text))
    assert again == config
    assert plan_batch(again.train, 2) == plan_batch(config.train, 2)
    assert dump_config(again) == text


def test_a_dump_names_every_field_in_order():
    lines = dump_config(Config()).splitlines()
    names = [line.strip(" '").partition(":")[0] for line in lines]
    expected = []
    for section, kind in subsections(Config).items():
        expected += [section, *kind.model_fields]
    assert names == expected
    assert "  vocab_size: null" in lines


# Batch


@pytest.mark.parametrize(
    ("whole", "micro", "steps", "shards", "expected"),
    [
        # L02: all subsets of {8, 2, 2} on 2 shards that settle something
        (8, None, None, 2, (8, 4, 1)),
        (None, 2, None, 2, (4, 2, 1)),
        (8, 2, None, 2, (8, 2, 2)),
        (8, None, 2, 2, (8, 2, 2)),
        (None, 2, 2, 2, (8, 2, 2)),
        (8, 2, 2, 2, (8, 2, 2)),
        # DeepSpeed's examples on 8
        (32, None, None, 8, (32, 4, 1)),
        (64, 4, None, 8, (64, 4, 2)),
        (None, 2, 3, 8, (48, 2, 3)),
        (6, None, None, 3, (6, 2, 1)),
    ],
)
def test_two_batch_sizes_give_the_third(whole, micro, steps, shards, expected):
    train = TrainConfig(global_batch_size=whole, micro_batch_size=micro, accumulation_steps=steps)
    assert plan_batch(train, shards) == BatchPlan(*expected)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (32, 4, 1)),
        ({"accumulation_steps": 2}, (32, 2, 2)),
        ({"micro_batch_size": 3}, (24, 3, 1)),
        ({"micro_batch_size": 3, "accumulation_steps": 5}, (120, 3, 5)),
        ({"micro_batch_size": 3, "global_batch_size": 48}, (48, 3, 2)),
    ],
)
def test_the_default_global_batch_yields_to_a_given_micro_batch(given, expected):
    assert plan_batch(make_config({"train": given}).train, 8) == BatchPlan(*expected)


@pytest.mark.parametrize(
    ("whole", "micro", "steps", "shards", "told"),
    [
        (30, None, None, 8, "train.global_batch_size = 30: must be a multiple of 8 shards; set X: 24 or 32"),
        (7, None, None, 2, "train.global_batch_size = 7: must be a multiple of 2 shards; set X: 6 or 8"),
        (5, None, None, 8, "train.global_batch_size = 5: must be a multiple of 8 shards; set X: 8"),
        (24, 2, 3, 2, "must be M (2) * A (3) * 2 shards = 12; set X: 12, or M: 4, or A: 6"),
        (48, 4, None, 8, "must be a multiple of M (4) * 8 shards = 32; set X: 32 or 64, or M: 3 or 6"),
        (48, None, 4, 8, "must be a multiple of A (4) * 8 shards = 32; set X: 32 or 64, or A: 3 or 6"),
        (10**12, 10**6, None, 3, "set X: 999999000000 or 1000002000000"),
    ],
)  # fmt: skip
def test_batch_sizes_that_do_not_multiply_up_are_told_with_the_nearest_that_do(whole, micro, steps, shards, told):
    train = TrainConfig(global_batch_size=whole, micro_batch_size=micro, accumulation_steps=steps)
    (line,) = faults(plan_batch, train, shards)
    short = {
        "set train.global_batch_size": "set X",
        "train.micro_batch_size": "M",
        "train.accumulation_steps": "A",
    }
    for name, letter in short.items():
        line = line.replace(name, letter)
    assert told in line


def test_a_default_is_called_a_default():
    (line,) = faults(plan_batch, TrainConfig(), 24)
    assert line.startswith("train.global_batch_size = 32 (the default): must be a multiple of 24 shards")


def test_every_remedy_for_a_batch_works():
    """Each number that the message proposes settles the batch when put in place alone."""
    given = {"global_batch_size": 48, "micro_batch_size": 4}
    (line,) = faults(plan_batch, TrainConfig(**given), 8)
    remedies = [fix.split(": ") for fix in line.partition("; set ")[2].split(", or ")]
    assert len(remedies) == 2
    for field, numbers in remedies:
        for number in numbers.split(" or "):
            plan = plan_batch(TrainConfig(**{**given, field.removeprefix("train."): int(number)}), 8)
            assert plan.global_batch_size == plan.micro_batch_size * plan.accumulation_steps * 8


# Import


def test_the_config_is_light():
    """Tools that only read configs start no JAX; the YAML reader comes with the first file."""
    heavy = ("jax", "numpy", "omegaconf", "yaml")
    code = f"import sys, jzero.config; print([name for name in {heavy} if name in sys.modules])"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
