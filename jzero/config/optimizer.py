"""The optimizer and its learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from jzero.config.section import Count, Decay, Fault, Flag, NonNegative, Positive, Section, Size, Text, shown, unused

# Where a name's own defaults differ from those below: the papers', which are optax's too.
_DEFAULTS: dict[Any, dict[str, Any]] = {
    "lion": {"b2": 0.99},
    "lamb": {"eps": 1e-6},
    "adagrad": {"eps": 1e-7},
    "adafactor": {"momentum": 0.0},
    "muon": {"momentum": 0.95, "nesterov": True},
    "schedule_free": {"schedule": "constant"},
}
_ADAM = ["adamw", "adam", "lamb", "muon", "schedule_free", "adamw8bit"]


class GroupConfig(Section):
    """Settings of the parameters that any of the patterns matches."""

    path: ClassVar[str] = "optimizer.groups[]"

    match: tuple[Text, ...] = ()  # patterns of paths, such as "layers/*/bias"; each has to match a parameter
    learning_rate_factor: NonNegative = 1.0  # times the learning rate
    weight_decay: NonNegative | None = None  # of every one of them; null: as without the group

    def conflicts(self) -> Iterator[Fault]:
        if not self.match:
            yield Fault((f"{self.path}.match",), f"{self.path}.match = []: give patterns of paths, such as [*/bias]")


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    path: ClassVar[str] = "optimizer"

    # optax's names. muon: Adam for what is no matrix; schedule_free: on AdamW; adamw8bit: moments in 8 bits.
    name: Literal[
        "adamw", "adam", "sgd", "lion", "adafactor", "lamb", "muon", "adagrad", "schedule_free", "adamw8bit"
    ] = "adamw"
    learning_rate: NonNegative = 1e-3  # peak of the schedule
    # Shape after the warm-up. wsd: at the peak, then a linear decay; inverse_sqrt: peak * sqrt(warmup_steps / step).
    # constant with schedule_free.
    schedule: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt", "piecewise"] = "cosine"
    warmup_steps: Count = 0  # steps of linear rise from 0
    decay_steps: Size | None = None  # steps to final_learning_rate, warm-up included; null: train.num_steps
    final_learning_rate: NonNegative = 0.0  # where linear, cosine and wsd end, a step after the last
    cooldown_steps: Size | None = None  # wsd: steps of the final decay; null: a tenth of decay_steps
    boundaries: tuple[Size, ...] = ()  # piecewise: steps at which the rate changes
    factors: tuple[NonNegative, ...] = ()  # piecewise: times the peak, from each boundary on
    b1: Decay = 0.9  # adams, lion: decay of the first moment; schedule_free: how near its average gradients are taken
    b2: Decay = 0.999  # adams: decay of the second moment; lion: of the momentum, 0.99
    eps: Positive = 1e-8  # adams: added to the root of the second moment, lamb 1e-6; adagrad: under the root, 1e-7
    momentum: Decay = 0.9  # sgd, muon (0.95), adafactor (0): decay of the momentum; 0: none kept, but by muon
    nesterov: Flag = False  # sgd, muon (true): look ahead
    muon_exclude: tuple[Text, ...] | None = None  # muon: path patterns left to Adam; null: *embed* and *lm_head*
    weight_decay: NonNegative = 0.0  # decoupled decay, times the learning rate; of matrices that are no bias or scale
    groups: tuple[GroupConfig, ...] = ()  # parameters with settings of their own; the last that matches holds
    clip_norm: Positive | None = 1.0  # largest global gradient norm; null: no clipping

    @classmethod
    def complete(cls, given: Any) -> Any:
        name = given.get("name") if isinstance(given, Mapping) else None
        return {**_DEFAULTS.get(name, {}), **given} if isinstance(name, str) else given

    def conflicts(self) -> Iterator[Fault]:
        yield from self._unread()
        steps, factors = self.boundaries, self.factors
        if self.schedule == "piecewise" and (
            len(steps) != len(factors) or [*steps] != sorted({*steps}) or not steps or steps[0] < self.warmup_steps
        ):
            yield Fault(
                ("optimizer.boundaries", "optimizer.factors", "optimizer.warmup_steps"),
                f"optimizer.boundaries = {shown(steps)}, optimizer.factors = {shown(factors)}: give as many of one as "
                f"of the other, the steps rising and none before optimizer.warmup_steps = {self.warmup_steps}",
            )
        decays = {"optimizer.weight_decay": self.weight_decay}
        decays |= {f"optimizer.groups[{i}].weight_decay": group.weight_decay for i, group in enumerate(self.groups)}
        for field, decay in decays.items():
            if self.name == "adam" and decay:
                yield Fault(
                    ("optimizer.name", field),
                    f"{field} = {decay}: means two things with optimizer.name = adam; choose adamw, which decays apart "
                    "from the gradient, or drop it",
                )
        if self.name == "sgd" and self.nesterov and not self.momentum:
            yield Fault(
                ("optimizer.nesterov", "optimizer.momentum"),
                f"optimizer.nesterov = true: looks ahead along optimizer.momentum = {self.momentum}; raise that above "
                "0, or drop nesterov",
            )
        if self.name == "schedule_free" and self.schedule != "constant":
            yield Fault(
                ("optimizer.name", "optimizer.schedule"),
                f"optimizer.schedule = {self.schedule}: optimizer.name = schedule_free averages the weights instead; "
                "set optimizer.schedule: constant (warmup_steps may stay)",
            )
        if self.name == "schedule_free" and not self.b1:
            yield Fault(
                ("optimizer.name", "optimizer.b1"),
                "optimizer.b1 = 0.0: optimizer.name = schedule_free keeps its average by it; raise it above 0",
            )

    def _unread(self) -> Iterator[Fault]:
        """What is set and has no say."""
        matrices, decaying = ("name", ["muon"]), ("schedule", ["linear", "cosine", "wsd"])
        wsd, piecewise = ("schedule", ["wsd"]), ("schedule", ["piecewise"])
        yield from unused(self, {"b1": ("name", [*_ADAM, "lion"]), "b2": ("name", [*_ADAM, "lion"])})
        yield from unused(self, {"eps": ("name", [*_ADAM, "adagrad"]), "muon_exclude": matrices})
        yield from unused(
            self, {"momentum": ("name", ["sgd", "muon", "adafactor"]), "nesterov": ("name", ["sgd", "muon"])}
        )
        yield from unused(self, {"decay_steps": decaying, "final_learning_rate": decaying})
        yield from unused(self, {"cooldown_steps": wsd, "boundaries": piecewise, "factors": piecewise})
