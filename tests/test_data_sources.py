"""Files of each kind: what is read from them, what is refused, and what is skipped and counted."""

import gzip
import json
import re
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard
from corpora import as_rows, load, make_source, texts, write_jsonl

from jzero.data import Data
from jzero.errors import DataError


def tokens(data: Data) -> np.ndarray:
    """All tokens, of training and then of validation."""
    return np.concatenate([part.stream.tokens.open() for part in (*data.train, *data.validation)])


def documents(data: Data) -> list[str]:
    """All documents, sorted. They end where the table says, which is at the end-of-document tokens."""
    found = []
    for part in (*data.train, *data.validation):
        ids, (starts, _) = part.stream.tokens.open(), part.stream.documents.open()
        assert (ids[starts[1:] - 1] == 256).all()
        found += [bytes(piece[piece < 256].astype(np.uint8)).decode() for piece in np.split(ids, starts[1:])]
    return sorted(found)


# --- what is read ---


@pytest.mark.parametrize("kind", ["text", "jsonl", "tokens", "datasets"])
def test_each_kind_of_file_gives_its_documents_whole(tmp_path, kind):
    data = load(tmp_path, make_source(kind, tmp_path / "in"))
    assert documents(data) == sorted(texts())
    assert f"{sum(len(text.encode()) + 1 for text in texts()):,} tokens in 40 documents" in data.description


LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in as_rows("text", texts())).encode()
SPELLINGS = {
    "plain": ("a.jsonl", LINES),
    "another suffix": ("a.ndjson", LINES),
    "gzip": ("a.jsonl.gz", gzip.compress(LINES)),
    "gzip of two members": ("a.jsonl.gz", gzip.compress(LINES[:999]) + gzip.compress(LINES[999:])),
    "zstandard": ("a.jsonl.zst", zstandard.compress(LINES)),
    "zstandard of two frames": ("a.jsonl.zst", zstandard.compress(LINES[:999]) + zstandard.compress(LINES[999:])),
    "byte order mark": ("a.jsonl", b"\xef\xbb\xbf" + LINES),
    "Windows line ends": ("a.jsonl", LINES.replace(b"\n", b"\r\n")),
    "blank lines": ("a.jsonl", b"\n \n" + LINES.replace(b"\n", b"\n\n") + b"\t\n"),
    "no last line end": ("a.jsonl", LINES.rstrip()),
    "escaped": ("a.jsonl", b"".join(json.dumps(json.loads(line)).encode() + b"\n" for line in LINES.splitlines())),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_json_lines_may_be_written_in_many_ways(tmp_path, spelling):
    name, content = SPELLINGS[spelling]
    (tmp_path / name).write_bytes(content)
    assert documents(load(tmp_path, {"source": "jsonl", "paths": [str(tmp_path / name)]})) == sorted(texts())


def test_a_folder_stands_for_its_files_of_known_suffix_at_any_depth_in_order(tmp_path):
    for name in ("b/2.jsonl", "a.jsonl.gz", "b/c/3.jsonl", ".hidden/4.jsonl", "note.txt"):
        file = tmp_path / "in" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(file, [{"text": f"<{name}>" * 20}])
    (tmp_path / "in" / "b" / "round").symlink_to("..")
    (tmp_path / "in" / "z.jsonl").symlink_to("b/2.jsonl")
    data = load(tmp_path, {"source": "jsonl", "paths": [str(tmp_path / "in")], "validation_fraction": 0.1})
    text = bytes(tokens(data)[tokens(data) < 256].astype(np.uint8)).decode()
    assert list(dict.fromkeys(re.findall("<(.*?)>", text))) == ["a.jsonl.gz", "b/2.jsonl", "b/c/3.jsonl"]


def test_arrow_as_datasets_saves_it_is_read_without_what_map_left_beside_it(tmp_path):
    import datasets

    datasets.disable_progress_bars()
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(as_rows("text", texts())).save_to_disk(str(folder))
    file = next(folder.glob("data-*.arrow"))
    (folder / "cache-0123.arrow").write_bytes(file.read_bytes())
    assert documents(load(tmp_path, {"source": "datasets", "paths": [str(folder)]})) == sorted(texts())
    (tmp_path / "odd [1].arrow").write_bytes(file.read_bytes())
    assert documents(load(tmp_path, {"source": "datasets", "paths": [str(tmp_path / "odd [1].arrow")]}))


@pytest.mark.parametrize("name", ["flat uint16", "flat int64", "npy of uint32", "npy by a memmap"])
def test_token_files_hold_ids_of_any_width(tmp_path, name):
    ids = np.fromfile(make_source("tokens", tmp_path)["paths"][0], np.uint16)
    expected = tokens(load(tmp_path, make_source("tokens", tmp_path)))
    fields: dict = {}
    match name.split():
        case ["flat", dtype]:
            file, fields = tmp_path / "ids.bin", {"dtype": dtype}
            ids.astype(dtype).tofile(file)
        case ["npy", "of", dtype]:
            file = tmp_path / "ids.npy"
            np.save(file, ids.astype(dtype))
        case _:
            file = tmp_path / "ids.npy"
            written = np.lib.format.open_memmap(file, "w+", np.int32, ids.shape)
            written[:] = ids
            written.flush()
    data = load(tmp_path, {"source": "tokens", "paths": [str(file)], **fields})
    np.testing.assert_array_equal(tokens(data), expected)


@pytest.mark.parametrize(("end", "number"), [(None, 2), (9, 4)])
def test_without_a_tokenizer_the_user_says_what_ends_a_document(tmp_path, end, number):
    """A file ends a document too, and nothing is put in between."""
    files = [tmp_path / "a.npy", tmp_path / "b.npy"]
    parts = [np.array([1, 2, 9, 3, 4, 9, *[49_999] * 18]), np.array([5] * 20)]
    for file, ids in zip(files, parts, strict=True):
        np.save(file, ids)
    fields = {"source": "tokens", "paths": list(map(str, files)), "tokenizer": None, "end_token_id": end}
    data = load(tmp_path, {**fields, "sequence_length": 1, "validation_fraction": 0.1}, vocab_size=50_000)
    assert f"44 tokens in {number} documents" in data.description
    assert sorted(tokens(data)) == sorted(np.concatenate(parts))
    starts, _ = data.train[0].stream.documents.open()
    assert len(starts) + (data.validation[0].num_tokens == 3) == number
    assert data.tokenizer is None
    assert data.vocab_size == 50_000


# --- long, short and empty lines ---


def test_lines_of_any_length_are_cut_into_windows_and_every_token_is_accounted_for(tmp_path):
    """N03"""
    length = 64
    line = "".join(f"{i:07d}é" for i in range(560_000))
    lines = [line, "x" * length, "y" * (length + 1), ""]
    start = time.perf_counter()
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in lines])
    fields = {"source": "jsonl", "paths": [str(file)], "sequence_length": length, "validation_fraction": 0.001}
    data = load(tmp_path, fields)
    assert time.perf_counter() - start < 10  # two seconds; a quadratic pass over 5 MB takes hours
    total = sum(len(text.encode()) + 1 for text in lines)
    parts = *data.train, *data.validation
    assert sum(part.num_tokens for part in parts) == total == len(tokens(data))
    trained = sum(len(part) * length for part in parts)
    assert trained == total - len(parts) - sum(part.num_left_over for part in parts)
    assert f"{total:,} tokens in 4 documents" in data.description
    assert f"{parts[0].num_left_over} and {parts[1].num_left_over} tokens left over" in data.description


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_a_large_file_of_lines_is_not_held_in_memory(tmp_path, suffix):
    file = tmp_path / f"a{suffix}"
    draw = np.random.default_rng(0).bytes
    content = b"".join(json.dumps({"text": draw(3750).hex()}).encode() + b"\n" for _ in range(3200))  # 24 MB
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}.get(file.suffix, bytes)
    file.write_bytes(compress(content))
    del content
    tracemalloc.start()
    try:
        load(tmp_path, {"source": "jsonl", "paths": [str(file)], "sequence_length": 128})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


# --- what is refused, or skipped and counted ---

