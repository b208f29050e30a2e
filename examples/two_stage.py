"""Pretraining, and finetuning from its checkpoint at another ZeRO stage and with another optimizer.

    python examples/two_stage.py

First a small language model reads the standard library of Python, 150 steps at stage 3 on eight fake CPU devices. Then
two runs read jzero's own code, 30 steps at stage 1: from the first one's weights, and from a seed. The loss of their
first batch is about 2.7 and 5.5 nats a byte, their validation loss in the end about 2.8 and 4.1.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import jzero

REPOSITORY = Path(__file__).parent.parent
SHARED: dict[str, Any] = {
    "model": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "log": {"tensorboard": False, "every": 50},
    "runtime": {"fake_devices": 8},
}
PRETRAINING: dict[str, Any] = {
    "zero": {"stage": 3},
    "optimizer": {"learning_rate": 3e-3, "warmup_steps": 20, "weight_decay": 0.1},
    "data": {"sequence_length": 64},
    "train": {"num_steps": 150, "global_batch_size": 16, "eval_every": 0, "sample_tokens": 0},
}
FINETUNING: dict[str, Any] = {
    "data": {"source": "text", "paths": [str(REPOSITORY / "jzero" / "**" / "*.py")], "sequence_length": 64},
    "zero": {"stage": 1},
    "optimizer": {"name": "lion", "learning_rate": 1e-3, "warmup_steps": 5, "weight_decay": 0.1},
    "train": {"num_steps": 30, "global_batch_size": 16, "eval_every": 0, "sample_tokens": 0},
}


def train(run_dir: Path, settings: dict[str, Any], start_from: Path | None = None) -> tuple[float, float]:
    """Runs the trainer; returns the loss of the first batch and the validation loss at the end."""
    sections = {**SHARED, **settings, "train": {**settings["train"], "run_dir": str(run_dir)}}
    sections["checkpoint"] = {"start_from": start_from and str(start_from)}
    if jzero.run_training(sections):
        raise SystemExit("stopped by a signal")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return rows[0]["loss"], rows[-1]["eval_loss"]


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        runs = Path(directory)
        train(runs / "pretrained", PRETRAINING)
        arms = {"from its weights": runs / "pretrained", "from a seed": None}
        for name, start_from in arms.items():
            first, last = train(runs / name.replace(" ", "_"), FINETUNING, start_from)
            print(f"{name}: first loss {first:.2f}, validation loss {last:.2f} in the end", flush=True)


if __name__ == "__main__":
    main()
