"""The data path: what may be fed to it, what comes out in which order, and when the cache is believed."""

import json
import math
import multiprocessing
import os
import re
import sysconfig
import threading
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jzero.config import DataConfig
from jzero.data import Data, make_data
from jzero.data.corpus import unigram_loss
from jzero.data.tokenizer import make_tokenizer
from jzero.errors import DataError

# --- helpers ---


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def text_data(tmp_path: Path, *paths, seed=0, batch_size=2, process_index=0, process_count=1, **fields) -> Data:
    fields = {"sequence_length": 5, "validation_fraction": 0.2, "cache_dir": str(tmp_path / "cache")} | fields
    config = DataConfig(source="text", paths=tuple(map(str, paths)), **fields)
    return make_data(config, seed=seed, batch_size=batch_size, process_index=process_index, process_count=process_count)


def numbered(tmp_path: Path, count: int = 25, **arguments) -> Data:
    """A document "0000 0001 ...": window i starts with number i. 25: 20 windows to train, 4 to validate."""
    file, content = tmp_path / "n.txt", "".join(f"{i:04d} " for i in range(count))
    if not file.exists() or file.read_text() != content:  # else the cache has it
        write(file, content)
    return text_data(tmp_path, file, **arguments)


def row_ids(batches) -> list[int]:
    return [int(bytes(row[:4].tolist())) for batch in batches for row in batch["tokens"]]


def stream(windows) -> np.ndarray:
    """The tokens that the windows cover."""
    rows = [windows[i]["tokens"] for i in range(len(windows))]
    return np.concatenate([row[:-1] for row in rows] + [rows[-1][-1:]])


def streams(data: Data) -> tuple[bytes, bytes]:
    """Training and validation text without the end-of-document tokens."""
    (train,), (validation,) = data.train, data.validation
    return tuple(bytes(t[t < 256].astype(np.uint8)) for t in map(stream, (train, validation)))


def cache_files(tmp_path: Path, pattern: str = "*") -> list[Path]:
    return sorted((tmp_path / "cache").glob(pattern))


# --- order ---


