"""A traced step as operations on the arrays of one device: calls opened, divisions over devices taken from the plan."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from jzero.jaxprs import Program, opened, subprograms
from jzero.leaf import axis_extent
from jzero.usepoint import GATHER, SCATTER

# Operations whose result is their operand: it takes no memory of its own.
_SAME = frozenset(
    ("reshape", "squeeze", "expand_dims", "name", "stop_gradient", "copy", "copy_p", "reshard", "mesh_cast")
    + ("optimization_barrier", "pvary", "sharding_constraint", "reduce_precision", "bitcast_convert_type")
)


@dataclass(eq=False)
class Value:
    """An array, or a device's part of one. made: by which operation; None: it is there before the first."""

    elements: int
    dtype: Any
    made: "Op | None" = None
    gathered: bool = False  # a parameter as read, or a rearranged one
    of_batch: bool = False  # computed from the batch

    @property
    def bytes(self) -> int:
        # Keys of random streams are extended dtypes.
        return self.elements * getattr(self.dtype, "itemsize", 8)


@dataclass(eq=False)
class Op:
    """One operation. bodies: of a loop one, of a branch one for each. backward: it belongs to the backward pass.

    shapes: of the operands as the program has them, for products.
    """

    name: str
    reads: list[Value]
    makes: list[Value]
    params: Mapping[str, Any] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = ()
    bodies: "list[Scope]" = field(default_factory=list)
    backward: bool = False


@dataclass(eq=False)
class Scope:
    """The operations of a program, or of a loop's body, in order. takes: what a loop gives each turn anew, carries
    first; gives: what the scope returns."""

    ops: list[Op]
    takes: list[Value]
    gives: list[Value | None]


