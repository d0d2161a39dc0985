"""Replicas of experts: replica slots, slots, weights and gradients (Triton). Letters: twin/replicas.py."""

import functools
import math
from dataclasses import dataclass

import triton
import triton.language as tl

from symmoe.kernels.launch.launch import (
    Constants,
    cached_constants,
    cached_sizes,
    ceil_div,
    fast_jit,
    launch,
    next_power_of_2,
)
from symmoe.kernels.operands import packed_and_table
from symmoe.kernels.triton.plan import (
    INT32_MAX,
    OTHER_SLOTS,
    block_slots,
    count_block,
    count_constants,
    count_row,
    plan_constants,
    slots_and_positions,
)
from symmoe.kernels.triton.sync import CONTROL, barrier_epoch
from symmoe.kernels.triton.tiles import TRITON_DTYPES, matrix_of

NUM_PROGRAMS = 2 * 132  # two for each of an H200's SMs
BLOCK, NUM_WARPS = 8192, 8  # numbers that a program moves at a time


@fast_jit([])
def place_replicas_kernel(
    bases,
    replica_to_expert,
    replica_rows,
    expert_to_replica_slot,
    copy_slots,
    expert_load,
    slack: tl.int32,
    SIZES: tl.constexpr,
):
    half = barrier_epoch(bases, SIZES.rank, SIZES.layout.counters) & 1
    counts = count_row(tl.load(bases + SIZES.rank), half, 0, SIZES.layout) + CONTROL.HEADER_WORDS
    rank, local = tl.arange(0, SIZES.rank_lanes), tl.arange(0, SIZES.expert_lanes)
    first = tl.program_id(0) * SIZES.num_near
    is_rank, is_source = (rank >= first) & (rank < first + SIZES.num_near), rank < SIZES.num_ranks
    expert = rank[:, None] * SIZES.experts_per_rank + local[None, :]
    is_expert = is_rank[:, None] & (local < SIZES.experts_per_rank)[None, :]
    remaining = tl.full((SIZES.rank_lanes, SIZES.expert_lanes), 0, tl.int32)
    for source in range(SIZES.num_ranks):
        remaining += tl.load(
            counts + source * SIZES.layout.row_words + expert, mask=is_expert, other=0
        )
    own_counts = tl.load(
        counts + SIZES.rank * SIZES.layout.row_words + expert, mask=is_expert, other=0
    )
    tl.store(expert_load + expert, remaining, mask=is_expert)
    for peer in range(SIZES.num_ranks):
        initial_slots = tl.where((rank == peer)[:, None], own_counts, 0)
        tl.store(copy_slots + expert * SIZES.num_ranks + peer, initial_slots, mask=is_expert)
        tl.store(
            expert_to_replica_slot + expert * SIZES.num_ranks + peer,
            tl.full(expert.shape, -1, tl.int32),
            mask=is_expert,
        )
    for replica_slot in range(SIZES.num_replica_slots):
        tl.store(
            replica_to_expert + rank * SIZES.num_replica_slots + replica_slot,
            tl.full(rank.shape, -1, tl.int32),
            mask=is_rank,
        )
        tl.store(
            replica_rows + rank * SIZES.num_replica_slots + replica_slot,
            tl.zeros_like(rank),
            mask=is_rank,
        )
    tl.debug_barrier()  # the next stores are to the same places

    rows, used = tl.sum(remaining, axis=1), tl.zeros_like(rank)
    total = tl.sum(rows.to(tl.int64), axis=0)
    mean = tl.cdiv(total, SIZES.num_near).to(tl.int32)
    limit = tl.cdiv(total * (1000 + slack), 1000 * SIZES.num_near).to(tl.int32)
    for _ in range(SIZES.num_near * SIZES.num_replica_slots):
        max_rows = tl.max(rows, axis=0)
        giver = tl.min(tl.where((rows == max_rows) & is_rank, rank, SIZES.num_ranks), axis=0)
        capacity = tl.where(is_rank & (used < SIZES.num_replica_slots), mean - rows, 0)
        max_capacity = tl.max(capacity, axis=0)
        taker = tl.min(tl.where(capacity == max_capacity, rank, SIZES.num_ranks), axis=0)
        candidates = tl.where((rank == giver)[:, None] & is_expert, remaining, -1)
        largest = tl.max(tl.max(candidates, axis=1), axis=0)
        replicated = tl.min(
            tl.min(tl.where(candidates == largest, expert, INT32_MAX), axis=1), axis=0
        )
        number = tl.minimum(tl.minimum(max_rows - mean, max_capacity), largest)
        if (max_rows > limit) & (number > 0):
            replica_slot = tl.sum(tl.where(rank == taker, used, 0), axis=0)
            tl.store(replica_to_expert + taker * SIZES.num_replica_slots + replica_slot, replicated)
            tl.store(replica_rows + taker * SIZES.num_replica_slots + replica_slot, number)
            tl.store(expert_to_replica_slot + replicated * SIZES.num_ranks + taker, replica_slot)
            used += (rank == taker).to(tl.int32)
            rows += number * ((rank == taker).to(tl.int32) - (rank == giver).to(tl.int32))
            remaining -= tl.where(expert == replicated, number, 0)
    tl.debug_barrier()  # makes the stores of other threads visible

    for n in range(SIZES.num_near * SIZES.num_replica_slots):
        replicated = tl.load(replica_to_expert + first * SIZES.num_replica_slots + n)
        if replicated >= 0:
            count = tl.load(
                counts + rank * SIZES.layout.row_words + replicated, mask=is_source, other=0
            )
            replica_slots = tl.load(
                expert_to_replica_slot + replicated * SIZES.num_ranks + rank, mask=is_rank, other=-1
            )
            quota = tl.load(
                replica_rows + rank * SIZES.num_replica_slots + replica_slots,
                mask=replica_slots >= 0,
                other=0,
            )
            quota = tl.where(
                rank == replicated // SIZES.experts_per_rank, tl.sum(count - quota, axis=0), quota
            )
            stay = tl.minimum(count, quota)
            surplus, deficit_end = count - stay, tl.cumsum(quota - stay, axis=0)
            end = tl.sum(tl.where(rank <= SIZES.rank, surplus, 0), axis=0)
            begin = end - tl.sum(tl.where(rank == SIZES.rank, surplus, 0), axis=0)
            crossing = tl.minimum(deficit_end, end) - tl.maximum(deficit_end - quota + stay, begin)
            slots = tl.maximum(crossing, 0) + tl.where(rank == SIZES.rank, stay, 0)
            tl.store(copy_slots + replicated * SIZES.num_ranks + rank, slots, mask=is_rank)


