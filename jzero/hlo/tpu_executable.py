"""What XLA:TPU itself says that a program takes, read from the compiled executable."""

from collections.abc import Iterator
from typing import Any

from google.protobuf import empty_pb2
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

# Numbers of fields, which nothing documents (libtpu 0.0.42 and 0.0.50): a report is believed by its own sums alone.
_TOTAL, _PARTS, _ARGUMENTS, _OUTPUTS, _ALIASED = 2, 3, 5, 6, 7
_KIND, _SIZE, _IDLE = 1, 2, 3
_HEAP = 3
_OPENING = b"\x0a"  # of a message in field 1, as the report holds one for each space of memory
# libtpu 0.0.50 packs it in a Riegeli file, whose blocks begin with a header each (riegeli_records_file_format.md).
_RIEGELI, _BLOCK, _HEADER = bytes.fromhex("83af70d10d884a3f"), 2**16, 24


def program_bytes(executable: bytes, analysis: Any) -> int | None:
    """The bytes of a device's main memory that a TPU program takes besides its arguments and outputs: "Program hbm
    requirement" in XLA's words where a program does not fit. Its heap, what collectives reserve, constants, code.

    executable: `compiled.runtime_executable().serialize()`; analysis: `compiled.memory_analysis()`. None where no
    report is found that agrees with it. Not to be had otherwise: `temp_size_in_bytes` is the heap and once more the
    part of it that lies idle (fragments), which says 13 to 20 % too much of a step's memory (the larger shipped configs
    on v5e and v5p; XLA compiles them for devices that have less), and leaves out the code.
    """
    said = (analysis.argument_size_in_bytes, analysis.output_size_in_bytes, analysis.alias_size_in_bytes)
    figures = b"".join(
        _varint(field << 3) + _varint(size) for field, size in zip((_ARGUMENTS, _OUTPUTS, _ALIASED), said, strict=True)
    )
    data = _without_blocks(executable)
    at = data.find(figures)
    while at >= 0:
        for space in _around(data, at, at + len(figures)):
            parts = [_fields(f.data) for f in space if f.field_number == _PARTS and isinstance(f.data, bytes)]
            heaps = [part for part in parts if part is not None and _number(part, _KIND) == _HEAP]
            if sum(_number(heap, _SIZE) + _number(heap, _IDLE) for heap in heaps) == analysis.temp_size_in_bytes:
                return _number(space, _TOTAL)
        at = data.find(figures, at + 1)
    return None


def _without_blocks(data: bytes) -> bytes:
    start = data.find(_RIEGELI)
    if start < 0:
        return data
    return b"".join(data[at + _HEADER : at + _BLOCK] for at in range(start, len(data), _BLOCK))


def _around(data: bytes, start: int, end: int) -> Iterator[UnknownFieldSet]:
    """The messages in which a stretch of bytes lies, innermost first; what holds those differs by version."""
    opening = data.rfind(_OPENING, 0, start)
    while opening >= 0:
        size, first = _read_varint(data, opening + 1)
        if end <= first + size <= len(data):
            fields = _fields(data[first : first + size])
            if fields is not None:
                yield fields
        opening = data.rfind(_OPENING, 0, opening)


def _fields(data: bytes) -> UnknownFieldSet | None:
    message = empty_pb2.Empty()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return None
    return UnknownFieldSet(message)


def _number(fields: UnknownFieldSet, number: int) -> int:
    return next((f.data for f in fields if f.field_number == number and isinstance(f.data, int)), 0)


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first, a set top bit where more follow (protobuf's encoding)."""
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number, and where what follows it begins."""
    number = shift = 0
    for byte in data[at : at + 10]:
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            break
    return number, at
