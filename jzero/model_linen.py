"""Flax Linen modules behind the model protocol, taken unchanged."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from flax.errors import InvalidRngError, ModifyScopeVariableError
from flax.linen.spmd import logical_to_mesh_axes
from flax.traverse_util import flatten_dict, unflatten_dict

from jzero.errors import ModelError
from jzero.leaf import AbstractParam, Entry
from jzero.model_api import RNG, Arrays, abstract_key, assert_carried, fold_in, host_copies


@dataclass(frozen=True)
class Linen:
    """A Flax Linen module, and what tells its shapes.

    A loss calls it as `model(x)`, with `module.apply`'s own keywords where it needs them (`method`, `mutable`).
    `model.train` tells training from evaluation, to be handed on where the module asks: `model(x, train=model.train)`.
    In training all collections but `params` that `module.init` makes are mutable and carried from step to step, save
    those of `Module.sow`; name these in `mutable` to get them: `y, sown = model(x, mutable=["losses"])`. In evaluation
    nothing is mutable and there are no random streams.

    inputs: arguments of `module.init` after the random keys, arrays or ShapeDtypeStructs; only their shapes and dtypes
    matter. kwargs: its keywords. variables: what the model starts from, in place of a seed's, as `module.init` returns
    them. rngs: the random streams that `module.apply` needs in training.
    """

    module: nn.Module
    inputs: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] | None = None
    rngs: Sequence[str] = ("dropout",)


@dataclass(frozen=True)
class LinenModel:
    linen: Linen
    params: Mapping[str, AbstractParam]
    model_state: Mapping[str, jax.ShapeDtypeStruct]
    carried: tuple[str, ...]

    def given(self, seed: int) -> tuple[Arrays, Arrays] | None:
        if self.linen.variables is None:
            return None
        params, state = self._split(self.linen.variables)
        return host_copies(params), host_copies({**state, RNG: jax.random.key(seed)})

    def init(self, key: jax.Array) -> tuple[Arrays, Arrays]:
        params, state = self._split(_variables(self.linen, key))
        return params, {**state, RNG: key}

    def bind(
        self, params: Mapping[str, Any], model_state: Mapping[str, Any], fold: Any, *, train: bool
    ) -> "BoundLinen":
        state = unflatten_dict({path: model_state[path] for path in self.model_state if path != RNG}, sep="/")
        # A collection may be empty of arrays, and still be asked for.
        collections = {"params": unflatten_dict(dict(params), sep="/"), **{name: {} for name in self.carried}, **state}
        return BoundLinen(self.linen, collections, self.carried, train, fold_in(model_state[RNG], fold))

    def collect(self, bound: "BoundLinen") -> Arrays:
        """The carried collections. Raises ModelError for state that is new or of another shape or dtype."""
        state = _flat({name: bound.variables[name] for name in self.carried})
        for path, value in state.items():
            assert_carried(path, self.model_state.get(path), value, "sow it, which is dropped after each micro-batch")
        return state

    def _split(self, variables: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
        return _flat(variables["params"]), _flat({name: variables[name] for name in self.carried})


@dataclass
class BoundLinen:
    """A Linen module with its variables, as a loss calls it."""

    linen: Linen
    variables: dict[str, Any]
    carried: tuple[str, ...]
    train: bool
    key: jax.Array
    calls: int = 0

    def __call__(self, *args: Any, mutable: Sequence[str] = (), **kwargs: Any) -> Any:
        key = jax.random.fold_in(self.key, self.calls)
        self.calls += 1
        rngs = {name: jax.random.fold_in(key, i) for i, name in enumerate(self.linen.rngs)} if self.train else {}
        mutable = (mutable,) if isinstance(mutable, str) else tuple(mutable)
        writes = (*self.carried, *mutable) if self.train else mutable
        try:
            result = self.linen.module.apply(self.variables, *args, rngs=rngs, mutable=list(writes) or False, **kwargs)
        except (InvalidRngError, ModifyScopeVariableError) as error:
            raise ModelError(f"{error} {self._advice()}") from error
        if not writes:
            return result
        outputs, written = result
        if self.train:
            self.variables = {**self.variables, **{name: written[name] for name in self.carried if name in written}}
        return (outputs, {name: written.get(name, {}) for name in mutable}) if mutable else outputs

    def _advice(self) -> str:
        if self.train:
            return f"In training the random streams are {list(self.linen.rngs)}; name others in jzero.Linen(rngs=...)."
        return (
            "In evaluation there are no random streams and nothing is written: let the loss call "
            "model(x, train=model.train), by whatever name the module knows it."
        )


def adapt_linen(linen: Linen) -> LinenModel:
    """The model in shapes only, with each parameter's stack dims and own spec as its boxes tell them."""
    with _created_in_boxes():
        variables = jax.eval_shape(lambda: _variables(linen, jax.random.key(0)))
    boxes = flatten_dict(variables.get("params", {}), sep="/")
    plain = _flat(jax.eval_shape(lambda: _variables(linen, jax.random.key(0))).get("params", {}))
    for path in boxes.keys() - plain.keys():
        raise ModelError(
            f"{path}: the module names parameters by what it finds inside others, as nn.WeightNorm and nn.SpectralNorm "
            "do, and would find jzero's boxes. Only modules that ask for their parameters by name can be driven."
        )
    params = {path: _abstract_param(path, box) for path, box in boxes.items()}
    if not params:
        raise ModelError(f"{type(linen.module).__name__} has no parameters, so there is nothing to train.")
    carried = tuple(
        name
        for name, collection in variables.items()
        if name not in ("params", "intermediates") and not _is_sown(collection)
    )
    state = _flat({name: variables[name] for name in carried})
    state = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in state.items()}
    if linen.variables is not None:
        _assert_same(params, state, linen.variables)
    return LinenModel(linen, params, {**state, RNG: abstract_key()}, carried)


