"""Runs GEMMs and activations in Triton's interpreter, against float64. Sizes are tiny; the tiles are smaller still, so
that every case has several tiles, partial ones, and partial contraction blocks. tl.dot on bf16 is wrong in Triton 3.6's
interpreter, so bf16 is left to the GPU tests."""

import itertools
from dataclasses import replace
from functools import partial

import gemm_problem as problems
import torch
from row_ranges import random_ranges
from triton.tools.ragged_tma import create_ragged_descriptor

from symmoe.kernels.activation import Activation
from symmoe.kernels.triton import tiles

WIDTHS, CAPACITY = (24, 40), 64
SPLITS = [(19, 0, 1, 32, 0), (64, 0, 0, 0, 0), (0, 16, 0, 0, 47), (5, 0, 30, 0, 1)]
CONFIG = tiles.TileConfig(block_m=16, block_n=16, block_k=16, num_stages=2, num_warps=4, group_m=2)
NUM_SMS = 3
tiles.device_num_sms = lambda device: NUM_SMS  # a launch asks for it, even without rows
ACT_WIDTHS = (24, 72)
# splits, dtype, activation, (flatten, parts, lead), whether weights are tables
ACT_CASES = [
    ((19, 0, 1, 32, 0), torch.float32, Activation(), (False, 1, 0), False),
    (
        (0, 16, 0, 0, 47),
        torch.float16,
        Activation(alpha=1.702, limit=1.0, offset=1.0),
        (True, 2, 1),
        False,
    ),
    ((64, 0, 0), torch.float16, Activation(interleave=8), (False, 2, 2), True),
    ((5, 30, 4), torch.float32, Activation(interleave=1, limit=1.0), (True, 2, 1), True),
    ((0, 0), torch.float32, Activation(interleave=4), (False, 2, 2), False),
    ((33, 1, 9), torch.float16, Activation(function="relu2", is_gated=False), (False, 2, 1), False),
    ((33, 1, 9), torch.float32, Activation(function="relu2", is_gated=False), (True, 1, 0), True),
    ((20, 17), torch.float16, Activation(interleave=2), (False, 1, 0), False),
    ((20, 17), torch.float32, Activation(function="gelu"), (False, 1, 0), False),
    ((20, 17), torch.float16, Activation(function="gelu", is_gated=False), (True, 2, 1), False),
    (
        (20, 17),
        torch.float32,
        Activation(function="gelu_tanh", limit=1.0, offset=1.0),
        (True, 1, 0),
        False,
    ),
    ((20, 17), torch.float16, Activation(is_gated=False, alpha=1.702), (False, 2, 1), False),
]

kernels = problems.triton_kernels()


def check_parts(splits, dtype, options):
    """Of whole numbers: NumPy's order of sums depends on a row's place in a tile."""
    p = problems.Problem(splits, WIDTHS, dtype, capacity=CAPACITY, is_exact=True)
    for name in ("biased", "gathered", "dgrad"):
        problems.check_ranges(
            p, *problems.part_calls(kernels, p, **options)[name], random_ranges(splits, 3)
        )


def check_many_groups():
    """More groups than rows, and more than a power of two."""
    p = problems.Problem((1, 0, 0, 2) * 17, WIDTHS, torch.float32, capacity=CAPACITY)
    options = {"num_sms": NUM_SMS, "config": replace(CONFIG, block_n=64, block_k=32)}
    problems.check_gemm(kernels, p, False, False, "none", True, **options)
    for case in itertools.product(problems.BOTH, problems.BOTH, problems.BOTH):
        problems.check_biases(kernels, p, *case)


def check_biases_of_several_tiles():
    p = problems.Problem((0, 300, 1, 129), WIDTHS, torch.float32, capacity=440)
    for case in itertools.product(problems.BOTH, problems.BOTH, problems.BOTH):
        problems.check_biases(kernels, p, *case)


