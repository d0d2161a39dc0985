"""Runs the Triton GEMMs of MXFP8 and NVFP4 numbers in Triton's interpreter and compares them with the twins. A script.

test_interpreted.py starts it with TRITON_INTERPRET=1, which must be set before triton is imported.

The interpreter of Triton 3.6 has no dot_scaled: here is one in float64, from the formats' definitions. Numbers are such
that sums are exact: every bit has to be the same.
"""

from dataclasses import replace

import numpy as np
import torch
import triton.language as tl
from biases import check_biases
from interpreter import spare_the_interpreter
from quantize_cases import Scattered
from row_ranges import random_ranges
from scaled_problem import NAMES, Numbers, Problem, WgradProblem, dequantised
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from symmoe.kernels.low_precision import scaled
from symmoe.kernels.twin import scaled as twin

CASES = [((19, 0, 1, 150, 0), (136, 288)), ((0, 0, 0), (48, 64)), ((0, 130, 0), (264, 64))]  # splits; O, C
NUM_SMS = 3
DTYPES = (torch.float16, torch.float32)  # the interpreter truncates to bf16
WAYS = [("mxfp8", True), ("nvfp4", True), ("nvfp4", False)]  # whether dot_scaled multiplies
dots = []


def create_dot_scaled(self, left, left_scale, _, right, right_scale, __, fast_math, left_k_pack, right_k_pack, acc):
    """What tl.dot_scaled is defined to do, for the two formats."""
    assert left_k_pack
    assert right_k_pack
    assert not fast_math
    name = "nvfp4" if left.dtype.name == "uint8" else "mxfp8"
    assert (left_scale.dtype.name == "fp8e4nv") == (name == "nvfp4")  # what Triton tells the formats by
    dots.append(name)
    numbers = [
        dequantised(name, torch.from_numpy(data.copy()), torch.from_numpy(scale.data.copy()))
        for data, scale in ((left.data, left_scale), (right.data.T, right_scale))
    ]
    return TensorHandle((numbers[0] @ numbers[1].T).numpy().astype(np.float32) + acc.data, acc.dtype.scalar)


dot_scaled = TritonSemantic.dot_scaled


def dot_scaled_of_strings(self, left, left_scale, left_format, right, right_scale, right_format, *rest):
    """In the interpreter constants are plain values; Triton 3.6 wants names of formats to be constexpr."""
    formats = tl.constexpr(left_format), tl.constexpr(right_format)
    return dot_scaled(self, left, left_scale, formats[0], right, right_scale, formats[1], *rest)


def use_products(native):
    scaled.scaled_products = lambda device: "tcgen05" if native else None


def products(p, dtype, native, *, row_range=None, **options):
    """By the kernel and by the twin."""
    use_products(native)
    *operands, groups = p.operands
    operands, options = (*operands, groups if row_range is None else row_range), {**p.options, **options}
    got, expected = p.blank(dtype), p.blank(dtype)
    scaled.grouped_gemm_scaled(*operands, got, num_sms=NUM_SMS, **options)
    twin.grouped_gemm_scaled(*operands, expected, **options)
    return got, expected


