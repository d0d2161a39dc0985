"""Tiles of grouped rows (Triton): finding, reading and writing tiles, and the tiles of a launch.

Letters: twin/gemm.py. The rows of group g begin at row_range[g] and end at row_range[NUM_GROUPS + g].
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.ragged_tma import load_ragged
from triton.tools.tensor_descriptor import TensorDescriptor

from symmoe.errors import ArgumentError
from symmoe.kernels import architectures
from symmoe.kernels.launch.launch import Constants, Describe, Named, ceil_div

ZERO_BLOCK = tl.constexpr(
    2048
)  # elements that a program sets to zero at a time: 16 bytes per thread of 8 warps
# The most programs of kernels that only move rows: an H200 runs fewer at a time, and ranges may have few tiles.
ROW_PROGRAMS = 4096
MAX_COLUMNS = 256
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """The tiles and launch options of one GEMM, which may change speed and rounding, but never the twins' definition.

    block_m, block_n: output tile; block_k: contraction step. In grouped_gemm_act block_n counts FFN columns, and
    the accumulator is 2 * block_n wide. group_m: tiles of M that share a column of tiles while it is in L2.
    flatten: fuses the tile loop and the contraction loop, so that the next tile's loads start before this one's stores.
    parts: column parts of a tile in the epilogue, to need fewer registers at a time. lead: parts of h that
    grouped_gemm_dact reads ahead of the current part.
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    group_m: int = 8
    flatten: bool = False
    parts: int = 1
    lead: int = 0

    @property
    def options(self) -> dict[str, int]:
        """The options of a launch."""
        return {"num_stages": self.num_stages, "num_warps": self.num_warps}


def max_columns(device: torch.device) -> int:
    """The most columns of an accumulator, for 128 rows in 16 bits: half if the operands are also in registers."""
    return MAX_COLUMNS if architectures.multiplies_shared(device) else MAX_COLUMNS // 2


def constants_of(module: ModuleType) -> Named:
    """The numbers and texts of a module as constants that kernels may read."""
    named = {
        name: tl.constexpr(value)
        for name, value in vars(module).items()
        if name.isupper() and type(value) in (int, float, str)
    }
    return Named(make_dataclass("Constants", named, frozen=True)(**named))


@functools.lru_cache
def device_num_sms(device: torch.device) -> int:
    """Number of SMs of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_grid(
    num_tiles: int, num_sms: int | None, device: torch.device, programs_per_sm: int = 1
) -> tuple[int]:
    """Programs of a kernel that loops over tiles: at most one per possible tile, none without tiles."""
    num_sms = device_num_sms(device) if num_sms is None else num_sms
    return (min(num_tiles, max(1, programs_per_sm * num_sms)),)


def max_row_tiles(num_rows: int, num_groups: int, block_m: int) -> int:
    """The most tiles of block_m rows for num_rows rows in num_groups groups. Each tile has a row."""
    return min(num_rows, (num_rows + num_groups * (block_m - 1)) // block_m)


@triton.jit
def row_tile_prefix(row_range, NUM_GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Inclusive prefix sum of the groups' row tiles [lanes, a power of two], and their total."""
    group = tl.arange(0, triton.next_power_of_2(NUM_GROUPS))
    start = tl.load(row_range + group, mask=group < NUM_GROUPS, other=0)
    end = tl.load(row_range + NUM_GROUPS + group, mask=group < NUM_GROUPS, other=0)
    num_tiles = (
        tl.maximum(end - start, 0) + (BLOCK_M - 1)
    ) // BLOCK_M  # ranges may end before they begin
    return tl.cumsum(num_tiles, axis=0), tl.sum(num_tiles, axis=0)


@triton.jit
def swizzle_tile(local, num_m_tiles, NUM_N_TILES: tl.constexpr, GROUP_M: tl.constexpr):
    """Tile (m, n) of a matrix: GROUP_M tiles down, then the next column, so that both operands stay in L2."""
    band = local // (GROUP_M * NUM_N_TILES)
    height = tl.minimum(num_m_tiles - band * GROUP_M, GROUP_M)
    in_band = local - band * (GROUP_M * NUM_N_TILES)
    return band * GROUP_M + in_band % height, in_band // height


