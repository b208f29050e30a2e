"""A compiled step is told for what it is: nothing is found in those that the engines make, each misplacement that is
planted in a real program is found and named, and the trainer says so before its first step."""

import io
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from test_programs import LAYERS, LENGTH, ROWS, decoder, llama, loss

import jzero
import jzero.blueprint
from jzero.auditing import Audit, audit_program
from jzero.blueprint import Blueprint, prepare
from jzero.errors import AuditError
from jzero.leaf import map_leaves

SMALL = {"width": 64, "hidden": 96, "vocab": 160}


def blueprint(
    model, stage: int, engine: str, k: int = 1, replica: int = 1, optimizer=None, loss=loss, rows: int = ROWS, **zero
) -> Blueprint:
    config = {
        "zero": {"stage": stage, "collectives": engine, "min_shard_elements": 256, **zero},
        "mesh": {"replica": replica},
        "train": {"global_batch_size": rows * k, "accumulation_steps": k},
    }
    return prepare(model, loss, optimizer or optax.adam(1e-3), config, jax.devices()[:8])


def tokens(made: Blueprint) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((made.config.train.global_batch_size or 0, LENGTH + 1), np.int32)


def audited(made: Blueprint, batch=None) -> Audit:
    return audit_program(made.program(batch or tokens(made)))


@cache
def clean(model: str, stage: int, engine: str, k: int, replica: int) -> Audit:
    build = {
        "decoder": decoder(LAYERS, remat=True, **SMALL),
        "listed": decoder(2, scan=False, **SMALL),
        "llama": llama(2, remat="none", **SMALL),
    }[model]
    return audited(blueprint(build, stage, engine, k, replica))


ENGINES = ("xla", "explicit")
QUICK = [("decoder", 0, "xla", 1, 1), ("decoder", 1, "explicit", 2, 1), ("decoder", 2, "xla", 1, 2)]
QUICK += [("decoder", 3, "xla", 2, 1), ("decoder", 3, "explicit", 2, 1), ("listed", 3, "explicit", 2, 1)]
ALL = [("decoder", stage, engine, k, 1) for stage in range(4) for engine in ENGINES for k in (1, 2)]
ALL += [(model, stage, engine, 2, 2) for model in ("listed", "llama") for stage in (1, 3) for engine in ENGINES]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in QUICK]


@pytest.mark.parametrize(("model", "stage", "engine", "k", "replica"), [*QUICK, *SLOW])
def test_nothing_is_found_in_what_the_engines_make(model, stage, engine, k, replica):
    found = clean(model, stage, engine, k, replica)
    assert found.findings == []
    assert {leaf.found for leaf in found.leaves} <= {leaf.asked for leaf in found.leaves} | {None}
    # What XLA:CPU does otherwise than others is said, but is no finding.
    assert {note.kind for note in found.notes} <= {"all-reduce", "reduced-in-loop"}
    assert engine == "xla" or found.notes == []


def test_bytes_of_the_state_are_those_of_the_plan_both_ways():
    made = blueprint(decoder(LAYERS, remat=True, **SMALL), 3, "explicit", 2)
    found, planned = clean("decoder", 3, "explicit", 2, 1), made.plan.bytes_per_device()
    for tree in ("parameters", "optimizer", "gradients"):
        leaves = [leaf for leaf in found.leaves if leaf.tree == tree]
        assert sum(leaf.asked_bytes for leaf in leaves) == planned[tree]
        assert sum(leaf.found_bytes or 0 for leaf in leaves) == planned[tree]
    weight = next(leaf for leaf in found.leaves if leaf.path == "gradients/blocks/up/kernel")
    assert weight.found == "(None, None, 'data')"
    assert weight.found_bytes == LAYERS * 64 * 96 * 4 // 8


def one(found: Audit, kind: str) -> Any:
    (finding,) = [finding for finding in found.findings if finding.kind == kind]
    return finding


# Each misplacement is planted in a real program.


def test_a_moment_that_the_program_keeps_whole_is_named():
    made = blueprint(decoder(2, **SMALL), 2, "xla")
    whole = lambda leaf: replace(leaf, zero_axes=()) if "mu/embed" in leaf.path else leaf
    spoilt = replace(made, plan=replace(made.plan, optimizer=map_leaves(whole, made.plan.optimizer)))
    found = audit_program(replace(spoilt.program(tokens(made)), blueprint=made))
    finding = one(found, "placement")
    assert "mu/embed/embedding" in finding.where
    assert f"whole, {160 * 64 * 4:,} bytes" in finding.what
    assert f"{160 * 64 * 4 // 8:,} bytes" in finding.what
    assert [leaf.path for leaf in found.whole] == [finding.where]