def check_no_rows():
    """Nothing to launch, but zeros for a gradient that is not added to something."""
    p = problems.Problem((0, 0), WIDTHS, torch.float32, capacity=0)
    for accumulate in problems.BOTH:
        problems.check_wgrad(kernels, p, False, False, True, accumulate, torch.float32)
    problems.check_gemm(kernels, p, False, False, "none", True)
    problems.check_biases(kernels, p, False, False, False)
    problems.check_products(
        kernels,
        problems.Problem((0, 0), WIDTHS, torch.float16, capacity=9),
        num_sms=NUM_SMS,
        config=CONFIG,
    )
    p = problems.ActProblem((0, 0), ACT_WIDTHS, torch.float32, Activation(), capacity=0)
    problems.check_act(kernels, p)
    problems.check_activation(kernels, p)


def options_of(flatten, parts, lead):
    """(of the forward kernel, of the backward kernel)."""
    act_config = replace(CONFIG, block_n=64, flatten=flatten, parts=parts)
    dact_config = replace(act_config, lead=lead)
    return {"num_sms": NUM_SMS, "config": act_config}, {"num_sms": NUM_SMS, "config": dact_config}


def check_both_passes(splits, dtype, activation, config, is_table):
    p = problems.ActProblem(splits, ACT_WIDTHS, dtype, activation, capacity=CAPACITY)
    problems.check_act(kernels, p, *options_of(*config), table=is_table)
    problems.check_activation(
        kernels,
        problems.ActProblem((50,), ACT_WIDTHS, dtype, activation, capacity=50),
        dscale_dtype=dtype,
    )


def check_fused_ranges(splits, dtype, activation, config, is_table):
    """Of whole numbers: NumPy's order of sums depends on a row's place in a tile."""
    p = problems.ActProblem(splits, ACT_WIDTHS, dtype, activation, capacity=CAPACITY, is_exact=True)
    act_options, dact_options = options_of(*config)
    if is_table:
        scattered = [problems.Scattered(weight) for weight in (p.weight1, p.weight2)]
        p.weight1, p.weight2 = (each.table for each in scattered)
    options = {"act_options": act_options, "dact_options": dact_options, "gather": is_table}
    problems.check_act_ranges(kernels, p, random_ranges(splits, 3), **options)


def check_ragged_descriptor():
    """The descriptor that is made by hand is Triton's."""
    for shape, block in (((7, 24), [16, 8]), ((300, 2048), [64, 128])):
        rows = torch.empty(shape)
        ours = tiles.ragged_descriptor(rows, block)
        theirs = create_ragged_descriptor(rows, block)
        for name in ("shape", "strides", "block_shape", "padding"):
            assert list(getattr(ours, name)) == list(getattr(theirs, name)), name


def checks():
    """Names, and what checks them."""
    for i, splits in enumerate(SPLITS):
        dtype = (torch.float32, torch.float16)[i % 2]
        # Wide tiles add to what is there in two pieces.
        config = replace(CONFIG, flatten=i % 2 == 0, block_n=16 if i < 2 else 128)
        options = {"num_sms": NUM_SMS, "config": config}
        p = problems.Problem(splits, WIDTHS, dtype, capacity=CAPACITY)
        for names, check_it in (
            ("grouped_gemm, grouped_gemm_dgrad", problems.check_products),
            ("grouped_gemm_wgrad, grouped_bias_grad, grouped_bias_dot", problems.check_gradients),
        ):
            yield f"{names}, {splits}, {dtype}", partial(check_it, kernels, p, **options)
        options = {**options, "config": replace(config, block_n=16)}
        yield f"parts of grouped_gemm, {splits}", partial(check_parts, splits, dtype, options)
    options = {"num_sms": NUM_SMS, "config": CONFIG}
    yield "parts of grouped_gemm", partial(check_parts, (37,), torch.float16, options)
    yield "grouped_gemm, many groups", check_many_groups
    yield "grouped_bias_grad, grouped_bias_dot, several tiles", check_biases_of_several_tiles
    yield "no rows", check_no_rows
    yield "descriptor", check_ragged_descriptor
    yield "splits_to_row_range", partial(problems.check_splits, kernels)
    fused = "grouped_gemm_act, grouped_gemm_dact"
    for case in ACT_CASES:
        yield f"{fused}, scaled_activation, {case[:3]}", partial(check_both_passes, *case)
    for case in (ACT_CASES[i] for i in (0, 2, 5)):
        yield f"parts of {fused}, {case[:3]}", partial(check_fused_ranges, *case)