GOOD = [{"text": f"{i:03d} good"} for i in range(30)]
# A bad line among good ones at line 3, byte 42: what the message must name.
BAD_LINES = {
    "latin-1": ('{"text": "café"}'.encode("latin-1"), ["not UTF-8", "byte 0xe9 at line 3, byte offset 55", "LATIN1"]),
    "cut short": (b'{"text": "ab', ["not JSON at line 3, byte offset 51", "Unterminated string"]),
    "nothing JSON": ("é text".encode(), ["not JSON at line 3, byte offset 42"]),
    "broken behind é": ('{"text": "é" 5}'.encode(), ["not JSON at line 3, byte offset 56"]),
    "indented": (b'  {"text": 5 5}', ["not JSON at line 3, byte offset 55"]),
    "NUL bytes": (b"\0" * 8, ["not JSON at line 3, byte offset 42"]),
    "NUL in text": (b'{"text": "a\0b"}', ["not JSON at line 3, byte offset 53", "control character"]),
    "no object": (b'["text"]', ["no JSON object at line 3, byte offset 42", '["text"]']),
    "no such field": (b'{"txt": "a", "n": 1}', ["no field 'text' at line 3, byte offset 42", "has txt, n"]),
    "number": (b'{"text": 5}', ["holds a number as 'text' at line 3", "must be text"]),
    "null": (b'{"text": null}', ["holds null as 'text' at line 3"]),
    "list": (b'{"text": ["a"]}', ["holds a list as 'text' at line 3"]),
    "half a pair": (b'{"text": "a \\ud83d b"}', ["half a surrogate pair in 'text' at line 3"]),
    "endless number": (b'{"text": ' + b"1" * 5000 + b"}", ["cannot be read as JSON at line 3"]),
    "endless brackets": (b"[" * 100_000, ["cannot be read as JSON at line 3"]),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_by_file_line_and_byte_or_skipped_and_counted(tmp_path, case):
    """N01"""
    line, facts = BAD_LINES[case]
    file = write_jsonl(tmp_path / "a.jsonl", [*GOOD[:2], line, *GOOD[2:], line])
    fields = {"source": "jsonl", "paths": [str(file)], "sequence_length": 2}
    with pytest.raises(DataError) as caught:
        load(tmp_path, fields)
    assert [fact for fact in ["data.paths", "a.jsonl", *facts] if fact not in str(caught.value)] == []
    for _ in range(2):  # tokenised, and from the cache
        data = load(tmp_path, fields | {"on_error": "skip"})
        assert "in 30 documents" in data.description
        assert f"2 skipped (data.on_error=skip), the first: {caught.value}" in data.description
        assert documents(data) == [row["text"] for row in GOOD]
        assert len(list((tmp_path / "cache").iterdir())) == 5
    with pytest.raises(DataError):  # what was skipped once is not forgotten
        load(tmp_path, fields)


def spoilt(kind: str, tmp_path: Path) -> tuple[Path, str]:
    """A bad file of its kind, and its source."""
    gz, zst = gzip.compress(LINES), zstandard.compress(LINES)
    match kind:
        case "gz cut short":
            name, content = "b.jsonl.gz", gz[: len(gz) // 2]
        case "gz altered":
            name, content = "b.jsonl.gz", gz[:40] + bytes([gz[40] ^ 255]) + gz[41:]
        case "gz in name only":
            name, content = "b.jsonl.gz", LINES
        case "zst cut short":
            name, content = "b.jsonl.zst", zst[: len(zst) // 2]
        case "zst in name only":
            name, content = "b.jsonl.zst", LINES
        case "utf-16":
            name, content = "b.jsonl", LINES.decode().encode("utf-16")
        case "empty lines":
            name, content = "b.jsonl", b"\n\n"
        case "text cut short":
            name, content = "b.txt.gz", gzip.compress(b"x" * 9999)[:-9]
        case "parquet cut short":
            name, content = "b.parquet", Path(make_source("datasets", tmp_path)["paths"][0]).read_bytes()[:-99]
        case "odd bytes":
            name, content = "b.bin", bytes(33)
        case "ids beyond":
            name, content = "b.bin", np.array([1, 2, 256, 3, 257, 4], np.uint16).tobytes()
        case "npy cut short":
            np.save(tmp_path / "b.npy", np.zeros(100, np.int32))
            name, content = "b.npy", (tmp_path / "b.npy").read_bytes()[:-50]
        case "npy of two dimensions":
            np.save(tmp_path / "b.npy", np.zeros((10, 3), np.int32))
            name, content = "b.npy", (tmp_path / "b.npy").read_bytes()
        case "npy of floats":
            np.save(tmp_path / "b.npy", np.zeros(10))
            name, content = "b.npy", (tmp_path / "b.npy").read_bytes()
        case _:
            name, content = "b.npy", b""
    (tmp_path / name).write_bytes(content)
    kinds = {".parquet": "datasets", ".bin": "tokens", ".npy": "tokens"}
    return tmp_path / name, "text" if ".txt" in name else kinds.get(Path(name).suffix, "jsonl")


BAD_FILES = {
    "gz cut short": "damaged or cut short",
    "gz altered": "damaged or cut short",
    "gz in name only": "damaged or cut short",
    "zst cut short": "damaged or cut short (the compressed stream ends within a frame)",
    "zst in name only": "damaged or cut short",
    "utf-16": "not UTF-8: byte 0xff at line 1, byte offset 0",
    "empty lines": "is empty",
    "text cut short": "damaged or cut short",
    "parquet cut short": "cannot be read",
    "odd bytes": "has 33 bytes, which is no whole number of uint16 tokens",
    "ids beyond": "holds id 257 at token 4, byte offset 8",
    "npy cut short": "is no .npy file, or is cut short",
    "npy of two dimensions": "holds int32 [10, 3]",
    "npy of floats": "holds float64 [10]",
    "npy empty": "is no .npy file",
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_named_with_what_is_wrong_or_skipped_from_there_on(tmp_path, kind):
    (tmp_path / "in").mkdir()
    bad, source = spoilt(kind, tmp_path / "in")
    good = make_source(source, tmp_path / "good")
    fields = {**good, "paths": [str(bad), *good["paths"]]}
    with pytest.raises(DataError) as caught:
        load(tmp_path, fields)
    assert f"data.paths: {bad}" in str(caught.value)
    assert BAD_FILES[kind] in str(caught.value)
    data = load(tmp_path, {**fields, "on_error": "skip"})
    assert f"1 skipped (data.on_error=skip), the first: {caught.value}" in data.description
    assert set(texts()) <= set(documents(data))
    if kind not in ("gz cut short", "ids beyond"):  # those have a sound beginning
        with pytest.raises(DataError, match="none of 1 documents could be read"):
            load(tmp_path, {**fields, "paths": [str(bad)], "on_error": "skip"})


def test_a_text_file_that_goes_bad_late_is_left_out_from_its_first_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 5_000_000 + b"\xff")
    (tmp_path / "b.txt").write_text("good " * 99)
    fields = {"source": "text", "paths": [str(tmp_path / "*.txt")], "on_error": "skip"}
    data = load(tmp_path, fields)
    assert set(bytes(tokens(data)[tokens(data) < 256].astype(np.uint8))) == set(b"good ")
    assert "in 1 document." in data.description


def test_a_table_without_the_column_names_those_it_has(tmp_path):
    fields = make_source("datasets", tmp_path)
    with pytest.raises(DataError, match=r"d\.parquet has no column body\. Its columns: prompt, text"):
        load(tmp_path, {**fields, "text_field": "body"})
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"a\.txt is no table"):
        load(tmp_path, {**fields, "paths": [str(tmp_path / "a.txt")]})


def test_a_null_in_a_table_is_named_by_its_row(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [*as_rows("text", texts())[:3], {"prompt": "x", "text": None}, *as_rows("text", texts())[3:]]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    fields = {"source": "datasets", "paths": [str(tmp_path / "d.parquet")]}
    with pytest.raises(DataError, match="holds null as 'text' at row 4"):
        load(tmp_path, fields)
    assert documents(load(tmp_path, {**fields, "on_error": "skip"})) == sorted(texts())


@pytest.mark.parametrize("kind", ["text", "jsonl", "tokens", "datasets", "mixture"])
def test_too_little_of_any_kind_is_refused_with_rows_found_and_needed(tmp_path, kind):
    """F06"""
    fields = make_source(kind, tmp_path / "in")
    with pytest.raises(
        DataError, match=r"training tokens make \d+ windows of 8 \+ 1; train.global_batch_size=\d+ needs"
    ):
        load(tmp_path, fields, batch_size=2000)
    with pytest.raises(DataError, match=r"make 0 windows of 9999 \+ 1"):
        load(tmp_path, {**fields, "sequence_length": 9999})
    if kind == "mixture":
        fields["mixture"][2]["weight"] = 100
        with pytest.raises(DataError, match=r"data\.mixture\[2\]\.source=tokens \(.*c\.bin\): .* needs 383\."):
            load(tmp_path, fields, batch_size=400)


def test_a_mixture_names_each_part_and_its_share(tmp_path):
    lines = load(tmp_path, make_source("mixture", tmp_path / "in")).description.splitlines()
    assert [line.split()[0] for line in lines] == ["64.5%", "26.9%", "8.6%"]
    assert "the loss counts" in lines[1]
    assert "the loss counts" not in lines[0]
