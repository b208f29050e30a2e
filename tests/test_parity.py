"""Placement changes no number: every stage, device count, mesh, accumulation split and layer layout trains like one device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import jax
import numpy as np
import optax
import pytest
import toys
from flax import nnx

import jzero
from jzero.config import ModelConfig, make_config
from jzero.model_api import adapt
from jzero.models import build_model, unstack_layers

STEPS, ROWS, SEED = 20, 96, 3  # 96 rows divide over 4 micro-batches on 3 and on 8 devices
CLIP_NORM = 0.6  # the toy's gradient norm crosses it
RTOL = 1e-5
MODELS = {"scanned": toys.scanned_decoder, "listed": toys.listed_decoder}
# With Adam's own eps of 1e-8, elements whose gradient is close to its rounding error make other numbers of another
# order of summation: parameters then differ by up to 6e-5 of their leaf's largest, by 1e-7 in the losses.
ADAM = optax.adam(1e-2, eps=1e-4)

token_batch = cache(toys.token_batch)


@dataclass(frozen=True)
class Arm:
    """One way to place the same training."""

    stage: int = 0
    devices: int = 1
    accumulation: int = 1
    layers: str = "scanned"
    replica: int = 1
    group: str = "all"
    optimizer_group: str | None = None
    precision: str = "fp32"

    def __str__(self) -> str:
        parts = [f"stage{self.stage}", f"{self.devices}dev", f"k{self.accumulation}", self.layers]
        if self.replica > 1:
            parts += [f"{self.replica}x{self.devices // self.replica}", self.group, str(self.optimizer_group)]
        return "-".join(parts)

    @property
    def shards(self) -> dict[str, int]:
        """How many ways each tree is split, as the ZeRO papers and HSDP have it."""
        ways = {"all": self.devices, "node": self.devices // self.replica}
        group, optimizer_group = ways[self.group], ways[self.optimizer_group or self.group]
        return {
            "parameters": group if self.stage == 3 else 1,
            "gradients": group if self.stage >= 2 else 1,
            "optimizer": optimizer_group if self.stage >= 1 else 1,
        }

    def config(self) -> dict[str, Any]:
        return {
            "mesh": {"replica": self.replica},
            "zero": {
                "stage": self.stage,
                "group": self.group,
                "optimizer_group": self.optimizer_group,
                "min_shard_elements": 0,
            },
            "precision": self.precision,
            "optimizer": {"clip_norm": CLIP_NORM},
            "train": {"global_batch_size": ROWS, "accumulation_steps": self.accumulation, "seed": SEED},
        }


@dataclass
class Run:
    """What a training left: float64 losses and norms [STEPS], parameters before and after by the listed model's paths."""

    engine: Any
    start: dict[str, np.ndarray]
    micro_batch_rows: set[int]
    losses: np.ndarray = field(default_factory=lambda: np.zeros(0))
    grad_norms: np.ndarray = field(default_factory=lambda: np.zeros(0))
    params: dict[str, np.ndarray] = field(default_factory=dict)


def initialize(arm: Arm) -> Run:
    rows_seen: set[int] = set()

    def loss(model, batch):
        rows_seen.add(batch["tokens"].shape[0])
        return toys.token_loss(model, batch)

    engine = jzero.initialize(MODELS[arm.layers], loss, ADAM, arm.config(), jax.devices()[: arm.devices])
    return Run(engine, toys.unstack(engine.params()), rows_seen)


def train(run: Run, batches: Sequence[Any] | None = None, unstack: Callable[..., Any] = toys.unstack) -> Run:
    """Steps `run.engine` once over each batch."""
    batches = [token_batch(ROWS, step) for step in range(STEPS)] if batches is None else batches
    metrics = jax.device_get([run.engine.step(batch) for batch in batches])
    run.losses = np.array([m["loss"] for m in metrics], float)
    run.grad_norms = np.array([m["grad_norm"] for m in metrics], float)
    run.params = unstack(run.engine.params())
    return run


def assert_agrees(run: Run, reference: Run, rtol: float = RTOL, params_rtol: float | None = None) -> None:
    """Losses and norms step by step; parameters to `params_rtol` (None: rtol) of the largest element of their leaf."""
    np.testing.assert_allclose(run.losses, reference.losses, rtol=rtol, err_msg="losses")
    np.testing.assert_allclose(run.grad_norms, reference.grad_norms, rtol=rtol, err_msg="gradient norms")
    assert run.params.keys() == reference.params.keys()
    for path, expected in reference.params.items():
        error = np.abs(run.params[path] - expected).max() / np.abs(expected).max()
        assert error <= (params_rtol or rtol), f"{path}: differs by {error:.1e} of its largest element"


