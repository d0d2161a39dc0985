"""Gradients of the biases of a grouped GEMM (Triton). See gemm.py, whose forward they belong to.

Both read dout once and are bound by that. Nothing is summed by atomics and nothing is split over programs: the order
of a sum depends on the row's place in its group and on the static width, never on N, on where the group lies or on
the grid. A few rows of dout are kept in flight by cp.async, because few programs share an SM.
"""

import functools

import torch
import triton
import triton.language as tl

from symmoe.kernels.launch.integers import ceil_div, next_power_of_2
from symmoe.kernels.launch.launch import Constants, fast_launch, launch
from symmoe.kernels.triton.tiles import load_k_rows, locate_tile, max_row_tiles, row_tile_prefix, source_rows

# A program of the gradient owns 128 bytes of every row: a full cache line, and as many programs as full lines allow.
GRAD_COLUMN_BYTES = 128
GRAD_ROWS = 128  # one tile is 16 KiB
DOT_COLUMN_BYTES = 512
DOT_ROWS = 16
NUM_STAGES = tl.constexpr(4)  # tiles in flight and in work
NUM_WARPS = 8


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["dout_index", "scale", "row_range", "dbias"])
def grouped_bias_grad_kernel(
    dout,
    dout_index,  # int32[N] or None
    scale,  # fp32[N] or None
    row_range,
    dbias,  # [G, O]
    NUM_GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Sums one block of columns of one group. Grid (column blocks, groups)."""
    first_column = tl.program_id(0) * BLOCK
    group = tl.program_id(1)
    start = tl.load(row_range + group)
    end = tl.load(row_range + NUM_GROUPS + group)
    total = tl.zeros((BLOCK_ROWS, BLOCK), dtype=tl.float32)
    # Loaded one step ahead, as in grouped_gemm_wgrad_kernel: the pipeliner would halve its depth for dependent loads.
    next_source = source_rows(dout_index, start, end, BLOCK_ROWS)
    for first_row in tl.range(start, end, BLOCK_ROWS, num_stages=NUM_STAGES):
        source = next_source
        next_source = source_rows(dout_index, first_row + BLOCK_ROWS, end, BLOCK_ROWS)
        tile = load_k_rows(None, dout, source, first_row, start, end, first_column, WIDTH, BLOCK, BLOCK_ROWS)
        if scale is None:
            total += tile.to(tl.float32)
        else:
            row = first_row + tl.arange(0, BLOCK_ROWS)
            total += tile.to(tl.float32) * tl.load(scale + row, mask=row < end, other=0.0)[:, None]
    column = first_column + tl.arange(0, BLOCK)
    pointers = dbias + group.to(tl.int64) * WIDTH + column
    tl.store(pointers, tl.sum(total, axis=0).to(dbias.dtype.element_ty), mask=column < WIDTH)


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["dout_index", "row_range", "dscale"])
def grouped_bias_dot_kernel(
    dout,
    dout_index,  # int32[N] or None
    bias,  # [G, O]
    row_range,
    dscale,  # fp32[N]
    ACCUMULATE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Dot products of BLOCK_ROWS rows of one group. One program for every tile of rows that there can be."""
    tile = tl.program_id(0)
    prefix, num_tiles = row_tile_prefix(row_range, NUM_GROUPS, GROUP_LANES, BLOCK_ROWS)
    if tile < num_tiles:
        group, first_row, end, _ = locate_tile(tile, prefix, row_range, NUM_GROUPS, 1, 1, BLOCK_ROWS)
        row = first_row + tl.arange(0, BLOCK_ROWS)
        source = source_rows(dout_index, first_row, end, BLOCK_ROWS)
        bias_row = bias + group.to(tl.int64) * WIDTH
        total = tl.zeros((BLOCK_ROWS, BLOCK), dtype=tl.float32)
        for first_column in tl.range(0, WIDTH, BLOCK, num_stages=NUM_STAGES):
            x = load_k_rows(None, dout, source, first_row, first_row, end, first_column, WIDTH, BLOCK, BLOCK_ROWS)
            column = first_column + tl.arange(0, BLOCK)
            features = tl.load(bias_row + column, mask=column < WIDTH, other=0.0)
            total += x.to(tl.float32) * features.to(tl.float32)[None, :]
        dot = tl.sum(total, axis=1)
        if ACCUMULATE:
            dot += tl.load(dscale + row, mask=row < end, other=0.0)
        tl.store(dscale + row, dot, mask=row < end)


def grouped_bias_grad(
    dout: torch.Tensor,
    row_range: torch.Tensor,
    dbias: torch.Tensor,
    *,
    dout_index: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    num_groups, width = dbias.shape
    block = GRAD_COLUMN_BYTES // dout.dtype.itemsize
    launch(
        grouped_bias_grad_kernel,
        (ceil_div(width, block), num_groups),
        _grad_constants(num_groups, width, block),
        dout,
        dout_index,
        scale,
        row_range,
        dbias,
    )


@functools.cache
def _grad_constants(num_groups: int, width: int, block: int) -> Constants:
    tile = {"BLOCK": block, "BLOCK_ROWS": GRAD_ROWS, "num_warps": NUM_WARPS}
    return Constants({"NUM_GROUPS": num_groups, "WIDTH": width, **tile})


def grouped_bias_dot(
    dout: torch.Tensor,
    bias: torch.Tensor,
    row_range: torch.Tensor,
    dscale: torch.Tensor,
    *,
    dout_index: torch.Tensor | None = None,
    accumulate: bool = False,
) -> None:
    num_rows = dscale.shape[0]
    num_groups, width = bias.shape
    if num_rows == 0:
        return
    launch(
        grouped_bias_dot_kernel,
        (max_row_tiles(num_rows, num_groups, DOT_ROWS),),
        _dot_constants(accumulate, num_groups, width, dout.dtype),
        dout,
        dout_index,
        bias,
        row_range,
        dscale,
    )


@functools.cache
def _dot_constants(accumulate: bool, num_groups: int, width: int, dtype: torch.dtype) -> Constants:
    return Constants(
        {
            "ACCUMULATE": accumulate,
            "NUM_GROUPS": num_groups,
            "GROUP_LANES": next_power_of_2(num_groups),
            "WIDTH": width,
            "BLOCK": min(DOT_COLUMN_BYTES // dtype.itemsize, next_power_of_2(width)),
            "BLOCK_ROWS": DOT_ROWS,
            "num_warps": NUM_WARPS,
        }
    )
