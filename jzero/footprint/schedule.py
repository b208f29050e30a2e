"""The order in which a scope's operations run."""

from collections import deque

from jzero.footprint.operations import Op, Scope, Value
from jzero.footprint.rewrites import JOINED
from jzero.footprint.rules import FUSED, Rules


def scheduled(scope: Scope, ops: list[Op], reads: list[list[Value]], rules: Rules) -> list[int]:
    """Which of ops runs first, second, ...; reads: the standing values that each reads."""
    maker = {id(x): n for n, op in enumerate(ops) for x in op.makes}
    needs = [list(dict.fromkeys(maker[id(x)] for x in values if id(x) in maker)) for values in reads]
    if rules.order == "breadth first":
        return _breadth_first(needs)
    if rules.order == "late":
        return _late(scope, ops, needs, maker)
    return list(range(len(ops)))


def _breadth_first(needs: list[list[int]]) -> list[int]:
    users: list[list[int]] = [[] for _ in needs]
    for n, needed in enumerate(needs):
        for m in needed:
            users[m].append(n)
    waiting = [len(needed) for needed in needs]
    ready = deque(n for n, count in enumerate(waiting) if count == 0)
    order = []
    while ready:
        n = ready.popleft()
        order.append(n)
        for user in users[n]:
            waiting[user] -= 1
            if waiting[user] == 0:
                ready.append(user)
    return order


def _late(scope: Scope, ops: list[Op], needs: list[list[int]], maker: dict[int, int]) -> list[int]:
    """Products, and what only rearranges one, run when they are read; in a loop, what the next turn does not need runs
    last. Outside a loop products that wait for sums over devices alone run in their turn: all layers' would be late."""
    order: dict[int, None] = {}

    def run(n: int) -> None:
        pending = [n]
        while pending:
            missing = [m for m in needs[pending[-1]] if m not in order]
            if pending[-1] in order or not missing:
                order[pending.pop()] = None
            else:
                pending += missing

    wanted, prompt = set(range(len(ops))), set()
    if scope.takes:
        carried = scope.gives[: len(scope.takes)]
        wanted = _needed([maker[id(x)] for x in carried if x is not None and id(x) in maker], needs)
    else:
        prompt = {m for n, op in enumerate(ops) if op.name == JOINED for m in needs[n]}
    late: set[int] = set()
    for n, op in enumerate(ops):
        if n in prompt:
            run(n)
        elif op.name == "dot_general" or (op.name in FUSED and len(needs[n]) == 1 and needs[n][0] in late):
            late.add(n)
        elif n in wanted:
            run(n)
    for n in range(len(ops)):
        run(n)
    return list(order)


def _needed(pending: list[int], needs: list[list[int]]) -> set[int]:
    found: set[int] = set()
    while pending:
        n = pending.pop()
        if n not in found:
            found.add(n)
            pending += needs[n]
    return found