def assert_differs(arm: Arm, run: Run) -> None:
    """The arm is what it claims to be: bytes on the devices, dtypes, rows a micro-batch."""
    engine = run.engine
    assert len(engine.mesh.devices.flat) == arm.devices
    assert dict(engine.mesh.shape) == {"replica": arm.replica, "data": arm.devices // arm.replica, "tensor": 1}
    count = max(arm.shards.values())
    elements = {"whole": 0, "split": 0, "padding": 0}
    for path, leaf in engine.plan.params.items():
        stack_ndim = int(arm.layers == "scanned" and path.startswith("blocks/"))
        scalar = len(leaf.shape) == stack_ndim
        part = toys.smallest_split(leaf.shape, stack_ndim, count)
        elements["whole"] += part if scalar else 0
        elements["split"] += 0 if scalar else part * count
        elements["padding"] += 0 if scalar else part * count - int(np.prod(leaf.shape))
    assert (elements["padding"] > 0) == (count > 1)
    a_device = {tree: elements["whole"] + elements["split"] // ways for tree, ways in arm.shards.items()}

    bf16 = arm.precision == "bf16"
    state = engine.state
    assert {x.dtype.name for x in state.params.values()} == {"bfloat16" if bf16 else "float32"}
    assert {x.dtype.name for x in state.master.values()} == ({"float32"} if bf16 else set())
    assert toys.bytes_a_device(state.params) == a_device["parameters"] * (2 if bf16 else 4)
    # Two moments and the master in float32, and the int32 count of Adam's bias correction.
    assert toys.bytes_a_device((state.opt_state, state.master)) == a_device["optimizer"] * 4 * (3 if bf16 else 2) + 4
    gradient_bytes = 2 if bf16 and arm.accumulation == 1 else 4
    assert engine.plan.bytes_per_device()["gradients"] == a_device["gradients"] * gradient_bytes


def run_arm(arm: Arm, start: dict[str, np.ndarray]) -> Run:
    """Trains an arm, after it was found to be placed as it claims and to start from the very bits of `start`."""
    run = initialize(arm)
    assert_differs(arm, run)
    assert run.start.keys() == start.keys()
    for path, values in start.items():
        np.testing.assert_array_equal(run.start[path], values, err_msg=path)
    train(run)
    assert run.micro_batch_rows == {ROWS // arm.accumulation}
    assert_differs(arm, run)
    return run


@pytest.fixture(scope="module")
def start() -> dict[str, np.ndarray]:
    """The plain model's own initial values: nothing of jzero's is in their making."""

    def params() -> dict[str, jax.Array]:
        state = nnx.to_flat_state(nnx.state(toys.scanned_decoder(nnx.Rngs(SEED)), nnx.Param))
        return {"/".join(map(str, path)): param.get_raw_value() for path, param in state}

    # jzero initialises under jit, where XLA merges the constants of a product: 1 ulp from eager execution.
    compiled, eager = jax.jit(params)(), params()
    for path, values in eager.items():
        np.testing.assert_allclose(values, compiled[path], rtol=3e-7, atol=0, err_msg=path)
    return toys.unstack(jax.device_get(compiled))


@pytest.fixture(scope="module")
def reference(start) -> Run:
    """One device, stage 0, one micro-batch."""
    return run_arm(Arm(), start)


def test_the_reference_learns_and_is_clipped_now_and_then(reference):
    assert reference.losses[-1] < reference.losses[0] - 0.5
    assert reference.grad_norms.min() < CLIP_NORM < reference.grad_norms.max()
    assert set(reference.params) == set(reference.start)
    for path, before in reference.start.items():
        assert np.abs(reference.params[path] - before).max() > 1e-2, path


# The whole product is `slow`. By default every pair of values of two factors still meets in some arm.

PRODUCT = [Arm(*values) for values in product((0, 1, 2, 3), (1, 2, 3, 8), (1, 4), ("scanned", "listed"))]


def in_pairs(arm: Arm) -> bool:
    place, accumulation, layers = (2, 3, 8, 1).index(arm.devices), arm.accumulation == 4, arm.layers == "listed"
    if arm.devices == 1:  # all stages are one program there, see the next test
        return arm.stage == 0 and accumulation != layers
    return (accumulation, layers) == ((arm.stage + place) % 2, (arm.stage // 2 + place) % 2)


def mark_slow(arms: Sequence[Arm], by_default: Callable[[Arm], bool]) -> list[Any]:
    return [
        pytest.param(arm, id=str(arm), marks=() if by_default(arm) else pytest.mark.slow)
        for arm in arms
        if arm != Arm()
    ]


@pytest.mark.parametrize("arm", mark_slow(PRODUCT, in_pairs))
def test_every_placement_trains_like_one_device(arm, start, reference):
    assert_agrees(run_arm(arm, start), reference)


def test_the_default_arms_cover_all_pairs():
    arms = [arm for arm in PRODUCT if in_pairs(arm)]
    factors = ("stage", "devices", "accumulation", "layers")
    for one, other in ((a, b) for a in factors for b in factors if a < b):
        pairs = lambda arms, one=one, other=other: {(getattr(a, one), getattr(a, other)) for a in arms}
        on_one = {(s, 1) for s in (1, 2, 3)} if {one, other} == {"stage", "devices"} else set()
        assert {p for p in pairs(PRODUCT) if p not in on_one and p[::-1] not in on_one} <= pairs(arms), (one, other)


def test_on_one_device_every_stage_is_the_same_plan():
    params = adapt(toys.scanned_decoder).params
    plans = []
    for stage in range(4):
        config = make_config(Arm(stage).config())
        sizes = {"replica": 1, "data": 1, "tensor": 1}
        plans.append(jzero.make_plan(params, sizes, config.zero, config.precision, ADAM).trees())
    assert plans[0] == plans[1] == plans[2] == plans[3]


MESHES = [
    Arm(stage, 8, accumulation, "scanned", replica, *groups)
    for replica, groups, (stage, accumulation) in product(
        (2, 4), (("all", None), ("node", None), ("node", "all")), ((1, 1), (2, 4), (3, 1))
    )
]


def in_default_meshes(arm: Arm) -> bool:
    """Stages and groups all meet, half of them on each mesh."""
    return arm.group == "node" and arm.replica == (4 if (arm.stage % 2) == (arm.optimizer_group is None) else 2)


@pytest.mark.parametrize("arm", mark_slow(MESHES, in_default_meshes))
def test_hybrid_meshes_train_like_one_device(arm, start, reference):
    assert_agrees(run_arm(arm, start), reference)


# A battery that cannot fail proves nothing: small faults in the reference's own training are found.


def lost_element(arrays):
    """One element of one parameter is 1e-3 off."""
    return {**arrays, "params/blocks/up/kernel": arrays["params/blocks/up/kernel"].at[1, 3, 5].add(1e-3)}


def lost_moment(arrays):
    """One layer's second moment of one leaf is another's, as a wrong gather would leave it."""
    (path,) = (p for p in arrays if p.endswith("nu/blocks/down/kernel"))
    return {**arrays, path: arrays[path][::-1]}


def same_batches(batches):
    return batches


def row_counted_twice(batches):
    """Row 1 stands where row 2 should in one batch."""
    broken = {name: rows.copy() for name, rows in batches[5].items()}
    for rows in broken.values():
        rows[2] = rows[1]
    return [*batches[:5], broken, *batches[6:]]


@pytest.mark.parametrize(
    ("break_arrays", "break_batches", "told"),
    [
        (dict, same_batches, None),
        (lost_element, same_batches, "differs by|losses|gradient norms"),
        (lost_moment, same_batches, "differs by|losses|gradient norms"),
        (dict, row_counted_twice, "losses"),
    ],
    ids=["nothing", "an element", "a moment", "a row"],
)
def test_the_comparison_sees_a_small_fault(break_arrays, break_batches, told, start, reference):
    engine = reference.engine
    batches = [token_batch(ROWS, step) for step in range(STEPS)]
    fresh = initialize(Arm()).engine
    engine.load(fresh.arrays())
    for batch in batches[:2]:  # moments that differ
        engine.step(batch)
    engine.load(break_arrays(engine.arrays()))
    again = Run(engine, reference.start, set())
    train(again, break_batches(batches)[2:])
    expected = Run(engine, reference.start, set(), reference.losses[2:], reference.grad_norms[2:], reference.params)
    if told is None:
        assert_agrees(again, expected, rtol=0)
        return
    with pytest.raises(AssertionError, match=told):
        assert_agrees(again, expected)
