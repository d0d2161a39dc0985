"""Grouped GEMMs fused with SwiGLU, its gradient and the routing probabilities (Triton). See gemm.py.

    N rows in G groups, C input features, I FFN width, O output features of the second GEMM.
    weight [G,2I,C] of the first GEMM: I gate features, then I up features; h[N,2I] likewise.

    forward   h = round(rows @ weight^T) = [gate, up];  s = silu(gate) * up;  a = round(s * prob)
    backward  da = dout @ weight;  dprob = sum_I(da * s);  ds = da * prob
              dgate = ds * up * silu'(gate);  dup = ds * silu(gate);  a again

s is computed in fp32 from the rounded h by one function in both directions, so a has the same bits in both.
dprob is summed within a tile, then over the column tiles in order, by a second kernel: no atomics.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from symmoe.kernels.gpu.gemm import (
    TileConfig,
    gather_pointers,
    launch_grid,
    load_rows,
    locate_tile,
    max_row_tiles,
    row_tile_prefix,
    rows_descriptor,
    tile_mask,
)

# Column parts keep few registers busy in the epilogue: 650 against 630 TFLOP/s on an H200 (docs/performance.md).
SWIGLU_CONFIG = TileConfig(block_m=128, block_n=128, block_k=64, num_stages=3, num_warps=8, parts=4)
SWIGLU_FP32_CONFIG = TileConfig(block_m=64, block_n=32, block_k=16, num_stages=3, num_warps=8)

# 16-bit tiles by FFN width: the widest tile that the output fills.
DSWIGLU_CONFIGS = (
    (256, TileConfig(block_m=128, block_n=256, block_k=64, num_stages=3, num_warps=8, parts=8, flatten=True)),
    (0, TileConfig(block_m=128, block_n=128, block_k=64, num_stages=4, num_warps=8, parts=8)),
)
DSWIGLU_FP32_CONFIG = TileConfig(block_m=32, block_n=128, block_k=16, num_stages=3, num_warps=8)
PARTIAL_COLUMNS = 128  # of the narrowest tile of dswiglu: the workspace's shape must not depend on the dtype

SUM_BLOCK = 256


def swiglu_config(ffn: int, dtype: torch.dtype) -> TileConfig:
    """Tiles of grouped_gemm_swiglu, from the FFN width."""
    return SWIGLU_FP32_CONFIG if dtype == torch.float32 else SWIGLU_CONFIG


def dswiglu_config(ffn: int, dtype: torch.dtype) -> TileConfig:
    """Tiles of grouped_gemm_dswiglu, from the FFN width."""
    if dtype == torch.float32:
        return DSWIGLU_FP32_CONFIG
    return next(config for least, config in DSWIGLU_CONFIGS if ffn >= least)


def dswiglu_partials_shape(num_rows: int, ffn: int) -> tuple[int, int]:
    """Shape (column tiles, num_rows) of grouped_gemm_dswiglu's fp32 workspace, enough for every dtype."""
    return triton.cdiv(ffn, PARTIAL_COLUMNS), num_rows


@triton.jit
def swiglu(gate, up):
    """sigmoid(gate), silu(gate), silu(gate) * up, in fp32. The one definition of the activation."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    return sigmoid, silu, silu * up


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
def store_swiglu(
    acc_gate,
    acc_up,
    prob,
    h,
    a,
    row,
    end,
    first_column,
    FFN: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rounds and stores h, then the activation of the rounded h, for BLOCK columns of a tile of TILE columns."""
    column = first_column + tl.arange(0, BLOCK)
    mask = tile_mask(row, end, column, FFN, TILE)
    gate = acc_gate.to(h.dtype.element_ty)
    up = acc_up.to(h.dtype.element_ty)
    h_pointers = h + row.to(tl.int64)[:, None] * (2 * FFN) + column[None, :]
    tl.store(h_pointers, gate, mask=mask)
    tl.store(h_pointers + FFN, up, mask=mask)
    _, _, s = swiglu(gate.to(tl.float32), up.to(tl.float32))
    a_pointers = a + row.to(tl.int64)[:, None] * FFN + column[None, :]
    tl.store(a_pointers, (s * prob[:, None]).to(a.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["row_index", "row_start", "row_probs"])
def grouped_gemm_swiglu_kernel(
    rows_desc,  # [N, C], block [BLOCK_M, BLOCK_K]; None when gathering
    rows,  # [P, C], for gathering
    row_index,  # int32[N] or None
    weight_desc,  # [G, 2, I, C], block [1, 2, BLOCK_N, BLOCK_K]
    row_start,
    row_probs,
    h,
    a,
    NUM_GROUPS: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    FFN: tl.constexpr,
    IN_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
    PARTS: tl.constexpr,
):
    NUM_N_TILES: tl.constexpr = (FFN + BLOCK_N - 1) // BLOCK_N
    prefix, num_row_tiles = row_tile_prefix(row_start, NUM_GROUPS, GROUP_LANES, BLOCK_M)
    num_tiles = num_row_tiles * NUM_N_TILES
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN):
        group, first_row, end, n_tile = locate_tile(tile, prefix, row_start, NUM_N_TILES, GROUP_M, BLOCK_M)
        row = first_row + tl.arange(0, BLOCK_M)
        first_column = n_tile * BLOCK_N
        pointers = None
        if row_index is not None:
            pointers = gather_pointers(rows, row_index, row, end, IN_WIDTH, BLOCK_K)
        # Gate and up columns side by side: one wide product instead of two narrow ones reads rows only once.
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, IN_WIDTH, BLOCK_K):
            x = load_rows(rows_desc, pointers, first_row, k, IN_WIDTH, BLOCK_K)
            w = weight_desc.load([group, 0, first_column, k]).reshape(2 * BLOCK_N, BLOCK_K)
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
        gate, up = halves(acc, BLOCK_M, BLOCK_N)
        prob = tl.load(row_probs + row, mask=row < end, other=0.0)
        PART: tl.constexpr = BLOCK_N // PARTS
        gates = column_parts(gate, BLOCK_M, BLOCK_N, PARTS)
        ups = column_parts(up, BLOCK_M, BLOCK_N, PARTS)
        for i in tl.static_range(PARTS):
            store_swiglu(gates[i], ups[i], prob, h, a, row, end, first_column + i * PART, FFN, PART, BLOCK_N)


