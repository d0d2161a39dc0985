"""Kernels that move rows: push and pull over the wire, fan-out and sums on one rank. Letters: twin/tokens.py.

Rows move in tiles [tokens, columns] with 16-byte accesses, several in flight per thread. Programs loop over tiles, so a
caller may limit their number and leave SMs to a GEMM.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from symmoe.kernels import hopper_choice
from symmoe.kernels.launch.launch import (
    Constants,
    cached_sizes,
    ceil_div,
    fast_jit,
    launch,
    next_power_of_2,
)
from symmoe.kernels.triton.sync import CONTROL

ACCESS_BYTES = tl.constexpr(16)

# Programs of the kernels that move rows: four for each of an H200's 132 SMs hide the latency of the index loads.
NUM_CTAS = 4 * 132
ROW_WARPS = 8
CAPPED_ROW_WARPS = 16  # with few programs, each must keep more in flight
COPY_ACCESSES = 4  # 16-byte accesses per thread and tile: a copy needs 4 registers for each
SUM_ACCESSES = 2  # a sum of 16-bit rows needs 8 more for each, and several rows are in flight
MAX_TILE_COLUMNS_BYTES = 4096
UNROLL = 8  # rows of one token whose loads may be in flight together
PEERS_UNROLL = (
    4  # rows of peers whose loads may be in flight together, in addition to the rank's own rows
)
HOME_ACCESSES = 1  # in place of SUM_ACCESSES where both kinds are in flight
SLOTS_PER_PROGRAM = 1024  # slots of a program that moves slots or values


def _move(kernel, args, rows, num_rows, accesses, num_ctas=None, **sizes):
    """Launches a kernel that moves num_rows rows like `rows`, with `accesses` 16-byte accesses per thread and tile."""
    constants = _cut(rows.shape[1], rows.dtype, accesses, num_ctas is None, **sizes)
    tile_sizes = constants.named["SIZES"]
    num_tiles = ceil_div(num_rows, int(tile_sizes.tokens)) * int(tile_sizes.column_tiles)
    launch(kernel, (min(num_tiles, NUM_CTAS if num_ctas is None else num_ctas),), constants, *args)


@functools.cache
def _cut(
    width: int, dtype: torch.dtype, accesses: int, many_programs: bool, **sizes: Any
) -> Constants:
    """Rows of a width in tiles [tokens, columns]."""
    num_warps = ROW_WARPS if many_programs else CAPPED_ROW_WARPS
    row_bytes = width * dtype.itemsize
    tile_bytes = num_warps * 32 * 16 * accesses
    columns_bytes = min(
        row_bytes & -row_bytes, MAX_TILE_COLUMNS_BYTES, tile_bytes
    )  # divides the row: no mask
    if columns_bytes < 512:  # less than a warp's access: a masked tail is cheaper
        columns_bytes = min(next_power_of_2(row_bytes), MAX_TILE_COLUMNS_BYTES // 2, tile_bytes)
    tokens, columns = tile_bytes // columns_bytes, columns_bytes // dtype.itemsize
    return _constants(
        tokens=tokens,
        columns=columns,
        column_tiles=ceil_div(width, columns),
        **sizes,
        width=width,
        row_bytes=row_bytes,
        tile=(tokens, columns),
        num_warps=num_warps,
    )


def _move_slots(kernel, args, num_slots, more_programs=0, **sizes):
    """Launches a kernel that moves num_slots slots or values."""
    launch(
        kernel,
        (more_programs + ceil_div(num_slots, SLOTS_PER_PROGRAM),),
        _constants(block=SLOTS_PER_PROGRAM, **sizes, num_warps=4),
        *args,
    )


def _constants(top_k: int = 0, num_ranks: int = 0, **sizes: Any) -> Constants:
    """Constants. top_k: rows of a token. column, prob_column: of `received`. unroll, peers_unroll: rows of a token, and
    of peers, that are loaded together. rank_lanes: lanes of a vector over the ranks."""
    lanes = next_power_of_2(num_ranks)
    return cached_sizes(
        top_k=top_k,
        num_ranks=num_ranks,
        rank_lanes=lanes,
        unroll=min(UNROLL, next_power_of_2(top_k)),
        peers_unroll=min(PEERS_UNROLL, lanes),
        **sizes,
    )


def _moved(name, rows, num_ctas, *args, **options) -> bool:
    """Launches the kernel for few programs, if num_ctas is given and a kernel supports these rows, at least one row."""
    if num_ctas is None or rows.shape[0] == 0:
        return False
    output = rows.device, rows.dtype, rows.shape[1]
    return hopper_choice.launched(name, output, (rows,), *args, num_ctas=num_ctas, **options)


@triton.jit
def num_tiles(num_tokens, SIZES: tl.constexpr):
    """Number of tiles of num_tokens rows."""
    return tl.cdiv(num_tokens, SIZES.tokens) * SIZES.column_tiles


@triton.jit
def tile_location(tile, SIZES: tl.constexpr):
    """Tokens of a tile, its columns [1, columns], and their mask."""
    token = tile // SIZES.column_tiles * SIZES.tokens + tl.arange(0, SIZES.tokens)
    column = tile % SIZES.column_tiles * SIZES.columns + tl.arange(0, SIZES.columns)
    return token, column[None, :], (column < SIZES.width)[None, :]


@triton.jit
def pointers_to_rows(rows, row, column, SIZES: tl.constexpr):
    """Pointers to a tile of rows of a matrix."""
    return rows + row.to(tl.int64)[:, None] * SIZES.width + column


@triton.jit
def row_pointers(address, ELEMENT: tl.constexpr):
    """Pointers [rows, 1] from int64 addresses of rows; the hint makes Triton use 16-byte accesses."""
    return tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), [ACCESS_BYTES])[:, None]


@fast_jit(["x"])
def push_rows_kernel(
    x,
    token_to_row,
    bases,
    received,
    num_tokens: tl.int32,
    first_rank: tl.int32,
    end_rank: tl.int32,
    but: tl.int32,
    SIZES: tl.constexpr,
):
    for tile in range(tl.program_id(0), num_tiles(num_tokens, SIZES), tl.num_programs(0)):
        token, column, is_column = tile_location(tile, SIZES)
        is_token = token < num_tokens
        source = pointers_to_rows(x, token, column, SIZES)
        moves = is_token
        if SIZES.one_rank:  # tokens without this destination need no read
            moves &= (
                tl.load(
                    token_to_row + token * SIZES.num_ranks + first_rank, mask=is_token, other=-1
                )
                >= 0
            )
        values = tl.load(source, mask=moves[:, None] & is_column)
        for rank in range(first_rank, end_rank):
            row = tl.load(token_to_row + token * SIZES.num_ranks + rank, mask=is_token, other=-1)
            offset = tl.load(received + rank * CONTROL.NUM_PUBLISHED + SIZES.column)
            goes = (row >= 0) & (offset >= 0) & (rank != but)
            address = tl.load(bases + rank) + offset + row.to(tl.int64) * SIZES.row_bytes
            tl.store(
                row_pointers(address, x.dtype.element_ty) + column,
                values,
                mask=goes[:, None] & is_column,
            )


def push_rows(x, token_to_row, peers, received, *, column, ranks=None, but=None, num_ctas=None):
    num_tokens, num_ranks = x.shape[0], peers.num_ranks
    ranks = range(num_ranks) if ranks is None else ranks
    if len(ranks) == 1 and (
        ranks.start == but
        or _moved(
            *("push_rows", x, num_ctas, x, token_to_row, peers, received),
            column=column,
            rank=ranks.start,
        )
    ):
        return
    _move(
        push_rows_kernel,
        (
            x,
            token_to_row,
            peers.bases,
            received,
            num_tokens,
            ranks.start,
            ranks.stop,
            -1 if but is None else but,
        ),
        x,
        num_tokens,
        COPY_ACCESSES,
        num_ctas,
        num_ranks=num_ranks,
        column=column,
        one_rank=len(ranks) == 1 < num_ranks,
    )


@fast_jit([])
def push_slots_kernel(
    slot_to_row,
    slot_to_rank,
    probs,
    token_to_packed_row,
    block_tokens,
    packed_start,
    packed_limit,
    bases,
    received,
    num_tokens: tl.int32,
    num_blocks: tl.int32,
    SIZES: tl.constexpr,
):
    program = tl.program_id(0)
    lane = tl.arange(0, SIZES.block)
    if program >= SIZES.num_ranks:  # slots of tokens
        slot = (program - SIZES.num_ranks) * SIZES.block + lane
        token = slot // SIZES.top_k
        k = slot - token * SIZES.top_k
        is_slot = token < num_tokens
        row = tl.load(slot_to_row + slot, mask=is_slot, other=-1)
        slot_rank = tl.load(slot_to_rank + slot, mask=is_slot, other=-1)
        if probs is not None:
            prob = tl.load(probs + slot, mask=is_slot, other=0.0)
        for rank in range(SIZES.num_ranks):
            offset = tl.load(received + rank * CONTROL.NUM_PUBLISHED + SIZES.column)
            packed = tl.load(
                token_to_packed_row + token * SIZES.num_ranks + rank, mask=is_slot, other=-1
            )
            goes = (packed >= 0) & (offset >= 0)
            is_on_rank = slot_rank == rank
            base = tl.load(bases + rank)
            entry = packed.to(tl.int64) * SIZES.top_k + k
            tl.store(
                (base + offset).to(tl.pointer_type(tl.int32)) + entry,
                tl.where(is_on_rank, row, -1),
                mask=goes,
            )
            if probs is not None:
                prob_offset = tl.load(received + rank * CONTROL.NUM_PUBLISHED + SIZES.prob_column)
                values = (base + prob_offset).to(tl.pointer_type(tl.float32))
                tl.store(values + entry, tl.where(is_on_rank, prob, 0.0), mask=goes)
    else:  # the rest of this rank's region on rank `program`
        offset = tl.load(received + program * CONTROL.NUM_PUBLISHED + SIZES.column)
        used = tl.full((SIZES.block,), 0, tl.int32)
        for first in range(0, num_blocks, SIZES.block):
            block = first + lane
            used += tl.load(
                block_tokens + block * SIZES.num_ranks + program, mask=block < num_blocks, other=0
            )
        start = tl.load(packed_start + program)
        first_unused = (start + tl.sum(used, axis=0)) * SIZES.top_k
        end = (start + tl.load(packed_limit + program)) * SIZES.top_k
        rows = (tl.load(bases + program) + offset).to(tl.pointer_type(tl.int32))
        for first in range(first_unused, end, SIZES.block):
            entry = first + lane
            tl.store(
                rows + entry,
                tl.full((SIZES.block,), -1, tl.int32),
                mask=(entry < end) & (offset >= 0),
            )


def push_slots(slots, region, peers, received, *, row_column, prob_column):
    num_tokens, top_k = slots[0].shape
    _move_slots(
        push_slots_kernel,
        (*slots, *region, peers.bases, received, num_tokens, region[1].shape[0]),
        num_tokens * top_k,
        peers.num_ranks,
        top_k=top_k,
        num_ranks=peers.num_ranks,
        column=row_column,
        prob_column=prob_column,
    )


@fast_jit([])
def index_rows_kernel(
    wire_to_row,
    wire_probs,
    packed_begin,
    packed_end,
    num_rows,
    ready,
    arrived,
    packed_to_row,
    row_to_packed_row,
    row_probs,
    num_slots: tl.int32,
    row_capacity: tl.int32,
    SIZES: tl.constexpr,
):
    entry = tl.program_id(0) * SIZES.block + tl.arange(0, SIZES.block)
    zero = tl.full((SIZES.block,), 0, tl.int32)
    if tl.minimum(tl.load(ready), tl.load(arrived)) < 0:
        tl.store(packed_to_row + entry, zero - 1, mask=entry < num_slots)
        tl.store(row_to_packed_row + entry, zero, mask=entry < row_capacity)
        if row_probs is not None:
            tl.store(
                row_probs + entry,
                tl.full((SIZES.block,), float("nan"), tl.float32),
                mask=entry < row_capacity,
            )
    else:
        is_tail = (entry >= tl.load(num_rows)) & (entry < row_capacity)
        tl.store(row_to_packed_row + entry, zero, mask=is_tail)
        entry += tl.load(packed_begin) * SIZES.top_k
        packed = entry // SIZES.top_k
        used = packed < tl.load(packed_end)
        row = tl.load(wire_to_row + entry, mask=used, other=-1)
        tl.store(packed_to_row + entry, row, mask=used)
        tl.store(row_to_packed_row + row, packed, mask=row >= 0)
        if row_probs is not None:
            prob = tl.load(wire_probs + entry, mask=row >= 0, other=0.0)
            tl.store(row_probs + row, prob, mask=row >= 0)


def index_rows(wire, packed, num_rows, trip, index):
    numbers = index[0].numel(), index[1].numel()
    _move_slots(
        index_rows_kernel,
        (*wire, *packed, num_rows, *trip, *index, *numbers),
        max(numbers),
        top_k=index[0].shape[1],
    )


@triton.jit
def primary_row(packed_to_row, packed, is_packed, SIZES: tl.constexpr):
    """Per packed row: the token's first row (-1: none), and its number of rows."""
    primary = tl.full(packed.shape, -1, tl.int32)
    num_rows = tl.full(packed.shape, 0, tl.int32)
    for first in range(0, SIZES.top_k, SIZES.unroll):
        for step in tl.static_range(SIZES.unroll):
            k = first + step
            row = tl.load(
                packed_to_row + packed * SIZES.top_k + k,
                mask=is_packed & (k < SIZES.top_k),
                other=-1,
            )
            primary = tl.where((row >= 0) & (primary < 0), row, primary)
            num_rows += (row >= 0).to(tl.int32)
    return primary, num_rows


