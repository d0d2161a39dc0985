"""Runs the Triton GEMMs of quantised numbers in Triton's interpreter and compares them with the twins.
test_interpreted.py runs it with TRITON_INTERPRET=1, which must be set before triton is imported.

The interpreter of Triton 3.6 has no dot_scaled: here is one in float64, from the formats' definitions. Numbers are such
that sums are exact: every bit has to be the same."""

import numpy as np
import torch
import triton.language as tl
from biases import check_biases
from quantize_cases import Scattered
from quantized_problem import Numbers, Problem, WgradProblem, dequantised
from row_ranges import random_ranges
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from symmoe.kernels import twin
from symmoe.kernels.low_precision import products
from symmoe.kernels.low_precision.block_scaled import scaled

# Splits; O, C.
CASES = {
    "fp8": [((19, 0, 1, 40, 0), (136, 272)), ((0, 0, 0), (48, 64)), ((0, 130, 0), (48, 64))],
    "scaled": [((19, 0, 1, 150, 0), (136, 288)), ((0, 0, 0), (48, 64)), ((0, 130, 0), (264, 64))],
}
DTYPES = (torch.float16, torch.float32)  # the interpreter truncates to bf16
WAYS = [
    ("fp8", False),
    ("mxfp8", True),
    ("nvfp4", True),
    ("nvfp4", False),
]  # whether dot_scaled multiplies
OPTIONS = {"num_sms": 3}
FP8_OPTIONS = {"block_m": 32, "block_n": 64, "group_m": 2, **OPTIONS}
dots = []


def create_dot_scaled(
    self, left, left_scale, _, right, right_scale, __, fast_math, left_k_pack, right_k_pack, acc
):
    """What tl.dot_scaled is defined to do, for the two formats."""
    assert left_k_pack
    assert right_k_pack
    assert not fast_math
    name = "nvfp4" if left.dtype.name == "uint8" else "mxfp8"
    assert (left_scale.dtype.name == "fp8e4nv") == (
        name == "nvfp4"
    )  # what Triton tells the formats by
    dots.append(name)
    numbers = [
        dequantised(name, torch.from_numpy(data.copy()), torch.from_numpy(scale.data.copy()))
        for data, scale in ((left.data, left_scale), (right.data.T, right_scale))
    ]
    return TensorHandle(
        (numbers[0] @ numbers[1].T).numpy().astype(np.float32) + acc.data, acc.dtype.scalar
    )


dot_scaled = TritonSemantic.dot_scaled


def dot_scaled_of_strings(
    self, left, left_scale, left_format, right, right_scale, right_format, *rest
):
    """In the interpreter constants are plain values; Triton 3.6 wants names of formats to be constexpr."""
    formats = tl.constexpr(left_format), tl.constexpr(right_format)
    return dot_scaled(self, left, left_scale, formats[0], right, right_scale, formats[1], *rest)


def use_products(native):
    scaled.scaled_products = lambda device: "tcgen05" if native else None


def run(p, out, row_range=None, *, scattered=False, **options):
    """By the kernel."""
    p.run(
        products,
        out,
        row_range,
        scattered=scattered,
        **(FP8_OPTIONS if p.name == "fp8" else OPTIONS),
        **options,
    )


def by_both(p, dtype, row_range=None, **options):
    """By the kernel and by the twin."""
    got, expected = p.blank(dtype), p.blank(dtype)
    run(p, got, row_range, **options)
    p.run(twin, expected, row_range, **options)
    return got, expected


def check_products(name, splits, widths):
    p = Problem(splits, widths, Numbers(name, exact=True), tail=7)
    for dtype, zero_tail in ((torch.float32, False), (torch.float16, True)):
        got, expected = by_both(p, dtype, zero_tail=zero_tail)
        assert torch.equal(got, expected), (name, splits, widths, dtype)
        for found in by_both(p, dtype, zero_tail=zero_tail, scattered=True):
            assert torch.equal(found, expected), (name, splits, widths, dtype, "tables")
    ranges = [*random_ranges(splits, 2, step=1)]
    if name != "fp8":
        lasts = torch.stack(
            [p.row_range[0] + torch.tensor(splits) * 9 // 10, p.row_range[1]]
        ).int()  # 135 of 150
        ranges += [*random_ranges(splits, 2, step=128), lasts]
    for row_range in ranges:
        got, expected = by_both(p, torch.float32, row_range)
        assert torch.equal(got, expected), (name, splits, widths, row_range)


def check_gradients(name, splits, widths):
    p = WgradProblem(splits, widths, Numbers(name, exact=True))
    for dtype, accumulate in ((torch.float32, True), (torch.float16, True), (torch.float16, False)):
        got = torch.full(p.shape, 3.0, dtype=dtype)
        if accumulate:
            got[torch.tensor(splits) == 0] = -0.0  # left alone: 0 added would make 0.0 of it
        expected, scattered = got.clone(), [Scattered(got) for _ in range(2)]
        run(p, got, accumulate=accumulate)
        p.run(twin, expected, accumulate=accumulate)
        assert torch.equal(got, expected), (name, splits, widths, dtype)
        assert torch.equal(got.signbit(), expected.signbit()), (name, splits, widths, dtype)
        run(p, scattered[0].table, accumulate=accumulate)
        p.run(twin, scattered[1].table, accumulate=accumulate)
        for found in scattered:
            assert torch.equal(found.packed(), expected), (name, splits, widths, dtype, "table")


def check_wide_tiles(name):
    """Tiles of 256 columns, the last of which reads on into the scales of the next matrix, or of none."""
    p = Problem((3, 0, 4), (384, 128), Numbers(name, exact=True))
    (_, wide), *_ = scaled.TCGEN05_CONFIGS[{"mxfp8": "e4m3", "nvfp4": "e2m1"}[name]]
    assert wide.block_n == 256
    got, expected = by_both(p, torch.float32)
    narrow = p.blank(torch.float32)
    p.run(products, narrow, block_n=128, num_sms=1)
    assert torch.equal(got, expected)
    assert torch.equal(narrow, expected)


def check_that_scales_matter(name, case):
    got, _ = by_both(Problem(*case, Numbers(name, exact=True)), torch.float32)
    for what in ("row_scale", "weight_scale"):
        q = Problem(*case, Numbers(name, exact=True))
        setattr(q, what, getattr(q, what).roll(1, -1))
        _, other = by_both(q, torch.float32)
        assert not torch.equal(got, other), what


def checks():
    """Names of what is right."""
    InterpreterBuilder.create_dot_scaled = create_dot_scaled
    TritonSemantic.dot_scaled = dot_scaled_of_strings
    for name, native in WAYS:
        use_products(native)
        cases = CASES["fp8" if name == "fp8" else "scaled"]
        for splits, widths in cases:
            check_products(name, splits, widths)
            check_gradients(name, splits, widths)
        widths = (264, 144) if name == "fp8" else (264, 160)
        check_biases(run, Problem((19, 0, 3), widths, Numbers(name, exact=True), tail=3), DTYPES)
        scattered = Problem((3, 9), (40, 64), Numbers(name, exact=True))
        check_biases(
            lambda p, out, **options: run(p, out, scattered=True, **options), scattered, DTYPES
        )
        check_that_scales_matter(name, cases[0])
        if native:
            check_wide_tiles(name)
        assert (name in dots) == native
        dots.clear()
        yield f"{name}, native {native}", None