@triton.jit
def load_h(h, row, end, first_column, FFN: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Gate and up of BLOCK columns of a tile of TILE columns; zeros outside of the group and the matrix."""
    column = first_column + tl.arange(0, BLOCK)
    mask = tile_mask(row, end, column, FFN, TILE)
    pointers = h + row.to(tl.int64)[:, None] * (2 * FFN) + column[None, :]
    return tl.load(pointers, mask=mask, other=0.0), tl.load(pointers + FFN, mask=mask, other=0.0)


@triton.jit
def store_dswiglu(
    da,
    h_part,
    prob,
    dh,
    a,
    row,
    end,
    first_column,
    FFN: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Gradient of h, and the activation, for BLOCK columns of a tile of TILE; returns their share of dprob."""
    column = first_column + tl.arange(0, BLOCK)
    mask = tile_mask(row, end, column, FFN, TILE)
    gate = h_part[0].to(tl.float32)
    up = h_part[1].to(tl.float32)
    sigmoid, silu, s = swiglu(gate, up)
    a_pointers = a + row.to(tl.int64)[:, None] * FFN + column[None, :]
    tl.store(a_pointers, (s * prob[:, None]).to(a.dtype.element_ty), mask=mask)
    ds = da * prob[:, None]
    dgate = ds * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
    dh_pointers = dh + row.to(tl.int64)[:, None] * (2 * FFN) + column[None, :]
    tl.store(dh_pointers, dgate.to(dh.dtype.element_ty), mask=mask)
    tl.store(dh_pointers + FFN, (ds * silu).to(dh.dtype.element_ty), mask=mask)
    return tl.sum(da * s, axis=1)


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["row_index", "row_start", "row_probs", "partials"],
)
def grouped_gemm_dswiglu_kernel(
    dout_desc,  # [N, O], block [BLOCK_M, BLOCK_K]; None when gathering
    dout,  # [P, O], for gathering
    row_index,  # int32[N] or None
    weight_desc,  # [G, O, I], block [1, BLOCK_K, BLOCK_N]
    row_start,
    h,
    row_probs,
    dh,
    a,
    partials,  # [column tiles, num_rows]
    num_rows,
    NUM_GROUPS: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    FFN: tl.constexpr,
    DOUT_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
    PARTS: tl.constexpr,
):
    NUM_N_TILES: tl.constexpr = (FFN + BLOCK_N - 1) // BLOCK_N
    prefix, num_row_tiles = row_tile_prefix(row_start, NUM_GROUPS, GROUP_LANES, BLOCK_M)
    num_tiles = num_row_tiles * NUM_N_TILES
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN):
        group, first_row, end, n_tile = locate_tile(tile, prefix, row_start, NUM_N_TILES, GROUP_M, BLOCK_M)
        row = first_row + tl.arange(0, BLOCK_M)
        first_column = n_tile * BLOCK_N
        pointers = None
        if row_index is not None:
            pointers = gather_pointers(dout, row_index, row, end, DOUT_WIDTH, BLOCK_K)
        da = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, DOUT_WIDTH, BLOCK_K):
            x = load_rows(dout_desc, pointers, first_row, k, DOUT_WIDTH, BLOCK_K)
            w = weight_desc.load([group, k, first_column]).reshape(BLOCK_K, BLOCK_N)
            da = tl.dot(x, w, da, input_precision="ieee")
        prob = tl.load(row_probs + row, mask=row < end, other=0.0)
        PART: tl.constexpr = BLOCK_N // PARTS
        da_parts = column_parts(da, BLOCK_M, BLOCK_N, PARTS)
        partial = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for i in tl.static_range(PARTS):
            column = first_column + i * PART
            h_part = load_h(h, row, end, column, FFN, PART, BLOCK_N)
            partial += store_dswiglu(da_parts[i], h_part, prob, dh, a, row, end, column, FFN, PART, BLOCK_N)
        tl.store(partials + n_tile.to(tl.int64) * num_rows + row, partial, mask=row < end)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["partials", "row_start", "dprob"])
