"""Common parts of the grouped GEMMs for Hopper: tiles, roles, barriers (Gluon, warp-specialised, persistent).

One program per SM visits the tiles as in triton/gemm.py: BLOCK_M rows of a group, block_n features. Its warps' roles:

    load      1 warp with TMA, for gathered rows 4 warps with cp.async: fills a ring of stages, each BLOCK_K features of
              both operands
    multiply  2 warpgroups. They share a tile of 256 features, 64 rows each; or, `alternate`, each has every other tile
              of 128 features, and the epilogue of one runs during the products of the other
    finish    1 more warpgroup, or none. With it, the multiplying ones leave their rounded products in shared memory
              and go on with the next tile; without it, the multiplying warpgroups do the epilogue.

Roles wait for each other on mbarriers, whose phases alternate; the wait for use u of a barrier has parity u & 1.

    barrier    arrivals                            signals                        waiting role
    full[s]    1 + bytes; gathered: one more       stage s holds operands         the multiplying warpgroups of the tile
    empty[s]   1 per warpgroup that reads          stage s has been multiplied    load
    turn[w]    1                                   the other's products are done  multiply w, if they alternate
    dumped[w]  1                                   w's products are in memory     finish
    freed[w]   1                                   finish has read them           multiply w

A role that waits for a free stage or chunk begins one phase ahead: in the first round every one is free.
tests/support/hopper_emulator_checks.py runs these roles without a GPU, in any order.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from symmoe.kernels.activation import Activation
from symmoe.kernels.hopper.gluon_names import (
    async_copy,
    copy_async,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    tma,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from symmoe.kernels.hopper.table import matrix_coordinates
from symmoe.kernels.launch.launch import Constants, Describe
from symmoe.kernels.triton import tiles

NUM_WARPS = 4  # warps of the first warpgroup; warp_specialize adds the others
BLOCK_M = gl.constexpr(128)
BLOCK_K = gl.constexpr(64)
CHUNK = gl.constexpr(64)  # products leave the registers in chunks [CHUNK, CHUNK]
LAG = gl.constexpr(1)  # stages of gathered rows in flight when the next stage is requested
RAGGED = gl.constexpr(
    2**30
)  # rows that a ragged descriptor spans; see ragged_descriptor in triton/tiles.py
MAX_ROWS = RAGGED.value  # of an output that is stored by TMA


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The number of row groups of a kernel."""

    num_groups: int

    @property
    def group_lanes(self) -> int:
        """Lanes of a vector over the groups."""
        return max(32, 1 << (self.num_groups - 1).bit_length())

    def constants(self, descriptors: Mapping[int, Describe]) -> Constants:
        """The constants of a kernel with warpgroups for roles."""
        return Constants({"PIPE": self, "num_warps": NUM_WARPS}, descriptors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline(Groups):
    """The constants of one kernel.

    columns: features of a row of the result; a tile has tile_columns of them. A tile multiplies block_n features, more
    than tile_columns if it has gates and ups. in_width: contracted features. weight_k_first: weights are [G, in_width,
    columns]. gathered: rows are read from a tensor of packed rows. group_m: tiles of M that share a column of tiles
    while it is in L2. alternate, finish_warps: see above. block_k: contracted features of a stage.
    instruction_n: features of a WGMMA. *_registers: per thread of a role; the first warpgroup takes the rest.
    """

    columns: int
    in_width: int
    activation: Activation | None = None
    weight_k_first: bool = False
    gathered: bool = False
    block_n: int = 256
    block_k: int = BLOCK_K.value
    tile_columns: int = 256
    instruction_n: int = 256
    stages: int = 3
    group_m: int = 8
    alternate: bool = False
    finish_warps: int = 0
    multiply_registers: int = 232
    finish_registers: int = 0
    load_registers: int = 40

    @property
    def num_n_tiles(self) -> int:
        """Tiles across the result."""
        return -(-self.columns // self.tile_columns)

    @property
    def hidden_width(self) -> int:
        """Features of a row of h, with an activation."""
        return (
            self.columns if self.activation is None else self.activation.hidden_width(self.columns)
        )

    @property
    def num_k(self) -> int:
        """Stages of the ring that a tile takes."""
        return -(-self.in_width // self.block_k)

    @property
    def tile_chunks(self) -> int:
        """Chunks from left to right in a multiplying warpgroup's part of a tile."""
        return self.block_n // CHUNK.value


# ------------------------------------------------------------------------------------------------------ tiles


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def row_tile_prefix(row_range, PIPE: gl.constexpr):
    """Inclusive prefix sum of the groups' row tiles, replicated in every warp, and the total."""
    group = gl.arange(
        0,
        PIPE.group_lanes,
        gl.BlockedLayout([PIPE.group_lanes // 32], [32], [gl.num_warps()], [0]),
    )
    start = gl.load(row_range + group, mask=group < PIPE.num_groups, other=0)
    end = gl.load(row_range + PIPE.num_groups + group, mask=group < PIPE.num_groups, other=0)
    end = gl.maximum(start, end)  # ranges may end before they begin
    num_tiles = (end - start + (BLOCK_M - 1)) // BLOCK_M
    return gl.associative_scan(num_tiles, 0, add), gl.sum(num_tiles, axis=0)


@gluon.jit
def locate_tile(tile, prefix, row_range, PIPE: gl.constexpr):
    """See locate_tile in triton/tiles.py."""
    return tiles.locate_tile(
        tile, prefix, row_range, PIPE.num_groups, PIPE.num_n_tiles, PIPE.group_m, BLOCK_M
    )


# ------------------------------------------------------------------------------------------------------ the ring


@gluon.jit
def make_ring(dtype: gl.constexpr, b_desc, PIPE: gl.constexpr):
    """Stages of both operands, and their barriers."""
    a = gl.allocate_shared_memory(
        dtype, [PIPE.stages, BLOCK_M, BLOCK_K], gl.NVMMASharedLayout(128, 16, 2)
    )
    b = gl.allocate_shared_memory(dtype, [PIPE.stages] + b_desc.block_shape, b_desc.layout)
    full = make_barriers(PIPE.stages, 2 if PIPE.gathered else 1)
    empty = make_barriers(PIPE.stages, 1 if PIPE.alternate else 2)
    return a, b, full, empty


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """mbarriers [NUMBER] that complete a phase with ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def next_stage(stage, phase, PIPE: gl.constexpr):
    """The ring's next stage, and its parity."""
    last = stage == PIPE.stages - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def skip_tile(stage, phase, PIPE: gl.constexpr):
    """The ring's stage after another warpgroup's tile, and its parity."""
    position = phase * PIPE.stages + stage + PIPE.num_k
    return position % PIPE.stages, (position // PIPE.stages) & 1


@gluon.jit
def load_weight(
    b_desc, b, full, stage, matrix, n_tile, k, NUM_BYTES: gl.constexpr, PIPE: gl.constexpr
):
    """Begins to load a stage's weights by TMA, and announces NUM_BYTES to the stage's barrier. matrix: the first
    coordinates of b_desc."""
    mbarrier.expect(full.index(stage), NUM_BYTES)
    column = n_tile * PIPE.tile_columns
    if PIPE.weight_k_first:
        coordinates = matrix + (k * PIPE.block_k, column)
    elif PIPE.block_n > PIPE.tile_columns:  # [G, 2, columns, in_width]: gates and ups
        coordinates = matrix + (0, column, k * PIPE.block_k)
    else:
        coordinates = matrix + (column, k * PIPE.block_k)
    tma_load(b_desc, coordinates, full.index(stage), b.index(stage))


@gluon.jit
def load(source, b_desc, row_range, ring, PIPE: gl.constexpr):
    """The role load. source: descriptor of contiguous rows, or the tensor of packed rows and row_index."""
    if PIPE.gathered:
        load_gathered(source, b_desc, row_range, ring, PIPE)
    else:
        load_contiguous(source, (b_desc, None, None), row_range, ring, PIPE)


@gluon.jit
def load_contiguous(source, weights, row_range, ring, PIPE: gl.constexpr):
    """The role load for contiguous rows. weights: their descriptor; None, or their table and the descriptor's anchor.
    Features past the last one are loaded as zeros."""
    b_desc, table, anchor = weights
    a, b, full, empty = ring
    prefix, num_row_tiles = row_tile_prefix(row_range, PIPE)
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), num_row_tiles * PIPE.num_n_tiles, gl.num_programs(0)):
        group, first_row, _end, _row_tile, n_tile = locate_tile(tile, prefix, row_range, PIPE)
        matrix = (group,) if table is None else matrix_coordinates(table, anchor, group)
        for k in range(PIPE.num_k):
            mbarrier.wait(empty.index(stage), phase)
            num_bytes: gl.constexpr = source.block_type.nbytes + b_desc.block_type.nbytes
            load_weight(b_desc, b, full, stage, matrix, n_tile, k, num_bytes, PIPE)
            coordinates = [first_row, k * PIPE.block_k]
            tma_load(source, coordinates, full.index(stage), a.index(stage))
            stage, phase = next_stage(stage, phase, PIPE)


@gluon.jit
def load_gathered(source, b_desc, row_range, ring, PIPE: gl.constexpr):
    """The role load for rows of [P, in_width] that row_index int32[N] names: cp.async, whose bytes no barrier counts.

    LAG stages later the bytes have landed, and one arrival signals it.
    """
    gl.static_assert(LAG <= PIPE.stages - 2)  # a stage is freed after the wait for the next one
    rows, row_index = source
    a, b, full, empty = ring
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    lane = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    column = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    prefix, num_row_tiles = row_tile_prefix(row_range, PIPE)
    stage = 0
    phase = 1
    num_begun = 0
    landed = 0  # stages, in the ring's order
    for tile in range(gl.program_id(0), num_row_tiles * PIPE.num_n_tiles, gl.num_programs(0)):
        group, first_row, end, _row_tile, n_tile = locate_tile(tile, prefix, row_range, PIPE)
        # Entries past the group's end are arbitrary; row 0 exists wherever a group has rows.
        row = gl.load(row_index + first_row + lane, mask=first_row + lane < end, other=0)
        pointers = rows + row.to(gl.int64)[:, None] * PIPE.in_width + column[None, :]
        for k in range(PIPE.num_k):
            mbarrier.wait(empty.index(stage), phase)
            load_weight(b_desc, b, full, stage, (group,), n_tile, k, b_desc.block_type.nbytes, PIPE)
            if PIPE.in_width % BLOCK_K == 0:
                copy_async(a.index(stage), pointers)
            else:  # zeros past the last feature
                inside = (column < PIPE.in_width - k * BLOCK_K)[None, :]
                copy_async(a.index(stage), pointers, mask=inside)
            async_copy.commit_group()
            pointers += BLOCK_K
            async_copy.wait_group(LAG)
            landed = announce(full, landed, num_begun >= LAG, PIPE)
            num_begun += 1
            stage, phase = next_stage(stage, phase, PIPE)
    async_copy.wait_group(0)
    for _ in gl.static_range(LAG):
        landed = announce(full, landed, num_begun > 0, PIPE)


@gluon.jit
def announce(full, stage, is_due, PIPE: gl.constexpr):
    """Makes this warpgroup's copies visible to WGMMA, arrives at full[stage] if it is due, returns the next stage."""
    fence_async_shared()
    thread_barrier()  # every thread's fence comes before the arrival
    mbarrier.arrive(full.index(stage), pred=is_due)
    following, _ = next_stage(stage, 0, PIPE)
    return gl.where(is_due, following, stage)


# ------------------------------------------------------------------------------------------------------ products


@gluon.jit
def product(ring, turn_barriers, stage, phase, WARPGROUP: gl.constexpr, PIPE: gl.constexpr):
    """Sum of products of a tile, or of its 64 rows, in fp32, and the ring's next stage and parity.

    One WGMMA stays in flight; the stage before it is then free.
    """
    a_ring, b_ring, full, empty = ring
    COLUMNS: gl.constexpr = PIPE.block_n
    acc = gl.zeros(
        [BLOCK_M if PIPE.alternate else CHUNK, COLUMNS],
        gl.float32,
        gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIPE.instruction_n, 16]),
    )
    for k in range(PIPE.num_k):
        mbarrier.wait(full.index(stage), phase)
        a = (
            a_ring.index(stage)
            if PIPE.alternate
            else a_ring.index(stage).slice(CHUNK * WARPGROUP, CHUNK, dim=0)
        )
        b = (
            b_ring.index(stage).reshape([BLOCK_K, COLUMNS])
            if PIPE.weight_k_first
            else b_ring.index(stage).reshape([COLUMNS, BLOCK_K]).permute([1, 0])
        )
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        # NOTE: not a carried `previous = stage`: if the loop's body sets a name to the value that it had before the
        # loop, Triton 3.6 assumes that the name does not change, and freezes it.
        mbarrier.arrive(empty.index(stage_before(stage, PIPE)), pred=k > 0)
        stage, phase = next_stage(stage, phase, PIPE)
    if (
        PIPE.alternate
    ):  # this tile has landed: from here on, the parities of the other warpgroup are unambiguous
        mbarrier.arrive(turn_barriers.index(1 - WARPGROUP))
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(stage_before(stage, PIPE)))
    return acc, stage, phase


@gluon.jit
def stage_before(stage, PIPE: gl.constexpr):
    return gl.where(stage == 0, PIPE.stages - 1, stage - 1)


@gluon.jit
def multiply(
    EPILOGUE: gl.constexpr,
    args,
    row_range,
    ring,
    turn_barriers,
    dump,
    WARPGROUP: gl.constexpr,
    PIPE: gl.constexpr,
):
    """The role multiply. EPILOGUE(acc, args, dump, turn, first_row, end, n_tile, WARPGROUP, PIPE) finishes a tile.

    dump: see make_dump. turn: parity of the number of tiles before this one.
    """
    prefix, num_row_tiles = row_tile_prefix(row_range, PIPE)
    stage = 0
    phase = 0
    turn = 0
    first = gl.program_id(0)
    if PIPE.alternate and WARPGROUP == 1:
        first += gl.num_programs(0)
        stage, phase = skip_tile(stage, phase, PIPE)
    STEP: gl.constexpr = (
        2 if PIPE.alternate else 1
    )  # from one of this warpgroup's tiles to the next one
    for tile in range(first, num_row_tiles * PIPE.num_n_tiles, STEP * gl.num_programs(0)):
        if PIPE.alternate:
            mbarrier.wait(turn_barriers.index(WARPGROUP), turn ^ (1 - WARPGROUP))
        acc, stage, phase = product(ring, turn_barriers, stage, phase, WARPGROUP, PIPE)
        if PIPE.alternate:
            stage, phase = skip_tile(stage, phase, PIPE)
        _group, first_row, end, _row_tile, n_tile = locate_tile(tile, prefix, row_range, PIPE)
        EPILOGUE(acc, args, dump, turn, first_row, end, n_tile, WARPGROUP, PIPE)
        turn ^= 1
    tma.store_wait(0)


# ------------------------------------------------------------------------------------------------------ the dump


@gluon.jit
def make_dump(dtype: gl.constexpr):
    """Shared memory for a tile's products in 8 chunks [CHUNK, CHUNK], 4 of each warpgroup; barriers dumped, freed.

    The chunks of a warpgroup: its rows from left to right, `alternate`: the upper rows first.
    """
    chunks = gl.allocate_shared_memory(dtype, [8, CHUNK, CHUNK], gl.NVMMASharedLayout(128, 16, 2))
    return chunks, make_barriers(2, 1), make_barriers(2, 1)


@gluon.jit
def halves(x, AXIS: gl.constexpr):
    """First and second half of x along an axis; stays in registers where a thread holds both."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return gl.split(
        x.reshape([M, 2, N // 2]).permute([0, 2, 1])
        if AXIS == 1
        else x.reshape([2, M // 2, N]).permute([1, 2, 0])
    )


@gluon.jit
def write_dump(acc, chunks, WARPGROUP: gl.constexpr, PIPE: gl.constexpr):
    """Rounds the products and writes them to the warpgroup's chunks."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    first, second = halves(acc, 0 if PIPE.alternate else 1)
    parts = halves(first, 1) + halves(second, 1)
    for i in gl.static_range(4):
        part = gl.convert_layout(parts[i], layout, assert_trivial=True).to(chunks.dtype)
        chunks.index(4 * WARPGROUP + i).store(part)


@gluon.jit
def store_chunk(desc, chunk, row, end, column):
    """TMA store of a chunk to a ragged descriptor; hardware skips the rows at and past `end`."""
    coordinates = [RAGGED, end, RAGGED - end + row, column]
    tma_store(desc, coordinates, chunk.reshape([1, 1, CHUNK, CHUNK]))


@gluon.jit
def leave_to_finish(
    acc, args, dump, turn, first_row, end, n_tile, WARPGROUP: gl.constexpr, PIPE: gl.constexpr
):
    """Epilogue: leaves a tile to the role finish."""
    chunks, dumped, freed = dump
    mbarrier.wait(freed.index(WARPGROUP), turn ^ 1)
    write_dump(acc, chunks, WARPGROUP, PIPE)
    fence_async_shared()  # finish may read it by TMA
    mbarrier.arrive(dumped.index(WARPGROUP))


@gluon.jit
def finish(FINISH: gl.constexpr, args, row_range, dump, PIPE: gl.constexpr):
    """The role finish. FINISH(args, dump, turn, first_chunk, first_row, end, n_tile, PIPE) waits for a tile, reads it,
    from the dump's chunks first_chunk.., and frees it."""
    prefix, num_row_tiles = row_tile_prefix(row_range, PIPE)
    turn = 0
    for tile in range(gl.program_id(0), num_row_tiles * PIPE.num_n_tiles, gl.num_programs(0)):
        _group, first_row, end, _row_tile, n_tile = locate_tile(tile, prefix, row_range, PIPE)
        FINISH(args, dump, turn, 0, first_row, end, n_tile, PIPE)
        turn ^= 1
    tma.store_wait(0)


@gluon.jit
def run(
    source, b_desc, row_range, EPILOGUE: gl.constexpr, args, dtype: gl.constexpr, PIPE: gl.constexpr
):
    """Runs all roles. EPILOGUE: argument of multiply; with finish_warps, of finish."""
    ring = make_ring(dtype, b_desc, PIPE)
    dump = make_dump(dtype)
    turn_barriers = make_barriers(2, 1)
    fence_async_shared()
    LOAD_WARPS: gl.constexpr = 4 if PIPE.gathered else 1
    if PIPE.finish_warps == 0:
        gl.warp_specialize(
            [
                (multiply, (EPILOGUE, args, row_range, ring, turn_barriers, dump, 0, PIPE)),
                (multiply, (EPILOGUE, args, row_range, ring, turn_barriers, dump, 1, PIPE)),
                (load, (source, b_desc, row_range, ring, PIPE)),
            ],
            [4, LOAD_WARPS],
            [PIPE.multiply_registers, PIPE.load_registers],
        )
    else:
        LEAVE: gl.constexpr = leave_to_finish
        gl.warp_specialize(
            [
                (multiply, (LEAVE, None, row_range, ring, turn_barriers, dump, 0, PIPE)),
                (multiply, (LEAVE, None, row_range, ring, turn_barriers, dump, 1, PIPE)),
                (finish, (EPILOGUE, args, row_range, dump, PIPE)),
                (load, (source, b_desc, row_range, ring, PIPE)),
            ],
            [4, PIPE.finish_warps, LOAD_WARPS],
            [PIPE.multiply_registers, PIPE.finish_registers, PIPE.load_registers],
        )
