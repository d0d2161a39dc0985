"""The activation of an expert and its gradient with quantised results (Triton). Letters: twin/quantize.py.

Rows of the activation do not depend on groups: a program has a few rows by FEATURES of the result. A gradient's program
has TILE tokens of a group and reads them twice: in strips of features, which have whole blocks of columns, and in
strips of rows, which have whole blocks of rows. The second time h is in L2. (One tile for both would fill the registers
with numbers that wait for quantisation.) On Hopper a kernel computes each number once and passes it through shared
memory: low_precision/hopper_dact_quantize.py.

The arithmetic is the same as in activation.py and quantize.py: the same functions on the same rounded numbers.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from symmoe.kernels import formats, hopper_choice
from symmoe.kernels.act_quantized import FEATURES, DactOperands, dact_features
from symmoe.kernels.activation import num_scale_sums
from symmoe.kernels.launch.launch import cached_sizes, ceil_div, fast_jit, launch
from symmoe.kernels.low_precision.codes import (
    TILE,
    block_scales_or_nan,
    column_scale,
    e4m3_code,
    magnitude_bits,
)
from symmoe.kernels.low_precision.quantize import store_column_scales, store_part
from symmoe.kernels.triton.activation import (
    SUM_COLUMNS,
    SUM_STEPS,
    act_part,
    add_neighbours,
    addressable,
    dact_part,
    join_blocks,
)
from symmoe.kernels.triton.bias import sum_row_tiles, sum_tile
from symmoe.kernels.triton.gemm_act import sum_dact_partials
from symmoe.kernels.triton.tiles import locate_rows, max_row_tiles, row_programs, row_tile_prefix

# A strip of columns costs about 500 instructions for its maxima and its transposition, at any width.
STRIP = 32  # features of a strip of columns
ROWS = 32  # rows of a strip, and of a program that makes only rows
ROW_WARPS = 4  # warps of a program that makes only rows: few warps, many programs with loads
NUM_WARPS = 8
REGISTERS = 128  # per thread: two programs per SM


@triton.jit
def quantize_lines(x, SIZES: tl.constexpr):
    """Codes of x [LINES, WIDTH] fp32, and stored scales [LINES, WIDTH / block]: quantize_tile of quantize.py."""
    LINES: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    SCALE: tl.constexpr = SIZES.format.scale
    blocks = x.reshape(LINES, WIDTH // SIZES.format.block, SIZES.format.block)
    stored, multiplier = block_scales_or_nan(tl.max(magnitude_bits(blocks), axis=2), SCALE)
    return e4m3_code(blocks * multiplier[:, :, None]).reshape(LINES, WIDTH), stored


@triton.jit
def store_rows(
    x, row, end, first, END: tl.constexpr, data, scale, WIDTH: tl.constexpr, SIZES: tl.constexpr
):
    """Quantises x [rows, C], features first..END of rows of WIDTH, with scales along features; nothing without data."""
    if data is not None:
        codes, scales = quantize_lines(x.to(tl.float32), SIZES)
        store_part(data, codes, row, row < end, first, END, WIDTH)
        store_part(
            scale,
            scales,
            row,
            row < end,
            first // SIZES.format.block,
            SIZES.format.num_blocks(END),
            SIZES.format.num_blocks(WIDTH),
        )


@triton.jit
def store_columns(
    x, first, END: tl.constexpr, tile, out, sums, WIDTH: tl.constexpr, SIZES: tl.constexpr
):
    """Quantises the columns of x [TILE, C], features first..END of WIDTH, with scales along tokens; nothing without
    data. out: data, scales, their number of token tiles. sums [WIDTH]: the columns' sums, or None."""
    data, scale, num_tiles = out
    if sums is not None:
        feature = first + tl.arange(0, x.shape[1])
        tl.store(sums + feature, sum_tile(x.to(tl.float32)), mask=feature < END)
    if data is not None:
        codes, scales = quantize_lines(tl.trans(x).to(tl.float32), SIZES)
        feature = first + tl.arange(0, x.shape[1])
        tokens = num_tiles * TILE
        store_part(data, codes, feature, feature < END, tile * TILE, tokens, tokens)
        store_column_scales(scale, scales, feature, END, tile, num_tiles, WIDTH)


