"""Kernels that move rows by TMA (Gluon, Hopper) while GEMMs run: few SMs, many bytes in flight on each.

A program fills an SM, so a grid of n programs takes n SMs and leaves the others to a GEMM. The bytes in flight, a few
hundred rows, are in shared memory, not in registers. Results have the bits of triton/tokens.py.

A row is [segments, SEGMENT] 32-bit words. A piece of a row, one TMA box, is some of its segments. An arena is a
sequence of units of UNIT_BYTES, and a row may begin at any unit: offsets of leases, which barriers return, are
multiples of it. Reads past the last row give zeros and writes there have no effect, without any traffic: a row that
does not travel is read from and written to such a place.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from symmoe.kernels import control
from symmoe.kernels.hopper.act import pack, unpack
from symmoe.kernels.hopper.gluon_names import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    tma,
    tma_load,
    tma_store,
)
from symmoe.kernels.hopper.pipeline import make_barriers
from symmoe.kernels.hopper.table import GLUON_DTYPES
from symmoe.kernels.launch.launch import Constants, Describe, fast_jit, launch

NUM_PUBLISHED = gl.constexpr(control.NUM_PUBLISHED)
UNIT_BYTES = gl.constexpr(256)
NOWHERE = gl.constexpr(0x7FFFFFF0)  # a unit past every arena
NEGATIVE_ZERO = gl.constexpr(-(2**31))  # the bits of -0.0 in fp32
MAX_SEGMENT = 256  # words: the longest side of a TMA box
MAX_PIECE_BYTES = 16 << 10  # bytes of a pushed piece
STAGE_BYTES = 16 << 10
SUM_RING_BYTES = 72 << 10  # of each of the three rings in a program that sums rows
SUM_PIECE_BYTES = 8 << 10  # at most; 64 bytes per thread
MAX_SUM_STAGES = 32
MOVERS = 4  # warps that move rows, each with its own ring
MOVE_STAGES = 3
PIECE_LAYOUT = gl.constexpr(
    gl.BlockedLayout([1, 1, 4], [1, 1, 32], [1, 4, 1], [2, 1, 0])
)  # 16 bytes per thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """How rows are cut, and the rings of a program: one per mover, or one per pair of roles that sums rows.

    row_bytes: bytes of a row, which has `num_segments` segments of `segment` words. piece: segments of a piece, a power
    of 2; the last piece may reach past the end, where the hardware cuts it off.
    batch: pieces of a stage.
    top_k: K, where rows of a token are read. own_rank: this rank, in sum_home. dtype: Gluon dtype of summed rows.
    """

    row_bytes: int
    segment: int
    num_segments: int
    piece: int
    num_ranks: int = 0
    column: int = 0
    top_k: int = 0
    own_rank: int = -1
    dtype: Any = None
    batch: int = 1
    stages: int = MOVE_STAGES
    rings: int = MOVERS

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
    """Prefetches a line of 128 bytes."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointer.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def row_and_segment(item, CUT: gl.constexpr):
    """Token and first segment of an item: a piece of the token's row or packed row."""
    token = item // CUT.num_pieces
    return token, (item - token * CUT.num_pieces) * CUT.piece


