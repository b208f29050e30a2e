"""Which dtype where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from jzero.config.section import Fault, Section

Dtype = Literal["float32", "bfloat16"]

_PRESETS: dict[Any, dict[str, str | None]] = {
    "fp32": {"params": "float32", "compute": "float32", "master": None, "accumulate": "float32"},
    "bf16": {"params": "bfloat16", "compute": "bfloat16", "master": "float32", "accumulate": "float32"},
}


class PrecisionConfig(Section):
    """Which dtype where. A preset's name alone will do; single fields override the preset's."""

    path: ClassVar[str] = "precision"

    preset: Literal["fp32", "bf16"] = "fp32"  # where the other fields' defaults come from
    params: Dtype = "float32"  # parameters at rest
    compute: Dtype = "float32"  # parameters and activations in the model
    master: Dtype | None = None  # the copy that the optimizer updates; null: the parameters themselves
    accumulate: Dtype = "float32"  # gradients summed over micro-batches

    @classmethod
    def complete(cls, given: Any) -> Any:
        given = {"preset": given} if isinstance(given, str) else given
        if not isinstance(given, Mapping):
            return given
        preset = given.get("preset", "fp32")
        defaults = _PRESETS.get(preset, {}) if isinstance(preset, str) else {}
        if given.get("params") == "bfloat16":
            # Without a wider copy most updates round to nothing: only `master: null`, written out, asks for that.
            defaults = {**defaults, "master": "float32"}
        if given.get("params") == defaults.get("master"):
            # Parameters that are already as wide as the preset's master are their own master.
            defaults = {**defaults, "master": None}
        return {**defaults, **given}

    def conflicts(self) -> Iterator[Fault]:
        if self.master == "bfloat16" and self.params == "float32":
            yield Fault(
                ("precision.master", "precision.params"),
                "precision.master = bfloat16: is narrower than precision.params = float32; "
                "set precision.master: null or float32",
            )
