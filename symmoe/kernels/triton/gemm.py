"""Grouped GEMMs over expert-sorted rows (Triton, persistent; TMA and WGMMA on Hopper).

    N rows in G groups; group g owns rows row_start[g]:row_start[g+1]; row_start int32[G+1] stays on the device.
    O, C output and contracted features of the forward GEMM; P packed rows that a row_index points into.

    grouped_gemm        out[N,O] (+)= rows[N,C] @ weight[G,O,C]^T + bias[G,O] * bias_scale[N]
    grouped_gemm_dgrad  out[N,C] (+)= dout[N,O] @ weight[G,O,C]
    grouped_gemm_wgrad  out[G,O,C] (+)= dout_g^T @ rows_g

Every launch has one program per SM; a program walks the output tiles with the stride of the grid. Which tile an
output belongs to, the tile sizes and the order of the sums depend on the static dimensions and on the row's place
in its group, never on N, on where the group lies, or on the grid: results are bitwise those of any other placement.

What lies beyond a group's end (the next group's rows, tail rows, NaN) is read but has no effect: rows are
independent in the first two GEMMs, so masked stores are enough; wgrad sums over rows and reads zeros there.

The first two GEMMs also compute parts (kernels/parts.py): row_start may be ranges int32[2, G], and `columns` a panel of
the output. In a kernel, row_start[g] is where the rows of group g begin, and row_start[g + END] where they end. A row's
bits do not depend on the tile that it is in, so parts have the bits of the whole; tiles begin where ranges begin, so
begins that are a group's start plus a multiple of 128 rows cost no more tiles than the whole.

Weights, and the outputs of wgrad, are packed tensors or tables of addresses (TensorTable). A packed weight is read by
TMA. A table's matrices have no common base, and a descriptor each would have to be made on the host, which knows the
addresses no better than the device: they are read by pointers, with cp.async, as gathered rows are.

Hopper has kernels of its own for the common cases (hopper/), with the same bits; a given config means these here.

Preconditions, checked by the callers: contiguous tensors of one device and dtype (bf16, fp16, fp32; wgrad's out may
be fp32 among 16-bit operands), 16-byte aligned, all feature dimensions multiples of 16 bytes. No function
synchronises, allocates device memory or reads row_start.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.ragged_tma import load_ragged
from triton.tools.tensor_descriptor import TensorDescriptor

from symmoe.errors import ArgumentError
from symmoe.kernels import hopper
from symmoe.kernels.launch.compiled import Describe
from symmoe.kernels.launch.integers import ceil_div, next_power_of_2
from symmoe.kernels.launch.launch import Constants, fast_launch, launch
from symmoe.kernels.parts import are_ranges, panel, refuse_ranges
from symmoe.kernels.table import TensorTable

ZERO_BLOCK = tl.constexpr(2048)  # elements that a program sets to zero at a time: 16 bytes per thread of 8 warps
# Columns of a tile that are added to what is there at a time: a whole tile of loads does not fit into the registers.
ACCUMULATE_COLUMNS = tl.constexpr(64)
# Of kernels that only move rows, in ranges: more than an H200 has room for, fewer than would look in vain for a tile.
RANGE_PROGRAMS = 4096
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """How one GEMM is cut into tiles and run. Numbers may change speed and rounding, never the contract.

    block_m, block_n: output tile; block_k: contraction step. In grouped_gemm_act block_n counts FFN columns, and
    the accumulator is 2 * block_n wide. group_m: tiles of M that share a column of tiles while it is in L2.
    flatten: fuse the tile loop and the contraction loop, so that the next tile's loads start before this one's stores.
    parts: the epilogue handles the tile in this many column parts, to need fewer registers at a time.
    max_registers: limit per thread, for programs_per_sm > 1 (65536 registers per SM).
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    group_m: int = 8
    programs_per_sm: int = 1
    flatten: bool = False
    parts: int = 1
    max_registers: int | None = None


# FP32 has no tensor core path (IEEE products): small tiles, or the unrolled FMAs run out of registers.
FP32_CONFIG = TileConfig(block_m=64, block_n=64, block_k=16, num_stages=3, num_warps=8)

