"""Compiles the quantisers of columns and weights for Hopper without a GPU, and counts what a number costs."""

import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from ahead_of_time import since
from combinations import every_combination
from compiled_launches import (
    HOPPER,
    MAX_SHARED,
    REGISTERS,
    assert_compiled_once,
    catch_launches,
    meta,
)
from low_precision_launches import C, G, N, operand
from quantize_cases import FORMATS

from symmoe.kernels.formats import TILE, max_tiles
from symmoe.kernels.low_precision import hopper_columns, hopper_weights
from symmoe.kernels.operands import TensorTable

NUMBERS = TILE**2 // (32 * hopper_columns.NUM_WARPS)  # of a thread
SMS = 132


@pytest.fixture
def compile_launch(monkeypatch):
    """compile_launch(): PTX and the names of the instructions of the loop of the one launch."""
    launches = catch_launches(monkeypatch, hopper_columns, hopper_weights)

    def compile_one():
        programs = hopper_columns.PROGRAMS_PER_SM
        code = launches.compile()
        # What a tile needs once; up to Triton 3.8 nothing with bf16.
        assert code.stack <= since(("3.6", 16), ("3.9", 64))
        assert programs * code.registers * 32 * hopper_columns.NUM_WARPS <= REGISTERS
        assert (
            programs * (code.shared + 1024) <= MAX_SHARED[HOPPER] + 1024
        )  # an SM keeps 1 KB for each program
        (names,) = code.loops_of("F2FP.SATFINITE")
        return code.ptx, names

    return compile_one


def buffers(width, block_format):
    return operand(width, TILE * max_tiles(N, G), block_format, columns=True)


def check(ptx, names, copies, most_spilled=0):
    assert ".ftz" not in ptx
    assert not re.search(r"(div\.(full|approx)|rcp\.approx|ex2|lg2)", ptx)
    assert not [name for name in names if name.startswith("STS")]  # codes are turned in registers
    assert sum(name in ("LDL", "STL") for name in names) <= since(
        ("3.6", most_spilled), ("3.9", 15)
    )
    counts = {
        "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C": NUMBERS // 2,
        "STG.E.128": NUMBERS // 16,
        "LDGSTS.E.BYPASS.128": copies,
        "BAR.SYNC.DEFER_BLOCKING": 2,
    }
    assert {name: names.count(name) for name in counts} == counts
    # The largest of two features at once, NaN if there is one: or a block would have the scale of its other numbers.
    largest = [
        name
        for name in names
        if name.startswith("HMNMX2") and ".NAN" in name and ".XORSIGN" in name
    ]
    assert len(largest) == NUMBERS // 2 - 1 + 2


