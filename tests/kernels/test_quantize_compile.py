"""Compiles the quantising kernels without a GPU, with the arguments their launchers would pass. For Hopper, and those
of the formats that Blackwell multiplies for Blackwell. What is checked is what the generated code must have: the GPU's
conversion to E4M3, which saturates; exact divisions and no approximate ones, no subnormals flushed; wide accesses;
registers that do not spill."""

import itertools
import re

import pytest
import torch

pytest.importorskip("triton")

import low_precision_launches as quantizers
from compiled_launches import BLACKWELL, HOPPER, access_bits, assert_compiled_once, atomics, meta
from low_precision_launches import (
    BF16,
    FP32,
    NAMES,
    C,
    G,
    N,
    operand,
    row_bytes,
    step,
    table_of_scales,
)
from quantize_cases import FORMATS, weight_format

from symmoe.kernels.bias_sums import SLOT_ROWS, bias_slots
from symmoe.kernels.formats import TILE, max_tiles
from symmoe.kernels.low_precision import quantize, wire
from symmoe.kernels.low_precision.block_scaled import scale_tiles
from symmoe.kernels.operands import TensorTable
from symmoe.kernels.triton import bias

MODULES = quantize, scale_tiles, wire, bias


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


CASES = [
    *(
        (quantizers.launch_rows, name, dtype, {"indexed": dtype == BF16})
        for name in NAMES
        for dtype in (BF16, FP32)
    ),
    *((quantizers.launch_columns, name, BF16, {"indexed": name != "mxfp8"}) for name in NAMES),
    *(
        (quantizers.launch_weights, name, BF16, {"transposed": turned})
        for name in NAMES
        for turned in (False, True)
    ),
    *itertools.product(
        (quantizers.launch_sent,), NAMES[:2], (BF16, FP32), ({"width": C}, {"width": 2880})
    ),
]
ON_BLACKWELL = itertools.product(quantizers.LAUNCHES, NAMES[1:], (BF16,))