@triton.jit
def store_block_sums(sums, scale_sums, row, end, first_column, num_rows, SIZES: tl.constexpr):
    """Stores sums [ROWS, BLOCKS] of blocks of columns from first_column on; scale_sums [blocks, num_rows]."""
    block = first_column // SUM_COLUMNS + tl.arange(0, sums.shape[1])
    pointers = scale_sums + block.to(tl.int64)[None, :] * num_rows + row[:, None]
    tl.store(
        pointers, sums, mask=(row < end)[:, None] & (block * SUM_COLUMNS < SIZES.columns)[None, :]
    )


@fast_jit(["h", "data"])
def act_quantize_rows_kernel(
    h,  # [N, W]
    row_scale,  # fp32[N]
    row_range,
    data,  # bytes [N, I]
    scale,
    SIZES: tl.constexpr,
):
    """Grid (tiles of features, programs that loop over tiles of rows): neighbouring programs read the same rows."""
    first = tl.program_id(0) * SIZES.features
    prefix, num_tiles = row_tile_prefix(row_range, SIZES.num_groups, SIZES.rows)
    for tile in tl.range(tl.program_id(1), num_tiles, tl.num_programs(1)):
        _group, first_row, end = locate_rows(tile, prefix, row_range, SIZES.num_groups, SIZES.rows)
        row = first_row + tl.arange(0, SIZES.rows)
        a = act_part(h, row_scale, row, end, first, SIZES.features, SIZES)
        store_rows(a, row, end, first, SIZES.columns, data, scale, SIZES.columns, SIZES)


