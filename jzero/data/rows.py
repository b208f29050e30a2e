"""Documents in rows with named fields: JSON lines, Parquet and Arrow."""

from __future__ import annotations

import codecs
import glob
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jzero.config import MixtureConfig
from jzero.data.documents import Document, Piece, Source, failing
from jzero.data.paths import (
    UTF16_MARKS,
    describe_files,
    empty_error,
    encoding_error,
    find_files,
    name_files,
    opened,
    path_error,
)
from jzero.errors import DataError

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
TABLE_SUFFIXES = (".parquet", ".arrow")

_SET_FIELDS = "Set data.text_field, or data.prompt_field and data.answer_field."

Fields = tuple[tuple[str, bool], ...]  # name, and whether the loss counts it


def jsonl(config: MixtureConfig) -> Source:
    """One JSON object a line, in UTF-8; lines of white space are passed over."""
    return _source(config, find_files(config.paths, JSONL_SUFFIXES), _read_lines)


def tables(config: MixtureConfig) -> Source:
    """The rows of Parquet and Arrow files, read by Hugging Face's `datasets` without a copy in its cache."""
    # In a folder that `Dataset.save_to_disk` wrote, `map` leaves its results beside the data.
    found = find_files(config.paths, TABLE_SUFFIXES)
    files = [file for file in found if not (file.suffix == ".arrow" and file.name.startswith("cache-"))]
    for file in files or found:
        if file.suffix not in TABLE_SUFFIXES or not files:
            raise path_error(file, "is no table", f"Name files that end in {' or '.join(TABLE_SUFFIXES)}.")
    return _source(config, files, _read_table)


def _source(config: MixtureConfig, files: Sequence[Path], read: Callable[[Path, Fields], Iterator[Document]]) -> Source:
    if config.prompt_field is None or config.answer_field is None:
        fields: Fields = ((config.text_field, True),)
    else:
        fields = ((config.prompt_field, False), (config.answer_field, True))
    return Source(
        name=name_files(files),
        identity=[config.source, fields, describe_files(files)],
        documents=lambda: (document for file in files for document in read(file, fields)),
    )


def _read_lines(file: Path, fields: Fields) -> Iterator[Document]:
    offset, empty = 0, True
    try:
        with opened(file) as lines:
            for number, line in enumerate(lines, 1):
                if number == 1 and line.startswith(UTF16_MARKS):  # no line of it can be read
                    yield _parse(file, number, offset, line, fields)
                    return
                mark = len(codecs.BOM_UTF8) if number == 1 and line.startswith(codecs.BOM_UTF8) else 0
                if content := line[mark:].strip():
                    empty = False
                    start = offset + line.index(content, mark)
                    yield _parse(file, number, start, content, fields)
                offset += len(line)
    except DataError as error:
        yield failing(error)
        return
    if empty:
        yield failing(empty_error(file))


def _parse(file: Path, number: int, offset: int, line: bytes, fields: Fields) -> Document:
    """The document of a line that begins at byte `offset` of the file."""
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise encoding_error(file, error, offset, number) from None
    except json.JSONDecodeError as error:
        at = offset + len(error.doc[: error.pos].encode())
        what = f"is not JSON at line {number}, byte offset {at} ({error.msg})"
        raise path_error(file, what, "Each line must be one JSON object.") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets within brackets
        what = f"cannot be read as JSON at line {number}, byte offset {offset} ({error})"
        raise path_error(file, what, "Each line must be one JSON object.") from None
    place = f"line {number}, byte offset {offset}"
    if not isinstance(row, dict):
        what = f"has no JSON object at {place}: {line[:40].decode(errors='replace')}"
        raise path_error(file, what, "Each line must be one JSON object.")
    yield from _pieces(file, row, fields, place)


def _read_table(file: Path, fields: Fields) -> Iterator[Document]:
    names = [name for name, _ in fields]
    try:
        rows = _open_table(file)
        missing = [name for name in names if name not in rows.column_names]
        if missing:
            fix = f"Its columns: {', '.join(rows.column_names)}. {_SET_FIELDS}"
            raise path_error(file, f"has no column {missing[0]}", fix)
        empty = True
        for number, row in enumerate(rows.select_columns(names), 1):
            empty = False
            yield _pieces(file, row, fields, f"row {number}")
    except DataError as error:
        yield failing(error)
        return
    except Exception as error:  # pyarrow has a dozen kinds, ArrowInvalid and OSError among them
        yield failing(path_error(file, f"cannot be read ({error})", "Write it anew or leave it out."))
        return
    if empty:
        yield failing(empty_error(file))


def _open_table(file: Path) -> Any:
    try:
        import datasets
    except ImportError:
        what = "needs the package datasets"
        raise path_error(file, what, "Run pip install 'jzero[data]', or use data.source=jsonl.") from None
    kind = {".parquet": "parquet", ".arrow": "arrow"}[file.suffix]
    return datasets.load_dataset(kind, data_files=[glob.escape(str(file))], split="train", streaming=True)


def _pieces(file: Path, row: Mapping[str, Any], fields: Fields, place: str) -> Document:
    for name, counted in fields:
        if name not in row:
            fix = f"It has {', '.join(map(str, row)) or 'no fields'}. {_SET_FIELDS}"
            raise path_error(file, f"has no field {name!r} at {place}", fix)
        text = row[name]
        if not isinstance(text, str):
            what = f"holds {_kind(text)} as {name!r} at {place}"
            raise path_error(file, what, "It must be text.")
        try:
            text.encode()
        except UnicodeEncodeError:
            what = f"holds half a surrogate pair in {name!r} at {place}, which is no character"
            raise path_error(file, what, "Write the character whole, or as both halves of the pair.") from None
        yield Piece(text, counted)


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), "null" if value is None else f"{type(value).__name__}")
