"""What `zero.collectives: explicit` sends is the plan's, to the element: kind, size, group, loops; and the memory that
its programs want.

Read from XLA:CPU programs (`test_aot.py` reads those for GPU and TPU) and held against lists that `planned` writes from
the papers' formulas alone.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_programs
from flax import nnx
from programs import Collective, Key, Weight, collectives, keys, planned, sent, temporary_bytes
from test_programs import LENGTH, ROWS, decoder, llama, loss, strays
from toys import token_batch, token_loss

import jzero
from jzero.blueprint import prepare
from jzero.traffic import planned_transfers

# No extent divides by 3, all do by 8; none is that of an activation.
LAYERS, WIDTH, HIDDEN, VOCAB = 4, 56, 80, 136
MATRICES, TABLE = 2 * LAYERS * WIDTH * HIDDEN, VOCAB * WIDTH


class Block(nnx.Module):
    """tensor: its hidden units are split over the `tensor` axis, as the model's own sharding."""

    def __init__(self, rngs: nnx.Rngs, tensor: bool):
        own = lambda init, *spec: nnx.with_partitioning(init, spec) if tensor else init
        init, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        up, bias, down = own(init, None, "tensor"), own(zeros, "tensor"), own(init, "tensor", None)
        self.up = nnx.Linear(WIDTH, HIDDEN, kernel_init=up, bias_init=bias, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, kernel_init=down, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.tanh(self.up(self.norm(x))))


class Model(nnx.Module):
    """Tokens -> logits: a tied table, scanned or listed rematerialised blocks, a scalar."""

    def __init__(self, rngs: nnx.Rngs, scanned: bool, tensor: bool):
        self.scanned = scanned
        self.table = nnx.Param(0.1 * jax.random.normal(rngs.params(), (VOCAB, WIDTH)))
        self.gain = nnx.Param(jnp.ones(()))
        make = lambda key: Block(nnx.Rngs(params=key), tensor)
        seeds = jax.random.split(rngs.params(), LAYERS)
        self.blocks = nnx.vmap(make)(seeds) if scanned else nnx.List([make(seed) for seed in seeds])

    def __call__(self, tokens):
        x, run = self.table[tokens], nnx.remat(lambda block, x: block(x))
        if self.scanned:
            x = nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)
        else:
            for block in self.blocks:
                x = run(block, x)
        return x @ self.table.T * self.gain[...]


