"""Runs the source of dact_quantize for Hopper in gluon_emulator.py. For test_interpreted.py. The arithmetic is
Triton's, which the emulator has not. gate * up stands for the activation, and numpy's quantisers for those of the
kernels: so what is checked is which numbers are computed with, and where results go."""

from functools import partial

import numpy as np
import quantize_reference as reference
import torch
from act_quantize_cases import Problem, dact_operands, reference_operand, results_of
from quantize_cases import FORMATS, differences, named

from symmoe.kernels.act_quantized import dact_quantize_workspace_numel
from symmoe.kernels.activation import SUM_COLUMNS, Activation, num_scale_sums
from symmoe.kernels.bias_sums import bias_slots
from symmoe.kernels.formats import TILE
from symmoe.kernels.low_precision import act_quantized, hopper_dact_quantize

NAMES = "float8_block", "float8_block_powers"
# Groups without rows, of one, of a tile, of more; more tiles than a band of rows has; none at all.
CASES = [((0, 140, 0, 1, 128), 256), ((1300, 5), 128), ((0, 0), 128)]


def act_gradients(gate, up, da, scale, activation):
    """As if the activation were the product of gates and ups."""
    return gate * up * scale, da * scale * up, da * scale * gate, da * (gate * up)


def add_neighbours(x, steps):
    for _ in range(steps.value):
        x = x[:, 0::2] + x[:, 1::2]
    return x


def sum_tile(x):
    half = len(x) // 2
    return x[0] if half == 0 else sum_tile(x[:half]) + sum_tile(x[half:])


def install_arithmetic():
    hopper_dact_quantize.act_gradients = act_gradients
    hopper_dact_quantize.add_neighbours = add_neighbours
    hopper_dact_quantize.sum_tile = sum_tile
    hopper_dact_quantize.magnitude_bits = lambda x: x.contiguous().view(torch.int32) & 0x7FFFFFFF
    hopper_dact_quantize.block_scales_or_nan = reference.block_scales_or_nan
    hopper_dact_quantize.e4m3_code = lambda x: torch.from_numpy(
        reference.e4m3(x.numpy()).view(np.uint8)
    )


def expected_of(p, name):
    n = p.num_rows
    gate, up = (half.float() for half in p.h[:n].chunk(2, dim=1))
    da = p.da[:n].float()
    factor = p.row_scale[:n, None]
    ds = da * factor
    dh = torch.cat([ds * up, ds * gate], dim=1).to(p.dtype).float().numpy()
    a = ((gate * up) * factor).to(p.dtype).float().numpy()
    sums = (da * (gate * up)).view(n, num_scale_sums(p.ffn), SUM_COLUMNS).numpy()
    while sums.shape[2] > 1:  # neighbours, then neighbouring sums
        sums = sums[:, :, ::2] + sums[:, :, 1::2]
    operands = {}
    for prefix, x in (("rows ", dh), ("columns ", dh), ("a_columns ", a)):
        operands |= named(*reference_operand(p, x, name, columns="columns" in prefix), prefix)
    return operands, torch.from_numpy(sums[:, :, 0]), tile_sums(p, dh)


def tile_sums(p, dh):
    """[slots, 2I] of dh by tiles of a group's rows; NaN where no tile has its slot."""
    slots, end = torch.full((bias_slots(len(p.h), len(p.splits)), dh.shape[1]), torch.nan), 0
    for g, length in enumerate(p.splits):
        end += length
        for first in range(end - length, end, TILE):
            padded = np.zeros((TILE, dh.shape[1]), dtype=np.float32)
            rows = dh[first : min(first + TILE, end)]
            padded[: len(rows)] = rows
            while len(padded) > 1:
                padded = padded[::2] + padded[1::2]
            slots[first // TILE + g] = torch.from_numpy(padded[0])
    return slots


def found_for(p, name, num_sms, *, with_dbias=True):
    """The operands, and the sums of dscale and of dbias by tiles."""
    out = dact_operands(p, name, with_dbias=with_dbias)
    num_sums = num_scale_sums(p.ffn) * len(p.h)
    workspace = torch.full(
        (dact_quantize_workspace_numel(len(p.h), p.ffn, p.blank_dbias()),), torch.nan
    )
    assert hopper_dact_quantize.takes_dact_quantize(p.da, p.h, p.activation, FORMATS[name])
    arguments = act_quantized.dact_arguments(p.da, p.h, p.row_scale, p.row_range, out, workspace)
    hopper_dact_quantize.launch_dact_quantize(
        arguments, p.activation, FORMATS[name], num_sms=num_sms
    )
    sums = workspace[:num_sums].view(-1, len(p.h))
    slots = workspace[num_sums:].view(-1, p.h.shape[1])
    assert sums[:, p.num_rows :].isnan().all()
    return results_of(out)[0], sums[:, : p.num_rows].t(), slots


def check(splits, ffn):
    for name, dtype, num_sms in ((NAMES[0], torch.bfloat16, 2), (NAMES[1], torch.float16, 1)):
        p = Problem(Activation(), ffn, dtype, splits)
        expected, wanted, wanted_slots = expected_of(p, name)
        for with_dbias in (False, True):
            found, sums, slots = found_for(p, name, num_sms, with_dbias=with_dbias)
            assert differences(found, expected) == [], (splits, name, differences(found, expected))
            torch.testing.assert_close(sums, wanted, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(slots, wanted_slots, rtol=0, atol=0, equal_nan=True)


def check_that_mistakes_are_noticed():
    p = Problem(Activation(), 128, splits=(130,))
    expected, wanted, wanted_slots = expected_of(p, NAMES[0])
    p.h = p.h.roll(128, dims=1)  # gates for ups
    found, _, slots = found_for(p, NAMES[0], 2)
    assert not torch.equal(slots.nan_to_num(7), wanted_slots.nan_to_num(7))
    assert differences(found, expected) == [
        "rows data",
        "rows scale",
        "columns data",
        "columns scale",
    ]
    p.da[7] *= 1.02
    _, sums, _ = found_for(p, NAMES[0], 2)
    assert not torch.equal(sums, wanted)


def checks():
    """Names, and what checks them."""
    install_arithmetic()
    for case in CASES:
        yield f"launch_dact_quantize, {case}", partial(check, *case)
    yield "mistakes", check_that_mistakes_are_noticed
