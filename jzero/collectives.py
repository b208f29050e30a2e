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
        return Collectives(asked, "as configured")
    if config.precision.reduces_otherwise:
        if refusal:
            raise CollectivesError(f"{refusal}; zero.collectives: xla can, with precision.reduce: null")
        return Collectives("explicit", f"auto: xla cannot reduce in precision.reduce = {config.precision.reduce}")
    if refusal:
        return Collectives("xla", f"auto: {refusal}")
    if all(plan.axis_sizes[axis] == 1 for axis in BATCH_AXES):
        return Collectives("xla", "auto: there is one device to compute on the batch")
    if config.zero.group == "node" and plan.stage and all(plan.axis_sizes[axis] > 1 for axis in BATCH_AXES):
        # Measured on programs for 8 H100: xla all-reduces whole gradients over all devices, in every micro-batch.
        return Collectives("explicit", "auto: it sums gradients within nodes first, and across them once a step")
    if accumulating and plan.stage <= 1:
        return Collectives("explicit", "auto: it reduces gradients once a step, xla in every micro-batch")
    return Collectives("xla", "auto: explicit would send as much")


def _explicit_cannot(plan: Plan) -> str | None:
    for path, leaf in plan.params.items():
        if taken := leaf.own_axes.intersection(BATCH_AXES):
            return (
                f"{path}: the model's own sharding {leaf.own_spec} names {', '.join(sorted(taken))}, over which "
                "zero.collectives = explicit has each device compute its own rows"
            )
    return None
