"""Which dtype where, and the loss scale that float16 needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from jzero.config.section import Fault, Flag, Positive, Section, Size, Text, shown

Dtype = Literal["float32", "bfloat16", "float16"]
WideDtype = Literal["float32", "bfloat16"]  # with float32's range

_HALF = ("bfloat16", "float16")
_PRESETS: dict[Any, dict[str, str | None]] = {
    "fp32": {"params": "float32", "compute": "float32", "master": None},
    "bf16": {"params": "bfloat16", "compute": "bfloat16", "master": "float32"},
    "fp16": {"params": "float16", "compute": "float16", "master": "float32"},
}


class PrecisionConfig(Section):
    """Which dtype where. A preset's name alone will do; single fields override the preset's."""

    path: ClassVar[str] = "precision"

    preset: Literal["fp32", "bf16", "fp16"] = "fp32"  # where the defaults of params, compute and master come from
    params: Dtype = "float32"  # parameters at rest
    compute: Dtype = "float32"  # parameters and activations in the model
    master: Dtype | None = None  # the copy that the optimizer updates; null: the parameters themselves
    accumulate: WideDtype = "float32"  # gradients summed over micro-batches
    reduce: Dtype | None = None  # gradients summed over devices; null: as they come, precision.compute or accumulate
    moments: WideDtype | None = None  # arrays of the optimizer's state at rest; null: as the optimizer makes them
    keep_float32: tuple[Text, ...] = ()  # parameters that stay float32 at rest and in the model; path patterns
    stochastic_rounding: Flag = False  # of weights that are stored in bfloat16; the optimizer's state always is

    @property
    def reduces_otherwise(self) -> bool:
        """Whether gradients are to be summed over devices in another dtype than they are computed in."""
        return self.reduce not in (None, self.compute)

    @classmethod
    def complete(cls, given: Any) -> Any:
        given = {"preset": given} if isinstance(given, str) else given
        if not isinstance(given, Mapping):
            return given
        preset = given.get("preset", "fp32")
        defaults = _PRESETS.get(preset, {}) if isinstance(preset, str) else {}
        if given.get("params") in _HALF:
            # Without a wider copy most updates round to nothing: only `master: null`, written out, asks for that.
            defaults = {**defaults, "master": "float32"}
        if given.get("params") == defaults.get("master"):
            # Parameters that are already as wide as the preset's master are their own master.
            defaults = {**defaults, "master": None}
        return {**defaults, **given}

    def conflicts(self) -> Iterator[Fault]:
        if self.master not in (None, "float32", self.params):
            wrong = "is narrower than" if self.params == "float32" else "holds no more than"
            yield Fault(
                ("precision.master", "precision.params"),
                f"precision.master = {self.master}: {wrong} precision.params = {self.params}; "
                "set precision.master: null or float32",
            )
        updated = self.master or self.params
        if self.stochastic_rounding and updated != "bfloat16":
            yield Fault(
                ("precision.stochastic_rounding", "precision.params", "precision.master"),
                f"precision.stochastic_rounding = true: the weights that the optimizer updates are {updated}, which "
                "needs none; set precision.params: bfloat16 with master: null, or drop it",
            )


class LossScaleConfig(Section):
    """The factor that keeps float16 gradients from vanishing (precision.compute: float16), DeepSpeed's rules."""

    path: ClassVar[str] = "loss_scale"

    initial: Positive = 65536.0  # where it starts, times the mean loss
    dynamic: Flag = True  # halved on overflow, doubled after a good while; false: stays at initial
    window: Size = 1000  # dynamic: good steps before it doubles
    hysteresis: Size = 2  # dynamic: overflows before it halves
    consecutive_hysteresis: Flag = False  # dynamic: a good step allows all those overflows again
    minimum: Positive = 1.0  # dynamic: an overflow at this scale ends the run

    def conflicts(self) -> Iterator[Fault]:
        if self.dynamic and self.minimum > self.initial:
            yield Fault(
                ("loss_scale.minimum", "loss_scale.initial"),
                f"loss_scale.minimum = {self.minimum}: more than loss_scale.initial = {self.initial}; lower the first",
            )
        for name, value in self.model_dump(exclude_defaults=True, exclude={"initial", "dynamic"}).items():
            if not self.dynamic:
                yield Fault(
                    (f"loss_scale.{name}", "loss_scale.dynamic"),
                    f"loss_scale.{name} = {shown(value)}: not read by loss_scale.dynamic = false, whose scale stays at "
                    "loss_scale.initial; drop it, or set loss_scale.dynamic: true",
                )
