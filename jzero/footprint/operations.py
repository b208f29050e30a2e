"""A traced step as operations on the arrays of one device: calls opened, divisions over devices taken from the plan."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend import core
from jax.sharding import NamedSharding

from jzero.jaxprs import Program, opened, scan_operands, subprograms
from jzero.leaf import spec_extent
from jzero.scopes import GATHER, SCATTER

SLICE = "slice_of_stack"  # what a turn of a loop takes of an array that it goes through

# Operations whose result is their operand.
_SAME = frozenset(
    ("bitcast_convert_type", "copy", "copy_p", "expand_dims", "mesh_cast", "name", "optimization_barrier", "pvary")
    + ("reduce_precision", "reshape", "reshard", "sharding_constraint", "squeeze", "stop_gradient")
)


@dataclass(eq=False)
class Value:
    """A device's part of an array. made: by which operation; None: it is there before the first. gathered: a parameter
    as it is read. of_batch: it is computed from the batch, but no gradient yet."""

    elements: int
    dtype: Any
    made: "Op | None" = None
    gathered: bool = False
    of_batch: bool = False

    @property
    def bytes(self) -> int:
        return self.elements * getattr(self.dtype, "itemsize", 8)  # keys of random streams have none


@dataclass(eq=False)
class Op:
    """One operation. A scan reads the first values of its carries first. shapes: of its operands, as the program has
    them. bodies: of a loop one, of a branch one for each way. backward: it belongs to the backward pass."""

    name: str
    reads: list[Value]
    makes: list[Value]
    params: Mapping[str, Any] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = ()
    bodies: "list[Scope]" = field(default_factory=list)
    backward: bool = False

    def make(self, elements: int, dtype: Any, like: Value) -> Value:
        """One more result."""
        self.makes.append(Value(elements, dtype, self, like.gathered, like.of_batch))
        return self.makes[-1]


@dataclass(eq=False)
class Scope:
    """The operations of a program, or of a loop's body, in order. takes: a loop's carries as a turn finds them. gives:
    what is returned, carries first; None: a constant."""

    ops: list[Op]
    takes: list[Value]
    gives: list[Value | None]


def bodies_by(change: Callable[[Scope], Scope], op: Op) -> Op:
    """The operation itself, its bodies changed."""
    op.bodies = [change(body) for body in op.bodies]
    return op


def read_program(program: Program, arguments: Sequence[Value], axis_sizes: Mapping[str, int]) -> Scope:
    """A program on what a device holds of its arguments.

    axis_sizes: devices along each mesh axis. Constraints on what is not computed from the batch divide by them, be the
    mesh they name as small as it will.
    """
    jaxpr, ops = opened(program), []
    env = _constants(jaxpr) | dict(zip(jaxpr.invars, arguments, strict=True))
    _Reader(axis_sizes).equations(jaxpr, env, ops, "")
    return _pruned(Scope(ops, [], [_get(env, var) for var in jaxpr.outvars]))


@dataclass(frozen=True)
class _Reader:
    axis_sizes: Mapping[str, int]

    def equations(self, jaxpr: core.Jaxpr, env: dict[core.Var, Value], ops: list[Op], stack: str) -> None:
        for equation in jaxpr.eqns:
            where = f"{stack}/{equation.source_info.name_stack}"
            reads = [_get(env, var) for var in equation.invars]
            env |= zip(equation.outvars, self._results(equation, reads, ops, where), strict=True)

    def _results(self, equation: Any, reads: list[Value | None], ops: list[Op], where: str) -> list[Value]:
        name, inner = equation.primitive.name, subprograms(equation)
        if name == "scan":
            return self._scan(equation, _all(equation, reads), ops, where)
        if name in ("while", "cond"):
            return self._branches(equation, _all(equation, reads), ops, where)
        if len(inner) == 1 and len(opened(inner[0]).invars) == len(reads) and name != "pallas_call":
            jaxpr = opened(inner[0])
            env = _constants(jaxpr) | dict(zip(jaxpr.invars, _all(equation, reads), strict=True))
            self.equations(jaxpr, env, ops, where)
            return [_get(env, v) or _whole(out) for v, out in zip(jaxpr.outvars, equation.outvars, strict=True)]
        if name == "sharding_constraint" and reads[0] is not None:
            return self._constrained(equation, reads[0], ops, where)
        if name in _SAME:
            return [_whole(out) if x is None else x for x, out in zip(reads, equation.outvars, strict=True)]
        parts = max((_parts(var, x) for var, x in zip(equation.invars, reads, strict=True) if x), default=1)
        sizes = [max(1, -(-math.prod(out.aval.shape) // parts)) for out in equation.outvars]
        return _made(name, equation, reads, sizes, ops, where)

    def _constrained(self, equation: Any, value: Value, ops: list[Op], where: str) -> list[Value]:
        sharding = equation.params["sharding"]
        of_weight = f"{GATHER}[" in where or f"{SCATTER}[" in where or not value.of_batch
        if not of_weight or not isinstance(sharding, NamedSharding):
            return [value]
        elements = math.prod(equation.invars[0].aval.shape) // spec_extent(sharding.spec, self.axis_sizes)
        if elements == value.elements:
            return [value]
        if elements < value.elements and value.made is not None and not value.made.reads:
            return _made(value.made.name, equation, [], [elements], ops, where)  # a constant is made in parts
        name = "gather_parts" if elements > value.elements else "scatter_part"
        return _made(name, equation, [value], [elements], ops, where)

    def _scan(self, equation: Any, reads: list[Value], ops: list[Op], where: str) -> list[Value]:
        params, body = equation.params, opened(equation.params["jaxpr"])
        first, num_carries = scan_operands(equation)
        end = first + num_carries
        carries = [Value(x.elements, x.dtype, None, x.gathered, x.of_batch) for x in reads[first:end]]
        slices = [Op(SLICE, [x], [], backward="transpose(" in where) for x in reads[end:]]
        stacks = {
            op.make(max(1, x.elements // params["length"]), x.dtype, like=x): x
            for op, x in zip(slices, reads[end:], strict=True)
        }
        inner = list(slices)
        inside = [*reads[:first], *carries, *stacks]
        env = _constants(body) | dict(zip(body.invars, inside, strict=True))
        self.equations(body, env, inner, where)
        gives = [_get(env, var) for var in body.outvars]
        backward = "transpose(" in where or any(op.backward for op in inner)
        scan = Op("scan", [*reads[first:end], *reads[:first], *reads[end:]], [], backward=backward)
        results, given = [], gives[: len(carries)]
        for var, value, carry in zip(equation.outvars, gives, [*carries, *[None] * len(gives)], strict=False):
            like = value or _whole(var)
            if carry is None and like in stacks:  # a stack handed through is no copy
                results.append(stacks[like])
                continue
            size = carry.elements if carry else params["length"] * value.elements if value else like.elements
            results.append(scan.make(size, var.aval.dtype, Value(0, None, None, False, like.of_batch)))
            given += [] if carry else [value]
        scan.bodies = [Scope(inner, carries, given)]
        ops.append(scan)
        return results

    def _branches(self, equation: Any, reads: list[Value], ops: list[Op], where: str) -> list[Value]:
        """Of while and cond: the operands of a body or branch are the equation's last ones."""
        op = Op(equation.primitive.name, reads, [], backward="transpose(" in where)
        for program in equation.params.get("branches") or [equation.params["body_jaxpr"]]:
            jaxpr, inner = opened(program), []
            env = _constants(jaxpr) | dict(zip(jaxpr.invars, reads[len(reads) - len(jaxpr.invars) :], strict=True))
            self.equations(jaxpr, env, inner, where)
            op.bodies.append(Scope(inner, [], [_get(env, var) for var in jaxpr.outvars]))
        of_batch = any(x.of_batch for x in reads)
        for number, var in enumerate(equation.outvars):
            given = [body.gives[number] for body in op.bodies]
            size = max((x.elements for x in given if x), default=math.prod(var.aval.shape))
            op.make(size, var.aval.dtype, Value(0, None, None, False, of_batch))
        ops.append(op)
        return list(op.makes)


