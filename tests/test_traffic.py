"""What a step sends, told before compilation: the papers' volumes on meshes that are not here, and the programs' own.

`test_collectives.py` compares it with XLA:CPU programs of the explicit engine; here, with `pytest -m aot`, XLA:GPU
programs of both engines. A case is what its config overrides, after the quickstart's.
"""

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from programs import collectives
from test_aot import PLATFORMS

from jzero.blueprint import Blueprint, prepare
from jzero.config import load_config
from jzero.mesh import topology
from jzero.models import build_model
from jzero.traffic import Transfer, planned_transfers
from jzero.trainer import language_model_loss

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
ROWS, LENGTH, VOCAB, LAYERS = 64, 128, 320, 5
LAYER = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384  # queries and output, keys and values, MLP
MATRICES, TABLES = LAYERS * LAYER, 2 * VOCAB * 128
NODES = "mesh.replica=2 zero.group=node"


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # attention widens bfloat16
        yield


def blueprint(case: str, devices: Any) -> Blueprint:
    shape = [f"model.num_hidden_layers={LAYERS}", f"train.global_batch_size={ROWS}"]
    config = load_config(QUICKSTART, ["runtime.fake_devices=null", *shape, *case.split()])
    return prepare(build_model(config.model, VOCAB), language_model_loss, None, config, devices)


def batch() -> dict[str, jax.ShapeDtypeStruct]:
    return {"tokens": jax.ShapeDtypeStruct((ROWS, LENGTH + 1), np.int32)}


def told(case: str, devices: int = 8) -> list[Transfer]:
    made = blueprint(case, devices)
    return planned_transfers(made, made.trace_step(batch()).jaxpr)


def sent(transfers: list[Transfer]) -> Fraction:
    """Elements of matrices that a device sends in a step."""
    return sum((t.sent_elements for t in transfers if t.path and "norm" not in t.path), Fraction())


@pytest.mark.parametrize(("devices", "k"), [(8, 4), (64, 1)])
@pytest.mark.parametrize(
    ("engine", "stage", "volume"),
    [
        ("explicit", 0, lambda k: 2),
        ("explicit", 1, lambda k: 2),
        ("explicit", 2, lambda k: k + 1),
        ("explicit", 3, lambda k: 3 * k),
        ("xla", 0, lambda k: 2 * k),
        ("xla", 2, lambda k: k + 1),
        ("xla", 3, lambda k: 3 * k),
    ],
)
def test_the_volume_is_that_of_the_papers(engine, stage, volume, k, devices):
    """On devices that are not there. What stands outside of rematerialised blocks is gathered once at stage 3; under
    `xla` its gradients are added up over micro-batches at stage 0."""
    tables = volume(k) - k if stage == 3 else 2 if stage == 0 else volume(k)
    transfers = told(f"zero.collectives={engine} zero.stage={stage} train.accumulation_steps={k}", devices)
    assert sent(transfers) == Fraction((volume(k) * MATRICES + tables * TABLES) * (devices - 1), devices)
    assert {t.group for t in transfers} == {devices}


def test_a_transfer_tells_whose_it_is_and_when():
    transfers = told("zero.collectives=explicit train.accumulation_steps=2 precision=bf16")
    kernel = [t for t in transfers if t.path == "layers/mlp/up_proj/kernel"]
    assert [(t.kind, t.phase, t.dtype.name, t.loops, t.runs) for t in kernel] == [
        ("all-gather", "forward", "bfloat16", 2, 2 * LAYERS),
        ("all-gather", "backward", "bfloat16", 2, 2 * LAYERS),
        ("reduce-scatter", "backward", "bfloat16", 2, 2 * LAYERS),
    ]
    assert {(t.elements, t.axes, t.group) for t in kernel} == {(128 * 384, ("data",), 8)}
    assert [t.size for t in kernel] == [128 * 384, 128 * 384, 128 * 48]
    assert kernel[0].sent_bytes == 2 * 2 * LAYERS * 128 * 384 * 7 / 8
    wide = told("zero.collectives=explicit precision.preset=bf16 precision.reduce=float32")
    assert {t.dtype.name for t in wide if t.kind == "reduce-scatter"} == {"float32"}


def test_across_nodes_goes_a_shard():
    """HSDP on two nodes of four: within a node as at stage 3, across them the gradients' shards once a step."""
    transfers = told(f"zero.collectives=explicit {NODES} train.accumulation_steps=4")
    across = [t for t in transfers if t.path and "norm" not in t.path and "replica" in t.axes]
    assert {(t.kind, t.axes, t.runs) for t in across} == {("all-reduce", ("replica",), 1)}
    assert sent(across) == Fraction(MATRICES + TABLES, 4)


GPU = [
    *(f"zero.stage={stage} train.accumulation_steps={k}" for stage in range(4) for k in (1, 4)),
    *(f"zero.stage={stage} train.accumulation_steps=4 precision=bf16" for stage in (0, 1, 3)),
    *(f"zero.stage={stage} {NODES} train.accumulation_steps={k}" for stage in (1, 3) for k in (1, 4)),
    *(f"zero.stage={stage} {NODES} zero.optimizer_group=all precision=bf16" for stage in (1, 3)),
    "zero.stage=2 mesh.replica=2",
    "zero.stage=1 model.scan_layers=false train.accumulation_steps=4",
    "zero.stage=3 model.scan_layers=false",
    "zero.stage=3 model.remat=none",
    "zero.stage=2 model.tie_word_embeddings=true",
    "zero.stage=3 model.tie_word_embeddings=true train.accumulation_steps=2",
    "zero.stage=3 model.family=gpt2",
    "zero.stage=2 model.family=qwen precision=bf16 zero.min_shard_elements=10",
    "zero.stage=3 train.frozen=[layers/mlp/*] train.ema_decay=0.9 precision=fp16",
]


def volumes(found: Any) -> Counter[Any]:
    """(kind, dtype, devices together) and of gathers and reduce-scatters the size, how often a step; of all-reduces,
    which XLA:GPU joins, the elements in all. XLA:GPU peels iterations off loops."""
    summed: Counter[Any] = Counter()
    for kind, dtype, size, group, runs in found:
        if kind == "all-reduce":
            summed[kind, dtype, group] += size * runs
        else:
            summed[kind, dtype, group, size] += runs
    return summed


@pytest.mark.aot
@pytest.mark.parametrize("engine", ["xla", "explicit"])
@pytest.mark.parametrize("case", GPU)
@pytest.mark.parametrize(("platform", "name"), PLATFORMS[1:])
def test_what_is_told_is_what_a_gpu_program_does(platform, name, case, engine):
    case = f"{case} zero.collectives={engine}"
    text = blueprint(case, topology(platform, name)).lower_step(batch()).compile().as_text()
    dtypes = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "pred": "bool"}
    program = volumes((c.kind, dtypes[c.dtype], c.size, c.group, c.runs) for c in collectives(text))
    plan = volumes((t.kind, t.dtype.name, t.size, t.group, t.runs) for t in told(case) if t.path)
    for key in program | plan:
        # All-reduces carry the numbers of loss and norm too, a few for each parameter.
        scalars = 60 if key[0] == "all-reduce" else 0
        assert plan[key] <= program[key] <= plan[key] + scalars, key
