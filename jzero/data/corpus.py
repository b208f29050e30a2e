"""Documents to two token streams, training and validation, kept in the cache."""

from __future__ import annotations

import hashlib
import tempfile
import warnings
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jzero.data import cache
from jzero.data.cache import ArrayFile
from jzero.data.documents import Source
from jzero.data.encode import encode
from jzero.data.tokenizer import Tokenizer
from jzero.errors import DataError

# Counts up whenever the same input would give other files.
_FORMAT = 2
_SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Stream:
    """Documents end to end.

    `tokens` is [number of tokens]; `documents` is int64 [2, number of documents]: where each starts, and the first
    of its tokens that the loss counts. `num_counted` is the number of counted tokens.
    """

    tokens: ArrayFile
    documents: ArrayFile
    num_counted: int


@dataclass(frozen=True)
class Corpus:
    """Two streams that share no token.

    `num_validation_documents` counts the whole documents set aside; 0 says that the stream's tail was cut off
    instead. `num_skipped` counts what could not be read and was left out, `first_skipped` is said of the first.
    `unigram_loss` is in nats per counted token.
    """

    train: Stream
    validation: Stream
    num_documents: int
    num_validation_documents: int
    num_skipped: int
    first_skipped: str
    unigram_loss: float


def make_corpus(
    source: Source, tokenizer: Tokenizer, *, validation_fraction: float, skip: bool, directory: Path
) -> Corpus:
    """The tokens of `source`: from `directory` if it holds them intact, else tokenised now and put there.

    With `skip`, documents that cannot be read are left out and counted.

    Raises DataError if the source cannot be read or `directory` cannot be written.
    """
    stem = directory / cache.digest([_FORMAT, source.identity, tokenizer.name, validation_fraction, skip])
    try:
        return _load(stem)
    except cache.DamagedError as error:
        warnings.warn(f"the token cache {directory} is damaged and is written anew: {error}", stacklevel=3)
    except OSError:
        pass  # Not there; or not readable, and then writing says why.
    try:
        directory.mkdir(parents=True, exist_ok=True)
        corpus = _build(source, tokenizer, validation_fraction, skip, stem)
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
    hashes = (int.from_bytes(hashlib.sha256(b"%d" % i).digest()[:8]) for i in range(len(lengths)))
    order = np.argsort(np.fromiter(hashes, np.uint64, len(lengths)), kind="stable")
    for index in order:
        if taken + lengths[index] <= target:
            chosen[index] = True
            taken += lengths[index]
    return chosen & (taken >= target / 2)


def unigram_loss(train: np.ndarray, validation: np.ndarray) -> float:
    """Cross-entropy, in nats per token, of the validation tokens under the training tokens' frequencies.

    Each id counts once more than it occurs (add-one smoothing). Both arrays are how often each id occurs, int
    [vocabulary]; without validation tokens the loss is 0.
    """
    log_probability = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(validation * log_probability).sum() / max(validation.sum(), 1))


def _load(stem: Path) -> Corpus:
    record = cache.read_record(stem.with_name(f"{stem.name}.json"))
    for split in _SPLITS:
        files = {name: _array_file(stem, split, name, record[split][name]) for name in ("tokens", "documents")}
        for file in files.values():
            file.check()
        record[split] = Stream(**files, num_counted=record[split]["num_counted"])
    return Corpus(**record)


def _array_file(stem: Path, split: str, name: str, record: dict[str, Any]) -> ArrayFile:
    return ArrayFile(_array_path(stem, split, name), tuple(record["shape"]), record["dtype"], record["checksum"])


def _save(corpus: Corpus, stem: Path) -> None:
    record = asdict(corpus)
    for split in _SPLITS:
        for name in ("tokens", "documents"):
            del record[split][name]["path"]  # the directory may be moved
    cache.write_record(stem.with_name(f"{stem.name}.json"), record)


def _array_path(stem: Path, split: str, name: str) -> Path:
    return stem.with_name(f"{stem.name}-{split}-{name}.npy")


