"""grouped_gemm and grouped_gemm_dgrad for Hopper, with the bits of triton/gemm.py; see pipeline.py."""

import functools

import torch

from symmoe.kernels.hopper.gluon_names import fence_async_shared, gl, gluon, tma
from symmoe.kernels.hopper.pipeline import (
    BLOCK_K,
    BLOCK_M,
    CHUNK,
    Pipeline,
    run,
    store_chunk,
    write_dump,
)
from symmoe.kernels.hopper.table import describe_as
from symmoe.kernels.launch.launch import Constants, Describe, fast_jit, launch
from symmoe.kernels.triton.tiles import launch_grid, max_row_tiles, ragged_extent

ZERO_BLOCK = gl.constexpr(
    1024
)  # elements that a warpgroup sets to zero at a time: 16 bytes per thread


@gluon.jit
def store_tile(
    acc, out_desc, dump, turn, first_row, end, n_tile, WARPGROUP: gl.constexpr, PIPE: gl.constexpr
):
    """Epilogue: rounds a tile and stores it by TMA, which reads shared memory during the next tile's products."""
    chunks, _, _ = dump
    tma.store_wait(0)
    write_dump(acc, chunks, WARPGROUP, PIPE)
    fence_async_shared()
    column = n_tile * PIPE.tile_columns
    for i in gl.static_range(4):
        row = first_row + CHUNK * WARPGROUP
        store_chunk(out_desc, chunks.index(4 * WARPGROUP + i), row, end, column + CHUNK * i)


@gluon.jit
def zero_tail_rows(out, row_range, num_rows, PIPE: gl.constexpr):
    """Writes zeros to the tail rows of out [num_rows, columns]; the programs share the work."""
    first = gl.load(row_range + (2 * PIPE.num_groups - 1)).to(gl.int64) * PIPE.columns
    end = num_rows.to(gl.int64) * PIPE.columns
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, ZERO_BLOCK, layout)
    zeros = gl.zeros([ZERO_BLOCK], out.dtype.element_ty, layout)
    for i in range(first + gl.program_id(0) * ZERO_BLOCK, end, gl.num_programs(0) * ZERO_BLOCK):
        gl.store(out + i + lane, zeros, mask=i + lane < end)


@fast_jit(["rows_desc", "weight_desc", "out_desc", "out"], optional=["num_rows"], jit=gluon.jit)
def hopper_gemm_kernel(
    rows_desc,  # [N, K], block [BLOCK_M, BLOCK_K]
    weight_desc,  # [G, M, K], or [G, K, M] if weight_k_first
    out_desc,  # [N, M], ragged, block [CHUNK, CHUNK]
    out,
    row_range,
    num_rows,  # N; None: do not write the tail
    PIPE: gl.constexpr,
):
    run(rows_desc, weight_desc, row_range, store_tile, out_desc, rows_desc.dtype, PIPE)
    if num_rows is not None:
        zero_tail_rows(out, row_range, num_rows, PIPE)


def launch_gemm(
    rows, weight, row_range, out, *, weight_k_first, zero_tail=False, num_sms=None, **options
):
    """grouped_gemm, or grouped_gemm_dgrad if weight_k_first, without an index and without bias.

    options: options of the Pipeline, for comparisons.
    """
    num_rows, sizes = out.shape[0], (weight.shape[0], out.shape[1], rows.shape[1])
    pipe, constants = _gemm_plan(*sizes, out.dtype, weight_k_first, tuple(options.items()))
    launch(
        hopper_gemm_kernel,
        grid(pipe, num_rows, num_sms, out.device),
        constants,
        rows,
        weight,
        out,
        out,
        row_range,
        num_rows if zero_tail else None,
    )


@functools.cache
def _gemm_plan(
    num_groups, columns, in_width, dtype, weight_k_first, options
) -> tuple[Pipeline, Constants]:
    pipe = Pipeline(
        num_groups=num_groups,
        columns=columns,
        in_width=in_width,
        weight_k_first=weight_k_first,
        **{"group_m": 8 if weight_k_first else 16, **dict(options)},
    )
    return pipe, pipe.constants(
        {0: describe_rows(dtype), 1: describe_weight(pipe, dtype), 2: describe_ragged(dtype)}
    )


def grid(pipe: Pipeline, num_rows: int, num_sms: int | None, device: torch.device) -> tuple[int]:
    """The grid: one program per SM, at most one per possible tile."""
    return launch_grid(
        max_row_tiles(num_rows, pipe.num_groups, BLOCK_M.value) * pipe.num_n_tiles, num_sms, device
    )


def describe(block: list[int], dtype: torch.dtype) -> Describe:
    """Function from a contiguous tensor to its TMA descriptor."""
    return describe_as(lambda tensor: (tensor.shape, tensor.stride()), block, dtype)


def describe_rows(dtype: torch.dtype) -> Describe:
    """As describe, for a tile's rows."""
    return describe([BLOCK_M.value, BLOCK_K.value], dtype)


def describe_weight(pipe: Pipeline, dtype: torch.dtype) -> Describe:
    """As describe, for a tile's weights."""
    block = [BLOCK_K.value, pipe.block_n] if pipe.weight_k_first else [pipe.block_n, BLOCK_K.value]
    return describe([1, *block], dtype)


def describe_ragged(
    dtype: torch.dtype, rows: int = CHUNK.value, columns: int = CHUNK.value
) -> Describe:
    """Function from a contiguous matrix to its ragged descriptor, for blocks [rows, columns]: see store_chunk."""
    return describe_as(ragged_extent, [1, 1, rows, columns], dtype)
