"""What a source is: documents in a fixed order, each read a piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np

from jzero.errors import DataError


class Piece(NamedTuple):
    """A stretch of a document: text, to be tokenised, or token ids (integers of any dtype, [number of tokens]).

    `counted` says whether the loss is on it; what is not counted comes first in a document.
    """

    content: str | np.ndarray
    counted: bool = True


Document = Iterator[Piece]


@dataclass(frozen=True)
class Source:
    """Documents in a fixed order. What is wrong with one is raised, a DataError, where its pieces are read.

    `name` is for messages; `identity` is JSON that changes whenever the documents may have changed.
    """

    name: str
    identity: list
    documents: Callable[[], Iterator[Document]]


def failing(error: DataError) -> Iterator[Any]:
    """What is read in place of a document that cannot be."""

    def fail() -> NoReturn:
        raise error

    return (fail() for _ in range(1))
