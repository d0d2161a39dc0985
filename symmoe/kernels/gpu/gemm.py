"""Grouped GEMMs over expert-sorted rows (Triton, persistent; TMA and WGMMA on Hopper).

    N rows in G groups; group g owns rows row_start[g]:row_start[g+1]; row_start int32[G+1] stays on the device.
    O, C output and contracted features of the forward GEMM; P packed rows that a row_index points into.

    grouped_gemm        out[N,O] = rows[N,C] @ weight[G,O,C]^T
    grouped_gemm_dgrad  out[N,C] = dout[N,O] @ weight[G,O,C]
    grouped_gemm_wgrad  out[G,O,C] = dout_g^T @ rows_g

Every launch has one program per SM; a program walks the output tiles with the stride of the grid. Which tile an
output belongs to, the tile sizes and the order of the sums depend on the static dimensions and on the row's place
in its group, never on N, on where the group lies, or on the grid: results are bitwise those of any other placement.

What lies beyond a group's end (the next group's rows, tail rows, NaN) is read but has no effect: rows are
independent in the first two GEMMs, so masked stores are enough; wgrad sums over rows and reads zeros there.

Preconditions, checked by the callers: contiguous tensors of one device and dtype (bf16, fp16, fp32), 16-byte aligned,
all feature dimensions multiples of 16 bytes. No function synchronises, allocates device memory or reads row_start.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """How one GEMM is cut into tiles and run. Numbers may change speed and rounding, never the contract.

    block_m, block_n: output tile; block_k: contraction step. In grouped_gemm_swiglu block_n counts FFN columns, and
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
def row_tile_prefix(row_start, NUM_GROUPS: tl.constexpr, GROUP_LANES: tl.constexpr, BLOCK_M: tl.constexpr):
    """Inclusive prefix sum of the groups' row tiles [GROUP_LANES], and their total."""
    group = tl.arange(0, GROUP_LANES)
    start = tl.load(row_start + group, mask=group < NUM_GROUPS, other=0)
    end = tl.load(row_start + group + 1, mask=group < NUM_GROUPS, other=0)
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
def locate_tile(tile, prefix, row_start, NUM_N_TILES: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr):
    """Group, first row, end of the group's rows, and column tile of a tile; groups without rows have no tiles."""
    # A group lies before the tile if all of its tiles do; lanes past the last group repeat the total: never before.
    before = prefix * NUM_N_TILES <= tile
    group = tl.sum(before.to(tl.int32), axis=0)
    first = tl.max(tl.where(before, prefix, 0), axis=0) * NUM_N_TILES
    start = tl.load(row_start + group)
    end = tl.load(row_start + group + 1)
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


@triton.jit(do_not_specialize_on_alignment=["row_index", "row_start"])
def grouped_gemm_kernel(
    rows_desc,  # [N, K], block [BLOCK_M, BLOCK_K]; None when gathering
    rows,  # [P, K], for gathering
    row_index,  # int32[N] or None
    weight_desc,  # [G, M, K] block [1, BLOCK_N, BLOCK_K], or WEIGHT_K_FIRST: [G, K, M] block [1, BLOCK_K, BLOCK_N]
    row_start,
    out,  # [N, M]
    NUM_GROUPS: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    IN_WIDTH: tl.constexpr,
    WEIGHT_K_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    NUM_N_TILES: tl.constexpr = (OUT_WIDTH + BLOCK_N - 1) // BLOCK_N
    prefix, num_row_tiles = row_tile_prefix(row_start, NUM_GROUPS, GROUP_LANES, BLOCK_M)
    num_tiles = num_row_tiles * NUM_N_TILES
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN):
        group, first_row, end, n_tile = locate_tile(tile, prefix, row_start, NUM_N_TILES, GROUP_M, BLOCK_M)
        row = first_row + tl.arange(0, BLOCK_M)
        first_column = n_tile * BLOCK_N
        pointers = None
        if row_index is not None:
            pointers = gather_pointers(rows, row_index, row, end, IN_WIDTH, BLOCK_K)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, IN_WIDTH, BLOCK_K):
            a = load_rows(rows_desc, pointers, first_row, k, IN_WIDTH, BLOCK_K)
            if WEIGHT_K_FIRST:
                b = weight_desc.load([group, k, first_column]).reshape(BLOCK_K, BLOCK_N)
            else:
                b = weight_desc.load([group, first_column, k]).reshape(BLOCK_N, BLOCK_K).T
            acc = tl.dot(a, b, acc, input_precision="ieee")
        column = first_column + tl.arange(0, BLOCK_N)
        pointers_out = out + row.to(tl.int64)[:, None] * OUT_WIDTH + column[None, :]
        mask = tile_mask(row, end, column, OUT_WIDTH, BLOCK_N)
        tl.store(pointers_out, acc.to(out.dtype.element_ty), mask=mask)


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