def test_every_epoch_shows_each_window_once_and_in_another_order(tmp_path):
    data = numbered(tmp_path)
    assert data.num_train_windows == 20
    ids = row_ids(data.train_batches(0, 50))
    epochs = [tuple(ids[start : start + 20]) for start in range(0, 100, 20)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len(set(epochs)) == 5
    assert tuple(range(20)) not in epochs


def test_batches_that_straddle_epochs_drop_and_repeat_nothing(tmp_path):
    ids = row_ids(numbered(tmp_path, batch_size=7).train_batches(0, 20))
    assert len(ids) == 140
    assert all(sorted(ids[start : start + 20]) == list(range(20)) for start in range(0, 140, 20))


def test_the_order_follows_the_seed_and_seeds_do_not_share_epochs(tmp_path):
    orders = [row_ids(numbered(tmp_path, seed=seed).train_batches(0, 30)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1]
    epochs = [tuple(order[start : start + 20]) for order in orders[1:] for start in (0, 20, 40)]
    assert len(set(epochs)) == 6


@pytest.mark.parametrize("start", [1, 20, 26, 53])
def test_a_run_resumed_at_any_sample_goes_on_as_if_it_had_never_stopped(tmp_path, start):
    straight = row_ids(numbered(tmp_path).train_batches(0, 40))
    assert row_ids(numbered(tmp_path).train_batches(start, 13)) == straight[start : start + 26]


def test_a_position_far_into_training_is_reached_at_once(tmp_path):
    epoch = row_ids(numbered(tmp_path).train_batches(20 * 10**12, 10))
    assert sorted(epoch) == list(range(20))


def test_another_batch_size_continues_the_same_sequence(tmp_path):
    straight = row_ids(numbered(tmp_path, batch_size=4).train_batches(0, 11))
    first = row_ids(numbered(tmp_path, batch_size=4).train_batches(0, 2))
    rest = row_ids(numbered(tmp_path, batch_size=3).train_batches(8, 12))
    assert first + rest == straight


@pytest.mark.parametrize("kind", ["train", "validation"])
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_hold_consecutive_rows_of_the_batches_that_one_process_would_see(tmp_path, processes, kind):
    def batches(index: int, count: int) -> list[np.ndarray]:
        data = numbered(tmp_path, 250, batch_size=8, process_index=index, process_count=count)
        feed = data.train_batches(5, 60) if kind == "train" else data.validation_batches(3)
        return [batch["tokens"] for batch in feed]

    shares = [batches(index, processes) for index in range(processes)]
    assert all(rows.shape == (8 // processes, 6) for share in shares for rows in share)
    joined = [np.concatenate(rows) for rows in zip(*shares, strict=True)]
    alone = batches(0, 1)
    assert len(joined) == len(alone) > 0
    np.testing.assert_array_equal(joined, alone)


def test_worker_processes_change_neither_order_nor_a_resumed_position(tmp_path):
    straight = row_ids(numbered(tmp_path).train_batches(0, 30))
    feed = numbered(tmp_path, num_workers=1).train_batches(26, 17)
    first = [next(feed) for _ in range(3)]
    feed.close()  # what was made ahead but not handed out comes again
    rest = list(numbered(tmp_path, num_workers=2).train_batches(26 + 6, 14))
    assert row_ids(first + rest) == straight[26:]
    assert all(type(batch["tokens"]) is np.ndarray for batch in first + rest)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_prefetching_changes_no_order(tmp_path, prefetch):
    expected = row_ids(numbered(tmp_path).train_batches(7, 9))
    assert row_ids(numbered(tmp_path, prefetch_batches=prefetch).train_batches(7, 9)) == expected


def test_a_closed_iterator_leaves_no_thread(tmp_path):
    before = set(threading.enumerate())
    feed = numbered(tmp_path).train_batches(0, 10**6)
    next(feed)
    started = set(threading.enumerate()) - before
    assert started
    feed.close()
    for thread in started:
        thread.join(timeout=5)
    assert not any(thread.is_alive() for thread in started)
    with pytest.raises(StopIteration):
        next(feed)


def test_batches_are_int32_rows_of_sequence_length_plus_one(tmp_path):
    data = numbered(tmp_path, batch_size=3)
    for batch in (*data.train_batches(0, 2), *data.validation_batches(1)):
        assert batch["tokens"].shape == (3, 6)
        assert batch["tokens"].dtype == np.int32


# --- validation ---


def test_validation_is_the_same_at_every_call_and_for_every_seed(tmp_path):
    data = numbered(tmp_path, 250)
    ids = row_ids(data.validation_batches(5))
    assert len(set(ids)) == 10
    assert ids == row_ids(data.validation_batches(5)) == row_ids(numbered(tmp_path, 250, seed=9).validation_batches(5))
    assert row_ids(data.validation_batches(2)) == ids[:4]


def test_validation_never_counts_a_window_twice_while_there_are_enough(tmp_path):
    data = numbered(tmp_path, 250, batch_size=8)
    assert data.num_validation_windows == 49
    ids = row_ids(data.validation_batches(1000))
    assert len(ids) == len(set(ids)) == 48


def test_fewer_validation_windows_than_rows_make_one_batch_that_uses_all_alike(tmp_path):
    data = numbered(tmp_path, batch_size=10)
    assert data.num_validation_windows == 4
    (batch,) = data.validation_batches(3)
    rows = Counter(row.tobytes() for row in batch["tokens"])
    assert sorted(rows.values()) == [2, 2, 3, 3]


def test_a_single_document_gives_its_tail_to_validation(tmp_path):
    train, validation = streams(numbered(tmp_path, 250))
    trained, validated = (set(re.findall(rb"\d{4}(?= )", text)) for text in (train, validation))
    assert max(trained) < min(validated)
    assert len(validated) == pytest.approx(0.2 * 250, abs=2)


def test_several_documents_are_split_whole_wherever_they_lie(tmp_path):
    def texts(folder: Path, **arguments) -> list[set[bytes]]:
        for i in range(60):
            write(folder / f"{i:02d}.txt", f"<{i:04d}>" * (5 + i % 7))
        data = text_data(tmp_path, folder / "*.txt", sequence_length=1, validation_fraction=0.15, **arguments)
        return [set(re.findall(rb"<(\d{4})>", text)) for text in streams(data)]

    train, validation = texts(tmp_path / "here")
    assert len(train) + len(validation) == len(train | validation) == 60
    assert 4 < len(validation) < 14
    assert [train, validation] == texts(tmp_path / "elsewhere", seed=3)


def test_two_large_documents_are_not_spent_whole_on_validation(tmp_path):
    files = [write(tmp_path / name, name[0] * 1000) for name in ("a.txt", "b.txt")]
    data = text_data(tmp_path, *files, validation_fraction=0.05)
    train, validation = streams(data)
    assert set(train) == set(b"ab")
    assert set(validation) == set(b"b")
    assert len(validation) == pytest.approx(100, abs=6)


# --- tokens ---


def test_every_token_is_accounted_for_and_a_long_line_is_cut_not_dropped(tmp_path):
    length = 64
    line = "".join(f"{i:07d}é" for i in range(560_000))  # 5 MB without a line break; é straddles a read
    contents = [line, "x" * length, "y" * (length + 1)]
    files = [write(tmp_path / f"{i}.txt", content) for i, content in enumerate(contents)]
    data = text_data(tmp_path, *files, sequence_length=length, validation_fraction=0.001)
    total = sum(len(content.encode()) + 1 for content in contents)
    parts = *data.train, *data.validation
    assert sum(part.num_tokens for part in parts) == total
    for part in parts:
        targets = np.concatenate([part[i]["tokens"][1:] for i in range(len(part))])
        assert len(targets) == len(part) * length == part.num_tokens - 1 - part.num_left_over
        assert 0 <= part.num_left_over < length
        np.testing.assert_array_equal(stream(part)[1:], targets)  # each but the first, once, in order
    assert f"{total:,} tokens in 3 documents" in data.description
    assert f"{parts[0].num_left_over} and {parts[1].num_left_over} tokens left over" in data.description
    assert stream(parts[0]).tolist() == list(line.encode())[: len(stream(parts[0]))]


def test_a_large_file_is_not_held_in_memory(tmp_path):
    file = write(tmp_path / "large.txt", b"0123456789abcde\n" * (24 << 16))  # 24 MiB
    tracemalloc.start()
    try:
        text_data(tmp_path, file, sequence_length=128)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 48 << 20


def test_documents_are_separated_by_the_end_of_document_token(tmp_path):
    files = [write(tmp_path / name, text) for name, text in (("a.txt", "aaaa"), ("b.txt", "bbbb"), ("c.txt", "cccc"))]
    data = text_data(tmp_path, *reversed(files), sequence_length=1, batch_size=1, validation_fraction=0.34)
    end = data.tokenizer.end_of_document
    assert data.num_train_windows == 9  # two documents of 5 tokens; the third validates
    assert np.flatnonzero(stream(data.train[0]) == end).tolist() == [4, 9]
    assert np.flatnonzero(stream(data.validation[0]) == end).tolist() == [4]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xef\xbb\xbfabc", b"abc"),
        (b"a\x00b\x00c", b"a\x00b\x00c"),
        (b"a\r\nb\rc\n", b"a\r\nb\rc\n"),
        ("grüße 漢字 🎈".encode(), "grüße 漢字 🎈".encode()),
    ],
    ids=["byte order mark", "NUL bytes", "line ends", "beyond ASCII"],
)
def test_text_arrives_as_it_was_written(tmp_path, content, expected):
    filler = b"-" * 200  # the tail, for validation
    data = text_data(tmp_path, write(tmp_path / "a.txt", content + filler), sequence_length=1)
    assert streams(data)[0].rstrip(b"-") == expected


def test_files_and_patterns_may_overlap_and_are_read_once_in_sorted_order(tmp_path):
    for name in ("b/2.txt", "a.txt", "b/c/3.txt", "[1].txt", "note.md"):
        write(tmp_path / "in" / name, f"{name};" * 9)
    found = text_data(
        tmp_path, *(tmp_path / "in" / p for p in ("b/2.txt", "**/*.txt", "[1].txt")), validation_fraction=0.1
    )
    text = streams(found)[0]  # no file is small enough to validate whole
    names = list(dict.fromkeys(re.findall(rb"[^;]*\.(?:txt|md)(?=;)", text)))
    assert names == [b"[1].txt", b"a.txt", b"b/2.txt", b"b/c/3.txt"]


@pytest.mark.parametrize("text", ["", "plain", "a\x00\r\n\tb", "grüße 漢字 🎈 \N{COMBINING ACUTE ACCENT}"])
def test_the_tokenizer_gives_back_what_it_was_given(text):
    tokenizer = make_tokenizer(DataConfig(), None)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.end_of_document not in tokenizer.encode("".join(map(chr, range(0x250))))


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (list("né".encode())[:-1], "n\ufffd"),
        ([0x80, 65], "\ufffdA"),
        ([65, 256, 66], "A<|endoftext|>B"),
        ([65, 257, 5000, -1], "A\ufffd\ufffd\ufffd"),
        (np.array([[65], [66]]), "AB"),
    ],
    ids=["half a character", "stray byte", "end of document", "beyond the vocabulary", "any shape"],
)
def test_whatever_a_model_samples_can_be_shown(ids, text):
    assert make_tokenizer(DataConfig(), None).decode(ids) == text


