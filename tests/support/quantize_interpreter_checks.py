"""Run by test_interpreted.py in a process with TRITON_INTERPRET=1: kernels against twins, byte for byte. The
interpreter's own casts to and from E4M3 round wrongly, so the two helpers that contain them are replaced by integer
arithmetic, which is checked first. It also loses subnormal bf16 numbers on the way to fp32: there are none here, while
fp32 has some."""

from functools import partial
from types import SimpleNamespace

import quantize_cases as cases
import torch
import triton
import triton.language as tl
from compared_launches import Numbers, differences, is_near, quantising, without_subnormals
from launch_table import SIGNS, Launch
from row_ranges import random_ranges

from symmoe.kernels import gpu, twin
from symmoe.kernels.bias_sums import SLOT_ROWS
from symmoe.kernels.low_precision import codes, wire
from symmoe.kernels.triton import tiles
from symmoe.kernels.twin.quantize import to_e4m3


@triton.jit
def e4m3_code(x):
    size = tl.minimum(tl.abs(x), 448.0)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    units = size * ((130 - exponent) << 23).to(
        tl.float32, bitcast=True
    )  # of the last place: 0 to 16
    rounded = units.to(tl.int32)
    fraction = units - rounded.to(tl.float32)
    rounded += ((fraction > 0.5) | ((fraction == 0.5) & (rounded % 2 == 1))).to(tl.int32)
    code = (
        rounded + (exponent + 6) * 8
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
    codes = torch.empty(1 << 16, dtype=torch.uint8)
    values = torch.empty(1 << 16)
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


SPLITS = (0, 37, 128, 1, 5)
SMALL = {"H": 96, "W": 160}
WIDE = {"H": 1088}
LARGE_GROUP = (0, 37, 1, 230)  # sums of several tiles


def launches():
    """Launches, and what they are made of. No columns of bf16, to which the interpreter does not round to nearest."""
    for launch in quantising(SMALL, torch.float32):
        yield launch, {"splits": LARGE_GROUP if "sum" in str(launch) else SPLITS}
    for launch in quantising({"H": 288, "W": 16}, torch.bfloat16, "quantize_rows", "encode_rows"):
        if not launch.ways:
            yield launch, {"splits": SPLITS}
    of_bf16 = quantising({"H": 288, "W": 16}, torch.bfloat16, "quantize_columns")
    for launch in [*of_bf16, *quantising({"H": 272}, torch.float16, "requantize_columns")]:
        if launch.ways == "indexed":
            yield launch, {"splits": SPLITS}
    for launch in quantising(WIDE, torch.float32, "encode_rows", "unpack_rows", "decode_rows"):
        yield launch, {"splits": (33,)}
    none = {"H": 96, "N": 0}
    for kernel in ("quantize_rows", "quantize_columns", "encode_rows"):
        for launch in quantising(none, torch.bfloat16, kernel):
            yield launch, {"splits": (0, 0)}
    tiles.ROW_PROGRAMS = 4  # so that programs have several tiles
    for launch in quantising({"H": 272}, torch.float32, "quantize_rows", "unpack_rows"):
        parts = random_ranges(SPLITS, 2, step=SLOT_ROWS if "sums" in launch.ways else 1)
        if launch.format != "nvfp4" and "indexed" in launch.ways:
            for part in parts:
                yield launch, {"splits": SPLITS, "part": part}


def checks():
    """Names, and what checks them."""
    yield "casts of quantize_rows", check_casts
    codes.e4m3_code, codes.e4m3_value = e4m3_code, e4m3_value
    wire.e4m3_value = e4m3_number
    yield "quantize_rows, powers of two", check_powers_of_two
    Numbers.prepared = staticmethod(without_subnormals)
    for launch, options in launches():
        yield str(launch), partial(differences, launch, hard=True, **options)
    for rows, blocks in ((SPLITS, 1), (SPLITS, 6)):
        for kernel in ("swizzle_scales", "unswizzle_scales"):
            launch = Launch(kernel, {"H": 32 * blocks}, format="mxfp8")
            yield str(launch), partial(differences, launch, splits=rows)
    yield "group_amax, differences", check_that_differences_are_noticed


def group_amax_of_another_transform(**arguments):
    twin.group_amax(**arguments | {"signs": SIGNS ^ 1})


def check_that_differences_are_noticed():
    """Bits are compared, and signs of the transform are seen."""
    assert not is_near(torch.tensor([0.0]), torch.tensor([-0.0]), 0.0)
    wrong = SimpleNamespace(group_amax=group_amax_of_another_transform)
    launch = Launch("group_amax", SMALL, torch.float32, ways="signs")
    assert differences(launch, reference=wrong, splits=SPLITS)