@dataclass(frozen=True)
class Case:
    stage: int
    k: int
    data: int = 8
    replica: int = 1
    tensor: int = 1
    group: str = "all"
    optimizer_group: str | None = None
    scanned: bool = True
    precision: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        mesh = f"{self.replica}x{self.data}" + (f"x{self.tensor}" if self.tensor > 1 else "")
        groups = f"{self.group}-{self.optimizer_group or self.group}"
        return f"{self.stage}-k{self.k}-{mesh}-{groups}-{'scanned' if self.scanned else 'listed'}"

    @property
    def devices(self) -> int:
        return self.replica * self.data * self.tensor

    def config(self, engine: str) -> dict[str, Any]:
        zero = {"stage": self.stage, "group": self.group, "optimizer_group": self.optimizer_group}
        return {
            "zero": {**zero, "collectives": engine, "min_shard_elements": 1000},
            "mesh": {"replica": self.replica, "tensor": self.tensor},
            "precision": dict(self.precision),
            "train": {"global_batch_size": ROWS * self.k, "accumulation_steps": self.k, "seed": 3},
        }

    def model(self, rngs: nnx.Rngs) -> Model:
        return Model(rngs, self.scanned, self.tensor > 1)

    def weights(self) -> list[Weight]:
        """The model's parameters as each device of an XLA:CPU program reads them.

        XLA:CPU moves the gathers of what is read outside of a loop over layers out of the loop over micro-batches, but
        for those that belong to the backward pass of a rematerialised block, and those it merges with the ones of the
        forward pass where there is no loop over micro-batches. GPU and TPU programs do neither.
        """
        parts = self.data * self.replica
        padded = lambda n: -(-n // parts) * parts if self.stage else n
        hidden = HIDDEN // self.tensor
        matrix = Weight(WIDTH * padded(hidden) if self.tensor == 1 else padded(WIDTH) * hidden)
        table = Weight(padded(VOCAB) * WIDTH, gathers=0, hoisted=1)
        scalar, norm, bias = Weight(1, split=False), Weight(WIDTH, split=False), Weight(hidden, split=False)
        if self.scanned:
            return [table, scalar, *(replace(w, layers=LAYERS) for w in (matrix, matrix, norm, bias))]
        matrix = replace(matrix, gathers=int(self.k > 1), hoisted=1)
        return [table, scalar, *[matrix, matrix, norm, bias] * LAYERS]

    def expected(self) -> Counter[Key]:
        mesh = {"data": self.data, "replica": self.replica}
        groups = {"group": self.group, "optimizer_group": self.optimizer_group or self.group}
        return planned(self.weights(), self.stage, self.k, **mesh, **groups)


def batch(case: Case) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((ROWS * case.k, LENGTH + 1), np.int32)


@cache
def compiled(case: Case, engine: str = "explicit"):
    made = prepare(case.model, loss, optax.sgd(1e-3), case.config(engine), jax.devices()[: case.devices])
    return made.lower_step(batch(case)).compile()


def found(case: Case, engine: str = "explicit") -> list[Collective]:
    return collectives(compiled(case, engine).as_text())


def large(of: Iterable[Key]) -> Counter[Key]:
    """Those of matrices and of the table, shards included; scalars, norms and biases are smaller."""
    return Counter(key for key in (of.elements() if isinstance(of, Counter) else of) if key[1] > LAYERS * HIDDEN)


STAGES = [(stage, k) for stage in range(4) for k in (1, 4)]
NODES = [(4, 2, "node", None), (2, 4, "node", "all"), (4, 2, "all", None)]
OTHERS = [(4, 2, "node", "all"), (2, 4, "node", None), (2, 4, "all", None)]


def on(meshes, stages):
    return [
        Case(stage, k, data, replica, group=group, optimizer_group=optimizer)
        for data, replica, group, optimizer in meshes
        for stage, k in stages
    ]


EIGHT = [Case(stage, k) for stage, k in STAGES]
LISTED = [Case(stage, k, scanned=False) for stage, k in STAGES]
QUICK = [*EIGHT, *on(NODES[:1], [(0, 4), (3, 4)]), Case(3, 4, data=3)]
ALL = [*EIGHT, *on(NODES, STAGES), *on(OTHERS, STAGES[1::2]), *(Case(stage, k, data=3) for stage, k in STAGES), *LISTED]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if case in QUICK else (pytest.mark.slow, pytest.mark.thorough)[n % 2])
        for n, case in enumerate(ALL)
    ],
)
def test_a_step_sends_what_the_plan_says_and_nothing_else(case):
    """Whole leaves, padding and the scalars of loss and norm included; so no activation and no all-to-all."""
    sees = found(case)
    assert keys(sees) == case.expected()
    assert strays(sees, case.devices) == []


def test_these_lists_tell_the_engines_apart():
    for case in (Case(1, 4), Case(2, 1)):
        assert large(keys(found(case, "xla"))) != large(case.expected())


# XLA:CPU hoists gathers out of the loop over micro-batches; `test_traffic.py` compares what does not hang on compilers.
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if case in QUICK else pytest.mark.thorough)
        for case in ALL
        if case.stage < 3 or (case.k == 1 and case.scanned)
    ],
)
def test_what_is_told_before_compilation_is_what_the_program_does(case):
    made = prepare(case.model, loss, optax.sgd(1e-3), case.config("explicit"), case.devices)
    told = planned_transfers(made, made.trace_step(batch(case)).jaxpr)
    arrays = Counter((t.kind, t.size, t.group, t.loops, t.runs) for t in told if t.path and t.size > 1)
    assert arrays == Counter(key for key in keys(found(case)).elements() if key[1] > 1)