@fast_jit(["x", "rows"])
def place_rows_kernel(
    x,
    slot_to_rank,
    slot_to_row,
    rows,
    received,
    num_tokens: tl.int32,
    rank: tl.int32,
    SIZES: tl.constexpr,
):
    num = tl.where(tl.load(received + rank * CONTROL.NUM_PUBLISHED) < 0, 0, num_tokens)
    for tile in range(tl.program_id(0), num_tiles(num, SIZES), tl.num_programs(0)):
        token, column, is_column = tile_location(tile, SIZES)
        is_token = token < num
        values = tl.load(
            pointers_to_rows(x, token, column, SIZES), mask=is_token[:, None] & is_column
        )
        for k in range(SIZES.top_k):
            is_own = (
                tl.load(slot_to_rank + token * SIZES.top_k + k, mask=is_token, other=-1) == rank
            )
            row = tl.load(slot_to_row + token * SIZES.top_k + k, mask=is_own, other=-1)
            target = pointers_to_rows(rows, row, column, SIZES)
            tl.store(target, values, mask=(row >= 0)[:, None] & is_column)


def place_rows(x, slot_to_rank, slot_to_row, rows, received, *, rank):
    if rows.numel():
        _move(
            place_rows_kernel,
            (x, slot_to_rank, slot_to_row, rows, received, x.shape[0], rank),
            x,
            x.shape[0],
            COPY_ACCESSES,
            top_k=slot_to_row.shape[1],
        )


