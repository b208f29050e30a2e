"""What a compiled program takes of a device's memory."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Memory:
    """Bytes of one device. aliased: of the outputs, those that take the place of arguments. peak: all that is held at
    once at the most."""

    arguments: int
    temporaries: int
    outputs: int
    aliased: int
    peak: int


def memory(compiled: Any) -> Memory:
    """The memory that a compiled program (`jax.stages.Compiled`) takes of a device."""
    found = compiled.memory_analysis()
    arguments, temporaries = found.argument_size_in_bytes, found.temp_size_in_bytes
    outputs, aliased = found.output_size_in_bytes, found.alias_size_in_bytes
    return Memory(arguments, temporaries, outputs, aliased, arguments + temporaries + outputs - aliased)
