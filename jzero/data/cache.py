"""Token files on disk: found by a digest, written whole or not at all, checked before they are believed."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_BLOCK_TOKENS = 1 << 20


class DamagedError(Exception):
    """A file of the cache is cut short, altered or gone. Never leaves `jzero.data`, which writes it anew."""


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
    with _replacing(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for piece in pieces:
            for block in blocks(piece):
                file.write(block.data)
                checksum = zlib.crc32(block.data, checksum)
    return TokenFile(path, num_tokens, dtype.name, checksum)


def write_record(path: Path, record: dict[str, Any]) -> None:
    """Writes `record` (JSON) with its checksum."""
    checksum = zlib.crc32(json.dumps(record).encode())
    with _replacing(path) as file:
        file.write(json.dumps({"checksum": checksum, "record": record}).encode())


def read_record(path: Path) -> dict[str, Any]:
    """What `write_record` wrote. Raises FileNotFoundError, or DamagedError for anything else."""
    content = path.read_bytes()
    try:
        parsed = json.loads(content)
        record, checksum = parsed["record"], parsed["checksum"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path.name}: {error}") from error
    if zlib.crc32(json.dumps(record).encode()) != checksum:
        raise DamagedError(f"{path.name}: its checksum is not {checksum}")
    return record


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends, or vanishes when it raises.

    Processes that write one path at once write a file each. The last to finish stays, always a whole file.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
