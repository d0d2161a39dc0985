"""Both operands of weights, quantised in square blocks of TILE, for Hopper (Gluon, persistent).

A tile is a block. A tile is loaded to shared memory as in hopper_columns.py, and read twice from there: as words of 128
lines, for the block's largest number and the transposed codes, and as words of a line, for the other codes. So no code
is transposed; multiplying and rounding again costs less. Formulas and bits are the same as in quantize.py.
"""

import torch

from symmoe.kernels import control, formats
from symmoe.kernels.hopper.act import unpack
from symmoe.kernels.hopper.gluon_names import async_copy, copy_async, gl, gluon
from symmoe.kernels.hopper.table import GLUON_DTYPES
from symmoe.kernels.launch.launch import cached_sizes, fast_jit, launch
from symmoe.kernels.low_precision.codes import e4m3_code
from symmoe.kernels.low_precision.hopper_columns import (
    HELD,
    NUM_WARPS,
    PAIRS,
    PROGRAMS_PER_SM,
    REGISTERS,
    SHARED,
    TILE,
    copied_layout,
    largest,
    scales_of,
)
from symmoe.kernels.operands import TensorTable, packed_and_table
from symmoe.kernels.triton.tiles import launch_grid, matrix_pointer

COPIED = gl.constexpr(copied_layout(4))