@fast_jit(["rows"])
def fan_out_kernel(
    rows,
    packed_to_row,
    source_to_packed_start,
    rank: tl.int32,
    source: tl.int32,
    SIZES: tl.constexpr,
):
    # From all sources but this rank if `source` is -1.
    own_begin = tl.load(source_to_packed_start + rank)
    own_end = tl.load(source_to_packed_start + rank + 1)
    begin = tl.load(source_to_packed_start + tl.maximum(source, 0))
    end = tl.load(source_to_packed_start + tl.where(source < 0, SIZES.num_ranks, source + 1))
    num_skipped = tl.where(source < 0, own_end - own_begin, 0)
    num = end - begin - num_skipped
    for tile in range(tl.program_id(0), num_tiles(num, SIZES), tl.num_programs(0)):
        index, column, is_column = tile_location(tile, SIZES)
        packed = begin + index
        packed = tl.where(packed < own_begin, packed, packed + num_skipped)
        primary, num_rows = primary_row(packed_to_row, packed, index < num, SIZES)
        several = num_rows > 1
        values = tl.load(
            pointers_to_rows(rows, primary, column, SIZES), mask=several[:, None] & is_column
        )
        for k in range(SIZES.top_k):
            row = tl.load(packed_to_row + packed * SIZES.top_k + k, mask=several, other=-1)
            is_secondary = (row >= 0) & (row != primary)
            tl.store(
                pointers_to_rows(rows, row, column, SIZES),
                values,
                mask=is_secondary[:, None] & is_column,
            )


