"""Runs the Triton GEMMs of E4M3 numbers in Triton's interpreter and compares them with the twins. A script.

test_interpreted.py starts it with TRITON_INTERPRET=1, which must be set before triton is imported.

Whole numbers with power-of-two scales: the sums are exact, so every bit has to be the same.
"""

from dataclasses import replace

import torch
from biases import check_biases
from fp8_problem import Numbers, Problem, WgradProblem
from interpreter import spare_the_interpreter
from quantize_cases import Scattered
from row_ranges import random_ranges

from symmoe.kernels.low_precision import fp8
from symmoe.kernels.twin import fp8 as twin

CASES = [((19, 0, 1, 40, 0), (136, 272)), ((0, 0, 0), (48, 64)), ((0, 130, 0), (48, 64))]  # splits; O, C
CONFIG = replace(fp8.CONFIG, block_m=32, block_n=64, group_m=2)
NUM_SMS = 3
DTYPES = (torch.float16, torch.float32)  # the interpreter truncates to bf16


def check_products(splits, widths):
    p = Problem(splits, widths, Numbers(exact=True), tail=7)
    for dtype, zero_tail in ((torch.float32, False), (torch.float16, True)):
        got, expected = p.blank(dtype), p.blank(dtype)
        fp8.grouped_gemm_fp8(*p.operands, got, zero_tail=zero_tail, config=CONFIG, num_sms=NUM_SMS)
        twin.grouped_gemm_fp8(*p.operands, expected, zero_tail=zero_tail)
        assert torch.equal(got, expected), (splits, widths, dtype)
    weight, scale = Scattered(p.weight), Scattered(p.weight_scale)
    operands = p.rows, p.row_scale, weight.table, scale.table, p.row_range
    for kernels, options in ((fp8, {"config": CONFIG, "num_sms": NUM_SMS}), (twin, {})):
        got = p.blank(dtype)
        kernels.grouped_gemm_fp8(*operands, got, zero_tail=zero_tail, **options)
        assert torch.equal(got, expected), (splits, widths, "tables")
    got, expected = p.blank(torch.float32), p.blank(torch.float32)
    for ranges in random_ranges(splits, 2, step=1):
        arguments = (*p.operands[:-1], ranges)
        fp8.grouped_gemm_fp8(*arguments, got, config=CONFIG, num_sms=NUM_SMS)
        twin.grouped_gemm_fp8(*arguments, expected)
        assert torch.equal(got, expected), (splits, widths)


def run_with_tables(p, out, row_range=None, **options):
    weight, scale = Scattered(p.weight), Scattered(p.weight_scale)
    ranges = p.row_range if row_range is None else row_range
    operands = (p.rows, p.row_scale, weight.table, scale.table, ranges, out)
    fp8.grouped_gemm_fp8(*operands, config=CONFIG, num_sms=NUM_SMS, **options)


def run(p, out, row_range=None, **options):
    *operands, groups = p.operands
    ranges = groups if row_range is None else row_range
    fp8.grouped_gemm_fp8(*operands, ranges, out, config=CONFIG, num_sms=NUM_SMS, **options)


def check_gradients(splits, widths):
    p = WgradProblem(splits, widths, Numbers(exact=True))
    for dtype, accumulate in ((torch.float32, True), (torch.float16, True), (torch.float16, False)):
        got = torch.full(p.shape, 3.0, dtype=dtype)
        if accumulate:
            got[torch.tensor(splits) == 0] = torch.nan  # not touched
        expected, start = got.clone(), got.clone()
        fp8.grouped_gemm_wgrad_fp8(*p.operands, got, accumulate=accumulate, config=CONFIG, num_sms=NUM_SMS)
        twin.grouped_gemm_wgrad_fp8(*p.operands, expected, accumulate=accumulate)
        assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7)), (splits, widths, dtype, accumulate)
        for kernels, options in ((fp8, {"config": CONFIG, "num_sms": NUM_SMS}), (twin, {})):
            scattered = Scattered(start)
            kernels.grouped_gemm_wgrad_fp8(*p.operands, scattered.table, accumulate=accumulate, **options)
            assert torch.equal(scattered.packed().nan_to_num(7), expected.nan_to_num(7)), (splits, widths, "table")


def check_that_scales_matter():
    p = Problem(*CASES[0], Numbers(exact=True))
    got, other = p.blank(torch.float32), p.blank(torch.float32)
    fp8.grouped_gemm_fp8(*p.operands, got, config=CONFIG, num_sms=NUM_SMS)
    p.weight_scale = p.weight_scale.flip(1)
    twin.grouped_gemm_fp8(*p.operands, other)
    assert not torch.equal(got, other)


if __name__ == "__main__":
    spare_the_interpreter()
    for splits, widths in CASES:
        check_products(splits, widths)
        check_gradients(splits, widths)
    check_biases(run, Problem((19, 0, 3), (264, 144), Numbers(exact=True), tail=3), DTYPES)
    check_biases(run_with_tables, Problem((3, 9), (40, 48), Numbers(exact=True)), DTYPES)
    check_that_scales_matter()
    print("all is well")
