"""The start-up report tells what each device holds, which parameters stay whole and why, and what padding costs."""

import optax
import pytest
from rich.console import Console

from jzero.collectives import Collectives
from jzero.config import make_config
from jzero.leaf import AbstractParam
from jzero.plan import make_plan
from jzero.report import human_bytes, plan_report

PARAMS = {
    "split": AbstractParam((64, 100), "float32"),  # 6400 elements
    "padded": AbstractParam((61, 99), "float32"),  # 6039; 61 + 3 is the least waste
    "small": AbstractParam((10,), "float32"),
    "gain": AbstractParam((), "float32"),
}


def report(stage: int = 3, data: int = 8, params: dict[str, AbstractParam] = PARAMS, tensor: int = 1) -> list[str]:
    config = make_config({"zero": {"stage": stage, "min_shard_elements": 100}})
    sizes = {"replica": 1, "data": data, "tensor": tensor}
    plan = make_plan(params, sizes, config.zero, config.precision, optax.adam(1e-3))
    console = Console(width=120)
    with console.capture() as captured:
        console.print(plan_report(plan, Collectives("explicit", "as configured")), soft_wrap=True)
    return [line.strip() for line in captured.get().splitlines()]


def rows(lines: list[str]) -> dict[str, list[str]]:
    """The table: tree -> its cells."""
    table = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    return {tree: cells for tree, *cells in table}


def test_bytes_by_tree_are_those_of_a_device_of_all_and_of_what_is_whole():
    """(6400 + 64 * 99) / 8 and 10 + 1 elements of 4 bytes; Adam holds each twice, and a count of its own."""
    lines = report()
    assert lines[0] == "ZeRO stage 3, 12,450 parameters, data 8"
    assert rows(lines) == {
        "parameters": ["6.41 kB", "50.99 kB", "44 B", "float32"],
        "gradients": ["6.41 kB", "50.99 kB", "44 B", "float32"],
        "optimizer": ["12.83 kB", "101.98 kB", "92 B", "float32, int32"],
    }


def test_a_stage_shows_in_the_trees_that_it_splits():
    split = {stage: [cells[0] != cells[1] for cells in rows(report(stage)).values()] for stage in range(4)}
    assert split == {
        0: [False, False, False],
        1: [False, False, True],
        2: [False, True, True],
        3: [True, True, True],
    }


def test_whole_and_padded_parameters_are_listed_with_reason_and_bytes():
    assert report()[-5:] == [
        "2 parameters whole, 44 B in all:",
        "small  40 B  10 elements < zero.min_shard_elements 100",
        "gain  4 B  scalar",
        "1 parameter padded, 1.19 kB in all:",
        "padded  1.19 kB  dim 0 (61, padded to 64) over 8",
    ]


def test_a_long_list_tells_its_largest_and_how_many_more():
    lines = report(params={f"p{n}": AbstractParam((n,), "float32") for n in range(1, 12)})
    assert lines[-10] == "11 parameters whole, 264 B in all:"
    assert [line.split()[0] for line in lines[-9:-1]] == [f"p{n}" for n in range(11, 3, -1)]
    assert lines[-1] == "... and 3 more"


@pytest.mark.parametrize(("stage", "data"), [(3, 1), (0, 8)])
def test_nothing_is_listed_where_nothing_is_split(stage, data):
    """On one device, or at stage 0, every parameter is whole by choice and none is padded."""
    lines = report(stage, data)
    assert lines[0].endswith("one device" if data == 1 else "data 8")
    assert not [line for line in lines[1:] if "whole, " in line or "padded" in line]
    assert rows(lines)["parameters"][:3] == ["49.80 kB"] * 3


def test_bytes_are_told_by_powers_of_a_thousand():
    told = [human_bytes(count) for count in (0, 999, 1000, 1_234_567, 16_600_000_000)]
    assert told == ["0 B", "999 B", "1.00 kB", "1.23 MB", "16.60 GB"]


def test_a_tensor_axis_that_no_parameter_names_is_told():
    told = "mesh.tensor = 2: no parameter's own sharding names this axis"
    assert any(line.startswith(told) for line in report(data=4, tensor=2))
    own = {"w": AbstractParam((64, 64), "float32", spec=(("tensor",), None))}
    assert not any("mesh.tensor" in line for line in report(data=4, tensor=2, params=own))