def check_products(name, native, splits, widths):
    p = Problem(splits, widths, Numbers(name, exact=True), tail=7)
    for dtype, zero_tail in ((torch.float32, False), (torch.float16, True)):
        got, expected = products(p, dtype, native, zero_tail=zero_tail)
        assert torch.equal(got, expected), (name, native, splits, widths, dtype)
        (rows, row_scale, *_), (weight, scale) = p.operands, p.scattered
        for kernels in (scaled, twin):
            got, operands = p.blank(dtype), (rows, row_scale, weight.table, scale.table, p.row_range)
            kernels.grouped_gemm_scaled(*operands, got, zero_tail=zero_tail, num_sms=NUM_SMS, **p.options)
            assert torch.equal(got, expected), (name, native, splits, widths, dtype, "tables")
    lasts = torch.stack([p.row_range[0] + torch.tensor(splits) * 9 // 10, p.row_range[1]]).int()  # 135 of 150
    for ranges in (*random_ranges(splits, 2, step=1), *random_ranges(splits, 2, step=128), lasts):
        got, expected = products(p, torch.float32, native, row_range=ranges, group_range=p.row_range)
        assert torch.equal(got, expected), (name, native, splits, widths, ranges)


def run(p, out, row_range=None, **options):
    (rows, row_scale, *_, groups), (weight, scale) = p.operands, p.scattered
    operands = (
        (rows, row_scale, weight.table, scale.table, groups) if row_range is None else (*p.operands[:-1], row_range)
    )
    group_range = None if row_range is None else groups
    scaled.grouped_gemm_scaled(*operands, out, group_range=group_range, num_sms=NUM_SMS, **p.options, **options)


def check_gradients(name, native, splits, widths):
    use_products(native)
    p = WgradProblem(splits, widths, Numbers(name, exact=True))
    for dtype, accumulate in ((torch.float32, True), (torch.float16, False)):
        got = torch.full(p.shape, 3.0, dtype=dtype)
        if accumulate:
            got[torch.tensor(splits) == 0] = -0.0  # left alone: 0 added would make 0.0 of it
        expected, scattered = got.clone(), Scattered(got)
        scaled.grouped_gemm_wgrad_scaled(*p.operands, got, accumulate=accumulate, num_sms=NUM_SMS, **p.options)
        twin.grouped_gemm_wgrad_scaled(*p.operands, expected, accumulate=accumulate, **p.options)
        assert torch.equal(got, expected), (name, native, splits, widths, dtype)
        assert torch.equal(got.signbit(), expected.signbit()), (name, native, splits, widths, dtype)
        options = {"accumulate": accumulate, "num_sms": NUM_SMS, **p.options}
        scaled.grouped_gemm_wgrad_scaled(*p.operands, scattered.table, **options)
        assert torch.equal(scattered.packed(), expected), (name, native, splits, widths, dtype, "table")


def check_wide_tiles(name):
    """Tiles of 256 columns, the last of which reads on into the scales of the next matrix, or of none."""
    p = Problem((3, 0, 4), (384, 128), Numbers(name, exact=True))
    (_, wide), *_ = scaled.TCGEN05_CONFIGS[{"mxfp8": "e4m3", "nvfp4": "e2m1"}[name]]
    assert wide.block_n == 256
    got, expected = products(p, torch.float32, True)
    narrow = p.blank(torch.float32)
    config = replace(wide, block_n=128)
    scaled.grouped_gemm_scaled(*p.operands, narrow, config=config, num_sms=1, **p.options)
    assert torch.equal(got, expected)
    assert torch.equal(narrow, expected)


def check_that_scales_matter(name, native):
    p = Problem(*CASES[0], Numbers(name, exact=True))
    got, _ = products(p, torch.float32, native)
    for what in ("row_scale", "weight_scale"):
        q = Problem(*CASES[0], Numbers(name, exact=True))
        setattr(q, what, getattr(q, what).roll(1, -1))
        _, other = products(q, torch.float32, native)
        assert not torch.equal(got, other), what


if __name__ == "__main__":
    spare_the_interpreter()
    InterpreterBuilder.create_dot_scaled = create_dot_scaled
    TritonSemantic.dot_scaled = dot_scaled_of_strings
    for name, native in WAYS:
        for splits, widths in CASES:
            check_products(name, native, splits, widths)
            check_gradients(name, native, splits, widths)
        check_biases(run, Problem((19, 0, 3), (264, 160), Numbers(name, exact=True), tail=3), DTYPES)
        check_that_scales_matter(name, native)
        assert (name in dots) == native
        dots.clear()
    for name in NAMES:
        check_wide_tiles(name)
    print("all is well")
