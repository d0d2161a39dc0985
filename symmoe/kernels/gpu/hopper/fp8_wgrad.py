"""grouped_gemm_wgrad_fp8 for Hopper: E4M3 products, scaled in fp32 every 128 tokens. Contract as in gpu/fp8.py.

Tiles as in wgrad.py, roles and sums as in fp8.py. Both operands lie with tokens last, so WGMMA reads them as it reads
rows and weights, and both have a scale for a feature and 128 tokens:

    sum of the tile += partial sum * scale of the column * scale of the row

A stage brings these scales as well, by cp.async: 384 numbers, each from another row, which no TMA can gather. The lanes
of the loading warp arrive at full[s] one by one, when their copies have landed.

    barrier    arrivals          says                          who waits
    full[s]    1 + bytes + 32    stage s holds operands        the multiplying warpgroups
    empty[s]   2                 stage s has been multiplied   load

A group's tokens begin at the next multiple of 128 after the group before; how many stages it has, which may be none, is
known only to the device.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from symmoe.kernels.gpu.gemm import device_num_sms
from symmoe.kernels.gpu.hopper.fp8 import BLOCK_K, BLOCK_N, E4M3, HALF, SUMS, partial_sum
from symmoe.kernels.gpu.hopper.gemm import NUM_WARPS, describe
from symmoe.kernels.gpu.hopper.pipeline import BLOCK_M, CHUNK, halves, make_barriers, next_stage
from symmoe.kernels.gpu.hopper.wgrad import WgradPipeline, locate_tile
from symmoe.kernels.gpu.launch import Constants, fast_launch, launch

LANES = gl.constexpr(32)
PART = gl.constexpr(32)  # columns of a tile that are added to out at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8WgradPipeline(WgradPipeline):
    """The constants of one kernel. accumulate: sums are added to out. in_order: as in Fp8Pipeline."""

    accumulate: bool = False
    in_order: bool = False

    @property
    def group_lanes(self) -> int:
        """Lanes of a vector over the groups."""
        return max(32, 1 << (self.num_groups - 1).bit_length())


@gluon.jit
def first_block(row_start, group, PIPE: gl.constexpr):
    """Blocks of BLOCK_K tokens before those of a group."""
    layout: gl.constexpr = gl.BlockedLayout([PIPE.group_lanes // 32], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, PIPE.group_lanes, layout=layout)
    start = gl.load(row_start + lane, mask=lane < group, other=0)
    end = gl.load(row_start + lane + 1, mask=lane < group, other=0)
    return gl.sum((end - start + (BLOCK_K - 1)) // BLOCK_K, axis=0)


@gluon.jit
def num_steps(start, end):
    """Stages of the ring that a group's tile takes."""
    return (end - start + (BLOCK_K - 1)) // BLOCK_K


@gluon.jit
def scale_pointers(table, num_blocks, first, block, NUMBER: gl.constexpr, ROWS: gl.constexpr):
    """Pointers [NUMBER] to the scales, of one block, of rows first.. of a matrix of ROWS rows."""
    row = first + gl.arange(0, NUMBER, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    row = gl.minimum(row, ROWS - 1)  # nothing is stored of what would lie past the last
    return table + row.to(gl.int64) * num_blocks + block


@gluon.jit
def load(operands, scales, row_start, ring, PIPE: gl.constexpr):
    """The role, of one warp. What lies past the last feature comes as zeros."""
    dout_desc, rows_desc = operands
    dout_scale, rows_scale, num_blocks = scales
    a, b, a_scale, b_scale, full, empty, _turn = ring
    num_bytes: gl.constexpr = dout_desc.block_type.nbytes + rows_desc.block_type.nbytes
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), PIPE.num_tiles, gl.num_programs(0)):
        group, start, end, m, n = locate_tile(tile, row_start, PIPE)
        block = first_block(row_start, group, PIPE)
        dout_scales = scale_pointers(dout_scale, num_blocks, m, block, BLOCK_M, PIPE.out_rows)
        rows_scales = scale_pointers(rows_scale, num_blocks, n, block, BLOCK_N, PIPE.columns)
        for k in range(num_steps(start, end)):
            mbarrier.wait(empty.index(stage), phase)
            barrier = full.index(stage)
            mbarrier.expect(barrier, num_bytes)
            token = (block + k) * BLOCK_K
            tma.async_copy_global_to_shared(rows_desc, [n, token], barrier, b.index(stage))
            tma.async_copy_global_to_shared(dout_desc, [m, token], barrier, a.index(stage))
            async_copy.async_copy_global_to_shared(a_scale.index(stage), dout_scales + k)
            async_copy.async_copy_global_to_shared(b_scale.index(stage), rows_scales + k)
            async_copy.mbarrier_arrive(barrier, increment_count=False)
            stage, phase = next_stage(stage, phase, PIPE)


