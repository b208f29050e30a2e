"""Plain functions behind the model protocol."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jzero.errors import ModelError
from jzero.gathered import gather
from jzero.leaf import AbstractParam
from jzero.model_api import RNG, Arrays, abstract_key, fold_in
from jzero.paths import matching


@dataclass(frozen=True)
class Function:
    """A model of two functions: init(key) -> parameters, any pytree of float arrays; apply(params, ...) -> outputs.

    A loss calls the model without its parameters: `model(x)`. `model.train` tells training from evaluation, and
    `model.rng` is a random key, another one each micro-batch; None in evaluation.

    stacked: paths (patterns of fnmatch, as in "blocks/*") of parameters whose leading dimension stacks layers.
    gathers: apply calls `jzero.gather` on the part of the parameters it is about to use, which at stage 3 is how a
    layer is gathered inside a loop over layers; otherwise it is handed all of them gathered.
    """

    init: Callable[[jax.Array], Any]
    apply: Callable[..., Any]
    stacked: Sequence[str] = ()
    gathers: bool = False


@dataclass(frozen=True)
class FunctionModel:
    function: Function
    structure: Any
    params: Mapping[str, AbstractParam]

    @property
    def model_state(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        return {RNG: abstract_key()}

    def given(self, seed: int) -> None:
        return None

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        return _flat(self.function.init(key)), {RNG: key}

    def bind(
        self, params: Mapping[str, Any], model_state: Mapping[str, Any], fold: Any, *, train: bool
    ) -> "BoundFunction":
        tree = jax.tree.unflatten(self.structure, [params[path] for path in self.params])
        rng = fold_in(model_state[RNG], fold) if train else None
        return BoundFunction(self.function.apply, tree if self.function.gathers else gather(tree), train, rng)

    def collect(self, bound: Any) -> Arrays:
        return {}


@dataclass(frozen=True)
class BoundFunction:
    """A plain function with its parameters, as a loss calls it."""

    apply: Callable[..., Any]
    params: Any
    train: bool
    rng: jax.Array | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.apply(self.params, *args, **kwargs)


def adapt_function(function: Function) -> FunctionModel:
    shapes = jax.eval_shape(function.init, jax.random.key(0))
    flat = _flat(shapes)
    if not flat:
        raise ModelError("jzero.Function: init(key) returned no arrays, so there is nothing to train.")
    for path, leaf in flat.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ModelError(
                f"{path}: a parameter of dtype {leaf.dtype} has no gradient; let apply close over it instead of init "
                "returning it."
            )
    stacked = matching("jzero.Function: stacked", function.stacked, flat)
    params = {path: AbstractParam(leaf.shape, leaf.dtype, int(path in stacked)) for path, leaf in flat.items()}
    return FunctionModel(function, jax.tree.structure(shapes), params)


def _flat(tree: Any) -> Arrays:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in leaves}
