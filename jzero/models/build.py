"""Config -> constructor of a model."""

from collections.abc import Callable

from flax import nnx

from jzero.config import ModelConfig
from jzero.errors import ConfigError
from jzero.models.decoder import Decoder


def build_model(config: ModelConfig, vocab_size: int) -> Callable[[nnx.Rngs], nnx.Module]:
    """The constructor of the configured model: takes `nnx.Rngs`, also under `jax.eval_shape` and `jax.jit`.

    `vocab_size` is the tokenizer's; `config.vocab_size` overrides it where set (to round it up, say) and
    must not be smaller. The model maps tokens int32 [B, T] to logits [B, T, V].

    Raises ConfigError for a vocabulary smaller than the tokenizer's.
    """
    if config.vocab_size is not None and config.vocab_size < vocab_size:
        raise ConfigError(
            f"model.vocab_size = {config.vocab_size}: smaller than the tokenizer's {vocab_size}; "
            "raise it or leave it null"
        )
    return lambda rngs: Decoder(config, config.vocab_size or vocab_size, rngs=rngs)