@pytest.mark.parametrize(
    ("launch", "name", "dtype", "options", "arch"),
    [*((*case, HOPPER) for case in CASES), *((*case, {}, BLACKWELL) for case in ON_BLACKWELL)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_numbers_are_quantised_as_they_must(launches, launch, name, dtype, options, arch):
    launch(name, dtype, **options)
    check(launches.compile(arch=arch), FORMATS[name])


@pytest.mark.parametrize("arch", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_rows_and_their_sums(launches, name, dtype, arch):
    """Every number is loaded once; sums stay in a warp, without atomics."""
    sums, scale = (
        meta(bias_slots(N, G, SLOT_ROWS), C, dtype=torch.float32),
        meta(N, dtype=torch.float32),
    )
    quantizers.launch_rows(name, dtype, indexed=True, sums=(sums, scale))
    launch = launches.pop_one()
    assert launch.kwargs["num_warps"] == 1
    code = launch.compile(arch)
    ptx = check(code, FORMATS[name])
    numbers = quantize.SUM_COLUMNS * SLOT_ROWS // 32 * dtype.itemsize * 8  # bits of a thread
    assert sum(bits for bits in access_bits(ptx, r"ld\.global") if bits == 128) == numbers
    assert code.shared <= 1024
    bias.sum_dbias(sums, meta(2, G, dtype=torch.int32), meta(G, C, dtype=dtype))
    total = launches.compile(arch=arch)
    assert total.shared == 0
    assert not atomics(in_registers(total) + ptx)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_weight_pairs(launches, name, dtype):
    """One launch, which loads every number once; of scattered matrices, their address too."""
    block_format = weight_format(name)
    for is_table in (False, True):
        quantizers.launch_weight_pairs(name, dtype, is_table=is_table)
        loaded_bits = sum(access_bits(check(launches.compile(), block_format), r"ld\.global"))
        tile, threads = (
            (128 * 128, 256) if block_format.block == block_format.block_lines else (32 * 256, 128)
        )
        others = (32 if block_format.has_global_scale else 0) + (64 if is_table else 0)
        assert loaded_bits == tile * 8 * dtype.itemsize // threads + others


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_one_group_of_a_narrow_width(launches, name, monkeypatch):
    """Lanes of groups are one, and tiles of columns end within a block."""
    monkeypatch.setattr(quantizers, "G", 1)
    monkeypatch.setattr(quantizers, "C", 160)
    for launch in (quantizers.launch_rows, quantizers.launch_columns):
        launch(name, torch.float16)
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
    for source in (
        weight,
        TensorTable(meta(G, dtype=torch.int64), tuple(weight.shape), weight.dtype),
    ):
        quantize.weight_amax(source, meta(G, dtype=torch.float32))
        ptx = in_registers(launches.compile(arch=arch))
        assert re.findall(r"\b(?:atom|red)\.(\S+)", ptx) == ["global.gpu.relaxed.max.s32"]
        assert max(access_bits(ptx, r"ld\.global")) >= 128
    scale, swizzled = (
        meta(N, C // 32, dtype=torch.uint8),
        meta(max_tiles(N, G), C // 128, 512, dtype=torch.uint8),
    )
    scale_tiles.unswizzle_scales(swizzled, row_range, scale)
    in_registers(launches.compile(arch=arch))
    for scales, bounds, bits in (
        (scale, row_range, 32),
        (table_of_scales((256, 8), (7168, 64)), None, 128),
    ):
        scale_tiles.swizzle_scales(scales, bounds, swizzled)
        assert set(access_bits(in_registers(launches.compile(arch=arch)), "st.global")) == {bits}


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        *((name, HOPPER) for name in NAMES[:2]),
        pytest.param("mxfp8", BLACKWELL, marks=pytest.mark.slow),
    ],
)
def test_the_wire(launches, name, arch):
    """Rows that are taken off it, decoded, and quantised again along tokens, with an index and without."""
    block_format, row_range = FORMATS[name], meta(2, G)
    sent, data = meta(N, row_bytes(name, C), dtype=torch.uint8), meta(N, C, dtype=torch.uint8)
    scale = meta(
        N, block_format.num_blocks(C) * block_format.scale_dtype.itemsize, dtype=torch.uint8
    )
    columns = operand(C, TILE * max_tiles(N, G), block_format, columns=True)
    to_e4m3, from_e4m3 = "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.f16x2.e4m3x2"
    for index, dtype in ((None, BF16), (meta(N), FP32)):
        for function, args, options, conversions in (
            (wire.unpack_rows, (sent, row_range, (data, scale)), {"row_index": index}, set()),
            (wire.decode_rows, (sent, meta(N, C, dtype=dtype), block_format), {}, {from_e4m3}),
            (
                wire.requantize_columns,
                (sent, row_range, columns, block_format, BF16),
                {"row_index": index},
                {to_e4m3, from_e4m3},
            ),
        ):
            function(*args, **options)
            ptx = in_registers(launches.compile(arch=arch))
            assert set(re.findall(r"cvt\.\S*e4m3\S*", ptx)) == conversions, function
            for access in (
                ("ld", "st") if function is wire.unpack_rows else ("st",)
            ):  # 16 bytes at a time
                assert re.search(access + r"\.global\S*\.v4\.b32", ptx), (function, access)


@pytest.mark.slow
def test_steps_do_not_compile_again(monkeypatch):
    """The number of rows and the signs are not part of the compiled code."""
    steps = (16, 1), (1, 16), (333, 0x9A5C), (500, 0xFFFF)
    compiled = assert_compiled_once(monkeypatch, (quantize, scale_tiles, wire, bias), step, *steps)
    unused = [name for name, count in compiled.items() if not count]
    assert unused == ["grouped_bias_grad_kernel", "grouped_bias_dot_kernel"]