# 16-bit tiles by output features: the widest tile that the output fills.
GEMM_CONFIGS = (
    (256, TileConfig(block_m=128, block_n=256, block_k=64, num_stages=3, num_warps=8, flatten=True)),
    (128, TileConfig(block_m=128, block_n=128, block_k=64, num_stages=4, num_warps=8, flatten=True)),
    (0, TileConfig(block_m=128, block_n=64, block_k=64, num_stages=4, num_warps=4)),
)


@functools.lru_cache
def gemm_config(out_features: int, dtype: torch.dtype) -> TileConfig:
    """Tiles of grouped_gemm and grouped_gemm_dgrad, from the width of the output."""
    if dtype == torch.float32:
        return FP32_CONFIG
    return next(config for least, config in GEMM_CONFIGS if out_features >= least)


def wgrad_config(out_features: int, in_features: int, dtype: torch.dtype) -> TileConfig:
    """Tiles of grouped_gemm_wgrad, from the shape [out_features, in_features] of one group's gradient."""
    return gemm_config(in_features, dtype)


@functools.lru_cache
def device_num_sms(device: torch.device) -> int:
    """Number of SMs of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_grid(config: TileConfig, num_tiles: int, num_sms: int | None, device: torch.device) -> tuple[int]:
    """One program per SM (times programs_per_sm), but no more than there can be tiles."""
    num_sms = device_num_sms(device) if num_sms is None else num_sms
    return (max(1, min(num_tiles, num_sms * config.programs_per_sm)),)


def max_row_tiles(num_rows: int, num_groups: int, block_m: int) -> int:
    """Most tiles of block_m rows that num_rows rows in num_groups groups can need."""
    return (num_rows + num_groups * (block_m - 1)) // block_m


@triton.jit
def row_tile_prefix(
    row_start, NUM_GROUPS: tl.constexpr, GROUP_LANES: tl.constexpr, BLOCK_M: tl.constexpr, END: tl.constexpr = 1
):
    """Inclusive prefix sum of the groups' row tiles [GROUP_LANES], and their total."""
    group = tl.arange(0, GROUP_LANES)
    start = tl.load(row_start + group, mask=group < NUM_GROUPS, other=0)
    end = tl.load(row_start + group + END, mask=group < NUM_GROUPS, other=0)
    if END > 1:  # ranges may end before they begin; a single one makes a total below 0, which is as good as 0
        end = tl.maximum(start, end)
    num_tiles = (end - start + (BLOCK_M - 1)) // BLOCK_M
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
    row_start,
    NUM_N_TILES: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    END: tl.constexpr = 1,
):
    """Group, first row, end of the group's rows, and column tile of a tile; groups without rows have no tiles."""
    # A group lies before the tile if all of its tiles do; lanes past the last group repeat the total: never before.
    before = prefix * NUM_N_TILES <= tile
    group = tl.sum(before.to(tl.int32), axis=0)
    first = tl.max(tl.where(before, prefix, 0), axis=0) * NUM_N_TILES
    start = tl.load(row_start + group)
    end = tl.load(row_start + group + END)
    num_m_tiles = (end - start + (BLOCK_M - 1)) // BLOCK_M
    m_tile, n_tile = swizzle_tile(tile - first, num_m_tiles, NUM_N_TILES, GROUP_M)
    return group, start + m_tile * BLOCK_M, end, n_tile


