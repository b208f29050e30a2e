"""Where text comes from: the standard library, files, or a Markov chain; read a piece at a time."""

from __future__ import annotations

import codecs
import functools
import glob
import os
import platform
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jzero.config import DataConfig
from jzero.errors import DataError

_CHUNK_BYTES = 1 << 22

# Tests, tables and generated text: much of it repeats, and some of it is broken on purpose.
_STDLIB_SKIPPED = frozenset(
    ("__pycache__", "site-packages", "dist-packages", "test", "tests")
    + ("idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data")
)
_STDLIB_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")

_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

# One chain for every train.seed: as with files, a seed changes the order of the data and not the data.
_SYNTHETIC_SEED = 0
_SYNTHETIC_SYMBOLS = b"abcdefghijklmnopqrstuvwxyz0123456789 \n.,;:()[]=+-*/"
_SYNTHETIC_DOCUMENT_TOKENS = 1024


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order, each read as an iterator of its pieces of text.

    `name` is for messages; `identity` is JSON that changes whenever the text may have changed.
    """

    name: str
    identity: list
    documents: Callable[[], Iterator[Iterator[str]]]


def make_source(data: DataConfig) -> Source:
    """The source that `data.source` names. Files are found and described here, and read by `documents()`.

    Raises DataError for a path that is missing, not a plain file, unreadable, not UTF-8 or empty, and for a
    pattern that matches no file.
    """
    match data.source:
        case "stdlib":
            return _stdlib()
        case "text":
            return _text(data.paths)
        case "synthetic":
            return _synthetic(data.synthetic_tokens)


# --- the standard library ---


def _stdlib() -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(_stdlib_files(root), key=lambda file: file.relative_to(root).as_posix())
    if not files:
        raise DataError(
            f"data.source=stdlib: no .py files under {root} (a zipped or frozen Python?). "
            "Use data.source=text with data.paths, or data.source=synthetic."
        )
    return Source(
        name=f"standard library of Python {platform.python_version()}",
        identity=["stdlib", _describe(files)],
        documents=lambda: map(_read_python, files),
    )


def _stdlib_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not _skipped(name)]
        for name in names:
            file = Path(folder, name)
            if name.endswith(".py") and not _skipped(name) and file.is_file() and file.stat().st_size:
                yield file


def _skipped(name: str) -> bool:
    return name in _STDLIB_SKIPPED or name.startswith(_STDLIB_SKIPPED_PREFIXES)


def _read_python(file: Path) -> Iterator[str]:
    try:
        with tokenize.open(file) as lines:  # reads the coding cookie of PEP 263
            yield lines.read()
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.source=stdlib: cannot read {file}: {error}. Mend this Python, or use data.source=text."
        ) from error


# --- text files ---


def _text(patterns: tuple[str, ...]) -> Source:
    files = sorted({Path(os.path.abspath(file)) for pattern in patterns for file in _expand(pattern)})
    more = f" and {len(files) - 1} more files" if len(files) > 1 else ""
    return Source(
        name=f"{files[0]}{more}",
        identity=["text", _describe(files)],
        documents=lambda: map(_read_utf8, files),
    )


def _expand(pattern: str) -> list[str]:
    """The plain files that a path or a glob stands for. A file that is called `a[1].txt` is that file."""
    path = os.path.expanduser(pattern)
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        raise _path_error(pattern, "is a directory", f"Name its files: {pattern.rstrip('/')}/**/*.txt, say.")
    if any(mark in path for mark in "*?[") and not os.path.lexists(path):
        found = [file for file in glob.glob(path, recursive=True) if os.path.isfile(file)]
        if not found:
            fix = f"Relative patterns start at {os.getcwd()}; ** stands for folders of any depth."
            raise _path_error(pattern, "matches no file", fix)
        return found
    try:
        os.stat(path)
    except OSError as error:
        fix = f"Relative paths start at {os.getcwd()}."
        raise _path_error(pattern, f"cannot be found ({error.strerror})", fix) from error
    raise _path_error(pattern, "is not a plain file", "Name a file that can be read more than once.")


def _read_utf8(file: Path) -> Iterator[str]:
    """The text of `file` in pieces of at most 4 MiB; its memory does not grow with the file."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, line, empty = 0, 1, True
    try:
        with open(file, "rb") as stream:
            if stream.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
                offset = len(codecs.BOM_UTF8)
            stream.seek(offset)
            final = False
            while not final:
                chunk = stream.read(_CHUNK_BYTES)
                final = not chunk
                pending = len(decoder.getstate()[0])  # the start of a character that the last chunk cut
                try:
                    piece = decoder.decode(chunk, final)
                except UnicodeDecodeError as error:
                    raise _encoding_error(file, error, offset - pending, line) from None
                offset += len(chunk)
                line += piece.count("\n")
                if piece:
                    empty = False
                    yield piece
    except OSError as error:
        fix = "Make it readable or leave it out."
        raise _path_error(str(file), f"cannot be read ({error.strerror})", fix) from error
    if empty:
        raise _path_error(str(file), "is empty", "Give it text or leave it out.")


