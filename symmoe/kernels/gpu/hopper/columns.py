"""Quantising along tokens in blocks of TILE for Hopper (Gluon): rows, and rows that have travelled quantised.

A program has TILE tokens of a group by some features. Its threads hold 4 to 8 tokens of 8 features each: rows are read
16 bytes at a time, and numbers are converted with neighbouring tokens beside each other, so that codes are turned by
whole words. In Triton the compiler has one thread hold neighbours of one kind only: it turns single bytes, or fp32.

The formulas are those of gpu/quantize.py on the same numbers, so the bits are those of its kernels. A block that is not
finite is multiplied by NaN, which makes every code of it E4M3_NAN.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from symmoe.kernels import formats
from symmoe.kernels.formats import BlockFormat
from symmoe.kernels.gpu.hopper.gemm import GLUON_DTYPES
from symmoe.kernels.gpu.integers import next_power_of_2
from symmoe.kernels.gpu.launch import Constants, fast_launch, launch
from symmoe.kernels.gpu.quantize import INFINITY_BITS, block_scales, e4m3_code, magnitude_bits

TILE = gl.constexpr(formats.TILE)
VECTOR = 8  # features of a thread
# Registers are what limits programs: 80 of each thread let an SM have three of 256 threads, 96 kB on their way to it.
# Four tiles of a panel are 1 kB of a bf16 row, and a panel of 16384 rows, 17 MB, stays in L2 while groups share rows.
TILE_OPTIONS = {"features": 128, "num_warps": 8, "registers": 80, "panel": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnTile:
    """A program's tile [TILE, features] of rows [N, width] in num_groups groups, and how threads hold it.

    panel: tiles of features that are beside each other in the order of programs; then come the next tokens.
    """

    width: int
    num_groups: int
    scale: str
    features: int
    num_warps: int
    registers: int
    panel: int

    @property
    def num_feature_tiles(self) -> int:
        """Tiles across the rows."""
        return -(-self.width // self.features)

    @property
    def group_lanes(self) -> int:
        """Lanes of a vector over the groups."""
        return max(32, next_power_of_2(self.num_groups))

    @property
    def groups(self) -> Any:
        """Of groups: a copy in every warp."""
        return gl.BlockedLayout([self.group_lanes // 32], [32], [self.num_warps], [0])

    @property
    def loaded(self) -> Any:
        """Of rows as they are loaded: a thread's features beside each other."""
        return self._held(_powers(1, VECTOR, 1) + _powers(1, self._thread_tokens, 0))

    @property
    def turned(self) -> Any:
        """The same numbers in the same threads, a thread's tokens beside each other."""
        return self._held(_powers(1, self._thread_tokens, 0) + _powers(1, VECTOR, 1))

    @property
    def stored(self) -> Any:
        """Of codes as they are stored: 16 tokens of a feature, lines of 128 bytes."""
        return gl.BlockedLayout([16, 1], [8, 4], [1, self.num_warps], [0, 1])

    @property
    def line(self) -> Any:
        """Of one number for a feature: in few threads, for what divides."""
        return gl.BlockedLayout([1], [32], [self.num_warps], [0])

    @property
    def _thread_tokens(self) -> int:
        return TILE.value * self.features // (32 * self.num_warps * VECTOR)

    def _held(self, registers: list[list[int]]) -> Any:
        across = self.features // VECTOR  # lanes that have a token's features
        lanes = _powers(VECTOR, across, 1) + _powers(self._thread_tokens, 32 // across, 0)
        warps = _powers(self._thread_tokens * (32 // across), self.num_warps, 0)
        return gl.DistributedLinearLayout(registers, lanes, warps, [], [TILE.value, self.features])


def _powers(first: int, number: int, dimension: int) -> list[list[int]]:
    """Bases of a linear layout: first, 2 * first, ... of one dimension of two, for so many places."""
    steps = [first << i for i in range(number.bit_length() - 1)]
    return [[0, step] if dimension else [step, 0] for step in steps]


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _nan_or_maximum(a, b):
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def tile_of_program(num_tiles, SHAPE: gl.constexpr):
    """Tile of tokens, and first feature."""
    panel = gl.program_id(0) // (num_tiles * SHAPE.panel)
    place = gl.program_id(0) - panel * (num_tiles * SHAPE.panel)
    across = gl.minimum(SHAPE.num_feature_tiles - panel * SHAPE.panel, SHAPE.panel)
    return place // across, (panel * SHAPE.panel + place % across) * SHAPE.features


@gluon.jit
def locate(tile, row_start, SHAPE: gl.constexpr):
    """First row of a tile of tokens, and the end of its group; both 0 past the last tile."""
    group = gl.arange(0, SHAPE.group_lanes, SHAPE.groups)
    start = gl.load(row_start + group, mask=group < SHAPE.num_groups, other=0)
    end = gl.load(row_start + group + 1, mask=group < SHAPE.num_groups, other=0)
    num_tiles = (end - start + (TILE - 1)) // TILE
    after = gl.associative_scan(num_tiles, 0, _add)
    before = after - num_tiles
    is_here = (before <= tile) & (tile < after)
    first_row = gl.sum(gl.where(is_here, start + (tile - before) * TILE, 0), axis=0)
    return first_row, gl.sum(gl.where(is_here, end, 0), axis=0)


@gluon.jit
def places(row_index, first_row, end, first_feature, SHAPE: gl.constexpr):
    """What a tile is loaded from: source rows int64, features, and a mask."""
    row = first_row + gl.arange(0, TILE, gl.SliceLayout(1, SHAPE.loaded))
    if row_index is None:
        source = row
    else:
        source = gl.load(row_index + row, mask=row < end, other=0)
    feature = first_feature + gl.arange(0, SHAPE.features, gl.SliceLayout(0, SHAPE.loaded))
    mask = (row < end)[:, None]
    if SHAPE.width % SHAPE.features != 0:
        mask = mask & (feature < SHAPE.width)[None, :]
    return source.to(gl.int64), feature, mask


@gluon.jit
def store_columns(x, tile, first_feature, data, scale, num_tiles, SHAPE: gl.constexpr):
    """Quantises x [TILE, features] fp32, `turned`, along its tokens."""
    amax = gl.convert_layout(gl.reduce(gl.abs(x), 0, _nan_or_maximum), SHAPE.line)
    bits = magnitude_bits(amax)
    SCALE: gl.constexpr = SHAPE.scale
    stored, multiplier = block_scales(bits, 1.0, SCALE)
    line = first_feature + gl.arange(0, SHAPE.features, SHAPE.line)
    gl.store(scale + tile.to(gl.int64) * SHAPE.width + line, stored, mask=line < SHAPE.width)
    multiplier = gl.where(bits < INFINITY_BITS, multiplier, float("nan"))
    multiplier = gl.convert_layout(multiplier, gl.SliceLayout(0, SHAPE.turned))
    codes = gl.convert_layout(e4m3_code(x * multiplier[None, :]), SHAPE.stored)
    token = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, SHAPE.stored))
    feature = first_feature + gl.arange(0, SHAPE.features, gl.SliceLayout(0, SHAPE.stored))
    pointers = data + (feature.to(gl.int64) * (num_tiles * TILE))[None, :] + token[:, None]
    if SHAPE.width % SHAPE.features == 0:
        gl.store(pointers, codes)
    else:
        gl.store(pointers, codes, mask=(feature < SHAPE.width)[None, :])


@fast_launch
@gluon.jit(do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=["row_index", "row_start", "scale"])
def hopper_quantize_columns_kernel(
    rows,  # [N, C]
    row_index,  # int32[N] or None
    row_start,
    data,  # bytes [C, num_tiles * TILE]
    scale,  # fp32 [num_tiles, C]
    num_tiles,
    SHAPE: gl.constexpr,
):
    """Grid (num_tiles tiles of tokens * tiles of features)."""
    tile, first_feature = tile_of_program(num_tiles, SHAPE)
    first_row, end = locate(tile, row_start, SHAPE)
    if first_row < end:
        source, feature, mask = places(row_index, first_row, end, first_feature, SHAPE)
        x = gl.load(rows + (source * SHAPE.width)[:, None] + feature[None, :], mask=mask, other=0.0)
        x = gl.convert_layout(x, SHAPE.turned).to(gl.float32)
        store_columns(x, tile, first_feature, data, scale, num_tiles, SHAPE)


@fast_launch
@gluon.jit(
    do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=["wire_scales", "row_index", "row_start", "scale"]
)
def hopper_requantize_columns_kernel(
    wire,  # bytes [N, ROW_BYTES]
    wire_scales,  # the wire as fp32
    row_index,  # int32[N] or None
    row_start,
    data,  # bytes [C, num_tiles * TILE]
    scale,  # fp32 [num_tiles, C]
    num_tiles,
    ROW_BYTES: gl.constexpr,
    DTYPE: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """The same of rows of the wire, decoded to DTYPE. A tile's features lie in one block, so a token has one scale."""
    tile, first_feature = tile_of_program(num_tiles, SHAPE)
    first_row, end = locate(tile, row_start, SHAPE)
    if first_row < end:
        source, feature, mask = places(row_index, first_row, end, first_feature, SHAPE)
        row = first_row + gl.arange(0, TILE, gl.SliceLayout(1, SHAPE.loaded))
        block = SHAPE.width // 4 + first_feature // TILE
        row_scale = gl.load(wire_scales + source * (ROW_BYTES // 4) + block, mask=row < end, other=0.0)
        codes = gl.load(wire + (source * ROW_BYTES)[:, None] + feature[None, :], mask=mask, other=0)
        x = (e4m3_number(codes) * row_scale[:, None]).to(DTYPE)
        x = gl.convert_layout(x, SHAPE.turned).to(gl.float32)
        store_columns(x, tile, first_feature, data, scale, num_tiles, SHAPE)


@gluon.jit
def e4m3_number(codes):
    """fp32 of E4M3 numbers."""
    return codes.to(gl.float8e4nv, bitcast=True).to(gl.float32)


def takes_columns(block_format: BlockFormat) -> bool:
    """Whether these kernels make the format: E4M3 in blocks of TILE tokens."""
    return block_format.element == "e4m3" and block_format.block == formats.TILE


def launch_quantize_columns(
    rows: torch.Tensor,
    row_start: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    block_format: BlockFormat,
    *,
    row_index: torch.Tensor | None = None,
    **options: int,
) -> None:
    """quantize_columns of at least one tile, in a format that takes_columns. options: TILE_OPTIONS."""
    num_tiles, num_groups = scale.shape[1], row_start.shape[0] - 1
    shape, constants = _plan(rows.shape[1], num_groups, block_format.scale, tuple(options.items()))
    grid = (num_tiles * shape.num_feature_tiles,)
    buffers = data.view(torch.uint8), scale.t()
    launch(hopper_quantize_columns_kernel, grid, constants, rows, row_index, row_start, *buffers, num_tiles)


def launch_requantize_columns(
    wire: torch.Tensor,
    row_start: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    block_format: BlockFormat,
    dtype: torch.dtype,
    *,
    row_index: torch.Tensor | None = None,
    **options: int,
) -> None:
    """requantize_columns, likewise."""
    width, num_tiles = scale.shape
    num_groups = row_start.shape[0] - 1
    shape, constants = _wire_plan(width, num_groups, block_format.scale, wire.shape[1], dtype, tuple(options.items()))
    grid = (num_tiles * shape.num_feature_tiles,)
    launch(
        hopper_requantize_columns_kernel,
        grid,
        constants,
        wire,
        wire.view(torch.float32),
        row_index,
        row_start,
        data.view(torch.uint8),
        scale.t(),
        num_tiles,
    )


@functools.cache
def _plan(
    width: int, num_groups: int, scale: str, options: tuple[tuple[str, int], ...]
) -> tuple[ColumnTile, Constants]:
    shape = ColumnTile(width=width, num_groups=num_groups, scale=scale, **{**TILE_OPTIONS, **dict(options)})
    return shape, Constants({"SHAPE": shape, "num_warps": shape.num_warps, "maxnreg": shape.registers})


@functools.cache
def _wire_plan(
    width: int, num_groups: int, scale: str, row_bytes: int, dtype: torch.dtype, options: tuple[tuple[str, int], ...]
) -> tuple[ColumnTile, Constants]:
    shape, constants = _plan(width, num_groups, scale, options)
    return shape, Constants({"ROW_BYTES": row_bytes, "DTYPE": GLUON_DTYPES[dtype], **constants.named})
