"""Run by test_interpreted.py in a process with TRITON_INTERPRET=1: kernels against twins, byte for byte.

The interpreter's own casts to and from E4M3 round wrongly, so the two helpers that contain them are replaced by integer
arithmetic, which is checked first. It also loses subnormal bf16 numbers on the way to fp32: there are none here, while
fp32 has some.
"""

import torch
import triton
import triton.language as tl
from interpreter import spare_the_interpreter
from quantize_cases import (
    FORMATS,
    SIGNS,
    Scattered,
    as_bytes,
    check_bias_sums,
    decoded_columns,
    differences,
    encode_rows,
    filled,
    hard_rows,
    joined_rows,
    quantize_all,
    quantize_weight_pairs,
    quantize_weights,
    requantize_columns,
    row_range_of,
)
from row_ranges import random_ranges, rows_of

from symmoe.kernels import twin
from symmoe.kernels.formats import max_tiles
from symmoe.kernels.low_precision import codes, quantize, scale_tiles, wire
from symmoe.kernels.triton import bias, tiles
from symmoe.kernels.twin import wire as twin_wire
from symmoe.kernels.twin.quantize import to_e4m3


class gpu:
    """Stands for the module symmoe.kernels.gpu, of which nothing else is looked at."""

    group_amax, quantize_rows = quantize.group_amax, quantize.quantize_rows
    weight_amax = quantize.weight_amax
    quantize_columns, quantize_weights = quantize.quantize_columns, quantize.quantize_weights
    quantize_weight_pairs, encode_rows = quantize.quantize_weight_pairs, wire.encode_rows
    sum_dbias = bias.sum_dbias


@triton.jit
def e4m3_code(x):
    size = tl.minimum(tl.abs(x), 448.0)
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, -6)
    units = size * ((130 - exponent) << 23).to(tl.float32, bitcast=True)  # of the last place: 0 to 16
    whole = units.to(tl.int32)
    rest = units - whole.to(tl.float32)
    whole += ((rest > 0.5) | ((rest == 0.5) & (whole % 2 == 1))).to(tl.int32)
    code = whole + (exponent + 6) * 8  # carries into the exponent; without one, numbers below 8 are subnormal
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
    bits = torch.cat([at - 1, at, at + 1, torch.arange(-1, 3), torch.tensor([0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF])])
    rows = torch.zeros(len(bits), 32)
    rows[:, 7] = bits.clamp(min=0).int().view(torch.float32)
    for name, width in (("mxfp8", 32), ("float8_block_powers", 32)):
        scales = []
        for kernels in (twin, gpu):
            row_format = FORMATS[name]
            data, scale = torch.empty(len(bits), width, dtype=row_format.data_dtype), torch.empty(len(bits), 1)
            scale = scale.to(row_format.scale_dtype)
            kernels.quantize_rows(rows, row_range_of((len(bits),)), data, scale, row_format)
            scales.append({"data": data, "scale": scale})
        assert differences(*scales) == [], name
    assert len(as_bytes(scales[1]["scale"]).view(torch.int32).unique()) > 240