def fan_out(rows, packed_to_row, source_to_packed_start, *, rank, source=None, num_ctas=None):
    (num_packed_cap, top_k), num_ranks = packed_to_row.shape, source_to_packed_start.numel() - 1
    # One slot per token: no secondary rows.
    if rows.numel() == 0 or num_packed_cap == 0 or top_k == 1 or num_ranks == 1 or source == rank:
        return
    tables = packed_to_row, source_to_packed_start
    if source is not None and _moved("fan_out", rows, num_ctas, rows, *tables, source=source):
        return
    _move(
        fan_out_kernel,
        (rows, *tables, rank, -1 if source is None else source),
        rows,
        num_packed_cap,
        COPY_ACCESSES,
        num_ctas,
        num_ranks=num_ranks,
        top_k=top_k,
    )


@fast_jit(["rows"])
def push_sums_kernel(
    rows,
    packed_to_row,
    source_to_packed_start,
    bases,
    received,
    rank: tl.int32,
    first_step: tl.int32,
    end_step: tl.int32,
    SIZES: tl.constexpr,
):
    for step in range(first_step, end_step):  # every rank begins with another rank
        home = (rank + step) % SIZES.num_ranks
        begin = tl.load(source_to_packed_start + home)
        offset = tl.load(received + home * CONTROL.NUM_PUBLISHED + SIZES.column)
        num = tl.where(offset < 0, 0, tl.load(source_to_packed_start + home + 1) - begin)
        region_bytes = (
            tl.load(received + home * CONTROL.NUM_PUBLISHED + SIZES.column + 1)
            - offset
            + SIZES.row_bytes
        )
        region = tl.load(bases + home) + offset + (rank - (rank > home).to(tl.int32)) * region_bytes
        for tile in range(tl.program_id(0), num_tiles(num, SIZES), tl.num_programs(0)):
            index, column, is_column = tile_location(tile, SIZES)
            primary, num_rows = primary_row(packed_to_row, begin + index, index < num, SIZES)
            mask = (num_rows > 0)[:, None] & is_column
            total = tl.load(
                pointers_to_rows(rows, primary, column, SIZES), mask=mask, other=0.0
            ).to(tl.float32)
            for first in range(0, SIZES.top_k, SIZES.unroll):
                masks, values = (), ()
                for i in tl.static_range(SIZES.unroll):
                    k = first + i
                    is_slot = (num_rows > 1) & (k < SIZES.top_k)
                    row = tl.load(
                        packed_to_row + (begin + index) * SIZES.top_k + k, mask=is_slot, other=-1
                    )
                    source = pointers_to_rows(rows, row, column, SIZES)
                    masks += (((row >= 0) & (row != primary))[:, None] & is_column,)
                    values += (tl.load(source, mask=masks[i], other=0.0),)
                for i in tl.static_range(SIZES.unroll):
                    # A missing row is not added as 0.0, which would turn -0.0 into 0.0.
                    total = tl.where(masks[i], total + values[i].to(tl.float32), total)
            address = region + index.to(tl.int64) * SIZES.row_bytes
            target = row_pointers(address, rows.dtype.element_ty) + column
            tl.store(target, total.to(rows.dtype.element_ty), mask=mask)


