"""Text to batches: sources, cached token files, windows, and a Grain pipeline with a global position."""

from jzero.data.loader import Data, make_data

__all__ = ["Data", "make_data"]