def test_a_prompt_with_a_stray_surrogate_is_encoded_within_the_vocabulary():
    tokenizer = make_tokenizer(DataConfig(), None)
    ids = tokenizer.encode("a\ud800b")
    assert ids.max() < tokenizer.vocab_size
    assert re.fullmatch("a\ufffd+b", tokenizer.decode(ids))


# --- the unigram baseline ---


def test_unigram_loss_is_the_smoothed_cross_entropy():
    train, validation = np.array([2, 1, 0]), np.array([1, 1, 2])  # how often each id occurs
    expected = -(math.log(3 / 6) + math.log(2 / 6) + 2 * math.log(1 / 6)) / 4
    assert unigram_loss(train, validation) == pytest.approx(expected, rel=1e-12)


def test_the_data_reports_the_unigram_loss_of_its_validation_tokens(tmp_path):
    data = numbered(tmp_path, sequence_length=1)  # no token is left over
    seen, asked = Counter(stream(data.train[0]).tolist()), stream(data.validation[0]).tolist()
    smoothed = [math.log((seen[token] + 1) / (seen.total() + 257)) for token in asked]
    assert data.unigram_loss == pytest.approx(-sum(smoothed) / len(asked), rel=1e-9)
    assert numbered(tmp_path, sequence_length=1).unigram_loss == data.unigram_loss  # from the cache


