"""How much work a token is, against what devices can do at best.

Model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B) is the share of the devices' peak that goes into the
model's own arithmetic: what rematerialisation computes twice does not count.
"""

import math

from jzero.config import Config, ModelConfig
from jzero.hardware import published_peak
from jzero.plan import Plan


def flops_per_token(model: ModelConfig, plan: Plan, sequence_length: int) -> float:
    """FLOPs to train the built-in model on one token, forward and backward: 6 N + 4 F + 12 L H T.

    N: trained parameters, F: frozen ones, which have no gradient; both without embeddings that are only looked up.
    L: layers. H: width of all query heads together. T: tokens a row. Attention counts whole, not half for being causal,
    as PaLM and nanoGPT count it.
    """
    looked_up = {"embed_positions/embedding"} | (set() if model.tie_word_embeddings else {"embed_tokens/embedding"})
    used = {path: math.prod(leaf.shape) for path, leaf in plan.params.items() if path not in looked_up}
    products = sum((6.0 if path in plan.weights else 4.0) * size for path, size in used.items())
    heads = model.num_attention_heads
    width = heads * (model.head_dim or model.hidden_size // heads)
    return products + 12.0 * model.num_hidden_layers * width * sequence_length


def tokens_at_peak(config: Config, plan: Plan, device_kind: str) -> float | None:
    """Tokens a second were all of the plan's devices at their peak; None where that is not known."""
    peak = config.hardware.peak_flops or published_peak(device_kind)
    if peak is None:
        return None
    work = config.log.flops_per_token or flops_per_token(config.model, plan, config.data.sequence_length)
    return math.prod(plan.axis_sizes.values()) * peak / work
