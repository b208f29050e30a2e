"""What happens when a model reads a parameter: cast to the compute dtype, gather, cut padding off; in the backward pass
pad, reduce, scatter.

A model reads its parameters through `Gathered`, a pytree node that holds the stored array and gathers it at the moment
of reading. So the gather stands where the model's code stands: inside the scanned layer, inside the rematerialised
block. Measured on jax 0.10.2 and 0.12 (NNX variables): a value hook alone misses `w.T`, `w.reshape`, `w.sum` and more,
which then see the stored array, silently wrong under padding; the node serves every kind of read.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.core.meta import AxisMetadata
from jax.extend import core
from jax.extend.core import primitives
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.errors import PlanError
from jzero.jaxprs import Program, equations, own_equations, replace_equations
from jzero.plan import Plan


@dataclass(frozen=True)
class UsePoint:
    """How one parameter is read: shapes with stack dims, its placement when gathered and that of its gradient."""

    path: str
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    dim: int | None
    stored_dtype: Any
    compute_dtype: Any
    whole: PartitionSpec
    gradient: PartitionSpec
    mesh: Mesh

    def read(self, stored: jax.Array) -> jax.Array:
        """The parameter in its true shape and compute dtype.

        stored may lack leading dims of the stored shape: a scan or vmap over a layer stack has taken them.
        """
        dropped = len(self.shape) - stored.ndim
        if self.dim is not None and self.dim < dropped:
            raise PlanError(
                f"{self.path}: dim {self.dim} of {self.shape} is split over devices, but the model loops over it layer "
                "by layer, so every device would gather the whole stack. Give jzero the function that builds the model "
                "(stacks made by nnx.vmap are then recognised) instead of the built model; of a jzero.Function, name "
                "the parameter in `stacked`."
            )
        if self.dim is not None and stored.shape[self.dim - dropped] != self.stored_shape[self.dim]:
            raise PlanError(
                f"{self.path}: {stored.shape} is no stack of layers, or layer, of {self.stored_shape}. Layers must be "
                "stacked and looped over along the leading dim (axis 0 of nnx.vmap and nnx.scan)."
            )
        return _gather(self, dropped, stored)

    def _sharding(self, spec: PartitionSpec, dropped: int) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*spec[dropped:]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(use: UsePoint, dropped: int, stored: jax.Array) -> jax.Array:
    # Cast before the gather: the wire then carries the compute dtype.
    array = jax.lax.with_sharding_constraint(stored.astype(use.compute_dtype), use._sharding(use.whole, dropped))
    if use.dim is None or use.shape == use.stored_shape:
        return array
    # Gather first, cut afterwards: a cut of the sharded array could not be even.
    return jax.lax.slice_in_dim(array, 0, use.shape[use.dim], axis=use.dim - dropped)


def _gather_forward(use: UsePoint, dropped: int, stored: jax.Array) -> tuple[jax.Array, None]:
    return _gather(use, dropped, stored), None


def _gather_backward(use: UsePoint, dropped: int, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    if use.dim is not None and use.shape != use.stored_shape:
        pad = [(0, 0)] * cotangent.ndim
        pad[use.dim - dropped] = (0, use.stored_shape[use.dim] - use.shape[use.dim])
        cotangent = jnp.pad(cotangent, pad)
    # The sum over devices is in the compute dtype: XLA reduces where the product is made, whatever is cast here
    # (measured: float16, 8 CPU devices).
    # Whole and then shard. With the second alone, XLA gathers every device's activations to compute its own
    # slice of an embedding's gradient (measured on GPU and TPU programs).
    for spec in (use.whole, use.gradient):
        cotangent = jax.lax.with_sharding_constraint(cotangent, use._sharding(spec, dropped))
    return (cotangent.astype(use.stored_dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


def use_points(plan: Plan, mesh: Mesh) -> dict[str, UsePoint]:
    """The use point of every parameter of a plan."""
    return {
        path: UsePoint(
            path,
            leaf.shape,
            leaf.stored_shape,
            leaf.dim,
            leaf.dtype,
            plan.compute[path],
            _full(leaf.whole.spec, len(leaf.shape)),
            _full(plan.gradients.get(path, leaf).spec, len(leaf.shape)),  # a frozen one has no gradient
            mesh,
        )
        for path, leaf in plan.params.items()
    }


def _full(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    return PartitionSpec(*spec, *(None,) * (ndim - len(spec)))


@jax.tree_util.register_pytree_node_class
class Gathered(AxisMetadata[Any]):
    """A stored parameter that gathers itself when read, in place of the array. Shape, ndim and dtype never gather.

    Linen modules unbox their parameters as they read them; nn.scan and nn.vmap may take leading dims away before.
    """

    __slots__ = ("stored", "use")

    def __init__(self, stored: Any, use: UsePoint):
        self.stored, self.use = stored, use

    def tree_flatten(self) -> tuple[tuple[Any], UsePoint]:
        return (self.stored,), self.use

    @classmethod
    def tree_unflatten(cls, use: UsePoint, children: tuple[Any]) -> "Gathered":
        return cls(children[0], use)

    def read(self) -> jax.Array:
        return self.use.read(self.stored)

    __jax_array__ = read
    unbox = read

    def replace_boxed(self, val: Any) -> "Gathered":
        return Gathered(val, self.use)

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


_MOVES = frozenset({"slice", "transpose", "reshape", "squeeze", "convert_element_type", "copy", "name"})


def residual_policy(points: Mapping[str, UsePoint]) -> Callable[..., bool]:
    """A rematerialisation policy that saves everything a plain backward pass saves, except weights as they were read.

    A gathered weight kept for the backward pass undoes stage 3. Refusing its name alone is not enough (its producer is
    saved instead), so the whole use point is refused, and with it every cheap move (cut, transpose, reshape, cast) of
    an array as large as a weight.
    """
    sizes = {
        math.prod(shape[stack:])
        for use in points.values()
        for shape in (use.shape, use.stored_shape)
        for stack in range((use.dim or 0) + 1)
    }

    def saveable(primitive: Any, *avals: Any, **params: Any) -> bool:
        # JAX rounds what it saves and cannot round complex numbers (jax 0.10.2): they are computed again.
        dtypes = [params.get("new_dtype"), *(getattr(a, "dtype", None) for a in avals)]
        if primitive.name in ("complex", "fft") or any(d is not None and _is_complex(d) for d in dtypes):
            return False
        if primitive is primitives.custom_vjp_call_p:
            # JAX asks about a use point as a whole first.
            inside = {e.primitive.name for e in own_equations(params["call_jaxpr"])}
            return not inside <= {"sharding_constraint", *_MOVES}
        if primitive is primitives.sharding_constraint_p:
            return False
        return not (primitive.name in _MOVES and any(getattr(a, "size", 0) in sizes for a in avals))

    return saveable


def _is_complex(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


def forget_weights(fn: Callable[..., Any], points: Mapping[str, UsePoint], *, gathers: bool) -> Callable[..., Any]:
    """fn, whose backward pass reads the weights anew instead of keeping what the forward pass read.

    gathers: reading a weight gathers it. A scan over layers forgets in its body, even where nothing is gathered: JAX
    recomputes a scan as one, stacking the weights of all layers as they were read, at stages 1 and 2 a second copy of
    the whole stack. A program that holds rematerialised blocks of its own is taken as it is: its gathers are freed
    already, and JAX applies the outermost policy inside inner blocks too (measured: every activation saved).
    """
    policy = residual_policy(points)

    def forgetful(*args: Any) -> Any:
        program, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        rematerialised = any(equation.primitive is primitives.remat_p for equation in equations(program))
        if not rematerialised:
            program = _forget_in_scans(program, {use.stored_shape for use in points.values()}, policy)
        run = core.jaxpr_as_fun(program)
        if gathers and not rematerialised:
            run = jax.checkpoint(run, policy=policy)
        return jax.tree.unflatten(jax.tree.structure(out), run(*jax.tree.leaves(args)))

    return forgetful


def _forget_in_scans(program: Program, stacks: set[tuple[int, ...]], policy: Callable[..., bool]) -> Program:
    """The program with the body of every scan over one of the stacks rematerialised under the policy."""

    def forget(equation: core.JaxprEqn) -> core.JaxprEqn:
        if equation.primitive is primitives.jit_p:
            body = _forget_in_scans(equation.params["jaxpr"], stacks, policy)
        elif equation.primitive is primitives.scan_p and _scans_over(equation, stacks):
            # The loops of a scan are separate programs, so there is nothing to keep XLA from merging.
            run = jax.checkpoint(core.jaxpr_as_fun(equation.params["jaxpr"]), policy=policy, prevent_cse=False)
            body = jax.make_jaxpr(run)(*equation.params["jaxpr"].in_avals)
        else:
            return equation
        return equation.replace(params={**equation.params, "jaxpr": body})

    return replace_equations(program, [forget(equation) for equation in own_equations(program)])


def _scans_over(scan: core.JaxprEqn, stacks: set[tuple[int, ...]]) -> bool:
    """Whether the scan takes one of the stacks apart, layer by layer."""
    outside = [getattr(operand.aval, "shape", None) for operand in scan.invars]
    inside = [getattr(aval, "shape", None) for aval in scan.params["jaxpr"].in_avals]
    return any(x in stacks and x != y for x, y in zip(outside, inside, strict=True))