@triton.jit
def locate_tile(
    tile,
    prefix,
    row_range,
    NUM_GROUPS: tl.constexpr,
    NUM_N_TILES: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Group, first row, end of the group's rows, row tile counted over all groups, and column tile of a tile; groups
    without rows have no tiles."""
    # A group is before the tile if all of its tiles are; lanes past the last group have the total: they never are.
    before = prefix * NUM_N_TILES <= tile
    group = tl.sum(before.to(tl.int32), axis=0)
    first_tile = tl.max(tl.where(before, prefix, 0), axis=0)
    start = tl.load(row_range + group)
    end = tl.load(row_range + NUM_GROUPS + group)
    num_m_tiles = (end - start + (BLOCK_M - 1)) // BLOCK_M
    m_tile, n_tile = swizzle_tile(
        tile - first_tile * NUM_N_TILES, num_m_tiles, NUM_N_TILES, GROUP_M
    )
    return group, start + m_tile * BLOCK_M, end, first_tile + m_tile, n_tile


@triton.jit
def locate_rows(tile, prefix, row_range, NUM_GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Group, first row, and end of the group's rows of a row tile."""
    group, first_row, end, _, _ = locate_tile(tile, prefix, row_range, NUM_GROUPS, 1, 1, BLOCK_M)
    return group, first_row, end


@triton.jit
def tile_mask(row, end, column, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Mask [rows, columns] of elements in the group and in the matrix, for columns of tiles TILE wide."""
    inside = (row < end)[:, None]
    return inside if WIDTH % TILE == 0 else inside & (column < WIDTH)[None, :]


@triton.jit
def store_rounded(values, out, row, end, column, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Rounds values [rows, columns] and stores them before row `end` and inside WIDTH columns; TILE as in tile_mask."""
    pointers = out + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(
        pointers, values.to(out.dtype.element_ty), mask=tile_mask(row, end, column, WIDTH, TILE)
    )


@triton.jit
def matrix_pointer(table, group, DTYPE: tl.constexpr):
    """Pointer to the first element of matrix `group` of a table, int64[G], of addresses that are multiples of 16."""
    # The hint is on the pointer, because a cast drops it; without the hint, accesses have single elements.
    return tl.multiple_of(tl.load(table + group).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def matrix_of(matrices, table, group, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Pointer to matrix `group`, of SIZE elements, in the table if given, else in packed matrices."""
    return (
        matrices + group.to(tl.int64) * SIZE
        if table is None
        else matrix_pointer(table, group, DTYPE)
    )


@triton.jit
def load_lines(
    table,
    group,
    line,
    first_byte,
    NUM_LINES: tl.constexpr,
    LINE_BYTES: tl.constexpr,
    NUM_BYTES: tl.constexpr,
):
    """uint8 [lines, NUM_BYTES] of matrix `group` of a table; zeros outside of it."""
    byte = first_byte + tl.arange(0, NUM_BYTES)
    pointers = (
        matrix_pointer(table, group, tl.uint8)
        + line.to(tl.int64)[:, None] * LINE_BYTES
        + byte[None, :]
    )
    return tl.load(
        pointers, mask=(line < NUM_LINES)[:, None] & (byte < LINE_BYTES)[None, :], other=0
    )


@triton.jit
def load_tile(first, row, column, row_mask, column_mask, WIDTH: tl.constexpr):
    """Tile [rows, columns] of a row-major matrix of WIDTH columns; zeros where a mask is false.

    first: pointer to the element to which row and column, int32 tensors, are relative; offsets of a tile are small, and
    64-bit ones would cost registers. A mask that is None is true everywhere.
    """
    pointers = first + row[:, None] * WIDTH + column[None, :]
    mask = None if row_mask is None else row_mask[:, None]
    if column_mask is not None:
        mask = column_mask[None, :] if mask is None else mask & column_mask[None, :]
    return tl.load(pointers) if mask is None else tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def lanes_inside(first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Mask [BLOCK] of positions before WIDTH, counted from first; None if BLOCK divides WIDTH."""
    if WIDTH % BLOCK == 0:  # Triton 3.6 supports no None from a conditional expression as a result
        mask = None
    else:
        mask = first + tl.arange(0, BLOCK) < WIDTH
    return mask


@triton.jit
def plus(products, addend, factor):
    """products + addend * factor, rounded once.

    A fma instead of `+`: in a contraction of a single step Triton would start the product from the addend of a `+`,
    which rounds differently.
    """
    return tl.fma(addend, factor, products)


@triton.jit
def halves(x, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Left and right half of x [ROWS, 2 * HALF]; stays in registers where a thread holds both."""
    return tl.split(x.reshape(ROWS, 2, HALF).permute(0, 2, 1))


@triton.jit
def column_parts(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """x [ROWS, COLUMNS] cut into a tuple of PARTS tensors from left to right; PARTS is 1, 2, 4 or 8."""
    tl.static_assert(PARTS == 1 or PARTS == 2 or PARTS == 4 or PARTS == 8)
    parts = (x,)
    if PARTS >= 2:
        parts = halves(x, ROWS, COLUMNS // 2)
    if PARTS >= 4:
        parts = halves(parts[0], ROWS, COLUMNS // 4) + halves(parts[1], ROWS, COLUMNS // 4)
    if PARTS >= 8:
        first_half = halves(parts[0], ROWS, COLUMNS // 8) + halves(parts[1], ROWS, COLUMNS // 8)
        parts = (
            first_half + halves(parts[2], ROWS, COLUMNS // 8) + halves(parts[3], ROWS, COLUMNS // 8)
        )
    return parts


@triton.jit
def load_k_rows(
    desc,
    pointer,
    source,
    position,
    start,
    end,
    first_column,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """wgrad operand [BLOCK_K, BLOCK]: rows position.. of the group, zeros at and past its end.

    A ragged TMA descriptor ends reads at the group's end in hardware. desc None: pointers read the tensor's rows
    `source`, int32[BLOCK_K].
    """
    if desc is not None:
        tile = load_ragged(desc, start, end - start, [position - start, first_column])
    else:
        row = position + tl.arange(0, source.shape[0])
        column = first_column + tl.arange(0, BLOCK)
        pointers = pointer + source.to(tl.int64)[:, None] * WIDTH + column[None, :]
        tile = tl.load(pointers, mask=tile_mask(row, end, column, WIDTH, BLOCK), other=0.0)
    return tile


@triton.jit
def source_rows(index, row, end):
    """Indices of rows in their tensor; if gathered, row 0 for rows at and past end."""
    return row if index is None else tl.load(index + row, mask=row < end, other=0)


@dataclass(frozen=True, slots=True)
class Wgrad:
    """The constants of a kernel that stores or adds a weight gradient [num_groups, out_rows, columns] in matrices of a
    Triton dtype."""

    config: TileConfig
    num_groups: int
    out_rows: int
    columns: int
    dtype: tl.dtype
    accumulate: bool

    @property
    def num_m_tiles(self) -> int:
        """Tiles down a group's result."""
        return ceil_div(self.out_rows, self.config.block_m)

    @property
    def num_n_tiles(self) -> int:
        """Tiles across a group's result."""
        return ceil_div(self.columns, self.config.block_n)

    @property
    def num_tiles(self) -> int:
        return self.num_groups * self.num_m_tiles * self.num_n_tiles

    def constants(self, descriptors: Mapping[int, Describe], **options: Any) -> Constants:
        """The constants of all launches with these dimensions."""
        return Constants({"WGRAD": self, **self.config.options, **options}, descriptors)


@triton.jit
def wgrad_location(tile, WGRAD: tl.constexpr):
    """Group of a tile, and the tile's row and column in the group's result."""
    TILES: tl.constexpr = WGRAD.num_m_tiles * WGRAD.num_n_tiles
    group = tile // TILES
    m_tile, n_tile = swizzle_tile(
        tile - group * TILES, WGRAD.num_m_tiles, WGRAD.num_n_tiles, WGRAD.config.group_m
    )
    return group, m_tile, n_tile


@triton.jit
def gradient_of(out, out_table, group, WGRAD: tl.constexpr):
    """Pointer to a group's result."""
    return matrix_of(out, out_table, group, WGRAD.out_rows * WGRAD.columns, WGRAD.dtype)


@triton.jit
def store_gradient(acc, out, row, column, WGRAD: tl.constexpr):
    """Stores columns of a tile in a group's result, rounded once, or adds them."""
    pointers = out + row.to(tl.int64)[:, None] * WGRAD.columns + column[None, :]
    mask = tile_mask(row, WGRAD.out_rows, column, WGRAD.columns, WGRAD.config.block_n)
    if WGRAD.accumulate:
        acc += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, acc.to(WGRAD.dtype), mask=mask)


def row_programs(num_tiles: int, num_column_tiles: int) -> int:
    """Programs per tile of columns that loop over tiles of rows, at most num_tiles."""
    return min(num_tiles, max(1, ROW_PROGRAMS // num_column_tiles))


def describe(block: list[int]) -> Describe:
    """Function from a contiguous tensor to its TMA descriptor."""
    return functools.partial(TensorDescriptor.from_tensor, block_shape=block)


def ragged_descriptor(rows: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """As triton.tools.ragged_tma.create_ragged_descriptor for contiguous rows, in half the time.

    The last two dimensions are the matrix, extended to TMA's limit. The first two let a read begin and end anywhere:
    load_ragged moves the base so that the matrix ends at the group's end; addresses wrap around.
    """
    if len(rows) > 2**30:
        raise ArgumentError(f"a weight gradient's rows must be at most 2^30, got {len(rows)}")
    return TensorDescriptor(rows, *ragged_extent(rows), [1, 1, *block])


def ragged_extent(rows: torch.Tensor) -> tuple[list[int], list[int]]:
    """Shape and strides of a ragged descriptor."""
    width = rows.shape[1]
    return [0x7FFF0000, 0x7FFF0000, 2**30, width], [2**34 - width, width, width, 1]
