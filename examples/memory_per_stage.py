"""What each ZeRO stage keeps on a device, drawn from the plan alone; in cells (# %%), for an editor or a shell.

    python examples/memory_per_stage.py        (matplotlib comes with: pip install -e '.[plot]')

A language model of 7.5 billion parameters on 64 devices in bf16 with AdamW, none of them needed. Look at the bars in
memory_per_stage.png: stage 1 takes away nearly all of the optimizer, which is three quarters of everything, stage 2
the gradients, stage 3 the parameters; from 119.9 GB to 1.9. Before that, a small model on eight fake CPU devices shows
that a plan's bytes are those of the arrays.
"""

# %% A small model: the plan beside what lies on the first device
import jax
import optax
from matplotlib.figure import Figure

import jzero
from jzero.adapt import adapt
from jzero.config import Config
from jzero.loss import cross_entropy
from jzero.models import build_model

STAGES = range(4)


def config_of(stage: int, *overrides: str) -> Config:
    return jzero.load_config(None, [f"zero.stage={stage}", "precision=bf16", "runtime.fake_devices=8", *overrides])


def bytes_on_first_device(tree: object) -> int:
    return sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(tree))


config = config_of(3, "model.hidden_size=64")
small = build_model(config.model, vocab_size=300)
engine = jzero.initialize(small, lambda model, batch: cross_entropy(model(batch), batch), config=config)
state, planned = engine.state, engine.plan.bytes_per_device()
for tree, arrays in {"parameters": state.params, "optimizer": (state.master, state.opt_state)}.items():
    held = bytes_on_first_device(arrays)
    assert held == planned[tree], (tree, held, planned[tree])
    print(f"small model, stage 3: {tree} {held:,} bytes on a device, as planned")

# %% A large model: the plan of each stage; change the sizes, the devices or the optimizer at will
SIZES = ["hidden_size=4096", "intermediate_size=10880", "num_hidden_layers=36", "num_attention_heads=32"]
AXES = {"replica": 1, "data": 64, "tensor": 1}

plans = {}
for stage in STAGES:
    config = config_of(stage, *(f"model.{size}" for size in SIZES))
    params = adapt(build_model(config.model, vocab_size=32_000)).params
    plans[stage] = jzero.make_plan(params, AXES, config.zero, config.precision, optax.adamw(1e-4))

gigabytes = {stage: {t: n / 1e9 for t, n in plan.bytes_per_device().items()} for stage, plan in plans.items()}
print(f"\n{plans[0].num_parameters:,} parameters on {AXES['data']} devices, GB on each")
print(f"stage{''.join(f'{tree:>12}' for tree in gigabytes[0])}         sum")
for stage, trees in gigabytes.items():
    print(f"{stage:5}{''.join(f'{size:12.2f}' for size in trees.values())}{sum(trees.values()):12.1f}")

# %% The same as stacked bars
figure = Figure(figsize=(7, 4.5), layout="constrained")
axes = figure.subplots()
below = [0.0] * len(STAGES)
for tree in gigabytes[0]:
    sizes = [gigabytes[stage][tree] for stage in STAGES]
    axes.bar([f"stage {stage}" for stage in STAGES], sizes, bottom=below, label=tree)
    below = [low + size for low, size in zip(below, sizes, strict=True)]
for stage, total in zip(STAGES, below, strict=True):
    axes.text(stage, total, f"{total:.1f} GB", horizontalalignment="center", verticalalignment="bottom")
axes.set(ylabel="GB on each device", title=f"{plans[0].num_parameters / 1e9:.1f} billion parameters, 64 devices, bf16")
axes.legend()
figure.savefig("memory_per_stage.png", dpi=150)
print("\nwrote memory_per_stage.png")
