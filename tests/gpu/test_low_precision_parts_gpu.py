"""Experts in E4M3 that begin with the rows that are there, on GPUs: kernels with ranges of rows, and a layer's step."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from low_precision_parts import check_parts
from quantize_cases import FORMATS, as_bytes, row_buffers, row_range_of
from row_ranges import random_ranges, rows_of

from symmoe.kernels import gpu
from symmoe.kernels.activation import Activation
from symmoe.precision import Float8Block

# A kernel whose warps wait for each other for ever cannot be interrupted: the process ends.
pytestmark = pytest.mark.timeout(200, method="thread")

SPLITS = (0, 133, 1, 300, 0, 128, 777)
CAPACITY, FFN, BF16 = sum(SPLITS) + 3, 256, torch.bfloat16


def check_rows(call, buffers):
    """call(row_range, data, scale) writes rows of ranges and no others; all ranges together are the whole."""
    whole, union = buffers(), buffers()
    call(row_range_of(SPLITS).cuda(), *whole)
    for ranges in random_ranges(SPLITS, 4):
        part, ranges = buffers(), ranges.cuda()
        call(ranges, *part)
        call(ranges, *union)
        inside = rows_of(ranges, CAPACITY)[:, None].cpu()
        for got, want, blank in zip(part, whole, buffers(), strict=True):
            assert torch.equal(as_bytes(got), torch.where(inside, as_bytes(want), as_bytes(blank)))
    assert all(torch.equal(as_bytes(got), as_bytes(want)) for got, want in zip(union, whole, strict=True))


@pytest.mark.parametrize(
    "activation", [Activation(), Activation(limit=7.0), Activation(function="relu2", is_gated=False)], ids=str
)
def test_activations_that_are_quantised(activation):
    """Of rows of h that are there: the others are NaN."""
    h = torch.randn(CAPACITY, activation.hidden_width(FFN), device="cuda").to(BF16)
    factor = torch.rand(CAPACITY, device="cuda")

    def call(row_range, data, scale):
        there = torch.where(rows_of(row_range, CAPACITY)[:, None], h, torch.nan)
        gpu.act_quantize(there, factor, row_range, (data, scale), activation, FORMATS["float8_block"])

    check_rows(call, lambda: row_buffers(CAPACITY, FFN, FORMATS["float8_block"], "cuda"))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("recipe", [Float8Block(), Float8Block(power_of_two=True)], ids=str)
def test_parts_have_the_bits_of_the_whole(cluster, num_ranks: int, recipe):
    assert cluster(num_ranks, "cuda").findings(check_parts, "cuda", recipe, BF16, timeout_s=190) == []
