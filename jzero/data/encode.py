"""Documents to token ids, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np

from jzero.data.documents import Document, Piece, failing
from jzero.data.tokenizer import Tokenizer
from jzero.errors import DataError

# Documents tokenised at once: enough for all cores, and no more than they fill.
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024


class Ids(NamedTuple):
    """Token ids, integers of any dtype [number of tokens], and whether the loss counts them."""

    ids: np.ndarray
    counted: bool


def encode(documents: Iterator[Document], tokenizer: Tokenizer) -> Iterator[Iterator[Ids]]:
    """Each document as its tokens, with `tokenizer.end_of_document` after text and nothing after ids.

    What is wrong with a document is raised where its tokens are read. Text is cut nowhere if the tokenizer merges
    across places, so such a document is held in memory whole; other documents a piece at a time.
    """
    if tokenizer.merges:
        return (document for batch in _batches(documents) for document in _encode_batch(batch, tokenizer))
    return (_encode_pieces(document, tokenizer) for document in documents)


def _encode_pieces(document: Document, tokenizer: Tokenizer) -> Iterator[Ids]:
    is_text = False
    for piece in document:
        is_text = isinstance(piece.content, str)
        yield Ids(tokenizer.encode(piece.content) if isinstance(piece.content, str) else piece.content, piece.counted)
    if is_text:
        yield _end(tokenizer)


def _batches(documents: Iterator[Document]) -> Iterator[list[list[Piece] | DataError]]:
    batch, characters = [], 0
    for document in documents:
        try:
            batch.append(_joined(document))
        except DataError as error:
            batch.append(error)
        else:
            characters += sum(len(piece.content) for piece in batch[-1])
        if characters >= _BATCH_CHARACTERS or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    yield batch


def _joined(document: Document) -> list[Piece]:
    """The document with its text in as few pieces as there are, by what is counted."""
    pieces = []
    for (kind, counted), group in groupby(document, lambda piece: (type(piece.content), piece.counted)):
        content = [piece.content for piece in group]
        pieces += [Piece("".join(map(str, content)), counted)] if kind is str else [Piece(c, counted) for c in content]
    return pieces


def _encode_batch(batch: list[list[Piece] | DataError], tokenizer: Tokenizer) -> Iterator[Iterator[Ids]]:
    pieces = [piece for document in batch if isinstance(document, list) for piece in document]
    encoded = iter(tokenizer.encode_all([piece.content for piece in pieces if isinstance(piece.content, str)]))
    for document in batch:
        if isinstance(document, DataError):
            yield failing(document)
            continue
        tokens = [Ids(next(encoded) if isinstance(content, str) else content, on) for content, on in document]
        is_text = any(isinstance(piece.content, str) for piece in document)
        yield iter([*tokens, _end(tokenizer)] if is_text else tokens)


def _end(tokenizer: Tokenizer) -> Ids:
    return Ids(np.array([tokenizer.end_of_document], np.int32), counted=True)
