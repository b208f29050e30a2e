"""A step on given devices: its memory, traffic and time, from the plan and the traced program."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jzero.blueprint import Blueprint
from jzero.config import Config
from jzero.footprint import Footprint, estimate_footprint
from jzero.hardware import Cluster
from jzero.leaf import LeafPlan
from jzero.mesh import batch_shards
from jzero.metrics.flops import flops_per_token
from jzero.plan import Plan
from jzero.planning.links import Traffic, traffic
from jzero.planning.times import Times, step_times
from jzero.planning.work import product_flops
from jzero.state import plan_tree
from jzero.traffic import planned_transfers


@dataclass(frozen=True)
class Prediction:
    """One way to train on a cluster. Bytes are of one device; times: None where a figure of it is not known.
    elementwise: whether the optimizer looks at single elements only; what it sends otherwise is not in the traffic."""

    config: Config
    cluster: Cluster
    plan: Plan
    engine: str
    elementwise: bool
    rows: int
    footprint: Footprint
    traffic: Traffic
    flops: float
    times: Times | None

    @property
    def state(self) -> dict[str, int]:
        """Exact bytes of what lies on a device between steps, by tree; counters: step numbers and loss scale."""
        by_tree = {tree: size for tree, size in self.plan.bytes_per_device().items() if tree != "gradients"}
        return {**by_tree, "counters": state_bytes(self.plan) - sum(by_tree.values())}

    @property
    def gradients(self) -> int:
        """Exact bytes of the gradients as they are handed to the optimizer. They are among the temporaries, as far as
        they are there when a step holds most."""
        return self.plan.bytes_per_device()["gradients"]

    @property
    def bytes(self) -> dict[str, int]:
        """What makes up the total: the state, the batch, and what a step holds at its peak."""
        foot, state = self.footprint, self.state
        return {
            **state,
            "batch": foot.arguments - sum(state.values()),
            "gathered": foot.gathered,
            "activations": foot.activations,
            "temporaries": foot.temporaries + foot.outputs,
        }

    @property
    def total(self) -> int:
        return self.footprint.peak

    @property
    def usable(self) -> int | None:
        return usable_memory(self.config, self.cluster)

    @property
    def fits(self) -> bool | None:
        """None where the memory is not known."""
        return None if self.usable is None else self.total <= self.usable

    @property
    def tokens_per_second(self) -> float | None:
        tokens = self.rows * self.config.data.sequence_length
        return None if self.times is None else tokens / self.times.step

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, against the peak in bfloat16."""
        speed, peak = self.tokens_per_second, self.cluster.hardware.peak_flops
        if speed is None or peak is None:
            return None
        config = self.config
        work = config.log.flops_per_token or flops_per_token(config.model, self.plan, config.data.sequence_length)
        return speed * work / (peak * self.cluster.num_devices)


def predict(config: Config, blueprint: Blueprint, batch: Mapping[str, Any], cluster: Cluster) -> Prediction:
    """config: as its user has it; the blueprint's may say less of the runtime. batch: abstract arrays of a whole step.

    Nothing is compiled.
    """
    traced, plan = blueprint.trace_step(batch), blueprint.plan
    sent = traffic(planned_transfers(blueprint, traced.jaxpr), plan.axis_sizes, cluster)
    flops = product_flops(traced.jaxpr, batch_shards(plan.axis_sizes))
    return Prediction(
        config,
        cluster,
        plan,
        blueprint.collectives(blueprint.micro_batches(batch)).engine,
        blueprint.elementwise,
        jax.tree.leaves(batch)[0].shape[0],
        estimate_footprint(blueprint, traced, cluster.platform),
        sent,
        flops,
        step_times(config, plan, cluster, flops, sent.seconds),
    )


def state_bytes(plan: Plan) -> int:
    """Exact bytes of the whole training state on each device."""
    leaves = jax.tree.leaves(plan_tree(plan), is_leaf=lambda x: isinstance(x, LeafPlan))
    return sum(leaf.bytes_per_device(plan.axis_sizes) for leaf in leaves)


def usable_memory(config: Config, cluster: Cluster) -> int | None:
    """Bytes of a device's memory less the headroom; None where the memory is not known."""
    memory = cluster.hardware.memory
    return None if memory is None else int(memory * (1 - config.hardware.headroom))
