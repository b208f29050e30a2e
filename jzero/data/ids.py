"""Documents that are token ids already: flat .bin files and one-dimensional .npy files, memory-mapped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jzero.config import MixtureConfig
from jzero.data.documents import Document, Piece, Source, failing
from jzero.data.paths import describe_files, empty_error, find_files, name_files, path_error
from jzero.errors import DataError

SUFFIXES = (".bin", ".npy")
_BLOCK_TOKENS = 1 << 20


def token_files(config: MixtureConfig, vocab_size: int, end: int | None) -> Source:
    """The ids of .bin files, of data.dtype in this machine's byte order, and of .npy files, of their own.

    A document ends with the id `end`, or where its file does; None: only where its file does.
    """
    files = find_files(config.paths, SUFFIXES)
    return Source(
        name=name_files(files),
        identity=["tokens", vocab_size, end, config.dtype, describe_files(files)],
        documents=lambda: (document for file in files for document in _read(file, config.dtype, vocab_size, end)),
    )


def _read(file: Path, dtype: str, vocab_size: int, end: int | None) -> Iterator[Document]:
    try:
        tokens, header = _map_npy(file) if file.suffix == ".npy" else _map_flat(file, dtype)
    except DataError as error:
        yield failing(error)
        return
    start = 0
    for stop in _stops(tokens, end):
        yield _pieces(file, tokens, start, stop, vocab_size, header)
        start = stop


def _stops(tokens: np.ndarray, end: int | None) -> Iterator[int]:
    stop = 0
    if end is not None:
        for start in range(0, len(tokens), _BLOCK_TOKENS):
            for index in np.flatnonzero(tokens[start : start + _BLOCK_TOKENS] == end).tolist():
                stop = start + index + 1
                yield stop
    if stop < len(tokens):
        yield len(tokens)


def _pieces(file: Path, tokens: np.ndarray, start: int, stop: int, vocab_size: int, header: int) -> Document:
    for first in range(start, stop, _BLOCK_TOKENS):
        ids = tokens[first : min(first + _BLOCK_TOKENS, stop)]
        if int(ids.max()) >= vocab_size or int(ids.min()) < 0:
            index = first + int(np.argmax((ids < 0) | (ids >= vocab_size)))
            what = f"holds id {tokens[index]} at token {index}, byte offset {header + index * tokens.itemsize}"
            fix = (
                f"The vocabulary has {vocab_size:,} ids, from 0 on: set data.tokenizer to the one that made the file, "
                "or data.tokenizer: null and model.vocab_size; or is data.dtype wrong?"
            )
            raise path_error(file, what, fix)
        yield Piece(ids)


def _map_flat(file: Path, dtype: str) -> tuple[np.ndarray, int]:
    """The tokens of a file without header, and 0."""
    size, width = file.stat().st_size, np.dtype(dtype).itemsize
    if size == 0:
        raise empty_error(file)
    if size % width:
        what = f"has {size} bytes, which is no whole number of {dtype} tokens"
        raise path_error(file, what, "Set data.dtype to the dtype it was written with, or bring the whole file.")
    try:
        return np.asarray(np.memmap(file, dtype, mode="r")), 0
    except OSError as error:
        raise path_error(file, f"cannot be read ({error.strerror})", "Make it readable or leave it out.") from error


def _map_npy(file: Path) -> tuple[np.ndarray, int]:
    """The tokens of an .npy file, and the byte where they begin."""
    try:
        tokens = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise path_error(
            file, f"is no .npy file, or is cut short ({error})", "Save it anew with numpy.save."
        ) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        what = f"holds {tokens.dtype} {list(tokens.shape)}"
        raise path_error(file, what, "Token ids are integers in one dimension, documents end to end.")
    if not len(tokens):
        raise empty_error(file)
    return np.asarray(tokens), tokens.offset