def push_sums(
    rows,
    packed_to_row,
    source_to_packed_start,
    peers,
    received,
    *,
    column,
    source=None,
    num_ctas=None,
):
    num_packed_cap, top_k = packed_to_row.shape
    num_ranks, rank = peers.num_ranks, peers.rank
    if rows.numel() == 0 or num_packed_cap == 0 or num_ranks == 1 or source == rank:
        return
    tables = packed_to_row, source_to_packed_start
    if source is not None and _moved(
        *("push_sums", rows, num_ctas, rows, *tables, peers, received),
        column=column,
        home=source,
    ):
        return
    step = None if source is None else (source - rank) % num_ranks
    steps = (1, num_ranks) if step is None else (step, step + 1)
    _move(
        push_sums_kernel,
        (rows, *tables, peers.bases, received, rank, *steps),
        rows,
        num_packed_cap,
        SUM_ACCESSES,
        num_ctas,
        num_ranks=num_ranks,
        top_k=top_k,
        column=column,
    )


@fast_jit([])
def gather_values_kernel(row_values, packed_to_row, num_packed, packed_values, SIZES: tl.constexpr):
    entry = tl.program_id(0) * SIZES.block + tl.arange(0, SIZES.block)
    used = entry // SIZES.top_k < tl.load(num_packed)
    row = tl.load(packed_to_row + entry, mask=used, other=-1)
    value = tl.load(row_values + row, mask=row >= 0, other=0.0)
    tl.store(packed_values + entry, value, mask=used)


