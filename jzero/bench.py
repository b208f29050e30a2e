"""What jzero costs: `python -m jzero.bench --config FILE [section.field=value ...]`.

Times one training step of the configured model three ways, in turn, in one process: a plain hand-written jax.jit step
on one device; jzero at stage 0 on that device; jzero as configured, on all devices. Machines drift, so the figures to
quote are the ratios.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from jzero.config import Config, load_config
from jzero.errors import JzeroError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jzero.bench", description="Times a training step against a plain jax.jit one."
    )
    parser.add_argument("--config", metavar="FILE", help="as for jzero.train")
    parser.add_argument("--rounds", type=int, default=20, help="steps timed of each, after one that compiles")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    arguments = parser.parse_intermixed_args(argv)
    try:
        config = load_config(arguments.config, arguments.overrides)
        from jzero import runtime  # JAX from here on

        runtime.start(config.runtime)
        from rich.console import Console

        Console().print(report(measure(config, arguments.rounds)))
    except JzeroError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def measure(config: Config, rounds: int) -> dict[str, list[float]]:
    """Seconds of each of `rounds` steps by arm: `plain`, `jzero, one device, stage 0` and the configured one."""
    import jax
    import numpy as np

    from jzero.config import make_config
    from jzero.engine import initialize
    from jzero.models import build_model
    from jzero.trainer import language_model_loss

    rows, length = config.train.global_batch_size or 32, config.data.sequence_length
    vocab_size = config.model.vocab_size or 257
    model = build_model(config.model, vocab_size)
    batch = {"tokens": np.random.default_rng(0).integers(0, vocab_size, (rows, length + 1)).astype(np.int32)}
    shared = config.model_dump(mode="json", include={"model", "data", "precision", "optimizer", "runtime"})
    train = {"global_batch_size": rows, "num_steps": config.train.num_steps, "seed": config.train.seed}
    one_device = make_config({**shared, "zero": {"stage": 0}, "train": train})
    one = initialize(model, language_model_loss, config=one_device, devices=jax.devices()[:1])
    all_devices = initialize(model, language_model_loss, config=config)
    plain = _plain_step(model, language_model_loss, one_device, batch)
    arms: dict[str, Callable[[], Any]] = {
        "plain jax.jit, one device": plain,
        "jzero, one device, stage 0": lambda: one.step(batch)["loss"],
        f"jzero, {all_devices.mesh.size} devices, stage {config.zero.stage}": lambda: all_devices.step(batch)["loss"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for round_number in range(rounds + 1):
        for name, step in arms.items():
            start = time.perf_counter()
            jax.block_until_ready(step())
            if round_number:  # the first compiles
                seconds[name].append(time.perf_counter() - start)
    return seconds


def report(seconds: dict[str, list[float]]) -> Any:
    """A table of median step times and of the median ratio to the first arm, round by round."""
    from rich.table import Table

    table = Table("step", "median", "ratio to plain", title=f"{len(next(iter(seconds.values())))} steps each, in turn")
    first = next(iter(seconds.values()))
    for name, times in seconds.items():
        ratio = statistics.median(t / f for t, f in zip(times, first, strict=True))
        table.add_row(name, f"{statistics.median(times) * 1e3:.1f} ms", f"{ratio:.3f}")
    return table


def _plain_step(model: Any, loss: Any, config: Config, batch: Any) -> Callable[[], Any]:
    """What a user would write without jzero: fp32, one device, global clipping, the same optimizer."""
    import jax
    import optax
    from flax import nnx

    from jzero.optim import make_optimizer

    graphdef, params, rest = nnx.split(model(nnx.Rngs(config.train.seed)), nnx.Param, ...)
    clip = config.optimizer.clip_norm
    optimizer = make_optimizer(config.optimizer, config.train.num_steps, None)
    if clip is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(clip), optimizer)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        def mean_loss(params: Any) -> Any:
            sums = loss(nnx.merge(graphdef, params, rest, copy=True), batch)
            return sums.total / sums.weight

        value, gradients = jax.value_and_grad(mean_loss)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, optax.global_norm(gradients)

    jitted = jax.jit(step, donate_argnums=(0, 1))
    state = [params, optimizer.init(params)]

    def run() -> Any:
        *state[:], value, _ = jitted(*state, batch)
        return value

    return run


if __name__ == "__main__":
    sys.exit(main())
