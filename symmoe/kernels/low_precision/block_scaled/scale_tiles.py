"""Conversion of scales to the 128x4 tiles of block-scaled matrix units, and back (Triton)."""

import torch
import triton
import triton.language as tl

from symmoe.kernels import formats, operands, quantized_gemm
from symmoe.kernels.launch.launch import Constants, cached_constants, ceil_div, fast_jit, launch
from symmoe.kernels.operands import ScaleTable
from symmoe.kernels.triton.tiles import locate_rows, row_tile_prefix

TILE = tl.constexpr(formats.TILE)
TILE_BLOCKS, TILE_BYTES = (
    tl.constexpr(quantized_gemm.TILE_BLOCKS),
    tl.constexpr(quantized_gemm.TILE_BYTES),
)
NUM_WARPS = 4


@fast_jit([])
def swizzle_scales_kernel(
    scale,  # uint8[N, Q]; of a table: sources
    groups,  # row_range; of a table: shapes
    swizzled,  # uint8[tiles down, tiles across, 512]; of a table: destinations
    extents,  # None; of a table: int32[S, 4]
    NUM_BLOCKS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Grid (rows of tiles, parts of a row of TILES tiles); of a table (matrices, parts, rows of tiles)."""
    if extents is None:
        prefix, num_tiles = row_tile_prefix(groups, NUM_GROUPS, TILE)
        if tl.program_id(0) < num_tiles:
            _, first_row, end = locate_rows(tl.program_id(0), prefix, groups, NUM_GROUPS, TILE)
            out = swizzled + tile_row_start(tl.program_id(0), NUM_BLOCKS)
            write_tiles(scale, first_row, end, NUM_BLOCKS, NUM_BLOCKS, 1, out, TILES)
    else:
        matrix, first_row = tl.program_id(0), tl.program_id(2) * TILE
        extent = extents + tl.load(groups + matrix) * 4
        num_rows, num_blocks = tl.load(extent), tl.load(extent + 1)
        if first_row < num_rows:
            source = tl.load(scale + matrix).to(tl.pointer_type(tl.uint8))
            out = tl.load(swizzled + matrix).to(tl.pointer_type(tl.uint8))
            out += tile_row_start(tl.program_id(2), num_blocks)
            write_tiles(
                source,
                first_row,
                num_rows,
                num_blocks,
                tl.load(extent + 2),
                tl.load(extent + 3),
                out,
                TILES,
            )


@triton.jit
def write_tiles(
    source, first_row, end, num_blocks, row_stride, block_stride, out, TILES: tl.constexpr
):
    """Writes this program's part of the row of tiles that begins at `out`."""
    byte = tl.program_id(1) * (TILES * TILE_BYTES) + tl.arange(0, TILES * TILE_BYTES)
    row, block = tile_element(byte, first_row)
    offset = row.to(tl.int64) * row_stride + block.to(tl.int64) * block_stride
    value = tl.load(source + offset, mask=(row < end) & (block < num_blocks), other=0)
    # The hint gives the compiler the alignment: it then stores 16 bytes at a time.
    tl.store(tl.multiple_of(out + byte, 16), value, mask=byte < tile_row_start(1, num_blocks))


@fast_jit(["swizzled"])
def unswizzle_scales_kernel(
    swizzled,
    row_range,
    scale,  # uint8[N, Q]
    NUM_BLOCKS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
):
    """Grid (rows of tiles, tiles across)."""
    prefix, num_tiles = row_tile_prefix(row_range, NUM_GROUPS, TILE)
    if tl.program_id(0) < num_tiles:
        _, first_row, end = locate_rows(tl.program_id(0), prefix, row_range, NUM_GROUPS, TILE)
        byte = tl.program_id(1) * TILE_BYTES + tl.arange(0, TILE_BYTES)
        row, block = tile_element(byte, first_row)
        value = tl.load(swizzled + tile_row_start(tl.program_id(0), NUM_BLOCKS) + byte)
        mask = (row < end) & (block < NUM_BLOCKS)
        tl.store(scale + row.to(tl.int64) * NUM_BLOCKS + block, value, mask=mask)


@triton.jit
def tile_element(byte, first_row):
    """The row and block of the scale in this byte of a row of tiles."""
    return (
        first_row + byte % TILE_BYTES // 16 + byte // 4 % 4 * 32,
        byte // TILE_BYTES * TILE_BLOCKS + byte % 4,
    )


@triton.jit
def tile_row_start(number, num_blocks):
    """The byte at which a row of tiles begins."""
    return tl.cast(number, tl.int64) * (
        (num_blocks + (TILE_BLOCKS - 1)) // TILE_BLOCKS * TILE_BYTES
    )


def swizzle_scales(scale, row_range, swizzled):
    if isinstance(scale, ScaleTable):
        down, across = scale.max_tiles
        launch(
            swizzle_scales_kernel,
            (scale.sources.shape[0], ceil_div(across, _OF_TABLE.named["TILES"]), down),
            _OF_TABLE,
            scale.sources,
            scale.shapes,
            scale.destinations,
            scale.extents,
        )
        return
    rows_of_tiles, across, _ = swizzled.shape
    launch(
        swizzle_scales_kernel,
        (rows_of_tiles, across),
        _constants(
            scale.shape[1], operands.require_tensor("row_range", row_range).shape[1], TILES=1
        ),
        scale.view(torch.uint8),
        row_range,
        swizzled,
        None,
    )


def unswizzle_scales(swizzled, row_range, scale):
    launch(
        unswizzle_scales_kernel,
        tuple(swizzled.shape[:2]),
        _constants(scale.shape[1], row_range.shape[1]),
        swizzled,
        row_range,
        scale.view(torch.uint8),
    )


def _constants(num_blocks: int, num_groups: int, **constants: int) -> Constants:
    return cached_constants(
        NUM_BLOCKS=num_blocks, NUM_GROUPS=num_groups, num_warps=NUM_WARPS, **constants
    )


_OF_TABLE = _constants(0, 1, TILES=8)  # the widths are in the table
