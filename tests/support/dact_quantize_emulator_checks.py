"""Runs the source of dact_quantize for Hopper in gluon_emulator.py, by the public function, and compares every byte
with the twin. For test_interpreted.py. The arithmetic is Triton's, which the emulator has not: the activation's is the
twin's, the quantisers' is numpy's. So what is checked is which numbers are computed with, and where results go."""

from functools import partial
from types import SimpleNamespace

import gluon_emulator
import torch
from columns_emulator_checks import e4m3_code
from compared_launches import differences
from hopper_emulator_checks import act_gradients, add_neighbours, sum_partials
from launch_table import ACTIVATIONS, BF16, FP16, SWIGLU, Launch
from quantize_reference import block_scales_or_nan
from row_ranges import spans_of

from symmoe.kernels import hopper_choice
from symmoe.kernels.low_precision import act_quantized, hopper_dact_quantize
from symmoe.kernels.triton import tiles

# Groups without rows, of one, of a tile, of more; more tiles than a band of rows has; none at all. FFN width, programs.
CASES = [((0, 140, 0, 1, 128), 256, 2), ((1300, 5), 128, 1), ((0, 0), 128, 2)]
NUMBERS = [
    ("float8_block", BF16, SWIGLU, "dbias"),
    ("float8_block", BF16, ACTIVATIONS["gpt-oss"], ""),
    ("float8_block_powers", FP16, SWIGLU, "fp32-dbias"),
]


def sum_tile(x):
    half = len(x) // 2
    return x[0] if half == 0 else sum_tile(x[:half]) + sum_tile(x[half:])


def sum_row_tiles(slots, row_range, dbias, tile):
    """The sums of every group's tiles, one after the other."""
    slots = slots.view(-1, dbias.shape[1])
    for group, span in enumerate(spans_of(row_range)):
        total = slots.new_zeros(slots.shape[1])
        for first in range(span.start, span.stop, int(tile)):
            total = total + slots[first // int(tile) + group]
        dbias[group] = total


def install() -> list[str]:
    """The public function launches the kernel for Hopper; its name is noted each time."""
    kernels = hopper_dact_quantize
    kernels.act_gradients, kernels.add_neighbours = act_gradients, add_neighbours
    kernels.sum_tile, kernels.e4m3_code = sum_tile, e4m3_code
    kernels.block_scales_or_nan = block_scales_or_nan
    kernels.magnitude_bits = lambda x: x.abs().contiguous().view(torch.int32)
    act_quantized.sum_row_tiles, act_quantized.sum_dact_partials = sum_row_tiles, sum_partials
    launched = []

    def launch(*arguments):
        launched.append("dact_quantize")
        kernels.launch_dact_quantize(*arguments)

    launchers = {"dact_quantize": (launch, kernels.takes_dact_quantize)}
    on_hopper = SimpleNamespace(LAUNCHERS=launchers)
    hopper_choice.hopper_kernels = lambda device, dtype, columns: on_hopper
    return launched


def check(splits, ffn, num_sms, *numbers, launched):
    tiles.device_num_sms = lambda device: num_sms
    name, dtype, activation, ways = numbers
    launch = Launch("dact_quantize", {"I": ffn}, dtype, name, activation, ways)
    before = len(launched)
    wrong = differences(launch, act_quantized, splits=splits)
    assert len(launched) == before + 1
    return wrong


def check_that_mistakes_are_noticed(launched):
    """Gates for ups; sums of other features; scales of other blocks."""

    def is_right():
        assert check((130, 5), 128, 2, *NUMBERS[0], launched=launched) == []

    gluon_emulator.check_mistakes(
        is_right,
        (
            hopper_dact_quantize,
            "act_gradients",
            lambda right: lambda gate, up, *args: right(up, gate, *args),
        ),
        (hopper_dact_quantize, "sum_tile", lambda right: lambda x: right(x).roll(1)),
        (
            hopper_dact_quantize,
            "block_scales_or_nan",
            lambda right: lambda *args: tuple(x.roll(1) for x in right(*args)),
        ),
    )


def checks():
    """Names, and what checks them."""
    launched = install()
    for case in CASES:
        for numbers in NUMBERS:
            run = partial(check, *case, *numbers, launched=launched)
            yield f"launch_dact_quantize, {case}, {numbers}", run
    yield "mistakes", partial(check_that_mistakes_are_noticed, launched)