def _encoding_error(file: Path, error: UnicodeDecodeError, base: int, line: int) -> DataError:
    """`error` counts bytes from `base` in the file, where `line` begins or is under way."""
    at = base + error.start
    line += error.object[: error.start].count(b"\n")
    encoding = "LATIN1"
    if at == 0 and error.object.startswith(_UTF16_MARKS):
        encoding = "UTF-16"
    byte = error.object[error.start]
    what = f"is not UTF-8: byte 0x{byte:02x} at line {line}, byte offset {at} ({error.reason})"
    fix = f"Convert it, for instance: iconv -f {encoding} -t UTF-8 {file} > {file}.utf8"
    return _path_error(str(file), what, fix)


def _path_error(path: str, what: str, fix: str) -> DataError:
    return DataError(f"data.paths: {path} {what}. {fix}")


def _describe(files: list[Path]) -> list:
    stats = [(file, file.stat()) for file in files]
    return [[str(file), stat.st_size, stat.st_mtime_ns] for file, stat in stats]


# --- synthetic text ---


def _synthetic(num_tokens: int) -> Source:
    """`num_tokens` tokens in documents of 1024, each token counting its document's end.

    A character depends on the one before it: a model that learns which follows which gets well under the
    unigram loss.
    """
    starts = range(0, num_tokens, _SYNTHETIC_DOCUMENT_TOKENS)
    lengths = [min(_SYNTHETIC_DOCUMENT_TOKENS, num_tokens - start) - 1 for start in starts]
    rows = functools.cache(lambda: _markov_chains(len(lengths), max(lengths)))
    return Source(
        name=f"synthetic text of {num_tokens:,} tokens",
        identity=["synthetic", num_tokens, _SYNTHETIC_SEED],
        documents=lambda: (
            iter([row[:length].tobytes().decode("ascii")]) for row, length in zip(rows(), lengths, strict=True)
        ),
    )


def _markov_chains(num_chains: int, length: int) -> np.ndarray:
    """uint8 [num_chains, length]: walks over one random transition table, advanced together."""
    symbols = np.frombuffer(_SYNTHETIC_SYMBOLS, np.uint8)
    # Only `random` is drawn: its stream is the one numpy has never changed.
    rng = np.random.default_rng(_SYNTHETIC_SEED)
    weights = rng.random((len(symbols), len(symbols))) ** 16
    cumulative = np.cumsum(weights / weights.sum(axis=1, keepdims=True), axis=1)[:, :-1]
    state = (rng.random(num_chains) * len(symbols)).astype(np.intp)
    chains = np.empty((num_chains, length), np.uint8)
    for position in range(length):
        chains[:, position] = symbols[state]
        state = (cumulative[state] < rng.random((num_chains, 1))).sum(axis=1)
    return chains
