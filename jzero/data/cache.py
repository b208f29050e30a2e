"""Token files on disk: found by a digest, written whole or not at all, checked before they are believed."""

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
class TokenFile:
    """An .npy of `num_tokens` token ids and the CRC-32 of their bytes."""

    path: Path
    num_tokens: int
    dtype: str
    checksum: int

    def open(self) -> np.ndarray:
        """The tokens, [num_tokens], memory-mapped and read-only."""
        # As a plain array: slicing numpy's memmap class costs more than reading a window.
        return np.asarray(np.load(self.path, mmap_mode="r", allow_pickle=False))

    def check(self) -> None:
        """Raises DamagedError unless the file holds exactly what was written. Reads all of it."""
        try:
            tokens = self.open()
        except (OSError, ValueError, EOFError) as error:
            raise DamagedError(f"{self.path.name}: {error}") from error
        if tokens.shape != (self.num_tokens,) or tokens.dtype != self.dtype:
            raise DamagedError(
                f"{self.path.name}: {tokens.dtype} {tokens.shape}, not {self.dtype} ({self.num_tokens},)"
            )
        checksum = 0
        for block in blocks(tokens):
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


def blocks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """`tokens` in slices that are small enough to convert."""
    return (tokens[start : start + _BLOCK_TOKENS] for start in range(0, len(tokens), _BLOCK_TOKENS))


def write_tokens(path: Path, pieces: Iterable[np.ndarray], num_tokens: int, dtype: np.dtype) -> TokenFile:
    """Writes the pieces, which hold `num_tokens` tokens of that dtype together, end to end."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (num_tokens,)}
    checksum = 0
    with replacing(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for piece in pieces:
            for block in blocks(piece):
                file.write(block.data)
                checksum = zlib.crc32(block.data, checksum)
    return TokenFile(path, num_tokens, dtype.name, checksum)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Writes `record` (JSON) with its checksum."""
    write_checked(path, "record", record)


def read_record(path: Path) -> dict[str, Any]:
    """What `write_record` wrote. Raises FileNotFoundError, or DamagedError for anything else."""
    return read_checked(path, "record")[0]
