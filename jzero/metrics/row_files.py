"""What every file of rows needs: a run that goes on states each step once, and a fault names the file."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from jzero.errors import DataError
from jzero.files import replacing
from jzero.metrics.rows import Row


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl, also of one that is being written: a last line that is cut short is left out.

    Raises DataError for any other line that is no row.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    return [_json_row(path, number, line) for number, line in enumerate(lines, 1) if line.endswith(b"\n")]


def json_step(path: Path, number: int, line: bytes) -> int:
    """The step of a line of JSON; raises DataError if there is none."""
    return _json_row(path, number, line)["step"]


def take_back(path: Path, step: int, step_of: Callable[[Path, int, bytes], float] = json_step) -> None:
    """Drops the rows of steps after `step` from a file of rows, and a last line that a kill cut short, so
    that a run resumed from `step` states each step once. Replaces the file in one move; leaves it alone if
    nothing goes.

    step_of: reads the step of a whole line, given path, number and line; raises DataError for one that is no row.
    """
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [
        line for number, line in enumerate(lines, 1) if line.endswith(b"\n") and step_of(path, number, line) <= step
    ]
    if kept != lines:
        with replacing(path) as file:
            file.writelines(kept)


def set_aside(path: Path) -> Path | None:
    """Renames a file with something in it: .old, .old.2 and so on, whatever is free. Returns its new path."""
    if not path.is_file() or path.stat().st_size == 0:
        return None
    names = (path.with_name(f"{path.name}.old{f'.{number}' if number > 1 else ''}") for number in count(1))
    return path.rename(next(name for name in names if not name.exists()))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """What fails on an open file does not say on which."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def no_row(path: Path, number: int, line: bytes, wanted: str) -> DataError:
    shown = line[:60].decode(errors="replace").rstrip()
    return DataError(f"{path}, line {number}: {shown!r} is no {wanted}; mend or delete the line, then resume")


def _json_row(path: Path, number: int, line: bytes) -> Row:
    try:
        row = json.loads(line)
        return row | {"step": int(row["step"])}
    except (ValueError, TypeError, KeyError) as error:
        raise no_row(path, number, line, "row of metrics (a JSON object with a step)") from error
