"""Text to token ids and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes are ids 0..255; id 256 ends a document and is never produced by `encode`.

    The vocabulary is 257 and is not rounded up: padding for the mesh is the plan's business.
    """

    name: ClassVar[str] = "bytes"
    end_of_document: ClassVar[int] = 256
    vocab_size: ClassVar[int] = 257

    def encode(self, text: str) -> NDArray[np.int32]:
        """Ids of `text`, int32 [number of bytes]. `encode(a + b)` is `encode(a)` followed by `encode(b)`."""
        # surrogatepass: a stray surrogate (YAML can hold one) becomes its three bytes instead of an error.
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)

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


def make_tokenizer(name: str) -> ByteTokenizer:
    """The tokenizer of that name. `config` refuses other names, so none can arrive here."""
    return {ByteTokenizer.name: ByteTokenizer}[name]()
