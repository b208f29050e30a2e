"""A stored parameter as a model holds it: a node that gathers itself when it is read.

The gather stands where the model's code stands: inside the scanned layer, inside the rematerialised block. Measured on
jax 0.10.2 and 0.12 (NNX variables): a value hook alone misses `w.T`, `w.reshape`, `w.sum` and more, which then see the
stored array, silently wrong under padding; the node serves every kind of read.
"""

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax.core.meta import AxisMetadata

from jzero.usepoint import UsePoint


@jax.tree_util.register_pytree_node_class
class Gathered(AxisMetadata[Any]):
    """A stored parameter that gathers itself when read, in place of the array. Shape, ndim and dtype never gather.

    Linen modules unbox their parameters as they read them; nn.scan and nn.vmap may take leading dims away before.
    """

    __slots__ = ("carrier", "stored", "use")

    def __init__(self, stored: Any, use: UsePoint, carrier: Any = None):
        self.stored, self.use, self.carrier = stored, use, carrier

    def tree_flatten(self) -> tuple[tuple[Any, Any], UsePoint]:
        return (self.stored, self.carrier), self.use

    @classmethod
    def tree_unflatten(cls, use: UsePoint, children: tuple[Any, Any]) -> "Gathered":
        return cls(children[0], use, children[1])

    def read(self) -> jax.Array:
        return self.use.read(self.stored, self.carrier)

    __jax_array__ = read
    unbox = read

    def replace_boxed(self, val: Any) -> "Gathered":
        return Gathered(val, self.use, self.carrier)

    def add_axis(self, index: int, params: Any) -> "Gathered":
        return self

    def remove_axis(self, index: int, params: Any) -> "Gathered":
        return self

    @property
    def ndim(self) -> int:
        return jnp.ndim(self.stored)

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(jnp.shape(self.stored))
        if self.use.dim is not None:
            shape[self.use.dim - len(self.use.shape)] = self.use.shape[self.use.dim]
        return tuple(shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> Any:
        return self.use.compute_dtype

    def __getitem__(self, index: Any) -> jax.Array:
        return self.read()[index]

    def __getattr__(self, name: str) -> Any:
        # Dunder names are looked up by protocols (copy, pickle, numpy) that must not gather.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.read(), name)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.read())


def gather(tree: Any) -> Any:
    """The tree with every parameter in it read: gathered, in true shape and compute dtype. For plain functions
    (`jzero.Function(..., gathers=True)`), which call it on a layer's parameters where they use them."""
    return jax.tree.map(_unwrap, tree, is_leaf=lambda x: isinstance(x, Gathered))


def _unwrap(x: Any) -> Any:
    return x.read() if isinstance(x, Gathered) else x


def _operator(name: str) -> Callable[..., Any]:
    function = getattr(operator, f"__{name}__")

    def apply(self: Gathered, *others: Any) -> Any:
        return function(self.read(), *map(_unwrap, others))

    return apply


def _reflected(name: str) -> Callable[..., Any]:
    function = getattr(operator, f"__{name}__")
    return lambda self, other: function(other, self.read())


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow"):
    setattr(Gathered, f"__{_name}__", _operator(_name))
    setattr(Gathered, f"__r{_name}__", _reflected(_name))
for _name in ("neg", "pos", "abs", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Gathered, f"__{_name}__", _operator(_name))
