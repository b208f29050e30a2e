"""What a compiled program takes of a device's memory."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Memory:
    """Bytes of one device. outputs: all of them; aliased: those that take the place of arguments. temporaries: the one
    block that the program works in. peak: what a device must have room for, the program's own code aside."""

    arguments: int
    temporaries: int
    outputs: int
    aliased: int

    @property
    def peak(self) -> int:
        return self.arguments + self.temporaries + self.outputs - self.aliased


def memory(compiled: Any) -> Memory:
    """The memory that a compiled program (`jax.stages.Compiled`) takes of a device.

    `peak_memory_in_bytes` is no measure of it (measured: jax 0.10.2, built-in models). XLA:CPU leaves temporaries out;
    XLA:GPU counts what is live at once, up to 8 % less than the block that its runtime takes; XLA:TPU counts what lies
    in on-chip memory too, and came to between 0.7 and 15 times the sum here.
    """
    found = compiled.memory_analysis()
    return Memory(
        found.argument_size_in_bytes,
        found.temp_size_in_bytes,
        found.output_size_in_bytes,
        found.alias_size_in_bytes,
    )
