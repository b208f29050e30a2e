"""Samples shuffled, mixed, batched and prefetched by Grain. A position counts samples."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

import absl.flags
import grain
import numpy as np

from jzero.data.tokenizer import Tokenizer
from jzero.data.windows import MixingOrder, Sample, Windows

Batch = dict[str, np.ndarray]
Item = TypeVar("Item")


class Feed(Protocol):
    """What the trainer trains on; `Data` says what is what. `unigram_loss` is None where it is not known."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def description(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def unigram_loss(self) -> float | None: ...

    def train_batches(self, start_sample: int, num_steps: int) -> Generator[Batch, None, None]: ...
    def validation_batches(self, num_batches: int) -> Generator[Batch, None, None]: ...


@dataclass(frozen=True)
class Batching:
    """How samples become the batches of one process.

    Batch b of a run from sample s holds samples s + b * batch_size onwards; process p of P gets rows
    [p * batch_size / P, (p + 1) * batch_size / P) of it. A thread, or each of `num_workers` processes, keeps
    `prefetch_batches` batches ready.
    """

    batch_size: int
    process_index: int
    process_count: int
    num_workers: int
    prefetch_batches: int

    @property
    def own_rows(self) -> int:
        """Rows of a batch that this process holds."""
        return self.batch_size // self.process_count

    def batches(
        self, samples: grain.MapDataset[Sample], *, start_sample: int, num_batches: int
    ) -> Generator[Batch, None, None]:
        """Yields batches of the endless `samples` from `start_sample` on, `num_batches` times.

        Each stacks its samples' arrays: [batch_size / process_count, ...]. Closing the generator ends its threads
        and processes.
        """
        samples = samples[start_sample : start_sample + num_batches * self.batch_size]
        blocks = samples.batch(self.own_rows, batch_fn=stack)
        own = blocks[self.process_index :: self.process_count]
        threads = grain.ReadOptions(
            num_threads=min(self.prefetch_batches, 1), prefetch_buffer_size=self.prefetch_batches
        )
        dataset = own.to_iter_dataset(threads)
        return first_items(iter(self._in_workers(dataset) if self.num_workers else dataset), num_batches)

    def _in_workers(self, dataset: grain.IterDataset[Batch]) -> grain.IterDataset[Batch]:
        # Grain 0.2.18 reads this flag before absl has parsed any, and fails (google/grain#1355).
        # Marked as given, it keeps its default: off.
        flag = "grain_enable_multiprocess_worker_profiling"
        if flag in absl.flags.FLAGS:
            absl.flags.FLAGS[flag].present = True
        # Token batches are small: a pipe carries them, where shared memory would have to be handed back.
        through_pipe = grain.experimental.DatasetOptions(min_shm_size=sys.maxsize)
        workers = grain.MultiprocessingOptions(
            num_workers=self.num_workers, per_worker_buffer_size=max(self.prefetch_batches, 1)
        )
        return grain.experimental.WithOptionsIterDataset(dataset, through_pipe).mp_prefetch(workers)


def first_items(iterator: Iterator[Item], limit: int) -> Generator[Item, None, None]:
    """The first `limit` items; closed, it ends what the iterator has running, if that can be ended."""
    try:
        yield from islice(iterator, limit)
    finally:
        if close := getattr(iterator, "close", None):
            close()


def stack(samples: Sequence[Sample]) -> Batch:
    """Each array of the samples under its name, [number of samples, ...]."""
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def shuffled(parts: Sequence[Windows], weights: Sequence[float], seed: int) -> grain.MapDataset[Sample]:
    """The parts' windows without end, taking turns by weight (see `MixingOrder`).

    Sample i of a part is its window permutation_e[i mod n] of n, where e = i // n. The permutation depends on the
    part's number, `seed` and e only.
    """
    # Grain shuffles epoch e with seed + e: neighbouring seeds would run through each other's epochs.
    seeds = np.random.SeedSequence(seed).generate_state(len(parts))
    datasets = [
        grain.MapDataset.source(windows).shuffle(seed=int(own)).repeat()
        for windows, own in zip(parts, seeds, strict=True)
    ]
    return grain.MapDataset.source(_Mixed(datasets, MixingOrder(tuple(weights), seed)))


@dataclass(frozen=True)
class _Mixed:
    parts: Sequence[grain.MapDataset[Sample]]
    order: MixingOrder

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Sample:
        part, place = self.order.locate(index)
        sample = self.parts[part][place]
        assert sample is not None, "nothing filters the windows"
        return sample
