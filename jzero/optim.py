"""Config -> optax: the schedule, the optimizer, which parameters decay; and how far an optimizer looks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core

from jzero.config import OptimizerConfig
from jzero.errors import ConfigError, ModelError
from jzero.jaxprs import Program, own_equations, subprograms

NOT_DECAYED = ("bias", "scale")


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """The learning rate by `count`, the number of updates applied before: the first update has count 0.

    With W = `warmup_steps`, E = `decay_steps` (None: `num_steps`), peak = `learning_rate` and
    final = `final_learning_rate`:

    - count 0: 0 where W > 0 (that first update moves nothing), else peak;
    - 0 <= count <= W: peak * count / W;
    - W <= count <= E: linear or half a cosine from peak at W to final at E; constant stays at peak; wsd stays there
      until E - `cooldown_steps`, then falls linearly (arXiv 2404.06395, section 4);
    - count >= E: final. With E = num_steps the last update, of count num_steps - 1, is one step short of it.
    - inverse_sqrt (arXiv 1706.03762, section 5.3): peak * sqrt(W / count) from W on, W at least 1;
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


def make_optimizer(
    config: OptimizerConfig,
    num_steps: int,
    decay_mask: Callable[[Any], dict[str, bool]] | dict[str, bool] | None,
) -> optax.GradientTransformation:
    """The configured optimizer over a flat dict of parameters. It does not clip: the step does.

    adamw decays apart from the gradient: p -= lr * weight_decay * p. sgd adds weight_decay * p to the
    gradient before momentum, as other frameworks do. adam takes no weight decay, since they disagree on which
    of the two it means there. A momentum of 0 keeps no momentum buffer.

    Args:
        decay_mask: what decays, by path (see `decay_mask`), or a function of the parameters that says so;
            None for everything.

    Raises:
        ConfigError: adam with weight decay, nesterov without momentum, or a fault of the schedule.
    """
    if config.name == "adam" and config.weight_decay:
        raise ConfigError(
            f"optimizer.weight_decay = {config.weight_decay}: means two things with optimizer.name = adam; "
            "choose adamw, which decays apart from the gradient, or drop it"
        )
    if config.name == "sgd" and config.nesterov and not config.momentum:
        raise ConfigError(
            f"optimizer.nesterov = true: looks ahead along optimizer.momentum = {config.momentum}; "
            "raise that above 0, or drop nesterov"
        )
    schedule = make_schedule(config, num_steps)
    if config.name == "adamw":
        return optax.adamw(
            schedule, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=decay_mask
        )
    if config.name == "adam":
        return optax.adam(schedule, config.b1, config.b2, config.eps)
    sgd = optax.sgd(schedule, momentum=config.momentum or None, nesterov=config.nesterov)
    return optax.chain(optax.add_decayed_weights(config.weight_decay, decay_mask), sgd)


def decay_mask(num_stack_dims: Mapping[str, int], shapes: Mapping[str, Sequence[int]]) -> dict[str, bool]:
    """Which parameters weight decay applies to: matrices and more, not vectors, biases or norm scales.

    Args:
        num_stack_dims: leading dims of a parameter that only stack layers, by path; none where absent. A
            stack of vectors is not a matrix.
        shapes: the parameters' true shapes, by path, stack dims included.
    """
    return {
        path: len(shape) - num_stack_dims.get(path, 0) >= 2 and path.rsplit("/", 1)[-1] not in NOT_DECAYED
        for path, shape in shapes.items()
    }


