"""Models behind one protocol: what they are made of, how they start, how a loss gets to call them.

Flax NNX modules are taken unchanged, as a function `lambda rngs: Model(rngs=rngs)` or as a built module.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jzero.errors import ModelError
from jzero.plan import AbstractParam
from jzero.usepoint import Gathered

Arrays = dict[str, Any]


class Model(Protocol):
    """What the rest of jzero needs of a model.

    params and model_state are abstract, by path. `values` holds what a built model starts from (host arrays), or None.
    """

    @property
    def params(self) -> Mapping[str, AbstractParam]: ...

    @property
    def model_state(self) -> Mapping[str, jax.ShapeDtypeStruct]: ...

    @property
    def values(self) -> tuple[Arrays, Arrays] | None: ...

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        """Parameters and model state of a seed, in true shapes; traceable."""
        ...

    def bind(self, params: Mapping[str, Any], model_state: Mapping[str, Any], fold: Any, *, train: bool) -> Any:
        """The model as a loss calls it. fold: int32 scalar mixed into every random stream, one value a micro-batch."""
        ...

    def collect(self, bound: Any) -> Arrays:
        """The model state after the loss has run on `bound`."""
        ...


def adapt(model: Any) -> Model:
    """A Model of what the user brings. Raises ModelError for what jzero cannot drive."""
    if isinstance(model, nnx.Module):
        return _adapt_nnx(model, None)
    if callable(model) and not isinstance(model, type):
        return _adapt_nnx(*_build_abstract(model), model)
    raise ModelError(
        f"model is {model!r}: give a Flax NNX module or a function of nnx.Rngs that builds one, "
        "such as lambda rngs: MyModel(rngs=rngs)."
    )


@dataclass(frozen=True)
class NNXModel:
    """A Flax NNX module: graphdef and abstract states, and the names its variables go by."""

    graphdef: Any
    abstract: tuple[Any, Any]
    build: Callable[[nnx.Rngs], nnx.Module] | None
    params: Mapping[str, AbstractParam]
    model_state: Mapping[str, jax.ShapeDtypeStruct]
    values: tuple[Arrays, Arrays] | None

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        assert self.build is not None, "a built module has values, not an init"
        with nnx.use_eager_sharding(False):  # placement is the plan's, not the variable's at its creation
            module = self.build(nnx.Rngs(key))
        return _raw_values(_variables(module, nnx.Param)), _raw_values(_variables(module, _NOT_PARAM))

    def bind(self, params: Mapping[str, Any], model_state: Mapping[str, Any], fold: Any, *, train: bool) -> nnx.Module:
        module = nnx.merge(self.graphdef, *self.abstract, copy=True)
        for path, variable in _variables(module, nnx.Param).items():
            variable.set_raw_value(params[path])
            variable.set_metadata(on_get_value=_read, on_set_value=_refuse_write, **{_PATH: path})
        for path, variable in _variables(module, _NOT_PARAM).items():
            value = model_state[path]
            variable.set_raw_value(_fold_in(value, fold) if isinstance(variable, nnx.RngKey) else value)
        if not train:
            module.eval()
        return module

    def collect(self, bound: nnx.Module) -> Arrays:
        """Everything but random streams, which depend on (seed, step, micro-batch) and so never change."""
        return {
            path: variable.get_raw_value()
            for path, variable in _variables(bound, _NOT_PARAM).items()
            if not isinstance(variable, nnx.RngState)
        }


_NOT_PARAM = nnx.Not(nnx.Param)


def _adapt_nnx(module: nnx.Module, ranks: Mapping[str, int] | None, build: Any = None) -> NNXModel:
    params, state = _variables(module, nnx.Param), _variables(module, _NOT_PARAM)
    graphdef, *states = nnx.split(module, nnx.Param, ...)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tuple(states))
    return NNXModel(
        graphdef,
        abstract,
        build,
        {path: _abstract_param(path, variable, ranks) for path, variable in params.items()},
        {path: jax.ShapeDtypeStruct(v.shape, v.dtype) for path, v in _raw_values(state).items()},
        None if build else (_host(_raw_values(params)), _host(_raw_values(state))),
    )


def _build_abstract(build: Callable[[nnx.Rngs], Any]) -> tuple[nnx.Module, dict[str, int]]:
    """The module in shapes only, and the rank each parameter had when its layer created it.

    A parameter that nnx.vmap stacked afterwards has a higher rank than that: the difference is its stack dims.
    """
    with _recorded_ranks(), nnx.use_eager_sharding(False):
        module = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    if not isinstance(module, nnx.Module):
        raise ModelError(f"the model function returned {type(module).__name__}, not a Flax NNX module.")
    ranks = {
        path: v.get_metadata()[_RANK] for path, v in _variables(module, nnx.Param).items() if _RANK in v.get_metadata()
    }
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Variable) and _RANK in node.get_metadata():
            node.del_metadata(_RANK)
    return module, ranks


_RANK = "jzero_created_rank"
_PATH = "jzero_path"


@contextlib.contextmanager
def _recorded_ranks() -> Iterator[None]:
    """Variables made inside keep the rank they were made with as metadata, which nnx.vmap carries along.

    Patches Variable.create_value, the method Flax documents for subclasses to override: a user's module creates plain
    nnx.Param, and nothing else tells a stack of biases from a matrix.
    """
    original = nnx.Variable.create_value

    def create_value(self: Any, value: Any) -> Any:
        self.set_metadata(_RANK, jnp.ndim(value))
        return original(self, value)

    nnx.Variable.create_value = create_value
    try:
        yield
    finally:
        nnx.Variable.create_value = original


def _variables(module: nnx.Module, kind: Any) -> dict[str, Any]:
    """The distinct variables of a kind by path, shared ones once under their first path."""
    found = dict(nnx.iter_graph(module))
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(module, kind))]
    named = {"/".join(map(str, path)): found[path] for path in paths}
    return {name: variable for name, variable in named.items() if variable.get_raw_value() is not None}


def _raw_values(variables: Mapping[str, Any]) -> Arrays:
    values = {path: variable.get_raw_value() for path, variable in variables.items()}
    for path, value in values.items():
        if not hasattr(value, "dtype"):
            raise ModelError(f"{path}: holds a {type(value).__name__}, not an array; jzero places arrays.")
    return values


def _abstract_param(path: str, variable: Any, ranks: Mapping[str, int] | None) -> AbstractParam:
    value = _raw_values({path: variable})[path]
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ModelError(
            f"{path}: an nnx.Param of dtype {value.dtype} has no gradient; make it an nnx.Variable of another type."
        )
    if ranks is None:
        # A built module does not tell its stacks: assume one wherever that costs nothing.
        name = path.rsplit("/", 1)[-1]
        stack = int(value.ndim >= 3 or (value.ndim == 2 and name in ("bias", "scale")))
    else:
        stack = value.ndim - ranks.get(path, value.ndim)
    spec = nnx.get_partition_spec(variable).get_value() if "out_sharding" in variable.get_metadata() else ()
    entries = tuple(spec or ())
    if len(entries) == value.ndim - stack:
        entries = (None,) * stack + entries
    # The name of a stack dim (nnx.PARTITION_NAME) is no mesh axis: the stack is never split.
    entries = (None,) * min(stack, len(entries)) + entries[stack:]
    return AbstractParam(tuple(value.shape), value.dtype, stack, entries)


def _host(values: Arrays) -> Arrays:
    """Host copies: placing them must not start from a whole copy on one device. Random keys stay as they are."""
    return {p: v if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else np.asarray(v) for p, v in values.items()}


def _read(variable: Any, value: Any) -> Any:
    """NNX calls this on every read of a variable's value."""
    return value.read() if isinstance(value, Gathered) else value


def _refuse_write(variable: Any, value: Any) -> Any:
    raise ModelError(
        f"{variable.get_metadata()[_PATH]}: the model writes this parameter while it runs, as nnx.SpectralNorm does. "
        "A parameter changes by the optimizer only; keep what the model writes in an nnx.Variable of another type."
    )


def _fold_in(key: jax.Array, fold: Any) -> jax.Array:
    """A key, or an array of keys (one a scanned layer), mixed with the micro-batch's number."""
    flat = jax.vmap(lambda k: jax.random.fold_in(k, fold))(key.reshape(-1))
    return flat.reshape(key.shape)
