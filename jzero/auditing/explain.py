"""What travels in a program, held against what its plan tells (`jzero.traffic`)."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jzero.auditing.finding import Finding
from jzero.blueprint import Blueprint
from jzero.hlo import Collective
from jzero.leaf import spec_extent
from jzero.mesh import BATCH_AXES
from jzero.traffic import Transfer

_REDUCTIONS = ("all-reduce", "reduce-scatter")


@dataclass
class _Told:
    """What the plan tells of one kind of transfer. elements of a whole array -> elements a step in all, and paths."""

    volume: Counter[int] = field(default_factory=Counter)
    paths: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    kinds: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))

    def add(self, transfer: Transfer) -> None:
        self.volume[transfer.elements] += transfer.elements * transfer.runs
        self.paths[transfer.elements].append(str(transfer.path))
        self.kinds[transfer.elements].add(transfer.kind)


@dataclass(frozen=True)
class Explainer:
    """engine: the one that computes the gradients. platform: "cpu", "gpu" or "tpu". accumulation: the names of the
    program's loops over micro-batches, none where there is but one. transfers: what the plan tells of the step."""

    blueprint: Blueprint
    engine: Literal["xla", "explicit"]
    platform: str | None
    accumulation: Collection[str]
    transfers: Sequence[Transfer]

    def findings(self, found: Iterable[Collective]) -> Iterator[Finding]:
        """What the plan does not explain, one finding for each kind of thing and place."""
        gathers, sums = defaultdict(_Told), _Told()
        for transfer in self.transfers:
            if transfer.path is None or self._reads_a_stack(transfer):
                continue
            if transfer.kind == "all-gather":
                for part in (_part(transfer.phase), None):
                    gathers[part].add(transfer)
            else:
                sums.add(transfer)
        seen: dict[tuple[str, str], Finding] = {}
        spent: Counter[tuple[str | None, int]] = Counter()
        for c in found:
            if self._trifling(c):
                continue
            if c.kind == "all-gather":
                finding = self._gather(c, gathers[_part(c.phase)], spent)
            elif c.kind in _REDUCTIONS:
                finding = self._reduction(c, sums, spent)
            else:
                finding = self._exchange(c)
            if finding is not None:
                seen.setdefault((finding.kind, finding.where), finding)
        yield from seen.values()

    def _trifling(self, c: Collective) -> bool:
        """Too small to matter, as arrays are that the plan leaves whole for it; or along the model's own axes alone."""
        least = max(self.blueprint.config.zero.min_shard_elements, len(self.blueprint.plan.params), 64)
        own = c.axes is not None and not set(c.axes) & set(BATCH_AXES)
        # An exchange is told by what one device keeps or sends.
        whole = c.elements if c.kind in ("all-gather", *_REDUCTIONS) else c.elements * c.group
        return whole < least or own or c.group == 1

    def _gather(self, c: Collective, told: _Told, spent: Counter[tuple[str | None, int]]) -> Finding | None:
        """told: of the part of the step that it is in; of the whole step where that is not known."""
        if c.elements in told.volume and self._layers_of(c) is None:
            spent[_part(c.phase), c.elements] += c.elements * (c.runs or 0)
            if spent[_part(c.phase), c.elements] <= told.volume[c.elements]:
                return None
            if c.phase == "update":
                return self._update(c, self._named(c, told.paths[c.elements]))
            what = f"{_shape(c)} is gathered more often than the {told.volume[c.elements] // c.elements} times planned"
            return _note("gathered-again", self._named(c, told.paths[c.elements]), what, "XLA's choice")
        if stack := self._layers_of(c):
            what = f"all layers at once, {_shape(c)}, {c.payload_bytes:,} bytes on every device, {_times(c)}"
            advice = (
                "read a layer where it is used: nnx.scan or nn.scan over the stack, jzero.gather in a jzero.Function"
            )
            return Finding("stack-gather", "warning", stack, what, advice)
        if paths := self._of_size(c.elements):
            where = self._named(c, paths)
            if self._in_update(c):
                return self._update(c, where)
            what = f"{_shape(c)} is gathered {_times(c)}, which stage {self.blueprint.plan.stage} does not ask for"
            return Finding("parameter-gather", "warning", where, what, "look for the model's own sharding constraint")
        if self._in_update(c):
            return self._update(c, _place(c))
        return self._activation(c)

    def _reduction(self, c: Collective, told: _Told, spent: Counter[tuple[str | None, int]]) -> Finding | None:
        if self.platform == "gpu" and c.kind == "all-reduce" and len(c.shape) == 1:
            # XLA:GPU joins several in one flat array.
            spent["joined", 0] += c.elements * (c.runs or 0)
            if spent["joined", 0] <= told.volume.total():
                return None
        paths = told.paths.get(c.elements) or self._of_size(c.elements)
        if not paths:
            return self._update(c, _place(c)) if self._in_update(c) else self._activation(c)
        where = self._named(c, paths)
        spent["sum", c.elements] += c.elements * (c.runs or 0)
        excess = spent["sum", c.elements] > told.volume[c.elements]
        inside = bool(c.loops) and c.loops[0] in self.accumulation
        if inside and excess and self.platform == "cpu" and self.engine == "xla":
            what = f"gradients such as {_shape(c)} are reduced in every micro-batch"
            return _note("reduced-in-loop", "all", what, "XLA:CPU does; zero.collectives: explicit sums them first")
        if inside and (excess or self._summed_locally(paths)):
            what = f"its gradient {_shape(c)} is reduced in every micro-batch, {_times(c)}; planned once a step"
            return Finding(
                "reduced-in-loop", "warning", where, what, "zero.collectives: explicit sums on each device first"
            )
        if c.kind == "all-reduce" and told.kinds.get(c.elements) == {"reduce-scatter"}:
            what = f"gradients such as {_shape(c)} are all-reduced and cut where a reduce-scatter would do"
            if self.engine == "xla":
                where, advice = "all", "XLA:CPU forms no reduce-scatter" if self.platform == "cpu" else "XLA's choice"
                return _note("all-reduce", where, what, advice)
            return Finding("all-reduce", "warning", where, what, "look for a psum in the model or the loss")
        return None

    def _exchange(self, c: Collective) -> Finding | None:
        if self._in_update(c):
            return self._update(c, _place(c))
        pieces = {c.elements, c.elements * c.group, 2 * c.elements * c.group}
        if paths := [path for count in pieces for path in self._of_size(count)]:
            what = f"{_shape(c)} of it goes from device to device, {_times(c)}, instead of a gather"
            return _note(c.kind, _listing(paths), what, "XLA's choice")
        return self._activation(c)

    def _activation(self, c: Collective) -> Finding:
        what = f"{_shape(c)}, no parameter's shape, travels over {_axes(c)}, {c.payload_bytes:,} bytes, {_times(c)}"
        advice = (
            "if rows are not meant to be compared or mixed there, look for a sharding constraint that splits anything "
            "but the rows over replica and data"
        )
        return Finding(f"activation-{c.kind}", "warning", _place(c), what, advice)

    def _update(self, c: Collective, where: str) -> Finding:
        what = f"the optimizer's update has {_shape(c)} travel over {_axes(c)}, {c.payload_bytes:,} bytes"
        if not self.blueprint.elementwise:
            return _note("update", where, what, "this optimizer looks beyond single elements")
        advice = "look for what in the optimizer or the loss mixes elements of different devices"
        return Finding("update", "warning", where, what, advice)

    def _named(self, c: Collective, paths: Iterable[str]) -> str:
        """The parameter that the program names, else those of its size."""
        return c.source if c.source and c.source in self.blueprint.plan.params else _listing(paths)

    def _in_update(self, c: Collective) -> bool:
        return c.phase == "update" or (c.phase is None and not c.loops)

    def _reads_a_stack(self, transfer: Transfer) -> bool:
        """Whether a use point gathers all layers of a stack. The update does so where the parameters rest whole."""
        assert transfer.path is not None
        if transfer.kind != "all-gather" or transfer.phase == "update":
            return False
        return self._layers(transfer.path) > 1 and transfer.elements in self._sizes(transfer.path)[1]

    def _layers_of(self, c: Collective) -> str | None:
        """The stack that a gather makes whole where a layer was to be read."""
        plan = self.blueprint.plan
        if plan.stage < 3 or self._in_update(c):
            return None
        stacks = [path for path in plan.params if self._layers(path) > 1 and c.elements in self._sizes(path)[1]]
        if c.source in plan.params:
            return c.source if c.source in stacks else None
        planned = {t.elements for t in self.transfers if t.path is not None and not self._reads_a_stack(t)}
        return _listing(stacks) if stacks and c.elements not in planned else None

    def _of_size(self, elements: int) -> list[str]:
        """The parameters that have as many elements, all layers or one."""
        return [path for path in self.blueprint.plan.params if elements in set().union(*self._sizes(path))]

    def _sizes(self, path: str) -> tuple[set[int], set[int]]:
        """Elements of one layer and of all, with padding and without, in the model's own parts and whole."""
        leaf, layers = self.blueprint.plan.params[path], self._layers(path)
        parts = {1, spec_extent(leaf.own_spec, self.blueprint.plan.axis_sizes)}
        whole = {math.prod(shape) // n for shape in (leaf.shape, leaf.stored_shape) for n in parts}
        return {count // layers for count in whole}, whole

    def _layers(self, path: str) -> int:
        stack = self.blueprint.model.params[path].stack_ndim
        return math.prod(self.blueprint.plan.params[path].shape[:stack])

    def _summed_locally(self, paths: Iterable[str]) -> bool:
        gradients = self.blueprint.plan.gradients
        return self.engine == "explicit" and not any(gradients[p].zero_axes for p in paths if p in gradients)


def _part(phase: str | None) -> str | None:
    """The part of a step that gathers are counted by."""
    return phase if phase in ("update", None) else "passes"


def _note(kind: str, where: str, what: str, advice: str) -> Finding:
    return Finding(kind, "note", where, what, advice)


def _shape(c: Collective) -> str:
    return f"{c.dtype}[{','.join(map(str, c.shape))}]"


def _times(c: Collective) -> str:
    return "once a step" if c.runs == 1 else f"{c.runs or 'many'} times a step"


def _axes(c: Collective) -> str:
    return " and ".join(c.axes) if c.axes else f"groups of {c.group} devices"


def _place(c: Collective) -> str:
    """The line of the model, the phase and what JAX calls the operation, as far as the program tells them."""
    name = (c.source or "").rsplit("/", 1)[-1]
    told = " ".join(part for part in (c.phase, name and f"({name})") if part)
    return ", ".join(part for part in (c.line, told) if part) or "an operation without a name"


def _listing(paths: Iterable[str]) -> str:
    unique = list(dict.fromkeys(paths))
    more = f" and {len(unique) - 2} of its size" if len(unique) > 2 else ""
    return " or ".join(unique[:2]) + more