def place_replicas(peers, plan, *, slack, num_near):
    launch(
        place_replicas_kernel,
        (peers.num_ranks // num_near,),
        plan_constants(
            4,
            rank=peers.rank,
            num_ranks=peers.num_ranks,
            layout=peers.layout,
            num_near=num_near,
            num_experts=plan.expert_load.numel(),
            num_replica_slots=plan.replica_to_expert.shape[1],
        ),
        peers.bases,
        plan.replica_to_expert,
        plan.replica_rows,
        plan.expert_to_replica_slot,
        plan.copy_slots,
        plan.expert_load,
        slack,
    )


@fast_jit([])
def route_to_replicas_kernel(
    topk_idx,
    block_starts,
    expert_to_replica_slot,
    copy_slots,
    slot_to_copy,
    block_counts,
    num_tokens: tl.int32,
    SIZES: tl.constexpr,
    COPIES: tl.constexpr,
):
    COPIES_PER_RANK: tl.constexpr = SIZES.experts_per_rank + SIZES.num_replica_slots
    block = tl.program_id(0)
    starts = block_starts + block * (SIZES.num_experts + SIZES.num_ranks + 2)
    for part in range(0, CONTROL.TOKENS_PER_BLOCK * SIZES.top_k, SIZES.block_slots):
        slot, is_slot, expert, index = slots_and_positions(
            topk_idx, starts, block, num_tokens, part, SIZES
        )
        valid = expert >= 0
        home = tl.where(valid, expert, 0) // SIZES.experts_per_rank
        copy, begin = tl.full(expert.shape, -1, tl.int32), tl.zeros_like(expert)
        for rank in range(SIZES.num_ranks):
            end = begin + tl.load(copy_slots + expert * SIZES.num_ranks + rank, mask=valid, other=0)
            replica_slot = tl.load(
                expert_to_replica_slot + expert * SIZES.num_ranks + rank, mask=valid, other=-1
            )
            local = tl.where(
                home == rank,
                expert - home * SIZES.experts_per_rank,
                SIZES.experts_per_rank + replica_slot,
            )
            copy = tl.where(
                (index >= begin) & (index < end) & valid, rank * COPIES_PER_RANK + local, copy
            )
            begin = end
        ids = tl.load(topk_idx + slot, mask=is_slot, other=-1)
        is_bad = (ids < -1) | (ids >= SIZES.num_experts)
        tl.store(
            slot_to_copy + slot,
            tl.where(is_bad, SIZES.num_ranks * COPIES_PER_RANK, copy),
            mask=is_slot,
        )
    tl.debug_barrier()  # makes the stores of other threads visible
    count_block(slot_to_copy, block_counts, block, num_tokens, COPIES)


def route_to_replicas(topk_idx, block_starts, plan, block_counts):
    (num_tokens, top_k), num_blocks, num_ranks = (
        topk_idx.shape,
        plan.block_tokens.shape[0],
        plan.copy_slots.shape[1],
    )
    slots = block_slots(top_k)
    launch(
        route_to_replicas_kernel,
        (num_blocks,),
        cached_constants(
            SIZES=plan_constants(
                8,
                num_ranks=num_ranks,
                num_experts=plan.expert_load.numel(),
                top_k=top_k,
                num_replica_slots=plan.replica_to_expert.shape[1],
                block_slots=slots,
                other_slots=min(OTHER_SLOTS, slots),
            ).named["SIZES"],
            COPIES=count_constants(top_k, plan.slot_start.numel(), num_ranks).named["SIZES"],
            num_warps=8,
        ),
        topk_idx,
        block_starts,
        plan.expert_to_replica_slot,
        plan.copy_slots,
        plan.slot_to_copy,
        block_counts,
        num_tokens,
    )


@dataclass(frozen=True, slots=True)
class Kind:
    """The number of elements of a matrix, and its byte offset in the first replica slot."""

    width: int
    dtype: tl.dtype
    start: int


@functools.cache
def _constants(
    matrices, replica_slots: tuple[int, int], at: tuple[int, tuple[int, int]], **ranks: int
) -> Constants:
    """matrices: elements of each of the pair, and the dtype; replica_slots: ranks of the group, and how many each has;
    at: the column of `received`, and bytes after it; ranks: the node's, its first, this one's experts."""
    first, second = (
        Kind(numel, TRITON_DTYPES[dtype], start)
        for (numel, dtype), start in zip(matrices, at[1], strict=True)
    )
    return cached_sizes(
        num_group=replica_slots[0],
        num_replica_slots=replica_slots[1],
        column=at[0],
        **ranks,
        rank_lanes=next_power_of_2(ranks["num_ranks"]),
        block=BLOCK,
        first=first,
        second=second,
        num_warps=NUM_WARPS,
    )


def _move(kernel, pair, replica_slots, peers, received, *, column, starts):
    """Launches a kernel that moves matrices of experts; replica_slots: replica_to_expert, and other maps of these."""
    num_own, dtype = next((tensor.shape[0], tensor.dtype) for tensor in pair if tensor is not None)
    kinds = tuple(
        (0, dtype) if tensor is None else (math.prod(tensor.shape[1:]), tensor.dtype)
        for tensor in pair
    )
    constants = _constants(
        kinds,
        tuple(replica_slots[0].shape),
        (column, starts),
        num_ranks=peers.num_ranks,
        first_rank=peers.in_group(0),
        num_own=num_own,
        first_expert=peers.in_group(peers.rank) * num_own,
    )
    first, second = (
        (None, None) if tensor is None else packed_and_table(tensor) for tensor in pair
    )
    launch(
        kernel,
        (min(NUM_PROGRAMS, ceil_div(max(kinds[0][0], kinds[1][0]), BLOCK)),),
        constants,
        *first,
        *second,
        *replica_slots,
        peers.bases,
        received,
    )


@triton.jit
def replica_slot_of_peer(
    bases, received, rank, replica_slot, KIND: tl.constexpr, SIZES: tl.constexpr
):
    """Pointer to the matrix of a replica slot of a rank, and whether the call has succeeded so far."""
    offset = tl.load(received + rank * CONTROL.NUM_PUBLISHED + SIZES.column)
    first = (tl.load(bases + rank) + offset + KIND.start).to(tl.pointer_type(KIND.dtype))
    # Widths on GPUs are multiples of 8. The hint is on the sum: Triton 3.9 does not pass a hint on through a sum.
    return tl.multiple_of(first + tl.cast(replica_slot, tl.int64) * KIND.width, 16), offset >= 0


@triton.jit
def push_matrices(
    weight, table, replica_to_expert, bases, received, KIND: tl.constexpr, SIZES: tl.constexpr
):
    """push_replicas of one weight."""
    for n in range(SIZES.num_ranks * SIZES.num_replica_slots):
        local_expert = (
            tl.load(replica_to_expert + SIZES.first_rank * SIZES.num_replica_slots + n)
            - SIZES.first_expert
        )
        if (local_expert >= 0) & (local_expert < SIZES.num_own):
            rank, replica_slot = n // SIZES.num_replica_slots, n % SIZES.num_replica_slots
            target, goes_on = replica_slot_of_peer(bases, received, rank, replica_slot, KIND, SIZES)
            if goes_on:
                source = matrix_of(weight, table, local_expert, KIND.width, KIND.dtype)
                for first in range(
                    tl.program_id(0) * SIZES.block, KIND.width, tl.num_programs(0) * SIZES.block
                ):
                    at = first + tl.arange(0, SIZES.block)
                    tl.store(
                        target + at,
                        tl.load(source + at, mask=at < KIND.width),
                        mask=at < KIND.width,
                    )


@fast_jit(["w0", "w1"])
def push_replicas_kernel(
    w0, table0, w1, table1, replica_to_expert, bases, received, SIZES: tl.constexpr
):
    if SIZES.first.width > 0:
        push_matrices(w0, table0, replica_to_expert, bases, received, SIZES.first, SIZES)
    if SIZES.second.width > 0:
        push_matrices(w1, table1, replica_to_expert, bases, received, SIZES.second, SIZES)


def push_replicas(weights, replica_to_expert, peers, received, *, column, starts):
    _move(
        push_replicas_kernel,
        weights,
        (replica_to_expert,),
        peers,
        received,
        column=column,
        starts=starts,
    )


@triton.jit
def add_matrices(gradient, table, tables, bases, received, KIND: tl.constexpr, SIZES: tl.constexpr):
    """add_from_replicas of one gradient. tables: replica_to_expert and expert_to_replica_slot."""
    replica_to_expert, expert_to_replica_slot = tables
    lane = tl.arange(0, SIZES.rank_lanes)
    for n in range(SIZES.num_ranks * SIZES.num_replica_slots):
        expert = tl.load(replica_to_expert + SIZES.first_rank * SIZES.num_replica_slots + n)
        local_expert, rank = expert - SIZES.first_expert, n // SIZES.num_replica_slots
        is_own = (local_expert >= 0) & (local_expert < SIZES.num_own)
        replica_slots = (
            expert_to_replica_slot
            + tl.where(is_own, expert, 0) * SIZES.num_group
            + SIZES.first_rank
        )
        earlier = tl.load(replica_slots + lane, mask=(lane < rank) & is_own, other=-1)
        if is_own & (
            tl.max(earlier, axis=0) < 0
        ):  # the first replica of an expert adds all of its replicas
            sums = matrix_of(gradient, table, local_expert, KIND.width, KIND.dtype)
            for first in range(
                tl.program_id(0) * SIZES.block, KIND.width, tl.num_programs(0) * SIZES.block
            ):
                at = first + tl.arange(0, SIZES.block)
                total = tl.load(sums + at, mask=at < KIND.width, other=0.0).to(tl.float32)
                for peer in range(rank, SIZES.num_ranks):
                    replica_slot = tl.load(replica_slots + peer)
                    replica, goes_on = replica_slot_of_peer(
                        bases, received, peer, replica_slot, KIND, SIZES
                    )
                    if (replica_slot >= 0) & goes_on:
                        total += tl.load(replica + at, mask=at < KIND.width, other=0.0).to(
                            tl.float32
                        )
                tl.store(sums + at, total.to(KIND.dtype), mask=at < KIND.width)


@fast_jit(["dw0", "dw1"])
def add_from_replicas_kernel(
    dw0,
    table0,
    dw1,
    table1,
    replica_to_expert,
    expert_to_replica_slot,
    bases,
    received,
    SIZES: tl.constexpr,
):
    tables = (replica_to_expert, expert_to_replica_slot)
    if SIZES.first.width > 0:
        add_matrices(dw0, table0, tables, bases, received, SIZES.first, SIZES)
    if SIZES.second.width > 0:
        add_matrices(dw1, table1, tables, bases, received, SIZES.second, SIZES)


def add_from_replicas(gradients, replica_slots, peers, received, *, column, starts):
    _move(
        add_from_replicas_kernel,
        gradients,
        replica_slots,
        peers,
        received,
        column=column,
        starts=starts,
    )
