"""What XLA:TPU itself says that a program takes, read from the compiled executable."""

import io
from collections.abc import Iterator
from typing import Any

from google.protobuf import empty_pb2, proto
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

# Numbers of fields, which nothing documents (libtpu 0.0.42 and 0.0.50): a report is believed by its own sums alone.
_REPORT, _SPACES = 12, 1
_TOTAL, _PARTS, _ARGUMENTS, _OUTPUTS, _ALIASED = 2, 3, 5, 6, 7
_KIND, _SIZE, _WASTED = 1, 2, 3
_HEAP = 3


def program_bytes(executable: bytes, analysis: Any) -> int | None:
    """The bytes of a device's main memory that a TPU program takes besides its arguments and outputs: "Program hbm
    requirement" in XLA's words where a program does not fit. Its heap, what collectives reserve, constants, code.

    executable: `compiled.runtime_executable().serialize()`; analysis: `compiled.memory_analysis()`. None where no
    report is found that agrees with it. Not to be had otherwise: `temp_size_in_bytes` is the heap and once more the
    part of it that lies idle (fragments), which says 13 to 20 % too much of a step's memory (the larger shipped configs
    on v5e and v5p; XLA compiles them for devices that have less), and leaves out the code.
    """
    for message in _delimited(executable):
        for report in _messages(message, _REPORT):
            for space in _messages(report, _SPACES):
                heap = sum(
                    _number(part, _SIZE) + _number(part, _WASTED)
                    for part in _messages(space, _PARTS)
                    if _number(part, _KIND) == _HEAP
                )
                said = (heap, *(_number(space, n) for n in (_ARGUMENTS, _OUTPUTS, _ALIASED)))
                if said == (
                    analysis.temp_size_in_bytes,
                    analysis.argument_size_in_bytes,
                    analysis.output_size_in_bytes,
                    analysis.alias_size_in_bytes,
                ):
                    return _number(space, _TOTAL)
    return None


def _delimited(data: bytes) -> Iterator[UnknownFieldSet]:
    """The messages that it begins with, each behind its length."""
    stream = io.BytesIO(data)
    while True:
        try:
            message = proto.parse_length_prefixed(empty_pb2.Empty, stream)
        except DecodeError:
            return
        if message is None:
            return
        yield UnknownFieldSet(message)


def _messages(fields: UnknownFieldSet, number: int) -> Iterator[UnknownFieldSet]:
    for field in fields:
        if field.field_number == number and isinstance(field.data, bytes):
            message = empty_pb2.Empty()
            try:
                message.ParseFromString(field.data)
            except DecodeError:
                continue
            yield UnknownFieldSet(message)


def _number(fields: UnknownFieldSet, number: int) -> int:
    return next((f.data for f in fields if f.field_number == number and isinstance(f.data, int)), 0)
