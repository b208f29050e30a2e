"""tokenizer.json of any kind: the tokens are its own, documents end with its token, its traps are refused."""

import json

import numpy as np
import pytest
from corpora import END, load, make_source, make_tokenizer, texts
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from jzero.data import read_tokenizer
from jzero.data.encode import encode
from jzero.errors import DataError


def token_documents(data) -> list[list[int]]:
    found = []
    for part in (*data.train, *data.validation):
        found += np.split(part.stream.tokens.open(), part.stream.documents.open()[0][1:])
    return sorted(document.tolist() for document in found)


@pytest.mark.parametrize("kind", ["text", "jsonl", "datasets"])
def test_documents_are_tokenised_whole_and_end_with_the_tokenizers_token(tmp_path, kind):
    path = make_tokenizer(tmp_path / "tokenizer.json")
    own = Tokenizer.from_file(str(path))
    expected = sorted([*own.encode(text).ids, own.token_to_id(END)] for text in texts())
    data = load(tmp_path, make_source(kind, tmp_path / "in") | {"tokenizer": str(path)})
    assert token_documents(data) == expected
    assert sum(map(len, expected)) < 0.8 * sum(len(text.encode()) + 1 for text in texts())  # it merges
    assert data.vocab_size == 300
    assert data.train[0].stream.tokens.dtype == "uint16"


def test_a_text_file_read_in_pieces_is_tokenised_as_one(tmp_path):
    """The file is longer than a read, and one of its a's is the last of that read."""
    text = "ab" * (1 << 21) + "abab"
    (tmp_path / "a.txt").write_text("x" + text)
    model = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "x": 3, "</s>": 4}, [("a", "b")]))
    model.save(str(tmp_path / "tokenizer.json"))
    fields = {"source": "text", "paths": [str(tmp_path / "a.txt")], "tokenizer": str(tmp_path / "tokenizer.json")}
    data = load(tmp_path, fields)
    ids = np.concatenate([part.stream.tokens.open() for part in (*data.train, *data.validation)])
    assert ids.tolist() == [3, *[2] * (len(text) // 2), 4]


def test_documents_come_in_order_whatever_the_batches_they_are_tokenised_in(monkeypatch, tmp_path):
    monkeypatch.setattr("jzero.data.encode._BATCH_CHARACTERS", 100)
    monkeypatch.setattr("jzero.data.encode._BATCH_DOCUMENTS", 3)
    tokenizer = read_tokenizer(make_tokenizer(tmp_path / "tokenizer.json"))
    from jzero.data.documents import Piece, failing

    def documents():
        for i, text in enumerate(texts()):
            yield (
                failing(DataError(str(i)))
                if i % 7 == 3
                else iter([Piece("ask ", False), Piece(text[:5]), Piece(text[5:])])
            )

    seen = []
    for i, document in enumerate(encode(documents(), tokenizer)):
        if i % 7 == 3:
            with pytest.raises(DataError, match=rf"^{i}$"):
                list(document)
            continue
        prompt, answer, end = document
        assert (prompt.counted, answer.counted, end.counted) == (False, True, True)
        assert tokenizer.decode(prompt.ids) == "ask "
        assert end.ids.tolist() == [tokenizer.end_of_document]
        seen.append(tokenizer.decode(answer.ids))
    assert seen == [text for i, text in enumerate(texts()) if i % 7 != 3]


def test_truncation_padding_and_templates_in_the_file_leave_documents_alone(tmp_path):
    path = make_tokenizer(tmp_path / "tokenizer.json")
    plain = load(tmp_path, make_source("jsonl", tmp_path) | {"tokenizer": str(path)})
    own = Tokenizer.from_file(str(path))
    own.enable_truncation(5)
    own.enable_padding(length=64)
    own.post_processor = processors.TemplateProcessing(f"{END} $A", special_tokens=[(END, own.token_to_id(END))])
    own.save(str(tmp_path / "other.json"))
    other = load(tmp_path, make_source("jsonl", tmp_path) | {"tokenizer": str(tmp_path / "other.json")})
    assert token_documents(other) == token_documents(plain)
    assert other.fingerprint != plain.fingerprint  # it is another tokenizer, for all that


def test_text_goes_there_and_back(tmp_path):
    tokenizer = read_tokenizer(make_tokenizer(tmp_path / "tokenizer.json"))
    for text in (*texts(), "", "a\x00\r\n\tb", "grüße 漢字 🎈"):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.end_of_document, -1, 10**6]) == END
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