@gluon.jit
def product(ring, num_k, stage, phase, WARPGROUP: gl.constexpr, PIPE: gl.constexpr):
    """Both halves of the scaled sums of a warpgroup's rows of a tile, fp32, and the ring's next stage and parity.

    NOTE: in any other order of the factors, ptxas keeps more products than there are registers.
    """
    a_ring, b_ring, a_scale, b_scale, full, empty, turn = ring
    left = gl.zeros([CHUNK, HALF], gl.float32, SUMS)
    right = gl.zeros([CHUNK, HALF], gl.float32, SUMS)
    for _k in range(num_k):
        mbarrier.wait(full.index(stage), phase)
        a = a_ring.index(stage).slice(CHUNK * WARPGROUP, CHUNK, dim=0)
        b = b_ring.index(stage)
        columns = b_scale.index(stage)
        partial = partial_sum(a, b.slice(0, HALF, dim=0), turn, 0, WARPGROUP, PIPE)
        row_scale = a_scale.index(stage).slice(CHUNK * WARPGROUP, CHUNK).load(gl.SliceLayout(1, SUMS))
        column_scale = columns.slice(0, HALF).load(gl.SliceLayout(0, SUMS))
        left += (partial * column_scale[None, :]) * row_scale[:, None]
        partial = partial_sum(a, b.slice(HALF, HALF, dim=0), turn, 1, WARPGROUP, PIPE)
        column_scale = columns.slice(HALF, HALF).load(gl.SliceLayout(0, SUMS))
        right += (partial * column_scale[None, :]) * row_scale[:, None]
        mbarrier.arrive(empty.index(stage))
        stage, phase = next_stage(stage, phase, PIPE)
    return left, right, stage, phase


@gluon.jit
def quarters(x):
    """x [M, N] cut into a tuple of four [M, N / 4] from left to right."""
    left, right = halves(x, 1)
    return halves(left, 1) + halves(right, 1)


@gluon.jit
def store_parts(parts, chunks, out_desc, group, m, n, WARPGROUP: gl.constexpr):
    """Rounds four parts of a warpgroup's rows of a tile and stores them by TMA, from column n on."""
    WIDTH: gl.constexpr = out_desc.block_shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    tma.store_wait(0)
    for i in gl.static_range(4):
        part = gl.convert_layout(parts[i], layout, assert_trivial=True).to(out_desc.dtype)
        chunks.index(4 * WARPGROUP + i).reshape([CHUNK, WIDTH]).store(part)
    fence_async_shared()
    for i in gl.static_range(4):
        place = [group, m + CHUNK * WARPGROUP, n + WIDTH * i]
        tma.async_copy_shared_to_global(out_desc, place, chunks.index(4 * WARPGROUP + i))


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
def store_tile(left, right, chunks, out_desc, out, group, m, n, WARPGROUP: gl.constexpr, PIPE: gl.constexpr):
    if PIPE.accumulate:
        out_group = out + group.to(gl.int64) * (PIPE.out_rows * PIPE.columns)
        left_parts = quarters(left)
        right_parts = quarters(right)
        for i in gl.static_range(4):
            add_part(left_parts[i], out_group, m + CHUNK * WARPGROUP, n + PART * i, PIPE)
        for i in gl.static_range(4):
            add_part(right_parts[i], out_group, m + CHUNK * WARPGROUP, n + HALF + PART * i, PIPE)
    elif out_desc.dtype == gl.float32:
        store_parts(quarters(left), chunks, out_desc, group, m, n, WARPGROUP)
        store_parts(quarters(right), chunks, out_desc, group, m, n + HALF, WARPGROUP)
    else:
        store_parts(halves(left, 1) + halves(right, 1), chunks, out_desc, group, m, n, WARPGROUP)


