"""Plan kernels: maps from every slot of a rank's `topk_idx` to its place. Letters: twin/plan.py.

Kernels use no atomics: sums over blocks read every earlier block's counts.
"""

import functools
from typing import Any

import triton
import triton.language as tl

from symmoe.kernels import control, gemm_parts
from symmoe.kernels.launch.launch import (
    Constants,
    cached_constants,
    cached_sizes,
    ceil_div,
    fast_jit,
    launch,
    next_power_of_2,
)
from symmoe.kernels.triton.sync import CONTROL, barrier_epoch, write_record

# Triton kernels may read global numbers only as constexpr.
NO_SLOT = tl.constexpr(2**31 - 1)
INT32_MIN = tl.constexpr(-(2**31))
INT32_MAX = tl.constexpr(2**31 - 1)
AGREED_WORDS = tl.constexpr(
    sum(1 << word for word in control.AGREED_FIELDS)
)  # bit w: word w must be equal on all ranks
PART_ROWS = tl.constexpr(gemm_parts.PART_ROWS)

_VARYING_WORDS = (
    control.HEAD_NUM_TOKENS,
    control.HEAD_CAPACITY,
    control.HEAD_MAX_TOKENS,
    control.HEAD_PACKED_CAPACITY,
)

COUNT_EXPERTS = 128  # experts that count_slots compares BLOCK_SLOTS slots with at a time
BLOCK_SLOTS = 256  # slots of a block whose loads are in flight at once
SEND_COLUMNS = 32  # columns of one program of send_counts: 128 contiguous bytes per row
SEND_BLOCKS = 128  # blocks of tokens that it scans at a time
PACKED_ENTRIES = (
    2048  # entries [block, rank] of block_tokens that assign_packed_rows adds up at a time
)
OTHER_SLOTS = 32  # slots that assign_rows compares each of BLOCK_SLOTS slots with at a time


@functools.cache
def plan_constants(num_warps: int, num_ranks: int, num_experts: int = 0, **sizes: Any) -> Constants:
    """Constants. num_experts: of all ranks. expert_lanes: lanes of a vector over a rank's experts. block_*,
    other_slots: sizes of one read. header: send_counts' header without the words that may change between steps."""
    per_rank = num_experts // num_ranks
    return cached_sizes(
        num_ranks=num_ranks,
        num_experts=num_experts,
        experts_per_rank=per_rank,
        rank_lanes=next_power_of_2(num_ranks),
        expert_lanes=next_power_of_2(per_rank),
        **sizes,
        num_warps=num_warps,
    )


def block_slots(top_k: int) -> int:
    """Number of slots of a token block that are read at once."""
    return min(BLOCK_SLOTS, next_power_of_2(control.TOKENS_PER_BLOCK * top_k))


@fast_jit([])
def splits_to_row_range_kernel(splits, row_range, num_rows: tl.int32, SIZES: tl.constexpr):
    group = tl.arange(0, SIZES.group_lanes)
    size = tl.load(splits + group, mask=group < SIZES.num_groups, other=0).to(tl.int64)
    # Single splits are limited first, so that sums cannot overflow.
    size = tl.minimum(tl.maximum(size, 0), num_rows)
    total = tl.cumsum(size, axis=0)
    begin, end = tl.minimum(total - size, num_rows), tl.minimum(total, num_rows)
    tl.store(row_range + group, begin.to(tl.int32), mask=group < SIZES.num_groups)
    tl.store(row_range + SIZES.num_groups + group, end.to(tl.int32), mask=group < SIZES.num_groups)


def splits_to_row_range(splits, row_range, num_rows):
    num_groups = splits.shape[0]
    launch(
        splits_to_row_range_kernel,
        (1,),
        cached_sizes(num_groups=num_groups, group_lanes=next_power_of_2(num_groups), num_warps=4),
        splits,
        row_range,
        num_rows,
    )


@triton.jit
def load_experts(topk_idx, slot, mask, NUM_EXPERTS: tl.constexpr):
    """int32 expert of each slot; -1 for none and for ids out of range."""
    ids = tl.load(topk_idx + slot, mask=mask, other=-1)
    return tl.where((ids >= 0) & (ids < NUM_EXPERTS), ids, -1).to(tl.int32)


@fast_jit([])
def count_slots_kernel(topk_idx, block_counts, num_tokens: tl.int32, SIZES: tl.constexpr):
    count_block(topk_idx, block_counts, tl.program_id(0), num_tokens, SIZES)


