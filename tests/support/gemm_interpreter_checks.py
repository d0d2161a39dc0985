"""Runs GEMMs and activations in Triton's interpreter, and compares them with the twins: every bit, of whole numbers,
whose sums are exact; what is made with exp or erf within a tolerance. Sizes are tiny; the tiles are smaller still, so
that every case has several tiles, partial ones, and partial contraction blocks. tl.dot on bf16 is wrong in Triton 3.6's
interpreter, so bf16 is left to the GPU tests."""

from dataclasses import replace
from functools import partial
from itertools import product

import gemm_problem as problems
import torch
from compared_launches import Numbers, differences
from launch_table import FP16, FP32, Launch
from row_ranges import random_ranges
from triton.tools.ragged_tma import create_ragged_descriptor

from symmoe.kernels import twin
from symmoe.kernels.activation import Activation
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

kernels = problems.triton_kernels()


def crossed(*words):
    """Ways of one word of each."""
    return [" ".join(ways) for ways in product(*words)]


GATHER = "", "gather"
BIASES = "", "bias", "biased"
OTHERS = "table", "accumulate"
PRODUCTS = [  # kernel, ways, zero_tail
    *product(["grouped_gemm"], crossed(GATHER, BIASES), [False, True]),
    *product(["grouped_gemm"], crossed(GATHER, BIASES, OTHERS), [False]),
    *product(["grouped_gemm_dgrad"], GATHER, [False, True]),
    *product(["grouped_gemm_dgrad"], crossed(GATHER, OTHERS), [False]),
]
RESULTS = {FP32: ("",), FP16: ("", "fp32")}


def compared(launch, splits, config=None, *, tolerance=0.0, **options):
    """The launch, and what checks it."""
    tuning = {} if config is None else {"num_sms": NUM_SMS, "config": config}
    if launch.kernel == "grouped_gemm_dact":  # tiles are smaller than any that are chosen
        tuning["workspace"] = torch.full((50_000,), torch.nan)
    options |= {"splits": splits, "tuning": tuning, "tolerance": tolerance}
    name = f"{launch}, {launch.activation}, {launch.changes}, {splits}"
    return name, partial(differences, launch, kernels, **options)


def products(sizes, dtype, splits, config=None, **options):
    for kernel, ways, zero_tail in PRODUCTS:
        launch = Launch(kernel, sizes, dtype, ways=ways, changes={"zero_tail": zero_tail})
        yield compared(launch, splits, config, **options)


def gradients(sizes, dtype, splits, config=None):
    sums = "", "accumulate"
    packed = crossed(("", "gather-dout"), GATHER, sums, RESULTS[dtype])
    for ways in [*packed, *crossed(["gather"], sums, ("table", "fp32-table"))]:
        launch = Launch("grouped_gemm_wgrad", sizes, dtype, ways=ways)
        yield compared(launch, splits, config, tolerance=EXACT)


def bias_gradients(sizes, dtype, splits):
    for ways in crossed(GATHER, ("", "unscaled"), RESULTS[dtype]):
        yield compared(Launch("grouped_bias_grad", sizes, dtype, ways=ways), splits)
    for ways in crossed(GATHER, ("", "first")):
        yield compared(Launch("grouped_bias_dot", sizes, dtype, ways=ways), splits)


def parts_of_products(dtype, splits, config):
    """Rows of other parts are NaN, and are not written."""
    gemm, dgrad = "grouped_gemm", "grouped_gemm_dgrad"
    ways = (gemm, "biased"), (gemm, "gather table bias"), (dgrad, "")
    for (kernel, way), part in product(ways, random_ranges(splits, 3)):
        launch = Launch(kernel, SIZES, dtype, ways=way, changes={"zero_tail": False})
        yield compared(launch, splits, config, part=part)


# -- activations, by themselves and fused with GEMMs -------------------------------------------------------------------
def tolerance_of(dtype, activation):
    return 0.0 if activation == SRELU else TOLERANCE[dtype]