@fast_jit(["da", "h", "data", "column_data", "a_column_data"])
def dact_quantize_kernel(
    da,  # [N, I]
    h,  # [N, W]
    row_scale,  # fp32[N]
    row_range,
    workspace,  # fp32 [blocks of features, N]
    data,  # bytes [N, W], or None
    scale,
    column_data,  # bytes [W, num_tiles * TILE], or None
    column_scale,
    a_column_data,  # bytes [I, num_a_tiles * TILE], or None
    a_column_scale,
    bias_sums,  # fp32 [slots of row tiles, W], or None
    num_rows: tl.int32,
    num_tiles: tl.int32,
    num_a_tiles: tl.int32,
    SIZES: tl.constexpr,
):
    """Grid (tiles of tokens, tiles of features)."""
    WIDTH: tl.constexpr = SIZES.activation.hidden_width(SIZES.columns)
    tile, n_tile = tl.program_id(0), tl.program_id(1)
    prefix, num_used = row_tile_prefix(row_range, SIZES.num_groups, TILE)
    if tile < num_used:
        group, first_row, end = locate_rows(tile, prefix, row_range, SIZES.num_groups, TILE)
        first_feature = n_tile * SIZES.features
        slot = (
            None
            if bias_sums is None
            else bias_sums + (first_row // TILE + group).to(tl.int64) * WIDTH
        )
        if column_data is not None or a_column_data is not None or bias_sums is not None:
            token = first_row + tl.arange(0, TILE)
            out, a_out = (
                (column_data, column_scale, num_tiles),
                (a_column_data, a_column_scale, num_a_tiles),
            )
            for i in tl.range(0, SIZES.features, SIZES.strip):
                first = first_feature + i
                factor = tl.load(row_scale + token, mask=token < end, other=0.0)
                a, dgate, dup, _ = dact_part(da, h, factor, token, end, first, SIZES.strip, SIZES)
                store_columns(a, first, SIZES.columns, tile, a_out, None, SIZES.columns, SIZES)
                if SIZES.activation.interleave is None:
                    store_columns(dgate, first, SIZES.columns, tile, out, slot, WIDTH, SIZES)
                    if SIZES.activation.is_gated:
                        store_columns(
                            dup, SIZES.columns + first, WIDTH, tile, out, slot, WIDTH, SIZES
                        )
                else:
                    dh = join_blocks(dgate, dup, TILE, SIZES.strip, SIZES.activation.interleave)
                    store_columns(dh, 2 * first, WIDTH, tile, out, slot, WIDTH, SIZES)
        for i in tl.range(0, TILE, SIZES.rows):
            row = first_row + i + tl.arange(0, SIZES.rows)
            factor = tl.load(row_scale + row, mask=row < end, other=0.0)
            _, dgate, dup, terms = dact_part(
                da, h, factor, row, end, first_feature, SIZES.features, SIZES
            )
            sums = add_neighbours(terms, SUM_STEPS)
            store_block_sums(sums, workspace, row, end, first_feature, num_rows, SIZES)
            if SIZES.activation.interleave is None:
                store_rows(dgate, row, end, first_feature, SIZES.columns, data, scale, WIDTH, SIZES)
                if SIZES.activation.is_gated:
                    store_rows(
                        dup,
                        row,
                        end,
                        SIZES.columns + first_feature,
                        WIDTH,
                        data,
                        scale,
                        WIDTH,
                        SIZES,
                    )
            else:
                dh = join_blocks(
                    dgate, dup, SIZES.rows, SIZES.features, SIZES.activation.interleave
                )
                store_rows(dh, row, end, 2 * first_feature, WIDTH, data, scale, WIDTH, SIZES)


def act_quantize(h, row_scale, row_range, out, activation, block_format):
    (num_rows, ffn), num_groups = out[0].shape, row_range.shape[1]
    tiles_of_features = ceil_div(ffn, FEATURES)
    launch(
        act_quantize_rows_kernel,
        (
            tiles_of_features,
            row_programs(max_row_tiles(num_rows, num_groups, ROWS), tiles_of_features),
        ),
        cached_sizes(
            activation=addressable(activation, ffn),
            columns=ffn,
            format=block_format,
            num_groups=num_groups,
            rows=ROWS,
            features=FEATURES,
            num_warps=ROW_WARPS,
        ),
        h,
        row_scale,
        row_range,
        *map(formats.as_bytes, out),
    )


def dact_quantize(da, h, row_scale, row_range, out, workspace, activation, block_format):
    (num_rows, ffn), num_groups = da.shape, row_range.shape[1]
    if num_rows == 0:
        if out.dbias is not None:
            out.dbias.zero_()
        return
    arguments = dact_arguments(da, h, row_scale, row_range, out, workspace)
    if not hopper_choice.launched(
        "dact_quantize",
        (h.device, h.dtype, h.shape[1]),
        (da, h, activation, block_format),
        *(arguments, activation, block_format),
    ):
        features = dact_features(activation)
        launch(
            dact_quantize_kernel,
            (formats.max_tiles(num_rows, num_groups), ceil_div(ffn, features)),
            cached_sizes(
                activation=addressable(activation, ffn),
                columns=ffn,
                format=block_format,
                num_groups=num_groups,
                rows=ROWS,
                features=features,
                strip=max(STRIP, activation.interleave or 0),
                num_warps=NUM_WARPS,
                maxnreg=REGISTERS,
            ),
            *arguments,
        )
    sum_dact_partials(workspace, row_range, out.dscale, num_scale_sums(ffn))
    if out.dbias is not None:
        sum_row_tiles(
            workspace[num_rows * num_scale_sums(ffn) :], row_range, out.dbias, formats.TILE
        )


def dact_arguments(
    da: torch.Tensor,
    h: torch.Tensor,
    row_scale: torch.Tensor,
    row_range: torch.Tensor,
    out: DactOperands,
    workspace: torch.Tensor,
) -> tuple[Any, ...]:
    """The arguments of dact_quantize's kernels."""
    num_rows, ffn = da.shape
    columns = [
        (formats.as_bytes(data), column_scale(scale))
        for data, scale in (out.columns, out.a_columns)
    ]
    return (
        da,
        h,
        row_scale,
        row_range,
        workspace,
        *map(formats.as_bytes, out.rows),
        *columns[0],
        *columns[1],
        None if out.dbias is None else workspace[num_rows * num_scale_sums(ffn) :],
        num_rows,
        *(data.shape[1] // formats.TILE for data, _ in columns),
    )
