"""Grouped GEMMs of MXFP8 and NVFP4 numbers (Triton, tl.dot_scaled; persistent). Letters: twin/quantized_gemm.py.

On Blackwell a dot_scaled is a product with block scales, of the kind mxf8f6f4 for MXFP8 and mxf4nvf4 for NVFP4:
tcgen05.mma, or mma.sync on GPUs without tensor memory. TMA loads data and scales; the scales' 128x4 tiles are tcgen05's
own layout, so they go unchanged from shared to tensor memory. Other GPUs dequantise to 16 bits, which is exact, and
multiply these numbers: for numerics, not for speed. Triton dequantises MXFP8. `dequantise` dequantises NVFP4, because
Triton 3.6 aborts when it lowers E4M3 scales for GPUs without such products.

Tiles of rows are the tiles of the scales: 128 rows, counted from a group's first row, also for ranges of rows. Masks
cut ranges that begin elsewhere out of tiles.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from symmoe.errors import ArgumentError
from symmoe.kernels import architectures, formats, quantized_gemm
from symmoe.kernels.launch.launch import Constants, Describe, fast_jit
from symmoe.kernels.low_precision.block_scaled.scale_tiles import TILE, TILE_BLOCKS, TILE_BYTES
from symmoe.kernels.triton.gemm import Gemm, add_bias, zero_tail_rows
from symmoe.kernels.triton.tiles import (
    TRITON_DTYPES,
    TileConfig,
    Wgrad,
    describe,
    gradient_of,
    load_lines,
    matrix_pointer,
    row_tile_prefix,
    store_gradient,
    swizzle_tile,
    tile_mask,
    wgrad_location,
)

E2M1_SHIFT = tl.constexpr(2.0**126)  # E2M1's exponent bias is 1, fp32's is 127

# By element, with the least output columns for a tile. block_k counts elements; 128 bytes of a line are the
# span of TMA's widest swizzle.
TCGEN05_CONFIGS = {
    element: (
        (256, TileConfig(block_m=128, block_n=256, block_k=block_k, num_stages=4, num_warps=8)),
        (0, TileConfig(block_m=128, block_n=128, block_k=block_k, num_stages=4, num_warps=4)),
    )
    for element, block_k in (("e4m3", 128), ("e2m1", 256))
}
# Other GPUs: accumulators are in registers, and GPUs with mma have 99 KiB of shared memory.
CONFIG = TileConfig(block_m=128, block_n=128, block_k=128, num_stages=3, num_warps=8)
Unit = Literal["tcgen05", "mma"] | None


@functools.cache
def scaled_products(device: torch.device) -> Unit:
    """The unit that multiplies with block scales: "tcgen05" (sm_100, sm_103), "mma" (sm_120, sm_121) or None."""
    units: dict[int, Unit] = {10: "tcgen05", 12: "mma"}
    return units.get(architectures.capability(device)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledGemm(Gemm):
    """The constants of grouped_gemm_scaled_kernel. native: whether the GPU multiplies with block scales. step, across:
    bytes of a line, and tiles of its scales, in a contraction step."""

    block_format: formats.BlockFormat
    native: bool
    step: int
    across: int

    @property
    def line_bytes(self) -> int:
        """Bytes of in_width elements."""
        return self.block_format.data_width(self.in_width)

    @property
    def tiles_across(self) -> int:
        """Tiles of the scales of a whole line."""
        return quantized_gemm.tiles_across(self.block_format, self.in_width)

    @property
    def tiles_down(self) -> int:
        """Tiles of the scales of a weight's lines."""
        return quantized_gemm.tiles_down(self.columns)


@dataclass(frozen=True, slots=True)
class ScaledWgrad(Wgrad):
    """The constants of grouped_gemm_wgrad_scaled_kernel."""

    block_format: formats.BlockFormat
    native: bool


