"""grouped_gemm_wgrad of contiguous rows for Hopper, with the bits of triton/gemm.py; roles as in pipeline.py.

A tile is 128 rows of out[g] (features of dout) by 256 columns (features of rows). The group's rows are contracted,
so both operands have the same layout in shared and in global memory: a stage is BLOCK_K rows of either. Each of the two
multiplying warpgroups has one [BLOCK_K, CHUNK] of dout, which WGMMA reads transposed. Only the device has a group's
number of stages. If it is 0, no role uses the ring, and the tile is zeros.
"""

import functools
from dataclasses import dataclass

from symmoe.kernels.hopper.gemm import describe, describe_ragged
from symmoe.kernels.hopper.gluon_names import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from symmoe.kernels.hopper.pipeline import (
    BLOCK_K,
    BLOCK_M,
    CHUNK,
    RAGGED,
    Groups,
    make_barriers,
    next_stage,
    stage_before,
    write_dump,
)
from symmoe.kernels.launch.launch import Constants, fast_jit, launch
from symmoe.kernels.triton import tiles

BLOCK_N = gl.constexpr(256)


@dataclass(frozen=True, slots=True, kw_only=True)
class WgradPipeline(Groups):
    """The constants of one kernel; out is [num_groups, out_rows, columns]. The other fields are as in Pipeline."""

    out_rows: int
    columns: int
    stages: int = 3
    group_m: int = 4
    multiply_registers: int = 232
    load_registers: int = 40
    alternate: bool = False  # for write_dump

    @property
    def num_m_tiles(self) -> int:
        """Tiles down a group's result."""
        return -(-self.out_rows // BLOCK_M.value)

    @property
    def num_n_tiles(self) -> int:
        """Tiles across the result."""
        return -(-self.columns // BLOCK_N.value)

    @property
    def group_tiles(self) -> int:
        """Tiles of a group's result."""
        return self.num_m_tiles * self.num_n_tiles

    @property
    def num_tiles(self) -> int:
        return self.num_groups * self.group_tiles


@gluon.jit
def locate_tile(tile, row_range, PIPE: gl.constexpr):
    """Group, its first row and the end of its rows, and a tile's first row and column in the group's result."""
    group = tile // PIPE.group_tiles
    local = tile - group * PIPE.group_tiles
    m, n = tiles.swizzle_tile(local, PIPE.num_m_tiles, PIPE.num_n_tiles, PIPE.group_m)
    start, end = gl.load(row_range + group), gl.load(row_range + PIPE.num_groups + group)
    return group, start, end, m * BLOCK_M, n * BLOCK_N


@gluon.jit
def num_steps(start, end, BLOCK: gl.constexpr):
    """Number of ring stages, of BLOCK rows each, for a group's tile."""
    return (end - start + (BLOCK - 1)) // BLOCK


@gluon.jit
def load(dout_desc, rows_desc, row_range, ring, PIPE: gl.constexpr):
    """The role load. Rows at and past a group's end, and columns past the last feature, are loaded as zeros."""
    a, b, full, empty = ring
    num_bytes: gl.constexpr = 2 * dout_desc.block_type.nbytes + rows_desc.block_type.nbytes
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), PIPE.num_tiles, gl.num_programs(0)):
        _group, start, end, m, n = locate_tile(tile, row_range, PIPE)
        for k in range(num_steps(start, end, BLOCK_K)):
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(full.index(stage), num_bytes)
            row = RAGGED - end + start + k * BLOCK_K
            barrier = full.index(stage)
            tma_load(rows_desc, [RAGGED, end, row, n], barrier, b.index(stage))
            for i in gl.static_range(2):
                coordinates = [RAGGED, end, row, m + i * CHUNK]
                tma_load(dout_desc, coordinates, barrier, a.index(2 * stage + i))
            stage, phase = next_stage(stage, phase, PIPE)


