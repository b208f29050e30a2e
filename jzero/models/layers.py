"""A stack of equal layers: scanned over stacked parameters, or a list. Both start from the same numbers."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

Layer = TypeVar("Layer", bound=nnx.Module)

REMAT_POLICIES = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


def make_layers(make_layer: Callable[[nnx.Rngs], Layer], num_layers: int, scan: bool, rngs: nnx.Rngs) -> Any:
    """One module whose parameters have a leading layer dimension (`scan`), or an `nnx.List` of modules.

    Layer i is initialised from the same key either way.
    """
    keys = jax.random.split(rngs.params(), num_layers)
    if scan:
        return nnx.vmap(lambda key: make_layer(nnx.Rngs(params=key)))(keys)
    return nnx.List([make_layer(nnx.Rngs(params=key)) for key in keys])


def run_layers(
    layers: Any, x: Array, shared: Mapping[str, Array], *, scan: bool, remat: Literal["none", "dots", "full"]
) -> Array:
    """x -> layer(x, **shared) for each layer in turn; `shared` arrays are the same for all of them.

    `remat` says what a layer keeps for the backward pass: "none" keeps every intermediate, "dots" the
    results of matrix products with parameters, "full" nothing but the layer's input. Parameters are read
    inside the rematerialised function, so one that is gathered when read is gathered again and not kept.
    """

    def apply_layer(layer, x, shared):
        return layer(x, **shared)

    if remat != "none":
        # The two loops of a scan are separate programs, so there is nothing to keep XLA from merging.
        apply_layer = nnx.remat(apply_layer, policy=REMAT_POLICIES[remat], prevent_cse=not scan)
    if scan:
        return nnx.scan(apply_layer, in_axes=(0, nnx.Carry, None), out_axes=nnx.Carry)(layers, x, shared)
    for layer in layers:
        x = apply_layer(layer, x, shared)
    return x


def unstack_layers(params: Mapping[str, Array], prefix: str = "layers") -> dict[str, Array]:
    """Flat parameters of a scanned model -> those of its listed twin.

    "layers/norm/scale" [L, D] becomes "layers/0/norm/scale" [D], "layers/1/norm/scale" [D], ...
    """
    unstacked = {}
    for path, value in params.items():
        if path.startswith(f"{prefix}/"):
            rest = path.removeprefix(f"{prefix}/")
            unstacked |= {f"{prefix}/{i}/{rest}": value[i] for i in range(value.shape[0])}
        else:
            unstacked[path] = value
    return unstacked


def stack_layers(params: Mapping[str, Array], prefix: str = "layers") -> dict[str, Array]:
    """The inverse of `unstack_layers`: a listed model's parameters -> those of its scanned twin."""
    stacked: dict[str, Any] = {}
    for path, value in params.items():
        if match := re.fullmatch(rf"{re.escape(prefix)}/(\d+)/(.+)", path):
            stacked.setdefault(f"{prefix}/{match[2]}", {})[int(match[1])] = value
        else:
            stacked[path] = value
    return {
        path: jnp.stack([value[i] for i in range(len(value))]) if isinstance(value, dict) else value
        for path, value in stacked.items()
    }