@triton.jit
def tile_scales(desc, down, across, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Scales [DOWN * 128 lines, ACROSS * 4 blocks] of DOWN x ACROSS tiles."""
    # In a tile: [row % 32, row / 32, block]; as [2, 256], because TMA's boxes are at most 256 long.
    tiles = desc.load([down, across, 0, 0]).reshape(DOWN, ACROSS, 32, 4, TILE_BLOCKS)
    return tiles.trans(0, 3, 2, 1, 4).reshape(DOWN * TILE, ACROSS * TILE_BLOCKS)


@triton.jit
def scattered_scales(table, group, down, across, DOWN: tl.constexpr, GEMM: tl.constexpr):
    """tile_scales of a step for matrix `group` of a table; zeros outside of it."""
    line = down + tl.arange(0, DOWN)
    column = across + tl.arange(0, GEMM.across)
    tile = line[:, None, None] * GEMM.tiles_across + column[None, :, None]
    pointers = (
        matrix_pointer(table, group, tl.uint8)
        + tile * TILE_BYTES
        + tl.arange(0, TILE_BYTES)[None, None, :]
    )
    inside = (line < GEMM.tiles_down)[:, None, None] & (column < GEMM.tiles_across)[None, :, None]
    tiles = tl.load(pointers, mask=inside, other=0)
    if GEMM.block_format.element == "e2m1":
        tiles = tiles.to(tl.float8e4nv, bitcast=True)
    tiles = tiles.reshape(DOWN, GEMM.across, 32, 4, TILE_BLOCKS)
    return tiles.trans(0, 3, 2, 1, 4).reshape(DOWN * TILE, GEMM.across * TILE_BLOCKS)


@triton.jit
def dequantise(codes, scale):
    """E2M1 numbers times their scales, fp16 [LINES, 2 * BYTES]: exact, they have 6 bits between 2^-10 and 2688."""
    LINES: tl.constexpr = codes.shape[0]
    BYTES: tl.constexpr = codes.shape[1]
    codes = tl.join(codes & 0xF, codes >> 4).reshape(LINES, 2 * BYTES).to(tl.int32)
    bits = (codes & 7) << 22 | (codes & 8) << 28
    values = (bits.to(tl.float32, bitcast=True) * E2M1_SHIFT).reshape(LINES, BYTES // 8, 16)
    return (values * scale.to(tl.float32)[:, :, None]).reshape(LINES, 2 * BYTES).to(tl.float16)


@triton.jit
def add_products(acc, lhs, lhs_scale, rhs, rhs_scale, ELEMENT: tl.constexpr, NATIVE: tl.constexpr):
    """acc + lhs @ rhs^T of numbers [rows, K] and [columns, K]."""
    return (
        tl.dot_scaled(lhs, lhs_scale, ELEMENT, rhs.T, rhs_scale, ELEMENT, acc)
        if ELEMENT == "e4m3" or NATIVE
        else tl.dot(dequantise(lhs, lhs_scale), dequantise(rhs, rhs_scale).T, acc)
    )


@triton.jit
def apply_global_scales(acc, lhs_scale, rhs_scale, group, is_there):
    """acc * lhs_scale[group] * rhs_scale[group]; None: 1. Scales are read only if the group is there."""
    if lhs_scale is not None:
        acc = acc * tl.load(lhs_scale + group, mask=is_there, other=0.0)
        acc = acc * tl.load(rhs_scale + group, mask=is_there, other=0.0)
    return acc


@triton.jit
def range_tile_prefix(row_range, group_range, NUM_GROUPS: tl.constexpr):
    """row_tile_prefix of the tiles that have rows of ranges; tiles are counted from the groups' first rows."""
    group = tl.arange(0, triton.next_power_of_2(NUM_GROUPS))
    start = tl.load(group_range + group, mask=group < NUM_GROUPS, other=0)
    begin = tl.load(row_range + group, mask=group < NUM_GROUPS, other=0)
    end = tl.load(row_range + NUM_GROUPS + group, mask=group < NUM_GROUPS, other=0)
    num_tiles = (end - start + (TILE - 1)) // TILE - (begin - start) // TILE
    num_tiles = tl.where(begin < end, num_tiles, 0)
    return tl.cumsum(num_tiles, axis=0), tl.sum(num_tiles, axis=0)


@fast_jit(
    ["rows_desc", "row_scale_desc", "weight_desc", "weight_scale_desc", "out"],
    optional=["num_rows"],
)
def grouped_gemm_scaled_kernel(
    rows_desc,  # bytes [N, C], block [BLOCK_M, STEP]
    row_scale_desc,  # [tiles, ACROSS or more, 2, 256]: tile_scales
    weight_desc,  # bytes [G, O, C], block [1, BLOCK_N, STEP]; None with a table
    weight_table,  # int64[G] or None
    weight_scale_desc,  # None with a table
    weight_scale_table,  # int64[G] or None
    row_global_scale,  # fp32[G] or None
    weight_global_scale,
    row_range,
    group_range,  # the whole groups, or None
    out,  # [N, O]
    bias,  # [G, O] or None
    bias_scale,  # fp32[N] or None
    num_rows,  # N; None: do not write the tail
    GEMM: tl.constexpr,
):
    ELEMENT: tl.constexpr = GEMM.block_format.element
    BLOCK_N: tl.constexpr = GEMM.config.block_n
    DOWN: tl.constexpr = BLOCK_N // TILE
    if group_range is None:
        prefix, num_row_tiles = row_tile_prefix(row_range, GEMM.num_groups, TILE)
        scale_prefix = prefix
        start_of = row_range
    else:
        prefix, num_row_tiles = range_tile_prefix(row_range, group_range, GEMM.num_groups)
        scale_prefix, _ = row_tile_prefix(group_range, GEMM.num_groups, TILE)
        start_of = group_range
    lane = tl.arange(0, prefix.shape[0])
    for tile in tl.range(tl.program_id(0), num_row_tiles * GEMM.num_n_tiles, tl.num_programs(0)):
        before = prefix * GEMM.num_n_tiles <= tile
        group = tl.sum(before.to(tl.int32), axis=0)
        first = tl.max(tl.where(before, prefix, 0), axis=0)
        start, begin = tl.load(start_of + group), tl.load(row_range + group)
        end = tl.load(row_range + GEMM.num_groups + group)
        skipped = (begin - start) // TILE
        num_m_tiles = (end - start + (TILE - 1)) // TILE - skipped
        m_tile, n_tile = swizzle_tile(
            tile - first * GEMM.num_n_tiles, num_m_tiles, GEMM.num_n_tiles, GEMM.config.group_m
        )
        m_tile += skipped
        first_row = start + m_tile * TILE
        first_column = n_tile * BLOCK_N
        row_tile = tl.max(tl.where(lane < group, scale_prefix, 0), axis=0) + m_tile
        weight_tile = group * GEMM.tiles_down + first_column // TILE
        acc = tl.zeros((TILE, BLOCK_N), dtype=tl.float32)
        for i in tl.range(0, (GEMM.line_bytes + GEMM.step - 1) // GEMM.step):
            lhs = rows_desc.load([first_row, i * GEMM.step])
            if weight_table is None:
                rhs = weight_desc.load([group, first_column, i * GEMM.step]).reshape(
                    BLOCK_N, GEMM.step
                )
            else:
                column = first_column + tl.arange(0, BLOCK_N)
                rhs = load_lines(
                    weight_table,
                    group,
                    column,
                    i * GEMM.step,
                    GEMM.columns,
                    GEMM.line_bytes,
                    GEMM.step,
                )
                rhs = rhs.to(rows_desc.dtype, bitcast=True)
            lhs_scale = tile_scales(row_scale_desc, row_tile, i * GEMM.across, 1, GEMM.across)
            if weight_scale_table is None:
                rhs_scale = tile_scales(
                    weight_scale_desc, weight_tile, i * GEMM.across, DOWN, GEMM.across
                )
            else:
                first_down = first_column // TILE
                rhs_scale = scattered_scales(
                    weight_scale_table, group, first_down, i * GEMM.across, DOWN, GEMM
                )
            acc = add_products(acc, lhs, lhs_scale, rhs, rhs_scale, ELEMENT, GEMM.native)
        acc = apply_global_scales(acc, row_global_scale, weight_global_scale, group, True)
        row = first_row + tl.arange(0, TILE)
        column = first_column + tl.arange(0, BLOCK_N)
        acc = add_bias(acc, bias, bias_scale, group, row, end, column, GEMM.columns)
        mask = tile_mask(row, end, column, GEMM.columns, BLOCK_N)
        if group_range is not None:
            mask = mask & (row >= begin)[:, None]
        pointers = out + row.to(tl.int64)[:, None] * GEMM.columns + column[None, :]
        tl.store(pointers, acc.to(out.dtype.element_ty), mask=mask)
    zero_tail_rows(out, row_range, num_rows, GEMM)


@fast_jit(["dout_desc", "dout_scale_desc", "rows_desc", "rows_scale_desc", "out"])
def grouped_gemm_wgrad_scaled_kernel(
    dout_desc,  # bytes [O, P], block [BLOCK_M, STEP]
    dout_scale_desc,  # [tiles, tiles across P, 2, 256]: tile_scales
    rows_desc,  # bytes [C, P], block [BLOCK_N, STEP]
    rows_scale_desc,
    dout_global_scale,  # fp32[G] or None
    rows_global_scale,
    row_range,
    out,  # [G, O, C]; None with a table
    out_table,  # int64[G] or None
    WGRAD: tl.constexpr,
):
    ELEMENT: tl.constexpr = WGRAD.block_format.element
    BLOCK_M: tl.constexpr = WGRAD.config.block_m
    BLOCK_N: tl.constexpr = WGRAD.config.block_n
    STEP: tl.constexpr = WGRAD.block_format.data_width(
        TILE
    )  # bytes of a line: a longer step would reach the next group
    ACROSS: tl.constexpr = WGRAD.block_format.num_blocks(TILE) // TILE_BLOCKS  # tiles of the scales
    prefix, _ = row_tile_prefix(row_range, WGRAD.num_groups, TILE)
    lane = tl.arange(0, prefix.shape[0])
    for tile in tl.range(tl.program_id(0), WGRAD.num_tiles, tl.num_programs(0)):
        group, m_tile, n_tile = wgrad_location(tile, WGRAD)
        first_step = tl.max(tl.where(lane < group, prefix, 0), axis=0)
        end_step = tl.max(tl.where(lane <= group, prefix, 0), axis=0)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for i in tl.range(first_step, end_step):
            lhs = dout_desc.load([m_tile * BLOCK_M, i * STEP])
            rhs = rows_desc.load([n_tile * BLOCK_N, i * STEP])
            lhs_scale = tile_scales(
                dout_scale_desc, m_tile * (BLOCK_M // TILE), i * ACROSS, BLOCK_M // TILE, ACROSS
            )
            rhs_scale = tile_scales(
                rows_scale_desc, n_tile * (BLOCK_N // TILE), i * ACROSS, BLOCK_N // TILE, ACROSS
            )
            acc = add_products(acc, lhs, lhs_scale, rhs, rhs_scale, ELEMENT, WGRAD.native)
        # Not inside the condition: Triton 3.6 fails to compile that for Blackwell.
        acc = apply_global_scales(
            acc, dout_global_scale, rows_global_scale, group, first_step < end_step
        )
        if not WGRAD.accumulate or first_step < end_step:  # a group without tokens is not read
            row = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
            column = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
            store_gradient(acc, gradient_of(out, out_table, group, WGRAD), row, column, WGRAD)


@functools.cache
def plan_gemm(
    block_format: formats.BlockFormat,
    unit: Unit,
    num_groups: int,
    out_width: int,
    line_bytes: int,
    **tile: Any,
) -> tuple[Gemm, Constants]:
    """The launch of grouped_gemm_scaled_kernel. tile: fields of TileConfig."""
    config = replace(_gemm_config(block_format, unit, out_width), **tile)
    step, across = _check_tiles(config, block_format)
    gemm = ScaledGemm(
        config=config,
        block_format=block_format,
        num_groups=num_groups,
        columns=out_width,
        step=step,
        across=across,
        in_width=line_bytes * block_format.elements_per_byte,
        native=unit is not None,
    )
    return gemm, gemm.constants(
        {
            0: describe([config.block_m, step]),
            1: _describe_scales(1, across, block_format),
            2: describe([1, config.block_n, step]),
            4: _describe_scales(config.block_n // formats.TILE, across, block_format),
        }
    )


@functools.cache
def plan_wgrad(
    block_format: formats.BlockFormat,
    unit: Unit,
    dtype: torch.dtype,
    accumulate: bool,
    shape: tuple[int, int, int],
    **tile: Any,
) -> tuple[Wgrad, Constants]:
    """The launch of grouped_gemm_wgrad_scaled_kernel."""
    config = replace(
        _gemm_config(block_format, unit, shape[2]), **{"block_k": formats.TILE, **tile}
    )
    if config.block_k != formats.TILE:
        raise ArgumentError(
            f"tiles of a weight gradient must have block_k {formats.TILE}, got {config}"
        )
    step, across = _check_tiles(config, block_format)
    wgrad = ScaledWgrad(
        config, *shape, TRITON_DTYPES[dtype], accumulate, block_format, unit is not None
    )
    # Otherwise the last global scale and the addition become one fma, and a sum that is added here has other bits than
    # a sum that is stored and added later.
    return wgrad, wgrad.constants(
        {
            0: describe([config.block_m, step]),
            1: _describe_scales(config.block_m // formats.TILE, across, block_format),
            2: describe([config.block_n, step]),
            3: _describe_scales(config.block_n // formats.TILE, across, block_format),
        },
        enable_fp_fusion=False,
    )


def _gemm_config(block_format: formats.BlockFormat, unit: Unit, out_width: int) -> TileConfig:
    if unit != "tcgen05":
        return CONFIG
    return next(
        config
        for min_width, config in TCGEN05_CONFIGS[block_format.element]
        if out_width >= min_width
    )


def _check_tiles(config: TileConfig, block_format: formats.BlockFormat) -> tuple[int, int]:
    """Bytes of a line, and tiles of their scales, of a contraction step; ArgumentError if it cuts tiles of scales."""
    unit = block_format.block * quantized_gemm.TILE_BLOCKS
    if config.block_m != formats.TILE or config.block_n % formats.TILE or config.block_k % unit:
        raise ArgumentError(
            f"tiles must have block_m {formats.TILE}, block_n a multiple of it, and block_k one of {unit}, got {config}"
        )
    return config.block_k // block_format.elements_per_byte, config.block_k // unit


def _describe_scales(down: int, across: int, block_format: formats.BlockFormat) -> Describe:
    """Function from scales in tiles to their TMA descriptor: see tile_scales."""
    # E8M0 stays uint8, as dot_scaled requires. E4M3 must be E4M3 from the start: Triton does not copy scales from
    # shared to tensor memory if a kernel casts them in between.
    dtype = torch.float8_e4m3fn if block_format.has_global_scale else torch.uint8

    def described(scale: torch.Tensor) -> TensorDescriptor:
        boxes = scale.view(dtype).view(*scale.shape[:2], 2, quantized_gemm.TILE_BYTES // 2)
        return TensorDescriptor.from_tensor(
            boxes, block_shape=[down, across, 2, quantized_gemm.TILE_BYTES // 2]
        )

    return described