@pytest.mark.parametrize("token", ["</s>", "<|endoftext|>", "<eos>", "[EOS]", "<|end_of_text|>"])
def test_the_end_of_document_is_found(tmp_path, token):
    path = make_tokenizer(tmp_path / "tokenizer.json", special=("<unk>", token, "<pad>"))
    tokenizer = read_tokenizer(path)
    assert tokenizer.decode([tokenizer.end_of_document]) == token


def test_the_end_of_document_is_named(tmp_path):
    path = make_tokenizer(tmp_path / "tokenizer.json", special=("</s>", "<stop>", END))
    tokenizer = read_tokenizer(path, "<stop>")
    assert tokenizer.end_of_document == 1


@pytest.mark.parametrize(
    ("special", "named", "told"),
    [
        ((), None, "no end of document is in its vocabulary of 300"),
        (("<pad>", "<x>"), None, r"Set data\.end_token; its special tokens: <pad>, <x>\."),
        (("</s>", END), None, r"<\|endoftext\|> and </s> could each end a document"),
        ((END,), "<end>", r"data\.end_token=<end> is not in its vocabulary of 300\. .*special tokens: <\|endoftext\|>"),
    ],
    ids=["none", "others", "two", "not there"],
)
def test_an_end_of_document_that_is_not_plain_is_asked_for(tmp_path, special, named, told):
    path = make_tokenizer(tmp_path / "tokenizer.json", special=special)
    with pytest.raises(DataError, match=told):
        read_tokenizer(path, named)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, r"cannot be read \(No such file or directory\)\. .* set data\.tokenizer=bytes"),
        (b"{}", "is no tokenizer.json: "),
        (b"\xff", "is no tokenizer.json: "),
        (json.dumps({"version": "1.0"}).encode(), "is no tokenizer.json: "),
    ],
    ids=["missing", "an object", "bytes", "half"],
)
def test_what_is_no_tokenizer_is_refused(tmp_path, content, told):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=told) as caught:
        read_tokenizer(path)
    assert f"data.tokenizer={path}" in str(caught.value)


@pytest.mark.parametrize("package", ["tokenizers", "datasets", "zstandard"])
def test_a_package_that_is_not_there_is_named_with_how_to_get_it(tmp_path, monkeypatch, package):
    path = make_tokenizer(tmp_path / "tokenizer.json")
    fields = {
        "tokenizers": lambda: make_source("text", tmp_path / "in") | {"tokenizer": str(path)},
        "datasets": lambda: make_source("datasets", tmp_path / "in"),
        "zstandard": lambda: {"source": "text", "paths": [str(tmp_path / "a.txt.zst")]},
    }[package]()
    (tmp_path / "a.txt.zst").write_bytes(b"x")
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(DataError, match=rf"needs the package {package}.*pip install 'jzero\[data\]'"):
        load(tmp_path, fields)


def test_ids_of_another_vocabulary_are_refused(tmp_path):
    """Made with the byte tokenizer's 257 ids, read with a vocabulary of 100."""
    fields = make_source("tokens", tmp_path) | {"tokenizer": None}
    with pytest.raises(
        DataError, match=r"holds id \d+ at token .* vocabulary has 100 ids.*set data\.tokenizer to the one"
    ):
        load(tmp_path, fields, vocab_size=100)


def test_the_same_text_under_another_tokenizer_is_other_data(tmp_path):
    path = make_tokenizer(tmp_path / "tokenizer.json")
    other = make_tokenizer(tmp_path / "other.json", size=280)
    fingerprints = {
        load(tmp_path, make_source("jsonl", tmp_path) | fields).fingerprint
        for fields in ({}, {"tokenizer": str(path)}, {"tokenizer": str(other)})
    }
    assert len(fingerprints) == 3


def test_a_pre_tokeniser_that_looks_around_is_not_cut_short(tmp_path):
    """Tokens by white space: a document in pieces gives what the whole would."""
    words = {"<eos>": 0, "one": 1, "two": 2, "[UNK]": 3, "onetwo": 4}
    model = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "t.json"))
    tokenizer = read_tokenizer(tmp_path / "t.json")
    from jzero.data.documents import Piece

    (document,) = encode(iter([iter([Piece("one one"), Piece("two two")])]), tokenizer)
    assert [ids.ids.tolist() for ids in document] == [[1, 4, 2], [0]]