@triton.jit
def count_block(topk_idx, block_counts, block, num_tokens, SIZES: tl.constexpr):
    """count_slots of twin/plan.py, for one block."""
    WIDTH: tl.constexpr = SIZES.num_experts + SIZES.num_ranks + 2
    row = block_counts + block * WIDTH
    first_slot = block * (CONTROL.TOKENS_PER_BLOCK * SIZES.top_k)
    num_slots = tl.minimum(
        CONTROL.TOKENS_PER_BLOCK * SIZES.top_k, num_tokens * SIZES.top_k - first_slot
    )
    for first in range(0, SIZES.num_experts, SIZES.block_experts):
        expert = first + tl.arange(0, SIZES.block_experts)
        count = tl.full((SIZES.block_experts,), 0, tl.int32)
        for part in range(0, CONTROL.TOKENS_PER_BLOCK * SIZES.top_k, SIZES.block_slots):
            index = part + tl.arange(0, SIZES.block_slots)
            chosen = load_experts(
                topk_idx, first_slot + index, index < num_slots, SIZES.num_experts
            )
            count += tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), axis=0)
        tl.store(row + expert, count, mask=expert < SIZES.num_experts)

    token = tl.arange(0, CONTROL.TOKENS_PER_BLOCK)
    rank = tl.arange(0, SIZES.rank_lanes)
    goes = tl.full((CONTROL.TOKENS_PER_BLOCK, SIZES.rank_lanes), 0, tl.int32)
    num_bad = tl.zeros((CONTROL.TOKENS_PER_BLOCK,), tl.int32)
    first_bad = tl.full((CONTROL.TOKENS_PER_BLOCK,), NO_SLOT, tl.int32)
    for k in range(SIZES.top_k):
        index = token * SIZES.top_k + k
        ids = tl.load(topk_idx + first_slot + index, mask=index < num_slots, other=-1)
        bad = (ids < -1) | (ids >= SIZES.num_experts)
        num_bad += bad.to(tl.int32)
        first_bad = tl.minimum(first_bad, tl.where(bad, first_slot + index, NO_SLOT))
        chosen = tl.where((ids >= 0) & (ids < SIZES.num_experts), ids, -SIZES.experts_per_rank).to(
            tl.int32
        )
        goes |= ((chosen // SIZES.experts_per_rank)[:, None] == rank[None, :]).to(tl.int32)
    tl.store(row + SIZES.num_experts + rank, tl.sum(goes, axis=0), mask=rank < SIZES.num_ranks)
    tl.store(row + WIDTH - 2, tl.sum(num_bad, axis=0))
    tl.store(row + WIDTH - 1, tl.min(first_bad, axis=0))


def count_slots(topk_idx, block_counts, *, num_experts, num_ranks):
    (num_tokens, top_k), num_blocks = topk_idx.shape, block_counts.shape[0]
    launch(
        count_slots_kernel,
        (num_blocks,),
        count_constants(top_k, num_experts, num_ranks),
        topk_idx,
        block_counts,
        num_tokens,
    )


def count_constants(top_k: int, num_experts: int, num_ranks: int) -> Constants:
    """The constants of count_block."""
    return plan_constants(
        8,
        num_ranks=num_ranks,
        num_experts=num_experts,
        top_k=top_k,
        block_experts=min(COUNT_EXPERTS, next_power_of_2(num_experts)),
        block_slots=block_slots(top_k),
    )


@triton.jit
def count_row(base, epoch, rank, LAYOUT: tl.constexpr):
    """Pointer to the row of a rank in the count table of the arena at `base`, in the half of a barrier."""
    offset = (epoch & 1) * LAYOUT.table_stride_bytes + rank * (LAYOUT.row_words * 4)
    return (base + LAYOUT.count_table + offset).to(tl.pointer_type(tl.int32))


@fast_jit([])
def send_counts_kernel(
    block_counts,
    topk_idx,
    bases,
    num_tokens: tl.int32,
    capacity: tl.int32,
    max_tokens: tl.int32,
    packed_capacity: tl.int32,
    num_blocks: tl.int32,
    SIZES: tl.constexpr,
):
    NUM_COLUMNS: tl.constexpr = SIZES.num_experts + SIZES.num_ranks
    WIDTH: tl.constexpr = NUM_COLUMNS + 2
    half = (
        barrier_epoch(bases, SIZES.rank, SIZES.layout.counters) + 1
    ) & 1  # the half of the next barrier
    first_column = tl.program_id(0) * SIZES.block_columns
    if first_column < NUM_COLUMNS:
        column = first_column + tl.arange(0, SIZES.block_columns)
        is_column = column < NUM_COLUMNS
        total = tl.full((SIZES.block_columns,), 0, tl.int32)
        for first in range(0, num_blocks, SIZES.block_rows):
            block = first + tl.arange(0, SIZES.block_rows)
            mask = (block < num_blocks)[:, None] & is_column[None, :]
            pointers = block_counts + block[:, None] * WIDTH + column[None, :]
            count = tl.load(pointers, mask=mask, other=0)
            tl.store(pointers, total[None, :] + tl.cumsum(count, axis=0) - count, mask=mask)
            total += tl.sum(count, axis=0)
        for peer in range(SIZES.num_ranks):
            row = count_row(tl.load(bases + peer), half, SIZES.rank, SIZES.layout)
            tl.store(row + CONTROL.HEADER_WORDS + column, total, mask=is_column)
    else:  # the last program
        lane = tl.arange(0, CONTROL.HEADER_WORDS)
        words = tl.zeros((CONTROL.HEADER_WORDS,), tl.int32)
        for word in tl.static_range(CONTROL.HEADER_WORDS):
            words = tl.where(lane == word, SIZES.header[word], words)
        words = tl.where(lane == CONTROL.HEAD_NUM_TOKENS, num_tokens, words)
        words = tl.where(lane == CONTROL.HEAD_CAPACITY, capacity, words)
        words = tl.where(lane == CONTROL.HEAD_MAX_TOKENS, max_tokens, words)
        words = tl.where(lane == CONTROL.HEAD_PACKED_CAPACITY, packed_capacity, words)
        if num_blocks > 0:
            num_bad = tl.full((SIZES.block_rows,), 0, tl.int32)
            first_bad = tl.full((SIZES.block_rows,), NO_SLOT, tl.int32)
            for first in range(0, num_blocks, SIZES.block_rows):
                block = first + tl.arange(0, SIZES.block_rows)
                end = block_counts + block * WIDTH + NUM_COLUMNS
                num_bad += tl.load(end, mask=block < num_blocks, other=0)
                first_bad = tl.minimum(
                    first_bad, tl.load(end + 1, mask=block < num_blocks, other=NO_SLOT)
                )
            bad_slots = tl.sum(num_bad, axis=0)
            bad_slot = tl.min(first_bad, axis=0)
            words = tl.where(lane == CONTROL.HEAD_BAD_SLOTS, bad_slots, words)
            words = tl.where(lane == CONTROL.HEAD_BAD_SLOT, bad_slot, words)
            if bad_slots > 0:
                bad_id = tl.load(topk_idx + bad_slot)
                bad_id = tl.minimum(tl.maximum(bad_id, INT32_MIN), INT32_MAX).to(tl.int32)
                words = tl.where(lane == CONTROL.HEAD_BAD_ID, bad_id, words)
        for peer in range(SIZES.num_ranks):
            row = count_row(tl.load(bases + peer), half, SIZES.rank, SIZES.layout)
            tl.store(row + lane, words)


def send_counts(block_counts, topk_idx, header, peers, *, num_experts):
    other_words = tuple(0 if word in _VARYING_WORDS else value for word, value in enumerate(header))
    launch(
        send_counts_kernel,
        (ceil_div(num_experts + peers.num_ranks, SEND_COLUMNS) + 1,),
        plan_constants(
            4,
            rank=peers.rank,
            num_ranks=peers.num_ranks,
            layout=peers.layout,
            num_experts=num_experts,
            header=other_words,
            block_columns=SEND_COLUMNS,
            block_rows=SEND_BLOCKS,
        ),
        block_counts,
        topk_idx,
        peers.bases,
        *[header[word] for word in _VARYING_WORDS],
        block_counts.shape[0],
    )


@triton.jit
def pick(tile, chosen, axis: tl.constexpr):
    """The entry of `tile` where `chosen` is true, at most one along `axis`; 0 without any."""
    return tl.sum(tl.where(chosen, tile, 0), axis=axis)


@triton.jit
def smallest(capacity, is_rank):
    """The smallest capacity of the ranks with a capacity (not -1)."""
    return tl.min(tl.where(is_rank & (capacity >= 0), capacity, 2147483647), axis=0)


@triton.jit
def find_error(headers, num_rows, num_packed, received, rank, SIZES: tl.constexpr):
    """(code, rank, limit, value, where) of the first error: checks are in reverse order, a later check overrides.

    headers: [RANK_LANES, CONTROL.HEADER_WORDS]. num_rows, num_packed: [RANK_LANES], rows that each rank would receive.
    """
    is_rank = rank < SIZES.num_ranks
    word = tl.arange(0, CONTROL.HEADER_WORDS)

    max_packed = tl.max(num_packed, axis=0)
    fullest = tl.min(tl.where(num_packed == max_packed, rank, SIZES.rank_lanes), axis=0)
    capacity = smallest(pick(headers, (word == CONTROL.HEAD_PACKED_CAPACITY)[None, :], 1), is_rank)
    error = CONTROL.PLAN_OK, -1, 0, 0, 0
    error = later(
        error, max_packed > capacity, (CONTROL.PLAN_OVERFLOW, fullest, capacity, max_packed, 0)
    )

    max_rows = tl.max(num_rows, axis=0)
    fullest = tl.min(tl.where(num_rows == max_rows, rank, SIZES.rank_lanes), axis=0)
    capacity = smallest(pick(headers, (word == CONTROL.HEAD_CAPACITY)[None, :], 1), is_rank)
    overflow = (max_rows > capacity) & (not SIZES.drop)
    error = later(error, overflow, (CONTROL.PLAN_OVERFLOW, fullest, capacity, max_rows, 0))

    if not SIZES.drop:
        too_many = pick(headers, (word == CONTROL.HEAD_RAIL_DROPPED)[None, :], 1)
        culprit = tl.min(tl.where(is_rank & (too_many > 0), rank, SIZES.rank_lanes), axis=0)
        head = pick(headers, (rank == culprit)[:, None], 0)
        limit = pick(head, word == CONTROL.HEAD_RAIL_CAPACITY, 0)
        value = pick(head, word == CONTROL.HEAD_RAIL_DROPPED, 0)
        error = later(
            error,
            culprit < SIZES.rank_lanes,
            (CONTROL.PLAN_RAIL_OVERFLOW, culprit, limit, value, 0),
        )

    bad_slots = pick(headers, (word == CONTROL.HEAD_BAD_SLOTS)[None, :], 1)
    culprit = tl.min(tl.where(is_rank & (bad_slots > 0), rank, SIZES.rank_lanes), axis=0)
    head = pick(headers, (rank == culprit)[:, None], 0)
    value, where = (
        pick(head, word == CONTROL.HEAD_BAD_ID, 0),
        pick(head, word == CONTROL.HEAD_BAD_SLOT, 0),
    )
    limit = pick(head, word == CONTROL.HEAD_NUM_EXPERTS, 0)
    error = later(
        error, culprit < SIZES.rank_lanes, (CONTROL.PLAN_BAD_ID, culprit, limit, value, where)
    )

    first = pick(headers, (rank == 0)[:, None], 0)
    agreed = ((AGREED_WORDS >> word) & 1) != 0
    is_room = (word == CONTROL.HEAD_CAPACITY) | (word == CONTROL.HEAD_PACKED_CAPACITY)
    repeats = pick(headers, (word == CONTROL.HEAD_OVERFLOW)[None, :], 1) == CONTROL.OVERFLOW_REPEAT
    repeats &= pick(first, word == CONTROL.HEAD_OVERFLOW, 0) == CONTROL.OVERFLOW_REPEAT
    is_own = repeats[:, None] & is_room[None, :]  # sizes that may differ between ranks
    differs = (
        (headers != first[None, :])
        & agreed[None, :]
        & is_rank[:, None]
        & (is_own.to(tl.int32) == 0)
    )
    culprit = tl.min(
        tl.where(tl.max(differs.to(tl.int32), axis=1) != 0, rank, SIZES.rank_lanes), axis=0
    )
    head = pick(headers, (rank == culprit)[:, None], 0)
    field = tl.min(
        tl.where(
            pick(differs.to(tl.int32), (rank == culprit)[:, None], 0) != 0,
            word,
            CONTROL.HEADER_WORDS,
        ),
        axis=0,
    )
    limit, value = pick(first, word == field, 0), pick(head, word == field, 0)
    error = later(
        error, culprit < SIZES.rank_lanes, (CONTROL.PLAN_MISMATCH, culprit, limit, value, field)
    )

    lowest = tl.full((SIZES.rank_lanes,), 0, tl.int64)
    for column in tl.static_range(CONTROL.NUM_PUBLISHED):
        lowest = tl.minimum(
            lowest, tl.load(received + rank * CONTROL.NUM_PUBLISHED + column, mask=is_rank, other=0)
        )
    return later(error, tl.min(lowest, axis=0) < 0, (CONTROL.PLAN_FAULT, -1, 0, 0, 0))


@triton.jit
def later(error, is_later, later_error):
    """`later_error` where `is_later`, else `error`."""
    result = ()
    for i in tl.static_range(5):
        result += (tl.where(is_later, later_error[i], error[i]),)
    return result


@triton.jit
def clip_to_capacity(load, capacity):
    """Rows kept of each expert, per rank (axis 0): min(load, level), at the highest level that fits; the rest of the
    capacity goes to the first experts above the level, one row each."""
    total = tl.sum(load, axis=1)
    clips = (capacity >= 0) & (total > capacity)
    low = tl.zeros_like(total)  # sum(min(load, low)) <= capacity
    high = low + tl.maximum(capacity, 0)
    num_steps = tl.where(tl.max(clips.to(tl.int32), axis=0) != 0, 31, 0)  # capacity < 2^31
    for _ in range(num_steps):
        level = high - (high - low) // 2  # no change for a rank that has converged
        fits = tl.sum(tl.minimum(load, level[:, None]), axis=1) <= capacity
        low = tl.where(fits, level, low)
        high = tl.where(fits, high, level - 1)
    kept_rows = tl.minimum(load, low[:, None])
    above = (load > low[:, None]).to(tl.int32)
    remaining = capacity - tl.sum(kept_rows, axis=1)
    kept_rows += above * (tl.cumsum(above, axis=1) <= remaining[:, None]).to(tl.int32)
    return tl.where(clips[:, None], kept_rows, load)


@triton.jit
def split_rows(source_to_row_start, source_to_rows, replica_ranges, SIZES: tl.constexpr):
    """source_to_rows and replica_ranges of twin/plan.py."""
    expert = tl.arange(0, SIZES.expert_lanes)
    mask, is_local = expert < SIZES.num_own, expert < SIZES.experts_per_rank
    starts = source_to_row_start + expert
    parts = source_to_rows + expert
    first = tl.load(starts, mask=is_local, other=0)
    end = tl.load(starts + SIZES.num_ranks * SIZES.experts_per_rank, mask=is_local, other=0)
    high = (
        whole_tiles(
            first, tl.load(starts + SIZES.end_rank * SIZES.experts_per_rank, mask=is_local, other=0)
        )
        if SIZES.end_rank < SIZES.num_ranks
        else end
    )
    before = tl.load(starts + SIZES.first_rank * SIZES.experts_per_rank, mask=is_local, other=0)
    low = tl.minimum(whole_tiles(first, before + (PART_ROWS - 1)), high)
    store_part(parts, first, low, mask, SIZES.num_own)
    store_part(parts + 2 * (SIZES.num_ranks - 1) * SIZES.num_own, high, end, mask, SIZES.num_own)
    limit = high
    if SIZES.rank + 1 < SIZES.end_rank:
        later = tl.load(starts + (SIZES.rank + 1) * SIZES.experts_per_rank, mask=is_local, other=0)
        limit = whole_tiles(low, tl.minimum(tl.maximum(later, low), high))
    begin = low
    for source in tl.static_range(SIZES.first_rank, SIZES.end_rank):
        start = tl.load(starts + (source + 1) * SIZES.experts_per_rank, mask=is_local, other=0)
        bound = whole_tiles(low, tl.maximum(start, low) + (PART_ROWS - 1))
        bound = tl.minimum(bound, limit if source <= SIZES.rank else high)
        store_part(parts + 2 * source * SIZES.num_own, begin, bound, mask, SIZES.num_own)
        if source == SIZES.rank and replica_ranges is not None:
            NUM_REPLICA_SLOTS: tl.constexpr = SIZES.experts_per_rank - SIZES.num_own
            ranges, is_replica = (
                replica_ranges + expert - SIZES.num_own,
                is_local & (expert >= SIZES.num_own),
            )
            store_part(ranges, first, end, is_replica, NUM_REPLICA_SLOTS)
            store_part(ranges + 2 * NUM_REPLICA_SLOTS, first, begin, is_replica, NUM_REPLICA_SLOTS)
            store_part(ranges + 4 * NUM_REPLICA_SLOTS, begin, bound, is_replica, NUM_REPLICA_SLOTS)
            store_part(ranges + 6 * NUM_REPLICA_SLOTS, bound, end, is_replica, NUM_REPLICA_SLOTS)
        begin = bound


@triton.jit
def whole_tiles(first, row):
    """The end of the last whole tile from `first` on, before `row`."""
    return first + (row - first) // PART_ROWS * PART_ROWS


@triton.jit
def store_part(pointers, begin, end, mask, WIDTH: tl.constexpr):
    tl.store(pointers, begin, mask=mask)
    tl.store(pointers + WIDTH, end, mask=mask)


@fast_jit([])
def lay_out_kernel(
    bases,
    received,
    status: tl.int64,
    capacity: tl.int32,
    splits,
    row_range,
    slot_start,
    slot_limit,
    packed_start,
    packed_limit,
    source_to_packed_start,
    source_to_row_start,
    source_to_rows,
    report,
    expert_load,
    replica_ranges,
    SIZES: tl.constexpr,
):
    half = barrier_epoch(bases, SIZES.rank, SIZES.layout.counters) & 1
    table = count_row(tl.load(bases + SIZES.rank), half, 0, SIZES.layout)

    rank = tl.arange(0, SIZES.rank_lanes)
    is_rank = rank < SIZES.num_ranks
    word = tl.arange(0, CONTROL.HEADER_WORDS)
    headers = tl.load(
        table + rank[:, None] * SIZES.layout.row_words + word[None, :],
        mask=is_rank[:, None],
        other=0,
    )

    # Tiles [destination rank, its experts]; sources are looped over.
    local = tl.arange(0, SIZES.expert_lanes)
    is_local = local < SIZES.experts_per_rank
    expert = rank[:, None] * SIZES.experts_per_rank + local[None, :]
    is_expert = is_rank[:, None] & is_local[None, :]
    is_mine = is_expert & (rank == SIZES.rank)[:, None]
    counts = table + CONTROL.HEADER_WORDS + expert
    load = tl.full((SIZES.rank_lanes, SIZES.expert_lanes), 0, tl.int32)
    tokens_to_rank = table + CONTROL.HEADER_WORDS + SIZES.num_ranks * SIZES.experts_per_rank + rank
    num_packed = tl.full((SIZES.rank_lanes,), 0, tl.int32)  # if nothing is dropped
    for source in range(SIZES.num_ranks):
        load += tl.load(counts + source * SIZES.layout.row_words, mask=is_expert, other=0)
        num_packed += tl.load(
            tokens_to_rank + source * SIZES.layout.row_words, mask=is_rank, other=0
        )
    num_rows = tl.sum(load, axis=1)
    error, error_rank, limit, value, where = find_error(
        headers, num_rows, num_packed, received, rank, SIZES
    )
    if SIZES.repeats:
        is_overflow = (error == CONTROL.PLAN_OVERFLOW) | (error == CONTROL.PLAN_RAIL_OVERFLOW)
        error = tl.where(is_overflow, CONTROL.PLAN_OVER_BUDGET, error)
    kept_rows = clip_to_capacity(load, capacity) if SIZES.drop else load
    kept_rows = tl.where(error == CONTROL.PLAN_OK, kept_rows, 0)

    start = tl.cumsum(kept_rows, axis=1) - kept_rows
    num_kept = tl.sum(kept_rows, axis=1)
    own_row = expert - SIZES.rank * SIZES.experts_per_rank
    before = tl.full(
        (SIZES.rank_lanes, SIZES.expert_lanes), 0, tl.int32
    )  # slots of the expert on earlier sources
    own_before = before
    packed = tl.full((SIZES.rank_lanes,), 0, tl.int32)  # packed rows of earlier sources
    for source in range(SIZES.num_ranks):
        count = tl.load(counts + source * SIZES.layout.row_words, mask=is_expert, other=0)
        tokens = tl.load(tokens_to_rank + source * SIZES.layout.row_words, mask=is_rank, other=0)
        kept_here = tl.minimum(tl.maximum(kept_rows - before, 0), count)
        region = tl.minimum(tl.sum(kept_here, axis=1), tokens)
        tl.store(slot_limit + expert, kept_here, mask=is_expert & (source == SIZES.rank))
        tl.store(packed_start + rank, packed, mask=is_rank & (source == SIZES.rank))
        tl.store(packed_limit + rank, region, mask=is_rank & (source == SIZES.rank))
        tl.store(source_to_packed_start + source + rank * 0, packed, mask=rank == SIZES.rank)
        row = start + tl.minimum(before, kept_rows)
        tl.store(source_to_row_start + source * SIZES.experts_per_rank + own_row, row, mask=is_mine)
        own_before = tl.where(source == SIZES.rank, before, own_before)
        before += count
        packed += region
    tl.store(source_to_packed_start + SIZES.num_ranks + rank * 0, packed, mask=rank == SIZES.rank)

    tl.store(
        source_to_row_start + SIZES.num_ranks * SIZES.experts_per_rank + own_row,
        start + kept_rows,
        mask=is_mine,
    )
    tl.store(splits + own_row, kept_rows, mask=is_mine)
    is_own = is_mine & (own_row < SIZES.num_own)
    tl.store(row_range + own_row, start, mask=is_own)
    tl.store(row_range + SIZES.num_own + own_row, start + kept_rows, mask=is_own)
    tl.store(slot_start + expert, start + tl.minimum(own_before, kept_rows), mask=is_expert)
    if expert_load is not None:
        tl.store(expert_load + expert, load, mask=is_expert)

    dropped = tl.where(error == CONTROL.PLAN_OK, tl.sum(num_rows - num_kept, axis=0), 0)
    word = tl.arange(0, CONTROL.SUMMARY_WORDS)
    summary = tl.where(word == CONTROL.SUM_ERROR, error, 0)
    summary = tl.where(word == CONTROL.SUM_ERROR_RANK, error_rank, summary)
    summary = tl.where(word == CONTROL.SUM_LIMIT, limit, summary)
    summary = tl.where(word == CONTROL.SUM_VALUE, value, summary)
    summary = tl.where(word == CONTROL.SUM_WHERE, where, summary)
    summary = tl.where(word == CONTROL.SUM_NUM_ROWS, pick(num_kept, rank == SIZES.rank, 0), summary)
    summary = tl.where(word == CONTROL.SUM_MAX_ROWS, tl.max(num_kept, axis=0), summary)
    summary = tl.where(word == CONTROL.SUM_NUM_PACKED, pick(packed, rank == SIZES.rank, 0), summary)
    summary = tl.where(word == CONTROL.SUM_MAX_PACKED, tl.max(packed, axis=0), summary)
    summary = tl.where(word == CONTROL.SUM_NUM_DROPPED, dropped, summary)
    tl.store(report + word, summary)
    if SIZES.record_errors:
        is_raised = (error != CONTROL.PLAN_OK) & (error != CONTROL.PLAN_FAULT)
        if is_raised & (error != CONTROL.PLAN_OVER_BUDGET):
            counters = (tl.load(bases + SIZES.rank) + SIZES.layout.counters).to(
                tl.pointer_type(tl.int64)
            )
            tl.store(
                counters + CONTROL.FAULTED, 1
            )  # on every rank: no trip of this plan moves rows
            write_record(
                status,
                CONTROL.STATUS_PLAN,
                CONTROL.PHASE_PLAN,
                error_rank,
                limit,
                value,
                error,
                where,
            )
    tl.debug_barrier()  # makes the stores of other threads visible
    split_rows(source_to_row_start, source_to_rows, replica_ranges, SIZES)


@fast_jit([])
def post_report_kernel(report, posted: tl.int64, plan: tl.int64, BITS: tl.constexpr):
    word = tl.arange(0, CONTROL.SUMMARY_WORDS)
    value = tl.load(report + word).to(tl.int64) & 0xFFFFFFFF
    tag = (plan & ((1 << BITS) - 1)).to(tl.int64)
    rows = posted.to(tl.pointer_type(tl.int64))  # pinned host memory
    pointers = rows + plan % CONTROL.REPORT_SLOTS * CONTROL.SUMMARY_WORDS + word
    tl.store(pointers, (tag << 32) | value)


def post_report(report, posted, *, plan):
    launch(
        post_report_kernel,
        (1,),
        cached_constants(BITS=control.GENERATION_BITS, num_warps=1),
        report,
        posted.data_ptr(),
        plan,
    )


def lay_out(peers, received, status, plan, *, capacity, overflow, ranks):
    has_replicas = plan.replica_ranges.numel() > 0
    launch(
        lay_out_kernel,
        (1,),
        plan_constants(
            4,
            rank=peers.rank,
            num_ranks=peers.num_ranks,
            layout=peers.layout,
            num_experts=plan.splits.numel() * peers.num_ranks,
            first_rank=ranks[0],
            end_rank=ranks[-1] + 1,
            drop=overflow == control.OVERFLOW_DROP,
            repeats=overflow == control.OVERFLOW_REPEAT,
            record_errors=capacity >= 0,
            num_own=plan.row_range.shape[1],
        ),
        peers.bases,
        received,
        status.data_ptr(),
        capacity,
        plan.splits,
        plan.row_range,
        plan.slot_start,
        plan.slot_limit,
        plan.packed_start,
        plan.packed_limit,
        plan.source_to_packed_start,
        plan.source_to_row_start,
        plan.source_to_rows,
        plan.report,
        None if has_replicas else plan.expert_load,
        plan.replica_ranges if has_replicas else None,
    )


@triton.jit
def slots_and_positions(topk_idx, starts, block, num_tokens, part, SIZES: tl.constexpr):
    """Slots of a block from its `part` on, their mask, their experts (-1: none) and each slot's position among this
    rank's slots of the expert. starts: the positions of the block's first slots, by expert."""
    first_slot = block * CONTROL.TOKENS_PER_BLOCK * SIZES.top_k
    num_slots = (
        tl.minimum(CONTROL.TOKENS_PER_BLOCK, num_tokens - block * CONTROL.TOKENS_PER_BLOCK)
        * SIZES.top_k
    )
    index = part + tl.arange(0, SIZES.block_slots)
    is_slot = index < num_slots
    expert = load_experts(topk_idx, first_slot + index, is_slot, SIZES.num_experts)
    earlier = tl.full((SIZES.block_slots, SIZES.other_slots), 0, tl.int32)
    for first in range(0, CONTROL.TOKENS_PER_BLOCK * SIZES.top_k, SIZES.other_slots):
        other_index = first + tl.arange(0, SIZES.other_slots)
        other_expert = load_experts(
            topk_idx, first_slot + other_index, other_index < num_slots, SIZES.num_experts
        )
        same = (other_expert[None, :] == expert[:, None]) & (other_index[None, :] < index[:, None])
        earlier += same.to(tl.int32)
    position = tl.load(starts + expert, mask=expert >= 0, other=0) + tl.sum(earlier, axis=1)
    return first_slot + index, is_slot, expert, position


@fast_jit([])
def assign_rows_kernel(
    topk_idx,
    block_starts,
    slot_start,
    slot_limit,
    packed_start,
    slot_to_row,
    slot_to_rank,
    token_to_primary_row,
    token_to_packed_row,
    block_tokens,
    num_tokens: tl.int32,
    SIZES: tl.constexpr,
):
    block = tl.program_id(0)
    starts = block_starts + block * (SIZES.num_experts + SIZES.num_ranks + 2)
    for part in range(0, CONTROL.TOKENS_PER_BLOCK * SIZES.top_k, SIZES.block_slots):
        slot, is_slot, expert, position = slots_and_positions(
            topk_idx, starts, block, num_tokens, part, SIZES
        )
        valid = expert >= 0
        is_kept = valid & (position < tl.load(slot_limit + expert, mask=valid, other=0))
        row = tl.load(slot_start + expert, mask=valid, other=0) + position
        rank = tl.where(valid, expert, 0) // SIZES.experts_per_rank
        tl.store(slot_to_row + slot, tl.where(is_kept, row, -1), mask=is_slot)
        tl.store(slot_to_rank + slot, tl.where(is_kept, rank, -1), mask=is_slot)

    tl.debug_barrier()  # makes the stores of other threads visible
    token, rank, entry, is_entry = tokens_and_ranks(block, num_tokens, SIZES)
    primary = tl.full(entry.shape, -1, tl.int32)
    for k in range(SIZES.top_k):
        slot = token * SIZES.top_k + k
        chosen = tl.load(slot_to_rank + slot, mask=token < num_tokens, other=-1)
        row = tl.load(slot_to_row + slot, mask=token < num_tokens, other=-1)
        is_first = (chosen[:, None] == rank[None, :]) & (primary < 0)
        primary = tl.where(is_first, row[:, None], primary)
    tl.store(token_to_primary_row + entry, primary, mask=is_entry)
    goes = (primary >= 0).to(tl.int32)
    is_rank = rank < SIZES.num_ranks
    tl.store(block_tokens + block * SIZES.num_ranks + rank, tl.sum(goes, axis=0), mask=is_rank)
    if not SIZES.drop:
        start = tl.load(starts + SIZES.num_experts + rank, mask=is_rank, other=0)
        start += tl.load(packed_start + rank, mask=is_rank, other=0)
        store_packed_rows(token_to_packed_row + entry, start, goes, is_entry)


@triton.jit
def tokens_and_ranks(block, num_tokens, SIZES: tl.constexpr):
    """Tokens of a block, lanes over ranks, and the indices of both in [T, R], with the mask."""
    token = block * CONTROL.TOKENS_PER_BLOCK + tl.arange(0, CONTROL.TOKENS_PER_BLOCK)
    rank = tl.arange(0, SIZES.rank_lanes)
    is_entry = (token < num_tokens)[:, None] & (rank < SIZES.num_ranks)[None, :]
    return token, rank, token[:, None] * SIZES.num_ranks + rank[None, :], is_entry


@triton.jit
def store_packed_rows(pointers, start, goes, mask):
    """Stores the packed rows, from `start` on, of a block's tokens on each rank that they go to."""
    tl.store(
        pointers,
        tl.where(goes != 0, start[None, :] + tl.cumsum(goes, axis=0) - goes, -1),
        mask=mask,
    )


@fast_jit([])
def assign_packed_rows_kernel(
    block_tokens,
    packed_start,
    token_to_primary_row,
    token_to_packed_row,
    num_tokens: tl.int32,
    SIZES: tl.constexpr,
):
    block = tl.program_id(0)
    _, rank, entry, is_entry = tokens_and_ranks(block, num_tokens, SIZES)
    is_rank = rank < SIZES.num_ranks
    earlier = tl.full((SIZES.block_rows, SIZES.rank_lanes), 0, tl.int32)
    for first in range(0, block, SIZES.block_rows):
        earlier_block = first + tl.arange(0, SIZES.block_rows)
        mask = (earlier_block < block)[:, None] & is_rank[None, :]
        earlier += tl.load(
            block_tokens + earlier_block[:, None] * SIZES.num_ranks + rank[None, :],
            mask=mask,
            other=0,
        )
    start = tl.load(packed_start + rank, mask=is_rank, other=0) + tl.sum(earlier, axis=0)
    goes = (tl.load(token_to_primary_row + entry, mask=is_entry, other=-1) >= 0).to(tl.int32)
    store_packed_rows(token_to_packed_row + entry, start, goes, is_entry)


def assign_rows(topk_idx, block_starts, plan, *, drop):
    (num_tokens, top_k), (num_blocks, num_ranks) = topk_idx.shape, plan.block_tokens.shape
    slots = block_slots(top_k)
    launch(
        assign_rows_kernel,
        (num_blocks,),
        plan_constants(
            8,
            num_ranks=num_ranks,
            num_experts=plan.slot_start.numel(),
            top_k=top_k,
            drop=drop,
            block_slots=slots,
            other_slots=min(OTHER_SLOTS, slots),
        ),
        topk_idx,
        block_starts,
        plan.slot_start,
        plan.slot_limit,
        plan.packed_start,
        plan.slot_to_row,
        plan.slot_to_rank,
        plan.token_to_primary_row,
        plan.token_to_packed_row,
        plan.block_tokens,
        num_tokens,
    )
    if drop:  # only block_tokens counts the kept tokens of earlier blocks
        launch(
            assign_packed_rows_kernel,
            (num_blocks,),
            plan_constants(
                4,
                num_ranks=num_ranks,
                block_rows=max(1, PACKED_ENTRIES // next_power_of_2(num_ranks)),
            ),
            plan.block_tokens,
            plan.packed_start,
            plan.token_to_primary_row,
            plan.token_to_packed_row,
            num_tokens,
        )
