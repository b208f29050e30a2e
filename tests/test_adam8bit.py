"""Adam with moments in 8 bits: the code map, errors, agreement with Adam, and where codes and scales lie."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from jax.sharding import PartitionSpec

import jzero
from jzero.adam8bit import Adam8bitState, block_dim, code_map, dequantise, quantise, scale_by_adam8bit
from jzero.config import make_config
from jzero.leaf import AbstractParam, map_leaves
from jzero.mesh import make_mesh
from jzero.optim import make_optimizer
from jzero.plan import choose_dim, make_plan

DEVICES = 8


def cells(signed: bool) -> np.ndarray:
    """(low, high, value) a row: decades from 1e-7 to 1, the n-th in 2 ** n even parts or twice as many, by hand."""
    rows = []
    for n in range(7):
        borders = np.linspace(0.1, 1.0, 2**n * (1 if signed else 2) + 1) * 10.0 ** (n - 6)
        rows += [(low, high, (low + high) / 2) for low, high in itertools.pairwise(borders)]
    rows[-1] = (*rows[-1][:2], 1.0)
    return np.array(rows)


@pytest.mark.parametrize("signed", [True, False])
def test_the_codes_are_those_of_dynamic_quantisation(signed):
    positive = cells(signed)[:, 2]
    expected = [*-positive[::-1], 0.0, *positive] if signed else positive
    np.testing.assert_allclose(code_map(signed), expected, rtol=1e-6)
    assert len(expected) == (255 if signed else 254)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize(
    ("shape", "dim", "block", "longest"),
    [((3, 1000), 1, 256, 250), ((301, 4, 2), 0, 128, 101), ((7,), 0, 256, 7), ((2, 256, 5), 1, 256, 256)],
)
def test_what_8_bits_lose_is_half_a_cell_of_the_blocks_largest(shape, dim, block, longest, signed):
    rng = np.random.default_rng(0)
    x = (10.0 ** rng.uniform(-9, 2, shape) * (rng.choice([-1, 1], shape) if signed else 1)).astype(np.float32)
    quantised = quantise(jnp.asarray(x), dim, block, signed=signed)
    got = np.asarray(dequantise(quantised, dim, signed=signed))
    assert (quantised.codes.dtype, quantised.codes.shape) == (jnp.int8, shape)
    assert quantised.scales.shape == tuple(-(-n // block) if d == dim else n for d, n in enumerate(shape))
    table = cells(signed)
    for number, start in enumerate(range(0, shape[dim], longest)):
        cut = lambda array, start=start: np.take(array, np.arange(start, min(start + longest, shape[dim])), dim)
        largest = np.abs(cut(x)).max(dim, keepdims=True)
        np.testing.assert_array_equal(np.take(np.asarray(quantised.scales), [number], dim), largest)
        part, error = np.abs(cut(x)) / largest, np.abs(cut(got) - cut(x)) / largest
        low, high, value = np.moveaxis(table[np.searchsorted(table[:, 1], part.clip(0, table[-1, 1]))], -1, 0)
        assert (
            error <= np.where((value == 1) | (part < low), np.maximum(value, high - low), (high - low) / 2) + 1e-6
        ).all()
        assert (error[part == 1] == 0).all(), "the largest stays as it is"
        assert (np.sign(cut(got)) == np.sign(cut(x)))[part > 3e-7].all()
    again = quantise(jnp.asarray(got), dim, block, signed=signed)
    np.testing.assert_array_equal(again.codes, quantised.codes)
    np.testing.assert_array_equal(again.scales, quantised.scales)


def test_a_block_of_zeros_stays_zero_and_a_zero_stays_zero_in_the_first_moment():
    x = jnp.zeros((4, 300)).at[0, 7].set(-5.0)
    for signed in (True, False):
        got = dequantise(quantise(jnp.abs(x) if not signed else x, 1, 256, signed=signed), 1, signed=signed)
        assert (got[1:] == 0).all()
        assert (got[0, :7] == 0).all() == signed, "the second moment has no zero beside larger numbers"


# Two that rest in 8 bits (one a stack), one of too few elements a layer.
SHAPES = {"w": (80, 90), "layers/w": (2, 70, 80), "layers/b": (2, 2500)}
STACKS = {"layers/w": 1, "layers/b": 1}


def draw(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {path: jnp.asarray(rng.normal(size=shape), jnp.float32) for path, shape in SHAPES.items()}


def test_an_update_is_adams_of_the_moments_at_rest():
    """The first, from moments of zero, to rounding; later ones of what 8 bits kept. Few elements: always."""
    ours, adam = scale_by_adam8bit(0.8, 0.9, 1e-6, num_stack_dims=STACKS), optax.scale_by_adam(0.8, 0.9, 1e-6)
    state, reference = ours.init(draw(0)), adam.init(draw(0))
    with jax.numpy_dtype_promotion("standard"):
        for seed in (1, 2, 3):
            kept = {}
            for path in ("w", "layers/w"):
                dim = block_dim(SHAPES[path][-2:]) + STACKS.get(path, 0)
                moments = [dequantise(x[path], dim, signed=s) for x, s in ((state.mu, True), (state.nu, False))]
                kept[path] = moments
            reference = reference._replace(
                mu=reference.mu | {path: mu for path, (mu, _) in kept.items()},
                nu=reference.nu | {path: nu for path, (_, nu) in kept.items()},
            )
            updates, state = jax.jit(ours.update)(draw(seed), state)
            expected, reference = adam.update(draw(seed), reference)
            for path in SHAPES:
                np.testing.assert_allclose(updates[path], expected[path], rtol=2e-5, atol=1e-6, err_msg=path)
    assert state.mu["layers/b"].dtype == jnp.float32
    assert state.mu["w"].scales.shape == (1, 90)
    assert state.mu["layers/w"].scales.shape == (2, 1, 80)


def test_an_element_whose_gradient_stops_does_not_run_away():
    """Its second moment is too small for 8 bits beside the block's largest, its first moment is not."""
    tx = scale_by_adam8bit(0.9, 0.999, 1e-8, min_elements=1)
    state = tx.init({"w": jnp.zeros(4)})
    with jax.numpy_dtype_promotion("standard"):
        for small in (1e-4, 1e-4, 0.0):
            updates, state = tx.update({"w": jnp.array([1.0, small, -1.0, 1.0])}, state)
    assert np.abs(updates["w"]).max() < 2


