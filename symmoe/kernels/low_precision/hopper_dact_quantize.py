"""dact_quantize for Hopper: E4M3 in blocks of 128, every number computed once (Gluon, persistent, two programs per SM).

A tile is TILE tokens by TILE features. cp.async loads it to shared memory, where dgate, dup and a replace gates, ups
and da. Then dgate and dup are quantised by rows, and all three by columns, one after the other. As soon as the columns
of a part have been read, the same part of the next tile begins to load there. Two programs share an SM: the loads of
one run during the arithmetic of the other.

Instructions are the bottleneck, about 70 for each number of a:

    amax        four threads have a block of 128 numbers, 32 in each: two shuffles, and two divisions for 32 numbers
    transposing a thread reads pairs of features of 32 tokens, and writes 16 codes of a feature at once
    not finite  the multiplier of a block that is not finite is NaN, so all of its codes are NaN
    rounding    works on pairs because only a store takes the result; the numbers to quantise are read again

With ROWS and PAIRS no access to shared memory has a bank conflict, because LAYOUT permutes pieces of 32 bytes by their
16 rows.

Formulas and rounded numbers are the same as in triton/activation.py and low_precision/quantize.py.
"""

import functools
from dataclasses import dataclass

import torch
import triton.language as tl

from symmoe.kernels import control, formats
from symmoe.kernels.activation import Activation, num_scale_sums
from symmoe.kernels.hopper.gluon_names import async_copy, copy_async, gl, gluon
from symmoe.kernels.hopper.pipeline import Groups, locate_tile, row_tile_prefix
from symmoe.kernels.launch.launch import Constants, fast_jit, launch
from symmoe.kernels.low_precision.codes import block_scales_or_nan, e4m3_code, magnitude_bits
from symmoe.kernels.triton.activation import SUM_STEPS, act_gradients, add_neighbours
from symmoe.kernels.triton.bias import sum_tile
from symmoe.kernels.triton.tiles import launch_grid

TILE = gl.constexpr(formats.TILE)  # tokens, and features
STRIP = gl.constexpr(64)  # rows
NUM_SUMS = gl.constexpr(num_scale_sums(formats.TILE))  # sums of dscale in a tile's row
ALL = gl.constexpr(tl.PropagateNan.ALL)
PROGRAMS_PER_SM, NUM_WARPS, REGISTERS = 2, 8, 128

LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(16, 16, 4, [1, 0]))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))
ROWS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [32, 0], [16, 0], [1, 0]],
        warp_bases=[[2, 0], [4, 0], [8, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)
SUMS = gl.constexpr(  # layout of ROWS after adding neighbours
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1]],
        lane_bases=[[0, 0], [0, 0], [32, 0], [16, 0], [1, 0]],
        warp_bases=[[2, 0], [4, 0], [8, 0]],
        block_bases=[],
        shape=[64, 2],
    )
)
COLUMN_LANES, COLUMN_WARPS = [[16, 0], [32, 0], [0, 2], [0, 4], [0, 8]], [[0, 16], [0, 32], [0, 64]]
TOKENS = [[1, 0], [2, 0], [4, 0], [8, 0], [64, 0]]
# Columns are read as pairs of features and written 16 tokens at a time: a thread has the same numbers both times.
PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], *TOKENS], COLUMN_LANES, COLUMN_WARPS, block_bases=[], shape=[128, 128]
    )
)
COLUMNS = gl.constexpr(
    gl.DistributedLinearLayout(
        [*TOKENS, [0, 1]], COLUMN_LANES, COLUMN_WARPS, block_bases=[], shape=[128, 128]
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DactQuantize(Groups):
    """The constants of one kernel. ffn: I. scale: BlockFormat's. group_m: as in Pipeline."""

    ffn: int
    activation: Activation
    scale: str
    group_m: int = 8

    @property
    def num_n_tiles(self) -> int:
        """Tiles of features."""
        return self.ffn // formats.TILE


@gluon.jit
def copy_part(shared, matrix, first_row, end, column, WIDTH: gl.constexpr):
    """Begins to copy a tile of a matrix of WIDTH columns to shared memory, zeros from row `end` on."""
    row = first_row + gl.arange(0, TILE, gl.SliceLayout(1, COPY))
    columns = column + gl.arange(0, TILE, gl.SliceLayout(0, COPY))
    pointers = matrix + row.to(gl.int64)[:, None] * WIDTH + columns[None, :]
    copy_async(shared, pointers, mask=(row < end)[:, None])


@gluon.jit
def larger(a, b):
    """The larger number; NaN if one is NaN."""
    return gl.maximum(a, b, propagate_nan=ALL)


@gluon.jit
def scales_of(x, axis: gl.constexpr, PLAN: gl.constexpr):
    """Stored scales, and multipliers, of blocks: each line of x along the axis is a block."""
    SCALE: gl.constexpr = PLAN.scale
    return block_scales_or_nan(magnitude_bits(gl.reduce(gl.abs(x), axis, larger)), SCALE)


@gluon.jit
def store_rows(shared, first_row, end, block, data, scale, PLAN: gl.constexpr):
    """Quantises a tile [tokens, features] by rows; each row of the tile is a block."""
    WIDTH: gl.constexpr = 2 * PLAN.ffn
    column = block * TILE + gl.arange(0, TILE, gl.SliceLayout(0, ROWS))
    for i in gl.static_range(TILE // STRIP):
        row = first_row + STRIP * i + gl.arange(0, STRIP, gl.SliceLayout(1, ROWS))
        x = shared.slice(STRIP * i, STRIP).load(ROWS).to(gl.float32)
        stored, multiplier = scales_of(x, 1, PLAN)
        codes = e4m3_code(x * multiplier[:, None])
        gl.store(
            data + row.to(gl.int64)[:, None] * WIDTH + column[None, :],
            codes,
            mask=(row < end)[:, None],
        )
        gl.store(scale + row.to(gl.int64) * (WIDTH // TILE) + block, stored, mask=row < end)


@gluon.jit
def store_columns(
    shared, token_tile, num_tiles, first, WIDTH: gl.constexpr, data, scale, sums, PLAN: gl.constexpr
):
    """Quantises a tile [tokens, features] by columns; each column is a block. WIDTH: columns of the matrix.

    sums [WIDTH]: the columns' sums, or None.
    """
    x = gl.convert_layout(shared.load(PAIRS), COLUMNS).to(gl.float32)
    feature = first + gl.arange(0, TILE, gl.SliceLayout(0, COLUMNS))
    if sums is not None:
        gl.store(sums + feature, gl.convert_layout(sum_tile(x), gl.SliceLayout(0, COLUMNS)))
    stored, multiplier = scales_of(x, 0, PLAN)
    codes = e4m3_code(x * multiplier[None, :])
    token = token_tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, COLUMNS))
    gl.store(data + feature.to(gl.int64)[None, :] * (num_tiles * TILE) + token[:, None], codes)
    gl.store(scale + token_tile.to(gl.int64) * WIDTH + feature, stored)


@gluon.jit
def differentiate(
    gates, ups, das, first_row, end, row_scale, tile_sums, num_rows, PLAN: gl.constexpr
):
    """Replaces a tile's gates, ups and da by dgate, dup and a. tile_sums: sums of dscale by blocks of columns."""
    ACTIVATION: gl.constexpr = PLAN.activation
    DTYPE: gl.constexpr = gates.dtype
    for i in gl.static_range(TILE // STRIP):
        row = first_row + STRIP * i + gl.arange(0, STRIP, gl.SliceLayout(1, ROWS))
        factor = gl.load(row_scale + row, mask=row < end, other=0.0)[:, None]
        gate = gates.slice(STRIP * i, STRIP).load(ROWS).to(gl.float32)
        up = ups.slice(STRIP * i, STRIP).load(ROWS).to(gl.float32)
        da = das.slice(STRIP * i, STRIP).load(ROWS).to(gl.float32)
        a, dgate, dup, terms = act_gradients(gate, up, da, factor, ACTIVATION)
        gates.slice(STRIP * i, STRIP).store(dgate.to(DTYPE))
        ups.slice(STRIP * i, STRIP).store(dup.to(DTYPE))
        das.slice(STRIP * i, STRIP).store(a.to(DTYPE))
        sums = gl.convert_layout(add_neighbours(terms, SUM_STEPS), SUMS)
        row = first_row + STRIP * i + gl.arange(0, STRIP, gl.SliceLayout(1, SUMS))
        block = gl.arange(0, NUM_SUMS, gl.SliceLayout(0, SUMS))
        pointers = tile_sums + block.to(gl.int64)[None, :] * num_rows + row[:, None]
        gl.store(pointers, sums, mask=(row < end)[:, None])


@fast_jit(["da", "h", "data", "column_data", "a_column_data"], jit=gluon.jit)
def hopper_dact_quantize_kernel(
    da,  # [N, I]
    h,  # [N, 2I]
    row_scale,  # fp32[N]
    row_range,
    workspace,  # fp32 [blocks of features, N]
    data,  # bytes [N, 2I]
    scale,  # fp32 [N, blocks of 2I]
    column_data,  # bytes [2I, num_tiles * TILE]
    column_scale,  # fp32, in memory [num_tiles, 2I]
    a_column_data,  # bytes [I, num_a_tiles * TILE]
    a_column_scale,  # fp32, in memory [num_a_tiles, I]
    bias_sums,  # fp32 [slots of row tiles, 2I], or None
    num_rows: gl.int32,
    num_tiles: gl.int32,
    num_a_tiles: gl.int32,
    PLAN: gl.constexpr,
):
    gates = gl.allocate_shared_memory(h.dtype.element_ty, [TILE, TILE], LAYOUT)
    ups = gl.allocate_shared_memory(h.dtype.element_ty, [TILE, TILE], LAYOUT)
    das = gl.allocate_shared_memory(h.dtype.element_ty, [TILE, TILE], LAYOUT)
    prefix, num_row_tiles = row_tile_prefix(row_range, PLAN)
    num_used = num_row_tiles * PLAN.num_n_tiles
    tile = gl.program_id(0)
    if tile < num_used:
        _group, first_row, end, _token_tile, n_tile = locate_tile(tile, prefix, row_range, PLAN)
        copy_part(gates, h, first_row, end, n_tile * TILE, 2 * PLAN.ffn)
        copy_part(ups, h, first_row, end, PLAN.ffn + n_tile * TILE, 2 * PLAN.ffn)
        copy_part(das, da, first_row, end, n_tile * TILE, PLAN.ffn)
        async_copy.commit_group()
        for this in range(tile, num_used, gl.num_programs(0)):
            group, first_row, end, token_tile, n_tile = locate_tile(this, prefix, row_range, PLAN)
            async_copy.wait_group(0)
            tile_sums = workspace + n_tile.to(gl.int64) * NUM_SUMS * num_rows
            differentiate(gates, ups, das, first_row, end, row_scale, tile_sums, num_rows, PLAN)
            store_rows(gates, first_row, end, n_tile, data, scale, PLAN)
            store_rows(ups, first_row, end, PLAN.num_n_tiles + n_tile, data, scale, PLAN)
            slot = (
                None
                if bias_sums is None
                else bias_sums + (first_row // TILE + group).to(gl.int64) * (2 * PLAN.ffn)
            )
            # Past the last tile, the last tile is loaded again.
            following = gl.minimum(this + gl.num_programs(0), num_used - 1)
            _group, next_row, next_end, _token_tile, next_n_tile = locate_tile(
                following, prefix, row_range, PLAN
            )
            column = n_tile * TILE
            next_column = next_n_tile * TILE
            store_columns(
                gates,
                token_tile,
                num_tiles,
                column,
                2 * PLAN.ffn,
                column_data,
                column_scale,
                slot,
                PLAN,
            )
            copy_part(gates, h, next_row, next_end, next_column, 2 * PLAN.ffn)
            store_columns(
                ups,
                token_tile,
                num_tiles,
                PLAN.ffn + column,
                2 * PLAN.ffn,
                column_data,
                column_scale,
                slot,
                PLAN,
            )
            copy_part(ups, h, next_row, next_end, PLAN.ffn + next_column, 2 * PLAN.ffn)
            store_columns(
                das,
                token_tile,
                num_a_tiles,
                column,
                PLAN.ffn,
                a_column_data,
                a_column_scale,
                None,
                PLAN,
            )
            copy_part(das, da, next_row, next_end, next_column, PLAN.ffn)
            async_copy.commit_group()
        async_copy.wait_group(0)


def takes_dact_quantize(
    da: torch.Tensor, h: torch.Tensor, activation: Activation, block_format: formats.BlockFormat
) -> bool:
    """Whether launch_dact_quantize supports these operands: whole tiles of features, gates and ups in halves."""
    is_in_halves = activation.is_gated and activation.interleave is None
    in_tiles = block_format.block == TILE.value and da.shape[1] % TILE.value == 0
    return is_in_halves and in_tiles and (da.data_ptr() | h.data_ptr()) % control.ACCESS_BYTES == 0


def launch_dact_quantize(arguments, activation, block_format, *, num_sms=None, **options):
    """dact_quantize of at least one row, but the partial sums of dscale and dbias stay in the workspace.

    arguments: the kernel's. options: fields of DactQuantize.
    """
    da, _, _, row_range, *_ = arguments
    (num_rows, ffn), num_groups = da.shape, row_range.shape[1]
    num_tiles = formats.max_tiles(num_rows, num_groups) * (ffn // TILE.value)
    launch(
        hopper_dact_quantize_kernel,
        launch_grid(num_tiles, num_sms, da.device, PROGRAMS_PER_SM),
        _constants(num_groups, ffn, activation, block_format.scale, **options),
        *arguments,
    )


@functools.cache
def _constants(
    num_groups: int, ffn: int, activation: Activation, scale: str, **options: int
) -> Constants:
    return Constants(
        {
            "PLAN": DactQuantize(
                num_groups=num_groups, ffn=ffn, activation=activation, scale=scale, **options
            ),
            "num_warps": NUM_WARPS,
            "maxnreg": REGISTERS,
        }
    )
