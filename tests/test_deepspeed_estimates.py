"""What DeepSpeed's estimators say of 2,851 million parameters, by its documentation and code."""

import pytest

from jzero.deepspeed_estimates import zero2_model_states, zero3_model_states

PARAMETERS, LARGEST_LAYER = 2_851_000_000, 32_000_000


# GiB of the host, of a device: as DeepSpeed prints them for 8 GPUs of one node.
@pytest.mark.parametrize(
    ("cpu_offload", "cpu_offload_params", "zero_init", "cpu", "gpu"),
    [
        (True, True, True, 71.69, 0.12),
        (True, True, False, 127.45, 0.12),
        (True, False, True, 63.72, 0.78),
        (True, False, False, 127.45, 0.78),
        (False, False, True, 1.43, 6.09),
        (False, False, False, 127.45, 6.09),
    ],
)
def test_stage_3_is_as_deepspeed_prints_it(cpu_offload, cpu_offload_params, zero_init, cpu, gpu):
    found = zero3_model_states(PARAMETERS, LARGEST_LAYER, 8, 1, cpu_offload, cpu_offload_params, zero_init)
    assert [round(size / 2**30, 2) for size in found] == [cpu, gpu, 0.12]


def test_stage_2_and_several_nodes_follow_its_formulas():
    assert zero2_model_states(1000, 8, 2) == (1000 * 64 * 1.5, 2000, 0)
    assert zero2_model_states(1000, 1, 1) == (1000 * 16 * 1.5, 2000, 0)
    assert zero2_model_states(1000, 8, 2, cpu_offload=False) == (1000 * 32 * 1.5, 2000 + 1125, 0)
    assert zero2_model_states(1001, 7, 1, cpu_offload=False).gpu == 2002 + 2574
    assert zero3_model_states(1000, 10, 8, 2).cpu == 1000 * 9 * 1.5
    assert zero3_model_states(1000, 10, 8, 2, zero_init=False).cpu == 1000 * 32 * 1.5
    assert zero3_model_states(1000, 10, 1, 1, additional_buffer_factor=1.0).cpu == 18000
