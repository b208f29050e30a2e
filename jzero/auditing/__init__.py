"""A compiled training step held against its plan: where each array lies, what travels, what the plan does not explain.

kinds of findings    what was found
placement            an array of the state that the step does not leave where the plan has it
gradient-placement   a gradient that adds up whole, where the plan splits it
stack-gather         all layers of a stack gathered at once, where one was to be read at a time
parameter-gather     a parameter gathered that the plan does not gather
reduced-in-loop      gradients reduced in every micro-batch, where the plan sums them on each device first
all-reduce           whole gradients on every device, where a reduce-scatter was asked for
activation-KIND      an array of no parameter's shape that travels over replica or data by a collective of that KIND
update               something that travels in the update of an optimizer that looks at single elements only

XLA's own warnings of "involuntary full rematerialization" cannot be had: its C++ writes them to stderr. What they warn
of shows here as an activation-all-gather.
"""

from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType

from jzero.auditing.explain import Explainer
from jzero.auditing.finding import Finding as Finding
from jzero.auditing.finding import LeafAudit as LeafAudit
from jzero.auditing.placement import gradient_leaves, misplaced, state_leaves, stayed_whole
from jzero.auditing.report import audit_report
from jzero.blueprint import TrainProgram
from jzero.engine import Engine
from jzero.hlo import Collective, Memory, collectives, loops, memory
from jzero.mesh import platform_of
from jzero.scopes import MICRO_BATCHES, traced_engine
from jzero.traffic import planned_transfers


@dataclass(frozen=True)
class Audit:
    """What a compiled training step is.

    leaves: every array of the state and every gradient. whole: those that stayed whole although the stage splits their
    tree, largest first; arrays of up to `zero.min_shard_elements` float32 elements are left out. findings: what the
    plan does not explain; notes: what costs more than it need, and is known. collectives: all that travels. memory: by
    the compiler's account. Printed by rich it is a report.
    """

    leaves: list[LeafAudit]
    whole: list[LeafAudit]
    findings: list[Finding]
    notes: list[Finding]
    collectives: list[Collective]
    memory: Memory

    def __rich__(self) -> RenderableType:
        return audit_report(self.leaves, self.whole, [*self.findings, *self.notes], self.collectives, self.memory)


def audit(engine: Engine, batch: Any = None) -> Audit:
    """The audit of the program that `engine.step` runs for a batch of (abstract) arrays; of the one it compiled last
    where none is given. Raises UserError where there is neither."""
    return audit_program(engine.program(batch))


def audit_program(program: TrainProgram) -> Audit:
    """The audit of a compiled training step, for devices that may be absent."""
    blueprint, plan = program.blueprint, program.blueprint.plan
    text = program.compiled.as_text() or ""  # a backend need not show its programs
    mesh, tolerance = blueprint.mesh, 4 * blueprint.config.zero.min_shard_elements
    found, around = collectives(text, mesh), loops(text)
    leaves = state_leaves(plan, mesh, program.compiled)
    leaves += gradient_leaves(plan, around, program.num_micro_batches)
    accumulation = {
        loop.operation.name
        for loop in around
        if MICRO_BATCHES in (loop.operation.op_name or "") and not loop.operation.loops
    }
    explainer = Explainer(
        blueprint,
        traced_engine(program.traced.jaxpr),
        platform_of(mesh),
        accumulation,
        planned_transfers(blueprint, program.traced.jaxpr),
    )
    said = [*misplaced(leaves), *explainer.findings(found)]
    return Audit(
        leaves=leaves,
        whole=stayed_whole(plan, leaves, tolerance),
        findings=[finding for finding in said if finding.severity == "warning"],
        notes=[finding for finding in said if finding.severity == "note"],
        collectives=found,
        memory=memory(program.compiled, platform_of(mesh)),
    )
