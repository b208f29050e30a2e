"""Any source, any split of the work: one global sequence of samples. And mixtures: whose turn it is."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import grain
import numpy as np
import pytest
from corpora import load, make_source

from jzero.config import Config, TrainConfig, load_config, plan_batch
from jzero.data import Batch, Feed, OwnData
from jzero.data.windows import MixingOrder

SAMPLES, SHARDS = 96, 2
KINDS = ("text", "jsonl", "answers", "tokens", "datasets", "synthetic", "mixture", "own map", "own iter")


def samples(batches: Iterable[Batch]) -> list[bytes]:
    """A hash of each row, over all that belongs to it."""
    return [
        hashlib.sha256(b"".join(name.encode() + batch[name][row].tobytes() for name in sorted(batch))).digest()
        for batch in batches
        for row in range(len(batch["tokens"]))
    ]


def own(index: int) -> dict[str, np.ndarray]:
    return {"tokens": np.arange(index, index + 9, dtype=np.int32), "weights": np.arange(8) > index % 3}


def feed(kind: str, folder, *, batch: dict, processes: int = 1, index: int = 0, workers: int = 0) -> Feed:
    """The data of a run with those fields of the config's train section."""
    size = plan_batch(TrainConfig(**batch), SHARDS).global_batch_size
    if kind.startswith("own"):
        config = Config(data={"sequence_length": 8, "num_workers": workers}, model={"vocab_size": 300})
        samples = grain.MapDataset.range(50).shuffle(seed=3).map(own)
        given = samples if kind == "own map" else samples.repeat().to_iter_dataset()
        return OwnData(given).batched(config, size, index, processes)
    fields = make_source(kind, folder / kind) | {"num_workers": workers}
    return load(folder, fields, batch_size=size, process_index=index, process_count=processes)


