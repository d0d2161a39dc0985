"""Runs the sources of the E4M3 kernels for Hopper in gluon_emulator.py and compares every bit with the twins. For
test_interpreted.py. Whole numbers: the sums are exact."""

from functools import partial
from types import SimpleNamespace

import gluon_emulator
from compared_launches import Numbers, differences
from launch_table import BF16, FP16, FP32, Launch
from row_ranges import random_ranges

from symmoe.kernels import hopper_launchers as launchers
from symmoe.kernels.low_precision import hopper_fp8

SPLITS = (140, 0, 1, 128, 0)
ODD = {"W": 528, "H": 400}
EXACT = {"W": 256, "H": 128}  # parts of tiles and blocks; whole ones
CASES = [(SPLITS, ODD), (SPLITS, EXACT), ((0, 0, 0), EXACT), ((0, 300, 9), ODD)]
PRODUCTS = [  # dtype, ways, options
    (BF16, "", {"num_sms": 3}),
    (BF16, "scattered", {"num_sms": 1}),
    (FP16, "zero-tail", {"num_sms": 2, "stages": 2, "group_m": 1}),
    (FP16, "scattered", {"num_sms": 2, "stages": 2, "group_m": 1}),
    (BF16, "bias zero-tail", {"num_sms": 3}),
    (FP16, "biased", {"num_sms": 3}),
    (BF16, "biased scattered", {"num_sms": 3}),
]
GRADIENTS = [
    (BF16, "", {}),
    (FP32, "", {}),
    (FP32, "accumulate", {"stages": 2}),
    (FP32, "accumulate", {"batch": 1}),
    (FP16, "accumulate", {}),
    (BF16, "", {"stages": 3, "batch": 4}),
    (FP32, "table", {"stages": 3}),
    (FP32, "accumulate table", {"batch": 1}),
]


gemm = partial(Launch, "launch_fp8_gemm")
wgrad = partial(Launch, "launch_fp8_wgrad")
product = partial(differences, like="grouped_gemm_quantized")
gradient = partial(differences, like="grouped_gemm_wgrad_quantized")


def other_block(scale):
    return scale.t().roll(1, 0).t()


def other_feature(scale):
    return scale.t().roll(1, 1).t()


def next_block(scale):
    return scale.roll(1, 1)


def with_scales_of(name, operand, change):
    """The launchers, one of which takes other scales for those of an operand."""

    def wrong(**arguments):
        original = arguments[operand]
        arguments[operand] = original._replace(scale=change(original.scale))
        getattr(launchers, name)(**arguments)

    return SimpleNamespace(**{name: wrong})


def frees_early(right):
    """product, with a first arrival at every stage's barrier before anything has been multiplied."""

    def wrong(scales, ring, *args):
        for i in range(3):
            gluon_emulator.barrier_arrive(ring[3].index(i))
        return right(scales, ring, *args)

    return wrong


def check_that_mistakes_are_noticed():
    """A ring that is said to be free too early; scales of another block, or feature."""
    launch = gemm({"W": 256, "H": 1024})
    assert product(launch, with_scales_of(launch.kernel, "rows", next_block), splits=(130,))

    def check():
        assert not product(launch, splits=(130,), tuning={"num_sms": 1})

    mistake = hopper_fp8, "product", frees_early
    gluon_emulator.check_mistakes(check, mistake, errors=(AssertionError, RuntimeError))
    launch = wgrad({"W": 256, "H": 256}, FP32)
    for operand in ("dout", "rows"):
        for change in (other_block, other_feature):
            wrong = with_scales_of(launch.kernel, operand, change)
            assert gradient(launch, wrong, splits=(130,)), (operand, change)


def checks():
    """Names, and what checks them."""
    hopper_fp8.matrix_pointer = gluon_emulator.pointer_in_table
    Numbers.elsewhere = gluon_emulator.ELSEWHERE
    for splits, sizes in CASES:
        for dtype, ways, options in PRODUCTS:
            launch = gemm(sizes, dtype, ways=ways)
            check = partial(product, launch, splits=splits, tuning=options)
            yield f"{launch}, {splits}", check
        for number, (dtype, ways, options) in enumerate(GRADIENTS):
            launch = wgrad(sizes, dtype, ways=ways)
            tuning = {"num_sms": 1 + number, **options}
            yield f"{launch}, {splits}", partial(gradient, launch, splits=splits, tuning=tuning)
    for part, num_sms in zip(random_ranges(SPLITS, 2), (3, 2), strict=True):
        for ways in ("", "biased"):
            launch = gemm(ODD, FP16, ways=ways)
            tuning = {"num_sms": num_sms}
            check = partial(product, launch, splits=SPLITS, part=part, tuning=tuning)
            yield f"a part of {launch}, {num_sms} SMs", check
    yield "mistakes", check_that_mistakes_are_noticed
