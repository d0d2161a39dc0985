"""Recipes, the numbers that they make, sizes and cases that tests of layers in low precision share."""

from dataclasses import replace
from functools import partial
from itertools import product

import low_precision_oracle as oracle
import pytest
import torch
from grouped_cases import BUFFERS, DTYPES, Case, Sizes

from symmoe import MoEConfig
from symmoe.kernels import twin
from symmoe.precision import MXFP8, NVFP4, Float8Block

RECIPES = [Float8Block(), Float8Block(power_of_two=True), MXFP8(), NVFP4()]

every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=str)

# Marks. A kernel whose warps wait for each other for ever cannot be interrupted: the process ends.
ON_GPUS = [
    pytest.mark.gpu,
    pytest.mark.timeout(300, method="thread"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
        reason="needs a GPU that converts to E4M3: Hopper and newer",
    ),
]

# Without rows, one row, unaligned, more than a tile; widths that end within a block of 128.
SIZES = Sizes(splits=(130, 0, 1, 25), lead=(16, 10), hidden=160, ffn=96)

# The same on GPUs: of whole tiles, and such that end within a block.
LARGE = Sizes(splits=(300, 0, 1, 129, 70), lead=(51, 10), hidden=512, ffn=256)
LARGE_ODD = replace(LARGE, hidden=544, ffn=288)

SMALL = Sizes(splits=(9, 0, 1, 14), lead=(7, 4), hidden=160, ffn=96)

TINY = Sizes(splits=(3, 0, 2, 4), lead=(3, 4), hidden=64, ffn=32)

OUT = 96  # columns of a single linear layer

NUMBERS = {
    Float8Block(): oracle.Numbers(*oracle.E4M3_BLOCK),
    Float8Block(power_of_two=True): oracle.Numbers(*oracle.E4M3_POWERS),
    MXFP8(): oracle.Numbers(*oracle.E4M3_MX),
    NVFP4(stochastic_gradients=False): oracle.Numbers(*oracle.E2M1, signs=0x9A5C),
    NVFP4(stochastic_gradients=False, hadamard_signs=None): oracle.Numbers(*oracle.E2M1),
}


# Of a product of two operands whose elements have independent errors of 2.8 % and 11.5 % (E4M3 and E2M1, numbers from a
# normal distribution, test_precision.py): the root of two of them. Stochastic rounding doubles the variance.
ONE_PRODUCT = {"e4m3": 0.045, "e2m1": 0.25}

TWO_LAYERS = {"e4m3": 0.08, "e2m1": 0.4}  # each of which adds its own


CASES = [  # every pair of two options
    Case(
        dtype,
        is_nd=bias != (dtype == torch.bfloat16),
        bias=bias,
        buffers=buffers,
        main_grad=main_grad,
        delayed=bias != main_grad,
    )
    for (dtype, buffers), bias, main_grad in product(
        zip(DTYPES, BUFFERS, strict=True), (False, True), (False, True)
    )
]


def config_for(num_ranks: int, **options) -> MoEConfig:
    return MoEConfig(
        hidden=64,
        ffn=32,
        num_experts=2 * num_ranks,
        top_k=2,
        **{"schedule": "always-overlapped", **options},
    )


def count_calls(monkeypatch, *names: str) -> dict[str, int]:
    """How often the kernels of these names are called from now on."""
    counts = dict.fromkeys(names, 0)

    def counted(name: str, call, *args, **options):
        counts[name] += 1
        return call(*args, **options)

    for name in names:
        monkeypatch.setattr(twin, name, partial(counted, name, getattr(twin, name)))
    return counts
