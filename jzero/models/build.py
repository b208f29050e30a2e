"""Config -> constructor of a model."""

from collections.abc import Callable

from flax import nnx

from jzero.config import ModelConfig
from jzero.errors import ConfigError
from jzero.models.llama import Llama

FAMILIES = {"llama": Llama}


def build_model(config: ModelConfig, vocab_size: int) -> Callable[[nnx.Rngs], nnx.Module]:
    """The constructor of the configured model: takes `nnx.Rngs`, also under `jax.eval_shape` and `jax.jit`.

    `vocab_size` is the tokenizer's; `config.vocab_size` overrides it where set (to round it up, say) and
    must not be smaller. The model maps tokens int32 [B, T] to logits [B, T, V].

    Raises ConfigError for an unknown family or a vocabulary smaller than the tokenizer's.
    """
    if config.family not in FAMILIES:
        raise ConfigError(f"model.family = {config.family}: not one of {', '.join(FAMILIES)}")
    if config.vocab_size is not None and config.vocab_size < vocab_size:
        raise ConfigError(
            f"model.vocab_size = {config.vocab_size}: smaller than the tokenizer's {vocab_size}; "
            "raise it or leave it null"
        )
    family, size = FAMILIES[config.family], config.vocab_size or vocab_size
    return lambda rngs: family(config, size, rngs=rngs)