def gather_values(row_values, packed_to_row, num_packed, packed_values):
    _move_slots(
        gather_values_kernel,
        (row_values, packed_to_row, num_packed, packed_values),
        packed_to_row.numel(),
        top_k=packed_to_row.shape[1],
    )


@triton.jit
def call_failed(received, SIZES: tl.constexpr):
    """Whether the barrier's offsets report a failed call: no data may be moved."""
    rank = tl.arange(0, SIZES.rank_lanes)
    offset = tl.load(
        received + rank * CONTROL.NUM_PUBLISHED + SIZES.column, mask=rank < SIZES.num_ranks, other=0
    )
    return tl.min(offset, axis=0) < 0


@fast_jit(["out"])
def pull_rows_kernel(
    source_rank, source_row, bases, received, out, num_tokens: tl.int32, SIZES: tl.constexpr
):
    failed = call_failed(received, SIZES)
    for tile in range(tl.program_id(0), num_tiles(num_tokens, SIZES), tl.num_programs(0)):
        token, column, is_column = tile_location(tile, SIZES)
        is_token = token < num_tokens
        total = tl.full(SIZES.tile, 0.0, tl.float32)
        for first in range(0, SIZES.top_k, SIZES.unroll):
            # Each step covers all sources, so that their loads are in flight together.
            rows, addresses, values = (), (), ()
            for step in tl.static_range(SIZES.unroll):
                s = first + step
                mask = is_token & (s < SIZES.top_k) & (not failed)
                rows += (tl.load(source_row + token * SIZES.top_k + s, mask=mask, other=-1),)
            for step in tl.static_range(SIZES.unroll):
                s = first + step
                rank = tl.load(
                    source_rank + token * SIZES.top_k + s, mask=rows[step] >= 0, other=-1
                )
                base = tl.load(bases + rank, mask=rank >= 0, other=0)
                addresses += (
                    base
                    + tl.load(
                        received + rank * CONTROL.NUM_PUBLISHED + SIZES.column,
                        mask=rank >= 0,
                        other=0,
                    ),
                )
            for step in tl.static_range(SIZES.unroll):
                has_row = (rows[step] >= 0) & (addresses[step] != 0)
                source = (
                    row_pointers(
                        addresses[step] + rows[step].to(tl.int64) * SIZES.row_bytes,
                        out.dtype.element_ty,
                    )
                    + column
                )
                values += (tl.load(source, mask=has_row[:, None] & is_column, other=0.0),)
            for step in tl.static_range(SIZES.unroll):
                # Adding 0.0 for missing rows has no effect: a sum that starts at 0.0 is never -0.0.
                total += values[step].to(tl.float32)
        total = tl.where(failed, float("nan"), total)
        tl.store(
            pointers_to_rows(out, token, column, SIZES),
            total.to(out.dtype.element_ty),
            mask=is_token[:, None] & is_column,
        )


