"""Whether devices can compute a loss apart, each on its own rows: told from the program, before it is compiled."""

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
from jzero.reads import assert_reads, read_once


def computed_apart(fn: Callable[..., Any]) -> Callable[..., Any]:
    """fn(carriers, params, model_state, batch, ...), found to be one that devices can compute apart, which reads each
    parameter once. Raises CollectivesError otherwise."""

    def run(*args: Any) -> Any:
        try:
            program, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        except ValueError as error:
            if "with_sharding_constraint" in str(error):  # by a PartitionSpec alone
                raise _pinned(str(error)) from error
            raise
        _assert_not_pinned(program)
        variables = jax.tree.unflatten(jax.tree.structure(args), program.jaxpr.invars)
        assert_reads(program, {variable: path for path, variable in variables[1].items()})
        outputs = core.jaxpr_as_fun(read_once(program))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), outputs)

    return run


def _assert_not_pinned(program: core.ClosedJaxpr) -> None:
    for equation in equations(program):
        if equation.primitive is primitives.sharding_constraint_p:
            sharding = equation.params["sharding"]
            spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
            if any(axis in BATCH_AXES for entry in spec for axis in axis_names(entry)):
                raise _pinned(str(spec))


def _pinned(told: str) -> CollectivesError:
    return CollectivesError(
        f"the model or the loss places an array itself: {told.partition('. ')[0]}. Under zero.collectives = explicit a device has its own "
        f"rows alone: leave {' and '.join(BATCH_AXES)} out of that constraint, or set zero.collectives: xla"
    )
