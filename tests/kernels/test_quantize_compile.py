"""Compiles the quantising kernels without a GPU, with the arguments their launchers would pass.

For Hopper, and those of the formats that Blackwell multiplies for Blackwell. What is checked is what the generated code
must have: the GPU's conversion to E4M3, which saturates; exact divisions and no approximate ones, no subnormals
flushed; wide accesses; registers that do not spill.
"""

import re
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from compiled_launches import BLACKWELL, HOPPER, access_bits, assert_compiled_once, atomics, catch_launches, meta
from quantize_cases import (
    encode_rows,
    quantize_all,
    quantize_weight_pairs,
    quantize_weights,
    requantize_columns,
    row_range_of,
)

from symmoe.kernels.bias_sums import SLOT_ROWS, bias_slots
from symmoe.kernels.formats import TILE, BlockFormat, max_tiles
from symmoe.kernels.low_precision import quantize, scale_tiles, wire
from symmoe.kernels.tensor_table import ScaleTable, TensorTable
from symmoe.kernels.triton import bias

FORMATS = {
    "float8_block": BlockFormat(element="e4m3", scale="fp32", block=128),
    "mxfp8": BlockFormat(element="e4m3", scale="e8m0", block=32),
    "nvfp4": BlockFormat(element="e2m1", scale="e4m3", block=16),
}
WEIGHT_LINES = {"float8_block": 128, "nvfp4": 16}
N, C, G = 65536, 7168, 32


@pytest.fixture
def launches(monkeypatch):
    return catch_launches(monkeypatch, quantize, scale_tiles, wire, bias)


def column_scale(num_features, num_scales, block_format):
    if block_format.scale_dtype == torch.float32:
        return meta(num_scales, num_features, dtype=torch.float32).t()
    return meta(num_features, num_scales, dtype=block_format.scale_dtype)


def launch_rows(block_format, dtype, *, indexed=False, **sums):
    data = meta(N, block_format.data_width(C), dtype=block_format.data_dtype)
    scale = meta(N, block_format.num_blocks(C), dtype=block_format.scale_dtype)
    options = {"amax": meta(G, dtype=torch.float32), "seeds": meta(G, dtype=torch.int64)}
    options = options if block_format.has_global_scale else {}
    options |= {"row_index": meta(N, dtype=torch.int32)} if indexed else {}
    row_range = meta(2, G, dtype=torch.int32)
    quantize.quantize_rows(meta(N, C, dtype=dtype), row_range, data, scale, block_format, **options, **sums)


