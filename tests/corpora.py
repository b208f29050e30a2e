"""Small corpora on the disk, one a kind of source, for the tests of data."""

import gzip
import json
from pathlib import Path

import numpy as np

from jzero.config import DataConfig
from jzero.data import Data, make_data

END = "<|endoftext|>"


def texts(first: int = 0) -> list[str]:
    """40 documents of different lengths, each unlike the others."""
    return [f"{i} é " + " ".join(f"{i * 7 + j}" for j in range(3 + i * 5 % 17)) for i in range(first, first + 40)]


def write_jsonl(path: Path, rows: list) -> Path:
    """Objects as JSON lines; bytes as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    content = b"\n".join(lines) + b"\n"
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def make_tokenizer(path: Path, *, special: tuple[str, ...] = (END,), size: int = 300) -> Path:
    """A byte-level BPE, trained on the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.save(str(path))
    return path


def make_source(kind: str, folder: Path, first: int = 0) -> dict:
    """The fields of a config for a source of that kind, whose files are written to `folder`.

    All but `synthetic` and `mixture` hold `texts(first)`, `answers` as answers to prompts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    documents = texts(first)
    match kind:
        case "text":
            for i, text in enumerate(documents):
                (folder / f"{i:02d}.txt").write_text(text)
            return {"source": "text", "paths": [str(folder)]}
        case "jsonl":
            return {"source": "jsonl", "paths": [str(write_jsonl(folder / "a.jsonl", as_rows("text", documents)))]}
        case "answers":
            file = write_jsonl(folder / "b.jsonl.gz", as_rows("answer", documents))
            return {"source": "jsonl", "paths": [str(file)], "prompt_field": "prompt", "answer_field": "answer"}
        case "tokens":
            pieces = [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in documents]
            ids = np.concatenate([np.append(piece, np.uint16(256)) for piece in pieces])
            ids.tofile(folder / "c.bin")
            return {"source": "tokens", "paths": [str(folder / "c.bin")]}
        case "datasets":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(as_rows("text", documents)), folder / "d.parquet")
            return {"source": "datasets", "paths": [str(folder / "d.parquet")]}
        case "synthetic":
            return {"source": "synthetic", "synthetic_tokens": 2000}
    parts = [("text", 3), ("answers", 1.25), ("tokens", 0.4)]
    mixture = [
        {**make_source(part, folder / part, first=1000 * n), "weight": weight} for n, (part, weight) in enumerate(parts)
    ]
    return {"source": "mixture", "mixture": mixture, "document_attention": True}


def as_rows(name: str, documents: list[str]) -> list[dict[str, str]]:
    return [{"prompt": f"ask {i}? ", name: text} for i, text in enumerate(documents)]


def load(
    folder: Path, fields: dict, *, seed=0, batch_size=2, process_index=0, process_count=1, vocab_size=None
) -> Data:
    fields = {"sequence_length": 8, "validation_fraction": 0.2, "cache_dir": str(folder / "cache")} | fields
    return make_data(
        DataConfig(**fields),
        seed=seed,
        batch_size=batch_size,
        vocab_size=vocab_size,
        process_index=process_index,
        process_count=process_count,
    )
