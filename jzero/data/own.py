"""Batches that a caller of the trainer brings along."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice

import grain
import numpy as np

from jzero.config import Config
from jzero.data.pipeline import Batch, Batching, Feed, first_items, stack
from jzero.data.tokenizer import Tokenizer
from jzero.data.windows import Sample
from jzero.errors import ConfigError, DataError

Samples = grain.MapDataset[Sample] | grain.IterDataset[Sample]


@dataclass(frozen=True)
class OwnData:
    """Your own data for `run_training(config, data=OwnData(...))`, in place of what the config's data section names.

    `train` and `validation` are each one of

    - a `grain.MapDataset` of samples: repeated without end, shuffled anew each epoch if you shuffled it; a resumed run
      goes straight to the sample where it stopped;
    - a `grain.IterDataset` of samples: a resumed run reads up to that sample first;
    - a function: called with the number of samples trained on so far, it returns an iterable of batches from there on.

    A sample is a dict of arrays: `tokens`, int32 [data.sequence_length + 1], and if you like `weights`, bool or float32
    [data.sequence_length], which targets the loss counts, and `segments` and `positions`, int32 of the same shape, to
    keep attention within documents. A batch has the same with train.global_batch_size rows in front; of several
    processes each makes its own share of them, in the order of the processes.

    Without `validation` nothing is evaluated. `tokenizer`, such as `read_tokenizer(path)`, gives the vocabulary and
    writes the text at the end; without one, `model.vocab_size` must be set and nothing is written. `fingerprint` is a
    text of your choice that changes with your data: a run refuses to go on with another one.
    """

    train: Samples | Callable[[int], Iterable[Batch]]
    validation: Samples | Callable[[int], Iterable[Batch]] | None = None
    tokenizer: Tokenizer | None = None
    fingerprint: str = "the caller's"

    def batched(self, config: Config, batch_size: int, process_index: int = 0, process_count: int = 1) -> Feed:
        """The batches of a run, or one process's rows of them.

        Raises ConfigError if nothing says how large the vocabulary is.
        """
        size = config.model.vocab_size if self.tokenizer is None else self.tokenizer.vocab_size
        if size is None:
            raise ConfigError(
                "model.vocab_size = null: the data brings no tokenizer along; set model.vocab_size to the number of "
                "token ids, or give OwnData a tokenizer"
            )
        batching = Batching(
            batch_size, process_index, process_count, config.data.num_workers, config.data.prefetch_batches
        )
        marked = config.data.document_attention
        return _Own(self, size, config.data.sequence_length, marked, batching)


@dataclass(frozen=True)
class _Own:
    given: OwnData
    vocab_size: int
    sequence_length: int
    document_attention: bool
    batching: Batching
    description: str = "data of the caller's"
    unigram_loss: None = None

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.given.tokenizer

    @property
    def fingerprint(self) -> str:
        return self.given.fingerprint

    def train_batches(self, start_sample: int, num_steps: int) -> Generator[Batch, None, None]:
        count = 0
        with closing(_batches(self.given.train, self.batching, start_sample, num_steps)) as batches:
            for count, batch in enumerate(batches, 1):
                yield self._checked(batch, f"training batch {count} from sample {start_sample}")
        if count < num_steps:
            raise DataError(
                f"OwnData.train ended after {count} batches from sample {start_sample}, and train.num_steps needs "
                f"{num_steps}: make it go on without end, or lower train.num_steps by {num_steps - count}"
            )

    def validation_batches(self, num_batches: int) -> Generator[Batch, None, None]:
        given, count = self.given.validation, 0
        if given is None:
            return
        if isinstance(given, grain.MapDataset) and len(given) < sys.maxsize:  # no sample twice, if there are enough
            num_batches = min(num_batches, max(len(given) // self.batching.batch_size, 1))
        here = replace(self.batching, num_workers=0)
        with closing(_batches(given, here, 0, num_batches)) as batches:
            for count, batch in enumerate(batches, 1):
                yield self._checked(batch, f"validation batch {count}")
        if count == 0:
            raise DataError(f"OwnData.validation holds no batch of train.global_batch_size={here.batch_size} rows")

    def _checked(self, batch: Batch, name: str) -> Batch:
        rows, width = self.batching.own_rows, self.sequence_length + 1
        tokens = np.asarray(batch["tokens"]) if isinstance(batch, dict) and "tokens" in batch else None
        if tokens is None:
            kind = f"has {', '.join(map(str, batch))}" if isinstance(batch, dict) else f"is a {type(batch).__name__}"
            raise DataError(f"{name} {kind}: it must be a dict with tokens, int32 [{rows}, {width}]")
        if tokens.shape != (rows, width) or tokens.dtype != np.int32:
            raise DataError(
                f"{name} holds tokens {tokens.dtype} {list(tokens.shape)}: train.global_batch_size and "
                f"data.sequence_length want int32 [{rows}, {width}]"
            )
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            wrong = tokens.min() if tokens.min() < 0 else tokens.max()
            raise DataError(f"{name} holds token id {wrong}: the vocabulary has {self.vocab_size:,} ids, from 0 on")
        for key in ("weights", "segments", "positions"):
            if key in batch and np.shape(batch[key]) != (rows, width - 1):
                raise DataError(f"{name} holds {key} {list(np.shape(batch[key]))}: want [{rows}, {width - 1}]")
        if self.document_attention and not {"segments", "positions"} <= batch.keys():
            raise DataError(
                f"{name} has no segments and positions, int32 [{rows}, {width - 1}], which data.document_attention = "
                "true asks for; add them, or set it to false"
            )
        return batch


def _batches(
    given: Samples | Callable[[int], Iterable[Batch]], batching: Batching, start_sample: int, num_batches: int
) -> Generator[Batch, None, None]:
    if isinstance(given, grain.MapDataset):
        endless = given if len(given) >= sys.maxsize or not len(given) else given.repeat()
        return batching.batches(endless, start_sample=start_sample, num_batches=num_batches)
    if isinstance(given, grain.IterDataset):
        return _stacked(iter(given), batching, start_sample, num_batches)
    return first_items(iter(given(start_sample)), num_batches)


def _stacked(
    samples: Iterator[Sample], batching: Batching, start_sample: int, num_batches: int
) -> Generator[Batch, None, None]:
    size, first = batching.batch_size, batching.process_index * batching.own_rows
    with closing(first_items(samples, start_sample + num_batches * size)) as samples:
        rows = islice(samples, start_sample, None)
        while len(block := list(islice(rows, size))) == size:
            yield stack(block[first : first + batching.own_rows])