# --- sources ---


def test_the_standard_library_is_real_python_text(tmp_path):
    def stdlib(cache: str, **arguments) -> Data:
        config = DataConfig(source="stdlib", cache_dir=str(tmp_path / cache))
        return make_data(config, seed=0, batch_size=32, **arguments)

    data = stdlib("a")
    text = b"".join(streams(data)).decode()
    assert len(text) > 3_000_000
    assert text.count("def __init__(self") > 500
    assert "\ufffd" not in text
    assert "\x00" not in text
    assert 2.5 < data.unigram_loss < 4
    assert stdlib("b").fingerprint == data.fingerprint


def test_the_standard_library_is_read_by_its_own_encodings_and_without_its_tests(tmp_path, monkeypatch):
    root = tmp_path / "python"
    write(root / "latin.py", "# -*- coding: latin-1 -*-\nname = 'Löwis'\n".encode("latin-1"))
    write(root / "pkg" / "utf8.py", "name = 'Łukasz'\n" * 40)
    write(root / "pkg" / "__init__.py", "")
    for skipped in (
        "test/t.py",
        "pkg/tests/t.py",
        "site-packages/t.py",
        "lib2to3/t.py",
        "idlelib/t.py",
        "pkg/t.txt",
    ):
        write(root / skipped, "SKIPPED " * 99)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    config = DataConfig(source="stdlib", sequence_length=1, cache_dir=str(tmp_path / "cache"))
    data = make_data(config, seed=0, batch_size=2)
    text = b"".join(streams(data)).decode()
    assert text.startswith("# -*- coding: latin-1 -*-\nname = 'Löwis'\nname = 'Łukasz'")
    assert "SKIPPED" not in text
    assert "in 2 documents" in data.description