@gluon.jit
def product(ring, num_k, stage, phase, WARPGROUP: gl.constexpr, PIPE: gl.constexpr):
    """Sum of products of a warpgroup's CHUNK rows of a tile in fp32, and the ring's next stage and parity.

    One WGMMA stays in flight; the stage before it is then free. See the NOTE in pipeline.product.
    """
    a_ring, b_ring, full, empty = ring
    acc = gl.zeros(
        [CHUNK, BLOCK_N],
        gl.float32,
        gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]),
    )
    for k in range(num_k):
        mbarrier.wait(full.index(stage), phase)
        a = a_ring.index(2 * stage + WARPGROUP).reshape([BLOCK_K, CHUNK]).permute([1, 0])
        b = b_ring.index(stage).reshape([BLOCK_K, BLOCK_N])
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index(stage_before(stage, PIPE)), pred=k > 0)
        stage, phase = next_stage(stage, phase, PIPE)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(stage_before(stage, PIPE)), pred=num_k > 0)
    return acc, stage, phase


@gluon.jit
def multiply(out_desc, row_range, ring, chunks, WARPGROUP: gl.constexpr, PIPE: gl.constexpr):
    """The role multiply. A tile is stored by TMA, which reads while the next tile is multiplied."""
    stage = 0
    phase = 0
    for tile in range(gl.program_id(0), PIPE.num_tiles, gl.num_programs(0)):
        group, start, end, m, n = locate_tile(tile, row_range, PIPE)
        acc, stage, phase = product(
            ring, num_steps(start, end, BLOCK_K), stage, phase, WARPGROUP, PIPE
        )
        tma.store_wait(0)
        write_dump(acc, chunks, WARPGROUP, PIPE)
        fence_async_shared()
        for i in gl.static_range(BLOCK_N // CHUNK):
            coordinates = [group, m + CHUNK * WARPGROUP, n + CHUNK * i]
            chunk = chunks.index(BLOCK_N // CHUNK * WARPGROUP + i).reshape([1, CHUNK, CHUNK])
            tma_store(out_desc, coordinates, chunk)
    tma.store_wait(0)


@fast_jit(["dout_desc", "rows_desc", "out_desc"], jit=gluon.jit)
def hopper_wgrad_kernel(
    dout_desc,  # [N, O], ragged, block [BLOCK_K, CHUNK]
    rows_desc,  # [N, C], ragged, block [BLOCK_K, BLOCK_N]
    out_desc,  # [G, O, C], block [1, CHUNK, CHUNK]
    row_range,
    PIPE: gl.constexpr,
):
    # The halves of a stage of dout are separate buffers, as a ring of twice the length.
    a = gl.allocate_shared_memory(
        dout_desc.dtype,
        [2 * PIPE.stages] + dout_desc.block_shape,
        dout_desc.layout,
    )
    b = gl.allocate_shared_memory(
        rows_desc.dtype,
        [PIPE.stages] + rows_desc.block_shape,
        rows_desc.layout,
    )
    chunks = gl.allocate_shared_memory(
        out_desc.dtype, [8, CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2)
    )
    ring = (a, b, make_barriers(PIPE.stages, 1), make_barriers(PIPE.stages, 2))
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply, (out_desc, row_range, ring, chunks, 0, PIPE)),
            (multiply, (out_desc, row_range, ring, chunks, 1, PIPE)),
            (load, (dout_desc, rows_desc, row_range, ring, PIPE)),
        ],
        [4, 1],
        [PIPE.multiply_registers, PIPE.load_registers],
    )


def launch_wgrad(dout, rows, row_range, out, *, num_sms=None, group_m=4):
    """grouped_gemm_wgrad of dout [N, O] and rows [N, C] into out [G, O, C] of their dtype, without indices.

    O and C are multiples of 8, 1 <= N <= MAX_ROWS; no accumulation. num_sms: as in grouped_gemm.
    """
    pipe, constants = _wgrad_plan(*out.shape, out.dtype, group_m)
    launch(
        hopper_wgrad_kernel,
        tiles.launch_grid(pipe.num_tiles, num_sms, out.device),
        constants,
        dout,
        rows,
        out,
        row_range,
    )


@functools.cache
def _wgrad_plan(num_groups, out_rows, columns, dtype, group_m) -> tuple[WgradPipeline, Constants]:
    pipe = WgradPipeline(num_groups=num_groups, out_rows=out_rows, columns=columns, group_m=group_m)
    return pipe, pipe.constants(
        {
            0: describe_ragged(dtype, BLOCK_K.value, CHUNK.value),
            1: describe_ragged(dtype, BLOCK_K.value, BLOCK_N.value),
            2: describe([1, CHUNK.value, CHUNK.value], dtype),
        }
    )