@dataclass(frozen=True)
class Reader:
    """Reads programs. axis_sizes: how many devices each mesh axis really has, by which constraints divide; empty: the
    shapes of the program are those of a device already, or say by themselves how they are divided."""

    axis_sizes: Mapping[str, int]

    def read(self, program: Program, arguments: Sequence[Value]) -> Scope:
        jaxpr = opened(program)
        env: dict[core.Var, Value] = {var: _whole(var) for var in jaxpr.constvars}
        env |= dict(zip(jaxpr.invars, arguments, strict=True))
        ops: list[Op] = []
        self._equations(jaxpr, env, ops, "")
        return _pruned(Scope(ops, [], [_get(env, var) for var in jaxpr.outvars]))

    def _equations(self, jaxpr: core.Jaxpr, env: dict[core.Var, Value], ops: list[Op], stack: str) -> None:
        for equation in jaxpr.eqns:
            where = f"{stack}/{equation.source_info.name_stack}"
            reads = [_get(env, var) for var in equation.invars]
            for var, value in zip(equation.outvars, self._one(equation, reads, ops, where), strict=True):
                env[var] = value

    def _one(self, equation: core.JaxprEqn, reads: list[Value | None], ops: list[Op], where: str) -> list[Value]:
        name, inner = equation.primitive.name, subprograms(equation)
        if name == "scan":
            return self._scan(equation, reads, ops, where)
        if name in ("while", "cond"):
            return self._branches(equation, reads, ops, where)
        if len(inner) == 1 and len(opened(inner[0]).invars) == len(reads) and name != "pallas_call":
            return self._call(inner[0], equation, reads, ops, where)
        if name in _SAME:
            return self._same(equation, reads, ops, where)
        return self._plain(equation, reads, ops, where)

    def _call(self, inner: Program, equation: Any, reads: Any, ops: list[Op], where: str) -> list[Value]:
        jaxpr = opened(inner)
        env = {var: _whole(var) for var in jaxpr.constvars}
        env |= {v: _whole(v) if x is None else x for v, x in zip(jaxpr.invars, reads, strict=True)}
        self._equations(jaxpr, env, ops, where)
        return [_get(env, v) or _whole(out) for v, out in zip(jaxpr.outvars, equation.outvars, strict=True)]

    def _same(self, equation: Any, reads: Any, ops: list[Op], where: str) -> list[Value]:
        if equation.primitive.name != "sharding_constraint":
            return [_whole(out) if x is None else x for x, out in zip(reads, equation.outvars, strict=True)]
        (value,), (var,) = reads, equation.invars
        parts = self._constrained(equation.params["sharding"], value, where)
        elements = value.elements if parts is None else math.prod(var.aval.shape) // parts
        if elements == value.elements:
            return [value]
        return self._make(
            "gather" if elements > value.elements else "scatter_part", equation, reads, ops, where, [elements]
        )

    def _constrained(self, sharding: Any, value: Value, where: str) -> int | None:
        """How many parts a constraint asks for; None where it says nothing about a device's share."""
        of_weight = f"{GATHER}[" in where or f"{SCATTER}[" in where or not value.of_batch
        if not self.axis_sizes or not of_weight or not isinstance(sharding, NamedSharding):
            return None
        return spec_parts(sharding.spec, self.axis_sizes)

    def _plain(self, equation: Any, reads: Any, ops: list[Op], where: str) -> list[Value]:
        parts = max((_parts(var, x) for var, x in zip(equation.invars, reads, strict=True) if x), default=1)
        sizes = [max(1, -(-math.prod(out.aval.shape) // parts)) for out in equation.outvars]
        return self._make(equation.primitive.name, equation, reads, ops, where, sizes)

    def _make(
        self, name: str, equation: Any, reads: Any, ops: list[Op], where: str, sizes: Sequence[int]
    ) -> list[Value]:
        there = [x for x in reads if x is not None]
        gathered = f"{GATHER}[" in where or (len(there) == 1 and there[0].gathered)
        op = Op(name, there, [], equation.params, tuple(v.aval.shape for v in equation.invars))
        op.backward = "transpose(" in where
        of_batch = any(x.of_batch for x in there) and f"{SCATTER}[" not in where
        for out, size in zip(equation.outvars, sizes, strict=True):
            op.makes.append(Value(size, out.aval.dtype, op, gathered, of_batch))
        ops.append(op)
        return list(op.makes)

    def _scan(self, equation: Any, reads: Any, ops: list[Op], where: str) -> list[Value]:
        params, body = equation.params, opened(equation.params["jaxpr"])
        reads = [_whole(v) if x is None else x for v, x in zip(equation.invars, reads, strict=True)]
        num_consts, num_carry, length = params["num_consts"], params["num_carry"], params["length"]
        env = {var: _whole(var) for var in body.constvars}
        inner_ops: list[Op] = []
        carries, slices = [], []
        for number, (var, outer) in enumerate(zip(body.invars, reads, strict=True)):
            if number < num_consts:
                env[var] = outer
            elif number < num_consts + num_carry:
                env[var] = Value(outer.elements, outer.dtype, None, outer.gathered, outer.of_batch)
                carries.append(env[var])
            else:
                op = Op("dynamic_slice", [outer], [], backward="transpose(" in where)
                env[var] = Value(max(1, outer.elements // length), outer.dtype, op, False, outer.of_batch)
                op.makes.append(env[var])
                slices.append((env[var], outer))
                inner_ops.append(op)
        self._equations(body, env, inner_ops, where)
        gives = [_get(env, var) for var in body.outvars]
        op = Op("scan", reads, [], params, backward="transpose(" in where)
        given_through = dict((id(x), outer) for x, outer in slices)
        out: list[Value] = []
        for number, (var, value) in enumerate(zip(equation.outvars, gives, strict=True)):
            if number >= num_carry and value is not None and id(value) in given_through:
                out.append(given_through[id(value)])  # a stack handed through is not copied
                continue
            whole = math.prod(var.aval.shape)
            if number < num_carry:
                size = carries[number].elements
            else:
                size = length * value.elements if value is not None else whole
            made = Value(size, var.aval.dtype, op, False, bool(value and value.of_batch))
            out.append(made)
            op.makes.append(made)
        gives = [x for n, x in enumerate(gives) if n < num_carry or x is None or id(x) not in given_through]
        op.bodies = [Scope(inner_ops, carries, gives)]
        ops.append(op)
        return out

    def _branches(self, equation: Any, reads: Any, ops: list[Op], where: str) -> list[Value]:
        """while and cond: the operands of the body or of each branch are the equation's last ones."""
        reads = [_whole(v) if x is None else x for v, x in zip(equation.invars, reads, strict=True)]
        op = Op(equation.primitive.name, reads, [], {}, backward="transpose(" in where)
        programs = equation.params.get("branches") or [equation.params["body_jaxpr"]]
        for program in programs:
            jaxpr, inner_ops = opened(program), []
            env = {var: _whole(var) for var in jaxpr.constvars}
            env |= dict(zip(jaxpr.invars, reads[len(reads) - len(jaxpr.invars) :], strict=True))
            self._equations(jaxpr, env, inner_ops, where)
            op.bodies.append(Scope(inner_ops, [], [_get(env, v) for v in jaxpr.outvars]))
        of_batch = any(x.of_batch for x in reads)
        for number, var in enumerate(equation.outvars):
            inner = [body.gives[number] for body in op.bodies]
            size = max((x.elements for x in inner if x is not None), default=math.prod(var.aval.shape))
            op.makes.append(Value(size, var.aval.dtype, op, False, of_batch))
        ops.append(op)
        return list(op.makes)


def spec_parts(spec: PartitionSpec, axis_sizes: Mapping[str, int]) -> int:
    return math.prod(axis_extent(entry, axis_sizes) for entry in spec)


def each_op(scope: Scope) -> Iterator[Op]:
    for op in scope.ops:
        yield op
        for body in op.bodies:
            yield from each_op(body)


def _pruned(scope: Scope) -> Scope:
    """Without the operations that nothing needs."""
    needed = {id(x) for x in scope.gives if x is not None}
    kept: list[Op] = []
    for op in reversed(scope.ops):
        if op.makes and not any(id(x) in needed for x in op.makes):
            continue
        op.bodies = [_pruned(body) for body in op.bodies]
        needed |= {id(x) for x in op.reads}
        for body in op.bodies:
            needed |= {id(x) for inner in each_op(body) for x in inner.reads}
        kept.append(op)
    scope.ops = kept[::-1]
    return scope


def _get(env: Mapping[core.Var, Value], var: Any) -> Value | None:
    """None: a literal, which takes no memory."""
    return env.get(var) if isinstance(var, core.Var) else None


def _whole(var: Any) -> Value:
    return Value(math.prod(var.aval.shape), var.aval.dtype)


def _parts(var: Any, value: Value) -> int:
    return max(1, math.prod(var.aval.shape) // max(1, value.elements))