def check_tiles(row_range, num_rows, num_blocks):
    scale = torch.randint(1, 255, (num_rows, num_blocks)).to(torch.uint8)
    results = []
    for swizzle, unswizzle in (
        (twin.swizzle_scales, twin.unswizzle_scales),
        (scale_tiles.swizzle_scales, scale_tiles.unswizzle_scales),
    ):
        shape = (max_tiles(num_rows, row_range.shape[1]), -(-num_blocks // 4), 512)
        swizzled, back = filled(shape, torch.uint8), filled(scale.shape, torch.uint8)
        swizzle(scale, row_range, swizzled)
        unswizzle(swizzled, row_range, back)
        results.append({"swizzled": swizzled, "back": back})
    assert differences(*results) == [], num_blocks
    assert torch.equal(results[1]["back"][: int(row_range[1, -1])], scale[: int(row_range[1, -1])])


def check_rows_of_an_index(rows, row_range, name):
    """Rows picked by an index, some several times: those of the rows laid out like that."""
    index = torch.randint(rows.shape[0], (int(row_range[1, -1]) + 2,), dtype=torch.int32)
    picked, row_format = rows[index.long()], FORMATS[name]
    amax = None
    if row_format.has_global_scale:
        amax = torch.empty(row_range.shape[1])
        twin.group_amax(rows, row_range, amax, row_index=index)
    shape = picked.shape[0], row_format.data_width(rows.shape[1])
    results = []
    for kernels, given, options in (
        (twin, picked, {}),
        (twin, rows, {"row_index": index}),
        (gpu, rows, {"row_index": index}),
    ):
        data = filled(shape, row_format.data_dtype)
        scale = filled((shape[0], row_format.num_blocks(rows.shape[1])), row_format.scale_dtype)
        kernels.quantize_rows(given, row_range, data, scale, row_format, amax=amax, **options)
        results.append({"data": data, "scale": scale})
    assert differences(*results[:2]) == differences(*results[1:]) == [], name


def check_ranges(splits, name):
    """Rows of ranges, gathered, quantised and taken off the wire: as the twin, and no other rows."""
    row_format, num_rows, width = FORMATS[name], sum(splits) + 3, 272
    scale_bytes = row_format.num_blocks(width) * row_format.scale_dtype.itemsize
    rows = without_subnormals(hard_rows(50, width, torch.float32))
    sent = torch.randint(256, (50, -(-(width + scale_bytes) // 16) * 16)).to(torch.uint8)
    index = torch.randint(50, (num_rows,), dtype=torch.int32)
    tiles.ROW_PROGRAMS = 4  # so that programs have several tiles
    for ranges in random_ranges(splits, 3):
        for take, kernels_of in ((quantize_into, (twin, gpu)), (unpack_into, (twin_wire, wire))):
            results = []
            for kernels in kernels_of:
                data = filled((num_rows, width), row_format.data_dtype)
                scale = filled((num_rows, row_format.num_blocks(width)), row_format.scale_dtype)
                take(kernels, rows if take is quantize_into else sent, ranges, data, scale, row_format, index)
                results.append({"data": data, "scale": scale})
            assert differences(*results) == [], (name, take, ranges)
            outside = ~rows_of(ranges, num_rows)
            for tensor in results[1].values():
                assert torch.equal(as_bytes(tensor)[outside], as_bytes(filled(tensor.shape, tensor.dtype))[outside])
                assert not torch.equal(as_bytes(tensor), as_bytes(filled(tensor.shape, tensor.dtype)))


def quantize_into(kernels, rows, ranges, data, scale, row_format, index):
    kernels.quantize_rows(rows, ranges, data, scale, row_format, row_index=index)


def unpack_into(kernels, sent, ranges, data, scale, row_format, index):
    kernels.unpack_rows(sent, ranges, data.view(torch.uint8), scale.view(torch.uint8), row_index=index)


def check_sent(name):
    """Rows put on the wire in one launch, with padding and without, and tiles that end within a block."""
    for dtype, shape in ((torch.float32, (19, 272)), (torch.bfloat16, (33, 1056)), (torch.bfloat16, (1, 128))):
        rows = hard_rows(*shape, dtype)
        if dtype == torch.bfloat16:
            rows = without_subnormals(rows)
        sent = encode_rows(gpu, rows, name)
        assert torch.equal(sent, encode_rows(twin, rows, name)), (name, shape)
        assert torch.equal(sent, joined_rows(twin, rows, name)), (name, shape)
    assert encode_rows(gpu, torch.empty(0, 64), name).shape[0] == 2


def check_wire(row_range, name):
    """Rows of random bytes, of all codes: taken apart and decoded as the twin does it."""
    width, row_format, num_rows = 1088, FORMATS[name], int(row_range[1, -1]) + 3
    scale_bytes = row_format.num_blocks(width) * row_format.scale_dtype.itemsize
    rows = torch.randint(256, (50, -(-(width + scale_bytes) // 16) * 16)).to(torch.uint8)
    scales = torch.randn(50, row_format.num_blocks(width)).view(torch.uint8)  # not of bits at random: no subnormals
    if row_format.scale == "e8m0":
        scales = torch.randint(60, 256, (50, scale_bytes)).to(torch.uint8)
    rows[:, width : width + scale_bytes] = scales
    index = torch.randint(50, (num_rows,), dtype=torch.int32)
    found = [], []
    for kernels, results in zip((twin_wire, wire), found, strict=True):
        for row_index, groups in ((index, row_range), (None, row_range.clamp(max=49))):
            data, scale = filled((num_rows, width), torch.uint8), filled((num_rows, scale_bytes), torch.uint8)
            kernels.unpack_rows(rows, groups, data, scale, row_index=row_index)
            results += [data, scale]
        out = torch.empty(50, width)
        kernels.decode_rows(rows, out, row_format)
        results.append(out.nan_to_num(7.0))
    for left, right in zip(*found, strict=True):
        assert torch.equal(left, right), name
    assert torch.equal(found[1][0][: num_rows - 3], rows[index.long()][: num_rows - 3, :width])


def check_columns_of_the_wire(row_range, name):
    """Rows of the wire quantised along tokens: as the twin, and as the kernels in two steps.

    Not in bf16, to which the interpreter does not round to nearest.
    """
    width = 272
    for dtype in (torch.float32, torch.float16):
        rows = torch.randn(50, width) * torch.exp2(torch.randint(-8, 8, (50, 1)).float())
        rows[3], rows[4, 2], rows[5, 70], rows[6, 130] = 0, torch.nan, torch.inf, -0.0
        wire_rows = encode_rows(twin, rows, name)[:50]
        index = torch.randint(50, (int(row_range[1, -1]) + 3,), dtype=torch.int32)
        for sent, row_index in ((wire_rows, index), (wire_rows[index.long()], None)):
            args = sent, row_range, width, name, dtype, row_index
            expected = requantize_columns(twin, *args)
            assert differences(requantize_columns(wire, *args), expected) == [], (name, dtype)
            assert differences(decoded_columns(both, *args), expected) == [], (name, dtype)
    assert (as_bytes(expected["data"]) == 0x7F).any()


class both:
    """The two steps."""

    decode_rows, quantize_columns = wire.decode_rows, quantize.quantize_columns


def without_subnormals(rows):
    return rows.where(rows.abs() >= torch.finfo(rows.dtype).smallest_normal, 0.0).where(rows == rows, torch.nan)


# With random words, the transform and an index, and without.
HARD = {("nvfp4", torch.bfloat16): (True,), ("nvfp4", torch.float32): (True, False), ("mxfp8", torch.float32): (True,)}


def main():
    check_casts()
    codes.e4m3_code, codes.e4m3_value = e4m3_code, e4m3_value
    wire.e4m3_value = e4m3_number
    check_powers_of_two()
    splits = (0, 37, 128, 1, 5)
    row_range, num_rows = row_range_of(splits), sum(splits) + 3
    for dtype in (torch.bfloat16, torch.float32):
        rows = hard_rows(num_rows, 288 if dtype == torch.bfloat16 else 96, dtype)
        if dtype == torch.bfloat16:
            rows = without_subnormals(rows)
        for name in FORMATS:
            for hard in HARD.get((name, dtype), (False,)):
                left, right = (quantize_all(kernels, rows, row_range, name, hard=hard) for kernels in (twin, gpu))
                assert differences(left, right) == [], (name, dtype, hard, differences(left, right))
                print(name, dtype, hard, ": ok")
    for name in FORMATS:
        check_rows_of_an_index(hard_rows(50, 96, torch.float32), row_range, name)
        check_bias_sums(gpu, name, torch.float32, splits=(0, 37, 1, 230))
        print(name, "of an index, and sums: ok")
        if FORMATS[name].element == "e4m3":
            check_wire(row_range, name)
            check_sent(name)
            check_ranges((0, 37, 128, 1, 50), name)
            check_columns_of_the_wire(row_range, name)
            print(name, "on the wire: ok")
    for shape in ((2, 160, 96), (1, 16, 288)):
        weight = hard_rows(shape[0] * shape[1], shape[2], torch.float32).view(shape)
        for name in FORMATS:
            left, right = (quantize_weights(kernels, weight, name) for kernels in (twin, gpu))
            assert differences(left, right) == [], (name, shape, differences(left, right))
            pairs = [quantize_weight_pairs(kernels, weight, name) for kernels in (twin, gpu)]
            for pair in pairs:
                assert differences(left, pair) == [], (name, shape, differences(left, pair))
            scattered = Scattered(weight)
            for kernels in (twin, gpu):
                found = quantize_weight_pairs(kernels, weight, name, scattered.table)
                assert differences(left, found) == [], (name, shape, "table", differences(left, found))
                assert torch.equal(as_bytes(scattered.packed()), as_bytes(weight))
            print(name, shape, ": ok")
    for num_blocks in (1, 4, 6):
        check_tiles(row_range, num_rows, num_blocks)
        print("tiles of", num_blocks, ": ok")
    no_rows = torch.empty(0, 96, dtype=torch.bfloat16)
    for name in FORMATS:
        left, right = (quantize_all(kernels, no_rows, row_range_of((0, 0)), name) for kernels in (twin, gpu))
        assert differences(left, right) == [], name
    # Bytes are compared, and signs of the transform are seen.
    assert not torch.equal(as_bytes(torch.tensor([0.0])), as_bytes(torch.tensor([-0.0])))
    rows, amax = torch.randn(num_rows, 32), torch.empty(2, len(splits))
    for signs, out in zip((SIGNS, SIGNS ^ 1), amax, strict=True):
        quantize.group_amax(rows, row_range, out, signs=signs)
    assert not torch.equal(*amax)
    print("all is well")


if __name__ == "__main__":
    spare_the_interpreter()
    main()