@gluon.jit
def code_pairs(first, second):
    """Two E4M3 codes, int16."""
    return gl.inline_asm_elementwise(
        "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;",
        "=h,f,f",
        [second, first],
        dtype=gl.int16,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def begin_copy(stage, weight, table, tile, num_tiles, SIZES: gl.constexpr):
    """Begins to copy a tile to shared memory; zeros past the last tile."""
    line = gl.arange(0, TILE, gl.SliceLayout(1, COPIED))
    pair = gl.arange(0, PAIRS, gl.SliceLayout(0, COPIED))
    WORDS: gl.constexpr = SIZES.width // 2
    line_tile = tile // SIZES.column_tiles
    if table is None:
        first = weight + line_tile.to(gl.int64) * (TILE * WORDS)
    else:
        group = gl.minimum(tile, num_tiles - 1) // (SIZES.column_tiles * SIZES.line_tiles)
        first = matrix_pointer(table, group, gl.int32) + line_tile % SIZES.line_tiles * (
            TILE * WORDS
        )
    first += tile % SIZES.column_tiles * PAIRS
    mask = (tile < num_tiles) & (line < TILE)[:, None]
    copy_async(stage, first + line[:, None] * WORDS + pair[None, :], mask=mask)
    async_copy.commit_group()


@gluon.jit
def store_transposed(
    words, multiplier, transposed_data, group, tile_line, tile_column, SIZES: gl.constexpr
):
    """Codes of words [TILE, PAIRS], `HELD`, times the multiplier, as lines of 128 neighbours of a column."""
    first_line = group.to(gl.int64) * SIZES.width + tile_column * TILE
    line = first_line + 2 * gl.arange(0, PAIRS, gl.SliceLayout(0, HELD))
    column = tile_line * TILE + gl.arange(0, TILE, gl.SliceLayout(1, HELD))
    pointers = transposed_data + (line * SIZES.num_lines)[None, :] + column[:, None]
    gl.store(pointers, e4m3_code(unpack(words, SIZES.dtype)[0] * multiplier))
    gl.store(pointers + SIZES.num_lines, e4m3_code(unpack(words, SIZES.dtype)[1] * multiplier))


@gluon.jit
def store_lines(words, multiplier, data, tile, SIZES: gl.constexpr):
    """Codes of words [TILE, PAIRS], `COPIED`, times the multiplier, two at a time."""
    WORDS: gl.constexpr = SIZES.width // 2
    data += (tile // SIZES.column_tiles).to(gl.int64) * (
        TILE * WORDS
    ) + tile % SIZES.column_tiles * PAIRS
    line = gl.arange(0, TILE, gl.SliceLayout(1, COPIED))
    pair = gl.arange(0, PAIRS, gl.SliceLayout(0, COPIED))
    codes = code_pairs(
        unpack(words, SIZES.dtype)[0] * multiplier, unpack(words, SIZES.dtype)[1] * multiplier
    )
    gl.store(data + line[:, None] * WORDS + pair[None, :], codes)


@fast_jit(["weight", "data", "transposed_data"], jit=gluon.jit)
def hopper_quantize_weight_pairs_kernel(
    weight,  # words of two numbers, int32 [G, M, K / 2]; None with a table
    table,  # int64[G] or None
    data,  # words of two codes, int16 [G, M, K / 2]
    scale,  # fp32 [G, M / TILE, K / TILE]
    transposed_data,  # bytes [G, K, M]
    transposed_scale,  # fp32 [G, K / TILE, M / TILE]
    num_tiles: gl.int32,
    SIZES: gl.constexpr,
):
    """Neighbouring programs have neighbouring columns of the same lines."""
    stage = gl.allocate_shared_memory(
        gl.int32, [TILE, PAIRS], SHARED
    )  # one was 4 % faster than two
    begin_copy(stage, weight, table, gl.program_id(0), num_tiles, SIZES)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        line_tile = tile // SIZES.column_tiles
        tile_column = tile % SIZES.column_tiles
        group = line_tile // SIZES.line_tiles
        tile_line = line_tile % SIZES.line_tiles
        async_copy.wait_group(0)
        words = stage.load(HELD)
        largest_words = largest(words, SIZES.dtype)
        # Numbers without a sign have the order of their bits; Inf and NaN come last.
        bits = gl.max(gl.maximum(largest_words & 0xFFFF, largest_words >> 16), axis=0)
        stored, multiplier = scales_of(unpack(bits, SIZES.dtype)[0], SIZES)
        gl.store(scale + tile, stored)
        gl.store(
            transposed_scale
            + (group * SIZES.column_tiles + tile_column) * SIZES.line_tiles
            + tile_line,
            stored,
        )
        store_transposed(words, multiplier, transposed_data, group, tile_line, tile_column, SIZES)
        store_lines(stage.load(COPIED), multiplier, data, tile, SIZES)
        begin_copy(stage, weight, table, tile + gl.num_programs(0), num_tiles, SIZES)
    async_copy.wait_group(0)


def takes_weight_pairs(
    block_format: formats.BlockFormat, weight: torch.Tensor | TensorTable
) -> bool:
    """Whether the kernel supports the format for weights [G, M, K]: E4M3 in whole square blocks of TILE."""
    in_tiles = (
        block_format.element == "e4m3"
        and block_format.block == block_format.block_lines == formats.TILE
    )
    is_aligned = isinstance(weight, TensorTable) or weight.data_ptr() % control.ACCESS_BYTES == 0
    return in_tiles and is_aligned and all(n % formats.TILE == 0 for n in weight.shape[1:])


def launch_quantize_weight_pairs(weight, out, transposed_out, block_format, *, num_sms=None):
    """quantize_weight_pairs for weights that takes_weight_pairs accepts."""
    num_tiles = out[1].numel()
    _, num_lines, width = weight.shape
    packed, table = packed_and_table(weight)
    launch(
        hopper_quantize_weight_pairs_kernel,
        launch_grid(num_tiles, num_sms, weight.device, PROGRAMS_PER_SM),
        cached_sizes(
            num_lines=num_lines,
            line_tiles=num_lines // TILE.value,
            width=width,
            column_tiles=width // TILE.value,
            scale=block_format.scale,
            dtype=GLUON_DTYPES[weight.dtype],
            num_warps=NUM_WARPS,
            maxnreg=REGISTERS,
        ),
        None if packed is None else packed.view(torch.int32),
        table,
        out[0].view(torch.int16),
        out[1],
        transposed_out[0].view(torch.uint8),
        transposed_out[1],
        num_tiles,
    )