@pytest.mark.parametrize(
    ("stage", "volume", "table"),
    [(0, lambda k: 2, lambda k: 2), (1, lambda k: 2, lambda k: 2), (2, lambda k: k + 1, lambda k: k + 1)]
    # XLA:CPU gathers the table once a step: outside of the loop over micro-batches, for both of its passes.
    + [(3, lambda k: 3 * k, lambda k: k + 1)],
)
@pytest.mark.parametrize("k", [1, 4])
def test_the_elements_sent_are_those_of_the_papers(stage, volume, table, k):
    each = sent(large(keys(found(Case(stage, k)))).elements())
    assert each == (volume(k) * MATRICES + table(k) * TABLE) * 7 // 8


def test_across_nodes_goes_a_shard_once_a_step():
    """At stage 3 in four micro-batches; each node of four devices gathers and scatters within itself."""
    across = [key for key in large(keys(found(*on(NODES[:1], [(3, 4)])))).elements() if key[2] == 2]
    assert sent(across) == 2 * (MATRICES + TABLE) / 4 / 2
    assert {(kind, runs) for kind, _, _, _, runs in across} == {("all-reduce", 1)}


# A model that splits its hidden units over `tensor`, four devices along `data`.
TENSOR = Case(3, 2, data=4, tensor=2)


@pytest.mark.parametrize("scanned", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["scanned", "listed"])
@pytest.mark.parametrize(
    ("stage", "k"), [(3, 4)] + [pytest.param(*s, marks=pytest.mark.thorough) for s in STAGES if s != (3, 4)]
)
def test_what_the_model_splits_itself_travels_in_its_parts(stage, k, scanned):
    case = replace(TENSOR, stage=stage, k=k, scanned=scanned)
    sees = found(case)
    over_data = [c for c in sees if c.group == case.data]
    assert large(keys(over_data)) == large(case.expected())
    # Over `tensor` activations are summed, as the model means it; no weight is gathered.
    assert {c.kind for c in sees if c.group != case.data} == {"all-reduce"}


@pytest.mark.parametrize("scanned", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["scanned", "listed"])
@pytest.mark.parametrize(
    ("stage", "k"),
    [pytest.param(s, k, marks=(pytest.mark.thorough, pytest.mark.slow)[(s + k) % 2]) for s in range(4) for k in (1, 2)],
)
def test_a_model_on_the_tensor_axis_trains_alike_by_both_engines(stage, k, scanned):
    case = replace(TENSOR, stage=stage, k=k, scanned=scanned)
    one = replace(case, stage=0, k=1, data=1, tensor=1)
    alone = losses(one, "xla", k)
    assert alone[-1] < alone[0] - 0.05
    for engine in ("xla", "explicit"):
        np.testing.assert_allclose(losses(case, engine), alone, rtol=1e-5)


def losses(case: Case, engine: str, k: int | None = None) -> list[float]:
    config = case.config(engine)
    config["train"]["global_batch_size"] = ROWS * (k or case.k)
    arm = jzero.initialize(case.model, token_loss, optax.adam(4e-3), config, jax.devices()[: case.devices])
    return [float(arm.step(token_batch(ROWS * (k or case.k), step))["loss"]) for step in range(4)]


def widths(case: Case) -> dict[str, set[str]]:
    with jax.numpy_dtype_promotion("standard"):  # nnx.RMSNorm computes in float32
        sees = found(case)
    return {
        kind: {c.dtype for c in sees if c.kind == kind and c.size > LAYERS * HIDDEN}
        for kind in ("all-gather", "reduce-scatter")
    }


def test_float16_travels_in_half_the_bytes_and_gradients_in_the_width_asked_for():
    """bfloat16 does so too, on GPU and TPU; XLA:CPU widens it."""
    half = (("preset", "fp16"),)
    assert widths(Case(3, 1)) == {"all-gather": {"f32"}, "reduce-scatter": {"f32"}}
    assert widths(Case(3, 1, precision=half)) == {"all-gather": {"f16"}, "reduce-scatter": {"f16"}}
    reduced = (*half, ("reduce", "float32"))
    assert widths(Case(3, 1, precision=reduced)) == {"all-gather": {"f16"}, "reduce-scatter": {"f32"}}


