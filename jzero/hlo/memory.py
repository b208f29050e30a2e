"""What a compiled program takes of a device's memory."""

from dataclasses import dataclass
from typing import Any

import jax

from jzero.hlo.tpu_executable import program_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes of one device. outputs: all of them; aliased: those that take the place of arguments. temporaries: the one
    block that the program works in; on TPU, where it lies beside that, its code too. peak: what a device must have room
    for."""

    arguments: int
    temporaries: int
    outputs: int
    aliased: int

    @property
    def peak(self) -> int:
        return self.arguments + self.temporaries + self.outputs - self.aliased


def memory(compiled: Any, platform: str | None) -> Memory:
    """The memory that a program (`jax.stages.Compiled`) compiled for a platform takes of a device.

    `peak_memory_in_bytes` is no measure of it (measured: jax 0.10.2, built-in models). XLA:CPU leaves temporaries out;
    XLA:GPU counts what is live at once, up to 8 % less than the block that its runtime takes; XLA:TPU counts what lies
    in on-chip memory too, and came to between 0.7 and 15 times the sum here. Nor are XLA:TPU's temporaries: see
    `tpu_executable`; where that report cannot be read they are told as XLA:TPU tells them.
    """
    found = compiled.memory_analysis()
    temporaries = _of_tpu(compiled, found) if platform == "tpu" else None
    return Memory(
        found.argument_size_in_bytes,
        found.temp_size_in_bytes if temporaries is None else temporaries,
        found.output_size_in_bytes,
        found.alias_size_in_bytes,
    )


def _of_tpu(compiled: Any, analysis: Any) -> int | None:
    try:
        executable = compiled.runtime_executable().serialize()
    except jax.errors.JaxRuntimeError:
        return None  # no run ends for want of a report; seen of none, on TPUs that are not there
    return program_bytes(executable, analysis)
