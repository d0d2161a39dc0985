"""grouped_gemm_quantized for Hopper: E4M3 products, scaled in fp32 every 128 contracted features.

Tiles, roles and barriers are as in pipeline.py: a stage is 128 rows and 256 rows of the weight, 128 bytes of each.
WGMMA adds E4M3 products with about 14 bits, so the fp32 units add the sum over a stage (a partial sum):

    sum of the tile += partial sum * (scale of the row * scale of the weight's block)

A warpgroup has 64 rows of a tile, and one sum for each half of the columns, because a scale of the weight covers 128
columns. The sums of the tile and one partial sum fill the registers. So a warpgroup multiplies, adds, and multiplies
again; meanwhile the tensor core computes the other warpgroup's products. Both warpgroups may be in the same phase at
the same time: enforced turns were slower for most products (docs/decisions/0004-low-precision.md).

The warps that need scales read them a stage ahead: a row's scale has four bytes, too narrow for TMA, and its line stays
in L1 for the next seven stages.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from symmoe.kernels.hopper.gemm import describe, describe_ragged, grid, zero_tail_rows
from symmoe.kernels.hopper.gluon_names import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from symmoe.kernels.hopper.pipeline import (
    BLOCK_M,
    CHUNK,
    Pipeline,
    halves,
    load_contiguous,
    locate_tile,
    make_barriers,
    next_stage,
    row_tile_prefix,
    store_chunk,
)
from symmoe.kernels.hopper.table import describe_table
from symmoe.kernels.launch.launch import Constants, fast_jit, launch
from symmoe.kernels.operands import as_pair, packed_and_table
from symmoe.kernels.quantized_gemm import BLOCK
from symmoe.kernels.triton.tiles import matrix_pointer

E4M3 = torch.float8_e4m3fn
BLOCK_K = gl.constexpr(BLOCK)
BLOCK_N = gl.constexpr(256)
HALF = gl.constexpr(BLOCK)  # columns of one scale of the weight
PART = gl.constexpr(
    gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
)  # CHUNK columns of a tile
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32]))  # a half of a tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Pipeline(Pipeline):
    """The constants of one kernel, as in Pipeline."""

    block_k: int = BLOCK_K.value  # num_k is also the number of a row's scales
    instruction_n: int = HALF.value

    @property
    def num_column_blocks(self) -> int:
        """Scales down a weight [columns, in_width]."""
        return -(-self.columns // HALF.value)


@gluon.jit
def partial_sum(a, b, IN_FLIGHT: gl.constexpr):
    """a [CHUNK, BLOCK_K] @ b [HALF, BLOCK_K]^T by the tensor core. IN_FLIGHT: products that may still be running."""
    zeros = gl.zeros([CHUNK, HALF], gl.float32, SUMS)
    products = warpgroup_mma(a, b.permute([1, 0]), zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(IN_FLIGHT, deps=(products,))


@gluon.jit
def product(
    scales,
    ring,
    group,
    first_row,
    end,
    n_tile,
    stage,
    phase,
    WARPGROUP: gl.constexpr,
    PIPE: gl.constexpr,
):
    """Both halves of the scaled sums of a warpgroup's rows of a tile, fp32, and the ring's next stage and parity."""
    a_ring, b_ring, full, empty = ring
    row_scale, weight_scale, weight_scale_table = scales
    row = first_row + CHUNK * WARPGROUP + gl.arange(0, CHUNK, gl.SliceLayout(1, SUMS))
    row = gl.minimum(row, end - 1)  # scales of rows past the group's end have no effect
    row_pointers = row_scale + row.to(gl.int64) * PIPE.num_k
    block = n_tile * (BLOCK_N // HALF)
    distance = gl.where(block + 1 < PIPE.num_column_blocks, PIPE.num_k, 0)
    matrix = (
        weight_scale + group.to(gl.int64) * (PIPE.num_column_blocks * PIPE.num_k)
        if weight_scale_table is None
        else matrix_pointer(weight_scale_table, group, gl.float32)
    )
    left_pointer = matrix + block * PIPE.num_k
    right_pointer = left_pointer + distance
    scale = gl.load(row_pointers)
    left_scale = scale * gl.load(left_pointer)
    right_scale = scale * gl.load(right_pointer)
    left_sum = gl.zeros([CHUNK, HALF], gl.float32, SUMS)
    right_sum = gl.zeros([CHUNK, HALF], gl.float32, SUMS)
    for k in range(PIPE.num_k):
        following = gl.minimum(k + 1, PIPE.num_k - 1)
        next_scale = gl.load(row_pointers + following)
        next_left_scale = gl.load(left_pointer + following)
        next_right_scale = gl.load(right_pointer + following)
        mbarrier.wait(full.index(stage), phase)
        a = a_ring.index(stage).slice(CHUNK * WARPGROUP, CHUNK, dim=0)
        b = b_ring.index(stage).reshape([BLOCK_N, BLOCK_K])
        partial = partial_sum(a, b.slice(0, HALF, dim=0), 0)
        left_sum += partial * left_scale[:, None]
        partial = partial_sum(a, b.slice(HALF, HALF, dim=0), 0)
        mbarrier.arrive(empty.index(stage))
        right_sum += partial * right_scale[:, None]
        left_scale = next_scale * next_left_scale
        right_scale = next_scale * next_right_scale
        stage, phase = next_stage(stage, phase, PIPE)
    return left_sum, right_sum, stage, phase


@gluon.jit
def add_bias(part, addend, group, row, end, column, PIPE: gl.constexpr):
    """part [CHUNK, CHUNK] at this row and column, + bias * bias_scale in fp32; without a bias: part."""
    bias, bias_scale = addend
    if bias is not None:
        gl.static_assert(PIPE.num_groups * PIPE.columns < 2**31)  # 64-bit offsets spill more
        column = column + gl.arange(0, CHUNK, gl.SliceLayout(0, PART))
        pointers = bias + (group * PIPE.columns + column)
        features = gl.load(pointers, mask=column < PIPE.columns, other=0.0).to(gl.float32)[None, :]
        if bias_scale is not None:
            row = gl.minimum(row + gl.arange(0, CHUNK, gl.SliceLayout(1, PART)), end - 1)
            features = features * gl.load(bias_scale + row)[:, None]
        part = part + features
    return part


@gluon.jit
def store_tile(
    left_sum,
    right_sum,
    addend,
    chunks,
    out_desc,
    group,
    first_row,
    end,
    n_tile,
    WARPGROUP: gl.constexpr,
    PIPE: gl.constexpr,
):
    """Adds the bias, rounds the sums and stores them by TMA, which reads during the next tile's products.

    A part of the columns is converted at a time, so that the registers of the last partial sum are enough.
    """
    tma.store_wait(0)
    parts = halves(left_sum, 1) + halves(right_sum, 1)
    row = first_row + CHUNK * WARPGROUP
    for i in gl.static_range(4):
        part = gl.convert_layout(parts[i], PART, assert_trivial=True)
        part = add_bias(part, addend, group, row, end, n_tile * BLOCK_N + CHUNK * i, PIPE)
        chunks.index(4 * WARPGROUP + i).store(part.to(chunks.dtype))
    fence_async_shared()
    for i in gl.static_range(4):
        store_chunk(
            out_desc, chunks.index(4 * WARPGROUP + i), row, end, n_tile * BLOCK_N + CHUNK * i
        )


@gluon.jit
def multiply(
    out_desc, scales, addend, row_range, ring, chunks, WARPGROUP: gl.constexpr, PIPE: gl.constexpr
):
    """The role multiply."""
    prefix, num_row_tiles = row_tile_prefix(row_range, PIPE)
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), num_row_tiles * PIPE.num_n_tiles, gl.num_programs(0)):
        group, first_row, end, _row_tile, n_tile = locate_tile(tile, prefix, row_range, PIPE)
        left_sum, right_sum, stage, phase = product(
            scales, ring, group, first_row, end, n_tile, stage, phase, WARPGROUP, PIPE
        )
        store_tile(
            left_sum,
            right_sum,
            addend,
            chunks,
            out_desc,
            group,
            first_row,
            end,
            n_tile,
            WARPGROUP,
            PIPE,
        )
    tma.store_wait(0)


@fast_jit(
    ["rows_desc", "weight_desc", "anchor", "out_desc", "out"], optional=["num_rows"], jit=gluon.jit
)
def hopper_fp8_gemm_kernel(
    rows_desc,  # [N, C], block [BLOCK_M, BLOCK_K]
    weight_desc,  # [G, O, C], block [1, BLOCK_N, BLOCK_K]; describe_table with a table
    weight_table,  # int64[G] or None
    anchor,  # of weight_desc with a table, or None
    out_desc,  # [N, O], ragged, block [CHUNK, CHUNK]
    out,
    row_scale,  # fp32[N, blocks of C]
    weight_scale,  # fp32[G, blocks of O, blocks of C]; None with a table
    weight_scale_table,  # int64[G] or None
    row_range,
    bias,  # [G, O] or None
    bias_scale,  # fp32[N] or None
    num_rows,  # N; None: do not write the tail
    PIPE: gl.constexpr,
):
    a = gl.allocate_shared_memory(
        rows_desc.dtype,
        [PIPE.stages] + rows_desc.block_shape,
        rows_desc.layout,
    )
    b = gl.allocate_shared_memory(
        weight_desc.dtype,
        [PIPE.stages] + weight_desc.block_shape,
        weight_desc.layout,
    )
    chunks = gl.allocate_shared_memory(
        out_desc.dtype, [8, CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2)
    )
    ring = (a, b, make_barriers(PIPE.stages, 1), make_barriers(PIPE.stages, 2))
    scales = (row_scale, weight_scale, weight_scale_table)
    addend = (bias, bias_scale)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (out_desc, scales, addend, row_range, ring, chunks, 0, PIPE)),
            (multiply, (out_desc, scales, addend, row_range, ring, chunks, 1, PIPE)),
            (
                load_contiguous,
                (rows_desc, (weight_desc, weight_table, anchor), row_range, ring, PIPE),
            ),
        ],
        [4, 1],
        [PIPE.multiply_registers, PIPE.load_registers],
    )
    if num_rows is not None:
        zero_tail_rows(out, row_range, num_rows, PIPE)


def launch_fp8_gemm(
    rows, weight, row_range, out, *, bias=None, zero_tail=False, num_sms=None, **options
):
    """grouped_gemm_quantized of at least one row with fp32 scales. options: fields of Fp8Pipeline."""
    num_rows, (packed, table) = out.shape[0], packed_and_table(weight.data)
    pipe, constants = _plan(*weight.data.shape, out.dtype, table is not None, **options)
    weights = (rows.data, table, rows.data) if packed is None else (packed, None, None)
    launch(
        hopper_fp8_gemm_kernel,
        grid(pipe, num_rows, num_sms, out.device),
        constants,
        rows.data,
        *weights,
        out,
        out,
        rows.scale,
        *packed_and_table(weight.scale),
        row_range,
        *as_pair(bias),
        num_rows if zero_tail else None,
    )


@functools.cache
def _plan(
    num_groups: int,
    out_width: int,
    in_width: int,
    dtype: torch.dtype,
    is_table: bool,
    **options: Any,
) -> tuple[Fp8Pipeline, Constants]:
    pipe = Fp8Pipeline(
        num_groups=num_groups, columns=out_width, in_width=in_width, **{"group_m": 16, **options}
    )
    block = [BLOCK_N.value, BLOCK_K.value]
    return pipe, pipe.constants(
        {
            0: describe([BLOCK_M.value, BLOCK_K.value], E4M3),
            1: describe_table(block, E4M3, out_width, in_width)
            if is_table
            else describe([1, *block], E4M3),
            4: describe_ragged(dtype),
        }
    )
