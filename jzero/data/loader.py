"""Config to data: the training and validation batches of one process."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

from jzero.config import DataConfig
from jzero.data import cache
from jzero.data.corpus import Corpus, make_corpus
from jzero.data.pipeline import Batch, Batching, Windows
from jzero.data.sources import Source, make_source
from jzero.data.tokenizer import ByteTokenizer, make_tokenizer
from jzero.errors import DataError

# Validation windows are shuffled, alike for every train.seed, so that a few batches are a fair sample.
_VALIDATION_SEED = 0


@dataclass(frozen=True)
class Data:
    """Batches of token windows, and what is known about the corpus before training.

    `description` is one line for people; `fingerprint` changes with the tokens, the split or the windows, so
    that processes and resumed runs can compare theirs. `unigram_loss` (nats per token) is the cross-entropy
    on the validation tokens of the training tokens' frequencies: a model that has learned is below it.
    """

    tokenizer: ByteTokenizer
    description: str
    fingerprint: str
    unigram_loss: float
    train: Windows
    validation: Windows
    seed: int
    batching: Batching

    @property
    def num_train_windows(self) -> int:
        return len(self.train)

    @property
    def num_validation_windows(self) -> int:
        return len(self.validation)

    def train_batches(self, start_sample: int, num_steps: int) -> Generator[Batch, None, None]:
        """`num_steps` batches from global sample `start_sample` (0-based, endless) on.

        Each is {"tokens": int32 [rows of this process, sequence_length + 1]}, and may straddle two epochs. A
        seed and a sample always mean the same window, whatever the batch size, the number of processes and
        workers, and where a run was resumed (see `Batching.batches`). `close()` it to leave early.
        """
        return self.batching.batches(self.train, seed=self.seed, start_sample=start_sample, num_batches=num_steps)

    def validation_batches(self, num_batches: int) -> Generator[Batch, None, None]:
        """At most `num_batches` batches of validation windows, in one order for ever, no window twice.

        With fewer windows than a batch has rows there is one batch, filled up by going through them again.
        """
        available = max(len(self.validation) // self.batching.batch_size, 1)
        # Starting worker processes takes longer than an evaluation reads.
        return replace(self.batching, num_workers=0).batches(
            self.validation, seed=_VALIDATION_SEED, start_sample=0, num_batches=min(num_batches, available)
        )


def make_data(data: DataConfig, *, seed: int, batch_size: int, process_index: int = 0, process_count: int = 1) -> Data:
    """The data that `data` describes, for one of `process_count` processes sharing `batch_size` rows a batch.

    Tokens are read from the cache or, the first time, written to it. Every process reads the whole corpus, so
    what is wrong with it is wrong on all of them. Raises DataError if a source cannot be read, the cache
    cannot be written, a split has too few windows, or the batch does not divide over the processes.
    """
    if batch_size % process_count:
        raise DataError(
            f"train.global_batch_size={batch_size} rows do not divide over {process_count} processes. "
            f"Use a multiple of {process_count}."
        )
    source, tokenizer = make_source(data), make_tokenizer(data.tokenizer)
    corpus = make_corpus(source, tokenizer, data.validation_fraction, cache.cache_directory(data.cache_dir))
    train = Windows(corpus.train, data.sequence_length)
    validation = Windows(corpus.validation, data.sequence_length)
    _check_windows(data, source, train, validation, batch_size)
    return Data(
        tokenizer=tokenizer,
        description=_describe(source, corpus, train, validation),
        fingerprint=cache.digest([corpus.train.checksum, corpus.validation.checksum, data.sequence_length]),
        unigram_loss=corpus.unigram_loss,
        train=train,
        validation=validation,
        seed=seed,
        batching=Batching(batch_size, process_index, process_count, data.num_workers, data.prefetch_batches),
    )


def _check_windows(data: DataConfig, source: Source, train: Windows, validation: Windows, batch_size: int) -> None:
    where = f"data.source={data.source} ({source.name})"
    size = f"{data.sequence_length} + 1"
    if len(train) < batch_size:
        raise DataError(
            f"{where}: {train.file.num_tokens:,} training tokens make {len(train)} windows of {size}; "
            f"train.global_batch_size={batch_size} needs {batch_size}. Give more text, or lower "
            "data.sequence_length, data.validation_fraction or train.global_batch_size."
        )
    if not len(validation):
        raise DataError(
            f"{where}: {validation.file.num_tokens:,} validation tokens make 0 windows of {size}; 1 is "
            f"needed. Give more text, raise data.validation_fraction={data.validation_fraction}, or lower "
            "data.sequence_length."
        )


def _describe(source: Source, corpus: Corpus, train: Windows, validation: Windows) -> str:
    total = corpus.train.num_tokens + corpus.validation.num_tokens
    held_out = corpus.num_validation_documents
    return (
        f"{source.name}: {total:,} tokens in {_documents(corpus.num_documents)}. "
        f"Windows of {train.sequence_length} + 1: {len(train):,} train, {len(validation):,} validate "
        f"({_documents(held_out) if held_out else 'the tail of the text'}); "
        f"{train.num_left_over:,} and {validation.num_left_over:,} tokens left over"
    )


def _documents(number: int) -> str:
    return f"{number:,} document{'s' * (number != 1)}"
