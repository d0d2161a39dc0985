"""Quantising rows, their columns per group, and weights (Triton). Letters: twin/quantize.py.

Memory bandwidth bounds all kernels: one read of the numbers, one write of the data. A program has a tile of lines by
elements; if lines are columns of the rows, the compiler reads along the features and writes along the tokens.
"""

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl

from symmoe.kernels import formats, hopper_choice
from symmoe.kernels.bias_sums import SLOT_ROWS
from symmoe.kernels.launch.launch import Constants, cached_sizes, ceil_div, fast_jit, launch
from symmoe.kernels.low_precision.codes import (
    INFINITY_BITS,
    TILE,
    block_scales,
    column_scale,
    element_codes,
    global_scale_of,
    hadamard,
    magnitude_bits,
    pack,
    random_words,
    spread,
)
from symmoe.kernels.operands import TensorTable, check_column_scale, packed_and_table
from symmoe.kernels.triton.activation import scale_terms
from symmoe.kernels.triton.bias import spread_rows, sum_spread_tile
from symmoe.kernels.triton.tiles import (
    TRITON_DTYPES,
    locate_rows,
    matrix_of,
    max_row_tiles,
    row_programs,
    row_tile_prefix,
    source_rows,
)

NUM_WARPS = 8
# Lines and elements of a program's tile.
ROW_TILE, ROW_WARPS = (SLOT_ROWS, 256), 4
COLUMN_TILE = (
    64,
    formats.TILE,
)  # 128 bytes of every row of 2-byte numbers are read, 128 bytes of a line written
WEIGHT_TILE = (128, 128)
PAIR_COLUMNS = 256  # where blocks are not square; a tile then has one block of lines, so few threads share a scale
# For a program that also sums rows: one warp has all rows, a thread 4, so that no sum goes through shared memory.
SUM_COLUMNS, SUM_WARPS = 128, 1
SUM_STEPS, SPREAD_STEPS = tl.constexpr(SLOT_ROWS.bit_length() - 1), tl.constexpr(2)


