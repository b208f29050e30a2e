"""Config -> the optimizer by its name, and what it decays and how fast it moves each parameter."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from optax import contrib

from jzero.adam8bit import scale_by_adam8bit
from jzero.config import OptimizerConfig
from jzero.leaf import AbstractParam
from jzero.paths import matching
from jzero.schedules import make_schedule

NOT_DECAYED = ("bias", "scale")
NO_MATRICES = ("embed", "lm_head")
# The root mean square of AdamW's updates, to which Muon's are brought: one learning rate then serves both
# (arXiv 2502.16982, section 2.2).
MUON_RMS = 0.2


class Settings(NamedTuple):
    """One parameter's own. learning_rate_factor: times the schedule. weight_decay: 0 where it does not decay."""

    learning_rate_factor: float
    weight_decay: float


def settings_by_path(config: OptimizerConfig, params: Mapping[str, AbstractParam]) -> dict[str, Settings]:
    """What holds for each parameter, by path: of the last of `config.groups` that matches it, else of all.

    Without a group's word matrices and more decay, not vectors, biases or norm scales, nor stacks of them.

    Raises:
        ConfigError: a pattern that matches no parameter, with the nearest paths.
    """

    def decays(path: str, param: AbstractParam) -> bool:
        return len(param.shape) - param.stack_ndim >= 2 and path.rsplit("/", 1)[-1] not in NOT_DECAYED

    usual = {path: config.weight_decay if decays(path, p) else 0.0 for path, p in params.items()}
    settings = {path: Settings(1.0, decay) for path, decay in usual.items()}
    for number, group in enumerate(config.groups):
        for path in matching(f"optimizer.groups[{number}].match", group.match, params, "trained parameter"):
            decay = usual[path] if group.weight_decay is None else group.weight_decay
            settings[path] = Settings(group.learning_rate_factor, decay)
    return settings


def make_optimizer(
    config: OptimizerConfig, num_steps: int, params: Mapping[str, AbstractParam]
) -> optax.GradientTransformation:
    """The configured optimizer over a flat dict of these parameters. It does not clip: the step does.

    Each has optax's numbers of that name. Weight decay is decoupled, p -= lr * weight_decay * p, with two exceptions:
    sgd adds weight_decay * p to the gradient before momentum, as other frameworks do; lamb adds it before its ratio of
    norms. adam takes no weight decay, since frameworks disagree on which of the two it means there. A momentum of 0
    keeps no buffer.

    Raises:
        ConfigError: a pattern that matches nothing, or a fault of the schedule.
    """
    schedule, settings = make_schedule(config, num_steps), settings_by_path(config, params)
    optimizer = optax.chain(
        *_directions(config, params, _decay(settings)),
        optax.scale_by_learning_rate(schedule),
        _by_path(lambda path, u, p: settings[path].learning_rate_factor * u),
    )
    return contrib.schedule_free(optimizer, schedule, config.b1) if config.name == "schedule_free" else optimizer


def averaged_weights(opt_state: Any, weights: Mapping[str, Any]) -> dict[str, Any] | None:
    """The weights that schedule-free optimizers in an optimizer's state mean to be used, by path; None without one.

    weights: what the optimizer updates. Parameters that such an optimizer does not own stay as they are.
    """
    states = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, contrib.ScheduleFreeState))
    found: list[Any] = [state for state in states if isinstance(state, contrib.ScheduleFreeState)]
    averages = dict(weights)
    for state in found:
        # As contrib.schedule_free_eval_params, which takes no part of the parameters.
        own = {path: z for path, z in state.z.items() if not isinstance(z, optax.MaskedNode)}
        averages |= {path: (weights[path] - (1.0 - state.b1) * z) / state.b1 for path, z in own.items()}
    return averages if found else None


def _directions(
    config: OptimizerConfig, params: Mapping[str, AbstractParam], decay: optax.GradientTransformation
) -> list[optax.GradientTransformation]:
    """What turns a gradient into a direction, decay included, before the learning rate."""
    b1, b2, eps, stacks = config.b1, config.b2, config.eps, {path: p.stack_ndim for path, p in params.items()}
    match config.name:
        case "adamw" | "adam":
            return [optax.scale_by_adam(b1, b2, eps), decay]
        case "adamw8bit":
            return [scale_by_adam8bit(b1, b2, eps, num_stack_dims=stacks), decay]
        case "sgd":
            trace = [optax.trace(config.momentum, config.nesterov)] if config.momentum else []
            return [decay, *trace]
        case "lion":
            return [optax.scale_by_lion(b1, b2), decay]
        case "lamb":
            return [optax.scale_by_adam(b1, b2, eps), decay, _a_layer(optax.scale_by_trust_ratio(), stacks)]
        case "adagrad":
            return [optax.scale_by_rss(eps=eps), decay]
        case "adafactor":
            norms = [_a_layer(tx, stacks) for tx in (optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms())]
            momentum = [optax.ema(config.momentum, debias=False)] if config.momentum else []
            return [optax.scale_by_factored_rms(), *norms, *momentum, decay]
        case "muon":
            return [_muon(config, params), decay]
        case "schedule_free":
            return [optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True), decay]


def _muon(config: OptimizerConfig, params: Mapping[str, AbstractParam]) -> optax.GradientTransformation:
    """Muon for matrices, a layer at a time; Adam for anything else, and for embeddings and the output layer."""
    if config.muon_exclude is None:
        excluded = {path for path in params if any(name in path.lower() for name in NO_MATRICES)}
    else:
        excluded = matching("optimizer.muon_exclude", config.muon_exclude, params, "trained parameter")
    matrices = {path for path, p in params.items() if len(p.shape) - p.stack_ndim == 2 and path not in excluded}
    dims = {path: contrib.MuonDimensionNumbers(-2, -1) if path in matrices else optax.MaskedNode() for path in params}
    return optax.partition(
        {
            "muon": optax.chain(
                contrib.scale_by_muon(
                    beta=config.momentum, eps=config.eps, nesterov=config.nesterov, weight_dimension_numbers=dims
                ),
                _by_path(lambda path, u, p: MUON_RMS * max(u.shape[-2:]) ** 0.5 * u),
            ),
            "adam": optax.scale_by_adam(config.b1, config.b2, config.eps, nesterov=config.nesterov),
        },
        {path: "muon" if path in matrices else "adam" for path in params},
    )


def _decay(settings: Mapping[str, Settings]) -> optax.GradientTransformation:
    rates = {path: own.weight_decay for path, own in settings.items()}
    return _by_path(lambda path, u, p: u + rates[path] * p if rates[path] else u)


def _a_layer(tx: optax.GradientTransformation, stacks: Mapping[str, int]) -> optax.GradientTransformation:
    """A stateless transformation that takes each layer of a stack for an array of its own."""

    def update(path: str, u: Any, p: Any) -> Any:
        one = lambda u, p: tx.update(u, optax.EmptyState(), p)[0]
        for _ in range(stacks[path]):
            one = jax.vmap(one)
        return one(u, p)

    return _by_path(update)


def _by_path(update: Callable[[str, Any, Any], Any]) -> optax.GradientTransformation:
    """update(path, update so far, parameter) -> update, for each leaf of a flat dict."""

    def each(updates: Any, params: Any) -> Any:
        return {
            path: u if isinstance(u, optax.MaskedNode) else update(path, u, params[path]) for path, u in updates.items()
        }

    return optax.stateless(each)
