"""The most that stands at one time, going through a step's operations as they run."""

from dataclasses import dataclass, field

from jzero.footprint.operations import Op, Scope, Value
from jzero.footprint.rules import FUSED, Rules
from jzero.footprint.schedule import scheduled
from jzero.footprint.standing import copied_bytes, sources, standing

_IN_PLACE = FUSED | {"dynamic_update_slice", "scatter", "scatter-add", "while", "cond"}


@dataclass
class Moment:
    """What stands while an operation runs, inner loops' included. bytes: of that and of copies of operands."""

    bytes: int = 0
    values: list[Value] = field(default_factory=list)
    op: Op | None = None


def fullest(scope: Scope, rules: Rules, free: set[int]) -> Moment:
    """The moment of a scope at which most stands, of what it makes or takes.

    free: ids of values that take no memory, being written where something else stood.
    """
    stand = standing(scope, rules)
    own = {id(x) for op in scope.ops for x in op.makes}
    ops = [op for op in scope.ops if any(id(x) in stand for x in op.makes)]
    reads = [sources(op, stand, own) for op in ops]
    order = scheduled(scope, ops, reads, rules)
    last = {id(x): n for n in order for x in reads[n]}
    kept = {id(x) for x in scope.gives if x is not None}
    live = {id(x): x for x in scope.takes if id(x) in last or id(x) in kept}
    peak = Moment(sum(x.bytes for x in live.values()), list(live.values()))
    for n in order:
        op = ops[n]
        inner = max((_inside(body, rules) for body in op.bodies), key=lambda moment: moment.bytes, default=Moment())
        dying = [x for x in reads[n] if last[id(x)] == n and id(x) in live and id(x) not in kept]
        makes = [x for x in op.makes if id(x) in stand and id(x) not in free]
        for x in _overwritten(op, makes, dying, reads[n]):
            del live[id(x)]
        live |= {id(x): x for x in makes}
        here = sum(x.bytes for x in live.values()) + inner.bytes + copied_bytes(op, rules)
        if here > peak.bytes:
            peak = Moment(here, [*live.values(), *inner.values], inner.op or op)
        for x in (*dying, *(x for x in makes if id(x) not in last and id(x) not in kept)):
            live.pop(id(x), None)
    return peak


def _overwritten(op: Op, makes: list[Value], dying: list[Value], reads: list[Value]) -> list[Value]:
    """The values whose memory the results of an operation take over: a loop's carries that of their first values, what
    is computed element by element that of an operand."""
    if op.name == "scan":
        num_carries = len(op.bodies[0].takes)
        first, carries = ({id(x) for x in values[:num_carries]} for values in (op.reads, op.makes))
        makes, dying = [x for x in makes if id(x) in carries], [x for x in dying if id(x) in first]
    elif op.name not in _IN_PLACE or (op.name in FUSED and any(x.elements != op.makes[0].elements for x in reads)):
        return []
    taken: list[Value] = []
    for x in makes:
        taken += [y for y in dying if y.bytes >= x.bytes > 0 and y not in taken][:1]
    return taken


def _inside(body: Scope, rules: Rules) -> Moment:
    """Of a loop's body, beyond what it takes: that is counted with the loop, as is what it gives turn by turn, which
    goes where it belongs when it is computed."""
    carries = body.gives[: len(body.takes)]
    carried = {id(x) for x in carries if x is not None}
    fused = {id(x) for op in body.ops if op.name in FUSED for x in op.makes}
    given = {id(x) for x in body.gives if x is not None and id(x) in fused and id(x) not in carried}
    moment = fullest(Scope(body.ops, body.takes, carries), rules, given)
    return Moment(max(0, moment.bytes - sum(x.bytes for x in body.takes)), moment.values, moment.op)