class StackReader(nnx.Module):
    """Reads all of its layers at once, beside running over them."""

    def __init__(self, rngs: nnx.Rngs):
        self.decoder = decoder(LAYERS, **SMALL)(rngs)

    def __call__(self, tokens):
        shift = jnp.einsum("btd,ldh->bt", self.decoder.embed(tokens), self.decoder.blocks.up.kernel)
        return self.decoder(tokens) + 1e-6 * shift[..., None]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_gather_of_the_whole_stack_is_named(engine):
    finding = one(audited(blueprint(lambda rngs: StackReader(rngs), 3, engine)), "stack-gather")
    assert finding.where == "decoder/blocks/up/kernel"
    assert f"{LAYERS * 64 * 96 * 4:,} bytes" in finding.what
    assert "scan" in finding.advice


class Turned(nnx.Module):
    """Its hidden units are split over the devices of the batch, as nobody asked for; or all rows are on every one. Its
    state has random keys."""

    def __init__(self, rngs: nnx.Rngs, *specs: PartitionSpec):
        self.up, self.down = nnx.Linear(64, 320, rngs=rngs), nnx.Linear(320, 64, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.specs = (PartitionSpec("data"), *specs)

    def __call__(self, x):
        mesh = Mesh(np.array(jax.devices()[:8]).reshape(1, 8, 1), ("replica", "data", "tensor"))
        h = self.drop(self.up(x))
        for spec in self.specs:
            h = nnx.tanh(jax.lax.with_sharding_constraint(h, NamedSharding(mesh, spec)))
        return self.down(h)


def square(model, x):
    return jnp.mean(model(x) ** 2)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [(PartitionSpec(None, "data"), "activation-all-to-all"), (PartitionSpec(None, None), "activation-all-gather")],
)
def test_activations_that_travel_are_named_with_the_line_that_makes_them(spec, kind):
    x = jax.ShapeDtypeStruct((72, 64), jnp.float32)
    plain = audited(blueprint(lambda rngs: Turned(rngs), 3, "xla", 3, loss=square), x)
    assert plain.findings == []
    assert "model_state" in {leaf.tree for leaf in plain.leaves}
    found = audited(blueprint(lambda rngs: Turned(rngs, spec), 3, "xla", 3, loss=square), x)
    (finding,) = {f.kind: f for f in found.findings if f.kind == kind}.values()
    assert "test_audit.py:" in finding.where
    assert "over data" in finding.what


class Squares(nnx.Module):
    """Four layers in a loop or a list. With as many rows as they are wide, activations are as large as weights.
    spec: of what each listed layer makes."""

    def __init__(self, rngs: nnx.Rngs, spec: PartitionSpec | None = None, scanned: bool = False):
        self.inp, self.spec, self.scanned = nnx.Linear(64, 128, rngs=rngs), spec, scanned
        make = lambda rngs: nnx.Linear(128, 128, rngs=rngs)
        self.layers = nnx.vmap(make)(rngs.split(4)) if scanned else nnx.List([make(rngs) for _ in range(4)])

    def __call__(self, x):
        x = self.inp(x)
        if self.scanned:
            run = lambda layer, x: jnp.tanh(layer(x))
            return nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)
        mesh = Mesh(np.array(jax.devices()[:8]).reshape(1, 8, 1), ("replica", "data", "tensor"))
        for layer in self.layers:
            x = jnp.tanh(layer(x))
            x = x if self.spec is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, self.spec))
        return x


