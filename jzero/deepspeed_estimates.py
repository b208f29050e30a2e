"""What DeepSpeed's memory estimators would say (`estimate_zero2_model_states_mem_needs` and `..._zero3_...` of 0.19),
for those who compare. Without activations; jzero's own figures are those of `python -m jzero.planner`.

Parameters are 16-bit, with float32 masters and Adam. Of stage 3 without offload, DeepSpeed leaves the 16-bit parameters
out, and counts the largest layer as gathered in float32.
"""

from typing import NamedTuple


class Estimate(NamedTuple):
    """Bytes, truncated: cpu of a node's host memory, gpu of one device. largest_layer: of those gpu holds, gathered."""

    cpu: int
    gpu: int
    largest_layer: int = 0


def zero2_model_states(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> Estimate:
    """Stage 2. cpu_offload: gradients and optimizer state live on the host. additional_buffer_factor: of host memory.

    total_params: elements.
    """
    devices = num_nodes * num_gpus_per_node
    if cpu_offload:
        host, gpu = total_params * max(4 * devices, 16), 2 * total_params
    else:
        host, gpu = total_params * 4 * num_gpus_per_node, 2 * total_params + int(18 * total_params / devices)
    return Estimate(int(host * additional_buffer_factor), gpu)


def zero3_model_states(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> Estimate:
    """Stage 3. cpu_offload: optimizer state lives on the host; cpu_offload_params: parameters too, which only counts
    with cpu_offload. zero_init: parameters are split as they are made, else each process first holds the whole model.

    total_params, largest_layer_params: elements; of the layer, its own without those of layers within.
    """
    devices, share, gathered = num_nodes * num_gpus_per_node, 1 / num_nodes, 4 * largest_layer_params
    whole = total_params * 4 * num_gpus_per_node
    if cpu_offload:
        split = total_params * (18 if cpu_offload_params else 16) * share
        host = split if zero_init else max(whole, split)
        gpu = gathered + (0 if cpu_offload_params else int(2 * total_params / devices))
    else:
        host = largest_layer_params * 4 * num_gpus_per_node if zero_init else whole
        gpu = gathered + int(18 * total_params / devices)
    return Estimate(int(host * additional_buffer_factor), gpu, gathered)
