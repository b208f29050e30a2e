"""The most that stands at one time, going through a step's operations in their order."""

from collections import deque
from dataclasses import dataclass

from jzero.footprint.fusion import FUSED, REDUCTIONS, Rules, Standing, sources, standing, working_bytes
from jzero.footprint.operations import Op, Scope, Value


@dataclass
class Moment:
    """What stands while an operation runs. loose: bytes of no value."""

    bytes: int
    values: list[tuple[Value, int]]
    loose: int
    op: Op | None
    backward: bool


def most(scope: Scope, rules: Rules, free: set[int]) -> Moment:
    """The moment of a scope at which most stands, beyond what stood before; what a loop takes is counted.

    free: values that take no memory (they are written where something else stood)."""
    stand = standing(scope, rules)
    own = {id(x) for op in scope.ops for x in op.makes}
    running = [op for op in scope.ops if any(id(x) in stand.values for x in op.makes)]
    reads = [sources(op, stand, own) for op in running]
    if rules.breadth_first:
        running, reads = _breadth_first(running, reads)
    if rules.late_products:
        running, reads = _late(scope, running, reads)
    last: dict[int, int] = {}
    for index, values in enumerate(reads):
        for x in values:
            last[id(x)] = index
    end = len(running)
    for x in scope.gives:
        if x is not None and id(x) not in free:
            last[id(x)] = end
    live: dict[int, tuple[Value, int]] = {id(x): (x, x.bytes) for x in scope.takes}
    for key in list(live):
        if key not in last:
            del live[key]
    peak = Moment(0, [], 0, None, False)
    for index, op in enumerate(running):
        dying = [id(x) for x in reads[index] if last.get(id(x)) == index and id(x) in live]
        inner = Moment(0, [], 0, None, False)
        for body in op.bodies:
            inner = max(inner, _inner(body, rules), key=lambda m: m.bytes)
        makes = [x for x in op.makes if id(x) in stand.values]
        if op.name in FUSED or op.name in ("dynamic_update_slice", "scatter", "scatter-add", "scan", "while", "cond"):
            if op.name == "scan":
                num_consts, num_carry = op.params["num_consts"], op.params["num_carry"]
                inits = {id(x) for x in op.reads[num_consts : num_consts + num_carry]}
                dying_here = [key for key in dying if key in inits]
                makes_here = [x for x in op.makes[:num_carry] if id(x) in stand.values]
            else:
                dying_here, makes_here = dying, makes
                if op.name in FUSED and any(x.elements != makes[0].elements for x in reads[index]):
                    dying_here = []
            for x in makes_here:
                same = next((key for key in dying_here if key in live and live[key][1] >= x.bytes > 0), None)
                if same is not None and id(x) not in free:
                    dying.remove(same)
                    del live[same]
        for x in makes:
            if id(x) not in free:
                live[id(x)] = (x, x.bytes)
        work = working_bytes(op, rules)
        total = sum(size for _, size in live.values()) + inner.bytes + work
        if total > peak.bytes:
            peak = Moment(total, [*live.values(), *inner.values], work + inner.loose, inner.op or op, op.backward)
        for key in dying:
            del live[key]
        for x in makes:
            if id(x) in live and last.get(id(x), -1) <= index:
                del live[id(x)]
    return peak


def _breadth_first(running: list[Op], reads: list[list[Value]]) -> tuple[list[Op], list[list[Value]]]:
    maker = {id(x): n for n, op in enumerate(running) for x in op.makes}
    needs = [{maker[id(x)] for x in values if id(x) in maker} for values in reads]
    users: list[list[int]] = [[] for _ in running]
    for n, need in enumerate(needs):
        for m in need:
            users[m].append(n)
    waiting = [len(need) for need in needs]
    queue = deque(n for n, count in enumerate(waiting) if count == 0)
    order = []
    while queue:
        n = queue.popleft()
        order.append(n)
        for user in users[n]:
            waiting[user] -= 1
            if waiting[user] == 0:
                queue.append(user)
    return [running[n] for n in order], [reads[n] for n in order]


def _late(scope: Scope, running: list[Op], reads: list[list[Value]]) -> tuple[list[Op], list[list[Value]]]:
    """The operations in an order where products run when their result is first read, those of no carry at the end."""
    maker = {id(x): n for n, op in enumerate(running) for x in op.makes}
    order: list[int] = []
    done: set[int] = set()
    wanted = set()
    prompt: set[int] = set()
    if scope.takes:
        pending = [maker[id(x)] for x in scope.gives[: len(scope.takes)] if x is not None and id(x) in maker]
        while pending:
            n = pending.pop()
            if n not in wanted:
                wanted.add(n)
                pending += [maker[id(x)] for x in reads[n] if id(x) in maker]
    else:
        wanted = set(range(len(running)))
        late_to = {n for n, op in enumerate(running) if op.name == "reduce_over_devices"}
        prompt = {maker[id(x)] for n in late_to for x in reads[n] if id(x) in maker}

    def run(n: int) -> None:
        if n in done:
            return
        done.add(n)
        for x in reads[n]:
            if id(x) in maker:
                run(maker[id(x)])
        order.append(n)

    late: set[int] = set()
    for n, op in enumerate(running):
        made = [maker[id(x)] for x in reads[n] if id(x) in maker]
        if n in prompt:
            run(n)
        elif op.name == "dot_general" or (op.name in FUSED and len(made) == 1 and made[0] in late):
            late.add(n)
        elif n in wanted:
            run(n)
    for n in range(len(running)):
        run(n)
    return [running[n] for n in order], [reads[n] for n in order]


def _inner(body: Scope, rules: Rules) -> Moment:
    """Of a loop's body: what it takes is counted with the loop, what it gives turn by turn goes where that stands."""
    num_carries = len(body.takes)
    made_fused = {id(x) for op in body.ops if op.name in FUSED for x in op.makes}
    carried = {id(x) for x in body.gives[:num_carries] if x is not None}
    free = {id(x) for x in body.gives if x is not None and id(x) in made_fused} - carried
    lasting = Scope(body.ops, body.takes, body.gives[:num_carries])
    moment = most(lasting, rules, free)
    taken = sum(x.bytes for x in body.takes)
    return Moment(max(0, moment.bytes - taken), moment.values, moment.loose, moment.op, moment.backward)
