"""Kernels that move rows by TMA (Gluon, Hopper) while GEMMs run: few SMs, many bytes in flight on each.

A program fills an SM, so a grid of n programs takes n SMs and leaves the others to a GEMM. Bytes in flight, a few
hundred rows, lie in shared memory and not in registers. Bits are those of triton/tokens.py.

A row is [segments, SEGMENT] 32-bit words, and a piece of it, one TMA box, is some segments of it. An arena is a
sequence of units of UNIT_BYTES, and a row may begin at each: offsets that barriers return are multiples of it, same as
those of leases. Reads past the last row give zeros and writes there vanish, without any traffic: a row that does not
travel is read from and written to such a place.
"""

import functools
from dataclasses import dataclass, replace

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from symmoe.kernels import control
from symmoe.kernels.hopper.act import pack, unpack
from symmoe.kernels.hopper.gemm import GLUON_DTYPES
from symmoe.kernels.hopper.gluon_names import thread_barrier, tma_load, tma_store
from symmoe.kernels.hopper.pipeline import make_barriers
from symmoe.kernels.launch.launch import Constants, Describe, fast_jit, launch

NUM_PUBLISHED = gl.constexpr(control.NUM_PUBLISHED)
UNIT_BYTES = gl.constexpr(256)
NOWHERE = gl.constexpr(0x7FFFFFF0)  # a unit past every arena
NEGATIVE_ZERO = gl.constexpr(-(2**31))  # the bits of -0.0 in fp32
MAX_SEGMENT = 256  # words: the longest side of a TMA box
MAX_PIECE_BYTES = 16 << 10  # of a pushed piece
STAGE_BYTES = 16 << 10
SUM_RING_BYTES = 72 << 10  # of each of the three rings of a program that sums rows
SUM_PIECE_BYTES = 8 << 10  # at most; 64 bytes to a thread
MAX_SUM_STAGES = 32
MOVERS = 4  # warps that move rows, each with its own ring
MOVE_STAGES = 3
PIECE_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, 4, 1], [2, 1, 0]))  # 16 bytes to a thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """How rows are cut.

    row_bytes: bytes of a row, which has `num_segments` of `segment` words.
    piece: segments of a piece, a power of 2; the last piece may reach past the end, where the hardware cuts it off.
    batch: pieces of a stage of a mover's ring.
    top_k: K, where rows of a token are copied.
    """

    row_bytes: int
    segment: int
    num_segments: int
    piece: int
    num_ranks: int
    column: int = 0
    top_k: int = 0
    batch: int = 1
    stages: int = MOVE_STAGES
    movers: int = MOVERS

    @property
    def num_pieces(self) -> int:
        """Pieces of a row."""
        return -(-self.num_segments // self.piece)

    @property
    def piece_bytes(self) -> int:
        """Bytes of a piece in shared memory."""
        return 4 * self.segment * self.piece


@gluon.jit
def prefetch(pointer):
    """Prefetches a line of 128 bytes, which will be read soon."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [pointer.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def next_stage(stage, phase, RING: gl.constexpr, CUT: gl.constexpr):
    """The stage after `stage` in a ring of CUT.stages, and its parity; rings lie one after the other."""
    FIRST: gl.constexpr = RING * CUT.stages
    LAST: gl.constexpr = FIRST + CUT.stages - 1
    wraps = stage == LAST
    return gl.where(wraps, FIRST, stage + 1), gl.where(wraps, phase ^ 1, phase)


# ------------------------------------------------------------------------------------------------------ push


@gluon.jit
def ask(x_desc, token_to_row, rank, num_tokens, batch, slots, full, stage, is_due, CUT: gl.constexpr):
    """Begins to load a batch of pieces: those of tokens that go to the rank, zeros for other tokens."""
    BATCH: gl.constexpr = CUT.batch
    mbarrier.expect(full.index(stage), BATCH * CUT.piece_bytes, pred=is_due)
    for i in gl.static_range(BATCH):
        item = batch * BATCH + i
        token = item // CUT.num_pieces
        piece = item - token * CUT.num_pieces
        row = gl.load(token_to_row + token * CUT.num_ranks + rank, mask=is_due & (token < num_tokens), other=-1)
        place = [gl.where(row >= 0, token, num_tokens), piece * CUT.piece, 0]
        tma_load(x_desc, place, full.index(stage), slots.index(stage * BATCH + i), pred=is_due)


