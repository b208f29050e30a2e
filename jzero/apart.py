"""Whether devices can compute a loss apart, each on its own rows: told from the program, before it is compiled."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives
from jax.sharding import NamedSharding

from jzero.errors import CollectivesError
from jzero.jaxprs import equations
from jzero.leaf import axis_names
from jzero.mesh import BATCH_AXES
from jzero.mixing import Effect, Term, batch_flow
from jzero.reads import assert_reads, read_once


def computed_apart(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn(carriers, params, model_state, batch, ...), found to be one that devices can compute apart, which reads each
    parameter once. Raises CollectivesError otherwise."""

    def run(*args: Any) -> Any:
        try:
            program, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        except (TypeError, ValueError) as error:
            if "with_sharding_constraint" in str(error):  # by a PartitionSpec alone
                raise _pinned(str(error)) from error
            _assert_any_rows(fn, args, error)
            raise
        _assert_not_pinned(program)
        _assert_sums(fn, args, program, out)
        variables = jax.tree.unflatten(jax.tree.structure(args), program.jaxpr.invars)
        assert_reads(program, {variable: path for path, variable in variables[1].items()})
        outputs = core.jaxpr_as_fun(read_once(program))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), outputs)

    return run


def _assert_any_rows(fn: Callable[..., Any], args: tuple[Any, ...], error: Exception) -> None:
    """Raise CollectivesError where a loss that cannot be traced for a device's rows can be for all."""
    rows = jax.tree.leaves(args[3])[0].shape[0]
    everything = rows * math.prod(jax.lax.axis_size(axis) for axis in BATCH_AXES)
    if everything > rows and _of_rows(fn, args, everything):
        raise CollectivesError(
            f"the model or the loss takes a micro-batch of {everything} rows, but not the {rows} that each device has "
            f"of it under zero.collectives = explicit ({error}); set zero.collectives: xla"
        ) from error


def _assert_not_pinned(program: core.ClosedJaxpr) -> None:
    for equation in equations(program):
        if equation.primitive is primitives.sharding_constraint_p:
            sharding = equation.params["sharding"]
            spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
            if any(axis in BATCH_AXES for entry in spec for axis in axis_names(entry)):
                raise _pinned(str(spec))


def _assert_sums(fn: Callable[..., Any], args: tuple[Any, ...], program: core.ClosedJaxpr, out: Any) -> None:
    """Raise CollectivesError where the loss is certainly no sum over the rows, or the model's new state is not the same
    whatever they are. Warns of such a metric."""
    num_rows = jax.tree.leaves(args[3])[0].shape[0]
    if num_rows == 1:  # of which nothing can be told
        program = _of_rows(fn, args, 2) or program
    sums, model_state = _flows(program, args, out)
    for path, flow in model_state.items():
        if flow.effect is not Effect.INDEPENDENT:
            raise CollectivesError(
                f"{path}: the model computes this state from the batch (batch statistics, say), and under "
                "zero.collectives = explicit a device sees its own rows alone; set zero.collectives: xla"
            )
    total, weight = sums.loss.total, sums.loss.weight
    for part in (total, weight):
        if part.effect is Effect.MIXED:
            raise CollectivesError(
                f"the loss is no sum over the rows of its batch: {part.where}. Under zero.collectives = explicit a "
                "device sees its own rows alone. If it divides by something counted over rows, return "
                "jzero.WeightedLoss(total, weight); else set zero.collectives: xla"
            )
    shifted = [part.effect is Effect.SHIFTED for part in (total, weight)]
    if shifted[1] or (shifted[0] and weight.effect is Effect.SUM):
        raise CollectivesError(
            f"the {'weight' if shifted[1] else 'total'} of the loss is a sum over rows with something "
            "added that is not, which zero.collectives = explicit would count once on each device. Let it grow with "
            "the weight (penalty * weight), or set zero.collectives: xla"
        )
    if any(isinstance(term, Term) and term.clipped for term in weight.terms):
        warnings.warn(
            "the weight of the loss has a bound, max(count, 1) say, which under zero.collectives = explicit each "
            "device reaches by its own rows; leave it out: a weight of zero is no trouble",
            stacklevel=2,
        )
    more = _of_rows(fn, args, 3 * num_rows) if weight.value else None
    if more and _flows(more, args, out)[0].loss.weight.value == weight.value:
        raise CollectivesError(
            f"the loss has a weight of {weight.value:g} however many rows the batch has, and under zero.collectives = "
            "explicit the weights of all devices add up; let it grow with the rows (or return the mean, a scalar), or "
            "set zero.collectives: xla"
        )
    for name, extra in sums.extras.items():
        if Effect.MIXED in (extra.total.effect, extra.weight.effect):
            warnings.warn(
                f"metric {name!r} is no sum over the rows of its batch: {extra.total.where or extra.weight.where}. "
                "Under zero.collectives = explicit it is the average of what it is on each device; return "
                "jzero.WeightedLoss(total, weight) if it divides by a count",
                stacklevel=2,
            )


def _of_rows(fn: Callable[..., Any], args: tuple[Any, ...], num_rows: int) -> core.ClosedJaxpr | None:
    """The program for a batch of so many rows; None for a model that takes no other number than its own."""
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype), args[3])
    try:
        return jax.make_jaxpr(fn)(*args[:3], batch, *args[4:])
    except (TypeError, ValueError):
        return None


def _flows(program: core.ClosedJaxpr, args: tuple[Any, ...], out: Any) -> tuple[Any, Any]:
    """What the LossSums and the model state that a program returns are of its batch."""
    rows = [number == 3 for number, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    _, (sums, _, model_state) = jax.tree.unflatten(jax.tree.structure(out), batch_flow(program, rows))
    return sums, model_state


def _pinned(told: str) -> CollectivesError:
    told = told.partition(". ")[0]
    return CollectivesError(
        f"the model or the loss places an array itself: {told}. Under zero.collectives = explicit a device has its own "
        f"rows alone: leave {' and '.join(BATCH_AXES)} out of that constraint, or set zero.collectives: xla"
    )
