"""metrics.jsonl, the record of a run."""

import json
import os
from pathlib import Path

from jzero.files import sync
from jzero.metrics.row_files import naming, take_back
from jzero.metrics.rows import Row


class JsonlSink:
    """Appends one JSON object a line and hands each to the operating system at once: a killed process loses
    none. After `sync` a machine that loses power has lost none either.

    Floats are written in Python's shortest exact form, so they read back bit-equal. What is not finite is
    written NaN, Infinity or -Infinity: `json.loads` reads these, other readers of JSON may not. Rows of
    steps after `start_step`, the step the run continues from, are taken back first (see `take_back`).
    """

    def __init__(self, path: Path, start_step: int = 0):
        take_back(path, start_step)
        self._path = path
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        sync(path.parent)

    def write(self, row: Row) -> None:
        with naming(self._path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def sync(self) -> None:
        with naming(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        with naming(self._path):
            self._file.close()