def launch_columns(block_format, dtype, *, indexed=False):
    width = TILE * max_tiles(N, G)
    data = meta(C, block_format.data_width(width), dtype=block_format.data_dtype)
    scale = column_scale(C, width // block_format.block, block_format)
    options = {"amax": meta(G, dtype=torch.float32), "seeds": meta(G, dtype=torch.int64), "signs": 0x1234}
    options = options if block_format.has_global_scale else {}
    options |= {"row_index": meta(N, dtype=torch.int32)} if indexed else {}
    row_range = meta(2, G, dtype=torch.int32)
    quantize.quantize_columns(meta(N, C, dtype=dtype), row_range, data, scale, block_format, **options)


def launch_weights(block_format, dtype, *, transposed=False):
    weight = meta(G, 4096, C, dtype=dtype)
    weight = weight.mT if transposed else weight
    _, num_lines, width = weight.shape
    data = meta(G, num_lines, block_format.data_width(width), dtype=block_format.data_dtype)
    num_scales = block_format.num_blocks(width)
    scale = meta(G, num_lines // block_format.block_lines, num_scales, dtype=block_format.scale_dtype)
    amax = meta(G, dtype=torch.float32) if block_format.has_global_scale else None
    quantize.quantize_weights(weight, data, scale, block_format, amax=amax)


def launch_weight_pairs(block_format, dtype, *, is_table=False):
    weight, buffers = meta(G, 4096, C, dtype=dtype), []
    for _, num_lines, width in (weight.shape, weight.mT.shape):
        scale_lines = num_lines // block_format.block_lines
        buffers.append(meta(G, num_lines, block_format.data_width(width), dtype=block_format.data_dtype))
        buffers.append(meta(G, scale_lines, block_format.num_blocks(width), dtype=block_format.scale_dtype))
    amax = meta(G, dtype=torch.float32) if block_format.has_global_scale else None
    source = TensorTable(meta(G, dtype=torch.int64), tuple(weight.shape), dtype) if is_table else weight
    quantize.quantize_weight_pairs(source, *buffers, block_format, amax=amax)


def of_weights(name):
    """The format of weights, which may have a scale for several lines."""
    return replace(FORMATS[name], block_lines=WEIGHT_LINES.get(name, 1))


def in_registers(code):
    """PTX that flushes no subnormals, of a kernel that spills nothing."""
    assert code.spilled == 0
    assert ".ftz" not in code.ptx
    return code.ptx


def check(code, block_format):
    """PTX that quantises as it must."""
    ptx = in_registers(code)
    assert not re.search(r"(div\.(full|approx)|rcp\.approx|ex2|lg2)", ptx)
    assert ("div.rn.f32" in ptx) == (block_format.scale in ("fp32", "e4m3"))
    if "e4m3" in (block_format.element, block_format.scale):
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert max(access_bits(ptx, r"st\.global")) >= 32
    assert max(access_bits(ptx, r"ld\.global")) >= 128
    return ptx


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_rows(launches, name, dtype):
    launch_rows(FORMATS[name], dtype, indexed=dtype == torch.bfloat16)
    check(launches.compile(), FORMATS[name])


@pytest.mark.parametrize("arch", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_rows_and_their_sums(launches, name, dtype, arch):
    """Every number is loaded once; sums stay in a warp, without atomics."""
    sums, scale = meta(bias_slots(N, G, SLOT_ROWS), C, dtype=torch.float32), meta(N, dtype=torch.float32)
    launch_rows(FORMATS[name], dtype, indexed=True, bias_sums=sums, bias_scale=scale)
    launch = launches.pop_one()
    assert launch.kwargs["num_warps"] == 1
    code = launch.compile(arch)
    ptx = check(code, FORMATS[name])
    numbers = quantize.SUM_COLUMNS * SLOT_ROWS // 32 * dtype.itemsize * 8  # bits of a thread
    wide = sum(bits for bits in access_bits(ptx, r"ld\.global") if bits == 128)
    assert wide == numbers
    assert code.shared <= 1024
    bias.sum_dbias(sums, meta(2, G, dtype=torch.int32), meta(G, C, dtype=dtype))
    total = launches.compile(arch=arch)
    assert total.shared == 0
    assert not atomics(in_registers(total) + ptx)


@pytest.mark.parametrize("name", FORMATS)
def test_columns(launches, name):
    launch_columns(FORMATS[name], torch.bfloat16, indexed=name in ("float8_block", "nvfp4"))
    check(launches.compile(), FORMATS[name])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_weights(launches, name, transposed):
    block_format = of_weights(name)
    launch_weights(block_format, torch.bfloat16, transposed=transposed)
    check(launches.compile(), block_format)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_weight_pairs(launches, name, dtype):
    """One launch, which loads every number once; of scattered matrices, their address too."""
    block_format = of_weights(name)
    for is_table in (False, True):
        launch_weight_pairs(block_format, dtype, is_table=is_table)
        loaded_bits = sum(access_bits(check(launches.compile(), block_format), r"ld\.global"))
        tile, threads = (128 * 128, 256) if block_format.block == block_format.block_lines else (32 * 256, 128)
        others = (32 if block_format.has_global_scale else 0) + (64 if is_table else 0)
        assert loaded_bits == tile * 8 * dtype.itemsize // threads + others


@pytest.mark.parametrize("launch", [launch_rows, launch_columns, launch_weights, launch_weight_pairs])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_blackwell(launches, name, launch):
    block_format = of_weights(name) if launch in (launch_weights, launch_weight_pairs) else FORMATS[name]
    launch(block_format, torch.bfloat16)
    check(launches.compile(arch=BLACKWELL), block_format)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [C, 2880])
@pytest.mark.parametrize("name", ["float8_block", "mxfp8"])
def test_rows_put_on_the_wire(launches, name, width, dtype):
    block_format = FORMATS[name]
    scale_bytes = block_format.num_blocks(width) * block_format.scale_dtype.itemsize
    sent = meta(N, -(-(width + scale_bytes) // 16) * 16, dtype=torch.uint8)
    wire.encode_rows(meta(N, width, dtype=dtype), sent, block_format)
    check(launches.compile(), block_format)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_one_group_of_a_narrow_width(launches, name, monkeypatch):
    """Lanes of groups are one, and tiles of columns end within a block."""
    monkeypatch.setattr(sys.modules[__name__], "G", 1)
    monkeypatch.setattr(sys.modules[__name__], "C", 160)
    for launch in (launch_rows, launch_columns):
        launch(FORMATS[name], torch.float16)
        in_registers(launches.compile())


@pytest.mark.parametrize("arch", [BLACKWELL, HOPPER])
def test_amax_and_tiles(launches, arch):
    rows, row_range = meta(N, C, dtype=torch.bfloat16), meta(2, G, dtype=torch.int32)
    for signs in (None, 0x1234):
        quantize.group_amax(rows, row_range, meta(G, dtype=torch.float32), signs=signs)
        ptx = in_registers(launches.compile(arch=arch))
        # One word for a program; no other atomics, and no sums.
        assert re.findall(r"\b(?:atom|red)\.(\S+)", ptx) == ["global.gpu.relaxed.max.s32"]
    weight = meta(G, 4096, C, dtype=torch.bfloat16)
    for source in (weight, TensorTable(meta(G, dtype=torch.int64), tuple(weight.shape), weight.dtype)):
        quantize.weight_amax(source, meta(G, dtype=torch.float32))
        ptx = in_registers(launches.compile(arch=arch))
        assert re.findall(r"\b(?:atom|red)\.(\S+)", ptx) == ["global.gpu.relaxed.max.s32"]
        assert max(access_bits(ptx, r"ld\.global")) >= 128
    scale, swizzled = meta(N, C // 32, dtype=torch.uint8), meta(max_tiles(N, G), C // 128, 512, dtype=torch.uint8)
    scale_tiles.unswizzle_scales(swizzled, row_range, scale)
    in_registers(launches.compile(arch=arch))
    for scales, bounds, bits in ((scale, row_range, 32), (table_of_scales((256, 8), (7168, 64)), None, 128)):
        scale_tiles.swizzle_scales(scales, bounds, swizzled)
        assert set(access_bits(in_registers(launches.compile(arch=arch)), "st.global")) == {bits}


def table_of_scales(*shapes, device="meta"):
    """A table with one matrix of zeros of every shape."""
    extents = [(rows, blocks, blocks, 1) for rows, blocks in shapes]
    matrices = [torch.zeros(shape, dtype=torch.uint8, device=device) for shape in shapes]
    addresses = torch.tensor([matrix.data_ptr() for matrix in matrices]).to(device)
    numbers = torch.arange(len(shapes), dtype=torch.int32, device=device)
    most = max(-(-rows // 128) for rows, _ in shapes), max(-(-blocks // 4) for _, blocks in shapes)
    return ScaleTable(
        addresses, addresses.clone(), numbers, torch.tensor(extents, device=device, dtype=torch.int32), most
    )


@pytest.mark.parametrize("name", ["float8_block", "mxfp8"])
def test_rows_of_the_wire(launches, name):
    block_format = FORMATS[name]
    scale_bytes = block_format.num_blocks(C) * block_format.scale_dtype.itemsize
    rows, row_range = meta(N, -(-(C + scale_bytes) // 16) * 16, dtype=torch.uint8), meta(2, G, dtype=torch.int32)
    data, scale = meta(N, C, dtype=torch.uint8), meta(N, scale_bytes, dtype=torch.uint8)
    for row_index in (None, meta(N, dtype=torch.int32)):
        wire.unpack_rows(rows, row_range, data, scale, row_index=row_index)
        ptx = in_registers(launches.compile())
        for access in ("ld", "st"):  # 16 bytes of data at a time
            assert re.search(access + r"\.global\S*\.v4\.b32", ptx), access
    for dtype in (torch.bfloat16, torch.float32):
        wire.decode_rows(rows, meta(N, C, dtype=dtype), block_format)
        ptx = in_registers(launches.compile())
        assert "cvt.rn.f16x2.e4m3x2" in ptx
        assert re.search(r"st\.global\S*\.v4\.b32", ptx)


@pytest.mark.parametrize("name", ["float8_block", "mxfp8"])
def test_columns_of_rows_of_the_wire(launches, name):
    block_format, width = FORMATS[name], TILE * max_tiles(N, G)
    scale_bytes = block_format.num_blocks(C) * block_format.scale_dtype.itemsize
    rows, row_range = meta(N, -(-(C + scale_bytes) // 16) * 16, dtype=torch.uint8), meta(2, G, dtype=torch.int32)
    data = meta(C, width, dtype=torch.uint8)
    scale = column_scale(C, width // block_format.block, block_format)
    for index in (None, meta(N, dtype=torch.int32)):
        wire.requantize_columns(rows, row_range, data, scale, block_format, torch.bfloat16, row_index=index)
        ptx = in_registers(launches.compile())
        assert "cvt.rn.f16x2.e4m3x2" in ptx
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx


@pytest.mark.slow
def test_the_wire_on_blackwell(launches):
    """Rows that are put on it, taken off it, decoded, and quantised again along tokens."""
    block_format = FORMATS["mxfp8"]
    scale_bytes, width = block_format.num_blocks(C), TILE * max_tiles(N, G)
    rows, sent = meta(N, C, dtype=torch.bfloat16), meta(N, -(-(C + scale_bytes) // 16) * 16, dtype=torch.uint8)
    row_range, index = meta(2, G, dtype=torch.int32), meta(N, dtype=torch.int32)
    data, scale = meta(N, C, dtype=torch.uint8), meta(N, scale_bytes, dtype=torch.uint8)
    columns, column_scales = meta(C, width, dtype=torch.uint8), column_scale(C, width // 32, block_format)
    to_e4m3, from_e4m3 = "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.f16x2.e4m3x2"
    for function, args, options, conversions in (
        (wire.encode_rows, (rows, sent, block_format), {}, {to_e4m3}),
        (wire.unpack_rows, (sent, row_range, data, scale), {"row_index": index}, set()),
        (wire.decode_rows, (sent, rows, block_format), {}, {from_e4m3}),
        (
            wire.requantize_columns,
            (sent, row_range, columns, column_scales, block_format, torch.bfloat16),
            {"row_index": index},
            {to_e4m3, from_e4m3},
        ),
    ):
        function(*args, **options)
        ptx = in_registers(launches.compile(arch=BLACKWELL))
        assert set(re.findall(r"cvt\.\S*e4m3\S*", ptx)) == conversions
        for access in ("ld", "st"):  # 16 bytes at a time
            assert re.search(access + r"\.global\S*\.v4\.b32", ptx), (function, access)


def step(num_rows, signs, width=32):
    """Launches every kernel that quantises."""
    rows, row_range = torch.zeros(num_rows, width, dtype=torch.bfloat16), row_range_of((num_rows, 0))
    for name in ("mxfp8", "nvfp4"):
        quantize_all(quantize, rows, row_range, name)
    quantize_weights(quantize, torch.zeros(1, width, width), "mxfp8")
    quantize_weight_pairs(quantize, torch.zeros(1, width, width), "mxfp8")
    encode_rows(wire, rows, "mxfp8")
    quantize.group_amax(rows, row_range, torch.zeros(2), signs=signs)
    quantize.weight_amax(torch.zeros(1, width, width), torch.zeros(1))
    blocks = width // 32
    scale = torch.zeros(num_rows, blocks, dtype=torch.uint8)
    swizzled = torch.zeros(9, -(-blocks // 4), 512, dtype=torch.uint8)
    scale_tiles.swizzle_scales(scale, row_range, swizzled)
    scale_tiles.unswizzle_scales(swizzled, row_range, scale)
    table = table_of_scales(*[(num_rows, 16 * i + 1) for i in range(num_rows % 7 + 1)], device="cpu")
    scale_tiles.swizzle_scales(table, None, swizzled)
    sent = torch.zeros(num_rows, -(-(width + blocks) // 16) * 16, dtype=torch.uint8)
    data = torch.zeros(num_rows, width, dtype=torch.uint8)
    wire.unpack_rows(sent, row_range, data, scale)
    part = torch.tensor([[0, 1], [1, num_rows]], dtype=torch.int32)
    wire.unpack_rows(sent, part, data, scale)
    row_format, e4m3 = FORMATS["mxfp8"], data.view(torch.float8_e4m3fn)
    quantize.quantize_rows(rows, part, e4m3, scale, row_format)
    sums = torch.zeros(bias_slots(num_rows, 2, SLOT_ROWS), width)
    factor = torch.zeros(num_rows)
    quantize.quantize_rows(rows, part, e4m3, scale, row_format, bias_sums=sums, bias_scale=factor)
    bias.sum_dbias(sums, row_range, torch.zeros(2, width))
    wire.decode_rows(sent, torch.empty(num_rows, width), FORMATS["mxfp8"])
    requantize_columns(wire, sent, row_range, width, "mxfp8", torch.bfloat16)


@pytest.mark.slow
def test_steps_do_not_compile_again(monkeypatch):
    """The number of rows and the signs are not part of the compiled code."""
    steps = (16, 1), (1, 16), (333, 0x9A5C), (500, 0xFFFF)
    compiled = assert_compiled_once(monkeypatch, (quantize, scale_tiles, wire, bias), step, *steps)
    assert [name for name, count in compiled.items() if not count] == [
        "grouped_bias_grad_kernel",
        "grouped_bias_dot_kernel",
    ]
