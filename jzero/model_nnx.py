"""Flax NNX modules behind the model protocol, taken unchanged: a function `lambda rngs: Model(rngs=rngs)` or a built
module."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jzero.errors import ModelError
from jzero.gathered import Gathered
from jzero.leaf import AbstractParam
from jzero.model_api import Arrays, assert_carried, fold_in, host_copies


@dataclass(frozen=True)
class NNXModel:
    """A Flax NNX module: graphdef and abstract states, and the names its variables go by."""

    graphdef: Any
    abstract: tuple[Any, Any]
    build: Callable[[nnx.Rngs], nnx.Module] | None
    params: Mapping[str, AbstractParam]
    model_state: Mapping[str, jax.ShapeDtypeStruct]
    values: tuple[Arrays, Arrays] | None

    def given(self, seed: int) -> tuple[Arrays, Arrays] | None:
        return self.values

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        assert self.build is not None, "a built module has values, not an init"
        with nnx.use_eager_sharding(False):  # placement is the plan's, not the variable's at its creation
            module = self.build(nnx.Rngs(key))
        return _raw_values(_leaves(module, nnx.Param)), _raw_values(_leaves(module, _NOT_PARAM))

    def bind(self, params: Mapping[str, Any], model_state: Mapping[str, Any], fold: Any, *, train: bool) -> nnx.Module:
        abstract_params, abstract_state = self.abstract
        # An array that is no variable cannot be set in the module afterwards.
        state = [
            (path, leaf if isinstance(leaf, nnx.Variable) else model_state[_name(path)])
            for path, leaf in nnx.to_flat_state(abstract_state)
        ]
        module = nnx.merge(self.graphdef, abstract_params, nnx.from_flat_state(state), copy=True)
        for path, variable in _leaves(module, nnx.Param).items():
            variable.set_raw_value(params[path])
            variable.set_metadata(on_get_value=_read, on_set_value=_refuse_write, **{_PATH: path})
        for path, variable in _leaves(module, nnx.All(nnx.Variable, _NOT_PARAM)).items():
            value = model_state[path]
            variable.set_raw_value(fold_in(value, fold) if isinstance(variable, nnx.RngKey) else value)
        if train:
            _train_where_undecided(module)
        else:
            module.eval()
        return module

    def collect(self, bound: nnx.Module) -> Arrays:
        """Everything but random streams, which depend on (seed, step, micro-batch) and so never change, and what
        Module.sow leaves behind. Raises ModelError for a parameter that was written, and for state that is new or of
        another shape or dtype."""
        for path, variable in _leaves(bound, nnx.Param).items():
            if not isinstance(variable.get_raw_value(), Gathered):
                raise _written(path)
        values = _raw_values(_leaves(bound, nnx.Not((nnx.Param, nnx.RngState, nnx.Intermediate))))
        for path, value in values.items():
            assert_carried(path, self.model_state.get(path), value, _NOT_CARRIED)
        return values


def _train_where_undecided(module: nnx.Module) -> None:
    """Layers made with deterministic=None, nnx.MultiHeadAttention's default, refuse to run until told. What was decided
    stays: frozen BatchNorm statistics, say."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Module) and getattr(node, "deterministic", False) is None:
            node.train()


_NOT_PARAM = nnx.Not(nnx.Param)
_NOT_CARRIED = "make it an nnx.Intermediate, which is dropped after each micro-batch"


def adapt_builder(build: Callable[[nnx.Rngs], Any]) -> NNXModel:
    """The model in shapes only, and the shape each parameter had when its layer created it.

    A parameter that nnx.vmap stacked afterwards has more dims than that: those are its stack dims.
    """
    created: dict[str, tuple[int, ...]] = {}
    _assert_takes_rngs(build)

    def split() -> Any:
        module = build(nnx.Rngs(0))
        if not isinstance(module, nnx.Module):
            raise ModelError(f"the model function returned {type(module).__name__}, not a Flax NNX module.")
        leaves = _leaves(module, ...)
        _assert_arrays(module, leaves)
        for path, leaf in leaves.items():
            if isinstance(leaf, nnx.Variable) and _CREATED in leaf.get_metadata():
                created[path] = leaf.get_metadata()[_CREATED]
                leaf.del_metadata(_CREATED)
        return nnx.split(module, nnx.Param, ...)

    with _recorded_shapes(), nnx.use_eager_sharding(False):
        # Not nnx.eval_shape, which loses arrays that are no variables.
        graphdef, *abstract = jax.eval_shape(split)
    return _adapt(graphdef, abstract, created, build, None)


def _assert_takes_rngs(build: Callable[..., Any]) -> None:
    try:
        inspect.signature(build).bind(None)
    except TypeError as error:
        raise ModelError(
            f"the model function cannot be called with one nnx.Rngs ({error}): make it lambda rngs: MyModel(rngs=rngs)."
        ) from error
    except ValueError:  # it tells no signature
        return


