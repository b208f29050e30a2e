"""Events for TensorBoard."""

import socket
import time
from pathlib import Path
from typing import Any

from jzero.gradstats import HISTOGRAM_EDGES
from jzero.metrics.row_files import naming
from jzero.metrics.rows import Row

_FLUSH_SECONDS = 5  # how late TensorBoard may see a row


class TensorBoardSink:
    """Writes each number of a row under its own name, and histograms over log2 of the magnitude. A killed process may
    lose its last seconds here.

    Of an earlier process's events in the same directory TensorBoard hides those after `start_step`.
    """

    def __init__(self, directory: Path, start_step: int = 0):
        # Brings protobuf along: only for those who ask for it. Its SummaryWriter would write from a thread that ends
        # without a word at the first error, a full disk say, and then wait for that thread for ever.
        from tensorboardX import RecordWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a directory in the order of their names.
        self._path = directory / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{start_step}"
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._file = RecordWriter(str(self._path))
        self._flushed = time.monotonic()
        self._add(0, file_version="brain.Event:2")
        self._add(start_step + 1, session_log=self._events.SessionLog(status=self._events.SessionLog.START))

    def write(self, row: Row) -> None:
        values = [
            self._summaries.Summary.Value(tag=name, **self._content(value))
            for name, value in row.items()
            if name != "step" and value is not None
        ]
        self._add(row["step"], summary=self._summaries.Summary(value=values))

    def close(self) -> None:
        with naming(self._path):
            self._file.close()

    def _content(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, list):
            return {"simple_value": float(value)}
        # TensorBoard spreads its display between min and max.
        filled = [number for number, count in enumerate(value) if count] or [0]
        low, high = HISTOGRAM_EDGES[filled[0]], HISTOGRAM_EDGES[filled[-1] + 1]
        make, limits = self._summaries.HistogramProto, HISTOGRAM_EDGES[1:]
        return {"histo": make(min=low, max=high, num=sum(value), bucket_limit=limits, bucket=value)}

    def _add(self, step: int, **content: Any) -> None:
        event = self._events.Event(wall_time=time.time(), step=step, **content)
        with naming(self._path):
            self._file.write(event.SerializeToString())
            if time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self._file.flush()
                self._flushed = time.monotonic()