@pytest.mark.parametrize("scanned", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["scanned", "listed"])
def test_stage_2_accumulates_a_shard_where_stage_1_does_the_whole(scanned):
    """In memory of temporaries: at least what the shard leaves of the sum over micro-batches. (Measured: 1.8 times that
    for scanned layers, where nothing needs the whole gradient of one micro-batch either; 1.06 times for listed ones.)
    """
    whole, shard = (temporary_bytes(compiled(Case(stage, 4, scanned=scanned))) for stage in (1, 2))
    assert whole - shard >= 4 * (MATRICES + TABLE) * 7 / 8


# In whole weights of a layer: a shard of the gradient at stage 3; at stage 2 also those of old and new weights. A
# gradient or a gathered weight that stays whole adds 1.
@pytest.mark.parametrize(("stage", "most"), [(3, 1 / 8 + 0.2), pytest.param(2, 3 / 8 + 0.2, marks=pytest.mark.slow)])
def test_temporaries_of_scanned_layers_grow_by_shards(stage, most):
    make = lambda layers: test_programs.blueprint(decoder(layers), stage, collectives="explicit")
    few, many = (temporary_bytes(test_programs.compile_step(make(layers))) for layers in (4, 8))
    assert 0 < (many - few) / 4 / 4 <= most * test_programs.LAYER


@pytest.mark.slow
def test_unrolled_layers_free_their_weights_too_where_xla_lets_them():
    """XLA:CPU hoists the forward gathers of an unrolled model out of the loop over micro-batches and starts gathers all
    at once. Without that no weight or gradient is live for long; its reductions are not merged, as those of engine xla.
    """
    flags = [
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_disable_hlo_passes=cse_barrier_expander,while-loop-invariant-code-motion",
        "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    ]
    code = (
        "from test_programs import *\n"
        "make = lambda n: blueprint(decoder(n, scan=False), 3, 2, collectives='explicit')\n"
        "b = [temporary_bytes(compile_step(make(n))) for n in (4, 8)]\n"
        "print((b[1] - b[0]) / 16 / LAYER)"
    )
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent)])
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    # Accumulator and gradient are a shard each; a weight or gradient that stays whole adds 1.
    assert float(ran.stdout) < 2 / 8 + 0.3


def kept(engine: str, scanned: bool, monkeypatch) -> set[tuple[int, ...]]:
    """Extents, in order, of all that the backward pass of that engine keeps on one device of three, at JAX level.

    Extents are such that every stored weight is padded: what has a true shape was gathered and cut.
    """
    residuals, differentiate = set(), jax.value_and_grad

    def spy(fn, **options):
        def run(first, *rest):
            _, backward, _ = jax.vjp(lambda x: fn(x, *rest), first, has_aux=True)
            residuals.update(tuple(sorted(x.shape)) for x in jax.tree.leaves(backward))  # transposed or not
            return differentiate(fn, **options)(first, *rest)

        return run

    model = llama(3, scanned, "none", **test_programs.ODD)
    made = test_programs.blueprint(model, 3, devices=3, min_shard_elements=1024, collectives=engine)
    monkeypatch.setattr(jax, "value_and_grad", spy)
    made.lower_step(jax.ShapeDtypeStruct((ROWS, LENGTH + 1), np.int32))
    return residuals & {tuple(sorted(leaf.shape)) for leaf in made.plan.params.values() if leaf.dim is not None}


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unrolled"])
def test_no_gathered_weight_is_kept_for_the_backward_pass(scanned, monkeypatch):
    with monkeypatch.context() as plain:
        plain.setattr("jzero.grads_explicit.forget_weights", lambda fn, points, *, gathers: fn)
        assert len(kept("explicit", scanned, plain)) >= 3  # what JAX would keep
    assert kept("explicit", scanned, monkeypatch) == set()


@pytest.mark.parametrize("stage", [0, 3])
def test_no_gradient_is_computed_from_two_transposed_matrices(stage):
    """XLA:CPU takes several times as long for lhs^T rhs^T, and would make one of a gradient's transposition."""
    text = compiled(Case(stage, 1)).as_text()
    products = re.findall(
        r"f32\[\d+,\d+\]\S* dot\(.*?lhs_contracting_dims=\{(\d)\}, rhs_contracting_dims=\{(\d)\}", text
    )
    assert products
    assert ("0", "1") not in products