@gluon.jit
def next_stage(stage, phase, RING: gl.constexpr, CUT: gl.constexpr):
    """The stage after `stage` in a ring of CUT.stages, and its parity; rings lie one after the other."""
    wraps = stage == (RING + 1) * CUT.stages - 1
    return gl.where(wraps, RING * CUT.stages, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def stage_before(stage, RING: gl.constexpr, CUT: gl.constexpr):
    """The stage before `stage` in a ring, as in next_stage."""
    return gl.where(stage == RING * CUT.stages, (RING + 1) * CUT.stages - 1, stage - 1)


# ------------------------------------------------------------------------------------------------------ push


@gluon.jit
def request_batch(
    x_desc, token_to_row, rank, num_tokens, batch, slots, full, stage, is_due, CUT: gl.constexpr
):
    """Begins to load a batch of pieces: for tokens that go to the rank their pieces, for other tokens zeros."""
    BATCH: gl.constexpr = CUT.batch
    mbarrier.expect(full.index(stage), BATCH * CUT.piece_bytes, pred=is_due)
    for i in gl.static_range(BATCH):
        token, segment = row_and_segment(batch * BATCH + i, CUT)
        row = gl.load(
            token_to_row + token * CUT.num_ranks + rank,
            mask=is_due & (token < num_tokens),
            other=-1,
        )
        coordinates = [gl.where(row >= 0, token, num_tokens), segment, 0]
        tma_load(
            x_desc, coordinates, full.index(stage), slots.index(stage * BATCH + i), pred=is_due
        )


@gluon.jit
def push(tensors, ring, MOVER: gl.constexpr, CUT: gl.constexpr):
    """The role of a mover: moves its share of the batches of pieces, from the tokens to the rank's buffer."""
    x_desc, arena_desc, token_to_row, received, rank, num_tokens = tensors
    slots, full = ring
    BATCH: gl.constexpr = CUT.batch
    FIRST_STAGE: gl.constexpr = MOVER * CUT.stages  # first stage of this mover's ring
    offset = gl.load(received + rank * NUM_PUBLISHED + CUT.column)
    first_unit = offset // UNIT_BYTES
    step = gl.num_programs(0) * CUT.rings
    num_batches = (num_tokens * CUT.num_pieces + (BATCH - 1)) // BATCH
    first = gl.program_id(0) * CUT.rings + MOVER
    for early in gl.static_range(CUT.stages - 1):
        due = first + early * step
        request_batch(
            x_desc,
            token_to_row,
            rank,
            num_tokens,
            due,
            slots,
            full,
            FIRST_STAGE + early,
            due < num_batches,
            CUT,
        )
    stage = FIRST_STAGE
    phase = 0
    for batch in range(first, num_batches, step):
        mbarrier.wait(full.index(stage), phase)
        for i in gl.static_range(BATCH):
            token, segment = row_and_segment(batch * BATCH + i, CUT)
            row = gl.load(
                token_to_row + token * CUT.num_ranks + rank, mask=token < num_tokens, other=-1
            )
            unit = (first_unit + row.to(gl.int64) * (CUT.row_bytes // UNIT_BYTES)).to(gl.int32)
            goes = (row >= 0) & (offset >= 0)
            coordinates = [gl.where(goes, unit, NOWHERE), segment, 0]
            tma_store(arena_desc, coordinates, slots.index(stage * BATCH + i))
        tma.store_wait(BATCH)  # the earlier batch has left its stage, which is filled next
        previous_stage = stage_before(stage, MOVER, CUT)
        later = batch + (CUT.stages - 1) * step
        request_batch(
            x_desc,
            token_to_row,
            rank,
            num_tokens,
            later,
            slots,
            full,
            previous_stage,
            later < num_batches,
            CUT,
        )
        stage, phase = next_stage(stage, phase, MOVER, CUT)
    wait_until_written(stage)


@gluon.jit
def wait_until_written(stage):
    """Waits until pieces are written, not only read from shared memory, as a kernel must before it ends."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, 0;",
        "=r,r",
        [stage],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def make_rings(desc, CUT: gl.constexpr):
    """The rings' stages, one after the other, and the barriers that signal full stages."""
    slots = gl.allocate_shared_memory(
        gl.int32, [CUT.rings * CUT.stages * CUT.batch] + desc.block_shape, desc.layout
    )
    return slots, make_barriers(CUT.rings * CUT.stages, 1)


@gluon.jit
def role(ROLE: gl.constexpr, tensors, ring, RING: gl.constexpr, CUT: gl.constexpr):
    """Runs a role with the stages of a ring."""
    ROLE(tensors, ring, RING, CUT)


@gluon.jit
def run_movers(ROLE: gl.constexpr, tensors, desc, CUT: gl.constexpr):
    """Runs a role of one warp in MOVERS warps."""
    ring = make_rings(desc, CUT)
    fence_async_shared()
    gl.warp_specialize(
        [
            (role, (ROLE, tensors, ring, 0, CUT)),
            (role, (ROLE, tensors, ring, 1, CUT)),
            (role, (ROLE, tensors, ring, 2, CUT)),
            (role, (ROLE, tensors, ring, 3, CUT)),
        ],
        [1, 1, 1],
        [64, 64, 64],
    )


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
    run_movers(push, (x_desc, arena_desc, token_to_row, received, rank, num_tokens), x_desc, CUT)


def launch_push(x, token_to_row, peers, received, *, column, rank, num_ctas):
    """push_rows of x [T, H] to one rank, on `num_ctas` SMs. T is at least 1; `takes_rows` holds for x."""
    launch(
        hopper_push_kernel,
        (num_ctas,),
        _of_movers(
            x.shape[1] * x.element_size(),
            UNIT_BYTES.value,
            num_ranks=peers.num_ranks,
            column=column,
        ),
        x,
        peers.views[rank],
        token_to_row,
        received,
        rank,
        x.shape[0],
    )


def takes_rows(rows: torch.Tensor) -> bool:
    """Whether the kernels can move rows of this length."""
    return rows.shape[1] * rows.element_size() % UNIT_BYTES.value == 0


@functools.cache
def _of_movers(row_bytes: int, unit_bytes: int = 0, **sizes: int) -> Constants:
    """Constants of the movers. unit_bytes: the arena's, if the second argument is an arena."""
    cut = cut_rows(row_bytes, MAX_PIECE_BYTES, **sizes)
    arena = {1: describe_rows(cut, unit_bytes)} if unit_bytes else {}
    return Constants({"CUT": cut, "num_warps": 4}, {0: describe_rows(cut), **arena})


def cut_rows(row_bytes: int, max_piece_bytes: int, **sizes: Any) -> Pieces:
    """Rows in pieces of at most `max_piece_bytes`."""
    words = row_bytes // 4
    segment = min(MAX_SEGMENT, words & -words)
    num_segments = words // segment
    piece = min(1 << (num_segments - 1).bit_length(), max_piece_bytes // (4 * segment))
    sizes = {"batch": max(1, STAGE_BYTES // (4 * segment * piece)), **sizes}
    return Pieces(
        row_bytes=row_bytes, segment=segment, num_segments=num_segments, piece=piece, **sizes
    )


def describe_rows(cut: Pieces, unit_bytes: int = 0) -> Describe:
    """Function from contiguous rows to their descriptor, or from an arena in which a row may begin at any unit."""
    block, step = [1, cut.piece, cut.segment], unit_bytes or cut.row_bytes
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)

    def describe(rows: torch.Tensor) -> TensorDescriptor:
        shape = [(rows.nbytes - cut.row_bytes) // step + 1, cut.num_segments, cut.segment]
        return TensorDescriptor(
            rows.view(torch.int32), shape, [step // 4, cut.segment, 1], block, layout
        )

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
def request_primary_batch(tokens, batch, step, slots, full, stage, CUT: gl.constexpr):
    """Begins to load a batch of pieces: for tokens with several rows, of their primary rows; for others, zeros."""
    rows_desc, packed_to_row, begin, number = tokens
    is_due = batch < (number * CUT.num_pieces + (CUT.batch - 1)) // CUT.batch
    mbarrier.expect(full.index(stage), CUT.batch * CUT.piece_bytes, pred=is_due)
    for i in range(
        CUT.batch
    ):  # not unrolled: the code of all roles has to fit into the instruction cache
        index, segment = row_and_segment(batch * CUT.batch + i, CUT)
        later, _ = row_and_segment(batch * CUT.batch + i + step * CUT.batch, CUT)
        prefetch(packed_to_row + (begin + gl.maximum(gl.minimum(later, number - 1), 0)) * CUT.top_k)
        rows = load_slots(packed_to_row, begin + index, is_due & (index < number), CUT)
        primary, num_rows = primary_row(rows, CUT)
        coordinates = [gl.where(num_rows > 1, primary, NOWHERE), segment, 0]
        tma_load(
            rows_desc, coordinates, full.index(stage), slots.index(stage * CUT.batch + i), is_due
        )


@gluon.jit
def copy(tensors, ring, MOVER: gl.constexpr, CUT: gl.constexpr):
    """The role of a mover: copies its share of the batches of pieces, from primary rows to secondary rows."""
    rows_desc, packed_to_row, source_to_packed_start, source = tensors
    slots, full = ring
    TOP_K: gl.constexpr = CUT.top_k
    FIRST_STAGE: gl.constexpr = MOVER * CUT.stages  # first stage of this mover's ring
    begin = gl.load(source_to_packed_start + source)
    number = gl.load(source_to_packed_start + source + 1) - begin
    step = gl.num_programs(0) * CUT.rings
    num_batches = (number * CUT.num_pieces + (CUT.batch - 1)) // CUT.batch
    first = gl.program_id(0) * CUT.rings + MOVER
    tokens = (rows_desc, packed_to_row, begin, number)
    for early in range(CUT.stages - 1):
        request_primary_batch(
            tokens, first + early * step, step, slots, full, FIRST_STAGE + early, CUT
        )
    stage = FIRST_STAGE
    phase = 0
    for batch in range(first, num_batches, step):
        mbarrier.wait(full.index(stage), phase)
        tma.store_wait(0)  # the earlier batch has left its stage, which is filled next
        previous_stage = stage_before(stage, MOVER, CUT)
        request_primary_batch(
            tokens, batch + (CUT.stages - 1) * step, step, slots, full, previous_stage, CUT
        )
        for i in range(CUT.batch):
            index, segment = row_and_segment(batch * CUT.batch + i, CUT)
            rows = load_slots(packed_to_row, begin + index, index < number, CUT)
            primary, _ = primary_row(rows, CUT)
            for k in gl.static_range(1, TOP_K):
                if (rows[k] >= 0) & (rows[k] != primary):
                    piece = slots.index(stage * CUT.batch + i)
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
    run_movers(copy, (rows_desc, packed_to_row, source_to_packed_start, source), rows_desc, CUT)


def launch_fan_out(rows, packed_to_row, source_to_packed_start, *, source, num_ctas):
    """fan_out of rows [N_cap, H] of one rank's tokens, on `num_ctas` SMs."""
    launch(
        hopper_fan_out_kernel,
        (num_ctas,),
        _of_movers(rows.shape[1] * rows.element_size(), top_k=packed_to_row.shape[1]),
        rows,
        packed_to_row,
        source_to_packed_start,
        source,
    )


# ------------------------------------------------------------------------------------------------------ sums


# Pairs of roles sum rows, three pairs per program: one warp requests pieces, a warpgroup adds them. A stage of a pair's
# ring has a piece of one row. Each role computes by itself which rows a token has, and their order in the sum.


@gluon.jit
def request_piece(desc, row, segment, ring, stage, phase, PAIR: gl.constexpr, CUT: gl.constexpr):
    """Begins to load a piece of a row, if the row exists, into the stage; returns the next free stage."""
    slots, full, empty = ring
    if row >= 0:
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), CUT.piece_bytes)
        tma_load(desc, [row, segment, 0], full.index(stage), slots.index(stage))
        stage, phase = next_stage(stage, phase, PAIR, CUT)
    return stage, phase


@gluon.jit
def add_piece(low, high, is_present, ring, stage, phase, PAIR: gl.constexpr, CUT: gl.constexpr):
    """Adds the next row's pairs of features to the sums, if the row exists; returns the sums and the next stage.

    A missing row must not turn -0.0 into 0.0.
    """
    slots, full, empty = ring
    if is_present:
        mbarrier.wait(full.index(stage), phase)
        more_low, more_high = unpack(slots.index(stage).load(PIECE_LAYOUT), CUT.dtype)
        thread_barrier()  # all threads have read
        mbarrier.arrive(empty.index(stage))
        low += more_low
        high += more_high
        stage, phase = next_stage(stage, phase, PAIR, CUT)
    return low, high, stage, phase


@gluon.jit
def constant_piece(bits, CUT: gl.constexpr):
    """Initial values of sums: fp32 of these bits (Triton turns the number -0.0 into 0.0)."""
    words = gl.full([1, CUT.piece, CUT.segment], bits, gl.int32, PIECE_LAYOUT)
    return words.to(gl.float32, bitcast=True)


@gluon.jit
def store_piece(words, low, high, row, first_segment, CUT: gl.constexpr):
    """Rounds a piece and stores it in a row."""
    segment = first_segment + gl.arange(
        0, CUT.piece, gl.SliceLayout(0, gl.SliceLayout(2, PIECE_LAYOUT))
    )
    word = gl.arange(0, CUT.segment, gl.SliceLayout(0, gl.SliceLayout(1, PIECE_LAYOUT)))
    offsets = gl.expand_dims(gl.expand_dims(segment, 0), 2) * CUT.segment + gl.expand_dims(
        gl.expand_dims(word, 0), 1
    )
    target = words + row.to(gl.int64) * (CUT.row_bytes // 4) + offsets
    gl.store(target, pack(low, high, CUT.dtype), mask=offsets < CUT.num_segments * CUT.segment)


@gluon.jit
def rows_of_home(source_to_packed_start, received, home, CUT: gl.constexpr):
    """The first packed row of a rank's tokens, and their number; 0 rows if the call has failed."""
    begin = gl.load(source_to_packed_start + home)
    number = gl.load(source_to_packed_start + home + 1) - begin
    return begin, gl.where(gl.load(received + home * NUM_PUBLISHED + CUT.column) < 0, 0, number)


@gluon.jit
def request_for_push(tensors, ring, PAIR: gl.constexpr, CUT: gl.constexpr):
    """The requesting role: loads pieces of the rows of each token of the rank `home`."""
    rows_desc, _arena, packed_to_row, source_to_packed_start, received, _rank, home = tensors
    TOP_K: gl.constexpr = CUT.top_k
    begin, number = rows_of_home(source_to_packed_start, received, home, CUT)
    step = gl.num_programs(0) * CUT.rings
    stage = PAIR * CUT.stages + 0
    phase = 1
    for item in range(gl.program_id(0) * CUT.rings + PAIR, number * CUT.num_pieces, step):
        index, segment = row_and_segment(item, CUT)
        later, _ = row_and_segment(item + 2 * step, CUT)
        prefetch(packed_to_row + (begin + gl.minimum(later, number - 1)) * TOP_K)
        rows = load_slots(packed_to_row, begin + index, True, CUT)
        for k in gl.static_range(TOP_K):
            stage, phase = request_piece(rows_desc, rows[k], segment, ring, stage, phase, PAIR, CUT)


@gluon.jit
def add_for_push(tensors, ring, PAIR: gl.constexpr, CUT: gl.constexpr):
    """The adding role: sums the pieces, and stores the sums in the arena of `home`."""
    _rows_desc, arena, packed_to_row, source_to_packed_start, received, rank, home = tensors
    TOP_K: gl.constexpr = CUT.top_k
    begin, number = rows_of_home(source_to_packed_start, received, home, CUT)
    published = received + home * NUM_PUBLISHED + CUT.column
    offset = gl.load(published)
    region_bytes = gl.load(published + 1) - offset + CUT.row_bytes
    unit = (offset + (rank - (rank > home).to(gl.int32)) * region_bytes) // UNIT_BYTES
    words = arena + unit * (UNIT_BYTES // 4)
    stage = PAIR * CUT.stages + 0
    phase = 0
    step = gl.num_programs(0) * CUT.rings
    for item in range(gl.program_id(0) * CUT.rings + PAIR, number * CUT.num_pieces, step):
        index, segment = row_and_segment(item, CUT)
        rows = load_slots(packed_to_row, begin + index, True, CUT)
        highest = rows[0]
        low = constant_piece(NEGATIVE_ZERO, CUT)  # -0.0 plus a number is exactly that number
        high = constant_piece(NEGATIVE_ZERO, CUT)
        for k in gl.static_range(TOP_K):
            highest = gl.maximum(highest, rows[k])
            low, high, stage, phase = add_piece(
                low, high, rows[k] >= 0, ring, stage, phase, PAIR, CUT
            )
        if highest >= 0:
            store_piece(words, low, high, index, segment, CUT)


@gluon.jit
def run_pairs(ASK: gl.constexpr, ADD: gl.constexpr, tensors, desc, CUT: gl.constexpr):
    """Runs three pairs of roles."""
    slots, full = make_rings(desc, CUT)
    ring = (slots, full, make_barriers(CUT.rings * CUT.stages, 1))
    fence_async_shared()
    gl.warp_specialize(
        [
            (role, (ADD, tensors, ring, 0, CUT)),
            (role, (ADD, tensors, ring, 1, CUT)),
            (role, (ADD, tensors, ring, 2, CUT)),
            (role, (ASK, tensors, ring, 0, CUT)),
            (role, (ASK, tensors, ring, 1, CUT)),
            (role, (ASK, tensors, ring, 2, CUT)),
        ],
        [4, 4, 1, 1, 1],
        [128, 128, 64, 64, 64],
    )


@fast_jit(["rows_desc", "arena"], jit=gluon.jit)
def hopper_push_sums_kernel(
    rows_desc,  # [N_cap, segments, SEGMENT], block [1, piece, SEGMENT]
    arena,  # words
    packed_to_row,  # [P_cap, K]
    source_to_packed_start,  # [R + 1]
    received,
    rank: gl.int32,
    home: gl.int32,
    CUT: gl.constexpr,
):
    run_pairs(
        request_for_push,
        add_for_push,
        (rows_desc, arena, packed_to_row, source_to_packed_start, received, rank, home),
        rows_desc,
        CUT,
    )


def launch_push_sums(
    rows, packed_to_row, source_to_packed_start, peers, received, *, column, home, num_ctas
):
    """push_sums of rows [N_cap, H] to one rank, on `num_ctas` SMs."""
    launch(
        hopper_push_sums_kernel,
        (num_ctas,),
        _of_sums(rows.shape[1], rows.dtype, 1, top_k=packed_to_row.shape[1], column=column),
        rows,
        peers.views[home].view(torch.int32),
        packed_to_row,
        source_to_packed_start,
        received,
        peers.rank,
        home,
    )


@functools.cache
def _of_sums(width: int, dtype: torch.dtype, num_descriptors: int, **sizes: int) -> Constants:
    cut = cut_sums(width * dtype.itemsize, dtype=GLUON_DTYPES[dtype], **sizes)
    return Constants(
        {"CUT": cut, "num_warps": 4}, dict.fromkeys(range(num_descriptors), describe_rows(cut))
    )


def cut_sums(row_bytes: int, **sizes: Any) -> Pieces:
    """Rows to be summed, with as many stages as fit into a ring."""
    cut = cut_rows(row_bytes, SUM_PIECE_BYTES, batch=1, rings=3, **sizes)
    return replace(cut, stages=min(SUM_RING_BYTES // cut.piece_bytes, MAX_SUM_STAGES))


@gluon.jit
def is_failed(ready, arrived):
    """Whether the trip's barriers report a failure: nothing has moved."""
    return gl.minimum(gl.load(ready), gl.load(arrived)) < 0


@gluon.jit
def first_rows(packed_start, num_tokens, CUT: gl.constexpr):
    """Addends that turn a token's packed row on each rank into its row of `returned`."""
    NUM_RANKS: gl.constexpr = CUT.num_ranks
    rows = ()
    for rank in gl.static_range(NUM_RANKS):
        rows += ((rank - (rank > CUT.own_rank)) * num_tokens - gl.load(packed_start + rank),)
    return rows


@gluon.jit
def request_for_home(tensors, ring, PAIR: gl.constexpr, CUT: gl.constexpr):
    """The requesting role: loads pieces of every token's rows, in rank order: one row per peer, all of this rank's."""
    rows_desc, returned_desc, _words, tables, ready, arrived, num_tokens = tensors
    token_to_packed_row, packed_start, slot_to_rank, slot_to_row = tables
    NUM_RANKS: gl.constexpr = CUT.num_ranks
    TOP_K: gl.constexpr = CUT.top_k
    firsts = first_rows(packed_start, num_tokens, CUT)
    number = gl.where(is_failed(ready, arrived), 0, num_tokens)
    step = gl.num_programs(0) * CUT.rings
    stage = PAIR * CUT.stages + 0
    phase = 1
    for item in range(gl.program_id(0) * CUT.rings + PAIR, number * CUT.num_pieces, step):
        token, segment = row_and_segment(item, CUT)
        later, _ = row_and_segment(item + 2 * step, CUT)
        later = gl.minimum(later, number - 1)
        prefetch(token_to_packed_row + later * NUM_RANKS)
        prefetch(slot_to_rank + later * TOP_K)
        prefetch(slot_to_row + later * TOP_K)
        own_rows = load_slots(slot_to_row, token, True, CUT)
        ranks = load_slots(slot_to_rank, token, True, CUT)
        for rank in gl.static_range(NUM_RANKS):
            if rank == CUT.own_rank:
                for k in gl.static_range(TOP_K):
                    row = gl.where(ranks[k] == CUT.own_rank, own_rows[k], -1)
                    stage, phase = request_piece(
                        rows_desc, row, segment, ring, stage, phase, PAIR, CUT
                    )
            else:
                packed_row = gl.load(token_to_packed_row + token * NUM_RANKS + rank)
                row = gl.where(packed_row >= 0, packed_row + firsts[rank], -1)
                stage, phase = request_piece(
                    returned_desc, row, segment, ring, stage, phase, PAIR, CUT
                )


@gluon.jit
def add_for_home(tensors, ring, PAIR: gl.constexpr, CUT: gl.constexpr):
    """The adding role: sums the pieces. This rank's rows are summed and rounded first, as peers do with their rows."""
    _rows_desc, _returned_desc, words, tables, ready, arrived, num_tokens = tensors
    token_to_packed_row, _packed_start, slot_to_rank, slot_to_row = tables
    NUM_RANKS: gl.constexpr = CUT.num_ranks
    TOP_K: gl.constexpr = CUT.top_k
    moves = not is_failed(ready, arrived)
    stage = PAIR * CUT.stages + 0
    phase = 0
    step = gl.num_programs(0) * CUT.rings
    for item in range(gl.program_id(0) * CUT.rings + PAIR, num_tokens * CUT.num_pieces, step):
        token, segment = row_and_segment(item, CUT)
        own_rows = load_slots(slot_to_row, token, moves, CUT)
        ranks = load_slots(slot_to_rank, token, moves, CUT)
        low = constant_piece(0, CUT)
        high = constant_piece(0, CUT)
        for rank in gl.static_range(NUM_RANKS):
            if rank == CUT.own_rank:
                # This sum may be 0.0 where a peer's sum would be -0.0: added to 0.0, both give the same.
                own_low = constant_piece(0, CUT)
                own_high = constant_piece(0, CUT)
                for k in gl.static_range(TOP_K):
                    is_present = (ranks[k] == CUT.own_rank) & (own_rows[k] >= 0)
                    own_low, own_high, stage, phase = add_piece(
                        own_low, own_high, is_present, ring, stage, phase, PAIR, CUT
                    )
                rounded_low, rounded_high = unpack(pack(own_low, own_high, CUT.dtype), CUT.dtype)
                low += rounded_low
                high += rounded_high
            else:
                is_present = (
                    gl.load(token_to_packed_row + token * NUM_RANKS + rank, mask=moves, other=-1)
                    >= 0
                )
                low, high, stage, phase = add_piece(
                    low, high, is_present, ring, stage, phase, PAIR, CUT
                )
        low = gl.where(moves, low, float("nan"))
        high = gl.where(moves, high, float("nan"))
        store_piece(words, low, high, token, segment, CUT)


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
    CUT: gl.constexpr,
):
    tables = (token_to_packed_row, packed_start, slot_to_rank, slot_to_row)
    run_pairs(
        request_for_home,
        add_for_home,
        (rows_desc, returned_desc, words, tables, ready, arrived, num_tokens),
        rows_desc,
        CUT,
    )


def launch_sum_home(rows, index, trip, out, *, rank, num_ctas):
    """sum_home to out [T, H], on `num_ctas` SMs. T is at least 1, and there is at least one peer."""
    _, packed_start, _, slot_to_row = index
    constants = _of_sums(
        out.shape[1],
        out.dtype,
        2,
        top_k=slot_to_row.shape[1],
        num_ranks=packed_start.numel(),
        own_rank=rank,
    )
    launch(
        hopper_sum_home_kernel,
        (num_ctas,),
        constants,
        *rows,
        out.view(torch.int32),
        *index,
        *trip,
        out.shape[0],
    )
