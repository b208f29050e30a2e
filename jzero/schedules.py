"""Config -> the learning rate by step."""

import jax.numpy as jnp
import optax

from jzero.config import OptimizerConfig
from jzero.errors import ConfigError


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """The learning rate by `count`, the number of updates applied before: the first update has count 0.

    With W = `warmup_steps`, E = `decay_steps` (None: `num_steps`), peak = `learning_rate` and
    final = `final_learning_rate`:

    - count 0: 0 where W > 0 (that first update moves nothing), else peak;
    - 0 <= count <= W: peak * count / W;
    - W <= count <= E: linear or half a cosine from peak at W to final at E; constant stays at peak; wsd stays there
      until E - `cooldown_steps`, then falls linearly (arXiv 2404.06395, section 4);
    - count >= E: final. With E = num_steps the last update, of count num_steps - 1, is one step short of it.
    - inverse_sqrt (arXiv 1706.03762, section 5.3): peak * sqrt(W / count) from W on; without a warm-up
      peak / sqrt(1 + count);
    - piecewise: peak * `factors`[i] from `boundaries`[i] on.

    Returns:
        A function of an int or an integer array, giving a float32 scalar; traceable.

    Raises:
        ConfigError: a warm-up, or a warm-up and a cool-down, that do not fit in the steps.
    """
    peak, final, warmup = config.learning_rate, config.final_learning_rate, config.warmup_steps
    end = num_steps if config.decay_steps is None else config.decay_steps
    cooldown = config.cooldown_steps or max(1, end // 10)
    if config.schedule in ("linear", "cosine", "wsd"):
        _assert_room(config, num_steps, cooldown if config.schedule == "wsd" else 1)
    offset = max(warmup, 1)
    after_warmup = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, final, end - warmup),
        "cosine": lambda: optax.cosine_decay_schedule(peak, end - warmup, alpha=final / peak if peak else 0.0),
        "wsd": lambda: optax.linear_schedule(peak, final, cooldown, end - cooldown - warmup),
        "inverse_sqrt": lambda: lambda count: peak * jnp.sqrt(offset / (offset + count)),
        "piecewise": lambda: optax.join_schedules(
            [optax.constant_schedule(peak * factor) for factor in (1.0, *config.factors)],
            [boundary - warmup for boundary in config.boundaries],
        ),
    }[config.schedule]()
    schedule = after_warmup
    if warmup:
        schedule = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after_warmup], [warmup])
    # optax mixes the count with floats, which strict dtype promotion forbids for integers.
    return lambda count: jnp.asarray(schedule(jnp.asarray(count, jnp.float32)), jnp.float32)


def _assert_room(config: OptimizerConfig, num_steps: int, decay: int) -> None:
    """Raise ConfigError unless the warm-up leaves `decay` steps."""
    name, end = (
        ("train.num_steps", num_steps) if config.decay_steps is None else ("optimizer.decay_steps", config.decay_steps)
    )
    if config.warmup_steps + decay > end:
        cooldown = f" and optimizer.cooldown_steps = {decay}" if config.schedule == "wsd" else ""
        raise ConfigError(
            f"optimizer.warmup_steps = {config.warmup_steps}{cooldown}: leaves nothing of {name} = {end} to decay in; "
            "lower the first, raise the last, or set optimizer.schedule: constant"
        )