@gluon.jit
def multiply(out_desc, out, row_start, ring, chunks, WARPGROUP: gl.constexpr, PIPE: gl.constexpr):
    """The role."""
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), PIPE.num_tiles, gl.num_programs(0)):
        group, start, end, m, n = locate_tile(tile, row_start, PIPE)
        left, right, stage, phase = product(ring, num_steps(start, end), stage, phase, WARPGROUP, PIPE)
        if PIPE.accumulate:
            if start < end:  # a group without rows is not even read
                store_tile(left, right, chunks, out_desc, out, group, m, n, WARPGROUP, PIPE)
        else:
            store_tile(left, right, chunks, out_desc, out, group, m, n, WARPGROUP, PIPE)
    tma.store_wait(0)


@fast_launch
@gluon.jit(do_not_specialize=["num_blocks"], do_not_specialize_on_alignment=["dout_scale", "rows_scale", "row_start"])
def hopper_fp8_wgrad_kernel(
    dout_desc,  # [O, P], block [BLOCK_M, BLOCK_K]
    rows_desc,  # [C, P], block [BLOCK_N, BLOCK_K]
    out_desc,  # [G, O, C], block [1, CHUNK, 128 bytes]
    out,
    dout_scale,  # [O, num_blocks]
    rows_scale,  # [C, num_blocks]
    row_start,
    num_blocks,
    PIPE: gl.constexpr,
):
    a = gl.allocate_shared_memory(dout_desc.dtype, [PIPE.stages] + dout_desc.block_shape, dout_desc.layout)  # noqa: RUF005
    b = gl.allocate_shared_memory(rows_desc.dtype, [PIPE.stages] + rows_desc.block_shape, rows_desc.layout)  # noqa: RUF005
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a_scale = gl.allocate_shared_memory(gl.float32, [PIPE.stages, BLOCK_M], plain)
    b_scale = gl.allocate_shared_memory(gl.float32, [PIPE.stages, BLOCK_N], plain)
    chunks = gl.allocate_shared_memory(out_desc.dtype, [8] + out_desc.block_shape, out_desc.layout)  # noqa: RUF005
    full = make_barriers(PIPE.stages, 1 + LANES)
    ring = (a, b, a_scale, b_scale, full, make_barriers(PIPE.stages, 2), make_barriers(2, 1))
    scales = (dout_scale, rows_scale, num_blocks)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (out_desc, out, row_start, ring, chunks, 0, PIPE)),
            (multiply, (out_desc, out, row_start, ring, chunks, 1, PIPE)),
            (load, ((dout_desc, rows_desc), scales, row_start, ring, PIPE)),
        ],
        [4, 1],
        [PIPE.multiply_registers, PIPE.load_registers],
    )


def launch_fp8_wgrad(
    dout: torch.Tensor,
    dout_scale: torch.Tensor,
    rows: torch.Tensor,
    rows_scale: torch.Tensor,
    row_start: torch.Tensor,
    out: torch.Tensor,
    *,
    accumulate: bool = False,
    num_sms: int | None = None,
    **options: int,
) -> None:
    """grouped_gemm_wgrad_fp8 of at least one block of tokens. options: of the pipeline."""
    pipe, constants = _plan(*out.shape, out.dtype, accumulate, tuple(options.items()))
    num_sms = device_num_sms(out.device) if num_sms is None else num_sms
    grid = (min(pipe.num_tiles, num_sms),)
    launch(
        hopper_fp8_wgrad_kernel,
        grid,
        constants,
        dout,
        rows,
        out,
        out,
        dout_scale,
        rows_scale,
        row_start,
        dout_scale.shape[1],
    )


@functools.cache
def _plan(
    num_groups: int, out_rows: int, columns: int, dtype: torch.dtype, accumulate: bool, options: tuple[Any, ...]
) -> tuple[Fp8WgradPipeline, Constants]:
    pipe = Fp8WgradPipeline(
        num_groups=num_groups, out_rows=out_rows, columns=columns, accumulate=accumulate, **dict(options)
    )
    descriptors = {
        0: describe([BLOCK_M.value, BLOCK_K.value], E4M3),
        1: describe([BLOCK_N.value, BLOCK_K.value], E4M3),
        2: describe([1, CHUNK.value, 128 // dtype.itemsize], dtype),
    }
    return pipe, Constants({"PIPE": pipe, "num_warps": NUM_WARPS}, descriptors)
