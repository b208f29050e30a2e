"""What is told where a device's memory does not hold a program: whose bytes lie there, and what would take fewer."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from jzero.blueprint import Blueprint
from jzero.errors import OutOfMemoryError
from jzero.plan import Plan
from jzero.report import human_bytes

_LEAVES = 3


@contextmanager
def memory_told(blueprint: Blueprint) -> Iterator[None]:
    """Raises OutOfMemoryError in place of XLA's RESOURCE_EXHAUSTED, whether it comes from compiling or from running."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        told, _, _ = str(error).partition("\n")
        if "RESOURCE_EXHAUSTED" not in told:
            raise
        lines = [f"a device's memory does not hold this program ({told})", "State, bytes of one device:"]
        lines += [*_table(blueprint.plan), "The rest is activations, gathered weights and working space. Less takes:"]
        raise OutOfMemoryError("\n  ".join([*lines, *fixes(blueprint)])) from error


def fixes(blueprint: Blueprint) -> list[str]:
    """The settings that take less memory and are not at their end yet, the cheapest first.

    A planner that predicts what each takes names the smallest that fits instead.
    """
    config, plan = blueprint.config, blueprint.plan
    micro_batches = config.train.accumulation_steps or 1
    found = [f"train.accumulation_steps: {2 * micro_batches}, half the rows at a time"]
    if plan.stage < 3 and any(size > 1 for size in plan.axis_sizes.values()):
        found.insert(0, f"zero.stage: {plan.stage + 1}, more of the state split over devices")
    if config.model.remat != "full":
        found.append("model.remat: full (nnx.remat, nn.remat in a model of your own), activations computed again")
    if config.precision.compute == "float32":
        found.append("precision: bf16, activations and gathered weights in half the bytes")
    return found


def _table(plan: Plan) -> list[str]:
    """A line a tree, with its largest arrays."""
    lines = []
    for tree, leaves in plan.trees().items():
        sizes = sorted(((leaf.bytes_per_device(plan.axis_sizes), leaf.path) for leaf in leaves), reverse=True)
        if sizes:
            largest = ", ".join(f"{path} {human_bytes(size)}" for size, path in sizes[:_LEAVES])
            lines.append(f"{tree:<12}{human_bytes(sum(size for size, _ in sizes)):>10}  {largest}")
    return lines