class _Created(struct.PyTreeNode, nn.meta.AxisMetadata):
    """A parameter as its module made it, and how many times nn.scan or nn.vmap stacked it since."""

    value: Any
    stack_ndim: int = struct.field(pytree_node=False, default=0)
    misplaced: int | None = struct.field(pytree_node=False, default=None)

    def unbox(self) -> Any:
        return self.value

    # A module may look into its raw collections, where it would find an array but for the box.

    def __jax_array__(self) -> Any:
        return nn.meta.unbox(self)

    def __getitem__(self, index: Any) -> Any:
        return nn.meta.unbox(self)[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(nn.meta.unbox(self), name)

    def replace_boxed(self, val: Any) -> "_Created":
        return self.replace(value=val)

    def add_axis(self, index: int, params: dict[Any, Any]) -> "_Created":
        misplaced = index if index > self.stack_ndim else self.misplaced
        inner = nn.meta.add_axis(self.value, index, params)
        return self.replace(value=inner, stack_ndim=self.stack_ndim + 1, misplaced=misplaced)

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "_Created":
        inner = nn.meta.remove_axis(self.value, index, params)
        return self.replace(value=inner, stack_ndim=self.stack_ndim - 1)


@contextlib.contextmanager
def _created_in_boxes() -> Iterator[None]:
    """Parameters made inside come in a `_Created` box, which Flax tells of every axis it adds.

    Patches Module.param, the documented way to make one: a user's module makes plain arrays, and nothing else tells a
    stack of biases from a matrix.
    """
    original = nn.Module.param

    def param(self: nn.Module, name: str, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(self, name, lambda *a, **k: _Created(init_fn(*a, **k)), *args, **kwargs)

    nn.Module.param = param
    try:
        yield
    finally:
        nn.Module.param = original


def _variables(linen: Linen, key: jax.Array) -> Mapping[str, Any]:
    inputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if hasattr(x, "shape") else x, tuple(linen.inputs))
    return linen.module.init(key, *inputs, **linen.kwargs)


def _flat(tree: Any) -> Arrays:
    """Arrays by path, out of their boxes."""
    return flatten_dict(nn.meta.unbox(tree), sep="/")


def _is_sown(collection: Any) -> bool:
    """Whether Module.sow wrote it: sow keeps tuples."""
    return any(isinstance(leaf, tuple) for leaf in flatten_dict(collection).values())


def _abstract_param(path: str, box: Any) -> AbstractParam:
    if not isinstance(box, _Created):
        # Made by put_variable or another back door: of its own shape, with no stack.
        box = _Created(box)
    leaf = nn.meta.unbox(box)
    if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ModelError(
            f"{path}: a parameter of {leaf} has no gradient; keep it in another collection (self.variable)."
        )
    if box.misplaced is not None:
        raise ModelError(
            f"{path}: layers are stacked along axis {box.misplaced}; jzero needs the stack in front "
            "(variable_axes={'params': 0} of nn.scan and nn.vmap)."
        )
    own = tuple(_own_spec(box.value))
    # The name of a stack dim (nn.PARTITION_NAME) is no mesh axis: the stack is never split.
    stack = min(box.stack_ndim, len(own))
    return AbstractParam(tuple(leaf.shape), leaf.dtype, box.stack_ndim, (None,) * stack + own[stack:])


def _own_spec(box: Any) -> Sequence[Entry]:
    if isinstance(box, nn.LogicallyPartitioned):
        return tuple(logical_to_mesh_axes(box.names, box.rules) or ())
    return box.names if isinstance(box, nn.Partitioned) else ()


def _assert_same(params: Mapping[str, AbstractParam], state: Mapping[str, Any], variables: Mapping[str, Any]) -> None:
    """Raise ModelError unless the variables a user brought are those the module makes."""
    names = {path.split("/")[0] for path in state}
    given = _flat(variables.get("params", {})) | _flat({name: variables[name] for name in names if name in variables})
    wanted = {**params, **state}
    for path in sorted(given.keys() ^ wanted.keys()):
        raise ModelError(f"{path}: {'given, but the module has none' if path in given else 'missing'} in variables.")
    for path, leaf in wanted.items():
        if jnp.shape(given[path]) != leaf.shape:
            raise ModelError(f"{path}: {jnp.shape(given[path])} in variables, but the module makes {leaf.shape}.")