@triton.jit
def tile_codes(
    x, global_scale, words, FORMAT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_LINES: tl.constexpr
):
    """Codes of x [LINES, WIDTH], a byte each, and stored scales [LINES / BLOCK_LINES, WIDTH / BLOCK]."""
    lines: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    bits = magnitude_bits(x).reshape(lines // BLOCK_LINES, BLOCK_LINES, width // BLOCK, BLOCK)
    bits = tl.max(tl.max(bits, axis=3), axis=1)
    SCALE: tl.constexpr = FORMAT.scale  # Triton 3.6 takes no attribute's string as an argument
    ELEMENT: tl.constexpr = FORMAT.element
    stored, multiplier = block_scales(bits, global_scale, SCALE)
    is_finite = spread(bits, lines, width) < INFINITY_BITS
    return element_codes(x, is_finite, spread(multiplier, lines, width), words, ELEMENT), stored


@triton.jit
def quantize_tile(x, global_scale, words, FORMAT: tl.constexpr):
    """Data [LINES, WIDTH or WIDTH / 2], and stored scales [LINES, WIDTH / block] of x [LINES, WIDTH]."""
    ELEMENT: tl.constexpr = FORMAT.element
    codes, stored = tile_codes(x, global_scale, words, FORMAT, FORMAT.block, 1)
    return pack(codes, ELEMENT), stored


@triton.jit
def store_part(out, part, line, in_lines, first, end, width):
    """Stores columns first.. before `end` in lines of a matrix of `width` columns."""
    column = first + tl.arange(0, part.shape[1])
    pointers = out + line.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(pointers, part, mask=in_lines[:, None] & (column < end)[None, :])


@triton.jit
def store_tile(out, tile, line, in_lines, tile_column, width):
    """Stores a tile of columns, number tile_column, in lines of a matrix of `width` columns."""
    store_part(out, tile, line, in_lines, tile_column * tile.shape[1], width, width)


@triton.jit
def store_weight_tile(out, codes, scales, at, SIZES: tl.constexpr, IS_TURNED: tl.constexpr):
    """Stores the result of tile_codes for a tile of one of several matrices, or transposes. out: data, scales; at:
    group, tile of lines, tile of columns."""
    ELEMENT: tl.constexpr = SIZES.format.element
    NUM_LINES: tl.constexpr = SIZES.width if IS_TURNED else SIZES.num_lines
    WIDTH: tl.constexpr = SIZES.num_lines if IS_TURNED else SIZES.width
    BLOCK: tl.constexpr = codes.shape[1] // scales.shape[1]
    BLOCK_LINES: tl.constexpr = codes.shape[0] // scales.shape[0]
    data, scale = out
    group, tile_line, tile_column = at
    packed = pack(codes, ELEMENT)
    width: tl.constexpr = WIDTH * packed.shape[1] // codes.shape[1]
    line = tile_line * codes.shape[0] + tl.arange(0, codes.shape[0])
    data += group.to(tl.int64) * (NUM_LINES * width)
    store_tile(data, packed, line, line < NUM_LINES, tile_column, width)
    scale_lines: tl.constexpr = (NUM_LINES + BLOCK_LINES - 1) // BLOCK_LINES
    scale_width: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    scale_line = tile_line * scales.shape[0] + tl.arange(0, scales.shape[0])
    scale += group.to(tl.int64) * (scale_lines * scale_width)
    store_tile(scale, scales, scale_line, scale_line < scale_lines, tile_column, scale_width)


@triton.jit
def load_columns(rows, row_index, first_row, end, feature, signs, SIZES: tl.constexpr):
    """TILE rows from first_row on, as lines [features, TILE] fp32, transformed if there are signs; zeros from row `end`
    on and past the features."""
    row = first_row + tl.arange(0, TILE)
    source = source_rows(row_index, row, end)
    pointers = rows + source.to(tl.int64)[None, :] * SIZES.width + feature[:, None]
    x = tl.load(
        pointers, mask=(row < end)[None, :] & (feature < SIZES.width)[:, None], other=0.0
    ).to(tl.float32)
    return hadamard(x, signs) if SIZES.hadamard else x


@triton.jit
def store_column_scales(scale, scales, feature, end, tile, num_tiles, WIDTH: tl.constexpr):
    """Stores the scales of a tile of tokens for features before `end`: bytes by features, fp32 by blocks."""
    if scale.dtype.element_ty == tl.float32:
        block = tile * scales.shape[1] + tl.arange(0, scales.shape[1])
        pointers = scale + block.to(tl.int64)[None, :] * WIDTH + feature[:, None]
        tl.store(pointers, scales, mask=(feature < end)[:, None])
    else:
        store_tile(scale, scales, feature, feature < end, tile, num_tiles * scales.shape[1])


@fast_jit(["rows", "data"])
def quantize_rows_kernel(
    rows,
    row_index,  # int32[N] or None
    row_range,
    data,  # bytes
    scale,
    amax,  # fp32[G] or None
    seeds,  # int64[G] or None
    bias_sums,  # fp32 [slots of row tiles, WIDTH] or None
    bias_scale,  # fp32[N] or None
    SIZES: tl.constexpr,
):
    """Grid (programs that loop over tiles of rows, tiles of columns)."""
    tile_column = tl.program_id(1)
    column = tile_column * SIZES.columns + tl.arange(0, SIZES.columns)
    prefix, num_tiles = row_tile_prefix(row_range, SIZES.num_groups, SIZES.lines)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        group, first_row, end = locate_rows(tile, prefix, row_range, SIZES.num_groups, SIZES.lines)
        row = first_row + (
            tl.arange(0, SIZES.lines) if bias_sums is None else spread_rows(SUM_STEPS, SPREAD_STEPS)
        )
        source = source_rows(row_index, row, end)
        pointers = rows + source.to(tl.int64)[:, None] * SIZES.width + column[None, :]
        x = tl.load(
            pointers, mask=(row < end)[:, None] & (column < SIZES.width)[None, :], other=0.0
        ).to(tl.float32)
        words = random_words(
            seeds,
            group,
            row - tl.load(row_range + group),
            tile_column * SIZES.columns,
            SIZES.lines,
            SIZES.columns,
        )
        codes, scales = quantize_tile(x, global_scale_of(amax, group), words, SIZES.format)
        store_tile(data, codes, row, row < end, tile_column, SIZES.format.data_width(SIZES.width))
        store_tile(scale, scales, row, row < end, tile_column, SIZES.format.num_blocks(SIZES.width))
        if bias_sums is not None:
            if bias_scale is not None:
                x = scale_terms(x, tl.load(bias_scale + row, mask=row < end, other=0.0)[:, None])
            slot = bias_sums + (first_row // SIZES.lines + group).to(tl.int64) * SIZES.width
            tl.store(
                slot + column,
                sum_spread_tile(x, SUM_STEPS, SPREAD_STEPS),
                mask=column < SIZES.width,
            )


@fast_jit(["rows", "data"])
def quantize_columns_kernel(
    rows,
    row_index,  # int32[N] or None
    row_range,
    data,  # bytes
    scale,
    amax,  # fp32[G] or None
    seeds,  # int64[G] or None
    signs: tl.int32,
    num_tiles: tl.int32,
    SIZES: tl.constexpr,
):
    """Grid (num_tiles tiles of tokens, tiles of features)."""
    tile = tl.program_id(0)
    prefix, num_used = row_tile_prefix(row_range, SIZES.num_groups, TILE)
    if tile < num_used:
        group, first_row, end = locate_rows(tile, prefix, row_range, SIZES.num_groups, TILE)
        feature = tl.program_id(1) * SIZES.lines + tl.arange(0, SIZES.lines)
        x = load_columns(rows, row_index, first_row, end, feature, signs, SIZES)
        words = random_words(
            seeds, group, feature, first_row - tl.load(row_range + group), SIZES.lines, TILE
        )
        codes, scales = quantize_tile(x, global_scale_of(amax, group), words, SIZES.format)
        store_tile(
            data,
            codes,
            feature,
            feature < SIZES.width,
            tile,
            num_tiles * SIZES.format.data_width(TILE),
        )
        store_column_scales(scale, scales, feature, SIZES.width, tile, num_tiles, SIZES.width)


@triton.jit
def load_weight(weight, table, group, tile_line, tile_column, SIZES: tl.constexpr):
    """fp32 of a tile of one of several matrices; zeros past its lines and columns."""
    line = tile_line * SIZES.lines + tl.arange(0, SIZES.lines)
    column = tile_column * SIZES.columns + tl.arange(0, SIZES.columns)
    matrix = matrix_of(weight, table, group, SIZES.num_lines * SIZES.width, SIZES.dtype)
    if SIZES.strides is None:
        pointers = matrix + line.to(tl.int64)[:, None] * SIZES.width + column[None, :]
    else:
        pointers = matrix + line.to(tl.int64)[:, None] * SIZES.strides[0]
        pointers += column.to(tl.int64)[None, :] * SIZES.strides[1]
    inside = (line < SIZES.num_lines)[:, None] & (column < SIZES.width)[None, :]
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@fast_jit(["weight", "data"])
def quantize_weights_kernel(
    weight,  # None with a table
    table,  # int64[G] or None
    data,  # bytes
    scale,
    amax,  # fp32[G] or None
    SIZES: tl.constexpr,
):
    """Grid (tiles of lines, tiles of columns, groups)."""
    tile_column, group, tile_line = tl.program_id(1), tl.program_id(2), tl.program_id(0)
    x = load_weight(weight, table, group, tile_line, tile_column, SIZES)
    codes, scales = tile_codes(
        x,
        global_scale_of(amax, group),
        None,
        SIZES.format,
        SIZES.format.block,
        SIZES.format.block_lines,
    )
    store_weight_tile((data, scale), codes, scales, (group, tile_line, tile_column), SIZES, False)


@fast_jit(["weight", "data", "transposed_data"])
def quantize_weight_pairs_kernel(
    weight,  # None with a table
    table,  # int64[G] or None
    data,  # bytes
    scale,
    transposed_data,  # bytes
    transposed_scale,
    amax,  # fp32[G] or None
    SIZES: tl.constexpr,
):
    """Grid (tiles of columns, tiles of lines, groups): neighbours read neighbouring columns of the same lines."""
    tile_column, tile_line, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    x = load_weight(weight, table, group, tile_line, tile_column, SIZES)
    global_scale = global_scale_of(amax, group)
    codes, scales = tile_codes(
        x, global_scale, None, SIZES.format, SIZES.format.block, SIZES.format.block_lines
    )
    # Square blocks have the same numbers in both directions.
    column_codes, column_scales = (
        (codes, scales)
        if SIZES.format.block == SIZES.format.block_lines
        else tile_codes(
            x, global_scale, None, SIZES.format, SIZES.format.block_lines, SIZES.format.block
        )
    )
    store_weight_tile((data, scale), codes, scales, (group, tile_line, tile_column), SIZES, False)
    # Transposed as bytes: a quarter of the numbers' traffic through shared memory.
    store_weight_tile(
        (transposed_data, transposed_scale),
        tl.trans(column_codes),
        tl.trans(column_scales),
        (group, tile_column, tile_line),
        SIZES,
        True,
    )


@triton.jit
def store_largest(amax_bits, x):
    """Raises the number at a pointer to bits to at least the largest finite |x| of a tile [lines, elements]."""
    bits = magnitude_bits(x)
    bits = tl.where(bits < INFINITY_BITS, bits, 0)
    tl.atomic_max(amax_bits, tl.max(tl.max(bits, axis=1), axis=0), sem="relaxed")


@fast_jit(["rows"])
def group_amax_kernel(
    rows,
    row_index,  # int32[N] or None
    row_range,
    amax_bits,  # int32[G], zeros: the bits of amax, which have the order of the numbers
    signs: tl.int32,
    SIZES: tl.constexpr,
):
    """Grid (tiles of tokens, tiles of features). The atomics are maxima, so their order has no effect."""
    prefix, num_tiles = row_tile_prefix(row_range, SIZES.num_groups, TILE)
    if tl.program_id(0) < num_tiles:
        group, first_row, end = locate_rows(
            tl.program_id(0), prefix, row_range, SIZES.num_groups, TILE
        )
        feature = tl.program_id(1) * SIZES.lines + tl.arange(0, SIZES.lines)
        x = load_columns(rows, row_index, first_row, end, feature, signs, SIZES)
        store_largest(amax_bits + group, x)


@fast_jit(["weight"])
def weight_amax_kernel(
    weight,  # None with a table
    table,  # int64[G] or None
    amax_bits,  # int32[G], zeros
    SIZES: tl.constexpr,
):
    """Grid (tiles of lines, tiles of columns, groups)."""
    tile_line, tile_column, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    store_largest(
        amax_bits + group, load_weight(weight, table, group, tile_line, tile_column, SIZES)
    )


def quantize_rows(
    rows, row_range, out, block_format, *, row_index=None, amax=None, seeds=None, sums=None
):
    (data, scale), num_groups = out, row_range.shape[1]
    num_rows, width = data.shape[0], rows.shape[1]
    tile = ROWS if sums is None else _SUMMED_ROWS
    num_columns = ceil_div(width, tile["columns"])
    launch(
        quantize_rows_kernel,
        (row_programs(max_row_tiles(num_rows, num_groups, SLOT_ROWS), num_columns), num_columns),
        cached_sizes(format=block_format, num_groups=num_groups, width=width, **tile),
        rows,
        row_index,
        row_range,
        formats.as_bytes(data),
        formats.as_bytes(scale),
        amax,
        seeds,
        *(sums or (None, None)),
    )


def quantize_columns(
    rows, row_range, out, block_format, *, row_index=None, amax=None, signs=None, seeds=None
):
    (data, scale), width, num_groups = out, rows.shape[1], row_range.shape[1]
    check_column_scale("scale", scale)
    num_tiles = data.shape[1] * block_format.elements_per_byte // formats.TILE
    if signs is None and hopper_choice.launched(
        "quantize_columns",
        (rows.device, rows.dtype, width),
        (block_format, rows, width),
        *(rows, row_range, out, block_format),
        row_index=row_index,
    ):
        return
    launch(
        quantize_columns_kernel,
        (num_tiles, ceil_div(width, COLUMN_TILE[0])),
        _of_columns(num_groups, width, signs is not None, format=block_format),
        rows,
        row_index,
        row_range,
        formats.as_bytes(data),
        column_scale(scale),
        amax,
        seeds,
        signs or 0,
        num_tiles,
    )


def quantize_weights(weight, out, block_format, *, amax=None):
    num_groups, num_lines, width = weight.shape
    strides = weight.stride()[1:] if isinstance(weight, torch.Tensor) else (width, 1)
    launch(
        quantize_weights_kernel,
        (ceil_div(num_lines, WEIGHT_TILE[0]), ceil_div(width, WEIGHT_TILE[1]), num_groups),
        _of_weights(weight, strides, format=block_format, **_WEIGHTS),
        *packed_and_table(weight),
        *map(formats.as_bytes, out),
        amax,
    )


def quantize_weight_pairs(weight, out, transposed_out, block_format, *, amax=None):
    num_groups, num_lines, width = weight.shape
    if hopper_choice.launched(
        "quantize_weight_pairs",
        (weight.device, weight.dtype, width),
        (block_format, weight),
        *(weight, out, transposed_out, block_format),
    ):
        return
    is_square = block_format.block == block_format.block_lines
    tile = _WEIGHTS if is_square else _tile(block_format.block, PAIR_COLUMNS, ROW_WARPS)
    launch(
        quantize_weight_pairs_kernel,
        (ceil_div(width, tile["columns"]), ceil_div(num_lines, tile["lines"]), num_groups),
        _of_weights(weight, format=block_format, **tile),
        *packed_and_table(weight),
        *map(formats.as_bytes, (*out, *transposed_out)),
        amax,
    )


def group_amax(rows, row_range, amax, *, row_index=None, signs=None):
    num_rows, width = rows.shape if row_index is None else (row_index.shape[0], rows.shape[1])
    num_groups = amax.shape[0]
    amax.zero_()
    launch(
        group_amax_kernel,
        (max_row_tiles(num_rows, num_groups, formats.TILE), ceil_div(width, COLUMN_TILE[0])),
        _of_columns(num_groups, width, signs is not None),
        rows,
        row_index,
        row_range,
        amax.view(torch.int32),
        signs or 0,
    )


def weight_amax(weight, amax):
    num_groups, num_lines, width = weight.shape
    amax.zero_()
    launch(
        weight_amax_kernel,
        (ceil_div(num_lines, WEIGHT_TILE[0]), ceil_div(width, WEIGHT_TILE[1]), num_groups),
        _of_weights(weight, **_WEIGHTS),
        *packed_and_table(weight),
        amax.view(torch.int32),
    )


def _tile(lines: int, columns: int, num_warps: int) -> dict[str, Any]:
    return {"lines": lines, "columns": columns, "num_warps": num_warps}


ROWS, _SUMMED_ROWS = _tile(*ROW_TILE, ROW_WARPS), _tile(SLOT_ROWS, SUM_COLUMNS, SUM_WARPS)
_WEIGHTS = _tile(*WEIGHT_TILE, NUM_WARPS)


def _of_columns(num_groups: int, width: int, transforms: bool, **sizes: Hashable) -> Constants:
    """Constants of a kernel for columns of rows in groups."""
    return cached_sizes(
        num_groups=num_groups,
        width=width,
        hadamard=transforms,
        lines=COLUMN_TILE[0],
        num_warps=NUM_WARPS,
        **sizes,
    )


def _of_weights(
    weight: torch.Tensor | TensorTable, strides: tuple[int, ...] | None = None, **sizes: Any
) -> Constants:
    """Constants of a kernel for matrices; without strides, these are contiguous."""
    _, num_lines, width = weight.shape
    return cached_sizes(
        dtype=TRITON_DTYPES[weight.dtype],
        num_lines=num_lines,
        width=width,
        strides=strides,
        **sizes,
    )
