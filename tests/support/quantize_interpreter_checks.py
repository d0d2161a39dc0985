"""Run by test_interpreted.py in a process with TRITON_INTERPRET=1: kernels against twins, byte for byte. The
interpreter's own casts to and from E4M3 round wrongly, so the two helpers that contain them are replaced by integer
arithmetic, which is checked first. It also loses subnormal bf16 numbers on the way to fp32: there are none here, while
fp32 has some."""

from itertools import product

import quantize_cases as cases
import torch
import triton
import triton.language as tl
from quantize_checks import (
    check_columns,
    check_ranges,
    check_received,
    check_rows_of_an_index,
    check_sent,
    check_tiles,
)

from symmoe.kernels import gpu, twin
from symmoe.kernels.low_precision import codes, quantize, wire
from symmoe.kernels.triton import tiles
from symmoe.kernels.twin.quantize import to_e4m3


@triton.jit
def e4m3_code(x):
    size = tl.minimum(tl.abs(x), 448.0)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    units = size * ((130 - exponent) << 23).to(
        tl.float32, bitcast=True
    )  # of the last place: 0 to 16
    whole = units.to(tl.int32)
    rest = units - whole.to(tl.float32)
    whole += ((rest > 0.5) | ((rest == 0.5) & (whole % 2 == 1))).to(tl.int32)
    code = (
        whole + (exponent + 6) * 8
    )  # carries into the exponent; without one, numbers below 8 are subnormal
    return (code + ((x.to(tl.int32, bitcast=True) >> 24) & 128)).to(tl.uint8)


@triton.jit
def e4m3_value(code):
    exponent = (code.to(tl.int32) >> 3) & 15
    mantissa = (code.to(tl.int32) & 7) + tl.where(exponent > 0, 8, 0)
    unit = ((tl.maximum(exponent, 1) + 117) << 23).to(tl.float32, bitcast=True)
    return tl.where(code >= 128, -unit, unit) * mantissa.to(tl.float32)


@triton.jit
def e4m3_number(code):
    return tl.where((code & 127) == 127, float("nan"), e4m3_value(code))


@triton.jit
def casts_kernel(x, codes, values, SIZE: tl.constexpr):
    lane = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    code = e4m3_code(tl.load(x + lane))
    tl.store(codes + lane, code)
    tl.store(values + lane, e4m3_value(code))


def check_casts():
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    halves = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = torch.cat([every, (halves[1:] + halves[:-1]) / 2])
    x = torch.nn.functional.pad(x[torch.isfinite(x)], (0, 1 << 16))[: 1 << 16].contiguous()
    codes, values = torch.empty(1 << 16, dtype=torch.uint8), torch.empty(1 << 16)
    casts_kernel[(16,)](x, codes, values, SIZE=1 << 12)
    expected = to_e4m3(x)
    assert torch.equal(codes, expected.view(torch.uint8))
    assert torch.equal(values, expected.float())


def check_powers_of_two():
    """Blocks whose largest number is about 448 times a power of two, where scales change, and the smallest ones."""
    at = (torch.arange(1, 255) << 23) + 0x600000
    bits = torch.cat(
        [
            at - 1,
            at,
            at + 1,
            torch.arange(-1, 3),
            torch.tensor([0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF]),
        ]
    )
    rows = torch.zeros(len(bits), 32)
    rows[:, 7] = bits.clamp(min=0).int().view(torch.float32)
    for name, width in (("mxfp8", 32), ("float8_block_powers", 32)):
        scales = []
        for kernels in (twin, gpu):
            out = cases.row_buffers(len(bits), width, cases.FORMATS[name])
            kernels.quantize_rows(rows, cases.row_range_of((len(bits),)), out, cases.FORMATS[name])
            scales.append(cases.named(*out))
        assert cases.differences(*scales) == [], name
    assert len(cases.as_bytes(scales[1]["scale"]).view(torch.int32).unique()) > 240


