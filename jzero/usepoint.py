"""What happens when a model reads a parameter: cast to the compute dtype, gather, cut padding off; in the backward pass
pad, reduce, scatter. The same for both engines, which differ in how they gather and scatter."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.extend.core import primitives

from jzero.errors import PlanError
from jzero.jaxprs import own_equations
from jzero.scopes import GATHER, SCATTER, scope

_NAME = "jzero_use_point"
_GRADIENT = "jzero_gradient:"


@dataclass(frozen=True)
class UsePoint:
    """How one parameter is read.

    shape: the true one, stack dims included; dim: the one that is split and padded, else None; stored_shape: with
    padding; held_shape: of the array that the model holds, which under shard_map is a device's own part.
    gather(array, dropped): held to stored shape; scatter(cotangent, dropped): stored shape to that of the gradient.
    dropped: how many leading stack dims both lack.
    carried: the gradient is that of a carrier (see `read`), not of the stored array.
    """

    path: str
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    held_shape: tuple[int, ...]
    dim: int | None
    stored_dtype: Any
    compute_dtype: Any
    gather: Callable[[jax.Array, int], jax.Array]
    scatter: Callable[[jax.Array, int], jax.Array]
    carried: bool = False

    def read(self, stored: jax.Array, carrier: jax.Array | None = None) -> jax.Array:
        """The parameter in its true shape and compute dtype.

        stored may lack leading dims of the stored shape: a scan or vmap over a layer stack has taken them.
        carrier: zeros of the gradient's shape, which need not be the stored one's: the cotangent goes to it.
        """
        dropped = len(self.shape) - stored.ndim
        if self.dim is not None and self.dim < dropped:
            raise PlanError(
                f"{self.path}: dim {self.dim} of {self.shape} is split over devices, but the model loops over it layer "
                "by layer, so every device would gather the whole stack. Give jzero the function that builds the model "
                "(stacks made by nnx.vmap are then recognised) instead of the built model; of a jzero.Function, name "
                "the parameter in `stacked`."
            )
        if self.dim is not None and stored.shape[self.dim - dropped] != self.held_shape[self.dim]:
            raise PlanError(
                f"{self.path}: {stored.shape} is no stack of layers, or layer, of {self.held_shape}. Layers must be "
                "stacked and looped over along the leading dim (axis 0 of nnx.vmap and nnx.scan)."
            )
        return _read(self, dropped, stored, carrier)

    @property
    def padded(self) -> bool:
        return self.shape != self.stored_shape


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _read(use: UsePoint, dropped: int, stored: jax.Array, carrier: jax.Array | None) -> jax.Array:
    with jax.named_scope(scope(GATHER, use.path)):
        # Cast before the gather: the wire then carries the compute dtype.
        array = use.gather(stored.astype(use.compute_dtype), dropped)
    if use.dim is not None and use.padded:
        # Gather first, cut afterwards: a cut of the sharded array could not be even.
        array = jax.lax.slice_in_dim(array, 0, use.shape[use.dim], axis=use.dim - dropped)
    return checkpoint_name(array, _NAME)


def _read_forward(use: UsePoint, dropped: int, stored: Any, carrier: Any) -> tuple[jax.Array, None]:
    return _read(use, dropped, stored, carrier), None


def _read_backward(use: UsePoint, dropped: int, _: None, cotangent: jax.Array) -> tuple[Any, Any]:
    if use.dim is not None and use.padded:
        pad = [(0, 0)] * cotangent.ndim
        pad[use.dim - dropped] = (0, use.stored_shape[use.dim] - use.shape[use.dim])
        cotangent = jnp.pad(cotangent, pad)
    with jax.named_scope(scope(SCATTER, use.path)):
        gradient = use.scatter(cotangent, dropped)
    if use.carried:
        return None, checkpoint_name(gradient, f"{_GRADIENT}{use.path}")
    return gradient.astype(use.stored_dtype), None


_read.defvjp(_read_forward, _read_backward)


def carried_gradient(equation: core.JaxprEqn) -> str | None:
    """The path of the parameter whose gradient, on its way to a carrier, an equation makes."""
    name = str(equation.params.get("name", ""))
    return name.removeprefix(_GRADIENT) if name.startswith(_GRADIENT) else None


def is_use_point(primitive: core.Primitive, params: Mapping[str, Any]) -> bool:
    """Whether an equation of a program that was not differentiated yet is the read of a parameter."""
    if primitive is not primitives.custom_vjp_call_p:
        return False
    return any(inner.params.get("name") == _NAME for inner in own_equations(params["call_jaxpr"]))
