"""Grouped GEMMs fused with the activation between them and the rows' scales (Triton). See gemm.py.

Letters and formulas: contract/activation.py. The functions of activation.py work on the rounded h and da in both
directions and in the kernels that are not fused, so their results have the same bits. (The products are the same sums,
too: the order of a sum is that of the instructions, steps of 16 features, and no tile size changes it.)

dscale is summed within blocks of columns, then over the blocks in order (kernels/activation.py); dbias within a tile,
then over the tiles in order: by two more kernels, without atomics. Each row has its own sums of dscale, so calls for
ranges of rows (kernels/gemm_parts.py) share one workspace. The sums of dbias have a slot for a row tile, and tiles
of two ranges may share one: dbias needs whole groups.
"""

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from symmoe.kernels import hopper_choice
from symmoe.kernels.activation import Activation, num_scale_sums
from symmoe.kernels.bias_sums import bias_slots
from symmoe.kernels.launch.integers import ceil_div, next_power_of_2
from symmoe.kernels.launch.launch import Constants, Describe, fast_launch, launch
from symmoe.kernels.tensor_table import TensorTable, packed_and_table
from symmoe.kernels.triton.activation import (
    ANY_POLICY,
    SUM_COLUMNS,
    SUM_STEPS,
    act_slopes,
    act_value,
    activation_fields,
    activation_of,
    add_neighbours,
    gate_column,
    load_hidden,
    scale_terms,
    split_blocks,
    store_hidden,
    up_distance,
)
from symmoe.kernels.triton.bias import sum_row_tiles
from symmoe.kernels.triton.tiles import (
    MOST_COLUMNS,
    Plan,
    TileConfig,
    column_parts,
    describe,
    first_tail_row,
    gather_pointers,
    halves,
    lanes_inside,
    load_rows,
    load_tile,
    load_weight,
    locate_tile,
    matrix_pointer,
    most_columns,
    plus,
    row_tile_prefix,
    tile_constants,
    tile_mask,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DactConfig(TileConfig):
    """Tiles of grouped_gemm_dact, and how its epilogue, which moves five bytes for every two of da, reads and writes.

    lead: column parts of h that are read ahead of the current part.
    prefetch: whether to fetch the tile's h into L2 before the contraction.
    load_policy, store_policy: eviction policies of h, and of dh and a, in L2.
    """

    lead: int = 0
    prefetch: bool = False
    load_policy: str = ""
    store_policy: str = ""


# Column parts keep few registers busy in the epilogue: 650 against 630 TFLOP/s (notes/2026-11-21-gemm-tiles.md).
ACT_CONFIG = TileConfig(block_m=128, block_n=128, block_k=64, num_stages=3, num_warps=8, parts=4)
ACT_FP32_CONFIG = TileConfig(block_m=64, block_n=32, block_k=16, num_stages=3, num_warps=8)
# Without a gate the accumulator is as wide as the tile.
UNGATED_CONFIGS = (
    (256, TileConfig(block_m=128, block_n=256, block_k=64, num_stages=3, num_warps=8, parts=4)),
    (0, ACT_CONFIG),
)
UNGATED_FP32_CONFIG = TileConfig(block_m=64, block_n=64, block_k=16, num_stages=3, num_warps=8)

# 16-bit tiles by FFN width: the widest tile that the output fills.
DACT_CONFIGS = (
    (256, DactConfig(block_m=128, block_n=256, block_k=64, num_stages=3, num_warps=8, parts=8, lead=1, flatten=True)),
    (0, DactConfig(block_m=128, block_n=128, block_k=64, num_stages=4, num_warps=8, parts=4, lead=1)),
)
DACT_FP32_CONFIG = DactConfig(block_m=64, block_n=64, block_k=16, num_stages=3, num_warps=8)
MIN_BLOCK_M = 64  # rows of the smallest tile of dact: the workspace's size must not depend on the dtype

SCALE_ROWS = 256  # rows of a program that sums dscale
SCALE_LOADS = tl.constexpr(32)  # loads of a row in flight at a time
LINE_BYTES = tl.constexpr(128)  # bytes of a line of L2


def act_config(ffn: int, dtype: torch.dtype, activation: Activation, most_columns: int = MOST_COLUMNS) -> TileConfig:
    """Tiles of grouped_gemm_act, from the FFN width."""
    if dtype == torch.float32:
        return ACT_FP32_CONFIG if activation.is_gated else UNGATED_FP32_CONFIG
    if activation.is_gated:
        return replace(ACT_CONFIG, block_n=most_columns // 2)  # the accumulator has gates and ups
    return next(config for least, config in UNGATED_CONFIGS if min(ffn, most_columns) >= least)


def dact_config(ffn: int, dtype: torch.dtype, most_columns: int = MOST_COLUMNS) -> DactConfig:
    """Tiles of grouped_gemm_dact, from the FFN width."""
    if dtype == torch.float32:
        return DACT_FP32_CONFIG
    return next(config for least, config in DACT_CONFIGS if min(ffn, most_columns) >= least)


def dact_workspace_numel(num_rows: int, num_groups: int, ffn: int, activation: Activation) -> int:
    return num_scale_sums(ffn) * num_rows + bias_slots(num_rows, num_groups, MIN_BLOCK_M) * activation.hidden_width(ffn)


@triton.jit
def load_both(
    desc,
    pointer,
    group,
    first_column,
    k,
    ACTIVATION: tl.constexpr,
    FFN: tl.constexpr,
    IN_WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Right operand of rows @ weight for BLOCK_N columns of the result: [BLOCK_K, 2 * BLOCK_N] if gated, else as wide.

    Gate and up features side by side, or alternating as in the weight: one wide product instead of two narrow ones
    reads rows only once. desc, pointer: as in load_weight; for two halves, desc describes [G, 2, I, C] with
    blocks [1, 2, BLOCK_N, BLOCK_K].
    """
    if not ACTIVATION.is_gated:
        tile = load_weight(desc, pointer, group, first_column, k, FFN, IN_WIDTH, False, BLOCK_N, BLOCK_K)
    elif ACTIVATION.interleave is not None:
        tile = load_weight(desc, pointer, group, 2 * first_column, k, 2 * FFN, IN_WIDTH, False, 2 * BLOCK_N, BLOCK_K)
    elif desc is not None:
        tile = desc.load([group, 0, first_column, k]).reshape(2 * BLOCK_N, BLOCK_K).T
    else:
        lane = tl.arange(0, 2 * BLOCK_N)
        column = lane % BLOCK_N
        n_mask = None
        if FFN % BLOCK_N != 0:
            n_mask = first_column + column < FFN
        first = pointer + first_column.to(tl.int64) * IN_WIDTH + k
        k_mask = lanes_inside(k, IN_WIDTH, BLOCK_K)
        feature = lane // BLOCK_N * FFN + column
        tile = load_tile(first, feature, tl.arange(0, BLOCK_K), n_mask, k_mask, IN_WIDTH).T
    return tile


@triton.jit
def add_hidden_bias(
    gate,
    up,
    bias,
    group,
    first_column,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
    FFN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds bias [G, W] to features in fp32, same as add_bias; without a bias: the features."""
    if bias is not None:
        column = first_column + tl.arange(0, COLUMNS)
        pointers = bias + group.to(tl.int64) * WIDTH + gate_column(column, ACTIVATION)
        gate = plus(gate, tl.load(pointers, mask=column < FFN, other=0.0).to(tl.float32)[None, :], 1.0)
        if ACTIVATION.is_gated:
            pointers = pointers + up_distance(ACTIVATION, FFN)
            up = plus(up, tl.load(pointers, mask=column < FFN, other=0.0).to(tl.float32)[None, :], 1.0)
    return gate, up


@triton.jit
def store_activation(
    gate,
    up,
    scale,
    a,
    row,
    end,
    first_column,
    ACTIVATION: tl.constexpr,
    FFN: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    POLICY: tl.constexpr = ANY_POLICY,
):
    """Stores a for COLUMNS columns of a tile of TILE columns; returns act(h), both from rounded features in fp32."""
    value = act_value(gate, up, ACTIVATION)
    column = first_column + tl.arange(0, COLUMNS)
    pointers = a + row.to(tl.int64)[:, None] * FFN + column[None, :]
    mask = tile_mask(row, end, column, FFN, TILE)
    tl.store(pointers, (value * scale[:, None]).to(a.dtype.element_ty), mask=mask, eviction_policy=POLICY)
    return value


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["row_index", "weight_table", "row_range", "row_scale", "bias"])
def grouped_gemm_act_kernel(
    rows_desc,  # [N, C], block [BLOCK_M, BLOCK_K]; None when gathering
    rows,  # [P, C], for gathering
    row_index,  # int32[N] or None
    weight_desc,  # see load_both; None with a table
    weight_table,  # int64[G] or None
    row_range,
    row_scale,
    h,  # [N, W]
    a,  # [N, I]
    bias,  # [G, W] or None
    FIELDS: tl.constexpr,
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
    ACTIVATION: tl.constexpr = activation_of(FIELDS)
    NUM_HALVES: tl.constexpr = 2 if ACTIVATION.is_gated else 1
    NUM_N_TILES: tl.constexpr = (FFN + BLOCK_N - 1) // BLOCK_N
    prefix, num_row_tiles = row_tile_prefix(row_range, NUM_GROUPS, GROUP_LANES, BLOCK_M)
    num_tiles = num_row_tiles * NUM_N_TILES
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN):
        group, first_row, end, n_tile = locate_tile(tile, prefix, row_range, NUM_GROUPS, NUM_N_TILES, GROUP_M, BLOCK_M)
        row = first_row + tl.arange(0, BLOCK_M)
        first_column = n_tile * BLOCK_N
        pointers = None
        if row_index is not None:
            pointers = gather_pointers(rows, row_index, row, end, IN_WIDTH, BLOCK_K)
        weight = None
        if weight_table is not None:
            weight = matrix_pointer(weight_table, group, rows.dtype.element_ty)
        acc = tl.zeros((BLOCK_M, NUM_HALVES * BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, IN_WIDTH, BLOCK_K):
            x = load_rows(rows_desc, pointers, first_row, k, IN_WIDTH, BLOCK_K)
            w = load_both(weight_desc, weight, group, first_column, k, ACTIVATION, FFN, IN_WIDTH, BLOCK_N, BLOCK_K)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        if not ACTIVATION.is_gated:
            gate = acc
            up = acc
        elif ACTIVATION.interleave is None:
            gate, up = halves(acc, BLOCK_M, BLOCK_N)
        else:
            gate, up = split_blocks(acc, BLOCK_M, BLOCK_N, ACTIVATION.interleave)
        scale = tl.load(row_scale + row, mask=row < end, other=0.0)
        PART: tl.constexpr = BLOCK_N // PARTS
        gates = column_parts(gate, BLOCK_M, BLOCK_N, PARTS)
        ups = column_parts(up, BLOCK_M, BLOCK_N, PARTS)
        for i in tl.static_range(PARTS):
            column = first_column + i * PART
            gate_i, up_i = add_hidden_bias(
                gates[i], ups[i], bias, group, column, ACTIVATION, NUM_HALVES * FFN, FFN, PART
            )
            gate_i = gate_i.to(h.dtype.element_ty)
            up_i = up_i.to(h.dtype.element_ty)
            store_hidden(h, gate_i, up_i, row, end, column, ACTIVATION, FFN, BLOCK_M, PART, BLOCK_N)
            store_activation(
                gate_i.to(tl.float32),
                up_i.to(tl.float32),
                scale,
                a,
                row,
                end,
                column,
                ACTIVATION,
                FFN,
                PART,
                BLOCK_N,
            )


@triton.jit
def prefetch_hidden(
    h,
    first_row,
    end,
    first_column,
    ACTIVATION: tl.constexpr,
    FFN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Prefetches a tile's h into L2, every line once; addresses outside of the group or the row are clamped."""
    LINE: tl.constexpr = LINE_BYTES * 8 // h.dtype.element_ty.primitive_bitwidth
    BOTH: tl.constexpr = ACTIVATION.interleave is not None
    WIDTH: tl.constexpr = 2 * FFN if ACTIVATION.is_gated else FFN
    SPAN: tl.constexpr = 2 * BLOCK_N if BOTH else BLOCK_N
    row = tl.minimum(first_row + tl.arange(0, BLOCK_M), end - 1)
    column = (2 * first_column if BOTH else first_column) + tl.arange(0, SPAN // LINE) * LINE
    column = tl.minimum(column, WIDTH - 1)
    pointers = h + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    prefetch_lines(pointers)
    if ACTIVATION.is_gated and not BOTH:
        prefetch_lines(h + row.to(tl.int64)[:, None] * WIDTH + tl.minimum(column + FFN, WIDTH - 1)[None, :])


@triton.jit
def prefetch_lines(pointers):
    """Prefetches the lines of the pointers into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def store_column_sums(
    sums,
    gate,
    up,
    row,
    end,
    first_column,
    ACTIVATION: tl.constexpr,
    FFN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums of rounded dh over the rows before `end`, into `sums` [W], a row tile's slot."""
    inside = (row < end)[:, None]
    column = first_column + tl.arange(0, COLUMNS)
    pointers = sums + gate_column(column, ACTIVATION)
    tl.store(pointers, tl.sum(tl.where(inside, gate.to(tl.float32), 0.0), axis=0), mask=column < FFN)
    if ACTIVATION.is_gated:
        total = tl.sum(tl.where(inside, up.to(tl.float32), 0.0), axis=0)
        tl.store(pointers + up_distance(ACTIVATION, FFN), total, mask=column < FFN)


@fast_launch
@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=[
        "row_index",
        "weight_table",
        "row_range",
        "row_scale",
        "scale_sums",
        "bias_sums",
    ],
)
def grouped_gemm_dact_kernel(
    dout_desc,  # [N, O], block [BLOCK_M, BLOCK_K]; None when gathering
    dout,  # [P, O], for gathering
    row_index,  # int32[N] or None
    weight_desc,  # see load_weight; None with a table
    weight_table,  # int64[G] or None
    row_range,
    h,  # [N, W]
    row_scale,
    dh,  # [N, W]
    a,  # [N, I]
    scale_sums,  # [blocks of columns, num_rows]
    bias_sums,  # [slots of row tiles, W] or None
    num_rows,
    FIELDS: tl.constexpr,
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
    LEAD: tl.constexpr,
    PREFETCH: tl.constexpr,
    LOAD_POLICY: tl.constexpr,
    STORE_POLICY: tl.constexpr,
):
    ACTIVATION: tl.constexpr = activation_of(FIELDS)
    WIDTH: tl.constexpr = 2 * FFN if ACTIVATION.is_gated else FFN
    NUM_N_TILES: tl.constexpr = (FFN + BLOCK_N - 1) // BLOCK_N
    PART: tl.constexpr = BLOCK_N // PARTS
    HALVED: tl.constexpr = PART < SUM_COLUMNS  # parts are half a block of dscale's sum, or a whole one
    tl.static_assert(PART * (1 + HALVED) == SUM_COLUMNS)
    prefix, num_row_tiles = row_tile_prefix(row_range, NUM_GROUPS, GROUP_LANES, BLOCK_M)
    num_tiles = num_row_tiles * NUM_N_TILES
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=FLATTEN):
        group, first_row, end, n_tile = locate_tile(tile, prefix, row_range, NUM_GROUPS, NUM_N_TILES, GROUP_M, BLOCK_M)
        row = first_row + tl.arange(0, BLOCK_M)
        first_column = n_tile * BLOCK_N
        pointers = None
        if row_index is not None:
            pointers = gather_pointers(dout, row_index, row, end, DOUT_WIDTH, BLOCK_K)
        weight = None
        if weight_table is not None:
            weight = matrix_pointer(weight_table, group, dout.dtype.element_ty)
        if PREFETCH:
            prefetch_hidden(h, first_row, end, first_column, ACTIVATION, FFN, BLOCK_M, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in tl.range(0, DOUT_WIDTH, BLOCK_K):
            x = load_rows(dout_desc, pointers, first_row, k, DOUT_WIDTH, BLOCK_K)
            w = load_weight(weight_desc, weight, group, first_column, k, FFN, DOUT_WIDTH, True, BLOCK_N, BLOCK_K)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        scale = tl.load(row_scale + row, mask=row < end, other=0.0)
        da_parts = column_parts(acc, BLOCK_M, BLOCK_N, PARTS)
        hidden = ()
        for i in tl.static_range(PARTS + LEAD):
            if i < PARTS:
                part = load_hidden(
                    h,
                    row,
                    end,
                    first_column + i * PART,
                    ACTIVATION,
                    FFN,
                    BLOCK_M,
                    PART,
                    BLOCK_N,
                    LOAD_POLICY,
                )
                hidden = hidden + (part,)  # noqa: RUF005 (Triton has no starred expressions)
            if i >= LEAD:
                column = first_column + (i - LEAD) * PART
                gate = hidden[i - LEAD][0].to(tl.float32)
                up = hidden[i - LEAD][1].to(tl.float32)
                # It is rounded before it moves between threads. To round the whole tile at once costs registers.
                da = da_parts[i - LEAD].to(dout.dtype.element_ty).to(tl.float32)
                value = store_activation(
                    gate,
                    up,
                    scale,
                    a,
                    row,
                    end,
                    column,
                    ACTIVATION,
                    FFN,
                    PART,
                    BLOCK_N,
                    STORE_POLICY,
                )
                part_sum = tl.sum(add_neighbours(scale_terms(da, value), SUM_STEPS - HALVED), axis=1)
                if HALVED and (i - LEAD) % 2 == 0:
                    left = part_sum
                else:
                    if HALVED:
                        part_sum = left + part_sum
                    place = scale_sums + (column // SUM_COLUMNS).to(tl.int64) * num_rows + row
                    tl.store(place, part_sum, mask=(row < end) & (column // SUM_COLUMNS * SUM_COLUMNS < FFN))
                ds = da * scale[:, None]
                by_gate, by_up = act_slopes(gate, up, ACTIVATION)
                dgate = (ds * by_gate).to(dh.dtype.element_ty)
                dup = (ds * by_up).to(dh.dtype.element_ty)
                store_hidden(
                    dh,
                    dgate,
                    dup,
                    row,
                    end,
                    column,
                    ACTIVATION,
                    FFN,
                    BLOCK_M,
                    PART,
                    BLOCK_N,
                    STORE_POLICY,
                )
                if bias_sums is not None:
                    slot = bias_sums + (first_row // BLOCK_M + group).to(tl.int64) * WIDTH
                    store_column_sums(slot, dgate, dup, row, end, column, ACTIVATION, FFN, PART)


@fast_launch
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["scale_sums", "row_range", "dscale"])
def sum_dscale_kernel(
    scale_sums,
    row_range,
    dscale,
    num_rows,
    NUM_GROUPS: tl.constexpr,
    NUM_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dscale from the sums per block of columns, in order; 0 in the tail."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < first_tail_row(row_range, NUM_GROUPS)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.range(0, NUM_SUMS, loop_unroll_factor=SCALE_LOADS):
        total += tl.load(scale_sums + i * num_rows.to(tl.int64) + row, mask=mask, other=0.0)
    tl.store(dscale + row, total, mask=row < num_rows)


def grouped_gemm_act(
    rows: torch.Tensor,
    weight: torch.Tensor | TensorTable,
    row_range: torch.Tensor,
    row_scale: torch.Tensor,
    h: torch.Tensor,
    a: torch.Tensor,
    activation: Activation,
    *,
    row_index: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    num_sms: int | None = None,
    config: TileConfig | None = None,
) -> None:
    num_rows, ffn = a.shape
    num_groups, _, in_width = weight.shape
    plan = _act_plan(config, a.dtype, most_columns(a.device), activation, num_groups, ffn, in_width)
    if num_rows == 0:
        return
    is_table = isinstance(weight, TensorTable)
    is_plain = config is None and bias is None and row_index is None and not is_table
    on_hopper = hopper_choice.hopper_kernels(a.device, a.dtype, ffn) if is_plain else None
    if on_hopper is not None and on_hopper.takes_act(num_rows, ffn, activation):
        on_hopper.launch_act(rows, weight, row_range, row_scale, h, a, activation, num_sms=num_sms)
        return
    launch(
        grouped_gemm_act_kernel,
        plan.grid(num_rows, num_groups, num_sms, a.device),
        plan.constants,
        rows if row_index is None else None,
        rows,
        row_index,
        *packed_and_table(weight),
        row_range,
        row_scale,
        h,
        a,
        bias,
    )


@functools.cache
def _act_plan(
    config: TileConfig | None,
    dtype: torch.dtype,
    most_columns: int,
    activation: Activation,
    num_groups: int,
    ffn: int,
    in_width: int,
) -> Plan:
    fields = activation_fields(activation, ffn)
    config = config or act_config(ffn, dtype, activation, most_columns)
    constants = {
        "FIELDS": fields,
        "NUM_GROUPS": num_groups,
        "GROUP_LANES": next_power_of_2(num_groups),
        "FFN": ffn,
        "IN_WIDTH": in_width,
        "PARTS": config.parts,
        **tile_constants(config),
    }
    descriptors = {0: describe([config.block_m, config.block_k]), 3: _describe_both(activation, config)}
    return Plan(config, ceil_div(ffn, config.block_n), Constants(constants, descriptors))


def _describe_both(activation: Activation, config: TileConfig) -> Describe:
    """Function from a packed weight to the descriptor that load_both takes."""
    if not activation.is_gated:
        return describe([1, config.block_n, config.block_k])
    if activation.interleave is not None:
        return describe([1, 2 * config.block_n, config.block_k])

    def describe_halves(weight: torch.Tensor) -> TensorDescriptor:
        num_groups, width, in_width = weight.shape
        gate_up = weight.view(num_groups, 2, width // 2, in_width)
        return TensorDescriptor.from_tensor(gate_up, [1, 2, config.block_n, config.block_k])

    return describe_halves


def grouped_gemm_dact(
    dout: torch.Tensor,
    weight: torch.Tensor | TensorTable,
    row_range: torch.Tensor,
    h: torch.Tensor,
    row_scale: torch.Tensor,
    dh: torch.Tensor,
    a: torch.Tensor,
    dscale: torch.Tensor | None,
    workspace: torch.Tensor,
    activation: Activation,
    *,
    row_index: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
    num_sms: int | None = None,
    config: DactConfig | None = None,
) -> int:
    num_rows, ffn = a.shape
    num_groups, dout_width, _ = weight.shape
    num_partials = num_scale_sums(ffn)
    plan = _dact_plan(config, a.dtype, most_columns(a.device), activation, num_groups, ffn, dout_width)
    if num_rows == 0:
        if dbias is not None:
            dbias.zero_()
        return num_partials
    bias_sums = None
    if dbias is not None:
        bias_sums = workspace[num_partials * num_rows :]
        num_slots = bias_slots(num_rows, num_groups, plan.config.block_m)
        assert bias_sums.numel() >= num_slots * activation.hidden_width(ffn)
    is_table = isinstance(weight, TensorTable)
    on_hopper = None
    if config is None and dbias is None and not is_table and activation.interleave is None:
        on_hopper = hopper_choice.hopper_kernels(a.device, a.dtype, ffn)
    if on_hopper is not None:
        on_hopper.launch_dact(
            dout, weight, row_range, h, row_scale, dh, a, workspace, activation, row_index=row_index, num_sms=num_sms
        )
    else:
        launch(
            grouped_gemm_dact_kernel,
            plan.grid(num_rows, num_groups, num_sms, a.device),
            plan.constants,
            dout if row_index is None else None,
            dout,
            row_index,
            *packed_and_table(weight),
            row_range,
            h,
            row_scale,
            dh,
            a,
            workspace,
            bias_sums,
            num_rows,
        )
    if dscale is not None:
        sum_dact_partials(workspace, row_range, dscale, num_partials)
    if dbias is not None and bias_sums is not None:
        sum_row_tiles(bias_sums, row_range, dbias, plan.config.block_m)
    return num_partials


def sum_dact_partials(
    workspace: torch.Tensor, row_range: torch.Tensor, dscale: torch.Tensor, num_partials: int
) -> None:
    num_rows = dscale.shape[0]
    if num_rows == 0:
        return
    constants = _sum_dscale_constants(row_range.shape[1], num_partials)
    launch(sum_dscale_kernel, (ceil_div(num_rows, SCALE_ROWS),), constants, workspace, row_range, dscale, num_rows)


@functools.cache
def _dact_plan(
    config: DactConfig | None,
    dtype: torch.dtype,
    most_columns: int,
    activation: Activation,
    num_groups: int,
    ffn: int,
    dout_width: int,
) -> Plan:
    fields = activation_fields(activation, ffn)
    config = config or dact_config(ffn, dtype, most_columns)
    constants = {
        "FIELDS": fields,
        "NUM_GROUPS": num_groups,
        "GROUP_LANES": next_power_of_2(num_groups),
        "FFN": ffn,
        "DOUT_WIDTH": dout_width,
        "PARTS": config.parts,
        "LEAD": config.lead,
        "PREFETCH": config.prefetch,
        "LOAD_POLICY": config.load_policy,
        "STORE_POLICY": config.store_policy,
        **tile_constants(config),
    }
    descriptors = {0: describe([config.block_m, config.block_k]), 3: describe([1, config.block_k, config.block_n])}
    return Plan(config, ceil_div(ffn, config.block_n), Constants(constants, descriptors))


@functools.cache
def _sum_dscale_constants(num_groups: int, num_sums: int) -> Constants:
    return Constants({"NUM_GROUPS": num_groups, "NUM_SUMS": num_sums, "BLOCK": SCALE_ROWS, "num_warps": 4})
