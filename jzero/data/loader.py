"""Config to data: the training and validation batches of one process."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from jzero.config import DataConfig, MixtureConfig
from jzero.data import cache
from jzero.data.corpus import Corpus, Stream, make_corpus
from jzero.data.documents import Source
from jzero.data.pipeline import Batch, Batching, shuffled
from jzero.data.sources import make_source
from jzero.data.tokenizer import Tokenizer, make_tokenizer
from jzero.data.windows import MixingOrder, Windows
from jzero.errors import DataError

# Validation windows are shuffled, alike for every train.seed, so that a few batches are a fair sample.
_VALIDATION_SEED = 0


@dataclass(frozen=True)
class Data:
    """Batches of token windows, and what is known about the corpus before training.

    `train` and `validation` hold the windows of each part of a mixture, of which there is one where nothing is mixed;
    `weights` are the parts' weights. `description` is for people, a line a part; `fingerprint` changes with the
    tokens, the split, the windows and their order, so that processes and resumed runs can compare theirs.
    `unigram_loss` (nats per counted token) is the cross-entropy on the validation tokens of the training tokens'
    frequencies, in a mixture the mean over its parts: a model that has learned is below it.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    description: str
    fingerprint: str
    unigram_loss: float
    train: Sequence[Windows]
    validation: Sequence[Windows]
    weights: Sequence[float]
    seed: int
    batching: Batching

    @property
    def num_train_windows(self) -> int:
        return sum(map(len, self.train))

    @property
    def num_validation_windows(self) -> int:
        return sum(map(len, self.validation))

    def train_batches(self, start_sample: int, num_steps: int) -> Generator[Batch, None, None]:
        """`num_steps` batches from global sample `start_sample` (0-based, endless) on.

        Each holds `tokens`, int32 [rows of this process, sequence_length + 1], and what else `Windows` says, and may
        straddle two epochs. A seed and a sample always mean the same window, whatever the batch size, the number of
        processes and workers, and where a run was resumed. `close()` it to leave early.
        """
        samples = shuffled(self.train, self.weights, self.seed)
        return self.batching.batches(samples, start_sample=start_sample, num_batches=num_steps)

    def validation_batches(self, num_batches: int) -> Generator[Batch, None, None]:
        """At most `num_batches` batches of validation windows, in one order for ever, no window twice.

        With fewer windows than a batch has rows there is one batch, filled up by going through them again.
        """
        available = max(self._num_before_repeating() // self.batching.batch_size, 1)
        samples = shuffled(self.validation, self.weights, _VALIDATION_SEED)
        # Starting worker processes takes longer than an evaluation reads.
        return replace(self.batching, num_workers=0).batches(
            samples, start_sample=0, num_batches=min(num_batches, available)
        )

    def _num_before_repeating(self) -> int:
        """The validation samples until a part has shown all its windows."""
        order = MixingOrder(tuple(self.weights), _VALIDATION_SEED)
        lengths = list(map(len, self.validation))

        def repeats(num_samples: int) -> bool:
            return any(count > length for count, length in zip(order.count(num_samples), lengths, strict=True))

        return bisect_left(range(sum(lengths) + 1), True, key=repeats) - 1


@dataclass(frozen=True)
class _Part:
    """A source of a mixture on its way to batches. `name` is of its config section, for messages."""

    name: str
    config: MixtureConfig
    source: Source
    corpus: Corpus


def make_data(
    data: DataConfig,
    *,
    seed: int,
    batch_size: int,
    vocab_size: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Data:
    """The data that `data` describes, for one of `process_count` processes sharing `batch_size` rows a batch.

    `vocab_size` is how many token ids there are where `data.tokenizer` is None, and otherwise not looked at.

    Tokens are read from the cache or, the first time, written to it. Every process reads the whole corpus, so
    what is wrong with it is wrong on all of them. Raises DataError if a source or the tokenizer cannot be read, the
    cache cannot be written, a split has too few windows, or the batch does not divide over the processes.
    """
    if batch_size % process_count:
        raise DataError(
            f"train.global_batch_size={batch_size} rows do not divide over {process_count} processes. "
            f"Use a multiple of {process_count}."
        )
    tokenizer = make_tokenizer(data, vocab_size)
    parts = [_make_part(data, index, tokenizer) for index in range(len(data.sources))]
    streams = [stream for part in parts for stream in (part.corpus.train, part.corpus.validation)]
    weighted = any(stream.num_counted < stream.tokens.shape[0] for stream in streams)  # then all are: batches are alike

    def windows(stream: Stream) -> Windows:
        return Windows(stream, data.sequence_length, weighted=weighted, within_documents=data.document_attention)

    train = [windows(part.corpus.train) for part in parts]
    validation = [windows(part.corpus.validation) for part in parts]
    weights = [part.config.weight for part in parts]
    for index, part in enumerate(parts):
        rows = max(MixingOrder(tuple(weights), seed).count(batch_size)[index], 1)
        _check_part(data, part, train[index], validation[index], rows, batch_size)
    shares = [f"{weight / sum(weights):.1%} " if len(parts) > 1 else "" for weight in weights]
    lines = [s + _describe(part, *windows) for s, part, *windows in zip(shares, parts, train, validation, strict=True)]
    return Data(
        tokenizer=None if data.tokenizer is None else tokenizer,
        vocab_size=tokenizer.vocab_size,
        description="\n".join(lines),
        fingerprint=_fingerprint(data, tokenizer, streams),
        unigram_loss=_mean_unigram_loss(parts),
        train=train,
        validation=validation,
        weights=weights,
        seed=seed,
        batching=Batching(batch_size, process_index, process_count, data.num_workers, data.prefetch_batches),
    )


def _make_part(data: DataConfig, index: int, tokenizer: Tokenizer) -> _Part:
    config = data.sources[index]
    source = make_source(config, tokenizer)
    corpus = make_corpus(
        source,
        tokenizer,
        validation_fraction=data.validation_fraction,
        skip=data.on_error == "skip",
        directory=cache.cache_directory(data.cache_dir),
    )
    return _Part(f"data.mixture[{index}]" if data.source == "mixture" else "data", config, source, corpus)


def _fingerprint(data: DataConfig, tokenizer: Tokenizer, streams: Sequence[Stream]) -> str:
    checksums = [[stream.tokens.checksum, stream.documents.checksum] for stream in streams]
    weights = [part.weight for part in data.sources]
    return cache.digest([tokenizer.name, checksums, data.sequence_length, data.document_attention, weights])


def _mean_unigram_loss(parts: Sequence[_Part]) -> float:
    """By the share that a part's counted tokens have in a mixture's windows."""
    validation = [part.corpus.validation for part in parts]
    shares = [
        part.config.weight * stream.num_counted / stream.tokens.shape[0]
        for part, stream in zip(parts, validation, strict=True)
    ]
    total = sum(share * part.corpus.unigram_loss for share, part in zip(shares, parts, strict=True))
    return total / sum(shares)


def _check_part(data: DataConfig, part: _Part, train: Windows, validation: Windows, rows: int, batch_size: int) -> None:
    """`rows`: how many windows of this part a batch takes."""
    where = f"{part.name}.source={part.config.source} ({part.source.name})"
    size = f"{data.sequence_length} + 1"
    if len(train) < rows:
        raise DataError(
            f"{where}: {train.num_tokens:,} training tokens make {len(train)} windows of {size}; "
            f"train.global_batch_size={batch_size} needs {rows}. Give more text, or lower "
            "data.sequence_length, data.validation_fraction or train.global_batch_size."
        )
    if not len(validation):
        raise DataError(
            f"{where}: {validation.num_tokens:,} validation tokens make 0 windows of {size}; 1 is "
            f"needed. Give more text, raise data.validation_fraction={data.validation_fraction}, or lower "
            "data.sequence_length."
        )
    for kind, windows in (("training", train), ("validation", validation)):
        if windows.stream.num_counted == 0:
            raise DataError(
                f"{where}: the loss counts none of {windows.num_tokens:,} {kind} tokens, they are all of prompts. Give "
                "more text, or change data.validation_fraction."
            )


def _describe(part: _Part, train: Windows, validation: Windows) -> str:
    corpus = part.corpus
    held_out = corpus.num_validation_documents
    counted = corpus.train.num_counted + corpus.validation.num_counted
    total = train.num_tokens + validation.num_tokens
    described = (
        f"{part.source.name}: {total:,} tokens in {_documents(corpus.num_documents)}. "
        f"Windows of {train.sequence_length} + 1: {len(train):,} train, {len(validation):,} validate "
        f"({_documents(held_out) if held_out else 'the tail of the text'}); "
        f"{train.num_left_over:,} and {validation.num_left_over:,} tokens left over"
    )
    if counted < total:
        described += f"; the loss counts {counted:,} tokens"
    if corpus.num_skipped:
        described += f"; {corpus.num_skipped:,} skipped (data.on_error=skip), the first: {corpus.first_skipped}"
    return described


def _documents(number: int) -> str:
    return f"{number:,} document{'s' * (number != 1)}"
