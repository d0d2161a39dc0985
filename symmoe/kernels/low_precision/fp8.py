"""Grouped GEMMs of E4M3 numbers with a scale per block (Triton). Tiles as in triton/gemm.py.

Letters: twin/quantized_gemm.py. The tensor core sums a block's products; this sum is scaled and added in fp32 before
the next block. Hopper has other kernels (hopper_fp8.py, hopper_fp8_wgrad.py), in which one warpgroup adds while the
other multiplies. The kernels here are for every other GPU that multiplies E4M3 numbers, for fp32 results of forward
products, and for narrow results.
"""

import functools
from dataclasses import replace
from typing import Any

import torch
import triton.language as tl

from symmoe.errors import ArgumentError
from symmoe.kernels import quantized_gemm
from symmoe.kernels.launch.launch import Constants, fast_jit
from symmoe.kernels.triton.gemm import Gemm, add_bias, group_tiles, tile_location, zero_tail_rows
from symmoe.kernels.triton.tiles import (
    TRITON_DTYPES,
    TileConfig,
    Wgrad,
    describe,
    gradient_of,
    load_lines,
    matrix_of,
    row_tile_prefix,
    store_gradient,
    store_rounded,
    wgrad_location,
)

BLOCK = tl.constexpr(quantized_gemm.BLOCK)
CONFIG = TileConfig(block_m=128, block_n=128, block_k=BLOCK.value, num_stages=3, num_warps=8)


@fast_jit(["rows_desc", "weight_desc", "out"], optional=["num_rows"])
def grouped_gemm_fp8_kernel(
    rows_desc,  # [N, C], block [BLOCK_M, BLOCK]
    row_scale,  # [N, blocks of C]
    weight_desc,  # [G, O, C], block [1, BLOCK_N, BLOCK]; None with a table
    weight_table,  # int64[G] or None
    weight_scale,  # [G, blocks of O, blocks of C]; None with a table
    weight_scale_table,  # int64[G] or None
    row_range,
    out,  # [N, O]
    bias,  # [G, O] or None
    bias_scale,  # fp32[N] or None
    num_rows,  # N; None: do not write the tail
    GEMM: tl.constexpr,
):
    BLOCK_N: tl.constexpr = GEMM.config.block_n
    tl.static_assert(BLOCK % BLOCK_N == 0)  # a tile has one scale of the weight at a time
    NUM_BLOCKS: tl.constexpr = (GEMM.in_width + BLOCK - 1) // BLOCK
    prefix, num_tiles = group_tiles(row_range, GEMM)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        group, first_row, end, first_column = tile_location(tile, prefix, row_range, GEMM)
        row = first_row + tl.arange(0, GEMM.config.block_m)
        row_scales = row_scale + row.to(tl.int64) * NUM_BLOCKS
        weight_scales = matrix_of(
            weight_scale,
            weight_scale_table,
            group,
            (GEMM.columns + BLOCK - 1) // BLOCK * NUM_BLOCKS,
            tl.float32,
        )
        weight_scales += first_column // BLOCK * NUM_BLOCKS
        column = first_column + tl.arange(0, BLOCK_N)
        acc = tl.full((GEMM.config.block_m, BLOCK_N), 0.0, dtype=tl.float32)
        for b in tl.range(0, NUM_BLOCKS):
            lhs = rows_desc.load([first_row, b * BLOCK])
            if weight_table is None:
                rhs = weight_desc.load([group, first_column, b * BLOCK]).reshape(BLOCK_N, BLOCK)
            else:
                rhs = load_lines(
                    weight_table, group, column, b * BLOCK, GEMM.columns, GEMM.in_width, BLOCK
                )
                rhs = rhs.to(rows_desc.dtype, bitcast=True)
            scale = tl.load(row_scales + b, mask=row < end, other=0.0) * tl.load(weight_scales + b)
            acc += tl.dot(lhs, rhs.T) * scale[:, None]
        acc = add_bias(acc, bias, bias_scale, group, row, end, column, GEMM.columns)
        store_rounded(acc, out, row, end, column, GEMM.columns, BLOCK_N)
    zero_tail_rows(out, row_range, num_rows, GEMM)


@fast_jit(["dout_desc", "rows_desc", "out"])
def grouped_gemm_wgrad_fp8_kernel(
    dout_desc,  # [O, P], block [BLOCK_M, BLOCK]
    dout_scale,  # [O, num_blocks], block-major
    rows_desc,  # [C, P], block [BLOCK_N, BLOCK]
    rows_scale,  # [C, num_blocks], block-major
    row_range,
    out,  # [G, O, C]; None with a table
    out_table,  # int64[G] or None
    WGRAD: tl.constexpr,
):
    BLOCK_M: tl.constexpr = WGRAD.config.block_m
    BLOCK_N: tl.constexpr = WGRAD.config.block_n
    prefix, _ = row_tile_prefix(row_range, WGRAD.num_groups, BLOCK)
    lane = tl.arange(0, prefix.shape[0])
    for tile in tl.range(tl.program_id(0), WGRAD.num_tiles, tl.num_programs(0)):
        group, m_tile, n_tile = wgrad_location(tile, WGRAD)
        first_block = tl.max(tl.where(lane < group, prefix, 0), axis=0)
        end_block = tl.max(tl.where(lane <= group, prefix, 0), axis=0)
        row = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        column = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for b in tl.range(first_block, end_block):
            lhs = dout_desc.load([m_tile * BLOCK_M, b * BLOCK])
            rhs = rows_desc.load([n_tile * BLOCK_N, b * BLOCK])
            # 32 bits are enough for the scales of all numbers that fit into memory.
            by_row = tl.load(
                dout_scale + b * WGRAD.out_rows + row, mask=row < WGRAD.out_rows, other=0.0
            )
            by_column = tl.load(
                rows_scale + b * WGRAD.columns + column, mask=column < WGRAD.columns, other=0.0
            )
            acc += (tl.dot(lhs, rhs.T) * by_column[None, :]) * by_row[:, None]
        if (
            not WGRAD.accumulate or first_block < end_block
        ):  # a group without tokens is not even read
            store_gradient(acc, gradient_of(out, out_table, group, WGRAD), row, column, WGRAD)


@functools.cache
def plan_gemm(
    num_groups: int, out_width: int, in_width: int, **tile: Any
) -> tuple[Gemm, Constants]:
    """The launch of grouped_gemm_fp8_kernel. tile: fields of TileConfig."""
    config = _config(tile)
    gemm = Gemm(config=config, num_groups=num_groups, columns=out_width, in_width=in_width)
    return gemm, gemm.constants(
        {
            0: describe([config.block_m, BLOCK.value]),
            2: describe([1, config.block_n, BLOCK.value]),
        }
    )


@functools.cache
def plan_wgrad(
    dtype: torch.dtype, accumulate: bool, shape: tuple[int, int, int], **tile: Any
) -> tuple[Wgrad, Constants]:
    """The launch of grouped_gemm_wgrad_fp8_kernel."""
    config = _config(tile)
    wgrad = Wgrad(config, *shape, TRITON_DTYPES[dtype], accumulate)
    return wgrad, wgrad.constants(
        {0: describe([config.block_m, BLOCK.value]), 2: describe([config.block_n, BLOCK.value])}
    )


def _config(tile: dict[str, Any]) -> TileConfig:
    config = replace(CONFIG, **tile)
    if config.block_k != BLOCK.value or BLOCK.value % config.block_n:
        raise ArgumentError(
            f"tiles must have block_k {BLOCK.value} and a block_n that divides it, got {config}"
        )
    return config