def pull_rows(source_rank, source_row, peers, received, out, *, column):
    _move(
        pull_rows_kernel,
        (source_rank, source_row, peers.bases, received, out, out.shape[0]),
        out,
        out.shape[0],
        SUM_ACCESSES,
        top_k=source_row.shape[1],
        num_ranks=peers.num_ranks,
        column=column,
    )


@triton.jit
def sum_own_rows(slots, token, is_token, top_k, rank, rows, column, is_column, SIZES: tl.constexpr):
    """Sums of the tokens' rows on rank `rank`, this rank: fp32, in k order, rounded in the same way as peers' sums."""
    slot_to_rank, slot_to_row = slots
    total = tl.full(SIZES.tile, 0.0, tl.float32)
    # `top_k` is not a constant, to keep this a loop: in straight code ptxas would delay the loads of returned rows.
    for first in range(0, top_k, SIZES.unroll):
        own_rows, values = (), ()
        for step in tl.static_range(SIZES.unroll):
            slot = token * top_k + first + step
            mask = is_token & (first + step < top_k)
            is_own = tl.load(slot_to_rank + slot, mask=mask, other=-1) == rank
            own_rows += (tl.where(is_own, tl.load(slot_to_row + slot, mask=mask, other=-1), -1),)
        for step in tl.static_range(SIZES.unroll):
            has_row = tl.expand_dims(own_rows[step] >= 0, 1)
            source = pointers_to_rows(rows, own_rows[step], column, SIZES)
            values += (tl.load(source, mask=has_row & is_column, other=0.0),)
        for step in tl.static_range(SIZES.unroll):
            # Where all rows are -0.0, a peer's sum is -0.0 and this is 0.0. The sum over ranks is the same.
            total += values[step].to(tl.float32)
    return total.to(rows.dtype.element_ty)


