"""A few lines by the trained model, to see what it has learnt."""

from typing import Any

import jax
import numpy as np

from jzero.config import Config
from jzero.data.tokenizer import Tokenizer
from jzero.engine import Engine
from jzero.models import generate

TEMPERATURE = 0.8  # lively, yet short of noise, for a model of bytes


def sample(engine: Engine, config: Config, tokenizer: Tokenizer | None) -> str | None:
    """`train.sample_prompt` and what the model, its averaged weights where there are any, makes of it."""
    train = config.train
    if train.sample_tokens == 0 or tokenizer is None:
        return None

    def continue_text(model: Any, tokens: jax.Array, key: jax.Array) -> jax.Array:
        return generate(
            model,
            tokens,
            key,
            num_tokens=train.sample_tokens,
            sequence_length=config.data.sequence_length,
            temperature=TEMPERATURE,
        )

    prompt = tokenizer.encode(train.sample_prompt) if train.sample_prompt else [tokenizer.end_of_document]
    prompts, key = np.array([prompt], np.int32), jax.random.key(train.seed)
    tokens = engine.apply(continue_text, prompts, key, averaged=engine.has_average)
    return tokenizer.decode(np.asarray(tokens)[0])
