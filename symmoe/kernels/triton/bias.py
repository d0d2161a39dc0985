"""Gradients of the biases of a grouped GEMM (Triton). Forward: gemm.py.

Both kernels read dout once; this read bounds their time. Sums use no atomics and are not split over programs: the order
of a sum depends on the row's place in its group (kernels/bias_sums.py) and on the static width, never on N, the group's
place or the grid. cp.async keeps a few rows of dout in flight, because few programs share an SM.

Fused kernels leave sums of their row tiles in slots; sum_row_tiles adds these sums.
"""

import torch
import triton
import triton.language as tl

from symmoe.kernels.bias_sums import SLOT_ROWS
from symmoe.kernels.formats import TILE
from symmoe.kernels.launch.launch import cached_sizes, ceil_div, fast_jit, launch, next_power_of_2
from symmoe.kernels.operands import as_pair
from symmoe.kernels.triton.activation import scale_terms
from symmoe.kernels.triton.tiles import (
    load_k_rows,
    locate_rows,
    max_row_tiles,
    row_tile_prefix,
    source_rows,
    tile_mask,
)

# A program of the gradient has 128 bytes of every row, a full cache line: the most programs with full lines.
GRAD_COLUMN_BYTES = 128
DOT_COLUMN_BYTES = 512
DOT_ROWS = 16
NUM_STAGES = tl.constexpr(4)  # tiles in flight and in work
NUM_WARPS = 8
GRAD_WARPS = 4  # with 8, a tile's sums go through shared memory and take twice the time
SUM_COLUMNS = 128  # columns of a program that adds sums of tiles
SUM_LOADS = tl.constexpr(8)  # steps whose sums are in flight at a time
GRAD_ROWS = tl.constexpr(TILE)  # one tile is 16 KiB
ROW_STEPS = tl.constexpr(TILE.bit_length() - 1)  # steps from a tile's rows to their sum
SPREAD_STEPS = tl.constexpr(3)  # 8 neighbouring rows are one thread's


