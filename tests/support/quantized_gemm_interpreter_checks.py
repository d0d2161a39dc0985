"""Runs the Triton GEMMs of quantised numbers in Triton's interpreter and compares them with the twins.
test_interpreted.py runs it with TRITON_INTERPRET=1, which must be set before triton is imported.

The interpreter of Triton 3.6 has no dot_scaled: here is one in float64, from the formats' definitions. Numbers are such
that sums are exact: every bit has to be the same."""

from functools import partial
from itertools import product

import numpy as np
import torch
import triton.language as tl
from compared_launches import Numbers, differences
from launch_table import FP16, FP32, Launch
from quantized_problem import dequantised
from row_ranges import random_ranges
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from symmoe.kernels.low_precision import products
from symmoe.kernels.low_precision.block_scaled import scaled

# Splits; O, C.
CASES = {
    "float8_block": [
        ((19, 0, 1, 40, 0), (136, 272)),
        ((0, 0, 0), (48, 64)),
        ((0, 130, 0), (48, 64)),
    ],
    "mxfp8": [((19, 0, 1, 150, 0), (136, 288)), ((0, 0, 0), (48, 64)), ((0, 130, 0), (264, 64))],
}
CASES["nvfp4"] = CASES["mxfp8"]
WAYS = [("float8_block", False), ("mxfp8", True), ("nvfp4", True), ("nvfp4", False)]
PRODUCTS = [  # dtype, ways; the interpreter truncates to bf16
    (FP32, ""),
    (FP16, "zero-tail"),
    (FP32, "scattered"),
    (FP16, "zero-tail scattered"),
    (FP16, "biased zero-tail"),
    (FP32, "bias"),
    (FP32, "biased scattered"),
]
GRADIENTS = [
    (FP32, "accumulate"),
    (FP16, "accumulate"),
    (FP16, ""),
    (FP32, "accumulate table"),
    (FP32, "table"),
]
dots = []


def create_dot_scaled(
    self, left, left_scale, _, right, right_scale, __, fast_math, left_k_pack, right_k_pack, acc
):
    """The definition of tl.dot_scaled, for the two formats."""
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
    self, left, left_scale, left_format, right, right_scale, right_format, *args
):
    """In the interpreter constants are plain values; Triton 3.6 wants names of formats to be constexpr."""
    formats = tl.constexpr(left_format), tl.constexpr(right_format)
    return dot_scaled(self, left, left_scale, formats[0], right, right_scale, formats[1], *args)


def use_products(native):
    scaled.scaled_products = lambda device: "tcgen05" if native else None


def tuning_of(name):
    if name != "float8_block":
        return {"num_sms": 3}
    return {"block_m": 32, "block_n": 64, "group_m": 2, "num_sms": 3}


def compared(kernel, name, case, dtype, ways, tuning=None, **options):
    """The launch, and what checks it."""
    splits, (out, width) = case
    launch = Launch(kernel, {"W": out, "H": width}, dtype, name, ways=ways)
    tuning = tuning_of(name) if tuning is None else tuning
    check = partial(differences, launch, products, splits=splits, tuning=tuning, **options)
    return f"{launch}, {splits}, {'a part' if options else 'all'}", check


def parts(name, splits):
    """Ranges of rows; of scales in tiles also such that begin in the last tenth of a group: 135 of 150."""
    ranges = [*random_ranges(splits, 2, step=1)]
    if name != "float8_block":
        begins, ends = Numbers(Launch("group_amax", {"H": 16}), splits=splits).groups
        lasts = torch.stack([begins + torch.tensor(splits) * 9 // 10, ends]).int()
        ranges += [*random_ranges(splits, 2, step=128), lasts]
    return ranges


def check_wide_tiles(name):
    """Tiles of 256 columns, the last of which reads on into the scales of the next matrix, or of none."""
    (_, wide), *_ = scaled.TCGEN05_CONFIGS[{"mxfp8": "e4m3", "nvfp4": "e2m1"}[name]]
    assert wide.block_n == 256
    case = (3, 0, 4), (384, 128)
    for tuning in ({"num_sms": 3}, {"block_n": 128, "num_sms": 1}):
        yield compared("grouped_gemm_quantized", name, case, FP32, "", tuning)


def check_that_scales_matter(name, case, native):
    """And that only products with scales are native."""
    dots.clear()
    for operand in ("rows", "weight"):
        splits, (out, width) = case
        launch = Launch("grouped_gemm_quantized", {"W": out, "H": width}, FP32, name)

        class Wrong:
            @staticmethod
            def grouped_gemm_quantized(operand=operand, **arguments):
                original = arguments[operand]
                arguments[operand] = original._replace(scale=original.scale.roll(1, -1))
                products.grouped_gemm_quantized(**arguments)

        assert differences(launch, Wrong, splits=splits, tuning=tuning_of(name)), operand
    assert (name in dots) == native


def checks():
    """Names, and what checks them."""
    InterpreterBuilder.create_dot_scaled = create_dot_scaled
    TritonSemantic.dot_scaled = dot_scaled_of_strings
    gemm, wgrad = "grouped_gemm_quantized", "grouped_gemm_wgrad_quantized"
    for name, native in WAYS:
        use_products(native)
        for case in CASES[name]:
            for options in PRODUCTS:
                yield compared(gemm, name, case, *options)
            for options in GRADIENTS:
                yield compared(wgrad, name, case, *options)
            ways = "" if name == "float8_block" else "parts"
            for (dtype, variant), part in product(
                [(FP32, ""), (FP16, "biased")], parts(name, case[0])
            ):
                yield compared(gemm, name, case, dtype, f"{ways} {variant}", part=part)
        scales_matter = partial(check_that_scales_matter, name, CASES[name][0], native)
        yield f"scales of {gemm}, {name}, native {native}", scales_matter
        if native:
            yield from check_wide_tiles(name)
