"""Grouped GEMMs fused with the activation between them and the rows' scales (Triton). See gemm.py.

Letters and formulas: twin/activation.py. In both directions, fused and separate kernels call the functions of
activation.py on the rounded h and da, so their results have the same bits. (The products have the same bits, too:
instructions add steps of 16 features in order, whatever the tile size.)

dscale is summed within blocks of columns, then over the blocks in order (kernels/activation.py); dbias is summed within
a tile, then over the tiles in order. Two more kernels do this, without atomics. Each row has its own sums of dscale, so
calls for ranges of rows (kernels/gemm_parts.py) share one workspace. dbias has one slot per row tile, and tiles of two
ranges may share a slot: so dbias needs whole groups.
"""

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl

from symmoe.kernels import hopper_choice
from symmoe.kernels.activation import Activation, num_scale_sums
from symmoe.kernels.bias_sums import bias_slots
from symmoe.kernels.launch.launch import Named, cached_sizes, ceil_div, fast_jit, launch
from symmoe.kernels.operands import TensorTable, as_pair
from symmoe.kernels.triton.activation import (
    SUM_COLUMNS,
    SUM_STEPS,
    act_slopes,
    act_value,
    add_neighbours,
    addressable,
    gate_column,
    load_hidden,
    scale_terms,
    split_blocks,
    store_hidden,
    up_distance,
)
from symmoe.kernels.triton.bias import sum_row_tiles
from symmoe.kernels.triton.gemm import (
    FP32_CONFIG,
    Gemm,
    group_tiles,
    operands_of,
    product,
    tile_location,
)
from symmoe.kernels.triton.tiles import (
    MAX_COLUMNS,
    TileConfig,
    column_parts,
    halves,
    max_columns,
    plus,
    store_rounded,
)

# Column parts keep few registers busy in the epilogue: 649, not 631 TFLOP/s (docs/decisions/0003-kernels-on-hopper.md).
ACT_CONFIG = TileConfig(block_m=128, block_n=128, block_k=64, num_stages=3, num_warps=8, parts=4)
ACT_FP32_CONFIG = TileConfig(block_m=64, block_n=32, block_k=16, num_stages=3, num_warps=8)
# Without a gate the accumulator is as wide as the tile.
UNGATED_CONFIGS = (
    (256, TileConfig(block_m=128, block_n=256, block_k=64, num_stages=3, num_warps=8, parts=4)),
    (0, ACT_CONFIG),
)

# 16-bit tiles by FFN width: the widest tile that the output fills.
DACT_CONFIGS = (
    (
        256,
        TileConfig(
            block_m=128,
            block_n=256,
            block_k=64,
            num_stages=3,
            num_warps=8,
            parts=8,
            lead=1,
            flatten=True,
        ),
    ),
    (
        0,
        TileConfig(
            block_m=128, block_n=128, block_k=64, num_stages=4, num_warps=8, parts=4, lead=1
        ),
    ),
)
MIN_BLOCK_M = 64  # rows of dact's smallest tile: the workspace's size must not depend on the dtype

SCALE_ROWS = 256  # rows of a program that sums dscale
SCALE_LOADS = tl.constexpr(32)  # loads of a row in flight at a time