@fast_jit(["rows", "returned", "out"])
def sum_home_kernel(
    rows,
    returned,
    token_to_packed_row,
    packed_start,
    slot_to_rank,
    slot_to_row,
    ready,
    arrived,
    out,
    num_tokens: tl.int32,
    top_k: tl.int32,
    own_rank: tl.int32,
    SIZES: tl.constexpr,
):
    failed = tl.minimum(tl.load(ready), tl.load(arrived)) < 0
    for tile in range(tl.program_id(0), num_tiles(num_tokens, SIZES), tl.num_programs(0)):
        token, column, is_column = tile_location(tile, SIZES)
        is_token = token < num_tokens
        total = tl.full(SIZES.tile, 0.0, tl.float32)
        own_sum = tl.full(SIZES.tile, 0.0, out.dtype.element_ty)
        for first in range(0, SIZES.num_ranks, SIZES.peers_unroll):
            packed, values = (), ()
            for step in tl.static_range(SIZES.peers_unroll):
                rank = first + step
                mask = is_token & (rank < SIZES.num_ranks) & (rank != own_rank) & (not failed)
                packed += (
                    tl.load(
                        token_to_packed_row + token * SIZES.num_ranks + rank, mask=mask, other=-1
                    ),
                )
            for step in tl.static_range(SIZES.peers_unroll):
                rank = first + step
                region = rank - (own_rank < rank).to(tl.int32)
                start = tl.load(packed_start + rank, mask=rank < SIZES.num_ranks, other=0)
                row = region * num_tokens + packed[step] - start
                has_row = is_token & (packed[step] >= 0)
                values += (
                    tl.load(
                        pointers_to_rows(returned, row, column, SIZES),
                        mask=has_row[:, None] & is_column,
                        other=0.0,
                    ),
                )
            if first == 0:  # while peers' rows load
                slots = (slot_to_rank, slot_to_row)
                own_tokens = is_token & (not failed)
                own_sum = sum_own_rows(
                    slots, token, own_tokens, top_k, own_rank, rows, column, is_column, SIZES
                )
            for step in tl.static_range(SIZES.peers_unroll):
                # Adding 0.0 for missing rows has no effect: a sum that starts at 0.0 is never -0.0.
                total += tl.where(first + step == own_rank, own_sum, values[step]).to(tl.float32)
        total = tl.where(failed, float("nan"), total)
        tl.store(
            pointers_to_rows(out, token, column, SIZES),
            total.to(out.dtype.element_ty),
            mask=is_token[:, None] & is_column,
        )


def sum_home(rows, index, trip, out, *, rank, num_ctas=None):
    num_tokens = out.shape[0]
    _, packed_start, _, slot_to_row = index
    top_k, num_ranks = slot_to_row.shape[1], packed_start.numel()
    if num_ranks > 1 and _moved("sum_home", out, num_ctas, rows, index, trip, out, rank=rank):
        return
    _move(
        sum_home_kernel,
        (*rows, *index, *trip, out, num_tokens, top_k, rank),
        out,
        num_tokens,
        HOME_ACCESSES,
        num_ctas,
        num_ranks=num_ranks,
        top_k=top_k,
    )


@fast_jit([])
def pull_values_kernel(
    slot_to_rank,
    token_to_packed_row,
    bases,
    received,
    out,
    num_tokens: tl.int32,
    SIZES: tl.constexpr,
):
    slot = tl.program_id(0) * SIZES.block + tl.arange(0, SIZES.block)
    token = slot // SIZES.top_k
    is_slot = token < num_tokens
    failed = call_failed(received, SIZES)
    rank = tl.load(slot_to_rank + slot, mask=is_slot & (not failed), other=-1)
    packed = tl.load(token_to_packed_row + token * SIZES.num_ranks + rank, mask=rank >= 0, other=-1)
    has_value = packed >= 0
    base = tl.load(bases + rank, mask=has_value, other=0)
    offset = tl.load(
        received + rank * CONTROL.NUM_PUBLISHED + SIZES.column, mask=has_value, other=0
    )
    entry = packed.to(tl.int64) * SIZES.top_k + (slot - token * SIZES.top_k)
    value = tl.load(
        (base + offset).to(tl.pointer_type(tl.float32)) + entry, mask=has_value, other=0.0
    )
    tl.store(out + slot, tl.where(failed, float("nan"), value), mask=is_slot)


def pull_values(slot_to_rank, token_to_packed_row, peers, received, out, *, column):
    _move_slots(
        pull_values_kernel,
        (slot_to_rank, token_to_packed_row, peers.bases, received, out, out.shape[0]),
        out.numel(),
        top_k=out.shape[1],
        num_ranks=peers.num_ranks,
        column=column,
    )
