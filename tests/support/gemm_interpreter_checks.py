"""Runs GEMMs and activations in Triton's interpreter, and compares them with the twins: every bit, of whole numbers,
whose sums are exact; what is made with exp or erf within a tolerance. Sizes are tiny; the tiles are smaller still, so
that every case has several tiles, partial ones, and partial contraction blocks. tl.dot on bf16 is wrong in Triton 3.6's
interpreter, so bf16 is left to the GPU tests."""

from dataclasses import replace
from functools import partial
from itertools import product

import gemm_problem as problems
import torch
from compared_launches import check_sums_of_parts, differences
from launch_table import FP16, FP32, Launch
from row_ranges import random_ranges
from triton.tools.ragged_tma import create_ragged_descriptor

from symmoe.kernels.activation import SWIGLU, Activation
from symmoe.kernels.triton import tiles

SIZES = {"H": 24, "W": 40, "N": 64}
SPLITS = [(19, 0, 1, 32, 0), (64, 0, 0, 0, 0), (0, 16, 0, 0, 47), (5, 0, 30, 0, 1)]
CONFIG = tiles.TileConfig(block_m=16, block_n=16, block_k=16, num_stages=2, num_warps=4, group_m=2)
NUM_SMS = 3
tiles.device_num_sms = lambda device: NUM_SMS  # a launch asks for it, even without rows
ACT_SIZES = {"H": 24, "I": 72, "N": 64}
TOLERANCE = {FP32: 1e-4, FP16: 1.5e-3}  # one rounding, and in fp32 sums of many
EXACT = 1e-9  # but for signs of zeros: a group of one row adds nothing to them
SRELU = Activation(function="relu2", is_gated=False)
# splits, dtype, activation, (flatten, parts, lead), whether weights are tables
ACT_CASES = [
    ((19, 0, 1, 32, 0), FP32, Activation(), (False, 1, 0), False),
    ((0, 16, 0, 0, 47), FP16, Activation(alpha=1.702, limit=1.0, offset=1.0), (True, 2, 1), False),
    ((64, 0, 0), FP16, Activation(interleave=8), (False, 2, 2), True),
    ((5, 30, 4), FP32, Activation(interleave=1, limit=1.0), (True, 2, 1), True),
    ((0, 0), FP32, Activation(interleave=4), (False, 2, 2), False),
    ((33, 1, 9), FP16, SRELU, (False, 2, 1), False),
    ((33, 1, 9), FP32, SRELU, (True, 1, 0), True),
    ((20, 17), FP16, Activation(interleave=2), (False, 1, 0), False),
    ((20, 17), FP32, Activation(function="gelu"), (False, 1, 0), False),
    ((20, 17), FP16, Activation(function="gelu", is_gated=False), (True, 2, 1), False),
    (
        (20, 17),
        FP32,
        Activation(function="gelu_tanh", limit=1.0, offset=1.0),
        (True, 1, 0),
        False,
    ),
    ((20, 17), FP16, Activation(is_gated=False, alpha=1.702), (False, 2, 1), False),
]

GATHER = "", "gather"
SUMS = "", "accumulate"


def crossed(kernel, *words):
    """The kernel, with ways of one word of each."""
    return [(kernel, " ".join(ways)) for ways in product(*words)]


BIAS_GRADIENTS = [
    *crossed("grouped_bias_grad", GATHER, ("", "unscaled"), ("", "fp32")),
    *crossed("grouped_bias_dot", GATHER, ("", "first")),
]
PRODUCTS = [
    *crossed("grouped_gemm", GATHER, ("", "bias", "biased"), ("", "zero-tail", "table")),
    *crossed("grouped_gemm", GATHER, ("", "bias", "biased keep-tail"), ["accumulate"]),
    *crossed("grouped_gemm_dgrad", GATHER, ("", "table", "keep-tail", "keep-tail accumulate")),
    *crossed("grouped_gemm_wgrad", ("", "gather-dout"), GATHER, SUMS, ("", "fp32")),
    *crossed("grouped_gemm_wgrad", ["gather"], SUMS, ("table", "fp32-table")),
    *BIAS_GRADIENTS,
]
PARTS = [
    ("grouped_gemm", "biased keep-tail"),
    ("grouped_gemm", "gather table bias"),
    ("grouped_gemm_dgrad", "keep-tail"),
]
ACTIVATIONS = [("scaled_activation", ""), ("scaled_activation_grad", "")]
FUSED = list(product(("grouped_gemm_act", "grouped_gemm_dact"), ("biased", "gather")))
PARTS_OF_FUSED = [
    *crossed("grouped_gemm_act", GATHER),
    *crossed("grouped_gemm_dact", GATHER, ["unsummed"]),
]

