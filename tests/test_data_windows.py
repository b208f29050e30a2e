"""Windows within documents and losses on answers: against the same, token by token."""

import jax.numpy as jnp
import numpy as np
import pytest
from corpora import load, make_source, write_jsonl
from flax import nnx

from jzero.config import ModelConfig
from jzero.data.windows import Windows
from jzero.errors import DataError
from jzero.loss import cross_entropy
from jzero.models import build_model
from jzero.trainer import language_model_loss

FIELDS = {"prompt_field": "prompt", "answer_field": "answer"}


def expected(part: Windows, weighted: bool, within: bool) -> list[dict[str, list]]:
    """Each window by walking over its tokens one by one."""
    tokens = part.stream.tokens.open().tolist()
    starts, counted_from = part.stream.documents.open().tolist()
    owner = []
    for document, (start, stop) in enumerate(zip(starts, [*starts[1:], len(tokens)], strict=True)):
        owner += [document] * (stop - start)
    rows = []
    for i in range(len(part)):
        places = range(i * part.sequence_length, (i + 1) * part.sequence_length)
        row = {"tokens": [tokens[t] for t in (*places, places.stop)]}
        if weighted:
            row["weights"] = [t + 1 >= counted_from[owner[t + 1]] for t in places]
        if within:
            row["weights"] = [w and owner[t] == owner[t + 1] for w, t in zip(row["weights"], places, strict=True)]
            row["segments"] = [1 + owner[t] - owner[places[0]] for t in places]
            row["positions"] = [t - max(starts[owner[t]], places[0]) for t in places]
        rows.append(row)
    return rows


@pytest.mark.parametrize("kind", ["text", "answers"])
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("length", [1, 3, 12, 200])
def test_windows_are_marked_as_a_walk_over_the_tokens_says(tmp_path, kind, within, length):
    fields = {"document_attention": within, "sequence_length": length}
    data = load(tmp_path, make_source(kind, tmp_path / "in") | fields)
    for part in (*data.train, *data.validation):
        rows = [{name: array.tolist() for name, array in part[i].items()} for i in range(len(part))]
        assert rows == expected(part, kind == "answers" or within, within)


def test_the_tail_that_validates_keeps_the_documents_and_what_counts(tmp_path):
    """One document alone: its answer is cut in two."""
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p" * 30, "answer": "a" * 69}])
    for fraction, trained, validated in ((0.2, 50, 20), (0.65, 5, 65)):
        data = load(
            tmp_path,
            {"source": "jsonl", "paths": [str(file)], **FIELDS, "validation_fraction": fraction, "sequence_length": 1},
        )
        parts = *data.train, *data.validation
        assert [part.stream.num_counted for part in parts] == [trained, validated]
        weights = [part[i]["weights"][0] for part in parts for i in range(len(part))]
        text = [part[i]["tokens"][1] for part in parts for i in range(len(part))]
        assert weights == [token != ord("p") for token in text]
        assert f"the loss counts {trained + validated} tokens" in data.description


def test_batches_carry_marks_only_where_they_say_something(tmp_path):
    keys = {
        (kind, within): set(next(load(tmp_path, make_source(kind, tmp_path / kind) | w).train_batches(0, 1)))
        for kind in ("text", "answers")
        for within, w in ((False, {}), (True, {"document_attention": True}))
    }
    assert keys["text", False] == {"tokens"}
    assert keys["answers", False] == {"tokens", "weights"}
    assert keys["text", True] == keys["answers", True] == {"tokens", "weights", "segments", "positions"}


def test_the_unigram_baseline_is_of_the_answers_alone(tmp_path):
    rows = [{"prompt": "p" * 40, "answer": "ab" * 5} for _ in range(40)]
    fields = {"source": "jsonl", "paths": [str(write_jsonl(tmp_path / "a.jsonl", rows))], **FIELDS}
    data = load(tmp_path, {**fields, "sequence_length": 2})
    train, validation = data.train[0].stream, data.validation[0].stream
    documents = len(train.documents.open()[0])
    assert train.num_counted == 11 * documents
    counts = np.array([5 * documents, 5 * documents, documents])
    loss = -(np.array([5, 5, 1]) * np.log((counts + 1) / (11 * documents + 257))).sum() / 11
    assert validation.num_counted % 11 == 0
    assert data.unigram_loss == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize("dtype", [bool, np.float32])
def test_the_loss_counts_what_the_weights_say_and_tells_the_model_the_places(dtype):
    draw = np.random.default_rng(0)
    table = jnp.asarray(draw.normal(size=(30, 30)), jnp.float32)
    tokens = jnp.asarray(draw.integers(0, 30, (4, 9)), jnp.int32)
    places = {"segments": tokens[:, :-1], "positions": tokens[:, 1:]}
    weights = jnp.asarray(draw.integers(0, 2, (4, 8)).astype(dtype))
    seen = []

    def model(tokens, **places):
        seen.append(places)
        return table[tokens]

    loss = language_model_loss(model, {"tokens": tokens, "weights": weights, **places})
    assert seen[0].keys() == {"segments", "positions"}
    plain = language_model_loss(model, {"tokens": tokens})
    assert seen[1] == {}
    by_hand = cross_entropy(table[tokens[:, :-1]], tokens[:, 1:], weights.astype(jnp.float32))
    assert (float(loss.total), float(loss.weight)) == (float(by_hand.total), float(by_hand.weight))
    assert float(loss.weight) < float(plain.weight) == 32


def test_within_documents_a_window_is_worth_what_its_documents_are_alone(tmp_path):
    fields = make_source("answers", tmp_path / "in") | {"sequence_length": 90, "document_attention": True}
    (batch,) = load(tmp_path, fields, batch_size=1).train_batches(0, 1)
    (row,), (segments,), (weights,) = batch["tokens"], batch["segments"], batch["weights"]
    config = ModelConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, scan_layers=False, remat="none")
    model = build_model(config, vocab_size=257)(nnx.Rngs(0))
    total = nnx.jit(lambda model, batch: language_model_loss(model, batch).total)
    whole, alone = float(total(model, batch)), []
    for segment in range(1, segments[-1] + 1):
        inside = np.flatnonzero(segments == segment)
        tokens = row[None, inside[0] : inside[-1] + 2]
        alone.append(float(total(model, {"tokens": tokens, "weights": weights[None, inside]})))
    assert len(alone) > 1
    assert whole == pytest.approx(sum(alone), rel=1e-5)
    leaking = float(total(model, {name: batch[name] for name in ("tokens", "weights")}))
    assert abs(leaking - whole) > 1e-4 * whole


def test_data_without_any_counted_target_is_refused(tmp_path):
    """The answers all lie in the training part's prompts."""
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p" * 98, "answer": "a"}])
    fields = {"source": "jsonl", "paths": [str(file)], **FIELDS, "sequence_length": 4, "validation_fraction": 0.1}
    with pytest.raises(DataError, match=r"the loss counts none of 90 training tokens"):
        load(tmp_path, fields)