@triton.jit
def sum_tile(x, STEPS: tl.constexpr = ROW_STEPS):
    """Sum of the 2 ** STEPS rows of x [., COLUMNS], fp32: [COLUMNS], in the order of kernels/bias_sums.py.

    As in add_neighbours, the layout of x has no effect.
    """
    for _ in tl.static_range(STEPS):
        x = tl.sum(x.reshape(x.shape[0] // 2, 2, x.shape[1]), axis=1)
    return x.reshape(x.shape[1])


@triton.jit
def spread_rows(STEPS: tl.constexpr, SPREAD_STEPS: tl.constexpr):
    """The 2 ** STEPS rows of a tile in the order in which sum_spread_tile has 2 ** SPREAD_STEPS neighbours in one
    thread.

    The compiler assigns rows at distances of 2 ** (STEPS - SPREAD_STEPS) to a thread with so many rows.
    """
    position = tl.arange(0, 2**STEPS)
    apart: tl.constexpr = 2 ** (STEPS - SPREAD_STEPS)
    return position % apart * 2**SPREAD_STEPS + position // apart


@triton.jit
def sum_spread_tile(x, STEPS: tl.constexpr, SPREAD_STEPS: tl.constexpr):
    """As sum_tile, for rows in the order of spread_rows."""
    apart: tl.constexpr = 2 ** (STEPS - SPREAD_STEPS)
    sums = sum_tile(x.reshape(2**SPREAD_STEPS, apart * x.shape[1]), SPREAD_STEPS)
    return sum_tile(sums.reshape(apart, x.shape[1]), STEPS - SPREAD_STEPS)


@fast_jit(["dout"])
def grouped_bias_grad_kernel(
    dout,
    dout_index,  # int32[N] or None
    scale,  # fp32[N] or None
    row_range,
    dbias,  # [G, O]
    SIZES: tl.constexpr,
):
    """Sums one block of columns of one group. Grid (column blocks, groups)."""
    first_column = tl.program_id(0) * SIZES.block
    group = tl.program_id(1)
    start = tl.load(row_range + group)
    end = tl.load(row_range + SIZES.num_groups + group)
    total = tl.full((SIZES.block,), 0.0, dtype=tl.float32)
    column = first_column + tl.arange(0, SIZES.block)
    row = start + spread_rows(ROW_STEPS, SPREAD_STEPS)
    # Loaded one step ahead, as in grouped_gemm_wgrad_kernel: the pipeliner would halve its depth for dependent loads.
    next_source = source_rows(dout_index, row, end)
    for first_row in tl.range(start, end, GRAD_ROWS, num_stages=NUM_STAGES):
        row = first_row + spread_rows(ROW_STEPS, SPREAD_STEPS)
        next_row = row + GRAD_ROWS
        source = next_source
        next_source = source_rows(dout_index, next_row, end)
        pointers = dout + source.to(tl.int64)[:, None] * SIZES.width + column[None, :]
        tile = tl.load(
            pointers, mask=tile_mask(row, end, column, SIZES.width, SIZES.block), other=0.0
        ).to(tl.float32)
        if scale is not None:
            tile = scale_terms(tile, tl.load(scale + row, mask=row < end, other=0.0)[:, None])
        total += sum_spread_tile(tile, ROW_STEPS, SPREAD_STEPS)
    pointers = dbias + group.to(tl.int64) * SIZES.width + column
    tl.store(pointers, total.to(dbias.dtype.element_ty), mask=column < SIZES.width)


@triton.jit
def sum_slots(first, num_slots, in_width, WIDTH: tl.constexpr, STEPS: tl.constexpr):
    """Sum of 2 ** STEPS slots, neighbours first; slots past num_slots are 0. first: pointers to the first slot."""
    if STEPS == 0:
        total = tl.load(first, mask=in_width & (num_slots > 0), other=0.0)
    else:
        half: tl.constexpr = 2 ** (STEPS - 1)
        half_sum = sum_slots(first, num_slots, in_width, WIDTH, STEPS - 1)
        total = half_sum + sum_slots(
            first + half * WIDTH, num_slots - half, in_width, WIDTH, STEPS - 1
        )
    return total


@fast_jit([])
def sum_dbias_kernel(
    bias_sums,  # [slots of row tiles, W]
    row_range,
    dbias,  # [G, W]
    SIZES: tl.constexpr,
):
    """dbias from the sums per row tile: 2 ** STEPS neighbours are added as in sum_tile, then these sums in order; 0
    without rows. Grid (column blocks, groups)."""
    group = tl.program_id(1)
    start = tl.load(row_range + group)
    num_tiles = (
        tl.load(row_range + SIZES.num_groups + group) - start + (SIZES.tile_rows - 1)
    ) // SIZES.tile_rows
    column = tl.program_id(0) * SIZES.columns + tl.arange(0, SIZES.columns)
    sums = bias_sums + (start // SIZES.tile_rows + group).to(tl.int64) * SIZES.width + column
    total = tl.full((SIZES.columns,), 0.0, dtype=tl.float32)
    for tile in tl.range(0, num_tiles, 2**SIZES.steps, loop_unroll_factor=SUM_LOADS):
        total += sum_slots(sums, num_tiles - tile, column < SIZES.width, SIZES.width, SIZES.steps)
        sums += SIZES.width * 2**SIZES.steps
    pointers = dbias + group.to(tl.int64) * SIZES.width + column
    tl.store(pointers, total.to(dbias.dtype.element_ty), mask=column < SIZES.width)


@fast_jit(["dout", "bias"])
def grouped_bias_dot_kernel(
    dout,
    dout_index,  # int32[N] or None
    bias,  # [G, O]
    row_range,
    dscale,  # fp32[N]
    SIZES: tl.constexpr,
):
    """Dot products of DOT_ROWS rows of one group. One program per possible tile of rows."""
    tile = tl.program_id(0)
    prefix, num_tiles = row_tile_prefix(row_range, SIZES.num_groups, SIZES.block_rows)
    if tile < num_tiles:
        group, first_row, end = locate_rows(
            tile, prefix, row_range, SIZES.num_groups, SIZES.block_rows
        )
        row = first_row + tl.arange(0, SIZES.block_rows)
        source = source_rows(dout_index, row, end)
        bias_row = bias + group.to(tl.int64) * SIZES.width
        total = tl.full((SIZES.block_rows, SIZES.block), 0.0, dtype=tl.float32)
        for first_column in tl.range(0, SIZES.width, SIZES.block, num_stages=NUM_STAGES):
            x = load_k_rows(
                None,
                dout,
                source,
                first_row,
                first_row,
                end,
                first_column,
                SIZES.width,
                SIZES.block,
            )
            column = first_column + tl.arange(0, SIZES.block)
            features = tl.load(bias_row + column, mask=column < SIZES.width, other=0.0)
            total += x.to(tl.float32) * features.to(tl.float32)[None, :]
        dot = tl.sum(total, axis=1)
        if SIZES.accumulate:
            dot += tl.load(dscale + row, mask=row < end, other=0.0)
        tl.store(dscale + row, dot, mask=row < end)


def grouped_bias_grad(dout, row_range, dbias, *, scale=None):
    dout, dout_index = as_pair(dout)
    num_groups, width = dbias.shape
    block = GRAD_COLUMN_BYTES // dout.dtype.itemsize
    launch(
        grouped_bias_grad_kernel,
        (ceil_div(width, block), num_groups),
        cached_sizes(num_groups=num_groups, width=width, block=block, num_warps=GRAD_WARPS),
        dout,
        dout_index,
        scale,
        row_range,
        dbias,
    )


def sum_dbias(bias_sums, row_range, dbias):
    sum_row_tiles(bias_sums, row_range, dbias, SLOT_ROWS, TILE // SLOT_ROWS)


def sum_row_tiles(
    bias_sums: torch.Tensor,
    row_range: torch.Tensor,
    dbias: torch.Tensor,
    tile_rows: int,
    neighbours: int = 1,
) -> None:
    """dbias [G, W] in any dtype, from the sums of row tiles in the slots of kernels/bias_sums.py; whole groups.

    Sums of `neighbours` adjacent tiles are added in a tree, then the trees' results in order.
    """
    num_groups, width = dbias.shape
    launch(
        sum_dbias_kernel,
        (ceil_div(width, SUM_COLUMNS), num_groups),
        cached_sizes(
            num_groups=num_groups,
            width=width,
            tile_rows=tile_rows,
            steps=neighbours.bit_length() - 1,
            columns=SUM_COLUMNS,
            num_warps=4,
        ),
        bias_sums,
        row_range,
        dbias,
    )


def grouped_bias_dot(dout, bias, row_range, dscale, *, accumulate=False):
    (dout, dout_index), num_rows, (num_groups, width) = as_pair(dout), dscale.shape[0], bias.shape
    launch(
        grouped_bias_dot_kernel,
        (max_row_tiles(num_rows, num_groups, DOT_ROWS),),
        cached_sizes(
            accumulate=accumulate,
            num_groups=num_groups,
            width=width,
            block=min(DOT_COLUMN_BYTES // dout.dtype.itemsize, next_power_of_2(width)),
            block_rows=DOT_ROWS,
            num_warps=NUM_WARPS,
        ),
        dout,
        dout_index,
        bias,
        row_range,
        dscale,
    )