def test_a_python_without_source_files_says_what_to_use_instead(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "none")})
    with pytest.raises(DataError, match=r"no \.py files under .*none.*data\.source=text"):
        make_data(DataConfig(source="stdlib", cache_dir=str(tmp_path / "cache")), seed=0, batch_size=2)


def test_synthetic_text_has_the_asked_size_one_content_for_all_seeds_and_something_to_learn(tmp_path):
    def synthetic(cache: str, seed: int) -> Data:
        config = DataConfig(source="synthetic", synthetic_tokens=200_001, cache_dir=str(tmp_path / cache))
        return make_data(config, seed=seed, batch_size=8)

    data, other = synthetic("a", 0), synthetic("b", 1)
    assert data.train[0].num_tokens + data.validation[0].num_tokens == 200_001
    assert data.fingerprint == other.fingerprint
    first, second = (next(d.train_batches(0, 1))["tokens"] for d in (data, other))
    assert not np.array_equal(first, second)
    tokens = stream(data.train[0])
    before, after = tokens[:-1].tolist(), tokens[1:].tolist()
    pairs, singles = Counter(zip(before, after, strict=True)), Counter(before)
    conditional = -sum(n * math.log(n / singles[a]) for (a, _), n in pairs.items()) / pairs.total()
    assert conditional < data.unigram_loss - 1


# --- what is refused ---

UTF8_ERROR = ["bad.txt", "not UTF-8", "iconv"]

REFUSED_FILES = {
    "missing": (None, "bad.txt", ["data.paths", "bad.txt", "No such file", "Relative paths start at"]),
    "no match": (None, "*.none", ["data.paths", "*.none", "matches no file", "**"]),
    "folder without text": (b"x", "", ["data.paths", "in/", "holds no .txt or .md", "in/**/*"]),
    "empty": (b"", "bad.txt", ["data.paths", "bad.txt", "is empty", "leave it out"]),
    "only a mark": (b"\xef\xbb\xbf", "bad.txt", ["bad.txt", "is empty"]),
    "latin-1": (
        b"ok\nok\ncaf\xe9 !\n",
        "bad.txt",
        [*UTF8_ERROR, "0xe9", "line 3", "byte offset 9", "LATIN1"],
    ),
    "utf-16": ("hi\n".encode("utf-16"), "bad.txt", [*UTF8_ERROR, "line 1", "byte offset 0", "-f UTF-16"]),
    "after a mark": (b"\xef\xbb\xbfa\n\xff", "bad.txt", [*UTF8_ERROR, "0xff", "line 2", "byte offset 5"]),
    "cut short": (
        "ab\n€".encode()[:-1],
        "bad.txt",
        [*UTF8_ERROR, "line 2", "byte offset 3", "unexpected end"],
    ),
    "late": (b"x" * 5_000_000 + b"\n\xa0", "bad.txt", [*UTF8_ERROR, "line 2", "byte offset 5000001"]),
    "late, split by a read": (
        b"\n" * ((4 << 20) - 1) + b"\xe2\x82x",
        "bad.txt",
        [*UTF8_ERROR, "0xe2", "line 4194304", "byte offset 4194303"],
    ),
}