@triton.jit
def gather_pointers(rows, row_index, row, end, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Pointers [rows, BLOCK_K] to the first columns of the rows that row_index names."""
    # Entries past the group's end may be anything; row 0 exists wherever a group has rows.
    source = tl.load(row_index + row, mask=row < end, other=0)
    return rows + source.to(tl.int64)[:, None] * WIDTH + tl.arange(0, BLOCK_K)[None, :]


@triton.jit
def load_rows(rows_desc, pointers, first_row, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    """Tile [rows, BLOCK_K] at column k; zeros past the last column. pointers None: contiguous rows, by TMA."""
    if pointers is None:
        tile = rows_desc.load([first_row, k])
    elif WIDTH % BLOCK_K == 0:
        tile = tl.load(pointers + k)
    else:
        tile = tl.load(pointers + k, mask=(k + tl.arange(0, BLOCK_K) < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def tile_mask(row, end, column, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Mask [rows, columns] of what lies in the group and in the matrix, for columns of tiles TILE wide."""
    if WIDTH % TILE == 0:
        mask = (row < end)[:, None]
    else:
        mask = (row < end)[:, None] & (column < WIDTH)[None, :]
    return mask


@triton.jit
def matrix_pointer(table, group, DTYPE: tl.constexpr):
    """Pointer to the first element of matrix `group` of a table, int64[G], of addresses that are multiples of 16."""
    # The hint belongs to the pointer, it would not survive the cast; without, accesses are of single elements.
    return tl.multiple_of(tl.load(table + group).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def load_tile(first, row, column, row_mask, column_mask, WIDTH: tl.constexpr):
    """Tile [rows, columns] of a row-major matrix of WIDTH columns; zeros where a mask is false.

    first: pointer to the element that row and column, int32 tensors, are relative to; small offsets are enough for a
    tile, and 64-bit ones would cost registers. A mask that is None is true everywhere.
    """
    pointers = first + row[:, None] * WIDTH + column[None, :]
    if row_mask is None and column_mask is None:
        tile = tl.load(pointers)
    elif row_mask is None:
        tile = tl.load(pointers, mask=column_mask[None, :], other=0.0)
    elif column_mask is None:
        tile = tl.load(pointers, mask=row_mask[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=row_mask[:, None] & column_mask[None, :], other=0.0)
    return tile


@triton.jit
def lanes_inside(first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Mask [BLOCK] of what lies before WIDTH, counted from first; None if BLOCK divides WIDTH."""
    if WIDTH % BLOCK == 0:
        mask = None
    else:
        mask = first + tl.arange(0, BLOCK) < WIDTH
    return mask


@triton.jit
def load_weight(
    desc,
    pointer,
    group,
    first_column,
    k,
    OUT_WIDTH: tl.constexpr,
    IN_WIDTH: tl.constexpr,
    K_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Right operand [BLOCK_K, BLOCK_N] of rows @ weight: contracted features k.., output features first_column..

    Zeros past the last feature of either kind.

    desc: TMA descriptor of packed weights [G, OUT_WIDTH, IN_WIDTH] with blocks [1, BLOCK_N, BLOCK_K], or, K_FIRST,
    [G, IN_WIDTH, OUT_WIDTH] with blocks [1, BLOCK_K, BLOCK_N].
    pointer: if desc is None, what matrix_pointer said for the group; get it before the contraction loop, or the
    loop's loads wait for it.
    """
    n_lane = tl.arange(0, BLOCK_N)
    k_lane = tl.arange(0, BLOCK_K)
    if desc is not None:
        if K_FIRST:
            tile = desc.load([group, k, first_column]).reshape(BLOCK_K, BLOCK_N)
        else:
            tile = desc.load([group, first_column, k]).reshape(BLOCK_N, BLOCK_K).T
    else:
        n_mask = lanes_inside(first_column, OUT_WIDTH, BLOCK_N)
        k_mask = lanes_inside(k, IN_WIDTH, BLOCK_K)
        if K_FIRST:
            first = pointer + tl.cast(k, tl.int64) * OUT_WIDTH + first_column
            tile = load_tile(first, k_lane, n_lane, k_mask, n_mask, OUT_WIDTH)
        else:
            first = pointer + first_column.to(tl.int64) * IN_WIDTH + k
            tile = load_tile(first, n_lane, k_lane, n_mask, k_mask, IN_WIDTH).T
    return tile


@triton.jit
def plus(products, addend, factor):
    """products + addend * factor, rounded once, whatever made the products.

    Not by `+`: if the contraction is a single step, Triton makes of it a product that begins with the addend, which
    rounds differently.
    """
    return tl.fma(addend, factor, products)


@triton.jit
def add_bias(acc, bias, bias_scale, group, row, end, column, WIDTH: tl.constexpr):
    """acc [rows, columns] + bias[group, column] * bias_scale[row] in fp32; no bias: acc, no scale: 1."""
    if bias is not None:
        features = tl.load(bias + group.to(tl.int64) * WIDTH + column, mask=column < WIDTH, other=0.0)
        factor = 1.0
        if bias_scale is not None:
            factor = tl.load(bias_scale + row, mask=row < end, other=0.0)[:, None]
        acc = plus(acc, features.to(tl.float32)[None, :], factor)
    return acc


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
        left = halves(parts[0], ROWS, COLUMNS // 8) + halves(parts[1], ROWS, COLUMNS // 8)
        parts = left + halves(parts[2], ROWS, COLUMNS // 8) + halves(parts[3], ROWS, COLUMNS // 8)
    return parts


@triton.jit
def add_tile(
    acc,
    out,
    row,
    end,
    first_column,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out [., WIDTH] += acc [ROWS, COLUMNS] at these rows and from this column on, in fp32 and rounded once."""
    PART: tl.constexpr = min(COLUMNS, ACCUMULATE_COLUMNS)
    parts = column_parts(acc, ROWS, COLUMNS, COLUMNS // PART)
    for i in tl.static_range(COLUMNS // PART):
        column = first_column + i * PART + tl.arange(0, PART)
        pointers = out + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        mask = tile_mask(row, end, column, WIDTH, COLUMNS)
        total = plus(parts[i], tl.load(pointers, mask=mask, other=0.0).to(tl.float32), 1.0)
        tl.store(pointers, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def zero_rows(out, first, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in rows first..num_rows of out [num_rows, WIDTH], BLOCK elements at a time by every program in turn."""
    base = out + first.to(tl.int64) * WIDTH
    size = (num_rows - first).to(tl.int64) * WIDTH
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for i in range(tl.program_id(0).to(tl.int64) * BLOCK, size, step):
        offset = i + tl.arange(0, BLOCK)
        tl.store(base + offset, tl.zeros((BLOCK,), out.dtype.element_ty), mask=offset < size)


@triton.jit
def zero_panel(
    out,
    first,
    num_rows,
    WIDTH: tl.constexpr,
    FIRST_COLUMN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """zero_rows, but of COLUMNS columns from FIRST_COLUMN on."""
    base = out + first.to(tl.int64) * WIDTH + FIRST_COLUMN
    size = (num_rows - first).to(tl.int64) * COLUMNS
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for i in range(tl.program_id(0).to(tl.int64) * BLOCK, size, step):
        offset = i + tl.arange(0, BLOCK)
        pointers = base + offset // COLUMNS * WIDTH + offset % COLUMNS
        tl.store(pointers, tl.zeros((BLOCK,), out.dtype.element_ty), mask=offset < size)


@fast_launch
@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["row_index", "weight_table", "row_start", "bias", "bias_scale"],
)
def grouped_gemm_kernel(
    rows_desc,  # [N, K], block [BLOCK_M, BLOCK_K]; None when gathering
    rows,  # [P, K], for gathering
    row_index,  # int32[N] or None
    weight_desc,  # see load_weight; None with a table
    weight_table,  # int64[G] or None
    row_start,
    out,  # [N, M]
    bias,  # [G, M] or None
    bias_scale,  # fp32[N] or None
    num_rows,  # N; None: leave the tail alone
    NUM_GROUPS: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    IN_WIDTH: tl.constexpr,
    WEIGHT_K_FIRST: tl.constexpr,
    END: tl.constexpr,
    FIRST_COLUMN: tl.constexpr,  # of the panel
    COLUMNS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    NUM_N_TILES: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    prefix, num_row_tiles = row_tile_prefix(row_start, NUM_GROUPS, GROUP_LANES, BLOCK_M, END)
    num_tiles = num_row_tiles * NUM_N_TILES
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN):
        group, first_row, end, n_tile = locate_tile(tile, prefix, row_start, NUM_N_TILES, GROUP_M, BLOCK_M, END)
        row = first_row + tl.arange(0, BLOCK_M)
        first_column = FIRST_COLUMN + n_tile * BLOCK_N
        pointers = None
        if row_index is not None:
            pointers = gather_pointers(rows, row_index, row, end, IN_WIDTH, BLOCK_K)
        weight = None
        if weight_table is not None:
            weight = matrix_pointer(weight_table, group, rows.dtype.element_ty)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, IN_WIDTH, BLOCK_K):
            a = load_rows(rows_desc, pointers, first_row, k, IN_WIDTH, BLOCK_K)
            b = load_weight(
                weight_desc, weight, group, first_column, k, OUT_WIDTH, IN_WIDTH, WEIGHT_K_FIRST, BLOCK_N, BLOCK_K
            )
            acc = tl.dot(a, b, acc, input_precision="ieee")
        column = first_column + tl.arange(0, BLOCK_N)
        acc = add_bias(acc, bias, bias_scale, group, row, end, column, OUT_WIDTH)
        if ACCUMULATE:
            add_tile(acc, out, row, end, first_column, OUT_WIDTH, BLOCK_M, BLOCK_N)
        else:
            pointers_out = out + row.to(tl.int64)[:, None] * OUT_WIDTH + column[None, :]
            mask = tile_mask(row, end, column, OUT_WIDTH, BLOCK_N)
            tl.store(pointers_out, acc.to(out.dtype.element_ty), mask=mask)
    if num_rows is not None:
        first = tl.load(row_start + NUM_GROUPS)
        if COLUMNS == OUT_WIDTH:
            zero_rows(out, first, num_rows, OUT_WIDTH, ZERO_BLOCK)
        else:
            zero_panel(out, first, num_rows, OUT_WIDTH, FIRST_COLUMN, COLUMNS, ZERO_BLOCK)


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
    BLOCK_K: tl.constexpr,
):
    """wgrad operand [BLOCK_K, BLOCK]: rows position.. of the group, zeros at and past its end.

    By a ragged TMA descriptor, whose reads end at the group's end in hardware; desc None: by pointers, from rows
    source int32[BLOCK_K] of the tensor.
    """
    if desc is not None:
        tile = load_ragged(desc, start, end - start, [position - start, first_column])
    else:
        row = position + tl.arange(0, BLOCK_K)
        column = first_column + tl.arange(0, BLOCK)
        pointers = pointer + source.to(tl.int64)[:, None] * WIDTH + column[None, :]
        tile = tl.load(pointers, mask=tile_mask(row, end, column, WIDTH, BLOCK), other=0.0)
    return tile


@triton.jit
def source_rows(index, position, end, BLOCK_K: tl.constexpr):
    """Where rows position.. (BLOCK_K of them) lie in their tensor; row 0 for those at and past end if gathered."""
    row = position + tl.arange(0, BLOCK_K)
    if index is None:
        source = row
    else:
        source = tl.load(index + row, mask=row < end, other=0)
    return source


@triton.jit
def store_gradient(
    acc,
    out,
    row,
    column,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Columns of a tile of TILE columns into out [ROWS, WIDTH], rounded once; ACCUMULATE: added to what is there."""
    pointers = out + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    mask = tile_mask(row, ROWS, column, WIDTH, TILE)
    if ACCUMULATE:
        acc += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, acc.to(DTYPE), mask=mask)


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["dout_index", "rows_index", "row_start", "out_table"])
def grouped_gemm_wgrad_kernel(
    dout_desc,  # [N, O], ragged, block [BLOCK_K, BLOCK_M]; None when gathering
    dout,
    dout_index,  # int32[N] or None
    rows_desc,  # [N, C], ragged, block [BLOCK_K, BLOCK_N]; None when gathering
    rows,
    rows_index,  # int32[N] or None
    row_start,
    out,  # [G, O, C]; None with a table
    out_table,  # int64[G] or None
    OUT_DTYPE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    OUT_ROWS: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    NUM_M_TILES: tl.constexpr = (OUT_ROWS + BLOCK_M - 1) // BLOCK_M
    NUM_N_TILES: tl.constexpr = (OUT_WIDTH + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = NUM_M_TILES * NUM_N_TILES
    for tile in tl.range(tl.program_id(0), NUM_GROUPS * TILES, tl.num_programs(0), flatten=FLATTEN):
        group = tile // TILES
        m_tile, n_tile = swizzle_tile(tile - group * TILES, NUM_M_TILES, NUM_N_TILES, GROUP_M)
        m = m_tile * BLOCK_M
        n = n_tile * BLOCK_N
        start = tl.load(row_start + group)
        end = tl.load(row_start + group + 1)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        # Indices are loaded one step ahead: the pipeliner would halve its depth for loads that wait for loads.
        next_i = source_rows(dout_index, start, end, BLOCK_K)
        next_j = source_rows(rows_index, start, end, BLOCK_K)
        for k in tl.range(start, end, BLOCK_K):
            i = next_i
            j = next_j
            next_i = source_rows(dout_index, k + BLOCK_K, end, BLOCK_K)
            next_j = source_rows(rows_index, k + BLOCK_K, end, BLOCK_K)
            a = load_k_rows(dout_desc, dout, i, k, start, end, m, OUT_ROWS, BLOCK_M, BLOCK_K)
            b = load_k_rows(rows_desc, rows, j, k, start, end, n, OUT_WIDTH, BLOCK_N, BLOCK_K)
            acc = tl.dot(a.T, b, acc, input_precision="ieee")
        row = m + tl.arange(0, BLOCK_M)
        column = n + tl.arange(0, BLOCK_N)
        if out_table is None:
            out_group = out + group.to(tl.int64) * OUT_ROWS * OUT_WIDTH
        else:
            out_group = matrix_pointer(out_table, group, OUT_DTYPE)
        if not ACCUMULATE:
            store_gradient(acc, out_group, row, column, OUT_ROWS, OUT_WIDTH, OUT_DTYPE, False, BLOCK_N)
        elif start < end:  # a group without rows is not even read
            PART: tl.constexpr = min(BLOCK_N, ACCUMULATE_COLUMNS)
            parts = column_parts(acc, BLOCK_M, BLOCK_N, BLOCK_N // PART)
            for i in tl.static_range(BLOCK_N // PART):
                columns = n + i * PART + tl.arange(0, PART)
                store_gradient(parts[i], out_group, row, columns, OUT_ROWS, OUT_WIDTH, OUT_DTYPE, True, BLOCK_N)


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["table"])
def zero_matrices_kernel(table, DTYPE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in BLOCK of the SIZE elements of each matrix of a table. Grid (blocks, groups)."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pointers = matrix_pointer(table, tl.program_id(1), DTYPE) + offset
    tl.store(pointers, tl.zeros((BLOCK,), DTYPE), mask=offset < SIZE)


def grouped_gemm(
    rows: torch.Tensor,
    weight: torch.Tensor | TensorTable,
    row_start: torch.Tensor,
    out: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    bias_scale: torch.Tensor | None = None,
    columns: tuple[int, int] | None = None,
    accumulate: bool = False,
    zero_tail: bool = False,
    num_sms: int | None = None,
    config: TileConfig | None = None,
) -> None:
    """out[r] = rows[row_index[r]] @ weight[g]^T + bias[g] * bias_scale[r] for every row r of every group g.

    rows [N, C], or [P, C] with row_index int32[N]; weight [G, O, C]; out [N, O]; bias [G, O]; bias_scale fp32[N],
    without: 1. row_start: the groups' bounds int32[G+1], or ranges of rows int32[2, G]. columns: only these are
    computed and written. accumulate: the result is added to out[r] in fp32, and rounded with it. zero_tail: rows of out
    that belong to no group become 0 (in these columns); not with ranges. num_sms: most SMs that run it, so that others
    are left to other kernels. Ranges and columns: kernels/parts.py, and the errors there. See the module docstring.
    """
    _launch_gemm(
        rows,
        weight,
        row_start,
        out,
        row_index,
        bias,
        bias_scale,
        columns,
        accumulate,
        zero_tail,
        num_sms,
        config,
        False,
    )


def grouped_gemm_dgrad(
    dout: torch.Tensor,
    weight: torch.Tensor | TensorTable,
    row_start: torch.Tensor,
    out: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
    columns: tuple[int, int] | None = None,
    accumulate: bool = False,
    zero_tail: bool = False,
    num_sms: int | None = None,
    config: TileConfig | None = None,
) -> None:
    """out[r] = dout[row_index[r]] @ weight[g] for every row r of every group g.

    dout [N, O], or [P, O] with row_index int32[N]; weight [G, O, C]; out [N, C]. row_start, columns, accumulate,
    zero_tail, num_sms: as in grouped_gemm.
    """
    _launch_gemm(
        dout, weight, row_start, out, row_index, None, None, columns, accumulate, zero_tail, num_sms, config, True
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """What the launches of a GEMM with the same static dimensions have in common.

    Attributes:
        config: the tiles.
        num_n_tiles: tiles across the output; of wgrad, the tiles of all groups.
        constants: of the kernel.
    """

    config: TileConfig
    num_n_tiles: int
    constants: Constants

    def grid(self, num_rows: int, num_groups: int, num_sms: int | None, device: torch.device) -> tuple[int]:
        """The grid for num_rows rows."""
        num_tiles = max_row_tiles(num_rows, num_groups, self.config.block_m) * self.num_n_tiles
        return launch_grid(self.config, num_tiles, num_sms, device)


def _launch_gemm(
    rows,
    weight,
    row_start,
    out,
    row_index,
    bias,
    bias_scale,
    columns,
    accumulate,
    zero_tail,
    num_sms,
    config,
    weight_k_first,
):
    num_rows, out_width = out.shape
    num_groups = weight.shape[0]
    columns = panel(columns, out_width)
    if zero_tail:
        refuse_ranges(row_start, "zero_tail")
    if num_rows == 0:
        return
    is_table = isinstance(weight, TensorTable)
    if config is None and row_index is None and bias is None and not (is_table or accumulate):
        special = hopper.kernels(out.device, out.dtype, out_width)
        if special is not None and num_rows <= hopper.MAX_ROWS:
            special.launch_gemm(
                rows,
                weight,
                row_start,
                out,
                weight_k_first=weight_k_first,
                columns=columns,
                zero_tail=zero_tail,
                num_sms=num_sms,
            )
            return
    end = end_of_rows(row_start, num_groups)
    plan = _gemm_plan(config, out.dtype, num_groups, out_width, rows.shape[1], weight_k_first, end, columns, accumulate)
    launch(
        grouped_gemm_kernel,
        plan.grid(num_rows, num_groups, num_sms, out.device),
        plan.constants,
        rows if row_index is None else None,
        rows,
        row_index,
        None if is_table else weight,
        weight.pointers if is_table else None,
        row_start,
        out,
        bias,
        bias_scale,
        num_rows if zero_tail else None,
    )


def row_programs(row_start: torch.Tensor, num_tiles: int, num_beside: int) -> int:
    """Programs for tiles of rows: one for each; or, as ranges may have few of them, no more than there is room for.

    num_tiles: the most there can be; with ranges programs loop over them. num_beside: tiles of columns, whose programs
    are others.
    """
    return min(num_tiles, max(1, RANGE_PROGRAMS // num_beside)) if are_ranges(row_start) else num_tiles


def end_of_rows(row_start: torch.Tensor, num_groups: int) -> int:
    """The kernels' END: how far behind the begin of a group's rows their end stands."""
    return num_groups if are_ranges(row_start) else 1


@functools.cache
def _gemm_plan(
    config: TileConfig | None,
    dtype: torch.dtype,
    num_groups: int,
    out_width: int,
    in_width: int,
    weight_k_first: bool,
    end: int,
    columns: tuple[int, int] | None,
    accumulate: bool,
) -> Plan:
    config = config or gemm_config(out_width, dtype)
    weight_block = [config.block_k, config.block_n] if weight_k_first else [config.block_n, config.block_k]
    first_column, end_column = columns or (0, out_width)
    if first_column % config.block_n or (end_column < out_width and end_column % config.block_n):
        raise ArgumentError(f"tiles of {config.block_n} columns do not fill the columns {columns}")
    constants = {
        "NUM_GROUPS": num_groups,
        "GROUP_LANES": next_power_of_2(num_groups),
        "OUT_WIDTH": out_width,
        "IN_WIDTH": in_width,
        "WEIGHT_K_FIRST": weight_k_first,
        "END": end,
        "FIRST_COLUMN": first_column,
        "COLUMNS": end_column - first_column,
        "ACCUMULATE": accumulate,
        **tile_constants(config),
    }
    descriptors = {0: describe([config.block_m, config.block_k]), 3: describe([1, *weight_block])}
    return Plan(config, ceil_div(end_column - first_column, config.block_n), Constants(constants, descriptors))


def tile_constants(config: TileConfig) -> dict[str, int | bool | None]:
    """The constants and options that all GEMM kernels take from their configuration."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "FLATTEN": config.flatten,
        "num_stages": config.num_stages,
        "num_warps": config.num_warps,
        "maxnreg": config.max_registers,
    }


def describe(block: list[int]) -> Describe:
    """Function from a contiguous tensor to its TMA descriptor."""
    return functools.partial(TensorDescriptor.from_tensor, block_shape=block)


def ragged_descriptor(rows: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """What triton.tools.ragged_tma.create_ragged_descriptor makes of contiguous rows, in half of its time.

    The last two dimensions are the matrix, made as long as TMA allows. The first two let a read begin and end anywhere:
    load_ragged moves the base so that the group's end comes to lie at the matrix' end; addresses wrap around.
    """
    num_rows, width = rows.shape
    if num_rows > 2**30:
        raise ArgumentError(f"a weight gradient's rows must be at most 2^30, got {num_rows}")
    shape = [0x7FFF0000, 0x7FFF0000, 2**30, width]
    return TensorDescriptor(rows, shape, [2**34 - width, width, width, 1], [1, 1, *block])


def grouped_gemm_wgrad(
    dout: torch.Tensor,
    rows: torch.Tensor,
    row_start: torch.Tensor,
    out: torch.Tensor | TensorTable,
    *,
    dout_index: torch.Tensor | None = None,
    rows_index: torch.Tensor | None = None,
    accumulate: bool = False,
    num_sms: int | None = None,
    config: TileConfig | None = None,
) -> None:
    """out[g] = sum over the rows r of group g of dout[dout_index[r]]^T rows[rows_index[r]]; no rows give zeros.

    dout [N, O] or [P, O] with dout_index int32[N]; rows [N, C] or [P, C] with rows_index int32[N]; out [G, O, C] in
    the dtype of dout or fp32. accumulate: the sum is added to out[g] in fp32; no rows leave it alone. row_start: the
    groups' bounds. num_sms: as in grouped_gemm.
    """
    refuse_ranges(row_start, "a weight gradient")
    num_groups, out_rows, out_width = out.shape
    num_rows = (dout if dout_index is None else dout_index).shape[0]
    if num_rows == 0:
        if not accumulate:
            _zero_matrices(out)
        return
    is_table = isinstance(out, TensorTable)
    is_gathered = dout_index is not None or rows_index is not None
    if config is None and not (is_gathered or is_table or accumulate) and out.dtype == dout.dtype:
        special = hopper.kernels(out.device, out.dtype, out_width)
        if special is not None and num_rows <= hopper.MAX_ROWS and out_rows % 8 == out_width % 8 == 0:
            special.launch_wgrad(dout, rows, row_start, out, num_sms=num_sms)
            return
    plan = _wgrad_plan(config, dout.dtype, out.dtype, accumulate, num_groups, out_rows, out_width)
    launch(
        grouped_gemm_wgrad_kernel,
        launch_grid(plan.config, plan.num_n_tiles, num_sms, dout.device),
        plan.constants,
        dout if dout_index is None else None,
        dout,
        dout_index,
        rows if rows_index is None else None,
        rows,
        rows_index,
        row_start,
        None if is_table else out,
        out.pointers if isinstance(out, TensorTable) else None,
    )


@functools.cache
def _wgrad_plan(
    config: TileConfig | None,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    accumulate: bool,
    num_groups: int,
    out_rows: int,
    out_width: int,
) -> Plan:
    config = config or wgrad_config(out_rows, out_width, dtype)
    constants = {
        "OUT_DTYPE": TRITON_DTYPES[out_dtype],
        "ACCUMULATE": accumulate,
        "NUM_GROUPS": num_groups,
        "OUT_ROWS": out_rows,
        "OUT_WIDTH": out_width,
        **tile_constants(config),
    }
    descriptors = {
        0: functools.partial(ragged_descriptor, block=[config.block_k, config.block_m]),
        3: functools.partial(ragged_descriptor, block=[config.block_k, config.block_n]),
    }
    num_tiles = num_groups * ceil_div(out_rows, config.block_m) * ceil_div(out_width, config.block_n)
    return Plan(config, num_tiles, Constants(constants, descriptors))


def _zero_matrices(out: torch.Tensor | TensorTable) -> None:
    """Zeros in every matrix: a gradient without any rows, which no descriptor can describe."""
    if isinstance(out, torch.Tensor):
        out.zero_()
        return
    num_groups, out_rows, out_width = out.shape
    size = out_rows * out_width
    with torch.cuda.device_of(out.pointers):
        zero_matrices_kernel[(ceil_div(size, ZERO_BLOCK.value), num_groups)](
            out.pointers, DTYPE=TRITON_DTYPES[out.dtype], SIZE=size, BLOCK=ZERO_BLOCK.value, num_warps=4
        )
