"""Experts in E4M3 that begin with the rows that are there: parts of a layer's step."""

from dataclasses import replace

import pytest
import torch
from cluster import run_on
from low_precision_cases import RECIPES
from low_precision_parts import H, I, Kernels, check_parts, layer_step
from worker import open_heap

from symmoe import MoEConfig
from symmoe.grouped import quantized_experts
from symmoe.precision import MXFP8, NVFP4, Float8Block


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [(Float8Block(), torch.bfloat16), (Float8Block(power_of_two=True), torch.bfloat16), (Float8Block(), torch.float32)],
    ids=str,
)
def test_parts_have_the_bits_of_the_whole(cluster, num_ranks: int, recipe, dtype):
    assert cluster(num_ranks).findings(check_parts, "cpu", recipe, dtype) == []


def all_at_once(weights, wire, x, parts, dbias):
    """A wrong _part_by_part: it makes operands of all rows when the first part is there."""
    rows = None
    for part in parts:
        if rows is None and wire is None:
            rows = weights.recipe.quantize(x.rows, x.row_range, row_index=x.row_index)
        elif rows is None:
            rows = wire.quantized(x.rows, x.row_range, x.row_index)
        yield rows.operand(), part


@pytest.mark.parametrize("wire", ["none", "both"])
@run_on(2)
def test_rows_that_are_not_there_are_noticed(rank: int, num_ranks: int, wire: str) -> None:
    """y is right, but if rank 0 does not wait for the rows of rank 1, which is late with them and gets them back."""
    options = {"precision": Float8Block(), "quantized_wire": wire, "layout": "expert-major"}
    config = MoEConfig(hidden=H, ffn=I, num_experts=2 * num_ranks, top_k=2, schedule="always-overlapped", **options)
    found = []
    with open_heap("cpu", num_bytes=64 << 20) as heap:
        want = layer_step(heap, replace(config, schedule="serial"), torch.bfloat16)
        right = quantized_experts._part_by_part
        for part_by_part in (right, all_at_once):
            quantized_experts._part_by_part = part_by_part if rank == 0 else right
            try:
                with Kernels(lag_s=0.3 * rank):
                    y, *_ = layer_step(heap, config, torch.bfloat16)
            finally:
                quantized_experts._part_by_part = right
            found.append(torch.equal(y, want[0]))
    assert found == [True, rank == 0]


def test_which_recipes_take_parts():
    taken = {Float8Block(), Float8Block(power_of_two=True)}
    assert {recipe for recipe in RECIPES if quantized_experts.takes_parts(recipe)} == taken & set(RECIPES)
    assert all(map(quantized_experts.takes_parts, (None, *taken)))
    assert not any(map(quantized_experts.takes_parts, (MXFP8(), NVFP4())))
