"""Encoding and decoding of rows that travel as bytes (Triton). Letters: contract/wire.py.

They are bound by memory: one read, one write. A row of the wire begins at a multiple of 16 bytes, and so do its scales.
"""

from collections.abc import Hashable

import torch
import triton
import triton.language as tl

from symmoe.kernels import formats, hopper_choice
from symmoe.kernels.formats import BlockFormat
from symmoe.kernels.launch.integers import ceil_div, next_power_of_2
from symmoe.kernels.launch.launch import Constants, fast_jit, kept_constants, launch
from symmoe.kernels.low_precision.codes import E8M0_NAN, TILE, column_scale, e4m3_value
from symmoe.kernels.low_precision.quantize import (
    COLUMN_TILE,
    ROW_TILE,
    ROW_WARPS,
    quantize_tile,
    store_column_scales,
    store_tile,
)
from symmoe.kernels.low_precision.quantize import NUM_WARPS as COLUMN_WARPS
from symmoe.kernels.operands import check_column_scale
from symmoe.kernels.triton.tiles import TRITON_DTYPES, locate_tile, max_row_tiles, row_programs, row_tile_prefix

LINES, COLUMNS = 16, 1024  # bytes of a program's tile
NUM_WARPS = 4
_OF_ROWS = {"LINES": ROW_TILE[0], "COLUMNS": ROW_TILE[1], "num_warps": ROW_WARPS}


