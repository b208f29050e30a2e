"""The mesh, and what ZeRO shards over it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from jzero.config.section import AxisSize, Count, Fault, Section, Whole

Group = Literal["all", "node"]


class MeshConfig(Section):
    """Devices along each mesh axis; at most one -1, which takes what remains."""

    path: ClassVar[str] = "mesh"

    replica: AxisSize = 1  # outer axis, slow links: nodes or slices
    data: AxisSize = -1  # inner axis, fast links
    tensor: AxisSize = 1  # innermost axis: tensor parallelism

    def conflicts(self) -> Iterator[Fault]:
        free = [f"mesh.{name}" for name in MeshConfig.model_fields if getattr(self, name) == -1]
        if len(free) > 1:
            told = f"{free[-1]} = -1: {free[0]} is -1 already; only one axis can take what remains"
            yield Fault(tuple(free), told)


class ZeroConfig(Section):
    """What ZeRO shards, and over which devices."""

    path: ClassVar[str] = "zero"

    # What is sharded: 0 nothing; 1 optimizer state; 2 gradients too; 3 parameters too.
    stage: Annotated[Literal[0, 1, 2, 3], Whole] = 3
    group: Group = "all"  # all: over replica and data; node: over data only, with a copy in each replica
    optimizer_group: Group | None = None  # the same for the optimizer state; null: group
    min_shard_elements: Count = 4096  # smaller arrays stay whole, elements
    # Who places the collectives: xla; jzero itself (explicit); whichever sends less (auto).
    collectives: Literal["xla", "explicit", "auto"] = "xla"

    def conflicts(self) -> Iterator[Fault]:
        if self.group == "all" and self.optimizer_group == "node":
            yield Fault(
                ("zero.optimizer_group", "zero.group"),
                "zero.optimizer_group = node: cannot be narrower than zero.group = all; "
                "set zero.group: node, or zero.optimizer_group: all",
            )
