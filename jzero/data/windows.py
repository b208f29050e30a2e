"""Windows of a token stream, and the order in which windows of several streams are mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from jzero.data.corpus import Stream

Sample = dict[str, np.ndarray]


class Windows:
    """The windows of a stream: a random access source.

    Window i starts at token i * T, T being `sequence_length`. Its last token is the first of the next window, so
    every token but the stream's first is a target exactly once. `num_left_over` tokens at the end fill no window.
    Each window is a dict of

    - `tokens`, int32 [T + 1]: the inputs are all but the last, the targets all but the first;
    - `weights`, bool [T], if `weighted`: which targets the loss counts;
    - `segments` and `positions`, int32 [T], if `within_documents`: which document of the window an input belongs to,
      from 1, and its place there, from 0. The first token of a document is then no target.
    """

    def __init__(self, stream: Stream, sequence_length: int, *, weighted: bool, within_documents: bool):
        self.stream = stream
        self.sequence_length = sequence_length
        self.weighted = weighted or within_documents
        self.within_documents = within_documents
        self.num_tokens = stream.tokens.shape[0]
        self._tokens, self._documents = stream.tokens.open(), stream.documents.open()
        self._length, self.num_left_over = divmod(max(self.num_tokens - 1, 0), sequence_length)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        start = index * self.sequence_length
        sample = {"tokens": self._tokens[start : start + self.sequence_length + 1].astype(np.int32)}
        return sample | self._marks(start) if self.weighted else sample

    def __reduce__(self):
        # A pickled memory map is a copy of the file; worker processes map it themselves.
        return _reopen, (self.stream, self.sequence_length, self.weighted, self.within_documents)

    def _marks(self, start: int) -> Sample:
        places = np.arange(start, start + self.sequence_length + 1)
        starts, counted_from = self._documents
        first, last = np.searchsorted(starts, [start, places[-1]], side="right") - 1
        document = first + np.searchsorted(starts[first + 1 : last + 1], places, side="right")
        weights = places >= counted_from[document]
        if not self.within_documents:
            return {"weights": weights[1:]}
        return {
            "weights": weights[1:] & (document[1:] == document[:-1]),
            "segments": (document - first + 1)[:-1].astype(np.int32),
            "positions": (places - np.maximum(starts[document], start))[:-1].astype(np.int32),
        }


def _reopen(stream: Stream, sequence_length: int, weighted: bool, within_documents: bool) -> Windows:
    return Windows(stream, sequence_length, weighted=weighted, within_documents=within_documents)


@dataclass(frozen=True)
class MixingOrder:
    """Which part a sample of a mixture comes from, and how many of that part come before it.

    The parts take turns as evenly as their weights allow: among the first n samples part k has n * weights[k] / sum,
    give or take a few, for every n. `seed` shifts the turns.
    """

    weights: tuple[float, ...]
    seed: int

    def locate(self, sample: int) -> tuple[int, int]:
        """(part, index within it) of a sample >= 0; by arithmetic, so it costs the same everywhere."""
        before, after = sample, sample + 1
        for part, (share, shift) in enumerate(self._cuts):
            taken, taken_then = (int(n * share + shift) for n in (before, after))
            if taken_then > taken:
                return part, taken
            before, after = before - taken, after - taken_then
        raise AssertionError("the last part takes what is left")

    def count(self, num_samples: int) -> list[int]:
        """How many of the first `num_samples` come from each part."""
        counts, left = [], num_samples
        for share, shift in self._cuts:
            counts.append(int(left * share + shift))
            left -= counts[-1]
        return counts

    @cached_property
    def _cuts(self) -> Sequence[tuple[Fraction, Fraction]]:
        """For each part its share of what the parts before it leave, and where in its turns it begins, in [0, 1)."""
        weights = [Fraction(weight) for weight in self.weights]
        shifts = np.random.SeedSequence(self.seed).generate_state(len(weights))
        left = [sum(weights[part:], Fraction()) for part in range(len(weights))]
        return [
            (weight / rest, Fraction(int(shift), 1 << 32))
            for weight, rest, shift in zip(weights, left, shifts, strict=True)
        ]
