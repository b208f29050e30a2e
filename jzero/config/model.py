"""The built-in language model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from jzero.config.batch import divisors, either, neighbours
from jzero.config.section import Fault, Flag, Positive, Section, Size, unused

# The parts that make a family; sizes, bases and epsilons are the model's own.
_FAMILIES: dict[Any, dict[str, Any]] = {
    "gpt2": {
        "position_embedding_type": "absolute",
        "norm": "layernorm",
        "hidden_act": "gelu_new",
        "gated_mlp": False,
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen": {"use_qk_norm": True},
    "mistral": {"sliding_window": 4096},
}


class ModelConfig(Section):
    """The built-in language model, by Hugging Face's names. Sizes in elements. Single fields override the family's."""

    path: ClassVar[str] = "model"

    # Where other fields' defaults come from. qwen is Qwen3; Qwen2 has use_qk_norm: false, attention_bias: true.
    family: Literal["llama", "gpt2", "qwen", "mistral"] = "llama"
    vocab_size: Size | None = None  # token ids; null: the tokenizer's
    hidden_size: Size = 128  # width of the residual stream
    # Width of the MLP; null: 8/3 hidden_size, up to a multiple of 32, with a gate, 4 hidden_size without.
    intermediate_size: Size | None = None
    num_hidden_layers: Size = 4  # blocks
    num_attention_heads: Size = 4  # query heads a block
    num_key_value_heads: Size | None = None  # key and value heads; null: num_attention_heads
    head_dim: Size | None = None  # width of a head; null: hidden_size / num_attention_heads
    max_position_embeddings: Size = 2048  # longest sequence, tokens
    position_embedding_type: Literal["rotary", "absolute"] = "rotary"  # turned queries and keys, or a learned table
    rope_theta: Positive = 10000.0  # rotary: base of the frequencies
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"  # before attention, MLP and output head; layernorm has biases
    rms_norm_eps: Positive = 1e-5  # rmsnorm: added to the mean square
    layer_norm_epsilon: Positive = 1e-5  # layernorm: added to the variance
    hidden_act: Literal["silu", "gelu_new"] = "silu"  # in the MLP; gelu_new is GELU by its tanh approximation
    gated_mlp: Flag = True  # act(gate(x)) * up(x), or act(up(x))
    attention_bias: Flag = False  # biases of the query, key and value projections
    attention_out_bias: Flag = False  # bias of attention's output projection
    mlp_bias: Flag = False  # biases of the MLP
    use_qk_norm: Flag = False  # a norm over each query and key head
    sliding_window: Size | None = None  # tokens a token sees, itself included; null: all before it
    tie_word_embeddings: Flag = False  # output head = input embedding
    initializer_range: Positive = 0.02  # standard deviation of the initial weights
    scan_layers: Flag = True  # one stacked block, scanned; false: a list of blocks
    # What the backward pass computes again: nothing, all but matrix products, whole blocks.
    remat: Literal["none", "dots", "full"] = "full"
    attention: Literal["xla", "cudnn"] = "xla"  # kernel of jax.nn.dot_product_attention

    @classmethod
    def complete(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        family = given.get("family")
        return {**(_FAMILIES.get(family, {}) if isinstance(family, str) else {}), **given}

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
        else:
            yield from self._head_faults(self.head_dim or self.hidden_size // heads)
        readers = {
            "rope_theta": ("position_embedding_type", ["rotary"]),
            "rms_norm_eps": ("norm", ["rmsnorm"]),
            "layer_norm_epsilon": ("norm", ["layernorm"]),
        }
        yield from unused(self, readers)

    def _head_faults(self, head_dim: int) -> Iterator[Fault]:
        fields = ("model.head_dim", "model.hidden_size", "model.num_attention_heads")
        sizes = f" (hidden_size {self.hidden_size} / num_attention_heads {self.num_attention_heads})"
        told = f"model.head_dim = {head_dim}{'' if self.head_dim else sizes}"
        if self.position_embedding_type == "rotary" and head_dim % 2:
            yield Fault(fields, f"{told}: must be even, since rotary embeddings turn pairs; {head_dim + 1} would do")
        if self.attention == "cudnn" and (head_dim % 8 or head_dim > 256):
            yield Fault(
                (*fields, "model.attention"),
                f"{told}: model.attention = cudnn takes multiples of 8 up to 256, GPUs before Hopper up to 128; "
                "set another, or model.attention: xla",
            )