def consume(kind: str, folder, *, start=0, stop=SAMPLES, processes=1, workers=0, **batch) -> list[bytes]:
    """The samples from `start` to `stop`, in the order in which a run takes them."""
    batch = batch or {"global_batch_size": 8}
    size = plan_batch(TrainConfig(**batch), SHARDS).global_batch_size
    shares = [
        samples(
            feed(kind, folder, batch=batch, processes=processes, index=index, workers=workers).train_batches(
                start, (stop - start) // size
            )
        )
        for index in range(processes)
    ]
    rows = size // processes
    return [row for at in range(0, stop - start, size) for share in shares for row in share[at // processes :][:rows]]


ARMS = {
    "processes": [{"processes": 4}],
    "workers": [{"workers": 2, "start": 8}],
    "larger batches": [{"stop": 32}, {"start": 32, "global_batch_size": 16}],
    "any batch": [{"stop": 36, "global_batch_size": 12}, {"start": 36, "global_batch_size": 2, "processes": 2}],
    "resumed at each step": [{"start": at, "stop": at + 8} for at in range(0, SAMPLES, 8)],
    "accumulation": [{"stop": 48, "global_batch_size": 8, "accumulation_steps": 4}, {"start": 48}],
    "micro-batches": [{"stop": 32, "micro_batch_size": 1}, {"start": 32, "micro_batch_size": 2}],
}
# Workers see windows, whatever the source. The mixture has every sort of window, so the others wait for the slow tests.
CASES = [
    pytest.param(kind, arm, marks=pytest.mark.slow if arm == "workers" and kind != "mixture" else ())
    for kind in KINDS
    for arm in ARMS
]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    return tmp_path_factory.mktemp("corpora")


@pytest.fixture(scope="module")
def straight(corpora):
    return {kind: consume(kind, corpora) for kind in KINDS}


def test_the_sequences_compared_below_differ_from_each_other_and_within(straight):
    assert straight["text"] == straight["jsonl"] == straight["tokens"] == straight["datasets"]
    assert straight["own map"] == straight["own iter"]
    assert len({tuple(sequence) for sequence in straight.values()}) == 5
    for sequence in straight.values():
        assert len(sequence) == SAMPLES
        assert len(set(sequence)) > 48


@pytest.mark.parametrize(("kind", "arm"), CASES)
def test_however_a_run_is_cut_up_it_sees_one_sequence(corpora, straight, kind, arm):
    seen = [row for leg in ARMS[arm] for row in consume(kind, corpora, **leg)]
    first, last = ARMS[arm][0].get("start", 0), ARMS[arm][-1].get("stop", SAMPLES)
    assert seen == straight[kind][first:last]


def test_each_part_of_a_mixture_shows_its_windows_once_an_epoch_in_its_own_order(corpora):
    data = load(corpora, make_source("mixture", corpora / "mixture") | {"sequence_length": 40}, batch_size=8)
    by_part = [
        [samples([{k: v[None] for k, v in part[i].items()}])[0] for i in range(len(part))] for part in data.train
    ]
    seen = samples(data.train_batches(0, 200))
    owner = {row: part for part, rows in enumerate(by_part) for row in rows}
    for part, rows in enumerate(by_part):
        shown = [row for row in seen if owner[row] == part]
        epochs = [tuple(shown[at : at + len(rows)]) for at in range(0, len(shown) - len(rows), len(rows))]
        assert len(epochs) > 1
        assert len(set(epochs)) == len(epochs)
        assert all(sorted(epoch) == sorted(rows) for epoch in epochs)


def test_validation_of_a_mixture_shows_no_window_twice(corpora):
    data = feed("mixture", corpora, batch={"global_batch_size": 8})
    seen = samples(data.validation_batches(10**6))
    assert len(seen) == len(set(seen)) >= 8
    assert seen == samples(data.validation_batches(10**6))


@pytest.mark.parametrize("weights", [(1,), (3, 1), (1, 1, 1), (0.5, 0.2, 0.29, 0.01), (1e-6, 1), (1, 2, 4, 8, 16)])
@pytest.mark.parametrize("seed", [0, 7])
def test_parts_take_turns_by_weight_over_every_stretch(weights, seed):
    order = MixingOrder(weights, seed)
    counts = [0] * len(weights)
    for sample in range(2000):
        part, index = order.locate(sample)
        assert index == counts[part], "no sample of a part is left out or comes twice"
        counts[part] += 1
        assert counts == order.count(sample + 1)
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - (sample + 1) * weight / sum(weights)) < 2.5
    far = 10**15
    assert sum(order.count(far)) == far
    part, index = order.locate(far)
    assert index == order.count(far)[part]
    assert order.count(far) == pytest.approx([far * weight / sum(weights) for weight in weights], abs=3)


def test_the_seed_shifts_the_turns_of_a_mixture():
    turns = [[MixingOrder((3, 2, 1), seed).locate(i)[0] for i in range(60)] for seed in (0, 0, 1)]
    assert turns[0] == turns[1] != turns[2]


def test_a_batch_of_a_mixture_marks_each_row_alike(corpora):
    (batch,) = feed("mixture", corpora, batch={"global_batch_size": 8}).train_batches(0, 1)
    assert {name: (array.dtype.name, array.shape) for name, array in batch.items()} == {
        "tokens": ("int32", (8, 9)),
        "weights": ("bool", (8, 8)),
        "segments": ("int32", (8, 8)),
        "positions": ("int32", (8, 8)),
    }


CHANGES = {
    "weight": lambda fields: fields["mixture"][0].update(weight=2),
    "order of the parts": lambda fields: fields["mixture"].reverse(),
    "one part less": lambda fields: fields["mixture"].pop(),
    "attention": lambda fields: fields.update(document_attention=False),
    "windows": lambda fields: fields.update(sequence_length=9),
    "split": lambda fields: fields.update(validation_fraction=0.3),
    "what is counted": lambda fields: fields["mixture"][1].update(prompt_field="answer", answer_field="prompt"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_fingerprint_changes_with_tokens_windows_and_order(corpora, change):
    fields = make_source("mixture", corpora / "mixture")
    before = load(corpora, fields).fingerprint
    assert load(corpora, fields, seed=4, batch_size=4).fingerprint == before
    CHANGES[change](fields)
    assert load(corpora, fields).fingerprint != before


def test_the_mixture_in_the_readme_is_one(tmp_path):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (block,) = re.findall(r"^```yaml\n(data:.*?)^```$", readme, re.M | re.S)
    (tmp_path / "config.yaml").write_text(block)
    data = load_config(tmp_path / "config.yaml").data
    assert [part.weight for part in data.sources] == [0.7, 0.3]
