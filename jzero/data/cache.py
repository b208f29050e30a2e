"""Arrays on disk: found by a digest, written whole or not at all, checked before they are believed."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jzero.files import DamagedError, read_checked, replacing, write_checked

_BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True)
class ArrayFile:
    """An .npy of `shape` and the CRC-32 of its elements' bytes."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    checksum: int

    def open(self) -> np.ndarray:
        """The array, memory-mapped and read-only."""
        # As a plain array: slicing numpy's memmap class costs more than reading a window.
        return np.asarray(np.load(self.path, mmap_mode="r", allow_pickle=False))

    def check(self) -> None:
        """Raises DamagedError unless the file holds exactly what was written. Reads all of it."""
        try:
            array = self.open()
        except (OSError, ValueError, EOFError) as error:
            raise DamagedError(f"{self.path.name}: {error}") from error
        if array.shape != self.shape or array.dtype != self.dtype:
            raise DamagedError(
                f"{self.path.name}: {array.dtype} {list(array.shape)}, not {self.dtype} {list(self.shape)}"
            )
        checksum = 0
        for block in blocks(array.reshape(-1)):
            checksum = zlib.crc32(block.data, checksum)
        if checksum != self.checksum:
            raise DamagedError(f"{self.path.name}: checksum {checksum:08x}, not {self.checksum:08x}")


def cache_directory(cache_dir: str | None) -> Path:
    """`cache_dir`, or jzero's folder in the user's cache ($XDG_CACHE_HOME, else ~/.cache)."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    # A relative path there is to be ignored, says the XDG specification.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "jzero"


def digest(identity: Any) -> str:
    """A name of 32 hexadecimal digits for `identity` (JSON)."""
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    """A one-dimensional array in slices that are small enough to convert."""
    return (array[start : start + _BLOCK_TOKENS] for start in range(0, len(array), _BLOCK_TOKENS))


def write_array(path: Path, pieces: Iterable[np.ndarray], shape: tuple[int, ...], dtype: np.dtype) -> ArrayFile:
    """Writes the pieces, one-dimensional and of that dtype, end to end; together they fill `shape`."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    checksum = 0
    with replacing(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for piece in pieces:
            for block in blocks(piece):
                file.write(block.data)
                checksum = zlib.crc32(block.data, checksum)
    return ArrayFile(path, shape, dtype.name, checksum)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Writes `record` (JSON) with its checksum."""
    write_checked(path, "record", record)


def read_record(path: Path) -> dict[str, Any]:
    """What `write_record` wrote. Raises FileNotFoundError, or DamagedError for anything else."""
    return read_checked(path, "record")[0]