def _build(source: Source, tokenizer: Tokenizer, validation_fraction: float, skip: bool, stem: Path) -> Corpus:
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    with tempfile.TemporaryFile(dir=stem.parent) as file:
        documents, faults = _tokenise(source, tokenizer, dtype, skip, file)
        chosen = choose_validation(documents.lengths, validation_fraction)
        packed = np.memmap(file, dtype, mode="r")
        parts = _split(documents, chosen, validation_fraction)
        streams, occurrences = zip(
            *(
                _write(stem, split, packed, part, tokenizer.vocab_size)
                for split, part in zip(_SPLITS, parts, strict=True)
            ),
            strict=True,
        )
    return Corpus(
        *streams,
        num_documents=len(documents.lengths),
        num_validation_documents=int(chosen.sum()),
        num_skipped=faults.number,
        first_skipped=faults.first,
        unigram_loss=unigram_loss(*occurrences),
    )


@dataclass(frozen=True)
class _Documents:
    """Stretches of the packed file, int64 [number of documents] each: where they start, their length, and how many
    of their first tokens the loss does not count."""

    starts: np.ndarray
    lengths: np.ndarray
    uncounted: np.ndarray


@dataclass
class _Faults:
    number: int = 0
    first: str = ""


def _tokenise(
    source: Source, tokenizer: Tokenizer, dtype: np.dtype, skip: bool, file: BinaryIO
) -> tuple[_Documents, _Faults]:
    """Appends every document to `file`, or none of it."""
    lengths, uncounted, faults, end = array("q"), array("q"), _Faults(), 0
    for document in encode(source.documents(), tokenizer):
        length = prompt = 0
        try:
            for ids, counted in document:
                file.write(np.ascontiguousarray(ids, dtype).data)
                length += len(ids)
                prompt += 0 if counted else len(ids)
        except DataError as error:
            if not skip:
                raise
            file.seek(end * dtype.itemsize)
            file.truncate()
            faults.number += 1
            faults.first = faults.first or str(error)
            continue
        end += length
        lengths.append(length)
        uncounted.append(prompt)
    file.flush()
    if end == 0:
        raise DataError(
            f"{source.name}: none of {faults.number} documents could be read. {faults.first}"
            if faults.number
            else f"{source.name}: holds no document"
        )
    sizes = np.frombuffer(lengths, np.int64)
    return _Documents(np.cumsum(sizes) - sizes, sizes, np.frombuffer(uncounted, np.int64)), faults


def _split(documents: _Documents, chosen: np.ndarray, validation_fraction: float) -> tuple[_Documents, _Documents]:
    """The documents that train and those that validate: whole ones, or the stream before a cut and behind it."""
    if chosen.any():
        train, validation = (
            _Documents(documents.starts[rows], documents.lengths[rows], documents.uncounted[rows])
            for rows in (~chosen, chosen)
        )
        return train, validation
    total = int(documents.lengths.sum())
    cut = total - round(validation_fraction * total)
    return _between(documents, 0, cut), _between(documents, cut, total)


def _between(documents: _Documents, start: int, stop: int) -> _Documents:
    starts = np.maximum(documents.starts, start)
    stops = np.minimum(documents.starts + documents.lengths, stop)
    counted_from = np.clip(documents.starts + documents.uncounted, starts, np.maximum(starts, stops))
    rows = starts < stops
    return _Documents(starts[rows], (stops - starts)[rows], (counted_from - starts)[rows])


def _write(
    stem: Path, split: str, packed: np.ndarray, documents: _Documents, vocab_size: int
) -> tuple[Stream, np.ndarray]:
    """The files of a split, and how often each id occurs among the counted tokens, int64 [vocab_size]."""
    occurrences = np.zeros(vocab_size, np.int64)

    def pieces() -> Iterator[np.ndarray]:
        ends = documents.starts + documents.lengths
        for start, counted, end in zip(documents.starts, documents.starts + documents.uncounted, ends, strict=True):
            for block in cache.blocks(packed[counted:end]):
                np.add.at(occurrences, block, 1)
            yield packed[start:end]

    num_tokens = int(documents.lengths.sum())
    tokens = cache.write_array(_array_path(stem, split, "tokens"), pieces(), (num_tokens,), packed.dtype)
    starts = np.cumsum(documents.lengths) - documents.lengths
    table = np.stack([starts, starts + documents.uncounted])
    path = _array_path(stem, split, "documents")
    files = tokens, cache.write_array(path, [table.reshape(-1)], table.shape, table.dtype)
    return Stream(*files, num_counted=num_tokens - int(documents.uncounted.sum())), occurrences