kernels = problems.triton_kernels()


def compared(ways, sizes, dtype, splits, config=CONFIG, *, parts=(None,), activation=SWIGLU):
    """Launches of kernels in their ways, and what checks them. Rows of other parts are NaN, and are not written."""
    for (kernel, variant), part in product(ways, parts):
        launch = Launch(kernel, sizes, dtype, activation=activation, ways=variant)
        tuning = {"num_sms": NUM_SMS, "config": config} if "gemm" in kernel else {}
        if kernel == "grouped_gemm_dact":  # tiles are smaller than any that are chosen
            tuning["workspace"] = torch.full((50_000,), torch.nan)
        is_rounded = "act" in kernel and activation != SRELU
        numbers = {"tolerance": TOLERANCE[dtype] if is_rounded else EXACT}
        if kernel == "grouped_bias_grad":  # the order of its sums is the twin's
            numbers = {"hard": True}
        options = {"splits": splits, "part": part, "tuning": tuning, **numbers}
        check = partial(differences, launch, kernels, **options)
        yield f"{launch}, {activation}, {splits}", check


def fused(case, ways, *, sizes=ACT_SIZES, **options):
    splits, dtype, activation, (flatten, parts, lead), is_table = case
    config = replace(CONFIG, block_n=64, flatten=flatten, parts=parts, lead=lead)
    ways = [(kernel, f"{variant} table" if is_table else variant) for kernel, variant in ways]
    return compared(ways, sizes, dtype, splits, config, activation=activation, **options)


def check_ragged_descriptor():
    """The descriptor that is made by hand is Triton's."""
    for shape, block in (((7, 24), [16, 8]), ((300, 2048), [64, 128])):
        rows = torch.empty(shape)
        actual = tiles.ragged_descriptor(rows, block)
        expected = create_ragged_descriptor(rows, block)
        for name in ("shape", "strides", "block_shape", "padding"):
            assert list(getattr(actual, name)) == list(getattr(expected, name)), name


def checks():
    """Names, and what checks them."""
    for i, splits in enumerate(SPLITS):
        dtype = (FP32, FP16)[i % 2]
        # Wide tiles add to what is there in two pieces.
        config = replace(CONFIG, flatten=i % 2 == 0, block_n=16 if i < 2 else 128)
        yield from compared(PRODUCTS, SIZES, dtype, splits, config)
        config = replace(config, block_n=16)
        yield from compared(PARTS, SIZES, dtype, splits, config, parts=random_ranges(splits, 3))
    yield from compared(PARTS, SIZES, FP16, (37,), parts=random_ranges((37,), 3))
    # More groups than rows, and more than a power of two.
    many = [("grouped_gemm", "zero-tail"), *BIAS_GRADIENTS]
    wide = replace(CONFIG, block_n=64, block_k=32)
    yield from compared(many, SIZES, FP32, (1, 0, 0, 2) * 17, wide)
    # Several tiles of rows.
    yield from compared(BIAS_GRADIENTS, {**SIZES, "N": 440}, FP32, (0, 300, 1, 129))
    # Nothing to launch, but zeros for a gradient that is not added to something.
    yield from compared(PRODUCTS, {**SIZES, "N": 9}, FP16, (0, 0))
    yield from compared(PRODUCTS, {**SIZES, "N": 0}, FP32, (0, 0), None)
    yield from fused(ACT_CASES[4], FUSED, sizes={**ACT_SIZES, "N": 0})
    yield from compared(ACTIVATIONS, {**ACT_SIZES, "N": 0}, FP32, ())
    yield "descriptor", check_ragged_descriptor
    yield "splits_to_row_range", partial(problems.check_splits, kernels)
    for case in ACT_CASES:
        splits, dtype, activation, *_ = case
        yield from fused(case, FUSED)
        yield from compared(ACTIVATIONS, ACT_SIZES, dtype, splits, activation=activation)
    for case in (ACT_CASES[i] for i in (0, 2, 5)):
        yield from fused(case, PARTS_OF_FUSED, parts=random_ranges(case[0], 3))
    launch = Launch("grouped_gemm_dact", ACT_SIZES, FP32, activation=SRELU)
    check = partial(check_sums_of_parts, launch, kernels, (33, 1, 9))
    yield "grouped_gemm_dact, sums of parts", check
