"""A network of your own in a loop of your own: scikit-learn's 8 x 8 handwritten digits.

    pip install -e '.[dev]'        # for scikit-learn, which has the digits with it
    python examples/digits.py

Eight fake CPU devices share the training state at ZeRO stage 3. After each epoch you see the loss and the accuracy on
360 digits held back; then the last accuracy again, from a checkpoint restored on two devices at stage 1.
"""

import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jzero

NUM_EPOCHS, BATCH_SIZE, NUM_HELD_BACK = 5, 32, 360
Arrays = dict[str, np.ndarray]


class Classifier(nnx.Module):
    """Images [B, 8, 8, 1] to logits [B, 10]; BatchNorm's statistics and dropout's random stream are jzero's to carry."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.hidden = nnx.Linear(512, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(images)))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2)).reshape(-1, 512)
        return self.out(self.dropout(nnx.relu(self.hidden(x))))


def loss(model: Classifier, batch: dict[str, jax.Array]) -> tuple[jzero.WeightedLoss, dict[str, jax.Array]]:
    """The loss, and beside it whatever else there is to know of a batch; jzero averages both over all devices."""
    logits = model(batch["image"])
    accuracy = (logits.argmax(-1) == batch["label"]).mean()
    return jzero.cross_entropy(logits, batch["label"]), {"accuracy": accuracy}


def make_engine(stage: int, devices: Any = None) -> jzero.Engine:
    config = {"zero": {"stage": stage}, "runtime": {"fake_devices": 8}}
    return jzero.initialize(lambda rngs: Classifier(rngs), loss, optax.adam(3e-3), config, devices)


def shuffled(digits: Arrays, rng: np.random.Generator) -> Iterator[Arrays]:
    """One epoch in a new order, BATCH_SIZE rows at a time; the last few that fill no batch are left out."""
    order = rng.permutation(len(digits["label"]))
    for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
        yield {name: array[order[start : start + BATCH_SIZE]] for name, array in digits.items()}


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    digits = {"image": images.reshape(-1, 8, 8, 1).astype(np.float32) / 16, "label": labels}
    train = {name: array[:-NUM_HELD_BACK] for name, array in digits.items()}
    held_back = {name: array[-NUM_HELD_BACK:] for name, array in digits.items()}

    engine, rng = make_engine(stage=3), np.random.default_rng(0)
    for epoch in range(NUM_EPOCHS):
        for batch in shuffled(train, rng):
            engine.step(batch)
        result = engine.evaluate(held_back)  # dropout off, BatchNorm by its running statistics
        print(f"epoch {epoch + 1}  loss {result['loss']:.3f}  accuracy {result['accuracy']:.3f}")

    with tempfile.TemporaryDirectory() as directory:
        engine.save(directory)
        smaller = make_engine(stage=1, devices=jax.devices()[:2])
        smaller.restore(directory)
    result = smaller.evaluate(held_back)
    print(f"restored at step {int(smaller.state.step)} on 2 devices, stage 1: accuracy {result['accuracy']:.3f}")


if __name__ == "__main__":
    main()
