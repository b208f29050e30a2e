"""Windows of a token stream, shuffled, batched and prefetched by Grain. A position counts samples."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import absl.flags
import grain
import numpy as np

from jzero.data.cache import TokenFile

Batch = dict[str, np.ndarray]


class Windows:
    """The windows of a stream, each int32 [sequence_length + 1]: Grain's random access source.

    Window i starts at token i * sequence_length. Its last token is the first of the next window, so every
    token but the stream's first is a target exactly once. `num_left_over` tokens at the end fill no window.
    """

    def __init__(self, file: TokenFile, sequence_length: int):
        self.file = file
        self.sequence_length = sequence_length
        self._tokens = file.open()
        self._length, self.num_left_over = divmod(max(file.num_tokens - 1, 0), sequence_length)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self.sequence_length
        return self._tokens[start : start + self.sequence_length + 1].astype(np.int32)

    def __reduce__(self):
        # A pickled memory map is a copy of the file; worker processes map it themselves.
        return Windows, (self.file, self.sequence_length)


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

    def batches(
        self, windows: Windows, *, seed: int, start_sample: int, num_batches: int
    ) -> Generator[Batch, None, None]:
        """Yields {"tokens": int32 [batch_size / process_count, sequence_length + 1]}, `num_batches` times.

        Sample i is window permutation_e[i mod n] of the n windows, where e = i // n and the permutation
        depends on (seed, e) only. Closing the generator ends its threads and processes.
        """
        samples = grain.MapDataset.source(windows).shuffle(seed=_grain_seed(seed)).repeat()
        samples = samples[start_sample : start_sample + num_batches * self.batch_size]
        blocks = samples.batch(self.batch_size // self.process_count, batch_fn=_stack)
        own = blocks[self.process_index :: self.process_count]
        threads = grain.ReadOptions(
            num_threads=min(self.prefetch_batches, 1), prefetch_buffer_size=self.prefetch_batches
        )
        dataset = own.to_iter_dataset(threads)
        return _closing(self._in_workers(dataset) if self.num_workers else dataset)

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


def _closing(dataset: grain.IterDataset[Batch]) -> Generator[Batch, None, None]:
    iterator = iter(dataset)
    try:
        yield from iterator
    finally:
        iterator.close()


def _grain_seed(seed: int) -> int:
    # Grain shuffles epoch e with seed + e: neighbouring seeds would run through each other's epochs.
    return int(np.random.SeedSequence(seed).generate_state(1)[0])


def _stack(windows: Sequence[np.ndarray]) -> Batch:
    return {"tokens": np.stack(windows)}
