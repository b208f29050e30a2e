"""The sources of documents: the standard library, text files, a Markov chain, and those of the modules before."""

from __future__ import annotations

import codecs
import functools
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jzero.config import MixtureConfig
from jzero.data.documents import Document, Piece, Source
from jzero.data.ids import token_files
from jzero.data.paths import CHUNK_BYTES, describe_files, empty_error, encoding_error, find_files, name_files, opened
from jzero.data.rows import jsonl, tables
from jzero.data.tokenizer import Tokenizer
from jzero.errors import DataError

_TEXT_SUFFIXES = (".txt", ".md", ".txt.gz", ".txt.zst")

# Tests, tables and generated text: much of it repeats, and some of it is broken on purpose.
_STDLIB_SKIPPED = frozenset(
    ("__pycache__", "site-packages", "dist-packages", "test", "tests")
    + ("idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data")
)
_STDLIB_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")

# One chain for every train.seed: as with files, a seed changes the order of the data and not the data.
_SYNTHETIC_SEED = 0
_SYNTHETIC_SYMBOLS = b"abcdefghijklmnopqrstuvwxyz0123456789 \n.,;:()[]=+-*/"
_SYNTHETIC_DOCUMENT_TOKENS = 1024


def make_source(config: MixtureConfig, tokenizer: Tokenizer) -> Source:
    """The source that `config.source` names. Files are found and described here, and read by `documents()`.

    Token ids must be of the tokenizer's vocabulary and end documents as it does.

    Raises DataError for a path that is missing or not a plain file, and for a folder or a pattern without files.
    """
    match config.source:
        case "stdlib":
            return _stdlib()
        case "text":
            return _text(config.paths)
        case "jsonl":
            return jsonl(config)
        case "datasets":
            return tables(config)
        case "tokens":
            return token_files(config, tokenizer.vocab_size, tokenizer.end_of_document)
        case "synthetic":
            return _synthetic(config.synthetic_tokens)
        case "mixture":
            raise AssertionError("the config refuses a mixture within a mixture")


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
        identity=["stdlib", describe_files(files)],
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


def _read_python(file: Path) -> Document:
    try:
        with tokenize.open(file) as lines:  # reads the coding cookie of PEP 263
            yield Piece(lines.read())
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.source=stdlib: cannot read {file}: {error}. Mend this Python, or use data.source=text."
        ) from error


# --- text files ---


def _text(paths: tuple[str, ...]) -> Source:
    """A document a file."""
    files = find_files(paths, _TEXT_SUFFIXES)
    return Source(
        name=name_files(files),
        identity=["text", describe_files(files)],
        documents=lambda: map(_read_utf8, files),
    )


def _read_utf8(file: Path) -> Document:
    """The text of `file` in pieces of at most 4 MiB; its memory does not grow with the file."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, line, empty, final = 0, 1, True, False
    with opened(file) as stream:
        while not final:
            chunk = stream.read(CHUNK_BYTES)
            if offset == 0 and chunk.startswith(codecs.BOM_UTF8):
                offset, chunk = len(codecs.BOM_UTF8), chunk[len(codecs.BOM_UTF8) :] or stream.read(CHUNK_BYTES)
            final = not chunk
            pending = len(decoder.getstate()[0])  # the start of a character that the last chunk cut
            try:
                piece = decoder.decode(chunk, final)
            except UnicodeDecodeError as error:
                raise encoding_error(file, error, offset - pending, line) from None
            offset += len(chunk)
            line += piece.count("\n")
            if piece:
                empty = False
                yield Piece(piece)
    if empty:
        raise empty_error(file)


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
            iter([Piece(row[:length].tobytes().decode("ascii"))]) for row, length in zip(rows(), lengths, strict=True)
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
