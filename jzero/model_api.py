"""What the rest of jzero needs of a model, whatever it was written with."""

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jzero.errors import ModelError
from jzero.leaf import AbstractParam

Arrays = dict[str, Any]

# The random key in the model state of a model that keeps none of its own.
RNG = "rng"


class Model(Protocol):
    """A model by the paths of its arrays. params and model_state are abstract."""

    @property
    def params(self) -> Mapping[str, AbstractParam]: ...

    @property
    def model_state(self) -> Mapping[str, jax.ShapeDtypeStruct]: ...

    def given(self, seed: int) -> tuple[Arrays, Arrays] | None:
        """Parameters and model state that the user brought, as host arrays; None: `init` makes them."""
        ...

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        """Parameters and model state of a seed, in true shapes; traceable."""
        ...

    def bind(self, params: Mapping[str, Any], model_state: Mapping[str, Any], fold: Any, *, train: bool) -> Any:
        """The model as a loss calls it. fold: int32 [n] (step, micro-batch, ...), mixed into every random stream."""
        ...

    def collect(self, bound: Any) -> Arrays:
        """The model state after the loss has run on `bound`. Raises ModelError for state that changed its shape."""
        ...


def assert_carried(path: str, before: Any, after: Any, otherwise: str) -> None:
    """otherwise: how to write what is not meant to be carried."""
    if before is None:
        raise ModelError(
            f"{path}: the model makes this while it runs. Make it when the model is built, or {otherwise}."
        )
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        raise ModelError(
            f"{path}: the model turns {before.dtype}{before.shape} into {after.dtype}{after.shape} while it runs; "
            "state that is carried from step to step keeps its shape and dtype."
        )


def host_copies(values: Arrays) -> Arrays:
    """Host copies: placing them must not start from a whole copy on one device. Random keys stay as they are."""
    return {p: v if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else np.asarray(v) for p, v in values.items()}


def abstract_key() -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda: jax.random.key(0))


def fold_in(key: jax.Array, fold: Any) -> jax.Array:
    """A key, or an array of keys (one a scanned layer), mixed with each of the numbers (int32 [n])."""
    mixed = lambda k: functools.reduce(jax.random.fold_in, list(fold), k)
    return jax.vmap(mixed)(key.reshape(-1)).reshape(key.shape)