@pytest.mark.parametrize(
    ("shape", "blocks", "split"),
    [
        ((64, 64), 1, 0),
        ((64, 128), 0, 1),
        ((128, 64), 1, 0),
        ((3, 3, 64, 128), 2, 3),
        ((3, 3, 64, 64), 3, 2),
        # The one dim there is, and the one that is long enough.
        ((4096,), 0, 0),
        ((4096, 1), 0, 0),
        ((31, 200), 1, 1),
    ],
)
def test_blocks_run_along_a_dim_that_zero_does_not_split(shape, blocks, split):
    assert block_dim(shape) == blocks
    assert choose_dim(shape, 0, (None,) * len(shape), DEVICES)[0] == split


WRAPPERS = {
    "alone": lambda tx: tx,
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "masked": lambda tx: optax.masked(tx, {"w": True, "own": True, "v": False}),
    "multi_transform": lambda tx: optax.multi_transform(
        {"a": tx, "b": optax.sgd(0.1)}, {"w": "a", "own": "a", "v": "b"}
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_scales_lie_with_their_codes(wrapper):
    """Padded and split as those, but for the dim of the blocks, whatever the model itself does there."""
    params = {
        "w": AbstractParam((301, 1030), "float32"),
        "own": AbstractParam((4, 256, 1024), "float32", 1, (None, "tensor")),
        "v": AbstractParam((9000,), "float32"),
    }
    sizes, config = {"replica": 1, "data": 4, "tensor": 2}, make_config({"zero": {"stage": 1}})
    tx = WRAPPERS[wrapper](scale_by_adam8bit(0.9, 0.999, 1e-8, num_stack_dims={"own": 1}))
    leaves = jax.tree.leaves(make_plan(params, sizes, config.zero, config.precision, tx).optimizer)
    placed = {leaf.path[leaf.path.index("mu/") :]: leaf for leaf in leaves if "mu/" in leaf.path}
    found = {path: (leaf.stored_shape, leaf.spec) for path, leaf in placed.items() if "/v" not in path}
    assert found == {
        "mu/w/codes": ((301, 1032), PartitionSpec(None, ("data",))),
        "mu/w/scales": ((2, 1032), PartitionSpec(None, ("data",))),
        "mu/own/codes": ((4, 256, 1024), PartitionSpec(None, "tensor", ("data",))),
        "mu/own/scales": ((4, 1, 1024), PartitionSpec(None, None, ("data",))),
    }


def collectives(shapes: dict[str, tuple[int, ...]], stacks: dict[str, int]) -> list[tuple[str, str]]:
    """The collectives in the update's program on 8 devices, placed as the plan says: kind and shape of the result."""
    config = make_config({"zero": {"stage": 1}, "optimizer": {"name": "adamw8bit"}})
    params = {path: AbstractParam(shape, "float32", stacks.get(path, 0)) for path, shape in shapes.items()}
    tx, mesh = make_optimizer(config.optimizer, 10, params), make_mesh(config.mesh, jax.devices()[:DEVICES])
    plan = make_plan(params, dict(mesh.shape), config.zero, config.precision, tx)

    def placed(leaf):
        sharding = jax.sharding.NamedSharding(mesh, leaf.spec)
        return jax.ShapeDtypeStruct(leaf.stored_shape, leaf.dtype, sharding=sharding)

    weights, state = map_leaves(placed, dict(plan.weights)), map_leaves(placed, plan.optimizer)
    out = jax.tree.map(lambda x: x.sharding, (weights, state))
    with jax.numpy_dtype_promotion("standard"):
        text = jax.jit(tx.update, out_shardings=out).lower(weights, state, weights).compile().as_text()
    found = re.findall(r" = (\(?[a-z0-9]+\[.*?) (all-[a-z]+|reduce-scatter|collective-permute)(?:-start)?\(", text)
    return sorted((kind, shape) for result, kind in found for shape in re.findall(r"[a-z0-9]+\[[\d,]*\]", result))


def test_the_update_of_split_moments_needs_no_collectives():
    """A scale lies where its codes do, and a block on one device."""
    shapes = {"square": (256, 256), "tall": (1024, 300), "wide": (300, 1024), "layers": (2, 384, 256)}
    assert collectives(shapes, {"layers": 1}) == []


def test_blocks_along_the_split_dim_cost_collectives_of_scales_alone():
    """257 does not divide over 8, so 128 is split, which blocks run along; of a vector there is one dim only."""
    assert collectives({"embedding": (257, 128)}, {}) == [("all-reduce", "f32[257,1]")] * 2
    assert collectives({"vector": (65536,)}, {}) == [("all-gather", "f32[256]")] * 2


@pytest.mark.parametrize("stage", [1, 3])
def test_a_device_keeps_two_bytes_an_element_and_scales(stage):
    """The row "8-bit Adam + fp32 master": 2 + 2 + 4 + 2 bytes and 8 / 256 of scales, split over 8 devices."""
    config = {"zero": {"stage": stage}, "precision": "bf16", "optimizer": {"name": "adamw8bit"}}
    size = 256 * 512
    model = jzero.Function(lambda key: {"w": jax.random.normal(key, (512, 256))}, lambda params, x: x @ params["w"])
    engine = jzero.initialize(model, lambda model, batch: jnp.mean(model(batch)), None, config)
    engine.step(np.ones((8, 512), np.float32).astype(jnp.bfloat16))
    state = engine.state
    assert toys.bytes_a_device(state.opt_state) == (2 * size + 2 * 4 * size // 256) // DEVICES + 2 * 4
    assert toys.bytes_a_device(state.master) == 4 * size // DEVICES
    assert toys.bytes_a_device(state.params) == 2 * size // (DEVICES if stage == 3 else 1)
    assert engine.plan.bytes_per_device()["optimizer"] == toys.bytes_a_device((state.opt_state, state.master))


def test_a_checkpoint_goes_on_at_another_stage_on_another_number_of_devices(tmp_path):
    """Padded codes and scales on 8 devices, others on 2."""
    batch = {"x": np.random.default_rng(0).normal(size=(8, 61)).astype(np.float32)}
    model = jzero.Function(lambda key: {"w": jax.random.normal(key, (61, 99)) / 8}, lambda params, x: x @ params["w"])
    loss = lambda model, batch: jnp.mean(jnp.square(model(batch["x"]) - 1))
    config = {"optimizer": {"name": "adamw8bit", "schedule": "constant"}}
    one = jzero.initialize(model, loss, None, config | {"zero": {"stage": 3}}, jax.devices())
    losses = [float(one.step(batch)["loss"]) for _ in range(3)]
    one.save(tmp_path / "checkpoints")
    other = jzero.initialize(model, loss, None, config | {"zero": {"stage": 1}}, jax.devices()[:2])
    other.restore(tmp_path / "checkpoints")
    codes, moved = (engine.state.opt_state[0].mu["w"].codes for engine in (one, other))
    assert codes.shape != moved.shape
    np.testing.assert_array_equal(codes[:61, :99], moved[:61, :99])
    losses += [float(engine.step(batch)["loss"]) for engine in (one, other, one, other)]
    assert losses[3::2] == pytest.approx(losses[4::2], rel=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_it_learns_as_adamw_does():
    """300 steps of a small decoder, every array of 8 bits that has two elements or more."""
    losses = {}
    moments = {"adamw": optax.scale_by_adam(), "adamw8bit": scale_by_adam8bit(0.9, 0.999, 1e-8, min_elements=2)}
    for name, tx in moments.items():
        optimizer = optax.chain(tx, optax.add_decayed_weights(0.1), optax.scale(-3e-3))
        engine = jzero.initialize(toys.listed_decoder, toys.token_loss, optimizer, {}, jax.devices()[:1])
        losses[name] = [float(engine.step(toys.token_batch(16, i))["loss"]) for i in range(300)]
        assert isinstance(engine.state.opt_state[0], Adam8bitState) == (name == "adamw8bit")
    begin, end = losses["adamw"][0], {name: np.mean(values[-30:]) for name, values in losses.items()}
    print(begin, end)
    assert losses["adamw"] != losses["adamw8bit"]
    assert end["adamw"] < 0.5 * begin
    assert end["adamw8bit"] < 1.03 * end["adamw"]