def check_wire(name, row_range):
    """With padding and without, and tiles that end within a block. No columns of bf16, to which the interpreter does
    not round to nearest."""
    check_received(gpu, name, 1088, row_range, torch.float32)
    check_sent(gpu, name, cases.hard_rows(19, 272, torch.float32))
    for shape in ((33, 1056), (1, 128)):
        check_sent(gpu, name, without_subnormals(cases.hard_rows(*shape, torch.bfloat16)))
    assert cases.encode_rows(gpu, torch.empty(0, 64), name).shape[0] == 2
    tiles.ROW_PROGRAMS = 4  # so that programs have several tiles
    check_ranges(
        gpu, name, (0, 37, 128, 1, 50), without_subnormals(cases.hard_rows(50, 272, torch.float32))
    )
    for dtype in (torch.float32, torch.float16):
        rows = torch.randn(50, 272) * torch.exp2(torch.randint(-8, 8, (50, 1)).float())
        rows[3], rows[4, 2], rows[5, 70], rows[6, 130] = 0, torch.nan, torch.inf, -0.0
        check_columns(gpu, name, rows.to(dtype), row_range, int(row_range[1, -1]) + 3)


def without_subnormals(rows):
    return rows.where(rows.abs() >= torch.finfo(rows.dtype).smallest_normal, 0.0).where(
        rows == rows, torch.nan
    )


def by_both(function, *args, **options):
    """Names of what twins and kernels leave that differs in a byte."""
    return cases.differences(*(function(each, *args, **options) for each in (twin, gpu)))


# With random words, the transform and an index, and without.
HARD = {
    ("nvfp4", torch.bfloat16): (True,),
    ("nvfp4", torch.float32): (True, False),
    ("mxfp8", torch.float32): (True,),
}


def checks():
    """Names, and what differs in a byte."""
    check_casts()
    codes.e4m3_code, codes.e4m3_value = e4m3_code, e4m3_value
    wire.e4m3_value = e4m3_number
    check_powers_of_two()
    splits = (0, 37, 128, 1, 5)
    row_range, num_rows = cases.row_range_of(splits), sum(splits) + 3
    for dtype, name in product((torch.bfloat16, torch.float32), cases.FORMATS):
        rows = cases.hard_rows(num_rows, 288 if dtype == torch.bfloat16 else 96, dtype)
        if dtype == torch.bfloat16:
            rows = without_subnormals(rows)
        for hard in HARD.get((name, dtype), (False,)):
            wrong = by_both(cases.quantize_all, rows, row_range, name, hard=hard)
            yield f"{name}, {dtype}, hard {hard}", wrong
    for name in cases.FORMATS:
        check_rows_of_an_index(gpu, name, cases.hard_rows(50, 96, torch.float32), row_range)
        cases.check_bias_sums(gpu, name, torch.float32, splits=(0, 37, 1, 230))
        yield f"{name} of an index, and sums", None
        if cases.FORMATS[name].element == "e4m3":
            check_wire(name, row_range)
            yield f"{name} on the wire", None
    for shape, name in product(((2, 160, 96), (1, 16, 288)), cases.FORMATS):
        weight = cases.hard_rows(shape[0] * shape[1], shape[2], torch.float32).view(shape)
        expected, scattered = cases.quantize_weights(twin, weight, name), cases.Scattered(weight)
        for kernels, options in product(
            (twin, gpu),
            ({}, {"in_pairs": True}, {"in_pairs": True, "table": scattered.table}),
        ):
            found = cases.quantize_weights(kernels, weight, name, **options)
            wrong = cases.differences(found, expected)
            yield f"{name}, weights {shape}, {kernels.__name__}, {[*options]}", wrong
        assert torch.equal(cases.as_bytes(scattered.packed()), cases.as_bytes(weight))
    for num_blocks in (1, 4, 6):
        check_tiles(gpu, row_range, num_rows, num_blocks)
        yield f"tiles of {num_blocks}", None
    no_rows = torch.empty(0, 96, dtype=torch.bfloat16)
    for name in cases.FORMATS:
        wrong = by_both(cases.quantize_all, no_rows, cases.row_range_of((0, 0)), name)
        yield f"{name} without rows", wrong
    # Bytes are compared, and signs of the transform are seen.
    assert not torch.equal(
        cases.as_bytes(torch.tensor([0.0])), cases.as_bytes(torch.tensor([-0.0]))
    )
    rows, amax = torch.randn(num_rows, 32), torch.empty(2, len(splits))
    for signs, out in zip((cases.SIGNS, cases.SIGNS ^ 1), amax, strict=True):
        quantize.group_amax(rows, row_range, out, signs=signs)
    assert not torch.equal(*amax)
