"""A network of your own in a loop of your own: scikit-learn's 8 x 8 handwritten digits.

    python examples/digits.py        (scikit-learn comes with: pip install -e '.[dev]')

Eight fake CPU devices share the training state at ZeRO stage 3. Each epoch ends with the loss and the accuracy on 384
digits held back, about 0.99 after the fifth. A checkpoint restored on two devices at stage 1 gives the last line again.
"""

import tempfile
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jzero

NUM_EPOCHS, BATCH_SIZE = 5, 32
NUM_TRAIN, NUM_HELD_BACK = 1408, 384  # of 1797; both divide over 8 devices


class Classifier(nnx.Module):
    """Images [B, 8, 8, 1] to logits [B, 10]; BatchNorm's statistics and dropout's randomness are jzero's to carry."""

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


def loss(model: Classifier, batch: dict[str, Any]) -> tuple[jzero.WeightedLoss, dict[str, jax.Array]]:
    """The loss, and beside it what else there is to know of a batch. jzero averages both over all devices."""
    logits = model(batch["image"])
    accuracy = (logits.argmax(-1) == batch["label"]).mean()
    return jzero.cross_entropy(logits, batch["label"]), {"accuracy": accuracy}


def make_engine(stage: int, devices: Any = None) -> jzero.Engine:
    config = {"zero": {"stage": stage}, "runtime": {"fake_devices": 8}}
    return jzero.initialize(lambda rngs: Classifier(rngs), loss, optax.adam(3e-3), config, devices)


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    digits = {"image": images.reshape(-1, 8, 8, 1).astype(np.float32) / 16, "label": labels}
    rng = np.random.default_rng(0)
    train, held_back, _ = np.split(rng.permutation(len(labels)), [NUM_TRAIN, NUM_TRAIN + NUM_HELD_BACK])

    def take(rows: np.ndarray) -> dict[str, np.ndarray]:
        return {name: array[rows] for name, array in digits.items()}

    engine = make_engine(stage=3)
    for epoch in range(NUM_EPOCHS):
        for rows in rng.permutation(train).reshape(-1, BATCH_SIZE):
            engine.step(take(rows))
        result = engine.evaluate(take(held_back))  # dropout off, BatchNorm by its running statistics
        print(f"epoch {epoch + 1}  loss {result['loss']:.3f}  accuracy {result['accuracy']:.3f}")

    with tempfile.TemporaryDirectory() as directory:
        engine.save(directory)
        smaller = make_engine(stage=1, devices=jax.devices()[:2])
        smaller.restore(directory)
    result = smaller.evaluate(take(held_back))
    print(f"restored  loss {result['loss']:.3f}  accuracy {result['accuracy']:.3f}")


if __name__ == "__main__":
    main()
