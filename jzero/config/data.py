"""Where the training data comes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from jzero.config.section import Count, Fault, Flag, Fraction, Positive, Section, Size, Text, dotted, shown, unused

_ROWS = ["jsonl", "datasets"]  # sources whose documents are rows with named fields
_FILES = ["text", *_ROWS, "tokens"]
_EXAMPLES = {"text": "corpus/*.txt", "jsonl": "corpus.jsonl", "datasets": "corpus/*.parquet", "tokens": "train.bin"}


class SourceFields(Section):
    """The fields of one source, on its own or as a part of a mixture."""

    path: ClassVar[str] = "data"

    # Python's own files; yours: text, JSON lines, Parquet or Arrow, token ids; made-up text; several of these.
    source: Literal["stdlib", "text", "jsonl", "datasets", "tokens", "synthetic", "mixture"] = "stdlib"
    paths: tuple[Text, ...] = ()  # text, jsonl, datasets, tokens: files, folders or globs
    text_field: Text = "text"  # jsonl, datasets: the field that holds a document
    prompt_field: Text | None = None  # jsonl, datasets: in place of text_field, with answer_field
    answer_field: Text | None = None  # what follows the prompt; the loss is on this alone
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"  # tokens: of .bin files
    synthetic_tokens: Size = 1_000_000  # synthetic: tokens in the corpus

    def conflicts(self) -> Iterator[Fault]:
        paths, source = dotted(self.path, "paths"), dotted(self.path, "source")
        if self.source in _FILES and not self.paths:
            yield Fault(
                (paths, source),
                f"{paths} = []: {source} = {self.source} needs files, such as {paths}: [{_EXAMPLES[self.source]}]",
            )
        if self.source not in _FILES and self.paths:
            yield Fault(
                (paths, source),
                f"{paths} = {shown(self.paths)}: not read by {source} = {self.source}; "
                f"set {source}: text, or drop the paths",
            )
        if (self.prompt_field is None) != (self.answer_field is None):
            one, other = ("prompt_field", "answer_field")[:: 1 if self.prompt_field is not None else -1]
            yield Fault(
                (dotted(self.path, one), dotted(self.path, other)),
                f"{dotted(self.path, one)} = {getattr(self, one)}: needs {dotted(self.path, other)} beside it",
            )
        if self.prompt_field is not None and self.text_field != "text":
            names = dotted(self.path, "text_field"), dotted(self.path, "prompt_field")
            yield Fault(names, f"{names[0]} = {self.text_field}: not read beside {names[1]}; drop one of the two")
        rows = dict.fromkeys(("text_field", "prompt_field", "answer_field"), ("source", _ROWS))
        yield from unused(
            self, {**rows, "dtype": ("source", ["tokens"]), "synthetic_tokens": ("source", ["synthetic"])}
        )


class MixtureConfig(SourceFields):
    """A source and its share of a mixture."""

    path: ClassVar[str] = "data.mixture[]"

    weight: Positive = 1.0  # share of the windows, relative to the other weights

    def conflicts(self) -> Iterator[Fault]:
        yield from super().conflicts()
        if self.source == "mixture":
            name = dotted(self.path, "source")
            yield Fault((name,), f"{name} = mixture: a mixture has no mixtures within; list the parts in data.mixture")


class DataConfig(SourceFields):
    """Where the training data comes from, and how it becomes windows of tokens."""

    mixture: tuple[MixtureConfig, ...] = ()  # mixture: sources as above, each with its weight
    tokenizer: Text | None = "bytes"  # one token a byte; or a tokenizer.json's path; null: tokens come as ids
    end_token: Text | None = None  # what ends a document, such as </s>; null: found in tokenizer.json
    end_token_id: Count | None = None  # the same where tokenizer is null; null: a file is a document
    sequence_length: Size = 128  # tokens the model sees at once
    document_attention: Flag = False  # attention, positions and loss stay within a document
    validation_fraction: Fraction = 0.05  # share of the tokens kept for evaluation
    on_error: Literal["fail", "skip"] = "fail"  # at what cannot be read: stop, or count it and go on
    cache_dir: Text | None = None  # token cache; null: $XDG_CACHE_HOME or ~/.cache, /jzero
    num_workers: Count = 0  # Grain worker processes; its prefetch threads run regardless
    prefetch_batches: Count = 2  # batches made ahead

    @property
    def sources(self) -> tuple[MixtureConfig, ...]:
        """The parts of the mixture; a source on its own is a mixture of one."""
        if self.source == "mixture":
            return self.mixture
        return (MixtureConfig.model_construct(**{name: getattr(self, name) for name in SourceFields.model_fields}),)

    def conflicts(self) -> Iterator[Fault]:
        yield from super().conflicts()
        if self.source == "mixture" and not self.mixture:
            yield Fault(
                ("data.mixture", "data.source"),
                "data.mixture = []: data.source = mixture needs parts, such as "
                "data.mixture: [{source: stdlib, weight: 3}, {source: text, paths: [a.txt]}]",
            )
        if self.source != "mixture" and self.mixture:
            yield Fault(
                ("data.mixture", "data.source"),
                f"data.mixture: not read by data.source = {self.source}; set data.source: mixture, or drop it",
            )
        textual = [part.source for part in self.sources if part.source != "tokens"]
        if self.tokenizer is None and textual:
            yield Fault(
                ("data.tokenizer", "data.source", "data.mixture"),
                f"data.tokenizer = null: data.source = {textual[0]} is text; set data.tokenizer: bytes, or to the "
                "path of a tokenizer.json",
            )
        if self.end_token is not None and self.tokenizer in (None, "bytes"):
            fix = "data.end_token_id" if self.tokenizer is None else "data.tokenizer to the path of a tokenizer.json"
            yield Fault(
                ("data.end_token", "data.tokenizer"),
                f"data.end_token = {self.end_token}: not read by data.tokenizer = {shown(self.tokenizer)}; "
                f"drop it, or set {fix}",
            )
        if self.end_token_id is not None and self.tokenizer is not None:
            yield Fault(
                ("data.end_token_id", "data.tokenizer"),
                f"data.end_token_id = {self.end_token_id}: data.tokenizer = {self.tokenizer} has an end of its own; "
                "drop it, or set data.tokenizer: null",
            )
