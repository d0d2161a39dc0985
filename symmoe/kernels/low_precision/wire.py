"""Encoding and decoding of rows that travel as bytes (Triton). Letters: twin/wire.py.

Memory bandwidth bounds these kernels: one read, one write. A row of the wire and its scales begin at multiples of 16
bytes.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from symmoe.kernels import formats, hopper_choice
from symmoe.kernels.launch.launch import (
    Constants,
    cached_sizes,
    ceil_div,
    fast_jit,
    launch,
    next_power_of_2,
)
from symmoe.kernels.low_precision.codes import FORMATS, TILE, column_scale, e4m3_value
from symmoe.kernels.low_precision.quantize import (
    COLUMN_TILE,
    ROW_TILE,
    ROWS,
    quantize_tile,
    store_column_scales,
    store_part,
    store_tile,
)
from symmoe.kernels.low_precision.quantize import NUM_WARPS as COLUMN_WARPS
from symmoe.kernels.operands import check_column_scale
from symmoe.kernels.triton.tiles import (
    TRITON_DTYPES,
    locate_rows,
    max_row_tiles,
    row_programs,
    row_tile_prefix,
    source_rows,
)

LINES, COLUMNS = 16, 1024  # bytes of a program's tile
NUM_WARPS = 4


@triton.jit
def decoded(wire, scales, source, feature, mask, SIZES: tl.constexpr):
    """The features of rows `source` of the wire, in fp32."""
    code = tl.load(wire + source * SIZES.row_bytes + feature, mask=mask, other=0)
    block = SIZES.first_scale + feature // SIZES.format.block
    stored = tl.load(scales + source * SIZES.scale_items + block, mask=mask, other=0)
    number, scale = e4m3_value(code), stored
    if SIZES.format.scale == "e8m0":
        scale = (stored.to(tl.int32) << 23).to(tl.float32, bitcast=True)  # codes begin at 1
        scale = tl.where(stored == FORMATS.E8M0_NAN, float("nan"), scale)
    return number * scale


@fast_jit()
def encode_rows_kernel(
    rows,
    wire,  # bytes
    scales,  # the wire as fp32, or as bytes
    num_rows: tl.int32,
    SIZES: tl.constexpr,
):
    """Grid (tiles of rows, tiles of columns)."""
    row, tile_column = tl.program_id(0) * SIZES.lines + tl.arange(0, SIZES.lines), tl.program_id(1)
    first_column = tile_column * SIZES.columns
    column = first_column + tl.arange(0, SIZES.columns)
    pointers = rows + row.to(tl.int64)[:, None] * SIZES.width + column[None, :]
    is_row = row < num_rows
    x = tl.load(pointers, mask=is_row[:, None] & (column < SIZES.width)[None, :], other=0.0).to(
        tl.float32
    )
    codes, stored = quantize_tile(x, 1.0, None, SIZES.format)
    store_part(wire, codes, row, is_row, first_column, SIZES.width, SIZES.row_bytes)
    first_block = SIZES.first_scale + tile_column * (SIZES.columns // SIZES.format.block)
    end: tl.constexpr = SIZES.first_scale + SIZES.format.num_blocks(SIZES.width)
    store_part(scales, stored, row, is_row, first_block, end, SIZES.scale_items)
    if tile_column == 0 and end < SIZES.scale_items:
        padding = tl.zeros((row.shape[0], 16), scales.dtype.element_ty)  # fewer than 16
        store_part(scales, padding, row, is_row, end, SIZES.scale_items, SIZES.scale_items)


@fast_jit(["wire", "data"])
def unpack_rows_kernel(
    wire,
    row_index,  # int32[N] or None
    row_range,
    data,
    scale,
    SIZES: tl.constexpr,
):
    """Grid (programs that loop over tiles of rows, tiles of columns of data)."""
    column = tl.program_id(1) * SIZES.columns + tl.arange(0, SIZES.columns)
    prefix, num_tiles = row_tile_prefix(row_range, SIZES.num_groups, SIZES.lines)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        _group, first_row, end = locate_rows(tile, prefix, row_range, SIZES.num_groups, SIZES.lines)
        row = first_row + tl.arange(0, SIZES.lines)
        lines = wire + source_rows(row_index, row, end).to(tl.int64)[:, None] * SIZES.row_bytes
        mask = (row < end)[:, None] & (column < SIZES.width)[None, :]
        values = tl.load(lines + column[None, :], mask=mask)
        tl.store(
            data + row.to(tl.int64)[:, None] * SIZES.width + column[None, :], values, mask=mask
        )
        if tl.program_id(1) == 0:  # scales with the first columns
            lane = tl.arange(0, SIZES.scale_lanes)
            is_scale = (row < end)[:, None] & (lane < SIZES.scale_bytes)[None, :]
            scales = tl.load(lines + SIZES.width + lane[None, :], mask=is_scale)
            tl.store(
                scale + row.to(tl.int64)[:, None] * SIZES.scale_bytes + lane[None, :],
                scales,
                mask=is_scale,
            )


@fast_jit()
def decode_rows_kernel(
    wire,  # bytes
    scales,  # the wire as fp32, or as bytes
    out,
    num_rows: tl.int32,
    SIZES: tl.constexpr,
):
    """Grid (tiles of rows, tiles of columns)."""
    row = tl.program_id(0) * SIZES.lines + tl.arange(0, SIZES.lines)
    column = tl.program_id(1) * SIZES.columns + tl.arange(0, SIZES.columns)
    mask = (row < num_rows)[:, None] & (column < SIZES.width)[None, :]
    row = row.to(tl.int64)[:, None]
    values = decoded(wire, scales, row, column[None, :], mask, SIZES)
    tl.store(out + row * SIZES.width + column[None, :], values.to(out.dtype.element_ty), mask=mask)


@fast_jit(["wire", "data"])
def requantize_columns_kernel(
    wire,  # bytes
    wire_scales,  # the wire as fp32, or as bytes
    row_index,  # int32[N] or None
    row_range,
    data,  # bytes
    scale,
    num_tiles: tl.int32,
    SIZES: tl.constexpr,
):
    """Grid (num_tiles tiles of tokens, tiles of features)."""
    tile = tl.program_id(0)
    prefix, num_used = row_tile_prefix(row_range, SIZES.num_groups, TILE)
    if tile < num_used:
        _group, first_row, end = locate_rows(tile, prefix, row_range, SIZES.num_groups, TILE)
        feature = tl.program_id(1) * SIZES.lines + tl.arange(0, SIZES.lines)
        row = first_row + tl.arange(0, TILE)
        source = source_rows(row_index, row, end).to(tl.int64)[None, :]
        mask = (row < end)[None, :] & (feature < SIZES.width)[:, None]
        x = (
            decoded(wire, wire_scales, source, feature[:, None], mask, SIZES)
            .to(SIZES.dtype)
            .to(tl.float32)
        )
        codes, stored = quantize_tile(x, 1.0, None, SIZES.format)
        store_tile(data, codes, feature, feature < SIZES.width, tile, num_tiles * TILE)
        store_column_scales(scale, stored, feature, SIZES.width, tile, num_tiles, SIZES.width)


def encode_rows(rows, wire, block_format):
    num_rows, width = rows.shape
    launch(
        encode_rows_kernel,
        _grid(rows),
        _constants(block_format, wire.shape[1], width, **ROWS),
        rows,
        wire,
        _scales_of(wire, block_format),
        num_rows,
    )


def unpack_rows(wire, row_range, out, *, row_index=None):
    (data, scale), (num_rows, width) = out, out[0].shape
    num_groups = row_range.shape[1]
    num_columns = ceil_div(width, COLUMNS)
    launch(
        unpack_rows_kernel,
        (row_programs(max_row_tiles(num_rows, num_groups, LINES), num_columns), num_columns),
        cached_sizes(
            num_groups=num_groups,
            row_bytes=wire.shape[1],
            width=width,
            scale_bytes=scale.shape[1],
            scale_lanes=next_power_of_2(scale.shape[1]),
            lines=LINES,
            columns=COLUMNS,
            num_warps=NUM_WARPS,
        ),
        wire,
        row_index,
        row_range,
        data,
        scale,
    )


def decode_rows(wire, out, block_format):
    num_rows, width = out.shape
    launch(
        decode_rows_kernel,
        _grid(out),
        _constants(block_format, wire.shape[1], width, **ROWS),
        wire,
        _scales_of(wire, block_format),
        out,
        num_rows,
    )


def requantize_columns(wire, row_range, out, block_format, dtype, *, row_index=None):
    data, scale = out
    check_column_scale("scale", scale)
    width, num_tiles = data.shape[0], data.shape[1] // formats.TILE
    if hopper_choice.launched(
        "requantize_columns",
        (wire.device, dtype, width),
        (block_format, wire, width),
        *(wire, row_range, out, block_format, dtype),
        row_index=row_index,
    ):
        return
    launch(
        requantize_columns_kernel,
        (num_tiles, ceil_div(width, COLUMN_TILE[0])),
        _constants(
            block_format,
            wire.shape[1],
            width,
            dtype=TRITON_DTYPES[dtype],
            num_groups=row_range.shape[1],
            lines=COLUMN_TILE[0],
            num_warps=COLUMN_WARPS,
        ),
        wire,
        _scales_of(wire, block_format),
        row_index,
        row_range,
        data.view(torch.uint8),
        column_scale(scale),
        num_tiles,
    )


def _grid(rows: torch.Tensor) -> tuple[int, int]:
    """Tiles of rows, tiles of columns."""
    return ceil_div(rows.shape[0], ROW_TILE[0]), ceil_div(rows.shape[1], ROW_TILE[1])


def _scales_of(wire: torch.Tensor, block_format: formats.BlockFormat) -> torch.Tensor:
    """The wire as a tensor of the scales' dtype."""
    return wire.view(torch.float32) if block_format.scale_dtype == torch.float32 else wire


def _constants(
    block_format: formats.BlockFormat, row_bytes: int, width: int, **tile: Any
) -> Constants:
    """The constants. scale_items: scales that would fill a row of the wire."""
    item_bytes = block_format.scale_dtype.itemsize
    return cached_sizes(
        format=block_format,
        row_bytes=row_bytes,
        width=width,
        scale_items=row_bytes // item_bytes,
        first_scale=width // item_bytes,
        **tile,
    )
