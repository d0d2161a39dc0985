"""Runs the sources of the quantisers of columns and weights for Hopper in gluon_emulator.py. For test_interpreted.py.
The emulator has none of Triton's arithmetic: conversions and scales are numpy's, as the reference of the quantisers has
them. What is checked is which numbers share a scale and where results go."""

from functools import partial

import gluon_emulator
import numpy as np
import quantize_reference as reference
import torch
from compared_launches import Numbers, differences
from launch_table import BF16, FP16, Launch

from symmoe.kernels.low_precision import hopper_columns, hopper_weights

SPLITS = (0, 37, 128, 1, 0, 161)
SMS = (1, 4, 1, 2)
NAMES = ("float8_block", "float8_block_powers")
MANY = tuple(3 * (i % 4 == 1) for i in range(40))  # groups of which a lane has two
WEIGHTS = {"W": 256, "H": 384}
KERNELS = "quantize_columns", "requantize_columns", "quantize_weight_pairs"


def install_arithmetic():
    hopper_columns.block_scales_or_nan = reference.block_scales_or_nan
    hopper_columns.magnitude_bits = lambda x: x.abs().contiguous().view(torch.int32)
    for module in (hopper_columns, hopper_weights):
        module.e4m3_code = e4m3_code
        module.largest = largest
        module.unpack = lambda words, dtype: numbers(words, dtype).unbind(-1)
    hopper_weights.code_pairs = lambda *pair: (
        e4m3_code(torch.stack(pair, dim=-1)).view(torch.int16).squeeze(-1)
    )
    hopper_columns.decoded = decoded
    hopper_weights.matrix_pointer = gluon_emulator.pointer_in_table


def numbers(words, dtype):
    """fp32 [..., words, 2]."""
    return words.contiguous().view(*words.shape, 1).view(dtype).float()


def e4m3_code(x):
    """Of fp32 numbers."""
    return torch.from_numpy(reference.e4m3(x.numpy()).view(np.uint8).copy()) & ~sign_of_nan(x)


def largest(words, dtype):
    """Along the tokens; NaN if one number is."""
    return numbers(words, dtype).abs().amax(0).to(dtype).view(torch.int32).squeeze(-1)


def decoded(codes, scale, dtype):
    """Words of code * scale in dtype."""
    exact = codes.contiguous().view(torch.float8_e4m3fn).float() * scale
    return exact.to(dtype).view(torch.int32)


def sign_of_nan(x):
    """Where the conversion has no sign."""
    return torch.isnan(x).to(torch.uint8) << 7


def compared(kernel, sizes, dtype, name, ways, splits, num_sms):
    """The launch, and what checks it."""
    launch = Launch(f"launch_{kernel}", sizes, dtype, name, ways=ways)
    options = {"splits": splits, "hard": True, "tuning": {"num_sms": num_sms}}
    check = partial(differences, launch, like=kernel, **options)
    return f"{launch}, {splits}, {num_sms} SMs", check


def is_right(*case):
    _, check = compared(*case)
    assert check() == []


def check_that_mistakes_are_noticed():
    """Rows past a group's end; scales of the neighbouring block; the same tile again; a tile that has not come. Of
    weights codes of neighbours changed places; another matrix; another scale."""
    gluon_emulator.check_mistakes(
        partial(is_right, KERNELS[0], {"H": 256}, BF16, NAMES[0], "", SPLITS, 1),
        (
            hopper_columns,
            "locate",
            lambda right: lambda *args: (right(*args)[0], right(*args)[1] + 1),
        ),
        (
            hopper_columns,
            "block_scales_or_nan",
            lambda right: lambda *args: tuple(x.roll(1) for x in right(*args)),
        ),
        (hopper_columns, "further", lambda right: lambda at, *_: at),
        (hopper_columns.async_copy, "wait_group", lambda right: lambda number: None),
    )
    gluon_emulator.check_mistakes(
        partial(is_right, KERNELS[2], {"W": 256, "H": 256}, BF16, NAMES[0], "", (1, 1), 1),
        (hopper_weights, "code_pairs", lambda right: lambda a, b: right(b, a)),
        (
            hopper_weights,
            "store_transposed",
            lambda right: lambda *args: right(*args[:3], 1 - args[3], *args[4:]),
        ),
        (hopper_weights, "scales_of", lambda right: lambda x, plan: right(2 * x, plan)),
        (hopper_weights.async_copy, "wait_group", lambda right: lambda number: None),
    )


def checks():
    """Names, and what checks them."""
    install_arithmetic()
    Numbers.elsewhere = gluon_emulator.ELSEWHERE
    columns, wire, weights = KERNELS
    for number, num_sms in enumerate(SMS):
        sizes = {"H": (272, 256)[number % 2]}
        name = NAMES[number % 2]
        for dtype in (BF16, FP16):
            for kernel, ways in ((columns, ""), (columns, "indexed"), (wire, "indexed")):
                yield compared(kernel, sizes, dtype, name, ways, SPLITS, num_sms)
            for ways in ("", "table"):
                yield compared(weights, WEIGHTS, dtype, name, ways, (1, 1, 1), num_sms)
        yield compared(wire, sizes, BF16, name, "", (0, 40, 3), num_sms)
    for num_sms in (1, 3, 100):  # two panels; of which a program has more than one, or no tile
        yield compared(columns, {"H": 1024}, BF16, NAMES[0], "", SPLITS, num_sms)
    yield compared(columns, {"H": 256}, BF16, NAMES[0], "", (0, 0), 1)
    # A copy of codes and scales.
    yield compared(wire, {"H": 264}, BF16, NAMES[0], "indexed", SPLITS, 1)
    yield compared(columns, {"H": 128}, BF16, NAMES[0], "", MANY, 1)
    yield "mistakes", check_that_mistakes_are_noticed
