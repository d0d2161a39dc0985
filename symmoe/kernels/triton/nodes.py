"""Kernels of twin/nodes.py."""

import torch
import triton.language as tl

from symmoe.kernels.launch.launch import cached_sizes, ceil_div, fast_jit, launch, next_power_of_2
from symmoe.kernels.triton.plan import count_row, load_experts
from symmoe.kernels.triton.sync import CONTROL, barrier_epoch

ENTRIES = 1 << 14  # comparisons of a slot with a node that rail_rows makes at a time
LINES = 128  # tokens, or lines, of a program of plan_in_node


@fast_jit([])
def rail_rows_kernel(
    topk_idx,
    rank_to_node,
    numbers,
    token_to_rail_row,
    num_tokens: tl.int32,
    max_rows: tl.int32,
    SIZES: tl.constexpr,
):
    node = tl.arange(0, SIZES.lanes)
    is_other = (node < SIZES.num_nodes) & (node != SIZES.own_node)
    total = tl.full((SIZES.lanes,), 0, tl.int32)
    for first in range(0, num_tokens, SIZES.tokens):
        token = first + tl.arange(0, SIZES.tokens)
        goes = tl.full((SIZES.tokens, SIZES.lanes), 0, tl.int32)
        for k in tl.static_range(SIZES.top_k):
            expert = load_experts(
                topk_idx, token * SIZES.top_k + k, token < num_tokens, SIZES.num_experts
            )
            slot_node = tl.load(
                rank_to_node + expert // SIZES.experts_per_rank, mask=expert >= 0, other=-1
            ).to(tl.int32)
            goes |= ((slot_node[:, None] == node[None, :]) & is_other[None, :]).to(tl.int32)
        row = total[None, :] + tl.cumsum(goes, axis=0) - 1
        row = tl.where((goes != 0) & (row < max_rows), row, -1)
        mask = (token < num_tokens)[:, None] & (node < SIZES.num_nodes)[None, :]
        tl.store(
            token_to_rail_row + token[:, None] * SIZES.num_nodes + node[None, :], row, mask=mask
        )
        total += tl.sum(goes, axis=0)
    largest = tl.max(total, axis=0)
    tl.store(numbers + node, total, mask=node < SIZES.num_nodes)
    tl.store(numbers + SIZES.num_nodes, largest)
    tl.store(numbers + SIZES.num_nodes + 1, tl.where(largest > max_rows, largest, 0))