@every_combination(width=[7168, 2880], indexed=[False, True])
def test_columns(compile_launch, width, indexed):
    block_format, row_range = FORMATS["float8_block"], meta(2, G, dtype=torch.int32)
    given = {"row_index": meta(N, dtype=torch.int32) if indexed else None, "num_sms": SMS}
    rows = meta(N, width, dtype=torch.bfloat16)
    hopper_columns.launch_quantize_columns(
        rows, row_range, buffers(width, block_format), block_format, **given
    )
    ptx, names = compile_launch()
    check(ptx, names, NUMBERS // 8)
    assert len(names) < 7 * NUMBERS + (100 if indexed else 50)
    assert ptx.count("div.rn.f32") == 4


@every_combination(width=[7168, 2880], dtype=[torch.bfloat16, torch.float16])
def test_columns_of_rows_of_the_wire(compile_launch, width, dtype):
    block_format, row_range = FORMATS["float8_block"], meta(2, G, dtype=torch.int32)
    wire = meta(
        8192, -(-(width + 4 * block_format.num_blocks(width)) // 16) * 16, dtype=torch.uint8
    )
    given = {"row_index": meta(N, dtype=torch.int32), "num_sms": SMS}
    result = buffers(width, block_format)
    hopper_columns.launch_requantize_columns(wire, row_range, result, block_format, dtype, **given)
    ptx, names = compile_launch()
    check(ptx, names, NUMBERS // 16, most_spilled=8 if dtype != torch.bfloat16 else 0)
    assert len(names) < 10 * NUMBERS + 100
    assert ptx.count("cvt.rn.f16x2.e4m3x2") == NUMBERS // 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weight_pairs(compile_launch, dtype):
    """Every number is copied once, and rounded once for each operand."""
    block_format = replace(FORMATS["float8_block"], block_lines=TILE)
    shapes = (G, 4096, C), (G, 4096 // TILE, C // TILE), (G, C, 4096), (G, C // TILE, 4096 // TILE)
    operands = (
        meta(*shape, dtype=kind)
        for shape, kind in zip(shapes, 2 * (torch.uint8, torch.float32), strict=True)
    )
    weight, (data, scale, *turned) = meta(G, 4096, C, dtype=dtype), operands
    for source in (weight, TensorTable(meta(G, dtype=torch.int64), tuple(weight.shape), dtype)):
        hopper_weights.launch_quantize_weight_pairs(
            source, (data, scale), turned, block_format, num_sms=SMS
        )
        ptx, names = compile_launch()
        assert ".ftz" not in ptx
        assert ptx.count("div.rn.f32") == 2  # one scale
        assert names.count("F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C") == NUMBERS
        assert names.count("LDGSTS.E.BYPASS.128") == NUMBERS // 8
        assert (names.count("STG.E.128"), names.count("STG.E.64")) == (NUMBERS // 16, NUMBERS // 8)
        assert not [name for name in names if name in ("LDL", "STL")]
        assert sum(name.startswith("STS") for name in names) <= 2  # the block's largest number
        assert len(names) < 9 * NUMBERS + (50 if source is weight else 150)


def test_powers_of_two_are_not_divided(compile_launch):
    block_format, row_range = FORMATS["float8_block_powers"], meta(2, G, dtype=torch.int32)
    rows = meta(N, C, dtype=torch.float16)
    hopper_columns.launch_quantize_columns(
        rows, row_range, buffers(C, block_format), block_format, num_sms=SMS
    )
    ptx, names = compile_launch()
    check(ptx, names, NUMBERS // 8)
    assert "div.rn" not in ptx


def test_what_is_taken():
    block_format = replace(FORMATS["float8_block"], block_lines=TILE)
    for given, shape, is_taken in (
        (block_format, (2, 256, 384), True),
        (FORMATS["float8_block"], (2, 256, 384), False),  # scales of lines
        (replace(FORMATS["nvfp4"], block_lines=16), (2, 256, 384), False),
        (block_format, (2, 256, 320), False),
        (block_format, (2, 192, 384), False),
    ):
        assert hopper_weights.takes_weight_pairs(given, torch.zeros(shape)) == is_taken
    rows = torch.zeros(3, 512, dtype=torch.bfloat16)
    for name, given, width, is_taken in (
        ("float8_block", rows, 512, True),
        ("mxfp8", rows, 512, False),
        ("float8_block", rows, 508, False),  # rows of which some begin at no 16 bytes
        ("float8_block", rows.view(-1)[4:516].view(1, 512), 512, False),
    ):
        assert hopper_columns.takes_columns(FORMATS[name], given, width) == is_taken


def test_steps_do_not_compile_again(monkeypatch):
    """The number of rows is not part of the compiled code."""
    block_format = FORMATS["float8_block"]

    def step(num_rows):
        tokens = TILE * max_tiles(num_rows, 2)
        out = torch.empty(256, tokens, dtype=torch.uint8), torch.empty(tokens // TILE, 256).t()
        row_range = torch.zeros(2, 2, dtype=torch.int32)
        rows, wire = (
            torch.zeros(num_rows, 256, dtype=torch.bfloat16),
            torch.zeros(num_rows, 272, dtype=torch.uint8),
        )
        hopper_columns.launch_quantize_columns(rows, row_range, out, block_format, num_sms=SMS)
        hopper_columns.launch_requantize_columns(
            wire, row_range, out, block_format, torch.bfloat16, num_sms=SMS
        )

    assert all(
        assert_compiled_once(
            monkeypatch, (hopper_columns,), step, (128,), (1,), (16,), (333,)
        ).values()
    )
