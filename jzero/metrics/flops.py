"""How much work a token is, and how much a device can do at best.

Model FLOPs utilisation (PaLM, arXiv 2204.02311, appendix B) is the share of the devices' peak that goes into the
model's own arithmetic: what rematerialisation computes twice does not count.
"""

import math

from jzero.config import Config, ModelConfig
from jzero.plan import Plan

# FLOP/s of dense bfloat16 matrix products on one JAX device, by the beginning of `device.device_kind`. NVIDIA's sheets
# name them with sparsity, which doubles them. Not here: what has no bfloat16 (V100, T4), and slices of a GPU (MIG).
_PEAKS = {
    # NVIDIA A100 Tensor Core GPU datasheet (2022); A10, A30, A40 datasheets
    "NVIDIA A100": 312e12,
    "NVIDIA A10": 125e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A40": 149.7e12,
    # NVIDIA H100 datasheet (2024) and Hopper architecture whitepaper; H200 and GH200 datasheets
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA GH200": 989.4e12,
    # HGX B200 and GB200 NVL72 datasheets
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    # NVIDIA L4, L40 and L40S datasheets
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    # Ada and Ampere GA102 architecture whitepapers, float32 accumulation
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    # cloud.google.com/tpu/docs/system-architecture-tpu-vm, a page for each version; v3 and 7x show two devices a chip
    "TPU v3": 123e12 / 2,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,
}


def peak_flops(device_kind: str) -> float | None:
    """The published dense bfloat16 peak of one device, FLOP/s; None where it is not known here."""
    if "MIG" in device_kind:
        return None
    known = [kind for kind in _PEAKS if f"{device_kind} ".replace("-", " ").startswith(f"{kind} ")]
    return _PEAKS[max(known, key=len)] if known else None


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
    peak = config.log.peak_flops or peak_flops(device_kind)
    if peak is None:
        return None
    work = config.log.flops_per_token or flops_per_token(config.model, plan, config.data.sequence_length)
    return math.prod(plan.axis_sizes.values()) * peak / work
