"""The optimizer and its learning rate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from jzero.config.section import Count, Decay, Fault, Flag, NonNegative, Positive, Section, Size, shown, unused


class OptimizerConfig(Section):
    """The optimizer and its learning rate."""

    path: ClassVar[str] = "optimizer"

    name: Literal["adamw", "adam", "sgd"] = "adamw"  # optax's name
    learning_rate: NonNegative = 1e-3  # peak of the schedule
    # Shape after the warm-up. wsd: at the peak, then a linear decay; inverse_sqrt: peak * sqrt(warmup_steps / step).
    schedule: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt", "piecewise"] = "cosine"
    warmup_steps: Count = 0  # steps of linear rise from 0
    decay_steps: Size | None = None  # steps to final_learning_rate, warm-up included; null: train.num_steps
    final_learning_rate: NonNegative = 0.0  # where linear, cosine and wsd end, a step after the last
    cooldown_steps: Size | None = None  # wsd: steps of the final decay; null: a tenth of decay_steps
    boundaries: tuple[Size, ...] = ()  # piecewise: steps at which the rate changes
    factors: tuple[NonNegative, ...] = ()  # piecewise: times the peak, from each boundary on
    b1: Decay = 0.9  # adam, adamw: decay of the first moment
    b2: Decay = 0.999  # adam, adamw: decay of the second moment
    eps: Positive = 1e-8  # adam, adamw: added to the root of the second moment
    momentum: Decay = 0.9  # sgd: decay of the momentum
    nesterov: Flag = False  # sgd: look ahead
    weight_decay: NonNegative = 0.0  # decoupled decay, times the learning rate
    clip_norm: Positive | None = 1.0  # largest global gradient norm; null: no clipping

    def conflicts(self) -> Iterator[Fault]:
        adam, decaying = ("name", ["adamw", "adam"]), ("schedule", ["linear", "cosine", "wsd"])
        wsd, piecewise = ("schedule", ["wsd"]), ("schedule", ["piecewise"])
        yield from unused(self, {"b1": adam, "b2": adam, "eps": adam})
        yield from unused(self, {"momentum": ("name", ["sgd"]), "nesterov": ("name", ["sgd"])})
        yield from unused(self, {"decay_steps": decaying, "final_learning_rate": decaying})
        yield from unused(self, {"cooldown_steps": wsd, "boundaries": piecewise, "factors": piecewise})
        steps, factors = self.boundaries, self.factors
        if self.schedule == "piecewise" and (
            len(steps) != len(factors) or [*steps] != sorted({*steps}) or not steps or steps[0] < self.warmup_steps
        ):
            yield Fault(
                ("optimizer.boundaries", "optimizer.factors", "optimizer.warmup_steps"),
                f"optimizer.boundaries = {shown(steps)}, optimizer.factors = {shown(factors)}: give as many of one as "
                f"of the other, the steps rising and none before optimizer.warmup_steps = {self.warmup_steps}",
            )