def adapt_built(module: nnx.Module) -> NNXModel:
    graphdef, *states = nnx.split(module, nnx.Param, ...)
    params, state = (_raw_values(_flat(s)) for s in states)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), states)
    return _adapt(graphdef, abstract, None, None, (host_copies(params), host_copies(state)))


def _adapt(
    graphdef: Any, abstract: Any, created: Mapping[str, tuple[int, ...]] | None, build: Any, values: Any
) -> NNXModel:
    params, state = map(_flat, abstract)
    if not params:
        raise ModelError("the model has no parameters (nnx.Param), so there is nothing to train.")
    return NNXModel(
        graphdef,
        tuple(abstract),
        build,
        {path: _abstract_param(path, variable, created) for path, variable in params.items()},
        {path: jax.ShapeDtypeStruct(v.shape, v.dtype) for path, v in _raw_values(state).items()},
        values,
    )


_CREATED = "jzero_created_shape"
_PATH = "jzero_path"


@contextlib.contextmanager
def _recorded_shapes() -> Iterator[None]:
    """Variables made inside keep the shape they were made with as metadata, which nnx.vmap carries along.

    Patches Variable.create_value, the method Flax documents for subclasses to override: a user's module creates plain
    nnx.Param, and nothing else tells a stack of biases from a matrix.
    """
    original = nnx.Variable.create_value

    def create_value(self: Any, value: Any) -> Any:
        self.set_metadata(_CREATED, jnp.shape(value))
        return original(self, value)

    nnx.Variable.create_value = create_value
    try:
        yield
    finally:
        nnx.Variable.create_value = original


def _leaves(module: nnx.Module, kind: Any) -> dict[str, Any]:
    """The distinct variables of a kind by path, shared ones once under their first path, and the arrays that the module
    holds without a variable."""
    # A state holds copies of the variables; the module's own are wanted.
    own = {_name(path): node for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable)}
    return {path: own.get(path, leaf) for path, leaf in _flat(nnx.state(module, kind)).items()}


def _flat(state: Any) -> dict[str, Any]:
    """Variables and arrays of a state by path; variables of None are left out."""
    return {_name(path): leaf for path, leaf in nnx.to_flat_state(state) if _raw_value(leaf) is not None}


def _name(path: Any) -> str:
    return "/".join(map(str, path))


def _raw_value(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _raw_values(leaves: Mapping[str, Any]) -> Arrays:
    values = {path: _raw_value(leaf) for path, leaf in leaves.items()}
    for path, value in values.items():
        if not hasattr(value, "dtype"):
            raise ModelError(f"{path}: holds a {type(value).__name__}, not an array; jzero places arrays.")
    return values


def _assert_arrays(module: nnx.Module, leaves: Mapping[str, Any]) -> None:
    """Raise ModelError for a variable that holds no array, and for a traced array that NNX does not see as one."""
    _raw_values(leaves)
    for path, node in nnx.iter_graph(module):
        if isinstance(node, jax.Array) and _name(path) not in leaves:
            raise ModelError(
                f"{_name(path)}: an array that is no variable, which Flax NNX loses under jit. Make it an nnx.Variable "
                "or nnx.data(array), or give jzero the built model instead of the function."
            )


def _abstract_param(path: str, variable: Any, created: Mapping[str, tuple[int, ...]] | None) -> AbstractParam:
    value = _raw_values({path: variable})[path]
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise ModelError(
            f"{path}: an nnx.Param of dtype {value.dtype} has no gradient; make it an nnx.Variable of another type."
        )
    if created is None:
        # A built module does not tell its stacks: assume one wherever that costs nothing.
        name = path.rsplit("/", 1)[-1]
        stack = int(value.ndim >= 3 or (value.ndim == 2 and name in ("bias", "scale")))
    else:
        shape = created.get(path, value.shape)
        stack = max(0, value.ndim - len(shape))
        if stack and value.shape[stack:] != shape:
            raise ModelError(
                f"{path}: layers of {shape} are stacked to {value.shape}; jzero needs the stack in front "
                "(out_axes=0 of nnx.vmap)."
            )
    spec = nnx.get_partition_spec(variable).get_value() if "out_sharding" in variable.get_metadata() else ()
    entries = tuple(spec or ())
    if len(entries) == value.ndim - stack:
        entries = (None,) * stack + entries
    # The name of a stack dim (nnx.PARTITION_NAME) is no mesh axis: the stack is never split.
    entries = (None,) * min(stack, len(entries)) + entries[stack:]
    return AbstractParam(tuple(value.shape), value.dtype, stack, entries)


def _read(variable: Any, value: Any) -> Any:
    """NNX calls this on every read of a variable's value."""
    return value.read() if isinstance(value, Gathered) else value


def _refuse_write(variable: Any, value: Any) -> Any:
    raise _written(variable.get_metadata()[_PATH])


def _written(path: str) -> ModelError:
    return ModelError(
        f"{path}: the model writes or makes this parameter while it runs, as nnx.SpectralNorm does. Only the optimizer "
        "changes parameters; keep what the model writes in an nnx.Variable of another type."
    )
