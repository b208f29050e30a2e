"""Which of the two gradient engines runs, and why."""

from dataclasses import dataclass
from typing import Literal

from jzero.config import Config
from jzero.errors import CollectivesError
from jzero.mesh import BATCH_AXES
from jzero.plan import Plan


@dataclass(frozen=True)
class Collectives:
    """Who places the collectives: `xla` or `explicit`, and why."""

    engine: Literal["xla", "explicit"]
    reason: str


def choose_collectives(config: Config, plan: Plan, *, accumulating: bool) -> Collectives:
    """The engine that `zero.collectives` names, or for `auto` the one that sends less.

    accumulating: over several micro-batches. Raises CollectivesError where the one that is named cannot do it.
    """
    asked, refusal = config.zero.collectives, _explicit_cannot(plan)
    if asked == "explicit" and refusal:
        raise CollectivesError(f"{refusal}; zero.collectives: xla can")
    if asked != "auto":
        return Collectives(asked, f"zero.collectives = {asked}")
    if config.precision.reduce not in (None, config.precision.compute):
        if refusal:
            raise CollectivesError(f"{refusal}; zero.collectives: xla can, with precision.reduce: null")
        return Collectives("explicit", f"only it reduces gradients in precision.reduce = {config.precision.reduce}")
    if refusal:
        return Collectives("xla", refusal)
    if all(plan.axis_sizes[axis] == 1 for axis in BATCH_AXES):
        return Collectives("xla", "one device sends nothing")
    if accumulating and _reduces_at_the_end(plan):
        return Collectives("explicit", "it reduces gradients once a step, xla in every micro-batch")
    return Collectives("xla", "explicit would send as much")


def _explicit_cannot(plan: Plan) -> str | None:
    for path, leaf in plan.params.items():
        if taken := leaf.own_axes.intersection(BATCH_AXES):
            return (
                f"{path}: the model's own sharding {leaf.own_spec} names {', '.join(sorted(taken))}, over which "
                "zero.collectives = explicit has each device compute its own rows"
            )
    return None


def _reduces_at_the_end(plan: Plan) -> bool:
    """Whether there are axes over which gradients need not be summed before the micro-batches are."""
    axes = {axis for axis in BATCH_AXES if plan.axis_sizes[axis] > 1}
    return any(leaf.dim is not None and axes - set(leaf.zero_axes) for leaf in plan.gradients.values()) or (
        plan.stage == 0
    )
