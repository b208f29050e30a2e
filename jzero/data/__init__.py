"""Documents to batches: sources, cached token files, windows, and a Grain pipeline with a global position."""

from jzero.data.loader import Data, make_data
from jzero.data.own import OwnData
from jzero.data.pipeline import Batch, Feed
from jzero.data.tokenizer import read_tokenizer

__all__ = ["Batch", "Data", "Feed", "OwnData", "make_data", "read_tokenizer"]
