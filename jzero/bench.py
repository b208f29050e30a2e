"""What jzero costs: `python -m jzero.bench --config FILE [section.field=value ...]`.

Times one training step of the configured model three ways, in turn, in one process: a plain hand-written jax.jit step
on one device; jzero at stage 0 on that device; jzero as configured, on all devices. Each `--against` adds the
configured run with other settings. Machines drift, so the figures to quote are the ratios.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jzero.config import Config, load_config
from jzero.errors import JzeroError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jzero.bench", description="Times a training step against a plain jax.jit one."
    )
    parser.add_argument("--config", metavar="FILE", help="as for jzero.train")
    parser.add_argument("--rounds", type=_count, default=20, help="steps timed of each, after one that compiles")
    told = "also time the configured run with these on top; may be repeated"
    parser.add_argument("--against", action="append", default=[], metavar='"section.field=value ..."', help=told)
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    arguments = parser.parse_intermixed_args(argv)
    try:
        load = lambda *more: load_config(arguments.config, [*arguments.overrides, *more])
        config, others = load(), {given: load(*given.split()) for given in arguments.against}
        from jzero import runtime  # JAX from here on

        runtime.start(config.runtime)
        from rich.console import Console

        Console().print(report(measure(make_arms(config, others), arguments.rounds)))
    except JzeroError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps, 1 or more")
    return int(text)


def make_arms(config: Config, others: Mapping[str, Config] | None = None) -> dict[str, Callable[[], Any]]:
    """What is timed, by name: each takes one training step and returns its loss, on the same batch for the same model.

    others: by name, to train on all devices after `config`.
    """
    import jax

    from jzero.config import make_config

    shared = config.model_dump(mode="json", include={"model", "data", "precision", "optimizer", "runtime"})
    train = {"global_batch_size": _rows(config), "num_steps": config.train.num_steps, "seed": config.train.seed}
    one_device = make_config({**shared, "zero": {"stage": 0}, "train": train})
    devices = jax.devices()
    return {
        "plain jax.jit, one device": _plain_step(one_device),
        "jzero, one device, stage 0": _jzero_step(one_device, devices[:1]),
        f"jzero, {len(devices)} devices, stage {config.zero.stage}": _jzero_step(config, devices),
        **{name: _jzero_step(other, devices) for name, other in (others or {}).items()},
    }


def _rows(config: Config) -> int:
    return config.train.global_batch_size or 32


def _model_and_batch(config: Config) -> tuple[Any, Any]:
    import numpy as np

    from jzero.models import build_model

    vocab_size = config.model.vocab_size or 257
    shape = _rows(config), config.data.sequence_length + 1
    tokens = np.random.default_rng(0).integers(0, vocab_size, shape).astype(np.int32)
    return build_model(config.model, vocab_size), {"tokens": tokens}


def _jzero_step(config: Config, devices: Sequence[Any]) -> Callable[[], Any]:
    from jzero.engine import initialize
    from jzero.trainer import language_model_loss

    model, batch = _model_and_batch(config)
    engine = initialize(model, language_model_loss, config=config, devices=devices)
    return lambda: engine.step(batch)["loss"]


def measure(arms: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each of `rounds` steps by arm, the arms taking turns."""
    import jax

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


def _plain_step(config: Config) -> Callable[[], Any]:
    """What a user would write without jzero: fp32, one device, global clipping, the same optimizer and decay."""
    import jax
    import optax
    from flax import nnx

    from jzero.adapt import adapt
    from jzero.optim import make_optimizer
    from jzero.trainer import language_model_loss

    model, batch = _model_and_batch(config)
    graphdef, state, rest = nnx.split(model(nnx.Rngs(config.train.seed)), nnx.Param, ...)
    paths = {"/".join(map(str, path)): path for path, _ in nnx.to_flat_state(state)}
    clip = config.optimizer.clip_norm
    optimizer = make_optimizer(config.optimizer, config.train.num_steps, adapt(model).params)
    if clip is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(clip), optimizer)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        def mean_loss(params: Any) -> Any:
            state = nnx.from_flat_state([(paths[name], array) for name, array in params.items()])
            sums = language_model_loss(nnx.merge(graphdef, state, rest, copy=True), batch)
            return sums.total / sums.weight

        value, gradients = jax.value_and_grad(mean_loss)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value, optax.tree.norm(gradients)

    jitted = jax.jit(step, donate_argnums=(0, 1))
    params = {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}
    arrays = [params, optimizer.init(params)]

    def run() -> Any:
        *arrays[:], value, _ = jitted(*arrays, batch)
        return value

    return run


if __name__ == "__main__":
    sys.exit(main())