def rail_rows(topk_idx, maps, numbers, token_to_rail_row, *, num_experts, max_rows):
    (num_tokens, top_k), num_nodes = topk_idx.shape, token_to_rail_row.shape[1]
    lanes, experts_per_rank = next_power_of_2(num_nodes), num_experts // (maps.to_node.numel() - 1)
    launch(
        rail_rows_kernel,
        (1,),
        cached_sizes(
            num_experts=num_experts,
            experts_per_rank=experts_per_rank,
            top_k=top_k,
            own_node=maps.own_node,
            num_nodes=num_nodes,
            lanes=lanes,
            tokens=max(1, min(1024, ENTRIES // (lanes * next_power_of_2(top_k)))),
            num_warps=8,
        ),
        topk_idx,
        maps.to_node,
        numbers,
        token_to_rail_row,
        num_tokens,
        max_rows,
    )


@fast_jit([])
def publish_header_kernel(number, bases, source: tl.int32, word: tl.int32, SIZES: tl.constexpr):
    epoch = barrier_epoch(bases, SIZES.rank, SIZES.layout.counters) + 1
    for peer in range(SIZES.num_ranks):
        tl.store(
            count_row(tl.load(bases + peer), epoch, source, SIZES.layout) + word, tl.load(number)
        )


def publish_header(number, peers, source, *, word):
    launch(
        publish_header_kernel,
        (1,),
        cached_sizes(rank=peers.rank, num_ranks=peers.num_ranks, layout=peers.layout, num_warps=1),
        number,
        peers.bases,
        source,
        word,
    )


@fast_jit([])
def own_counts_kernel(ranks, bases, rows, cleared, num_cleared: tl.int32, SIZES: tl.constexpr):
    line, word = tl.program_id(0), tl.arange(0, SIZES.block)
    epoch = barrier_epoch(bases, SIZES.rank, SIZES.layout.counters)
    row = count_row(tl.load(bases + SIZES.rank), epoch, tl.load(ranks + line), SIZES.layout)
    words = tl.load(row + word, mask=word < SIZES.layout.row_words)
    tl.store(rows + line * SIZES.layout.row_words + word, words, mask=word < SIZES.layout.row_words)
    for first in range(line * SIZES.block, num_cleared, tl.num_programs(0) * SIZES.block):
        tl.store(cleared + first + word, word * 0, mask=first + word < num_cleared)


def own_counts(ranks, peers, rows, cleared):
    launch(
        own_counts_kernel,
        (len(ranks),),
        _of_rows(peers),
        ranks,
        peers.bases,
        rows,
        cleared,
        cleared.numel(),
    )


@fast_jit([])
def other_counts_kernel(rows, ranks, bases, received, num_received: tl.int32, SIZES: tl.constexpr):
    line, word = tl.program_id(0), tl.arange(0, SIZES.block)
    own_base = tl.load(bases + SIZES.rank)
    if line < tl.num_programs(0) - 1:
        row = count_row(
            own_base,
            barrier_epoch(bases, SIZES.rank, SIZES.layout.counters),
            tl.load(ranks + line),
            SIZES.layout,
        )
        words = tl.load(
            rows + line * SIZES.layout.row_words + word, mask=word < SIZES.layout.row_words
        )
        tl.store(row + word, words, mask=word < SIZES.layout.row_words)
    else:
        counters = (own_base + SIZES.layout.counters).to(tl.pointer_type(tl.int64))
        failed = tl.load(counters + CONTROL.ABORTED)
        for counter in tl.static_range(CONTROL.ABORTED + 1, CONTROL.RAIL_FAULT + 1):
            failed = tl.maximum(failed, tl.load(counters + counter))
        for first in range(0, num_received, SIZES.block):
            tl.store(
                received + first + word,
                word.to(tl.int64) * 0 - failed,
                mask=first + word < num_received,
            )


def other_counts(rows, ranks, peers, received):
    launch(
        other_counts_kernel,
        (len(ranks) + 1,),
        _of_rows(peers),
        rows,
        ranks,
        peers.bases,
        received,
        received.numel(),
    )


def _of_rows(peers):
    return cached_sizes(
        rank=peers.rank,
        layout=peers.layout,
        block=next_power_of_2(peers.layout.row_words),
        num_warps=4,
    )


@fast_jit([])
def take_rows_kernel(
    rows, index, out, num_rows: tl.int32, num_words: tl.int32, SIZES: tl.constexpr
):
    line = tl.program_id(0)
    source = tl.load(index + line).to(tl.int64) * num_words
    for first in range(0, num_words, SIZES.block):
        word = first + tl.arange(0, SIZES.block)
        words = tl.load(rows + source + word, mask=(word < num_words) & (num_rows > 0), other=0)
        tl.store(out + line.to(tl.int64) * num_words + word, words, mask=word < num_words)


def take_rows(rows, index, out):
    if len(index):
        num_rows, out = len(rows), out.view(torch.int32)
        rows = rows.view(torch.int32) if num_rows else out  # without rows, strides are arbitrary
        num_words = out.shape[1]
        launch(
            take_rows_kernel,
            (len(index),),
            cached_sizes(block=min(1024, next_power_of_2(num_words)), num_warps=4),
            rows,
            index,
            out,
            num_rows,
            num_words,
        )


@fast_jit([])
def plan_in_node_kernel(
    slot_to_row,
    slot_to_rank,
    token_to_packed_row,
    token_to_primary_row,
    block_tokens,
    packed_start,
    packed_limit,
    source_to_packed_start,
    source_to_rows,
    token_to_rail_row,
    numbers,
    to_local,
    by_node,
    first_with,
    token_to_home_row,
    home_row_to_token,
    node_slot_to_row,
    node_slot_to_rank,
    node_packed_row,
    node_primary_row,
    slot_to_home_row,
    zeros,
    ends,
    regions,
    node_packed_start,
    own_rows,
    num_tokens: tl.int32,
    num_sent: tl.int32,
    num_foreign: tl.int32,
    max_rows: tl.int32,
    num_blocks: tl.int32,
    SIZES: tl.constexpr,
):
    NUM_RANKS: tl.constexpr = SIZES.num_nodes * SIZES.per_node
    NUM_REGIONS: tl.constexpr = SIZES.num_nodes * 3 * SIZES.per_node
    program, lane, word = tl.program_id(0), tl.arange(0, SIZES.lines), tl.arange(0, SIZES.block)
    line = program * SIZES.lines + lane
    # The places of this rank's tokens on each node.
    for node in range(SIZES.num_nodes):
        rail_row = tl.load(
            token_to_rail_row + line * SIZES.num_nodes + node, mask=line < num_tokens, other=-1
        )
        before = node
        if node > SIZES.own_node:
            before = node - 1
        home = tl.where(rail_row < 0, -1, num_tokens + max_rows * before + rail_row)
        home = tl.where((node == SIZES.own_node) & (line < num_tokens), line, home)
        is_there = home >= 0
        tl.store(token_to_home_row + line * SIZES.num_nodes + node, home, mask=line < num_tokens)
        tl.store(home_row_to_token + home, line, mask=is_there)
        for k in range(SIZES.top_k):
            slot = line * SIZES.top_k + k
            rank = tl.load(slot_to_rank + slot, mask=line < num_tokens, other=-1)
            local = tl.load(to_local + node * (NUM_RANKS + 1) + tl.where(rank < 0, NUM_RANKS, rank))
            row = tl.load(slot_to_row + slot, mask=line < num_tokens, other=-1)
            tl.store(node_slot_to_rank + home * SIZES.top_k + k, local, mask=is_there)
            tl.store(
                node_slot_to_row + home * SIZES.top_k + k,
                tl.where(local < 0, -1, row),
                mask=is_there,
            )
            home_slot = tl.where((rank < 0) | (home < 0), -1, home * SIZES.top_k + k)
            is_in_node = (local >= 0) | ((rank < 0) & (node == SIZES.own_node))
            is_in_node &= line < num_tokens
            tl.store(slot_to_home_row + slot, home_slot, mask=is_in_node)
        for peer in range(SIZES.per_node):
            index = line * NUM_RANKS + tl.load(by_node + node * SIZES.per_node + peer)
            packed = tl.load(token_to_packed_row + index, mask=is_there, other=-1)
            primary = tl.load(token_to_primary_row + index, mask=is_there, other=-1)
            tl.store(node_packed_row + home * SIZES.per_node + peer, packed, mask=is_there)
            tl.store(node_primary_row + home * SIZES.per_node + peer, primary, mask=is_there)
    WIDTH: tl.constexpr = SIZES.num_nodes if SIZES.num_nodes > SIZES.top_k else SIZES.top_k
    for column in range(WIDTH):
        tl.store(zeros + line * WIDTH + column, line * 0, mask=line < num_tokens)
    # Unused sent rows, and foreign tokens.
    to = line // max_rows
    to += (to >= SIZES.own_node).to(tl.int32)
    num_used = tl.load(numbers + to, mask=line < num_sent, other=0)
    is_unused = (line < num_sent) & (line % max_rows >= num_used)
    unused = num_tokens + line
    tl.store(home_row_to_token + unused, line * 0, mask=is_unused)
    is_unused |= (line >= num_sent) & (line < num_sent + num_foreign)
    for k in range(SIZES.top_k):
        tl.store(node_slot_to_rank + unused * SIZES.top_k + k, line * 0 - 1, mask=is_unused)
        tl.store(node_slot_to_row + unused * SIZES.top_k + k, line * 0 - 1, mask=is_unused)
    for peer in range(SIZES.per_node):
        tl.store(node_packed_row + unused * SIZES.per_node + peer, line * 0 - 1, mask=is_unused)
        tl.store(node_primary_row + unused * SIZES.per_node + peer, line * 0 - 1, mask=is_unused)
    if program == 0:
        tl.store(ends, 0)
        tl.store(ends + 1, num_tokens)
        for first in range(0, 2 * NUM_REGIONS, SIZES.block):
            entry = first + word
            mask = entry < NUM_REGIONS
            which, region_node = entry // SIZES.per_node % 3, entry // (3 * SIZES.per_node)
            region_rank = tl.load(
                by_node + region_node * SIZES.per_node + entry % SIZES.per_node, mask=mask, other=0
            )
            number = tl.load(packed_start + region_rank, mask=mask & (which == 1), other=0)
            number += tl.load(packed_limit + region_rank, mask=mask & (which == 2), other=0)
            for block in range(num_blocks):
                number += tl.load(
                    block_tokens + block * NUM_RANKS + region_rank,
                    mask=mask & (which == 0),
                    other=0,
                )
            tl.store(regions + entry, number, mask=entry < 2 * NUM_REGIONS)
        for first in range(0, NUM_RANKS + 1, SIZES.block):
            mask = first + word < NUM_RANKS + 1
            source = tl.load(first_with + first + word, mask=mask, other=0)
            start = tl.load(source_to_packed_start + source, mask=mask)
            tl.store(node_packed_start + first + word, start, mask=mask)
        for first in range(0, SIZES.num_local, SIZES.block):
            mask = first + word < SIZES.num_local
            begin = tl.load(
                source_to_rows + SIZES.first * 2 * SIZES.num_local + first + word, mask=mask
            )
            end = tl.load(
                source_to_rows
                + (2 * (SIZES.first + SIZES.per_node) - 1) * SIZES.num_local
                + first
                + word,
                mask=mask,
            )
            tl.store(own_rows + first + word, begin, mask=mask)
            tl.store(own_rows + SIZES.num_local + first + word, end, mask=mask)


def plan_in_node(plan, token_to_rail_row, numbers, maps, integers):
    (num_tokens, top_k), (num_nodes, per_node) = plan.slot_to_row.shape, maps.by_node.shape
    num_sent, num_blocks = len(integers.home_row_to_token) - num_tokens, len(plan.block_tokens)
    num_foreign = len(integers.slot_to_row) - num_tokens - num_sent
    launch(
        plan_in_node_kernel,
        (max(1, ceil_div(max(num_tokens, num_sent + num_foreign), LINES)),),
        cached_sizes(
            own_node=maps.own_node,
            num_nodes=num_nodes,
            per_node=per_node,
            top_k=top_k,
            lines=LINES,
            num_local=plan.row_range.shape[1],
            first=maps.first,
            block=512,
            num_warps=4,
        ),
        plan.slot_to_row,
        plan.slot_to_rank,
        plan.token_to_packed_row,
        plan.token_to_primary_row,
        plan.block_tokens,
        plan.packed_start,
        plan.packed_limit,
        plan.source_to_packed_start,
        plan.source_to_rows,
        token_to_rail_row,
        numbers,
        maps.to_local,
        maps.by_node,
        maps.first_with,
        *[
            getattr(integers, name) for name in integers.layout
        ],  # all tensors, in the kernel's order
        num_tokens,
        num_sent,
        num_foreign,
        max(1, num_sent // (num_nodes - 1)),
        num_blocks,
    )