def assert_drivable(tx: Any, params: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raise ModelError unless `tx` is an optax transformation that `tx.update(gradients, state, params)` drives."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise ModelError(f"optimizer is {tx!r}: give an optax transformation such as optax.adamw(1e-3), called.")
    _trace_update(tx, dict(params))


def is_elementwise(tx: optax.GradientTransformation, params: Mapping[str, jax.ShapeDtypeStruct]) -> bool:
    """Whether `tx` moves every element by that element's own gradient, state and value alone.

    Such an optimizer may run on padded or sliced arrays; any other (norms, factored moments,
    orthogonalisation, noise) must see the true shapes. Read from the program of `tx.update`: True only
    where every operation on an array with dimensions is element by element and no number in it comes from a
    shape. Whatever is unknown is False. Scalars, such as counts and learning rates, may be computed in any
    way.

    Raises ModelError like `assert_drivable`.
    """
    params = dict(params)
    program = _trace_update(tx, params)
    if not _program_is_elementwise(program):
        return False
    # Far larger, to cross any size at which it would change its ways. Shapes only, so this costs nothing.
    larger = {p: jax.ShapeDtypeStruct([n + 4096 for n in x.shape], x.dtype) for p, x in params.items()}
    try:
        return _constants(program) == _constants(_trace_update(tx, larger))
    except Exception:  # It takes these shapes only, so shapes matter to it.
        return False


# fmt: off
# Primitives of jax.lax that compute element i of the result from element i of each operand and from scalars.
ELEMENTWISE_PRIMITIVES = frozenset((
    "add", "add_any", "sub", "mul", "div", "rem", "neg", "sign", "abs", "square", "sqrt", "rsqrt", "cbrt",
    "integer_pow", "pow", "exp", "exp2", "expm1", "log", "log1p", "logistic",
    "erf", "erfc", "erf_inv", "lgamma", "digamma",
    "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh",
    "floor", "ceil", "round", "nextafter", "max", "min", "clamp", "select_n",
    "eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to", "is_finite",
    "and", "or", "xor", "not", "shift_left", "shift_right_logical", "shift_right_arithmetic",
    "population_count", "real", "imag", "conj", "complex", "copy", "copy_p", "convert_element_type",
    "reduce_precision",
))
# Primitives that run programs of their own on their operands as they are. Not scan, which slices them.
CALL_PRIMITIVES = frozenset((
    "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call",
    "checkpoint", "remat", "remat2", "cond", "while",
))
# fmt: on


def _trace_update(tx: optax.GradientTransformation, params: dict[str, Any]) -> core.ClosedJaxpr:
    try:
        # optax relies on implicit promotion (Adam's b1**count), which a caller's strict mode forbids.
        with jax.numpy_dtype_promotion("standard"):
            return jax.make_jaxpr(tx.update)(params, jax.eval_shape(tx.init, params), params)
    except Exception as error:
        raise ModelError(
            f"optimizer.update(gradients, state, params) raised {type(error).__name__}: {error}. jzero passes these "
            "three only, and parameters as a flat dict of arrays, so an optimizer that also wants the loss, a function "
            "to call, or parameters of another kind cannot be driven"
        ) from error


def _program_is_elementwise(program: Any) -> bool:
    return not any(np.ndim(c) for c in _captured(program)) and all(
        _equation_is_elementwise(equation) for equation in own_equations(program)
    )


def _equation_is_elementwise(equation: Any) -> bool:
    name = equation.primitive.name
    shapes = {_shape(x) for x in (*equation.invars, *equation.outvars)} - {()}
    if not shapes:
        return True
    # An array written into the program holds one number for one element and another for the next.
    if any(isinstance(x, core.Literal) and _shape(x) for x in equation.invars):
        return False
    if name in CALL_PRIMITIVES:
        inner = subprograms(equation)
        return bool(inner) and all(map(_program_is_elementwise, inner))
    if name == "broadcast_in_dim":
        return not any(map(_shape, equation.invars))
    return name in ELEMENTWISE_PRIMITIVES and len(shapes) == 1


def _constants(program: Any) -> list[str]:
    """The operations of a program in order, with every number written into it."""
    found = [repr(c) for c in _captured(program)]
    for equation in own_equations(program):
        literals = (x.val for x in equation.invars if isinstance(x, core.Literal))
        settings = (v for v in equation.params.values() if isinstance(v, int | float))
        found += [equation.primitive.name, *map(repr, literals), *map(repr, settings)]
        for inner in subprograms(equation):
            found += _constants(inner)
    return found


def _captured(program: Program) -> Sequence[Any]:
    """The values a program closes over."""
    return program.consts if isinstance(program, core.ClosedJaxpr) else ()


def _shape(variable: Any) -> tuple[int, ...]:
    """Of a program's variable; () for what is no array, such as a token."""
    return getattr(variable.aval, "shape", ())