@pytest.mark.parametrize("case", REFUSED_FILES)
def test_a_bad_path_is_named_with_what_is_wrong_and_what_to_do(tmp_path, case):
    content, pattern, facts = REFUSED_FILES[case]
    if content is not None:
        write(tmp_path / "in" / (pattern or "note.rst"), content)
    good = write(tmp_path / "good.txt", "good " * 1000)
    messages = []
    for _ in range(2):  # the refusal itself is not cached
        with pytest.raises(DataError) as caught:
            text_data(tmp_path, good, tmp_path / "in" / pattern)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert [fact for fact in facts if fact not in messages[0]] == []
    assert caught.value.exit_code == 2
    assert cache_files(tmp_path) == []


def test_a_file_that_cannot_be_read_twice_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe is not a plain file"):
        text_data(tmp_path, tmp_path / "pipe")


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file that opens but cannot be read")
def test_an_unreadable_file_is_named_with_the_systems_reason(tmp_path):
    with pytest.raises(DataError, match=r"/proc/self/mem cannot be read \(Input/output error\)"):
        text_data(tmp_path, "/proc/self/mem")


@pytest.mark.parametrize(
    ("text", "fields", "facts"),
    [
        # 20 tokens with the end: 4 validate, 16 train: 3 windows of 5 + 1.
        ("x" * 19, {"batch_size": 4}, ["a.txt", "16 training tokens make 3 windows of 5 + 1", "needs 4"]),
        ("x", {}, ["a.txt", "make 0 windows", "train.global_batch_size=2"]),
        ("x" * 99, {"sequence_length": 128}, ["make 0 windows of 128 + 1", "data.sequence_length"]),
        (
            "x" * 99,
            {"validation_fraction": 0.05},
            [
                "a.txt",
                "5 validation tokens make 0 windows of 5 + 1",
                "1 is needed",
                "data.validation_fraction=0.05",
            ],
        ),
    ],
    ids=["fewer rows than a batch", "one token", "long windows", "small validation share"],
)
def test_too_little_text_is_refused_with_rows_found_and_needed(tmp_path, text, fields, facts):
    with pytest.raises(DataError) as caught:
        text_data(tmp_path, write(tmp_path / "a.txt", text), **fields)
    assert [fact for fact in facts if fact not in str(caught.value)] == []


def test_exactly_one_batch_of_windows_is_enough(tmp_path):
    data = text_data(tmp_path, write(tmp_path / "a.txt", "x" * 29), batch_size=4)  # 24 train, 6 validate
    assert (data.num_train_windows, data.num_validation_windows) == (4, 1)
    assert len(list(data.train_batches(0, 3))) == 3


def test_a_batch_that_processes_cannot_share_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"train\.global_batch_size=4 .* 3 processes.*multiple of 3"):
        numbered(tmp_path, batch_size=4, process_count=3)


def test_a_cache_directory_that_cannot_be_written_is_refused(tmp_path):
    blocker = write(tmp_path / "file", "in the way")
    with pytest.raises(DataError, match=r"data\.cache_dir.*file/cache.*Not a directory.*Set data\.cache_dir"):
        numbered(tmp_path, cache_dir=str(blocker / "cache"))


# --- the cache ---


def test_tokens_come_from_the_cache_until_a_file_changes(tmp_path):
    first = numbered(tmp_path)
    file = tmp_path / "n.txt"
    stat = file.stat()
    changed = file.read_text().replace("0003", "9999")
    file.write_text(changed)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as if untouched
    assert text_data(tmp_path, file).fingerprint == first.fingerprint
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    second = text_data(tmp_path, file)
    assert second.fingerprint != first.fingerprint
    assert b"9999" in streams(second)[0]