@pytest.mark.parametrize(("stage", "replica"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_activations_as_large_as_gradients_are_not_taken_for_them(stage, replica):
    x = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    nodes = {"group": "node", "optimizer_group": "all"} if replica > 1 else {}
    made = blueprint(lambda rngs: Squares(rngs, scanned=True), stage, "xla", 1, replica, loss=square, rows=512, **nodes)
    assert audited(made, x).findings == []


def test_nor_activations_that_travel_for_the_parameters_that_the_update_gathers():
    x = jax.ShapeDtypeStruct((128, 64), jnp.float32)
    split = blueprint(lambda rngs: Squares(rngs, PartitionSpec(None, "data")), 1, "xla", loss=square, rows=128)
    kinds = {finding.kind for finding in audited(split, x).findings}
    assert "parameter-gather" in kinds or "activation-all-gather" in kinds


@pytest.fixture
def reduced_early(monkeypatch):
    """Use points of the engine `explicit` that sum each gradient over devices where it is made."""
    points = jzero.blueprint.explicit_points

    def summed(scatter, array, dropped):
        return jax.lax.psum(scatter(array, dropped), "data") / 8

    def spoilt(plan, mesh):
        return {path: replace(use, scatter=partial(summed, use.scatter)) for path, use in points(plan, mesh).items()}

    monkeypatch.setattr("jzero.blueprint.explicit_points", spoilt)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_reduction_inside_the_accumulation_loop_is_named(stage, reduced_early):
    found = audited(blueprint(decoder(2, **SMALL), stage, "explicit", 3)).findings
    early = [finding for finding in found if finding.kind == "reduced-in-loop"]
    assert "embed/embedding" in {finding.where for finding in early}
    assert all("planned once a step" in finding.what for finding in early)


def test_a_gradient_that_adds_up_whole_is_named():
    made, spoilt = (blueprint(decoder(2, **SMALL), stage, "explicit", 3) for stage in (2, 1))
    found = audit_program(replace(spoilt.program(tokens(made)), blueprint=made))
    whole = {finding.where for finding in found.findings if finding.kind == "gradient-placement"}
    assert "gradients/embed/embedding" in whole


def test_an_optimizer_that_looks_beyond_single_elements_is_no_finding():
    made = blueprint(decoder(2, **SMALL), 2, "xla", optimizer=optax.contrib.muon(1e-3))
    assert not made.elementwise
    assert audited(made).findings == []


# An engine's own program.


@pytest.fixture(scope="module")
def engine():
    config = {"zero": {"stage": 3, "min_shard_elements": 256}}
    return jzero.initialize(decoder(2, **SMALL), loss, optax.adam(1e-3), config)


def test_an_engine_is_audited_by_the_program_that_it_runs(engine, caplog):
    with pytest.raises(jzero.UserError, match="has not stepped yet"):
        jzero.audit(engine)
    tokens = np.random.default_rng(0).integers(0, 160, (ROWS, LENGTH + 1))
    with jax.log_compiles():
        found = jzero.audit(engine, tokens)
        engine.step(tokens)
        assert jzero.audit(engine) == found
    compiled = [r for r in caplog.records if "Finished XLA compilation of jit(step)" in r.getMessage()]
    assert len(compiled) == 1
    assert found.findings == []
    assert found.memory.peak > sum(leaf.found_bytes or 0 for leaf in found.leaves)


def test_the_report_fits_a_hundred_columns():
    out = io.StringIO()
    Console(width=100, file=out).print(clean("decoder", 3, "xla", 2, 1))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    for word in ("parameters", "all-gather", "forward", "a device holds"):
        assert word in text


# The trainer.

TINY = {
    "model": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "data": {"source": "synthetic", "synthetic_tokens": 2_000, "sequence_length": 8},
    "zero": {"stage": 1, "collectives": "explicit", "min_shard_elements": 64},
    "train": {"num_steps": 1, "global_batch_size": 16, "accumulation_steps": 2, "eval_batches": 1, "sample_tokens": 0},
}


def trained(run_dir, audit: Any) -> tuple[int, str]:
    train, data = {**TINY["train"], "run_dir": str(run_dir)}, {**TINY["data"], "cache_dir": str(run_dir / "cache")}
    out = io.StringIO()
    tree = {**TINY, "train": train, "data": data, "log": {"tensorboard": False, "audit": audit}}
    return jzero.run_training(tree, Console(file=out, width=100)), out.getvalue()


def test_the_trainer_ends_on_what_is_found_before_its_first_step(tmp_path, reduced_early):
    with pytest.raises(AuditError, match=r"log.audit = error: .*\n  reduced-in-loop") as raised:
        trained(tmp_path, "error")
    assert raised.value.exit_code == 2
    assert not (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_or_says_it_in_a_line_and_goes_on(tmp_path, reduced_early):
    code, output = trained(tmp_path, "warn")
    (line, *_) = [line for line in output.splitlines() if line.startswith("audit: ")]
    assert code == 0
    assert "reduced-in-loop" in line
    assert "zero.collectives: explicit sums" in line


@pytest.mark.slow
def test_a_run_as_planned_hears_nothing(tmp_path):
    assert "audit: " not in trained(tmp_path, "error")[1]


@pytest.mark.slow
def test_a_run_need_not_look(tmp_path, reduced_early):
    assert "audit: " not in trained(tmp_path, False)[1]  # as YAML reads `off`