def fused(case, *ways, sizes=ACT_SIZES, changes=None, **options):
    """Both passes; changes: of the backward pass."""
    splits, dtype, activation, (flatten, parts, lead), is_table = case
    config = replace(CONFIG, block_n=64, flatten=flatten, parts=parts)
    options["tolerance"] = tolerance_of(dtype, activation)
    for way in ways:
        kind = {"activation": activation, "ways": f"{way} table" if is_table else way}
        forward = Launch("grouped_gemm_act", sizes, dtype, **kind)
        backward = Launch("grouped_gemm_dact", sizes, dtype, changes=changes, **kind)
        yield compared(forward, splits, config, **options)
        yield compared(backward, splits, replace(config, lead=lead), **options)


def parts_of_fused(case):
    """Rows of other parts are NaN, and are not written."""
    changes = {"gradients": ("N W", "N I", None, None)}
    for part in random_ranges(case[0], 3):
        yield from fused(case, "gather" if case[-1] else "", changes=changes, part=part)


def activations(dtype, activation, splits=(50,)):
    for kernel in ("scaled_activation", "scaled_activation_grad"):
        launch = Launch(kernel, {"I": 72}, dtype, activation=activation)
        yield compared(launch, splits, tolerance=tolerance_of(dtype, activation))


def check_sums_of_parts():
    """Parts leave their sums in the workspace: together those of the whole."""
    splits = (33, 1, 9)
    arguments = Numbers(
        Launch("grouped_gemm_dact", ACT_SIZES, FP32, activation=SRELU), splits=splits
    )
    made = arguments.launch.arguments(arguments)
    made["workspace"].fill_(torch.nan)
    *results, dscale, _ = made["gradients"]
    for part in random_ranges(splits, 3):
        given = {**made, "row_range": part, "gradients": (*results, None, None)}
        num_partials = kernels.grouped_gemm_dact(**given)
    found = dscale.clone()
    kernels.sum_dact_partials(made["workspace"], made["row_range"], found, num_partials)
    twin.grouped_gemm_dact(**made)
    assert torch.equal(found, dscale)


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
        dtype = (FP32, FP16)[i % 2]
        # Wide tiles add to what is there in two pieces.
        config = replace(CONFIG, flatten=i % 2 == 0, block_n=16 if i < 2 else 128)
        yield from products(SIZES, dtype, splits, config)
        yield from gradients(SIZES, dtype, splits, config)
        yield from bias_gradients(SIZES, dtype, splits)
        yield from parts_of_products(dtype, splits, replace(config, block_n=16))
    yield from parts_of_products(FP16, (37,), CONFIG)
    # More groups than rows, and more than a power of two.
    many = (1, 0, 0, 2) * 17
    wide = replace(CONFIG, block_n=64, block_k=32)
    yield compared(Launch("grouped_gemm", SIZES, FP32, changes={"zero_tail": True}), many, wide)
    yield from bias_gradients(SIZES, FP32, many)
    # Several tiles of rows.
    yield from bias_gradients({**SIZES, "N": 440}, FP32, (0, 300, 1, 129))
    # Nothing to launch, but zeros for a gradient that is not added to something.
    yield from products({**SIZES, "N": 9}, FP16, (0, 0), CONFIG)
    none = {**SIZES, "N": 0}
    yield from products(none, FP32, (0, 0))
    yield from gradients(none, FP32, (0, 0))
    yield from bias_gradients(none, FP32, (0, 0))
    yield from activations(FP32, Activation(), ())
    yield from fused(ACT_CASES[4], "biased", "gather", sizes={**ACT_SIZES, "N": 0})
    yield "descriptor", check_ragged_descriptor
    yield "splits_to_row_range", partial(problems.check_splits, kernels)
    for case in ACT_CASES:
        yield from fused(case, "biased", "gather")
        yield from activations(*case[1:3])
    for case in (ACT_CASES[i] for i in (0, 2, 5)):
        yield from parts_of_fused(case)
    yield "grouped_gemm_dact, sums of parts", check_sums_of_parts