def test_the_fingerprint_tells_splits_and_windows_apart(tmp_path):
    variants = [numbered(tmp_path, **f) for f in ({}, {"sequence_length": 4}, {"validation_fraction": 0.3})]
    assert len({data.fingerprint for data in variants}) == 3
    assert numbered(tmp_path, seed=5, batch_size=4).fingerprint == variants[0].fingerprint


def truncate(file: Path):
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path):
    content = bytearray(file.read_bytes())
    content[-7] ^= 1
    file.write_bytes(content)


def grow(file: Path):
    file.write_bytes(file.read_bytes() + b"\0\0")


def change_the_loss(file: Path):
    content = json.loads(file.read_text())
    content["record"]["unigram_loss"] += 0.25
    file.write_text(json.dumps(content))


DAMAGES = {
    "training tokens cut short": ("*-train-tokens.npy", truncate),
    "training tokens altered": ("*-train-tokens.npy", flip_a_bit),
    "training tokens empty": ("*-train-tokens.npy", lambda file: file.write_bytes(b"")),
    "training tokens gone": ("*-train-tokens.npy", Path.unlink),
    "training documents altered": ("*-train-documents.npy", flip_a_bit),
    "validation tokens altered": ("*-validation-tokens.npy", flip_a_bit),
    "record cut short": ("*.json", truncate),
    "record empty": ("*.json", lambda file: file.write_bytes(b"")),
    "record altered": ("*.json", change_the_loss),
    "record of something else": ("*.json", lambda file: file.write_text("[1]")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_noticed_and_written_anew(tmp_path, damage):
    pattern, spoil = DAMAGES[damage]
    data = numbered(tmp_path)
    expected = data.fingerprint, data.unigram_loss, row_ids(data.train_batches(0, 10))
    del data
    (file,) = cache_files(tmp_path, pattern)
    spoil(file)
    with pytest.warns(UserWarning, match=rf"token cache .* is damaged.*{file.name}"):
        mended = numbered(tmp_path)
    assert (mended.fingerprint, mended.unigram_loss, row_ids(mended.train_batches(0, 10))) == expected
    numbered(tmp_path)  # a second warning would be an error
    assert len(cache_files(tmp_path)) == 5


@pytest.mark.parametrize("failing", range(5))
def test_a_write_that_fails_leaves_nothing_behind_and_the_next_one_succeeds(tmp_path, monkeypatch, failing):
    replace, calls = os.replace, []

    def full(source, target):
        calls.append(target)
        if len(calls) > failing:
            raise OSError(28, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(DataError, match=r"data\.cache_dir.*No space left on device"):
            numbered(tmp_path)
    assert len(cache_files(tmp_path)) == failing
    assert cache_files(tmp_path, "*.tmp") == []
    assert numbered(tmp_path).num_train_windows == 20


def test_builders_at_work_on_one_cache_do_not_disturb_each_other(tmp_path):
    file = write(tmp_path / "n.txt", "".join(f"{i:04d} " for i in range(9999)))
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: text_data(tmp_path, file), range(8)))
    assert len({data.fingerprint for data in built}) == 1
    assert len(cache_files(tmp_path)) == 5
    orders = [row_ids(data.train_batches(0, 20)) for data in built]
    assert all(order == orders[0] for order in orders)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"XDG_CACHE_HOME": "{tmp}/xdg"}, "xdg/jzero"),
        ({"XDG_CACHE_HOME": "", "HOME": "{tmp}/home"}, "home/.cache/jzero"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "{tmp}/home"}, "home/.cache/jzero"),
    ],
    ids=["XDG", "home", "relative XDG is ignored"],
)
def test_the_default_cache_is_the_users(tmp_path, monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    numbered(tmp_path, cache_dir=None)
    assert len(list((tmp_path / expected).iterdir())) == 5


def test_a_relative_cache_stays_where_it_was_when_the_program_changes_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = numbered(tmp_path, cache_dir="cache")
    monkeypatch.chdir("/")
    assert data.train[0].stream.tokens.path == tmp_path / "cache" / data.train[0].stream.tokens.path.name
