"""grouped_gemm_wgrad_quantized for Hopper: E4M3 products, scaled in fp32 every 128 tokens.

Tiles are as in hopper/wgrad.py, roles and sums as in hopper_fp8.py. Tokens are the last dimension of both operands, so
WGMMA reads them in the same way as rows and weights. Both operands have one scale for a feature and 128 tokens:

    sum of the tile += partial sum * scale of the column * scale of the row

Scales are read from shared memory, which also feeds the tensor core: at full speed the core's operands take three
quarters of the cycles. A thread has two rows of a partial sum, but 32 of its columns. So a warpgroup has all 128 rows
of a tile and one half of its columns, and reads the columns' scales once for the upper and the lower partial sum. The
scales are read a stage ahead: products leave only a quarter of the cycles, and scales would arrive late. Scales, one
partial sum and the sums fill the registers. So the next stage's scales replace this stage's as soon as both partial
sums have been scaled.

The scales of 128 tokens are contiguous: TMA loads them with the operands, and counts their bytes at full[s].

    barrier    arrivals     signals                           waiting role
    full[s]    1 + bytes    stage s holds all of it           the multiplying warpgroups
    empty[s]   2            stage s has been multiplied       load

A group's tokens begin at the next multiple of 128 after the previous group. Only the device has a group's number of
stages, which may be 0.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from symmoe.kernels.hopper.gemm import describe
from symmoe.kernels.hopper.gluon_names import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    tma_add,
    tma_load,
    tma_store,
    warpgroup_mma_wait,
)
from symmoe.kernels.hopper.pipeline import BLOCK_M, CHUNK, halves, make_barriers, next_stage
from symmoe.kernels.hopper.table import (
    describe_as,
    describe_table,
    distant_coordinates,
    matrix_coordinates,
)
from symmoe.kernels.hopper.wgrad import WgradPipeline, locate_tile, num_steps
from symmoe.kernels.launch.launch import Constants, Describe, fast_jit, launch
from symmoe.kernels.low_precision.hopper_fp8 import BLOCK_K, BLOCK_N, E4M3, HALF, SUMS, partial_sum
from symmoe.kernels.operands import packed_and_table
from symmoe.kernels.triton.tiles import launch_grid

PART = gl.constexpr(32)  # columns of sums stored at a time
PARTS = gl.constexpr(8)  # parts of a warpgroup's sums in a tile


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8WgradPipeline(WgradPipeline):
    """The constants of one kernel. accumulate: whether sums are added to out.

    batch: parts that a warpgroup stores together; there is memory for two batches.
    """

    multiply_registers: int = 240
    load_registers: int = 24
    accumulate: bool = False
    batch: int


@gluon.jit
def first_block(row_range, group, PIPE: gl.constexpr):
    """Number of blocks of BLOCK_K tokens before a group."""
    lane = gl.arange(
        0,
        PIPE.group_lanes,
        gl.BlockedLayout([PIPE.group_lanes // 32], [32], [gl.num_warps()], [0]),
    )
    start = gl.load(row_range + lane, mask=lane < group, other=0)
    end = gl.load(row_range + PIPE.num_groups + lane, mask=lane < group, other=0)
    return gl.sum((end - start + (BLOCK_K - 1)) // BLOCK_K, axis=0)


@gluon.jit
def load(operands, row_range, ring, PIPE: gl.constexpr):
    """The role load, one warp. Features past the last one are loaded as zeros."""
    dout_desc, dout_scale_desc, rows_desc, rows_scale_desc = operands
    a, b, a_scale, b_scale, full, empty = ring
    num_bytes: gl.constexpr = (
        dout_desc.block_type.nbytes
        + rows_desc.block_type.nbytes
        + dout_scale_desc.block_type.nbytes
        + rows_scale_desc.block_type.nbytes
    )
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), PIPE.num_tiles, gl.num_programs(0)):
        group, start, end, m, n = locate_tile(tile, row_range, PIPE)
        block = first_block(row_range, group, PIPE)
        for k in range(num_steps(start, end, BLOCK_K)):
            mbarrier.wait(empty.index(stage), phase)
            barrier = full.index(stage)
            mbarrier.expect(barrier, num_bytes)
            token = (block + k) * BLOCK_K
            tma_load(rows_desc, [n, token], barrier, b.index(stage))
            tma_load(dout_desc, [m, token], barrier, a.index(stage))
            tma_load(rows_scale_desc, [block + k, n], barrier, b_scale.index(stage))
            tma_load(dout_scale_desc, [block + k, m], barrier, a_scale.index(stage))
            stage, phase = next_stage(stage, phase, PIPE)


@gluon.jit
def load_column_scale(b_scale, stage, WARPGROUP: gl.constexpr):
    """A stage's scales for a warpgroup's half of the columns, [1, HALF]."""
    return b_scale.index(stage).slice(HALF * WARPGROUP, HALF, dim=1).load(SUMS)


@gluon.jit
def product(ring, num_k, stage, phase, WARPGROUP: gl.constexpr, PIPE: gl.constexpr):
    """Scaled sums of the upper and the lower CHUNK rows of a tile, in a warpgroup's half of its columns, fp32.

    Also the ring's next stage and parity.
    """
    a_ring, b_ring, a_scale, b_scale, full, empty = ring
    upper = gl.zeros([CHUNK, HALF], gl.float32, SUMS)
    lower = gl.zeros([CHUNK, HALF], gl.float32, SUMS)
    mbarrier.wait(full.index(stage), phase, pred=num_k > 0)
    column_scale = load_column_scale(b_scale, stage, WARPGROUP)
    for k in range(num_k):
        a = a_ring.index(stage)
        b = b_ring.index(stage).slice(HALF * WARPGROUP, HALF, dim=0)
        # NOTE: one product may be in flight, so this waits for none. Without it, ptxas moves the next code between
        # products.
        partial = partial_sum(a.slice(0, CHUNK, dim=0), b, 1)
        row_scales = a_scale.index(stage).permute([1, 0])
        upper_scale = row_scales.slice(0, CHUNK, dim=0).load(SUMS)
        lower_scale = row_scales.slice(CHUNK, CHUNK, dim=0).load(SUMS)
        partial = warpgroup_mma_wait(0, deps=(partial,))
        upper += (partial * column_scale) * upper_scale
        # NOTE: no product is in flight. Without it, LLVM moves this sum behind the next products, and both partial sums
        # do not fit into the registers.
        upper = warpgroup_mma_wait(0, deps=(upper,))
        partial = partial_sum(a.slice(CHUNK, CHUNK, dim=0), b, 1)
        following, following_phase = next_stage(stage, phase, PIPE)
        mbarrier.wait(full.index(following), following_phase, pred=k + 1 < num_k)
        partial = warpgroup_mma_wait(0, deps=(partial,))
        mbarrier.arrive(empty.index(stage))
        partial *= column_scale
        # NOTE: as above: the scales of two stages do not fit either. Another wait keeps their reads before the sum. The
        # scales read after a tile's last stage are unused.
        partial = warpgroup_mma_wait(0, deps=(partial,))
        column_scale = load_column_scale(b_scale, following, WARPGROUP)
        partial, column_scale = warpgroup_mma_wait(0, deps=(partial, column_scale))
        lower += partial * lower_scale
        stage = following
        phase = following_phase
    return upper, lower, stage, phase


@gluon.jit
def quarters(x):
    """x [M, N] cut into a tuple of four [M, N / 4] from left to right."""
    left_half, right_half = halves(x, 1)
    return halves(left_half, 1) + halves(right_half, 1)


@gluon.jit
def store_batch(
    parts,
    chunks,
    out_desc,
    matrix,
    m,
    n,
    FIRST: gl.constexpr,
    WARPGROUP: gl.constexpr,
    PIPE: gl.constexpr,
):
    """Rounds parts FIRST.. of a warpgroup's sums, the upper rows' parts first, and stores or adds them by TMA.

    matrix: the first coordinates of out_desc.
    """
    BATCH: gl.constexpr = PIPE.batch
    PLACE: gl.constexpr = 2 * BATCH * WARPGROUP + FIRST % (2 * BATCH)
    ACROSS: gl.constexpr = HALF // PART
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    tma.store_wait(BATCH)
    for i in gl.static_range(BATCH):
        part = gl.convert_layout(parts[FIRST + i], layout, assert_trivial=True).to(out_desc.dtype)
        chunks.index(PLACE + i).reshape([CHUNK, PART]).store(part)
    fence_async_shared()
    for i in gl.static_range(BATCH):
        coordinates = matrix + (
            m + CHUNK * ((FIRST + i) // ACROSS),
            n + PART * ((FIRST + i) % ACROSS),
        )
        if PIPE.accumulate:
            tma_add(out_desc, coordinates, chunks.index(PLACE + i))
        else:
            tma_store(out_desc, coordinates, chunks.index(PLACE + i))


@gluon.jit
def add_part(part, out, m, n, PIPE: gl.constexpr):
    """Adds a part [CHUNK, PART] of a tile to the matrix out [out_rows, columns], in fp32."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    row = m + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    column = n + gl.arange(0, PART, gl.SliceLayout(0, layout))
    pointers = out + row.to(gl.int64)[:, None] * PIPE.columns + column[None, :]
    mask = (row < PIPE.out_rows)[:, None] & (column < PIPE.columns)[None, :]
    total = gl.load(pointers, mask=mask, other=0.0).to(gl.float32)
    total += gl.convert_layout(part, layout, assert_trivial=True)
    gl.store(pointers, total.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def store_tile(
    upper, lower, chunks, outs, group, m, n, WARPGROUP: gl.constexpr, PIPE: gl.constexpr
):
    """Stores a tile. n: a warpgroup's first column."""
    out_desc, out, out_table = outs
    parts = quarters(upper) + quarters(lower)
    if PIPE.accumulate and out_desc.dtype != gl.float32:  # TMA would round it twice
        out_group = out + group.to(gl.int64) * (PIPE.out_rows * PIPE.columns)
        for i in gl.static_range(PARTS):
            add_part(
                parts[i],
                out_group,
                m + CHUNK * (i // (PARTS // 2)),
                n + PART * (i % (PARTS // 2)),
                PIPE,
            )
    else:
        if out_table is not None:
            matrix = matrix_coordinates(out_table, out, group)
        elif PIPE.accumulate:  # 8 to 10 % less time: docs/decisions/0004-low-precision.md
            matrix = distant_coordinates(group.to(gl.int64) * (PIPE.out_rows * PIPE.columns * 4))
        else:
            matrix = (group,)
        for i in gl.static_range(PARTS // PIPE.batch):
            store_batch(parts, chunks, out_desc, matrix, m, n, i * PIPE.batch, WARPGROUP, PIPE)


@gluon.jit
def multiply(outs, row_range, ring, chunks, WARPGROUP: gl.constexpr, PIPE: gl.constexpr):
    """The role multiply."""
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), PIPE.num_tiles, gl.num_programs(0)):
        group, start, end, m, first_column = locate_tile(tile, row_range, PIPE)
        n = first_column + HALF * WARPGROUP
        upper, lower, stage, phase = product(
            ring, num_steps(start, end, BLOCK_K), stage, phase, WARPGROUP, PIPE
        )
        if not PIPE.accumulate or start < end:  # a group without rows is not read
            store_tile(upper, lower, chunks, outs, group, m, n, WARPGROUP, PIPE)
    tma.store_wait(0)


@fast_jit(
    ["dout_desc", "dout_scale_desc", "rows_desc", "rows_scale_desc", "out_desc", "out"],
    jit=gluon.jit,
)
def hopper_fp8_wgrad_kernel(
    dout_desc,  # [O, P], block [BLOCK_M, BLOCK_K]
    dout_scale_desc,  # [blocks of P, O], block [1, BLOCK_M]
    rows_desc,  # [C, P], block [BLOCK_N, BLOCK_K]
    rows_scale_desc,  # [blocks of P, C], block [1, BLOCK_N]
    out_desc,  # [G, O, C], block [1, CHUNK, PART]; describe_table with a table, and to add fp32
    out,  # with a table, its anchor
    out_table,  # int64[G] or None
    row_range,
    PIPE: gl.constexpr,
):
    a = gl.allocate_shared_memory(
        dout_desc.dtype,
        [PIPE.stages] + dout_desc.block_shape,
        dout_desc.layout,
    )
    b = gl.allocate_shared_memory(
        rows_desc.dtype,
        [PIPE.stages] + rows_desc.block_shape,
        rows_desc.layout,
    )
    a_scale = gl.allocate_shared_memory(
        gl.float32, [PIPE.stages, 1, BLOCK_M], dout_scale_desc.layout
    )
    b_scale = gl.allocate_shared_memory(
        gl.float32, [PIPE.stages, 1, BLOCK_N], rows_scale_desc.layout
    )
    chunks = gl.allocate_shared_memory(
        out_desc.dtype,
        [4 * PIPE.batch] + out_desc.block_shape,
        out_desc.layout,
    )
    ring = (
        a,
        b,
        a_scale,
        b_scale,
        make_barriers(PIPE.stages, 1),
        make_barriers(PIPE.stages, 2),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, ((out_desc, out, out_table), row_range, ring, chunks, 0, PIPE)),
            (multiply, ((out_desc, out, out_table), row_range, ring, chunks, 1, PIPE)),
            (
                load,
                ((dout_desc, dout_scale_desc, rows_desc, rows_scale_desc), row_range, ring, PIPE),
            ),
        ],
        [4, 1],
        [PIPE.multiply_registers, PIPE.load_registers],
    )


def launch_fp8_wgrad(dout, rows, row_range, out, *, accumulate=False, num_sms=None, **options):
    """grouped_gemm_wgrad_quantized of at least one block of tokens with fp32 scales; matrices of a table are fp32.
    options: fields of the pipeline, for comparisons."""
    packed, table = packed_and_table(out)
    dout_scale, rows_scale = dout.scale.t(), rows.scale.t()
    target = dout_scale if packed is None else packed  # an anchor must have the table's dtype
    pipe, constants = _plan(*out.shape, out.dtype, accumulate, table is not None, **options)
    launch(
        hopper_fp8_wgrad_kernel,
        launch_grid(pipe.num_tiles, num_sms, out.device),
        constants,
        dout.data,
        dout_scale,
        rows.data,
        rows_scale,
        target,
        target,
        table,
        row_range,
    )


@functools.cache
def _plan(
    num_groups: int,
    out_rows: int,
    columns: int,
    dtype: torch.dtype,
    accumulate: bool,
    is_table: bool,
    **options: Any,
) -> tuple[Fp8WgradPipeline, Constants]:
    pipe = Fp8WgradPipeline(
        num_groups=num_groups,
        out_rows=out_rows,
        columns=columns,
        accumulate=accumulate,
        # 16-bit results leave memory for one more stage of operands.
        **{**({"stages": 4, "batch": 1} if dtype.itemsize == 2 else {"batch": 2}), **options},
    )
    block = [CHUNK.value, PART.value]
    is_distant = is_table or (accumulate and dtype == torch.float32)
    return pipe, pipe.constants(
        {
            0: describe([BLOCK_M.value, BLOCK_K.value], E4M3),
            1: describe_scales(BLOCK_M.value),
            2: describe([BLOCK_N.value, BLOCK_K.value], E4M3),
            3: describe_scales(BLOCK_N.value),
            4: describe_table(block, dtype, out_rows, columns)
            if is_distant
            else describe([1, *block], dtype),
        }
    )


def describe_scales(features: int) -> Describe:
    """Function from block-major scales [num_blocks, C] to their descriptor, for `features` features of one block."""
    # With a single block, the tensor's own strides may differ.
    return describe_as(
        lambda scales: (scales.shape, (scales.shape[1], 1)), [1, features], torch.float32
    )
