"""metrics.csv: the numbers of a run as a table."""

import csv
import io
from pathlib import Path

from jzero.files import replacing
from jzero.metrics.row_files import naming, no_row, take_back
from jzero.metrics.rows import Row


class CsvSink:
    """Appends one line a row under a header of all names so far; a row has nothing where it lacks a name.

    A row with a new name (the first evaluation, say) has the file written anew under the longer header, in one move.
    Histograms are left out. A killed process loses no row; rows after `start_step` are taken back first.
    """

    def __init__(self, path: Path, start_step: int = 0):
        take_back(path, start_step, _step)
        self._path = path
        self._file = open(path, "a+", encoding="utf-8", newline="")  # noqa: SIM115
        self._file.seek(0)
        self._columns = next(csv.reader(self._file), [])

    def write(self, row: Row) -> None:
        cells = {name: value for name, value in row.items() if not isinstance(value, list)}
        new = [name for name in cells if name not in self._columns]
        with naming(self._path):
            if new:
                self._widen(new)
            self._file.write(_lines(self._columns, [cells]))
            self._file.flush()

    def close(self) -> None:
        with naming(self._path):
            self._file.close()

    def _widen(self, names: list[str]) -> None:
        self._file.seek(0)
        rows = list(csv.DictReader(self._file))
        self._columns += names
        header = dict(zip(self._columns, self._columns, strict=True))
        with replacing(self._path) as file:
            file.write(_lines(self._columns, [header, *rows]).encode())
        self._file.close()
        self._file = open(self._path, "a+", encoding="utf-8", newline="")  # noqa: SIM115


def _lines(columns: list[str], rows: list[Row]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n", extrasaction="ignore").writerows(rows)
    return text.getvalue()


def _step(path: Path, number: int, line: bytes) -> float:
    """The step of a line, which is its first cell; the header comes before all steps."""
    first = line.split(b",")[0].strip()
    if number == 1 and first == b"step":
        return -1
    if number == 1 or not first.isdigit():
        raise no_row(path, number, line, "row of metrics.csv (its first cell is the step, below a header)")
    return int(first)