@gluon.jit
def push(tensors, slots, full, MOVER: gl.constexpr, CUT: gl.constexpr):
    """The role: moves its share of the batches of pieces, from the tokens to the rank's buffer."""
    x_desc, arena_desc, token_to_row, received, rank, num_tokens = tensors
    BATCH: gl.constexpr = CUT.batch
    FIRST_STAGE: gl.constexpr = MOVER * CUT.stages  # first stage of this mover's ring
    LAST_STAGE: gl.constexpr = FIRST_STAGE + CUT.stages - 1
    offset = gl.load(received + rank * NUM_PUBLISHED + CUT.column)
    first_unit = offset // UNIT_BYTES
    step = gl.num_programs(0) * CUT.movers
    num_batches = (num_tokens * CUT.num_pieces + (BATCH - 1)) // BATCH
    first = gl.program_id(0) * CUT.movers + MOVER
    for early in gl.static_range(CUT.stages - 1):
        due = first + early * step
        stage_due = FIRST_STAGE + early
        ask(x_desc, token_to_row, rank, num_tokens, due, slots, full, stage_due, due < num_batches, CUT)
    stage = FIRST_STAGE
    phase = 0
    for batch in range(first, num_batches, step):
        mbarrier.wait(full.index(stage), phase)
        for i in gl.static_range(BATCH):
            item = batch * BATCH + i
            token = item // CUT.num_pieces
            piece = item - token * CUT.num_pieces
            row = gl.load(token_to_row + token * CUT.num_ranks + rank, mask=token < num_tokens, other=-1)
            unit = (first_unit + row.to(gl.int64) * (CUT.row_bytes // UNIT_BYTES)).to(gl.int32)
            goes = (row >= 0) & (offset >= 0)
            place = [gl.where(goes, unit, NOWHERE), piece * CUT.piece, 0]
            tma_store(arena_desc, place, slots.index(stage * BATCH + i))
        tma.store_wait(BATCH)  # the batch before has left its stage, which is filled next
        previous_stage = gl.where(stage == FIRST_STAGE, LAST_STAGE, stage - 1)
        later = batch + (CUT.stages - 1) * step
        ask(x_desc, token_to_row, rank, num_tokens, later, slots, full, previous_stage, later < num_batches, CUT)
        stage, phase = next_stage(stage, phase, MOVER, CUT)
    wait_until_written(stage)


@gluon.jit
def wait_until_written(stage):
    """Before a kernel ends, pieces must be written, not only read from shared memory."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r,r", [stage], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def make_mover_rings(desc, CUT: gl.constexpr):
    """The movers' stages, one after the other, and their barriers."""
    NUM_SLOTS: gl.constexpr = CUT.movers * CUT.stages * CUT.batch
    slots = gl.allocate_shared_memory(gl.int32, [NUM_SLOTS] + desc.block_shape, desc.layout)  # noqa: RUF005
    full = make_barriers(CUT.movers * CUT.stages, 1)
    fence_async_shared()
    return slots, full


@fast_jit(["x_desc", "arena_desc"], jit=gluon.jit)
def hopper_push_kernel(
    x_desc,  # [T, segments, SEGMENT], block [1, piece, SEGMENT]
    arena_desc,  # [units, segments, SEGMENT]
    token_to_row,  # [T, R]
    received,
    rank: gl.int32,
    num_tokens: gl.int32,
    CUT: gl.constexpr,
):
    slots, full = make_mover_rings(x_desc, CUT)
    tensors = (x_desc, arena_desc, token_to_row, received, rank, num_tokens)
    gl.warp_specialize(
        [
            (push, (tensors, slots, full, 0, CUT)),
            (push, (tensors, slots, full, 1, CUT)),
            (push, (tensors, slots, full, 2, CUT)),
            (push, (tensors, slots, full, 3, CUT)),
        ],
        [1, 1, 1],
        [64, 64, 64],
    )


def launch_push(x, token_to_row, peers, received, *, column, rank, num_ctas):
    """push_rows of x [T, H] to one rank, on `num_ctas` SMs. T is at least 1; the row is one that `takes_rows` takes."""
    row_bytes = x.shape[1] * x.element_size()
    constants = _push_plan(row_bytes, peers.num_ranks, column)
    arena = peers.views[rank]
    launch(hopper_push_kernel, (num_ctas,), constants, x, arena, token_to_row, received, rank, x.shape[0])


def takes_rows(rows: torch.Tensor) -> bool:
    """Whether the kernels can move rows of this length."""
    return rows.shape[1] * rows.element_size() % UNIT_BYTES.value == 0


@functools.cache
def _push_plan(row_bytes: int, num_ranks: int, column: int) -> Constants:
    cut = cut_rows(row_bytes, num_ranks, column, MAX_PIECE_BYTES)
    descriptors = {0: describe_rows(cut), 1: describe_rows(cut, UNIT_BYTES.value)}
    return Constants({"CUT": cut, "num_warps": 4}, descriptors)


@functools.cache
def cut_rows(row_bytes: int, num_ranks: int, column: int, most_bytes: int) -> Pieces:
    """Rows in pieces of at most `most_bytes`."""
    words = row_bytes // 4
    segment = min(MAX_SEGMENT, words & -words)
    num_segments = words // segment
    piece = min(1 << (num_segments - 1).bit_length(), most_bytes // (4 * segment))
    return Pieces(
        row_bytes=row_bytes,
        segment=segment,
        num_segments=num_segments,
        piece=piece,
        num_ranks=num_ranks,
        column=column,
        batch=max(1, STAGE_BYTES // (4 * segment * piece)),
    )


def describe_rows(cut: Pieces, unit_bytes: int = 0) -> Describe:
    """Function from contiguous rows to their descriptor, or from an arena in which a row may begin at any unit."""
    block, step = [1, cut.piece, cut.segment], unit_bytes or cut.row_bytes
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)

    def describe(rows: torch.Tensor) -> TensorDescriptor:
        shape = [(rows.nbytes - cut.row_bytes) // step + 1, cut.num_segments, cut.segment]
        return TensorDescriptor(rows.view(torch.int32), shape, [step // 4, cut.segment, 1], block, layout)

    return describe


# ------------------------------------------------------------------------------------------------------ copies


@gluon.jit
def load_slots(table, token, inside, CUT: gl.constexpr):
    """K scalars of a token; -1 without a token."""
    TOP_K: gl.constexpr = CUT.top_k
    values = ()
    for k in gl.static_range(TOP_K):
        values += (gl.load(table + token * TOP_K + k, mask=inside, other=-1),)
    return values


@gluon.jit
def primary_row(rows, CUT: gl.constexpr):
    """The first of a token's rows, and how many it has."""
    TOP_K: gl.constexpr = CUT.top_k
    primary = rows[0]
    number = (rows[0] >= 0).to(gl.int32)
    for k in gl.static_range(1, TOP_K):
        primary = gl.where(primary >= 0, primary, rows[k])
        number += (rows[k] >= 0).to(gl.int32)
    return primary, number


@gluon.jit
def ask_primary(tokens, batch, step, slots, full, stage, CUT: gl.constexpr):
    """Begins to load a batch of pieces: those of primary rows of tokens with several rows, zeros for others."""
    rows_desc, packed_to_row, begin, number = tokens
    BATCH: gl.constexpr = CUT.batch
    is_due = batch < (number * CUT.num_pieces + (BATCH - 1)) // BATCH
    mbarrier.expect(full.index(stage), BATCH * CUT.piece_bytes, pred=is_due)
    for i in range(BATCH):  # not unrolled: the code of all roles has to fit into the instruction cache
        item = batch * BATCH + i
        index = item // CUT.num_pieces
        piece = item - index * CUT.num_pieces
        later = (item + step * BATCH) // CUT.num_pieces
        prefetch(packed_to_row + (begin + gl.maximum(gl.minimum(later, number - 1), 0)) * CUT.top_k)
        rows = load_slots(packed_to_row, begin + index, is_due & (index < number), CUT)
        primary, num_rows = primary_row(rows, CUT)
        place = [gl.where(num_rows > 1, primary, NOWHERE), piece * CUT.piece, 0]
        tma_load(rows_desc, place, full.index(stage), slots.index(stage * BATCH + i), is_due)


@gluon.jit
def copy(tensors, slots, full, MOVER: gl.constexpr, CUT: gl.constexpr):
    """The role: copies its share of the batches of pieces, from primary rows to secondary ones."""
    rows_desc, packed_to_row, source_to_packed_start, source = tensors
    TOP_K: gl.constexpr = CUT.top_k
    BATCH: gl.constexpr = CUT.batch
    FIRST_STAGE: gl.constexpr = MOVER * CUT.stages  # first stage of this mover's ring
    LAST_STAGE: gl.constexpr = FIRST_STAGE + CUT.stages - 1
    begin = gl.load(source_to_packed_start + source)
    number = gl.load(source_to_packed_start + source + 1) - begin
    step = gl.num_programs(0) * CUT.movers
    num_batches = (number * CUT.num_pieces + (BATCH - 1)) // BATCH
    first = gl.program_id(0) * CUT.movers + MOVER
    tokens = (rows_desc, packed_to_row, begin, number)
    for early in range(CUT.stages - 1):
        ask_primary(tokens, first + early * step, step, slots, full, FIRST_STAGE + early, CUT)
    stage = FIRST_STAGE
    phase = 0
    for batch in range(first, num_batches, step):
        mbarrier.wait(full.index(stage), phase)
        tma.store_wait(0)  # the batch before has left its stage, which is filled next
        previous_stage = gl.where(stage == FIRST_STAGE, LAST_STAGE, stage - 1)
        ask_primary(tokens, batch + (CUT.stages - 1) * step, step, slots, full, previous_stage, CUT)
        for i in range(BATCH):
            item = batch * BATCH + i
            index = item // CUT.num_pieces
            segment = (item - index * CUT.num_pieces) * CUT.piece
            rows = load_slots(packed_to_row, begin + index, index < number, CUT)
            primary, _ = primary_row(rows, CUT)
            for k in gl.static_range(1, TOP_K):
                if (rows[k] >= 0) & (rows[k] != primary):
                    piece = slots.index(stage * BATCH + i)
                    tma_store(rows_desc, [rows[k], segment, 0], piece)
        stage, phase = next_stage(stage, phase, MOVER, CUT)
    wait_until_written(stage)


@fast_jit(["rows_desc"], jit=gluon.jit)
def hopper_fan_out_kernel(
    rows_desc,  # [N_cap, segments, SEGMENT], block [1, piece, SEGMENT]
    packed_to_row,  # [P_cap, K]
    source_to_packed_start,  # [R + 1]
    source: gl.int32,
    CUT: gl.constexpr,
):
    tensors = (rows_desc, packed_to_row, source_to_packed_start, source)
    slots, full = make_mover_rings(rows_desc, CUT)
    gl.warp_specialize(
        [
            (copy, (tensors, slots, full, 0, CUT)),
            (copy, (tensors, slots, full, 1, CUT)),
            (copy, (tensors, slots, full, 2, CUT)),
            (copy, (tensors, slots, full, 3, CUT)),
        ],
        [1, 1, 1],
        [64, 64, 64],
    )


def launch_fan_out(rows, packed_to_row, source_to_packed_start, *, source, num_ctas):
    """fan_out of rows [N_cap, H] of one rank's tokens, on `num_ctas` SMs."""
    row_bytes, top_k = rows.shape[1] * rows.element_size(), packed_to_row.shape[1]
    constants = _fan_out_plan(row_bytes, source_to_packed_start.numel() - 1, top_k)
    launch(hopper_fan_out_kernel, (num_ctas,), constants, rows, packed_to_row, source_to_packed_start, source)


@functools.cache
def _fan_out_plan(row_bytes: int, num_ranks: int, top_k: int) -> Constants:
    cut = replace(cut_rows(row_bytes, num_ranks, 0, MAX_PIECE_BYTES), top_k=top_k)
    return Constants({"CUT": cut, "num_warps": 4}, {0: describe_rows(cut)})


# ------------------------------------------------------------------------------------------------------ sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """How rows are summed by pairs of roles, three to a program: one warp asks for pieces, a warpgroup adds them.

    A stage of a pair's ring has a piece of one row. Both roles know by themselves which rows a token has, and in which
    order they are added.

    cut: pieces of the rows. top_k: K. own_rank: this rank, at home.
    """

    cut: Pieces
    top_k: int
    stages: int
    own_rank: int = -1
    pairs: int = 3


@gluon.jit
def ask_piece(desc, row, segment, ring, stage, phase, PAIR: gl.constexpr, SUMS: gl.constexpr):
    """Begins to load a piece of a row, if there is the row, into the stage; the next free stage."""
    slots, full, empty = ring
    if row >= 0:
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), SUMS.cut.piece_bytes)
        tma_load(desc, [row, segment, 0], full.index(stage), slots.index(stage))
        stage, phase = next_stage(stage, phase, PAIR, SUMS)
    return stage, phase


@gluon.jit
def add_piece(low, high, has, ring, stage, phase, PAIR: gl.constexpr, DTYPE: gl.constexpr, SUMS: gl.constexpr):
    """Sums of pairs of features, and the next row's pairs if there is such a row; the stage after it.

    A missing row must not turn -0.0 into 0.0.
    """
    slots, full, empty = ring
    if has:
        mbarrier.wait(full.index(stage), phase)
        more_low, more_high = unpack(slots.index(stage).load(PIECE_LAYOUT), DTYPE)
        thread_barrier()  # all threads have read
        mbarrier.arrive(empty.index(stage))
        low += more_low
        high += more_high
        stage, phase = next_stage(stage, phase, PAIR, SUMS)
    return low, high, stage, phase


@gluon.jit
def constant_piece(bits, SUMS: gl.constexpr):
    """First values of sums: fp32 of these bits (Triton turns the number -0.0 into 0.0)."""
    layout: gl.constexpr = PIECE_LAYOUT
    return gl.full([1, SUMS.cut.piece, SUMS.cut.segment], bits, gl.int32, layout).to(gl.float32, bitcast=True)


@gluon.jit
def store_piece(words, low, high, row, first_segment, DTYPE: gl.constexpr, SUMS: gl.constexpr):
    """Rounds a piece and stores it in a row."""
    layout: gl.constexpr = PIECE_LAYOUT
    CUT: gl.constexpr = SUMS.cut
    END: gl.constexpr = CUT.num_segments * CUT.segment
    segment = first_segment + gl.arange(0, CUT.piece, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    word = gl.arange(0, CUT.segment, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    places = gl.expand_dims(gl.expand_dims(segment, 0), 2) * CUT.segment + gl.expand_dims(gl.expand_dims(word, 0), 1)
    target = words + row.to(gl.int64) * (CUT.row_bytes // 4) + places
    gl.store(target, pack(low, high, DTYPE), mask=places < END)


@gluon.jit
def place_of(item, SUMS: gl.constexpr):
    """Token and first segment of an item: a piece of the token's sum."""
    token = item // SUMS.cut.num_pieces
    return token, (item - token * SUMS.cut.num_pieces) * SUMS.cut.piece


@gluon.jit
def rows_of_home(source_to_packed_start, received, home, SUMS: gl.constexpr):
    """First and number of the packed rows of a rank's tokens; none if the call has failed."""
    begin = gl.load(source_to_packed_start + home)
    number = gl.load(source_to_packed_start + home + 1) - begin
    return begin, gl.where(gl.load(received + home * NUM_PUBLISHED + SUMS.cut.column) < 0, 0, number)


@gluon.jit
def ask_for_push(tensors, ring, PAIR: gl.constexpr, SUMS: gl.constexpr):
    """The role: loads pieces of the rows of each token of the rank `home`."""
    rows_desc, _arena, packed_to_row, source_to_packed_start, received, _rank, home = tensors
    TOP_K: gl.constexpr = SUMS.top_k
    begin, number = rows_of_home(source_to_packed_start, received, home, SUMS)
    step = gl.num_programs(0) * SUMS.pairs
    stage = PAIR * SUMS.stages + 0
    phase = 1
    for item in range(gl.program_id(0) * SUMS.pairs + PAIR, number * SUMS.cut.num_pieces, step):
        index, segment = place_of(item, SUMS)
        later, _ = place_of(item + 2 * step, SUMS)
        prefetch(packed_to_row + (begin + gl.minimum(later, number - 1)) * TOP_K)
        rows = load_slots(packed_to_row, begin + index, True, SUMS)
        for k in gl.static_range(TOP_K):
            stage, phase = ask_piece(rows_desc, rows[k], segment, ring, stage, phase, PAIR, SUMS)


@gluon.jit
def add_for_push(tensors, ring, PAIR: gl.constexpr, SUMS: gl.constexpr, DTYPE: gl.constexpr):
    """The role: sums the pieces, and stores the sums in the arena of `home`."""
    _rows_desc, arena, packed_to_row, source_to_packed_start, received, rank, home = tensors
    TOP_K: gl.constexpr = SUMS.top_k
    begin, number = rows_of_home(source_to_packed_start, received, home, SUMS)
    published = received + home * NUM_PUBLISHED + SUMS.cut.column
    offset = gl.load(published)
    region_bytes = gl.load(published + 1) - offset + SUMS.cut.row_bytes
    unit = (offset + (rank - (rank > home).to(gl.int32)) * region_bytes) // UNIT_BYTES
    words = arena + unit * (UNIT_BYTES // 4)
    stage = PAIR * SUMS.stages + 0
    phase = 0
    step = gl.num_programs(0) * SUMS.pairs
    for item in range(gl.program_id(0) * SUMS.pairs + PAIR, number * SUMS.cut.num_pieces, step):
        index, segment = place_of(item, SUMS)
        rows = load_slots(packed_to_row, begin + index, True, SUMS)
        highest = rows[0]
        low = constant_piece(NEGATIVE_ZERO, SUMS)  # adding any number to it changes no bits of the number
        high = constant_piece(NEGATIVE_ZERO, SUMS)
        for k in gl.static_range(TOP_K):
            highest = gl.maximum(highest, rows[k])
            low, high, stage, phase = add_piece(low, high, rows[k] >= 0, ring, stage, phase, PAIR, DTYPE, SUMS)
        if highest >= 0:
            store_piece(words, low, high, index, segment, DTYPE, SUMS)


@gluon.jit
def make_rings(desc, SUMS: gl.constexpr):
    """The pairs' stages, one after the other, and their barriers."""
    NUM_STAGES: gl.constexpr = SUMS.pairs * SUMS.stages
    slots = gl.allocate_shared_memory(gl.int32, [NUM_STAGES] + desc.block_shape, desc.layout)  # noqa: RUF005
    full = make_barriers(NUM_STAGES, 1)
    empty = make_barriers(NUM_STAGES, 1)
    fence_async_shared()
    return slots, full, empty


@fast_jit(["rows_desc", "arena"], jit=gluon.jit)
def hopper_push_sums_kernel(
    rows_desc,  # [N_cap, segments, SEGMENT], block [1, piece, SEGMENT]
    arena,  # words
    packed_to_row,  # [P_cap, K]
    source_to_packed_start,  # [R + 1]
    received,
    rank: gl.int32,
    home: gl.int32,
    SUMS: gl.constexpr,
    DTYPE: gl.constexpr,
):
    tensors = (rows_desc, arena, packed_to_row, source_to_packed_start, received, rank, home)
    ring = make_rings(rows_desc, SUMS)
    gl.warp_specialize(
        [
            (add_for_push, (tensors, ring, 0, SUMS, DTYPE)),
            (add_for_push, (tensors, ring, 1, SUMS, DTYPE)),
            (add_for_push, (tensors, ring, 2, SUMS, DTYPE)),
            (ask_for_push, (tensors, ring, 0, SUMS)),
            (ask_for_push, (tensors, ring, 1, SUMS)),
            (ask_for_push, (tensors, ring, 2, SUMS)),
        ],
        [4, 4, 1, 1, 1],
        [128, 128, 64, 64, 64],
    )


def launch_push_sums(rows, packed_to_row, source_to_packed_start, peers, received, *, column, home, num_ctas):
    """push_sums of rows [N_cap, H] to one rank, on `num_ctas` SMs."""
    constants = _push_sums_plan(rows.shape[1], rows.dtype, packed_to_row.shape[1], peers.num_ranks, column)
    tables = (packed_to_row, source_to_packed_start, received)
    arena = peers.views[home].view(torch.int32)
    launch(hopper_push_sums_kernel, (num_ctas,), constants, rows, arena, *tables, peers.rank, home)


@functools.cache
def _push_sums_plan(width, dtype, top_k, num_ranks, column) -> Constants:
    sums = _sums(width, dtype, top_k, num_ranks, column)
    return Constants(_named(sums, dtype), {0: describe_rows(sums.cut)})


def _sums(width: int, dtype: torch.dtype, top_k: int, num_ranks: int, column: int = 0, own_rank: int = -1) -> Sums:
    """Sums with as many stages as a ring takes."""
    cut = cut_rows(width * dtype.itemsize, num_ranks, column, SUM_PIECE_BYTES)
    stages = min(SUM_RING_BYTES // cut.piece_bytes, MAX_SUM_STAGES)
    return Sums(cut=cut, top_k=top_k, stages=stages, own_rank=own_rank)


def _named(sums: Sums, dtype: torch.dtype) -> dict[str, object]:
    return {"SUMS": sums, "DTYPE": GLUON_DTYPES[dtype], "num_warps": 4}


@gluon.jit
def is_failed(ready, arrived):
    """Whether the trip's barriers say that nothing has moved."""
    return gl.minimum(gl.load(ready), gl.load(arrived)) < 0


@gluon.jit
def first_rows(packed_start, num_tokens, SUMS: gl.constexpr):
    """What has to be added to a token's packed row on each rank to get the row of `returned`."""
    NUM_RANKS: gl.constexpr = SUMS.cut.num_ranks
    OWN: gl.constexpr = SUMS.own_rank
    rows = ()
    for rank in gl.static_range(NUM_RANKS):
        rows += ((rank - (rank > OWN)) * num_tokens - gl.load(packed_start + rank),)
    return rows


@gluon.jit
def ask_for_home(tensors, ring, PAIR: gl.constexpr, SUMS: gl.constexpr):
    """The role: loads pieces of every token's rows, in the order of ranks: one from each peer, all from this rank."""
    rows_desc, returned_desc, _words, tables, ready, arrived, num_tokens = tensors
    token_to_packed_row, packed_start, slot_to_rank, slot_to_row = tables
    NUM_RANKS: gl.constexpr = SUMS.cut.num_ranks
    TOP_K: gl.constexpr = SUMS.top_k
    OWN: gl.constexpr = SUMS.own_rank
    firsts = first_rows(packed_start, num_tokens, SUMS)
    number = gl.where(is_failed(ready, arrived), 0, num_tokens)
    step = gl.num_programs(0) * SUMS.pairs
    stage = PAIR * SUMS.stages + 0
    phase = 1
    for item in range(gl.program_id(0) * SUMS.pairs + PAIR, number * SUMS.cut.num_pieces, step):
        token, segment = place_of(item, SUMS)
        later, _ = place_of(item + 2 * step, SUMS)
        later = gl.minimum(later, number - 1)
        prefetch(token_to_packed_row + later * NUM_RANKS)
        prefetch(slot_to_rank + later * TOP_K)
        prefetch(slot_to_row + later * TOP_K)
        own_rows = load_slots(slot_to_row, token, True, SUMS)
        ranks = load_slots(slot_to_rank, token, True, SUMS)
        for rank in gl.static_range(NUM_RANKS):
            if rank == OWN:
                for k in gl.static_range(TOP_K):
                    row = gl.where(ranks[k] == OWN, own_rows[k], -1)
                    stage, phase = ask_piece(rows_desc, row, segment, ring, stage, phase, PAIR, SUMS)
            else:
                packed_row = gl.load(token_to_packed_row + token * NUM_RANKS + rank)
                row = gl.where(packed_row >= 0, packed_row + firsts[rank], -1)
                stage, phase = ask_piece(returned_desc, row, segment, ring, stage, phase, PAIR, SUMS)


@gluon.jit
def add_for_home(tensors, ring, PAIR: gl.constexpr, SUMS: gl.constexpr, DTYPE: gl.constexpr):
    """The role: sums the pieces. This rank's rows are summed and rounded first, as peers do with their rows."""
    _rows_desc, _returned_desc, words, tables, ready, arrived, num_tokens = tensors
    token_to_packed_row, _packed_start, slot_to_rank, slot_to_row = tables
    NUM_RANKS: gl.constexpr = SUMS.cut.num_ranks
    TOP_K: gl.constexpr = SUMS.top_k
    OWN: gl.constexpr = SUMS.own_rank
    moves = not is_failed(ready, arrived)
    stage = PAIR * SUMS.stages + 0
    phase = 0
    step = gl.num_programs(0) * SUMS.pairs
    for item in range(gl.program_id(0) * SUMS.pairs + PAIR, num_tokens * SUMS.cut.num_pieces, step):
        token, segment = place_of(item, SUMS)
        own_rows = load_slots(slot_to_row, token, moves, SUMS)
        ranks = load_slots(slot_to_rank, token, moves, SUMS)
        low = constant_piece(0, SUMS)
        high = constant_piece(0, SUMS)
        for rank in gl.static_range(NUM_RANKS):
            if rank == OWN:
                # This may be 0.0 where peers' sums are -0.0: added to 0.0, both give the same.
                own_low = constant_piece(0, SUMS)
                own_high = constant_piece(0, SUMS)
                for k in gl.static_range(TOP_K):
                    has = (ranks[k] == OWN) & (own_rows[k] >= 0)
                    own_low, own_high, stage, phase = add_piece(
                        own_low, own_high, has, ring, stage, phase, PAIR, DTYPE, SUMS
                    )
                rounded_low, rounded_high = unpack(pack(own_low, own_high, DTYPE), DTYPE)
                low += rounded_low
                high += rounded_high
            else:
                has = gl.load(token_to_packed_row + token * NUM_RANKS + rank, mask=moves, other=-1) >= 0
                low, high, stage, phase = add_piece(low, high, has, ring, stage, phase, PAIR, DTYPE, SUMS)
        low = gl.where(moves, low, float("nan"))
        high = gl.where(moves, high, float("nan"))
        store_piece(words, low, high, token, segment, DTYPE, SUMS)


@fast_jit(["rows_desc", "returned_desc", "words"], jit=gluon.jit)
def hopper_sum_home_kernel(
    rows_desc,  # [N_cap, segments, SEGMENT], block [1, piece, SEGMENT]
    returned_desc,  # [(R - 1) * T, segments, SEGMENT], the same block
    words,  # of out
    token_to_packed_row,  # [T, R]
    packed_start,  # [R]
    slot_to_rank,  # [T, K]
    slot_to_row,
    ready,
    arrived,
    num_tokens: gl.int32,
    SUMS: gl.constexpr,
    DTYPE: gl.constexpr,
):
    tables = (token_to_packed_row, packed_start, slot_to_rank, slot_to_row)
    tensors = (rows_desc, returned_desc, words, tables, ready, arrived, num_tokens)
    ring = make_rings(rows_desc, SUMS)
    gl.warp_specialize(
        [
            (add_for_home, (tensors, ring, 0, SUMS, DTYPE)),
            (add_for_home, (tensors, ring, 1, SUMS, DTYPE)),
            (add_for_home, (tensors, ring, 2, SUMS, DTYPE)),
            (ask_for_home, (tensors, ring, 0, SUMS)),
            (ask_for_home, (tensors, ring, 1, SUMS)),
            (ask_for_home, (tensors, ring, 2, SUMS)),
        ],
        [4, 4, 1, 1, 1],
        [128, 128, 64, 64, 64],
    )


def launch_sum_home(rows, index, trip, out, *, rank, num_ctas):
    """sum_home to out [T, H], on `num_ctas` SMs. T is at least 1, and there are peers."""
    _, packed_start, _, slot_to_row = index
    constants = _sum_home_plan(out.shape[1], out.dtype, slot_to_row.shape[1], packed_start.numel(), rank)
    words = out.view(torch.int32)
    launch(hopper_sum_home_kernel, (num_ctas,), constants, *rows, words, *index, *trip, out.shape[0])


@functools.cache
def _sum_home_plan(width, dtype, top_k, num_ranks, own_rank) -> Constants:
    sums = _sums(width, dtype, top_k, num_ranks, own_rank=own_rank)
    return Constants(_named(sums, dtype), dict.fromkeys((0, 1), describe_rows(sums.cut)))