@triton.jit
def load_tile(rows, row, column, num_rows, WIDTH: tl.constexpr):
    """fp32 of columns of rows; zeros past either."""
    pointers = rows + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    return tl.load(pointers, mask=(row < num_rows)[:, None] & (column < WIDTH)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_items(wire, tile, row, item, num_rows, end, ROW_ITEMS: tl.constexpr):
    """Stores items of rows of the wire, those before `end`; ROW_ITEMS of the tile's dtype would fill a row."""
    pointers = wire + row.to(tl.int64)[:, None] * ROW_ITEMS + item[None, :]
    tl.store(pointers, tile, mask=(row < num_rows)[:, None] & (item < end)[None, :])


@triton.jit
def store_padding(scales, row, num_rows, FIRST: tl.constexpr, ROW_ITEMS: tl.constexpr):
    """Zeros in the items of rows from FIRST on, fewer than 16."""
    if FIRST < ROW_ITEMS:
        zeros = tl.zeros((row.shape[0], 16), scales.dtype.element_ty)
        store_items(scales, zeros, row, FIRST + tl.arange(0, 16), num_rows, ROW_ITEMS, ROW_ITEMS)


@fast_jit()
def encode_rows_kernel(
    rows,
    wire,  # bytes
    scales,  # the wire as fp32, or as bytes
    num_rows: tl.int32,
    FORMAT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    SCALE_ITEMS: tl.constexpr,  # scales that would fill a row of the wire
    FIRST_SCALE: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (tiles of rows, tiles of columns)."""
    row, tile_column = tl.program_id(0) * LINES + tl.arange(0, LINES), tl.program_id(1)
    column = tile_column * COLUMNS + tl.arange(0, COLUMNS)
    x = load_tile(rows, row, column, num_rows, WIDTH)
    codes, stored = quantize_tile(x, 1.0, None, FORMAT)
    store_items(wire, codes, row, column, num_rows, WIDTH, ROW_BYTES)
    BLOCKS: tl.constexpr = COLUMNS // FORMAT.block
    block = FIRST_SCALE + tile_column * BLOCKS + tl.arange(0, BLOCKS)
    end: tl.constexpr = FIRST_SCALE + FORMAT.num_blocks(WIDTH)
    store_items(scales, stored, row, block, num_rows, end, SCALE_ITEMS)
    if tile_column == 0:
        store_padding(scales, row, num_rows, end, SCALE_ITEMS)


@fast_jit(["wire", "data"])
def unpack_rows_kernel(
    wire,
    row_index,  # int32[N] or None
    row_range,
    data,
    scale,
    NUM_GROUPS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    WIDTH: tl.constexpr,  # width of data
    SCALE_BYTES: tl.constexpr,
    SCALE_LANES: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (programs that loop over tiles of rows, tiles of columns of data)."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    prefix, num_tiles = row_tile_prefix(row_range, NUM_GROUPS, LINES)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        _group, first_row, end, _n = locate_tile(tile, prefix, row_range, NUM_GROUPS, 1, 1, LINES)
        row = first_row + tl.arange(0, LINES)
        source = row if row_index is None else tl.load(row_index + row, mask=row < end, other=0)
        lines = wire + source.to(tl.int64)[:, None] * ROW_BYTES
        mask = (row < end)[:, None] & (column < WIDTH)[None, :]
        values = tl.load(lines + column[None, :], mask=mask)
        tl.store(data + row.to(tl.int64)[:, None] * WIDTH + column[None, :], values, mask=mask)
        if tl.program_id(1) == 0:  # scales with the first columns
            lane = tl.arange(0, SCALE_LANES)
            is_scale = (row < end)[:, None] & (lane < SCALE_BYTES)[None, :]
            scales = tl.load(lines + WIDTH + lane[None, :], mask=is_scale)
            tl.store(scale + row.to(tl.int64)[:, None] * SCALE_BYTES + lane[None, :], scales, mask=is_scale)


@triton.jit
def scale_number(scale, FORMAT: tl.constexpr):
    """fp32 of scales as they are stored."""
    if FORMAT.scale == "e8m0":
        number = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)  # codes begin at 1
        number = tl.where(scale == E8M0_NAN, float("nan"), number)
    else:
        number = scale
    return number


@fast_jit()
def decode_rows_kernel(
    wire,  # bytes
    scales,  # the wire as fp32, or as bytes
    out,
    num_rows: tl.int32,
    FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    SCALE_ITEMS: tl.constexpr,  # scales that would fill a row of the wire
    FIRST_SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (tiles of rows, tiles of columns)."""
    row = tl.program_id(0) * LINES + tl.arange(0, LINES)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    code = tl.load(wire + row.to(tl.int64)[:, None] * ROW_BYTES + column[None, :], mask=mask, other=0)
    block = FIRST_SCALE + column // FORMAT.block
    scale = tl.load(scales + row.to(tl.int64)[:, None] * SCALE_ITEMS + block[None, :], mask=mask, other=0)
    values = e4m3_value(code) * scale_number(scale, FORMAT)
    pointers = out + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(pointers, values.to(out.dtype.element_ty), mask=mask)


@fast_jit(["wire", "data"])
def requantize_columns_kernel(
    wire,  # bytes
    wire_scales,  # the wire as fp32, or as bytes
    row_index,  # int32[N] or None
    row_range,
    data,  # bytes
    scale,
    num_tiles: tl.int32,
    DTYPE: tl.constexpr,
    FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    SCALE_ITEMS: tl.constexpr,  # scales that would fill a row of the wire
    FIRST_SCALE: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    LINES: tl.constexpr,
):
    """Grid (num_tiles tiles of tokens, tiles of features)."""
    tile = tl.program_id(0)
    prefix, num_used = row_tile_prefix(row_range, NUM_GROUPS, TILE)
    if tile < num_used:
        _group, first_row, end, _n = locate_tile(tile, prefix, row_range, NUM_GROUPS, 1, 1, TILE)
        feature = tl.program_id(1) * LINES + tl.arange(0, LINES)
        row = first_row + tl.arange(0, TILE)
        source = row if row_index is None else tl.load(row_index + row, mask=row < end, other=0)
        source = source.to(tl.int64)[None, :]
        mask = (row < end)[None, :] & (feature < WIDTH)[:, None]
        code = tl.load(wire + source * ROW_BYTES + feature[:, None], mask=mask, other=0)
        block = FIRST_SCALE + feature // FORMAT.block
        row_scale = tl.load(wire_scales + source * SCALE_ITEMS + block[:, None], mask=mask, other=0)
        x = (e4m3_value(code) * scale_number(row_scale, FORMAT)).to(DTYPE).to(tl.float32)
        codes, stored = quantize_tile(x, 1.0, None, FORMAT)
        store_tile(data, codes, feature, feature < WIDTH, tile, num_tiles * TILE)
        store_column_scales(scale, stored, feature, WIDTH, tile, num_tiles, WIDTH)


def encode_rows(rows, wire, block_format):
    num_rows, width = rows.shape
    if num_rows == 0:
        return
    constants = _constants(block_format, wire.shape[1], width, **_OF_ROWS)
    launch(encode_rows_kernel, _grid(rows), constants, rows, wire, _scales_of(wire, block_format), num_rows)


def unpack_rows(wire, row_range, out, *, row_index=None):
    (data, scale), (num_rows, width) = out, out[0].shape
    if num_rows == 0:
        return
    num_groups = row_range.shape[1]
    num_columns = ceil_div(width, COLUMNS)
    grid = row_programs(max_row_tiles(num_rows, num_groups, LINES), num_columns), num_columns
    rows = {"NUM_GROUPS": num_groups, "ROW_BYTES": wire.shape[1], "WIDTH": width}
    scales = {"SCALE_BYTES": scale.shape[1], "SCALE_LANES": next_power_of_2(scale.shape[1])}
    constants = kept_constants(**rows, **scales, LINES=LINES, COLUMNS=COLUMNS, num_warps=NUM_WARPS)
    launch(unpack_rows_kernel, grid, constants, wire, row_index, row_range, data, scale)


def decode_rows(wire, out, block_format):
    num_rows, width = out.shape
    if num_rows == 0:
        return
    constants = _constants(block_format, wire.shape[1], width, **_OF_ROWS)
    launch(decode_rows_kernel, _grid(out), constants, wire, _scales_of(wire, block_format), out, num_rows)


def requantize_columns(wire, row_range, out, block_format, dtype, *, row_index=None):
    data, scale = out
    check_column_scale("scale", scale)
    width, num_tiles = data.shape[0], data.shape[1] // formats.TILE
    if num_tiles == 0:
        return
    operands = block_format, wire, width
    on_hopper = hopper_choice.launcher("requantize_columns", wire.device, dtype, width, *operands)
    if on_hopper is not None:
        on_hopper(wire, row_range, out, block_format, dtype, row_index=row_index)
        return
    grid = num_tiles, ceil_div(width, COLUMN_TILE[0])
    tile = {"NUM_GROUPS": row_range.shape[1], "LINES": COLUMN_TILE[0], "num_warps": COLUMN_WARPS}
    constants = _constants(block_format, wire.shape[1], width, DTYPE=TRITON_DTYPES[dtype], **tile)
    inputs = wire, _scales_of(wire, block_format), row_index, row_range
    launch(requantize_columns_kernel, grid, constants, *inputs, data.view(torch.uint8), column_scale(scale), num_tiles)


def _grid(rows: torch.Tensor) -> tuple[int, int]:
    """Tiles of rows, tiles of columns."""
    return ceil_div(rows.shape[0], ROW_TILE[0]), ceil_div(rows.shape[1], ROW_TILE[1])


def _scales_of(wire: torch.Tensor, block_format: BlockFormat) -> torch.Tensor:
    """The wire as items of scales."""
    return wire.view(torch.float32) if block_format.scale_dtype == torch.float32 else wire


def _constants(block_format: BlockFormat, row_bytes: int, width: int, **tile: Hashable) -> Constants:
    item_bytes = block_format.scale_dtype.itemsize
    scales = {"SCALE_ITEMS": row_bytes // item_bytes, "FIRST_SCALE": width // item_bytes}
    return kept_constants(FORMAT=block_format, ROW_BYTES=row_bytes, WIDTH=width, **scales, **tile)
