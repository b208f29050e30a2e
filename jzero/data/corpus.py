"""Documents to two token streams, training and validation, kept in the cache."""

from __future__ import annotations

import hashlib
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jzero.data import cache
from jzero.data.cache import TokenFile
from jzero.data.sources import Source
from jzero.data.tokenizer import ByteTokenizer
from jzero.errors import DataError

# Counts up whenever the same input would give other files.
_FORMAT = 1
_SPLITS = ("train", "validation")

Ranges = list[list[int]]


@dataclass(frozen=True)
class Corpus:
    """Two token streams that share no token. In each, the end-of-document id follows every document.

    `num_validation_documents` counts the whole documents set aside; 0 says that the stream's tail was cut off
    instead. `unigram_loss` is in nats per token.
    """

    train: TokenFile
    validation: TokenFile
    num_documents: int
    num_validation_documents: int
    unigram_loss: float


def make_corpus(source: Source, tokenizer: ByteTokenizer, validation_fraction: float, directory: Path) -> Corpus:
    """The tokens of `source`: from `directory` if it holds them intact, else tokenised now and put there.

    Raises DataError if the source cannot be read or `directory` cannot be written.
    """
    stem = directory / cache.digest([_FORMAT, source.identity, tokenizer.name, validation_fraction])
    try:
        return _load(stem)
    except cache.DamagedError as error:
        warnings.warn(f"the token cache {directory} is damaged and is written anew: {error}", stacklevel=3)
    except OSError:
        pass  # Not there; or not readable, and then writing says why.
    try:
        directory.mkdir(parents=True, exist_ok=True)
        corpus = _build(source, tokenizer, validation_fraction, stem)
        _save(corpus, stem)
    except OSError as error:
        raise DataError(
            f"data.cache_dir: cannot keep tokens in {directory} ({error.strerror}). "
            "Set data.cache_dir to a directory that you can write to and that has room."
        ) from error
    return corpus


def choose_validation(lengths: np.ndarray, validation_fraction: float) -> np.ndarray:
    """Which documents validate: bool [number of documents], for `lengths` in tokens, int of the same shape.

    Documents are visited in an order fixed by a hash of their position and set aside while they fit into
    `validation_fraction` of all tokens. If they then make up less than half of it (one document, a few large
    ones), none is: the tail of the stream has to serve.
    """
    target = validation_fraction * lengths.sum()
    chosen, taken = np.zeros(len(lengths), bool), 0
    for index in sorted(range(len(lengths)), key=lambda i: hashlib.sha256(b"%d" % i).digest()):
        if taken + lengths[index] <= target:
            chosen[index] = True
            taken += lengths[index]
    return chosen & (taken >= target / 2)


def split_ranges(lengths: np.ndarray, chosen: np.ndarray, validation_fraction: float) -> tuple[Ranges, Ranges]:
    """The (start, stop) ranges of the packed stream that train, and those that validate."""
    stops = np.cumsum(lengths)
    if chosen.any():
        spans = np.stack([stops - lengths, stops], axis=1)
        return spans[~chosen].tolist(), spans[chosen].tolist()
    total = int(stops[-1])
    cut = total - round(validation_fraction * total)
    return [[0, cut]], [[cut, total]]


def unigram_loss(train: np.ndarray, validation: np.ndarray, vocab_size: int) -> float:
    """Cross-entropy, in nats per token, of the validation tokens under the training tokens' frequencies.

    Each id counts once more than it occurs (add-one smoothing). Both arrays are int [any length]; without
    validation tokens the loss is 0.
    """
    seen, asked = _count(train, vocab_size), _count(validation, vocab_size)
    log_probability = np.log((seen + 1) / (seen.sum() + vocab_size))
    return float(-(asked * log_probability).sum() / max(asked.sum(), 1))


def _count(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, np.int64)
    for block in cache.blocks(tokens):
        counts += np.bincount(block, minlength=vocab_size)
    return counts


def _load(stem: Path) -> Corpus:
    record = cache.read_record(stem.with_name(f"{stem.name}.json"))
    for split in _SPLITS:
        file = TokenFile(_tokens_path(stem, split), **record[split])
        file.check()
        record[split] = file
    return Corpus(**record)


def _save(corpus: Corpus, stem: Path) -> None:
    record = asdict(corpus)
    for split in _SPLITS:
        del record[split]["path"]  # the directory may be moved
    cache.write_record(stem.with_name(f"{stem.name}.json"), record)


def _tokens_path(stem: Path, split: str) -> Path:
    return stem.with_name(f"{stem.name}-{split}.npy")


def _build(source: Source, tokenizer: ByteTokenizer, validation_fraction: float, stem: Path) -> Corpus:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    with tempfile.TemporaryFile(dir=stem.parent) as file:
        lengths = _tokenise(source, tokenizer, dtype, file)
        chosen = choose_validation(lengths, validation_fraction)
        packed = np.memmap(file, dtype, mode="r")
        train, validation = (
            cache.write_tokens(_tokens_path(stem, split), _cut(packed, ranges), _total(ranges), dtype)
            for split, ranges in zip(_SPLITS, split_ranges(lengths, chosen, validation_fraction), strict=True)
        )
    return Corpus(
        train=train,
        validation=validation,
        num_documents=len(lengths),
        num_validation_documents=int(chosen.sum()),
        unigram_loss=unigram_loss(train.open(), validation.open(), tokenizer.vocab_size),
    )


def _tokenise(source: Source, tokenizer: ByteTokenizer, dtype: np.dtype, file: BinaryIO) -> np.ndarray:
    """Appends every document and its end to `file`; returns their lengths in tokens, int64."""
    lengths = []
    end = np.array([tokenizer.end_of_document], dtype).tobytes()
    for document in source.documents():
        length = 1
        # Right for bytes; a tokenizer that merges characters would need the whole document.
        for piece in document:
            ids = tokenizer.encode(piece)
            file.write(ids.astype(dtype).data)
            length += len(ids)
        file.write(end)
        lengths.append(length)
    file.flush()
    return np.array(lengths, np.int64)


def _cut(packed: np.ndarray, ranges: Ranges) -> Iterator[np.ndarray]:
    return (packed[start:stop] for start, stop in ranges)


def _total(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)
