"""The built-in language model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from jzero.config.batch import divisors, either, neighbours
from jzero.config.section import Fault, Flag, Positive, Section, Size


class ModelConfig(Section):
    """The built-in language model, by Hugging Face's names. Sizes in elements."""

    path: ClassVar[str] = "model"

    family: Literal["llama"] = "llama"  # architecture
    vocab_size: Size | None = None  # token ids; null: the tokenizer's
    hidden_size: Size = 128  # width of the residual stream
    intermediate_size: Size | None = None  # width of the MLP; null: 8/3 hidden_size, up to a multiple of 32
    num_hidden_layers: Size = 4  # blocks
    num_attention_heads: Size = 4  # query heads a block
    num_key_value_heads: Size | None = None  # key and value heads; null: num_attention_heads
    head_dim: Size | None = None  # width of a head; null: hidden_size / num_attention_heads
    max_position_embeddings: Size = 2048  # longest sequence, tokens
    rms_norm_eps: Positive = 1e-5  # added to the mean square in RMSNorm
    rope_theta: Positive = 10000.0  # base of the rotary frequencies
    tie_word_embeddings: Flag = False  # output head = input embedding
    initializer_range: Positive = 0.02  # standard deviation of the initial weights
    scan_layers: Flag = True  # one stacked block, scanned; false: a list of blocks
    # What the backward pass computes again: nothing, all but matrix products, whole blocks.
    remat: Literal["none", "dots", "full"] = "full"
    attention: Literal["xla", "cudnn"] = "xla"  # kernel of jax.nn.dot_product_attention

    def conflicts(self) -> Iterator[Fault]:
        heads, key_value = self.num_attention_heads, self.num_key_value_heads
        if key_value and heads % key_value:
            yield Fault(
                ("model.num_key_value_heads", "model.num_attention_heads"),
                f"model.num_key_value_heads = {key_value}: must divide model.num_attention_heads = {heads}; "
                f"set model.num_key_value_heads: {either(divisors(heads))}",
            )
        if self.head_dim is None and self.hidden_size % heads:
            yield Fault(
                ("model.num_attention_heads", "model.hidden_size", "model.head_dim"),
                f"model.num_attention_heads = {heads}: must divide model.hidden_size = {self.hidden_size}; "
                f"set it to {either(neighbours(self.hidden_size, heads))}, or give model.head_dim",
            )
        elif (head_dim := self.head_dim or self.hidden_size // heads) % 2:
            told = "" if self.head_dim else f" (hidden_size {self.hidden_size} / num_attention_heads {heads})"
            yield Fault(
                ("model.head_dim", "model.hidden_size", "model.num_attention_heads"),
                f"model.head_dim = {head_dim}{told}: must be even, since rotary embeddings turn pairs; "
                f"{head_dim + 1} would do",
            )