@triton.jit(do_not_specialize_on_alignment=["dout_index", "rows_index", "row_start"])
def grouped_gemm_wgrad_kernel(
    dout_desc,  # [N, O], ragged, block [BLOCK_K, BLOCK_M]; None when gathering
    dout,
    dout_index,  # int32[N] or None
    rows_desc,  # [N, C], ragged, block [BLOCK_K, BLOCK_N]; None when gathering
    rows,
    rows_index,  # int32[N] or None
    row_start,
    out,  # [G, O, C]
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
        out_row = m + tl.arange(0, BLOCK_M)
        column = n + tl.arange(0, BLOCK_N)
        out_group = out + group.to(tl.int64) * OUT_ROWS * OUT_WIDTH
        pointers = out_group + out_row.to(tl.int64)[:, None] * OUT_WIDTH + column[None, :]
        mask = tile_mask(out_row, OUT_ROWS, column, OUT_WIDTH, BLOCK_N)
        tl.store(pointers, acc.to(out.dtype.element_ty), mask=mask)


def grouped_gemm(
    rows: torch.Tensor,
    weight: torch.Tensor,
    row_start: torch.Tensor,
    out: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
    num_sms: int | None = None,
    config: TileConfig | None = None,
) -> None:
    """out[r] = rows[row_index[r]] @ weight[g]^T for every row r of every group g.

    rows [N, C], or [P, C] with row_index int32[N]; weight [G, O, C]; out [N, O]. See the module docstring.
    """
    config = config or gemm_config(out.shape[1], out.dtype)
    _launch_gemm(rows, weight, row_start, out, row_index, num_sms, config, weight_k_first=False)


def grouped_gemm_dgrad(
    dout: torch.Tensor,
    weight: torch.Tensor,
    row_start: torch.Tensor,
    out: torch.Tensor,
    *,
    num_sms: int | None = None,
    config: TileConfig | None = None,
) -> None:
    """out[r] = dout[r] @ weight[g] for every row r of every group g: dout [N, O], weight [G, O, C], out [N, C]."""
    config = config or gemm_config(out.shape[1], out.dtype)
    _launch_gemm(dout, weight, row_start, out, None, num_sms, config, weight_k_first=True)


def _launch_gemm(rows, weight, row_start, out, row_index, num_sms, config, *, weight_k_first):
    num_rows, out_width = out.shape
    num_groups = weight.shape[0]
    if num_rows == 0:
        return
    block = [config.block_k, config.block_n] if weight_k_first else [config.block_n, config.block_k]
    num_n_tiles = triton.cdiv(out_width, config.block_n)
    num_tiles = max_row_tiles(num_rows, num_groups, config.block_m) * num_n_tiles
    with torch.cuda.device_of(out):
        grouped_gemm_kernel[launch_grid(config, num_tiles, num_sms, out.device)](
            rows_descriptor(rows, row_index, [config.block_m, config.block_k]),
            rows,
            row_index,
            TensorDescriptor.from_tensor(weight, [1, *block]),
            row_start,
            out,
            NUM_GROUPS=num_groups,
            GROUP_LANES=triton.next_power_of_2(num_groups),
            OUT_WIDTH=out_width,
            IN_WIDTH=rows.shape[1],
            WEIGHT_K_FIRST=weight_k_first,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            GROUP_M=config.group_m,
            FLATTEN=config.flatten,
            num_stages=config.num_stages,
            num_warps=config.num_warps,
            maxnreg=config.max_registers,
        )


def rows_descriptor(
    rows: torch.Tensor, row_index: torch.Tensor | None, block: list[int], *, ragged: bool = False
) -> TensorDescriptor | None:
    """TMA descriptor of rows; None when they are gathered (Hopper's TMA cannot)."""
    if row_index is not None:
        return None
    return (create_ragged_descriptor if ragged else TensorDescriptor.from_tensor)(rows, block)


def grouped_gemm_wgrad(
    dout: torch.Tensor,
    rows: torch.Tensor,
    row_start: torch.Tensor,
    out: torch.Tensor,
    *,
    dout_index: torch.Tensor | None = None,
    rows_index: torch.Tensor | None = None,
    num_sms: int | None = None,
    config: TileConfig | None = None,
) -> None:
    """out[g] = sum over the rows r of group g of dout[dout_index[r]]^T rows[rows_index[r]]; no rows give zeros.

    dout [N, O] or [P, O] with dout_index int32[N]; rows [N, C] or [P, C] with rows_index int32[N]; out [G, O, C].
    """
    num_groups, out_rows, out_width = out.shape
    num_rows = (dout if dout_index is None else dout_index).shape[0]
    if num_rows == 0:
        out.zero_()
        return
    config = config or wgrad_config(out_rows, out_width, out.dtype)
    num_tiles = num_groups * triton.cdiv(out_rows, config.block_m) * triton.cdiv(out_width, config.block_n)
    with torch.cuda.device_of(out):
        grouped_gemm_wgrad_kernel[launch_grid(config, num_tiles, num_sms, out.device)](
            rows_descriptor(dout, dout_index, [config.block_k, config.block_m], ragged=True),
            dout,
            dout_index,
            rows_descriptor(rows, rows_index, [config.block_k, config.block_n], ragged=True),
            rows,
            rows_index,
            row_start,
            out,
            NUM_GROUPS=num_groups,
            OUT_ROWS=out_rows,
            OUT_WIDTH=out_width,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            GROUP_M=config.group_m,
            FLATTEN=config.flatten,
            num_stages=config.num_stages,
            num_warps=config.num_warps,
            maxnreg=config.max_registers,
        )