def sum_partials_kernel(
    partials,
    row_start,
    dprob,
    num_rows,
    NUM_GROUPS: tl.constexpr,
    NUM_PARTIALS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < tl.load(row_start + NUM_GROUPS)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for n_tile in range(NUM_PARTIALS):
        total += tl.load(partials + n_tile * num_rows.to(tl.int64) + row, mask=mask, other=0.0)
    tl.store(dprob + row, total, mask=mask)


def grouped_gemm_swiglu(
    rows: torch.Tensor,
    weight: torch.Tensor,
    row_start: torch.Tensor,
    row_probs: torch.Tensor,
    h: torch.Tensor,
    a: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
    num_sms: int | None = None,
    config: TileConfig | None = None,
) -> None:
    """h[r] = rows[row_index[r]] @ weight[g]^T = [gate, up]; a[r] = silu(gate) * up * row_probs[r].

    rows [N, C], or [P, C] with row_index int32[N]; weight [G, 2I, C]; row_probs fp32[N]; h [N, 2I]; a [N, I].
    """
    num_rows, ffn = a.shape
    num_groups, _, in_width = weight.shape
    if num_rows == 0:
        return
    config = config or swiglu_config(ffn, a.dtype)
    gate_up = weight.view(num_groups, 2, ffn, in_width)
    num_tiles = max_row_tiles(num_rows, num_groups, config.block_m) * triton.cdiv(ffn, config.block_n)
    with torch.cuda.device_of(a):
        grouped_gemm_swiglu_kernel[launch_grid(config, num_tiles, num_sms, a.device)](
            rows_descriptor(rows, row_index, [config.block_m, config.block_k]),
            rows,
            row_index,
            TensorDescriptor.from_tensor(gate_up, [1, 2, config.block_n, config.block_k]),
            row_start,
            row_probs,
            h,
            a,
            NUM_GROUPS=num_groups,
            GROUP_LANES=triton.next_power_of_2(num_groups),
            FFN=ffn,
            IN_WIDTH=in_width,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            GROUP_M=config.group_m,
            FLATTEN=config.flatten,
            PARTS=config.parts,
            num_stages=config.num_stages,
            num_warps=config.num_warps,
            maxnreg=config.max_registers,
        )


def grouped_gemm_dswiglu(
    dout: torch.Tensor,
    weight: torch.Tensor,
    row_start: torch.Tensor,
    h: torch.Tensor,
    row_probs: torch.Tensor,
    dh: torch.Tensor,
    a: torch.Tensor,
    dprob: torch.Tensor,
    dprob_partials: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
    num_sms: int | None = None,
    config: TileConfig | None = None,
) -> None:
    """Gradient through the second GEMM and SwiGLU: dh, dprob, and the forward's a once more.

    dout [N, O], or [P, O] with row_index int32[N]; weight [G, O, I]; h, dh [N, 2I]; a [N, I]; row_probs, dprob
    fp32[N]; dprob_partials fp32 of dswiglu_partials_shape(N, I), a workspace of which the first tiles are used.
    """
    num_rows, ffn = a.shape
    num_groups, dout_width, _ = weight.shape
    if num_rows == 0:
        return
    config = config or dswiglu_config(ffn, a.dtype)
    num_n_tiles = triton.cdiv(ffn, config.block_n)
    num_tiles = max_row_tiles(num_rows, num_groups, config.block_m) * num_n_tiles
    with torch.cuda.device_of(a):
        grouped_gemm_dswiglu_kernel[launch_grid(config, num_tiles, num_sms, a.device)](
            rows_descriptor(dout, row_index, [config.block_m, config.block_k]),
            dout,
            row_index,
            TensorDescriptor.from_tensor(weight, [1, config.block_k, config.block_n]),
            row_start,
            h,
            row_probs,
            dh,
            a,
            dprob_partials,
            num_rows,
            NUM_GROUPS=num_groups,
            GROUP_LANES=triton.next_power_of_2(num_groups),
            FFN=ffn,
            DOUT_WIDTH=dout_width,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            GROUP_M=config.group_m,
            FLATTEN=config.flatten,
            PARTS=config.parts,
            num_stages=config.num_stages,
            num_warps=config.num_warps,
            maxnreg=config.max_registers,
        )
        sum_partials_kernel[(triton.cdiv(num_rows, SUM_BLOCK),)](
            dprob_partials,
            row_start,
            dprob,
            num_rows,
            NUM_GROUPS=num_groups,
            NUM_PARTIALS=num_n_tiles,
            BLOCK=SUM_BLOCK,
            num_warps=4,
        )