def act_config(
    ffn: int, dtype: torch.dtype, activation: Activation, max_columns: int = MAX_COLUMNS
) -> TileConfig:
    """Tiles of grouped_gemm_act, from the FFN width."""
    if dtype == torch.float32:
        return ACT_FP32_CONFIG if activation.is_gated else FP32_CONFIG
    if activation.is_gated:
        return replace(ACT_CONFIG, block_n=max_columns // 2)  # the accumulator has gates and ups
    return next(config for min_ffn, config in UNGATED_CONFIGS if min(ffn, max_columns) >= min_ffn)


def dact_config(ffn: int, dtype: torch.dtype, max_columns: int = MAX_COLUMNS) -> TileConfig:
    """Tiles of grouped_gemm_dact, from the FFN width."""
    if dtype == torch.float32:
        return FP32_CONFIG
    return next(config for min_ffn, config in DACT_CONFIGS if min(ffn, max_columns) >= min_ffn)


def dact_workspace_numel(num_rows, num_groups, ffn, activation):
    return num_scale_sums(ffn) * num_rows + bias_slots(
        num_rows, num_groups, MIN_BLOCK_M
    ) * activation.hidden_width(ffn)


@triton.jit
def add_hidden_bias(gate, up, bias, group, first_column, COLUMNS: tl.constexpr, GEMM: tl.constexpr):
    """Adds bias [G, W] to features in fp32, as add_bias does; without a bias: the features."""
    if bias is not None:
        column = first_column + tl.arange(0, COLUMNS)
        pointers = (
            bias
            + group.to(tl.int64) * GEMM.activation.hidden_width(GEMM.columns)
            + gate_column(column, GEMM.activation)
        )
        gate = plus(
            gate,
            tl.load(pointers, mask=column < GEMM.columns, other=0.0).to(tl.float32)[None, :],
            1.0,
        )
        if GEMM.activation.is_gated:
            pointers = pointers + up_distance(GEMM.activation, GEMM.columns)
            up = plus(
                up,
                tl.load(pointers, mask=column < GEMM.columns, other=0.0).to(tl.float32)[None, :],
                1.0,
            )
    return gate, up


@fast_jit(["rows_desc", "rows", "weight_desc", "h", "a"])
def grouped_gemm_act_kernel(
    rows_desc,  # [N, C], block [BLOCK_M, BLOCK_K]; None when gathering
    rows,  # [P, C], for gathering
    row_index,  # int32[N] or None
    weight_desc,  # see load_weight; None with a table
    weight_table,  # int64[G] or None
    row_range,
    row_scale,
    h,  # [N, W]
    a,  # [N, I]
    bias,  # [G, W] or None
    GEMM: tl.constexpr,
):
    BLOCK_M: tl.constexpr = GEMM.config.block_m
    BLOCK_N: tl.constexpr = GEMM.config.block_n
    PARTS: tl.constexpr = GEMM.config.parts
    PART: tl.constexpr = BLOCK_N // PARTS
    prefix, num_tiles = group_tiles(row_range, GEMM)
    for tile in tl.range(
        tl.program_id(0), num_tiles, tl.num_programs(0), flatten=GEMM.config.flatten
    ):
        location = tile_location(tile, prefix, row_range, GEMM)
        acc = product((rows_desc, rows, row_index, weight_desc, weight_table), location, GEMM)
        group, first_row, end, first_column = location
        row = first_row + tl.arange(0, BLOCK_M)
        if not GEMM.activation.is_gated:
            gate = acc
            up = acc
        elif GEMM.activation.interleave is None:
            gate, up = halves(acc, BLOCK_M, BLOCK_N)
        else:
            gate, up = split_blocks(acc, BLOCK_M, BLOCK_N, GEMM.activation.interleave)
        scale = tl.load(row_scale + row, mask=row < end, other=0.0)
        gates = column_parts(gate, BLOCK_M, BLOCK_N, PARTS)
        ups = column_parts(up, BLOCK_M, BLOCK_N, PARTS)
        for i in tl.static_range(PARTS):
            column = first_column + i * PART
            gate_i, up_i = add_hidden_bias(gates[i], ups[i], bias, group, column, PART, GEMM)
            gate_i = gate_i.to(h.dtype.element_ty)
            up_i = up_i.to(h.dtype.element_ty)
            store_hidden(h, gate_i, up_i, row, end, column, BLOCK_N, GEMM)
            value = act_value(gate_i.to(tl.float32), up_i.to(tl.float32), GEMM.activation)
            store_rounded(
                value * scale[:, None],
                a,
                row,
                end,
                column + tl.arange(0, PART),
                GEMM.columns,
                BLOCK_N,
            )


@triton.jit
def store_column_sums(sums, gate, up, row, end, first_column, GEMM: tl.constexpr):
    """Sums of rounded dh over the rows before `end`, into `sums` [W], a row tile's slot."""
    inside = (row < end)[:, None]
    column = first_column + tl.arange(0, gate.shape[1])
    pointers = sums + gate_column(column, GEMM.activation)
    tl.store(
        pointers,
        tl.sum(tl.where(inside, gate.to(tl.float32), 0.0), axis=0),
        mask=column < GEMM.columns,
    )
    if GEMM.activation.is_gated:
        total = tl.sum(tl.where(inside, up.to(tl.float32), 0.0), axis=0)
        tl.store(
            pointers + up_distance(GEMM.activation, GEMM.columns), total, mask=column < GEMM.columns
        )


@fast_jit(["dout_desc", "dout", "weight_desc", "h", "dh", "a"])
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
    num_rows: tl.int32,
    GEMM: tl.constexpr,
):
    BLOCK_N: tl.constexpr = GEMM.config.block_n
    PART: tl.constexpr = BLOCK_N // GEMM.config.parts
    HALVED: tl.constexpr = (
        PART < SUM_COLUMNS
    )  # parts are half a block of dscale's sum, or a whole one
    LEAD: tl.constexpr = GEMM.config.lead
    tl.static_assert(PART * (1 + HALVED) == SUM_COLUMNS)
    prefix, num_tiles = group_tiles(row_range, GEMM)
    for tile in tl.range(
        tl.program_id(0), num_tiles, tl.num_programs(0), flatten=GEMM.config.flatten
    ):
        location = tile_location(tile, prefix, row_range, GEMM)
        group, first_row, end, first_column = location
        row = first_row + tl.arange(0, GEMM.config.block_m)
        acc = product((dout_desc, dout, row_index, weight_desc, weight_table), location, GEMM)
        scale = tl.load(row_scale + row, mask=row < end, other=0.0)
        da_parts = column_parts(acc, GEMM.config.block_m, BLOCK_N, GEMM.config.parts)
        hidden = ()
        for i in tl.static_range(GEMM.config.parts + LEAD):
            if i < GEMM.config.parts:
                column = first_column + i * PART
                part = load_hidden(h, row, end, column, PART, BLOCK_N, GEMM)
                hidden = hidden + (part,)  # noqa: RUF005 (Triton has no starred expressions)
            if i >= LEAD:
                column = first_column + (i - LEAD) * PART
                gate = hidden[i - LEAD][0].to(tl.float32)
                up = hidden[i - LEAD][1].to(tl.float32)
                # da is rounded before it moves between threads. Rounding the whole tile at once costs registers.
                da = da_parts[i - LEAD].to(dout.dtype.element_ty).to(tl.float32)
                value = act_value(gate, up, GEMM.activation)
                store_rounded(
                    value * scale[:, None],
                    a,
                    row,
                    end,
                    column + tl.arange(0, PART),
                    GEMM.columns,
                    BLOCK_N,
                )
                part_sum = tl.sum(
                    add_neighbours(scale_terms(da, value), SUM_STEPS - HALVED), axis=1
                )
                if HALVED and (i - LEAD) % 2 == 0:
                    half_sum = part_sum
                else:
                    if HALVED:
                        part_sum = half_sum + part_sum
                    sums = scale_sums + (column // SUM_COLUMNS).to(tl.int64) * num_rows + row
                    tl.store(
                        sums,
                        part_sum,
                        mask=(row < end) & (column // SUM_COLUMNS * SUM_COLUMNS < GEMM.columns),
                    )
                ds = da * scale[:, None]  # after the sums: before them it would cost registers
                by_gate, by_up = act_slopes(gate, up, GEMM.activation)
                dgate = (ds * by_gate).to(dh.dtype.element_ty)
                dup = (ds * by_up).to(dh.dtype.element_ty)
                store_hidden(dh, dgate, dup, row, end, column, BLOCK_N, GEMM)
                if bias_sums is not None:
                    slot = bias_sums + (first_row // GEMM.config.block_m + group).to(
                        tl.int64
                    ) * GEMM.activation.hidden_width(GEMM.columns)
                    store_column_sums(slot, dgate, dup, row, end, column, GEMM)


@fast_jit([])
def sum_dscale_kernel(sums, row_range, dscale, num_rows: tl.int32, SIZES: tl.constexpr):
    """dscale from the sums per block of columns, in order; 0 in the tail."""
    row = tl.program_id(0) * SIZES.block + tl.arange(0, SIZES.block)
    mask = row < tl.load(row_range + (2 * SIZES.num_groups - 1))  # where the last group ends
    total = tl.zeros(row.shape, dtype=tl.float32)
    for i in tl.range(0, SIZES.num_sums, loop_unroll_factor=SCALE_LOADS):
        total += tl.load(sums + i * num_rows.to(tl.int64) + row, mask=mask, other=0.0)
    tl.store(dscale + row, total, mask=row < num_rows)


def grouped_gemm_act(
    rows, weight, row_range, row_scale, results, activation, *, bias=None, num_sms=None
):
    (rows, row_index), a = as_pair(rows), results[1]
    num_rows, ffn = a.shape
    num_groups, _, in_width = weight.shape
    gemm, constants = _plan(a.dtype, max_columns(a.device), activation, num_groups, ffn, in_width)
    is_plain = bias is None and row_index is None and not isinstance(weight, TensorTable)
    if is_plain and hopper_choice.launched(
        "grouped_gemm_act",
        (a.device, a.dtype, ffn),
        (num_rows, ffn, activation),
        *(rows, weight, row_range, row_scale, results, activation),
        num_sms=num_sms,
    ):
        return
    launch(
        grouped_gemm_act_kernel,
        gemm.grid(num_rows, num_sms, a.device),
        constants,
        *operands_of(rows, row_index, weight),
        row_range,
        row_scale,
        *results,
        bias,
    )


def grouped_gemm_dact(
    dout, weight, row_range, hidden, gradients, workspace, activation, *, num_sms=None
):
    (dout, row_index), (dh, a, dscale, dbias) = as_pair(dout), gradients
    num_rows, ffn = a.shape
    num_groups, dout_width, _ = weight.shape
    num_partials = num_scale_sums(ffn)
    gemm, constants = _plan(
        a.dtype,
        max_columns(a.device),
        activation,
        num_groups,
        ffn,
        dout_width,
        is_gradient=True,
    )
    if num_rows == 0:
        if dbias is not None:
            dbias.zero_()
        return num_partials
    bias_sums = None if dbias is None else workspace[num_partials * num_rows :]
    assert bias_sums is None or bias_sums.numel() >= bias_slots(
        num_rows, num_groups, gemm.config.block_m
    ) * activation.hidden_width(ffn)
    is_plain = (
        dbias is None and not isinstance(weight, TensorTable) and activation.interleave is None
    )
    if not is_plain or not hopper_choice.launched(
        "grouped_gemm_dact",
        (a.device, a.dtype, ffn),
        (),
        *((dout, row_index), weight, row_range, hidden, (dh, a, workspace), activation),
        num_sms=num_sms,
    ):
        launch(
            grouped_gemm_dact_kernel,
            gemm.grid(num_rows, num_sms, a.device),
            constants,
            *operands_of(dout, row_index, weight),
            row_range,
            *hidden,
            dh,
            a,
            workspace,
            bias_sums,
            num_rows,
        )
    if dscale is not None:
        sum_dact_partials(workspace, row_range, dscale, num_partials)
    if bias_sums is not None:
        sum_row_tiles(bias_sums, row_range, dbias, gemm.config.block_m)
    return num_partials


@functools.cache
def _plan(dtype, max_columns, activation, num_groups, ffn, in_width, is_gradient=False):
    gemm = Gemm(
        config=dact_config(ffn, dtype, max_columns)
        if is_gradient
        else act_config(ffn, dtype, activation, max_columns),
        num_groups=num_groups,
        columns=ffn,
        in_width=in_width,
        activation=Named(addressable(activation, ffn)),
        weight_k_first=is_gradient,
    )
    return gemm, gemm.constants()


def sum_dact_partials(workspace, row_range, dscale, num_partials):
    num_rows = dscale.shape[0]
    launch(
        sum_dscale_kernel,
        (ceil_div(num_rows, SCALE_ROWS),),
        cached_sizes(
            num_groups=row_range.shape[1], num_sums=num_partials, block=SCALE_ROWS, num_warps=4
        ),
        workspace,
        row_range,
        dscale,
        num_rows,
    )