def _made(
    name: str, equation: Any, reads: list[Value | None], sizes: Sequence[int], ops: list[Op], where: str
) -> list[Value]:
    there = [x for x in reads if x is not None]
    shapes = tuple(var.aval.shape for var in equation.invars)
    op = Op(name, there, [], equation.params, shapes, backward="transpose(" in where)
    gathered = f"{GATHER}[" in where or (len(there) == 1 and there[0].gathered)
    of_batch = any(x.of_batch for x in there) and f"{SCATTER}[" not in where
    for out, size in zip(equation.outvars, sizes, strict=True):
        op.make(size, out.aval.dtype, Value(0, None, None, gathered, of_batch))
    ops.append(op)
    return list(op.makes)


def _pruned(scope: Scope) -> Scope:
    """Without the operations that nothing needs, and what loops are given but do not read."""
    needed = {id(x) for x in scope.gives if x is not None}
    kept: list[Op] = []
    for op in reversed(scope.ops):
        if not op.makes or any(id(x) in needed for x in op.makes):
            kept.append(bodies_by(_pruned, op))
            if op.name == "scan":
                (body,) = op.bodies
                used = {id(x) for inner in body.ops for x in inner.reads} | {id(x) for x in body.gives}
                op.reads = [x for n, x in enumerate(op.reads) if n < len(body.takes) or id(x) in used]
            needed |= {id(x) for x in op.reads}
    return Scope(kept[::-1], scope.takes, scope.gives)


def _all(equation: Any, reads: list[Value | None]) -> list[Value]:
    return [_whole(var) if x is None else x for var, x in zip(equation.invars, reads, strict=True)]


def _constants(jaxpr: core.Jaxpr) -> dict[core.Var, Value]:
    return {var: _whole(var) for var in jaxpr.constvars}


def _get(env: Mapping[core.Var, Value], var: Any) -> Value | None:
    """None: a literal, which takes no memory."""
    return env.get(var) if isinstance(var, core.Var) else None


def _whole(var: Any) -> Value:
    return Value(math.prod(var.aval.shape), var.aval.dtype)


def _parts(var: Any, value: Value) -> int:
    return max(1, math.prod(var.aval.shape) // max(1, value.elements))
