"""Where the training text comes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from jzero.config.section import Count, Fault, Fraction, Section, Size, Text, shown, unused


class DataConfig(Section):
    """Where the training text comes from."""

    path: ClassVar[str] = "data"

    source: Literal["stdlib", "text", "synthetic"] = "stdlib"  # Python's own files, yours, made-up text
    paths: tuple[Text, ...] = ()  # text: files or globs
    tokenizer: Literal["bytes"] = "bytes"  # one token a byte
    sequence_length: Size = 128  # tokens the model sees at once
    validation_fraction: Fraction = 0.05  # share of the tokens kept for evaluation
    cache_dir: Text | None = None  # token cache; null: $XDG_CACHE_HOME or ~/.cache, /jzero
    num_workers: Count = 0  # Grain worker processes; its prefetch threads run regardless
    prefetch_batches: Count = 2  # batches made ahead
    synthetic_tokens: Size = 1_000_000  # synthetic: tokens in the corpus

    def conflicts(self) -> Iterator[Fault]:
        if self.source == "text" and not self.paths:
            yield Fault(
                ("data.paths", "data.source"),
                "data.paths = []: data.source = text needs files, such as data.paths: [corpus/*.txt]",
            )
        if self.source != "text" and self.paths:
            yield Fault(
                ("data.paths", "data.source"),
                f"data.paths = {shown(self.paths)}: not read by data.source = {self.source}; "
                "set data.source: text, or drop the paths",
            )
        yield from unused(self, {"synthetic_tokens": ("source", ["synthetic"])})
