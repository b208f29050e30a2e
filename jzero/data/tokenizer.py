"""Text to token ids and back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jzero.config import DataConfig
from jzero.errors import DataError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()
# What ends a document for GPT-2 to 4, GPT-NeoX and Qwen; Llama 1 and 2, Mistral and T5; Llama 3; Gemma; and in
# tokenizers that one trains oneself.
_END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|eos|>")


class Tokenizer(Protocol):
    """Ids are int32 from 0 to `vocab_size` - 1. `name` changes whenever the same text may give other ids."""

    @property
    def name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def end_of_document(self) -> int | None: ...  # the id that follows each document
    @property
    def merges(self) -> bool: ...  # whether text must be whole, for tokens may reach across any place

    def encode(self, text: str) -> NDArray[np.int32]: ...
    def encode_all(self, texts: Sequence[str]) -> list[NDArray[np.int32]]: ...
    def decode(self, ids: ArrayLike) -> str: ...


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes are ids 0..255; id 256 ends a document and is never produced by `encode`.

    The vocabulary is 257 and is not rounded up: padding for the mesh is the plan's business.
    """

    name: str = "bytes"
    end_of_document: int = 256
    vocab_size: int = 257
    merges: bool = False

    def encode(self, text: str) -> NDArray[np.int32]:
        """Ids of `text`, int32 [number of bytes]. `encode(a + b)` is `encode(a)` followed by `encode(b)`."""
        # surrogatepass: a stray surrogate (YAML can hold one) becomes its three bytes instead of an error.
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: ArrayLike) -> str:
        """Text of int `ids` [any length].

        The end of a document reads `<|endoftext|>`. Bytes that are not UTF-8, or only begin a character, and
        ids past the vocabulary (a model's padding) read U+FFFD.
        """
        pieces = (_piece(i) for i in np.asarray(ids).ravel().tolist())
        return b"".join(pieces).decode("utf-8", "replace")


def _piece(token: int) -> bytes:
    if 0 <= token < 256:
        return bytes((token,))
    return b"<|endoftext|>" if token == ByteTokenizer.end_of_document else _REPLACEMENT


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """A `tokenizer.json`, by the `tokenizers` package.

    Its template (a beginning-of-text token, say), truncation and padding are left aside: a document is its text's
    tokens and `end_of_document`. Special tokens that are written out in a text become their ids.
    """

    name: str
    end_of_document: int
    vocab_size: int
    model: Any  # tokenizers.Tokenizer
    merges: bool = True

    def encode(self, text: str) -> NDArray[np.int32]:
        """Ids of `text`, int32 [number of tokens]."""
        # A stray surrogate (YAML can hold one) is no text to `tokenizers`.
        sound = text.encode("utf-8", "replace").decode()
        return self.encode_all([sound])[0]

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """The ids of each text; on all cores."""
        encodings = self.model.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: ArrayLike) -> str:
        """Text of int `ids` [any length], special tokens written out; ids past the vocabulary are left out."""
        known = [i for i in np.asarray(ids).ravel().tolist() if 0 <= i < self.vocab_size]
        return self.model.decode(known, skip_special_tokens=False)


@dataclass(frozen=True)
class NoTokenizer:
    """Ids of a vocabulary that only the user knows."""

    vocab_size: int
    end_of_document: int | None
    name: str = "none"
    merges: bool = False

    def encode(self, text: str) -> NDArray[np.int32]:
        raise DataError(f"data.tokenizer=null cannot encode {text[:40]!r}: name a tokenizer.json")

    def encode_all(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: ArrayLike) -> str:
        """The ids, with spaces between."""
        return " ".join(map(str, np.asarray(ids).ravel().tolist()))


def make_tokenizer(data: DataConfig, vocab_size: int | None) -> Tokenizer:
    """The tokenizer that `data` names; without one, `vocab_size` says how many ids there are.

    Raises DataError for a file that cannot be read and for a vocabulary without an end of document.
    """
    if data.tokenizer is None:
        assert vocab_size is not None, "the config asks for model.vocab_size where there is no tokenizer"
        return NoTokenizer(vocab_size, data.end_token_id)
    if data.tokenizer == ByteTokenizer.name:
        return ByteTokenizer()
    return read_tokenizer(data.tokenizer, data.end_token)


def read_tokenizer(file: str | PathLike[str], end_token: str | None = None) -> HuggingFaceTokenizer:
    """The tokenizer of a tokenizer.json. `end_token` ends a document; None: the one of the usual names it has.

    Raises DataError, also if it has none of them or several.
    """
    path = Path(file).expanduser()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"data.tokenizer={path}: cannot be read ({error.strerror}). Name a tokenizer.json; relative paths start at "
            f"{Path.cwd()}. Or set data.tokenizer=bytes."
        ) from error
    try:
        import tokenizers
    except ImportError:
        raise DataError(
            f"data.tokenizer={path} needs the package tokenizers. Run pip install 'jzero[data]', or set "
            "data.tokenizer=bytes."
        ) from None
    try:
        model = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # `tokenizers` raises Exception itself
        raise DataError(
            f"data.tokenizer={path} is no tokenizer.json: {error}. Write one with tokenizers.Tokenizer.save, or "
            "take a model's from Hugging Face."
        ) from error
    model.no_truncation()  # would cut documents off in silence
    model.no_padding()
    vocabulary = model.get_vocab(with_added_tokens=True)
    end = vocabulary[_find_end(path, vocabulary, end_token, model)]
    size = max(vocabulary.values()) + 1  # some have gaps
    return HuggingFaceTokenizer(f"{hashlib.sha256(content).hexdigest()} {end}", end, size, model)


def _find_end(path: Path, vocabulary: dict[str, int], named: str | None, model: Any) -> str:
    candidates = [token for token in ((named,) if named is not None else _END_TOKENS) if token in vocabulary]
    if len(candidates) == 1:
        return candidates[0]
    if named is not None:
        what = f"data.end_token={named} is not in its vocabulary of {len(vocabulary):,}"
    elif candidates:
        what = f"{' and '.join(candidates)} could each end a document"
    else:
        what = f"no end of document is in its vocabulary of {len(vocabulary):,} (looked for {', '.join(_END_TOKENS)})"
    special = [token.content for token in model.get_added_tokens_decoder().values()]
    told = ", ".join(special[:12]) + (", ..." if len(special) > 12 else "")
    raise DataError(f"data.tokenizer={path}: {what}. Set data.end_token; its special tokens: {told or 'none'}.")
