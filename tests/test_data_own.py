"""The caller's own data: Grain datasets and functions, from any sample on, and what is refused of them."""

import io

import grain
import numpy as np
import pytest
from rich.console import Console

from jzero.config import Config, make_config
from jzero.data import OwnData
from jzero.data.tokenizer import ByteTokenizer
from jzero.errors import CheckpointError, ConfigError, DataError
from jzero.manifest import complete_steps
from jzero.trainer import run_training

CONFIG = Config(data={"sequence_length": 8}, model={"vocab_size": 300})


def sample(index: int) -> dict[str, np.ndarray]:
    return {"tokens": np.arange(index, index + 9, dtype=np.int32)}


def batch(start: int, rows: int = 4) -> dict[str, np.ndarray]:
    return {"tokens": np.stack([sample(i)["tokens"] for i in range(start, start + rows)])}


def endless(start: int):
    return (batch(at % 200) for at in range(start, 10**9, 4))


KINDS = {
    "map": lambda: grain.MapDataset.range(20).shuffle(seed=1).map(sample),
    "map without end": lambda: grain.MapDataset.range(20).shuffle(seed=1).map(sample).repeat(),
    "iter": lambda: grain.MapDataset.range(20).shuffle(seed=1).map(sample).repeat().to_iter_dataset(),
    "function": lambda: endless,
}


def first_tokens(batches) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch["tokens"]]


@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_goes_on_from_any_sample(kind):
    feed = OwnData(KINDS[kind]()).batched(CONFIG, 4)
    straight = first_tokens(feed.train_batches(0, 12))
    assert len(straight) == 48
    if kind != "function":
        assert sorted(straight[:20]) == sorted(straight[20:40]) == list(range(20))
        assert straight[:20] != straight[20:40] != list(range(20))
    for step in (1, 5, 11):
        assert first_tokens(feed.train_batches(4 * step, 12 - step)) == straight[4 * step :]
    if kind != "function":  # whose batches are its own affair
        assert first_tokens(OwnData(KINDS[kind]()).batched(CONFIG, 8).train_batches(8, 2)) == straight[8:24]


def test_leaving_early_closes_what_was_opened():
    closed = []

    def batches(start):
        try:
            yield from endless(start)
        finally:
            closed.append(start)

    feed = OwnData(batches).batched(CONFIG, 4).train_batches(8, 5)
    next(feed)
    feed.close()
    assert closed == [8]


@pytest.mark.parametrize(("size", "seen"), [(10, 8), (4, 4), (3, 4)])
def test_validation_by_a_finite_map_shows_no_sample_twice_if_there_are_enough(size, seen):
    own = OwnData(endless, grain.MapDataset.range(size).map(sample))
    assert len(first_tokens(own.batched(CONFIG, 4).validation_batches(100))) == seen


BAD = {
    "ends early": (lambda start: [batch(0), batch(4)], r"ended after 2 batches from sample 0, .* needs 3: .* by 1"),
    "empty map": (grain.MapDataset.range(0), "ended after 0 batches"),
    "short iter": (grain.MapDataset.range(7).map(sample).to_iter_dataset(), "ended after 1 batches"),
    "rows": (lambda start: [batch(0, 3)], r"batch 1 from sample 0 holds tokens int32 \[3, 9\].*want int32 \[4, 9\]"),
    "int64": (lambda start: [{"tokens": batch(0)["tokens"].astype(np.int64)}], r"int64 \[4, 9\].*want int32"),
    "no dict": (lambda start: [batch(0)["tokens"]], r"is a ndarray: it must be a dict with tokens, int32 \[4, 9\]"),
    "no tokens": (lambda start: [{"x": 1}], "has x: it must be a dict with tokens"),
    "large id": (lambda start: [batch(295)], r"holds token id 306: the vocabulary has 300 ids"),
    "negative id": (lambda start: [batch(-1)], "holds token id -1"),
}


@pytest.mark.parametrize("case", BAD)
def test_data_that_cannot_be_trained_on_is_refused_in_words(case):
    given, told = BAD[case]
    with pytest.raises(DataError, match=told):
        list(OwnData(given).batched(CONFIG, 4).train_batches(0, 3))


def test_validation_without_a_batch_is_refused_and_none_is_none():
    with pytest.raises(DataError, match=r"holds no batch of train\.global_batch_size=4 rows"):
        list(OwnData(endless, lambda start: []).batched(CONFIG, 4).validation_batches(2))
    assert list(OwnData(endless).batched(CONFIG, 4).validation_batches(2)) == []


def test_the_vocabulary_is_the_tokenizers_or_the_models():
    assert OwnData(endless, tokenizer=ByteTokenizer()).batched(Config(), 4).vocab_size == 257
    assert OwnData(endless).batched(CONFIG, 4).vocab_size == 300
    with pytest.raises(ConfigError, match=r"model\.vocab_size = null: the data brings no tokenizer along"):
        OwnData(endless).batched(Config(), 4)


def test_a_run_on_own_data_stops_and_goes_on_at_its_sample(tmp_path):
    """Also with no validation, no tokenizer and a changed fingerprint."""
    starts = []

    def batches(start):
        starts.append(start)
        return ({"tokens": batch(at % 64, 8)["tokens"] % 32} for at in range(start, 10**9, 8))

    def run(steps: int, **fields) -> str:
        config = make_config(
            {
                "model": {
                    "hidden_size": 16,
                    "num_hidden_layers": 1,
                    "num_attention_heads": 2,
                    "vocab_size": 32,
                    "scan_layers": False,
                    "remat": "none",
                },
                "data": {"sequence_length": 8},
                "zero": {"stage": 0},
                "optimizer": {"warmup_steps": 0},
                "train": {"num_steps": steps, "global_batch_size": 8, "run_dir": str(tmp_path / "run")},
                "log": {"tensorboard": False},
            }
        )
        out = io.StringIO()
        assert run_training(config, Console(file=out, width=100), data=OwnData(batches, **fields)) == 0
        return out.getvalue()

    printed = run(3)
    assert "validation loss" not in printed
    assert "data of the caller's" in printed
    assert "unigram" not in printed
    run(5)
    assert starts == [0, 24]
    assert complete_steps(tmp_path / "run" / "checkpoints")[5].record["next_sample"] == 40
    with pytest.raises(CheckpointError, match=r"the data that .* was trained on has changed"):
        run(7, fingerprint="other")
