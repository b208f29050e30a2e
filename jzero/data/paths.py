"""The files that data.paths stands for, read as they are or decompressed, and what is said of bad ones."""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from jzero.errors import DataError

CHUNK_BYTES = 1 << 22
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def find_files(patterns: Sequence[str], suffixes: Sequence[str]) -> list[Path]:
    """The files that paths, folders and globs stand for, sorted, none twice.

    A folder stands for the files within, at any depth, that end in one of `suffixes`; hidden ones are left out.
    Raises DataError for what is missing, no plain file, or matches nothing.
    """
    files = sorted({Path(os.path.abspath(file)) for pattern in patterns for file in _expand(pattern, suffixes)})
    # Links may lead to one file in two ways, and a folder back to itself.
    return sorted({os.path.realpath(file): file for file in reversed(files)}.values())


def describe_files(files: Sequence[Path]) -> list:
    """JSON that changes when a file is replaced, grows or is written to."""
    stats = [(file, file.stat()) for file in files]
    return [[str(file), stat.st_size, stat.st_mtime_ns] for file, stat in stats]


def name_files(files: Sequence[Path]) -> str:
    more = f" and {len(files) - 1} more file{'s' * (len(files) > 2)}" if len(files) > 1 else ""
    return f"{files[0]}{more}"


def path_error(path: object, what: str, fix: str) -> DataError:
    return DataError(f"data.paths: {path} {what}. {fix}")


def empty_error(file: Path) -> DataError:
    return path_error(file, "is empty", "Give it content or leave it out.")


def encoding_error(file: Path, error: UnicodeDecodeError, base: int, line: int) -> DataError:
    """`error` counts bytes from `base` in the file, where `line` begins or is under way."""
    at = base + error.start
    line += error.object[: error.start].count(b"\n")
    encoding = "LATIN1"
    if at == 0 and error.object.startswith(UTF16_MARKS):
        encoding = "UTF-16"
    byte = error.object[error.start]
    what = f"is not UTF-8: byte 0x{byte:02x} at line {line}, byte offset {at} ({error.reason})"
    fix = f"Convert it, for instance: iconv -f {encoding} -t UTF-8 {file} > {file}.utf8"
    return path_error(file, what, fix)


@contextmanager
def opened(file: Path) -> Iterator[BinaryIO]:
    """`file` for reading, decompressed if it ends in .gz or .zst. What fails within the block is a DataError."""
    try:
        with open(file, "rb") as raw:
            yield _decompressed(file, raw)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        what = f"is damaged or cut short ({error})"
        raise path_error(file, what, "Bring it whole; decompressing it by hand shows how far it is sound.") from error
    except OSError as error:
        what = f"cannot be read ({error.strerror or error})"
        raise path_error(file, what, "Make it readable or leave it out.") from error


def _decompressed(file: Path, raw: BinaryIO) -> BinaryIO:
    match file.suffix:
        case ".gz":
            return gzip.GzipFile(fileobj=raw)  # pyright: ignore[reportReturnType]
        case ".zst":
            return io.BufferedReader(_ZstdReader(file, raw))
    return raw


class _ZstdReader(io.RawIOBase):
    """The frames of a .zst file, end to end. A frame that is cut short is an EOFError, unlike in zstandard's reader."""

    def __init__(self, file: Path, raw: BinaryIO):
        try:
            import zstandard
        except ImportError:
            what = "needs the package zstandard"
            raise path_error(file, what, "Run pip install 'jzero[data]', or decompress the file.") from None
        self._raw = raw
        self._damaged = zstandard.ZstdError
        self._frame = zstandard.ZstdDecompressor().decompressobj
        self._current = None
        self._compressed = b""
        self._content = memoryview(b"")  # slicing one copies nothing

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        while not self._content:
            # Little at a time: what comes out may be thousands of times as long.
            self._compressed = self._compressed or self._raw.read(1 << 10)
            if not self._compressed:
                if self._current is not None:
                    raise EOFError("the compressed stream ends within a frame")
                return 0
            self._current = self._current or self._frame()
            try:
                self._content = memoryview(self._current.decompress(self._compressed))
            except self._damaged as error:
                raise EOFError(str(error)) from error
            self._compressed = self._current.unused_data
            if self._current.eof:
                self._current = None
        length = min(len(buffer), len(self._content))
        buffer[:length], self._content = self._content[:length], self._content[length:]
        return length


def _expand(pattern: str, suffixes: Sequence[str]) -> list[str]:
    """The plain files that a path or a glob stands for. A file that is called `a[1].txt` is that file."""
    path = os.path.expanduser(pattern)
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        within = f"{glob.escape(path)}/**/*"
        found = [file for suffix in suffixes for file in _plain_files(f"{within}{suffix}")]
        if not found:
            kinds = " or ".join(suffixes)
            raise path_error(pattern, f"holds no {kinds} file", f"Name its files: {pattern.rstrip('/')}/**/*, say.")
        return found
    if any(mark in path for mark in "*?[") and not os.path.lexists(path):
        found = _plain_files(path)
        if not found:
            fix = f"Relative patterns start at {os.getcwd()}; ** stands for folders of any depth."
            raise path_error(pattern, "matches no file", fix)
        return found
    try:
        os.stat(path)
    except OSError as error:
        fix = f"Relative paths start at {os.getcwd()}."
        raise path_error(pattern, f"cannot be found ({error.strerror})", fix) from error
    raise path_error(pattern, "is not a plain file", "Name a file that can be read more than once.")


def _plain_files(pattern: str) -> list[str]:
    return [file for file in glob.glob(pattern, recursive=True) if os.path.isfile(file)]
