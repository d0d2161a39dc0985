"""Kernels that move rows: push and pull over the wire, fan-out and sums on one rank. Letters: contract/rows.py.

Rows move in tiles [tokens, columns] of 16-byte accesses, several per thread in flight. Programs loop over tiles,
so a caller may limit their number and leave SMs to a GEMM.
"""

from types import ModuleType

import torch
import triton
import triton.language as tl

from symmoe.kernels import control, hopper_choice
from symmoe.kernels.launch.integers import ceil_div, next_power_of_2
from symmoe.kernels.launch.launch import fast_launch

NUM_PUBLISHED = tl.constexpr(control.NUM_PUBLISHED)
ACCESS_BYTES = tl.constexpr(16)

# Programs of the kernels that move rows: four for each of an H200's 132 SMs hide the latency of the index loads.
NUM_CTAS = 4 * 132
ROW_WARPS = 8
CAPPED_ROW_WARPS = 16  # with few programs, each has to keep more in flight
COPY_ACCESSES = 4  # 16-byte accesses per thread and tile: a copy needs 4 registers for each
SUM_ACCESSES = 2  # a sum of 16-bit rows needs 8 more for each, and several rows are in flight
MAX_TILE_COLUMNS_BYTES = 4096
UNROLL = 8  # rows of one token whose loads may be in flight together
PEERS_UNROLL = 4  # rows of peers whose loads may be in flight together
OWN_UNROLL = 8  # the rank's own rows, in addition to those of peers
HOME_ACCESSES = 1  # in place of SUM_ACCESSES where both kinds are in flight
SLOTS_PER_PROGRAM = 1024  # slots of a program that moves slots or values
_SLOTS = {"BLOCK": SLOTS_PER_PROGRAM, "num_warps": 4}


def _launch(
    rows: torch.Tensor, num_rows: int, accesses: int, num_ctas: int | None = None
) -> tuple[tuple[int], dict[str, int]]:
    """Grid and meta-parameters of a kernel that moves num_rows such rows, `accesses` 16-byte accesses per thread and
    tile."""
    width, item_bytes = rows.shape[1], rows.element_size()
    num_warps = ROW_WARPS if num_ctas is None else CAPPED_ROW_WARPS
    row_bytes = width * item_bytes
    tile_bytes = num_warps * 32 * 16 * accesses
    columns_bytes = min(row_bytes & -row_bytes, MAX_TILE_COLUMNS_BYTES, tile_bytes)  # divides the row: no mask
    if columns_bytes < 512:  # less than a warp's access: a masked tail is cheaper
        columns_bytes = min(next_power_of_2(row_bytes), MAX_TILE_COLUMNS_BYTES // 2, tile_bytes)
    tokens, columns = tile_bytes // columns_bytes, columns_bytes // item_bytes
    num_tiles = ceil_div(num_rows, tokens) * ceil_div(width, columns)
    grid = (max(1, min(num_tiles, NUM_CTAS if num_ctas is None else num_ctas)),)
    return grid, {"WIDTH": width, "BLOCK_TOKENS": tokens, "BLOCK_COLUMNS": columns, "num_warps": num_warps}


def _movers(rows: torch.Tensor, num_ctas: int | None) -> ModuleType | None:
    """The kernels for few programs (hopper/rows.py), if num_ctas is given and they can move these rows; else None."""
    on_hopper = None if num_ctas is None else hopper_choice.hopper_kernels(rows.device, rows.dtype, rows.shape[1])
    return on_hopper if on_hopper is not None and on_hopper.takes_rows(rows) else None


@triton.jit
def tile_columns(tile, WIDTH: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Columns of a tile, and their mask [1, BLOCK_COLUMNS]."""
    column = tile % ((WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    return column[None, :], (column < WIDTH)[None, :]


@triton.jit
def tile_tokens(tile, WIDTH: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Tokens of a tile."""
    return tile // ((WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)


@triton.jit
def row_pointers(address, ELEMENT: tl.constexpr):
    """Pointers [rows, 1] from int64 addresses of rows; the hint makes Triton use 16-byte accesses."""
    return tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), [ACCESS_BYTES])[:, None]


@fast_launch
@triton.jit(
    do_not_specialize=["num_tokens", "first_rank", "end_rank", "but"],
    do_not_specialize_on_alignment=["token_to_row", "bases", "received"],
)
def push_rows_kernel(
    x,  # [T, H]
    token_to_row,  # [T, R]
    bases,
    received,
    num_tokens: tl.int32,
    first_rank: tl.int32,
    end_rank: tl.int32,
    but: tl.int32,
    ONE_RANK: tl.constexpr,
    COLUMN: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    ELEMENT: tl.constexpr = x.dtype.element_ty
    ROW_BYTES: tl.constexpr = WIDTH * ELEMENT.primitive_bitwidth // 8
    NUM_COLUMN_TILES: tl.constexpr = (WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    num_tiles = tl.cdiv(num_tokens, BLOCK_TOKENS) * NUM_COLUMN_TILES
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        token = tile_tokens(tile, WIDTH, BLOCK_TOKENS, BLOCK_COLUMNS)
        column, is_column = tile_columns(tile, WIDTH, BLOCK_COLUMNS)
        is_token = token < num_tokens
        source = x + token.to(tl.int64)[:, None] * WIDTH + column
        moves = is_token
        if ONE_RANK:  # tokens that do not go there need not be read
            moves &= tl.load(token_to_row + token * NUM_RANKS + first_rank, mask=is_token, other=-1) >= 0
        values = tl.load(source, mask=moves[:, None] & is_column)
        for rank in range(first_rank, end_rank):
            row = tl.load(token_to_row + token * NUM_RANKS + rank, mask=is_token, other=-1)
            offset = tl.load(received + rank * NUM_PUBLISHED + COLUMN)
            goes = (row >= 0) & (offset >= 0) & (rank != but)
            address = tl.load(bases + rank) + offset + row.to(tl.int64) * ROW_BYTES
            tl.store(row_pointers(address, ELEMENT) + column, values, mask=goes[:, None] & is_column)


def push_rows(x, token_to_row, peers, received, *, column, ranks=None, but=None, num_ctas=None):
    num_tokens = x.shape[0]
    ranks = range(peers.num_ranks) if ranks is None else ranks
    if num_tokens == 0 or (len(ranks) == 1 and ranks.start == but):
        return
    if len(ranks) == 1 and (on_hopper := _movers(x, num_ctas)) is not None:
        on_hopper.launch_push(x, token_to_row, peers, received, column=column, rank=ranks.start, num_ctas=num_ctas)
        return
    grid, meta = _launch(x, num_tokens, COPY_ACCESSES, num_ctas)
    args = x, token_to_row, peers.bases, received, num_tokens, ranks.start, ranks.stop, -1 if but is None else but
    push_rows_kernel[grid](
        *args, ONE_RANK=len(ranks) == 1 < peers.num_ranks, COLUMN=column, NUM_RANKS=peers.num_ranks, **meta
    )


@fast_launch
@triton.jit(
    do_not_specialize=["num_tokens", "num_blocks"],
    do_not_specialize_on_alignment=[
        "slot_to_row",
        "slot_to_rank",
        "probs",
        "token_to_packed_row",
        "block_tokens",
        "packed_start",
        "packed_limit",
        "bases",
        "received",
    ],
)
def push_slots_kernel(
    slot_to_row,  # [T, K]
    slot_to_rank,  # [T, K]
    probs,  # [T, K] or None
    token_to_packed_row,  # [T, R]
    block_tokens,  # [B, R]
    packed_start,
    packed_limit,
    bases,
    received,
    num_tokens: tl.int32,
    num_blocks: tl.int32,
    ROW_COLUMN: tl.constexpr,
    PROB_COLUMN: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if program >= NUM_RANKS:  # slots of tokens
        slot = (program - NUM_RANKS) * BLOCK + lane
        token = slot // TOP_K
        k = slot - token * TOP_K
        is_slot = token < num_tokens
        row = tl.load(slot_to_row + slot, mask=is_slot, other=-1)
        slot_rank = tl.load(slot_to_rank + slot, mask=is_slot, other=-1)
        if probs is not None:
            prob = tl.load(probs + slot, mask=is_slot, other=0.0)
        for rank in range(NUM_RANKS):
            offset = tl.load(received + rank * NUM_PUBLISHED + ROW_COLUMN)
            packed = tl.load(token_to_packed_row + token * NUM_RANKS + rank, mask=is_slot, other=-1)
            goes = (packed >= 0) & (offset >= 0)
            here = slot_rank == rank
            base = tl.load(bases + rank)
            entry = packed.to(tl.int64) * TOP_K + k
            tl.store((base + offset).to(tl.pointer_type(tl.int32)) + entry, tl.where(here, row, -1), mask=goes)
            if probs is not None:
                prob_offset = tl.load(received + rank * NUM_PUBLISHED + PROB_COLUMN)
                values = (base + prob_offset).to(tl.pointer_type(tl.float32))
                tl.store(values + entry, tl.where(here, prob, 0.0), mask=goes)
    else:  # the rest of this rank's region on rank `program`
        offset = tl.load(received + program * NUM_PUBLISHED + ROW_COLUMN)
        used = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, num_blocks, BLOCK):
            block = first + lane
            used += tl.load(block_tokens + block * NUM_RANKS + program, mask=block < num_blocks, other=0)
        start = tl.load(packed_start + program)
        first_unused = (start + tl.sum(used, axis=0)) * TOP_K
        end = (start + tl.load(packed_limit + program)) * TOP_K
        rows = (tl.load(bases + program) + offset).to(tl.pointer_type(tl.int32))
        for first in range(first_unused, end, BLOCK):
            entry = first + lane
            tl.store(rows + entry, tl.full((BLOCK,), -1, tl.int32), mask=(entry < end) & (offset >= 0))


def push_slots(
    slot_to_row,
    slot_to_rank,
    probs,
    token_to_packed_row,
    block_tokens,
    packed_start,
    packed_limit,
    peers,
    received,
    *,
    row_column,
    prob_column,
):
    num_tokens, top_k = slot_to_row.shape
    args = (
        slot_to_row,
        slot_to_rank,
        probs,
        token_to_packed_row,
        block_tokens,
        packed_start,
        packed_limit,
        peers.bases,
        received,
        num_tokens,
        block_tokens.shape[0],
    )
    push_slots_kernel[(peers.num_ranks + ceil_div(num_tokens * top_k, SLOTS_PER_PROGRAM),)](
        *args, ROW_COLUMN=row_column, PROB_COLUMN=prob_column, TOP_K=top_k, NUM_RANKS=peers.num_ranks, **_SLOTS
    )


@fast_launch
@triton.jit(
    do_not_specialize=["num_slots", "num_rows"],
    do_not_specialize_on_alignment=[
        "wire_to_row",
        "wire_probs",
        "packed_begin",
        "packed_end",
        "ready",
        "arrived",
        "packed_to_row",
        "row_to_packed_row",
        "row_probs",
    ],
)
def index_rows_kernel(
    wire_to_row,  # [P_cap, K]
    wire_probs,  # [P_cap, K] or None
    packed_begin,
    packed_end,
    ready,
    arrived,
    packed_to_row,  # [P_cap, K]
    row_to_packed_row,  # [N_cap]
    row_probs,  # [N_cap] or None
    num_slots: tl.int32,  # P_cap * K
    num_rows: tl.int32,  # N_cap
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.minimum(tl.load(ready), tl.load(arrived)) < 0:
        none = tl.full((BLOCK,), -1, tl.int32)
        tl.store(packed_to_row + entry, none, mask=entry < num_slots)
        tl.store(row_to_packed_row + entry, none + 1, mask=entry < num_rows)
        if row_probs is not None:
            tl.store(row_probs + entry, tl.full((BLOCK,), float("nan"), tl.float32), mask=entry < num_rows)
    else:
        entry += tl.load(packed_begin) * TOP_K
        packed = entry // TOP_K
        used = packed < tl.load(packed_end)
        row = tl.load(wire_to_row + entry, mask=used, other=-1)
        tl.store(packed_to_row + entry, row, mask=used)
        tl.store(row_to_packed_row + row, packed, mask=row >= 0)
        if row_probs is not None:
            prob = tl.load(wire_probs + entry, mask=row >= 0, other=0.0)
            tl.store(row_probs + row, prob, mask=row >= 0)


def index_rows(
    wire_to_row, wire_probs, packed_begin, packed_end, ready, arrived, packed_to_row, row_to_packed_row, row_probs
):
    num_slots, num_rows = packed_to_row.numel(), row_to_packed_row.numel()
    if max(num_slots, num_rows) == 0:
        return
    args = (
        wire_to_row,
        wire_probs,
        packed_begin,
        packed_end,
        ready,
        arrived,
        packed_to_row,
        row_to_packed_row,
        row_probs if wire_probs is not None else None,
        num_slots,
        num_rows,
    )
    index_rows_kernel[(ceil_div(max(num_slots, num_rows), SLOTS_PER_PROGRAM),)](
        *args, TOP_K=packed_to_row.shape[1], **_SLOTS
    )


@triton.jit
def primary_row(packed_to_row, packed, is_packed, TOP_K: tl.constexpr, UNROLL: tl.constexpr):
    """Per packed row: the token's first row (-1 for none), and how many rows it has."""
    primary = tl.full(packed.shape, -1, tl.int32)
    num_rows = tl.full(packed.shape, 0, tl.int32)
    for first in range(0, TOP_K, UNROLL):
        for step in tl.static_range(UNROLL):
            k = first + step
            row = tl.load(packed_to_row + packed * TOP_K + k, mask=is_packed & (k < TOP_K), other=-1)
            primary = tl.where((row >= 0) & (primary < 0), row, primary)
            num_rows += (row >= 0).to(tl.int32)
    return primary, num_rows


@fast_launch
@triton.jit(
    do_not_specialize=["num_tokens", "rank"],
    do_not_specialize_on_alignment=["slot_to_rank", "slot_to_row", "received"],
)
def place_rows_kernel(
    x,  # [T, H]
    slot_to_rank,  # [T, K]
    slot_to_row,  # [T, K]
    rows,  # [N_cap, H]
    received,
    num_tokens: tl.int32,
    rank: tl.int32,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    NUM_COLUMN_TILES: tl.constexpr = (WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    num = tl.where(tl.load(received + rank * NUM_PUBLISHED) < 0, 0, num_tokens)
    for tile in range(tl.program_id(0), tl.cdiv(num, BLOCK_TOKENS) * NUM_COLUMN_TILES, tl.num_programs(0)):
        token = tile_tokens(tile, WIDTH, BLOCK_TOKENS, BLOCK_COLUMNS)
        column, is_column = tile_columns(tile, WIDTH, BLOCK_COLUMNS)
        is_token = token < num
        values = tl.load(x + token.to(tl.int64)[:, None] * WIDTH + column, mask=is_token[:, None] & is_column)
        for k in range(TOP_K):
            is_own = tl.load(slot_to_rank + token * TOP_K + k, mask=is_token, other=-1) == rank
            row = tl.load(slot_to_row + token * TOP_K + k, mask=is_own, other=-1)
            target = rows + row.to(tl.int64)[:, None] * WIDTH + column
            tl.store(target, values, mask=(row >= 0)[:, None] & is_column)


def place_rows(x, slot_to_rank, slot_to_row, rows, received, *, rank):
    num_tokens = x.shape[0]
    if num_tokens == 0 or rows.numel() == 0:
        return
    grid, meta = _launch(x, num_tokens, COPY_ACCESSES)
    top_k = slot_to_row.shape[1]
    place_rows_kernel[grid](x, slot_to_rank, slot_to_row, rows, received, num_tokens, rank, TOP_K=top_k, **meta)


@fast_launch
@triton.jit(
    do_not_specialize=["rank", "source"],
    do_not_specialize_on_alignment=["packed_to_row", "source_to_packed_start"],
)
def fan_out_kernel(
    rows,  # [N_cap, H]
    packed_to_row,  # [P_cap, K]
    source_to_packed_start,  # [R + 1]
    rank: tl.int32,
    source: tl.int32,  # -1: all but `rank`
    NUM_RANKS: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    NUM_COLUMN_TILES: tl.constexpr = (WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    own_begin = tl.load(source_to_packed_start + rank)
    own_end = tl.load(source_to_packed_start + rank + 1)
    begin = tl.load(source_to_packed_start + tl.maximum(source, 0))
    end = tl.load(source_to_packed_start + tl.where(source < 0, NUM_RANKS, source + 1))
    num_skipped = tl.where(source < 0, own_end - own_begin, 0)
    num = end - begin - num_skipped
    for tile in range(tl.program_id(0), tl.cdiv(num, BLOCK_TOKENS) * NUM_COLUMN_TILES, tl.num_programs(0)):
        index = tile_tokens(tile, WIDTH, BLOCK_TOKENS, BLOCK_COLUMNS)
        packed = begin + index
        packed = tl.where(packed < own_begin, packed, packed + num_skipped)
        column, is_column = tile_columns(tile, WIDTH, BLOCK_COLUMNS)
        primary, num_rows = primary_row(packed_to_row, packed, index < num, TOP_K, UNROLL)
        several = num_rows > 1
        source_row = rows + primary.to(tl.int64)[:, None] * WIDTH + column
        values = tl.load(source_row, mask=several[:, None] & is_column)
        for k in range(TOP_K):
            row = tl.load(packed_to_row + packed * TOP_K + k, mask=several, other=-1)
            target = rows + row.to(tl.int64)[:, None] * WIDTH + column
            tl.store(target, values, mask=((row >= 0) & (row != primary))[:, None] & is_column)


def fan_out(rows, packed_to_row, source_to_packed_start, *, rank, source=None, num_ctas=None):
    (num_packed_cap, top_k), num_ranks = packed_to_row.shape, source_to_packed_start.numel() - 1
    # One slot per token: no secondary rows.
    if rows.numel() == 0 or num_packed_cap == 0 or top_k == 1 or num_ranks == 1 or source == rank:
        return
    if source is not None and (on_hopper := _movers(rows, num_ctas)) is not None:
        tables = (packed_to_row, source_to_packed_start)
        on_hopper.launch_fan_out(rows, *tables, source=source, num_ctas=num_ctas)
        return
    grid, meta = _launch(rows, num_packed_cap, COPY_ACCESSES, num_ctas)
    args = rows, packed_to_row, source_to_packed_start, rank, -1 if source is None else source
    fan_out_kernel[grid](*args, NUM_RANKS=num_ranks, TOP_K=top_k, UNROLL=min(UNROLL, next_power_of_2(top_k)), **meta)


@fast_launch
@triton.jit(
    do_not_specialize=["rank", "first_step", "end_step"],
    do_not_specialize_on_alignment=["packed_to_row", "source_to_packed_start", "bases", "received"],
)
def push_sums_kernel(
    rows,  # [N_cap, H]
    packed_to_row,  # [P_cap, K]
    source_to_packed_start,  # [R + 1]
    bases,
    received,
    rank: tl.int32,
    first_step: tl.int32,
    end_step: tl.int32,
    COLUMN: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    ELEMENT: tl.constexpr = rows.dtype.element_ty
    ROW_BYTES: tl.constexpr = WIDTH * ELEMENT.primitive_bitwidth // 8
    NUM_COLUMN_TILES: tl.constexpr = (WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    for step in range(first_step, end_step):  # every rank begins with another one
        home = (rank + step) % NUM_RANKS
        begin = tl.load(source_to_packed_start + home)
        offset = tl.load(received + home * NUM_PUBLISHED + COLUMN)
        num = tl.where(offset < 0, 0, tl.load(source_to_packed_start + home + 1) - begin)
        region_bytes = tl.load(received + home * NUM_PUBLISHED + COLUMN + 1) - offset + ROW_BYTES
        region = tl.load(bases + home) + offset + (rank - (rank > home).to(tl.int32)) * region_bytes
        for tile in range(tl.program_id(0), tl.cdiv(num, BLOCK_TOKENS) * NUM_COLUMN_TILES, tl.num_programs(0)):
            index = tile_tokens(tile, WIDTH, BLOCK_TOKENS, BLOCK_COLUMNS)
            column, is_column = tile_columns(tile, WIDTH, BLOCK_COLUMNS)
            primary, num_rows = primary_row(packed_to_row, begin + index, index < num, TOP_K, UNROLL)
            mask = (num_rows > 0)[:, None] & is_column
            total = tl.load(rows + primary.to(tl.int64)[:, None] * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
            for first in range(0, TOP_K, UNROLL):
                masks, values = (), ()
                for more in tl.static_range(UNROLL):
                    k = first + more
                    is_slot = (num_rows > 1) & (k < TOP_K)
                    row = tl.load(packed_to_row + (begin + index) * TOP_K + k, mask=is_slot, other=-1)
                    source = rows + row.to(tl.int64)[:, None] * WIDTH + column
                    masks += (((row >= 0) & (row != primary))[:, None] & is_column,)
                    values += (tl.load(source, mask=masks[more], other=0.0),)
                for more in tl.static_range(UNROLL):
                    # A missing row is not added as 0.0: that would turn -0.0 into 0.0.
                    total = tl.where(masks[more], total + values[more].to(tl.float32), total)
            target = row_pointers(region + index.to(tl.int64) * ROW_BYTES, ELEMENT) + column
            tl.store(target, total.to(ELEMENT), mask=mask)


def push_sums(rows, packed_to_row, source_to_packed_start, peers, received, *, column, source=None, num_ctas=None):
    num_packed_cap, top_k = packed_to_row.shape
    num_ranks, rank = peers.num_ranks, peers.rank
    if rows.numel() == 0 or num_packed_cap == 0 or num_ranks == 1 or source == rank:
        return
    if source is not None and (on_hopper := _movers(rows, num_ctas)) is not None:
        tables = (packed_to_row, source_to_packed_start)
        on_hopper.launch_push_sums(rows, *tables, peers, received, column=column, home=source, num_ctas=num_ctas)
        return
    steps = (1, num_ranks) if source is None else ((source - rank) % num_ranks, (source - rank) % num_ranks + 1)
    grid, meta = _launch(rows, num_packed_cap, SUM_ACCESSES, num_ctas)
    args = rows, packed_to_row, source_to_packed_start, peers.bases, received, rank, *steps
    push_sums_kernel[grid](
        *args, COLUMN=column, NUM_RANKS=num_ranks, TOP_K=top_k, UNROLL=min(UNROLL, next_power_of_2(top_k)), **meta
    )


@fast_launch
@triton.jit(do_not_specialize_on_alignment=["row_values", "packed_to_row", "num_packed", "packed_values"])
def gather_values_kernel(
    row_values,  # [N_cap]
    packed_to_row,  # [P_cap, K]
    num_packed,
    packed_values,  # [P_cap, K]
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = entry // TOP_K < tl.load(num_packed)
    row = tl.load(packed_to_row + entry, mask=used, other=-1)
    value = tl.load(row_values + row, mask=row >= 0, other=0.0)
    tl.store(packed_values + entry, value, mask=used)


def gather_values(row_values, packed_to_row, num_packed, packed_values):
    if packed_to_row.numel() == 0:
        return
    args = row_values, packed_to_row, num_packed, packed_values
    gather_values_kernel[(ceil_div(packed_to_row.numel(), SLOTS_PER_PROGRAM),)](
        *args, TOP_K=packed_to_row.shape[1], **_SLOTS
    )


@triton.jit
def call_failed(received, COLUMN: tl.constexpr, NUM_RANKS: tl.constexpr, RANK_LANES: tl.constexpr):
    """Whether the offsets from the barrier say that nothing may be moved."""
    rank = tl.arange(0, RANK_LANES)
    offset = tl.load(received + rank * NUM_PUBLISHED + COLUMN, mask=rank < NUM_RANKS, other=0)
    return tl.min(offset, axis=0) < 0


@fast_launch
@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["source_rank", "source_row", "bases", "received"],
)
def pull_rows_kernel(
    source_rank,  # [T, S]
    source_row,  # [T, S]
    bases,
    received,
    out,  # [T, H]
    num_tokens: tl.int32,
    COLUMN: tl.constexpr,
    NUM_SOURCES: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_LANES: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    ELEMENT: tl.constexpr = out.dtype.element_ty
    ROW_BYTES: tl.constexpr = WIDTH * ELEMENT.primitive_bitwidth // 8
    NUM_COLUMN_TILES: tl.constexpr = (WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    failed = call_failed(received, COLUMN, NUM_RANKS, RANK_LANES)
    num_tiles = tl.cdiv(num_tokens, BLOCK_TOKENS) * NUM_COLUMN_TILES
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        token = tile_tokens(tile, WIDTH, BLOCK_TOKENS, BLOCK_COLUMNS)
        column, is_column = tile_columns(tile, WIDTH, BLOCK_COLUMNS)
        is_token = token < num_tokens
        total = tl.zeros((BLOCK_TOKENS, BLOCK_COLUMNS), tl.float32)
        for first in range(0, NUM_SOURCES, UNROLL):
            # Each step is done for all sources, so that their loads are in flight together.
            rows, places, values = (), (), ()
            for step in tl.static_range(UNROLL):
                s = first + step
                mask = is_token & (s < NUM_SOURCES) & (not failed)
                rows += (tl.load(source_row + token * NUM_SOURCES + s, mask=mask, other=-1),)
            for step in tl.static_range(UNROLL):
                s = first + step
                rank = tl.load(source_rank + token * NUM_SOURCES + s, mask=rows[step] >= 0, other=-1)
                base = tl.load(bases + rank, mask=rank >= 0, other=0)
                places += (base + tl.load(received + rank * NUM_PUBLISHED + COLUMN, mask=rank >= 0, other=0),)
            for step in tl.static_range(UNROLL):
                has = (rows[step] >= 0) & (places[step] != 0)
                source = row_pointers(places[step] + rows[step].to(tl.int64) * ROW_BYTES, ELEMENT) + column
                values += (tl.load(source, mask=has[:, None] & is_column, other=0.0),)
            for step in tl.static_range(UNROLL):
                # Adding 0.0 for what is missing changes nothing: a sum that starts at 0.0 is never -0.0.
                total += values[step].to(tl.float32)
        total = tl.where(failed, float("nan"), total)
        target = out + token.to(tl.int64)[:, None] * WIDTH + column
        tl.store(target, total.to(ELEMENT), mask=is_token[:, None] & is_column)


def pull_rows(source_rank, source_row, peers, received, out, *, column):
    num_tokens = out.shape[0]
    if num_tokens == 0:
        return
    num_sources = source_row.shape[1]
    grid, meta = _launch(out, num_tokens, SUM_ACCESSES)
    args = source_rank, source_row, peers.bases, received, out, num_tokens
    pull_rows_kernel[grid](
        *args,
        COLUMN=column,
        NUM_SOURCES=num_sources,
        NUM_RANKS=peers.num_ranks,
        RANK_LANES=next_power_of_2(peers.num_ranks),
        UNROLL=min(UNROLL, next_power_of_2(num_sources)),
        **meta,
    )


@triton.jit
def sum_own_rows(
    slot_to_rank,  # [T, K]
    slot_to_row,  # [T, K]
    token,
    is_token,
    top_k,
    rank,
    rows,  # [N_cap, H], of rank `rank`, which is this rank
    column,
    is_column,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Sums of the tokens' rows on rank `rank`: fp32, in k order, rounded, as peers' sums are."""
    total = tl.zeros((BLOCK_TOKENS, BLOCK_COLUMNS), tl.float32)
    # `top_k` is no constant so that this stays a loop: ptxas would delay the loads of returned rows in straight code.
    for first in range(0, top_k, UNROLL):
        places, values = (), ()
        for step in tl.static_range(UNROLL):
            slot = token * top_k + first + step
            mask = is_token & (first + step < top_k)
            is_own = tl.load(slot_to_rank + slot, mask=mask, other=-1) == rank
            places += (tl.where(is_own, tl.load(slot_to_row + slot, mask=mask, other=-1), -1),)
        for step in tl.static_range(UNROLL):
            has = places[step] >= 0
            source = rows + places[step].to(tl.int64)[:, None] * WIDTH + column
            values += (tl.load(source, mask=has[:, None] & is_column, other=0.0),)
        for step in tl.static_range(UNROLL):
            # Where all rows are -0.0, a peer's sum is -0.0 and this is 0.0. The sum over ranks is the same.
            total += values[step].to(tl.float32)
    return total.to(rows.dtype.element_ty)


@fast_launch
@triton.jit(
    do_not_specialize=["num_tokens", "top_k", "own_rank"],
    do_not_specialize_on_alignment=[
        "token_to_packed_row",
        "packed_start",
        "slot_to_rank",
        "slot_to_row",
        "ready",
        "arrived",
    ],
)
def sum_home_kernel(
    rows,  # [N_cap, H]
    returned,  # [(R - 1) * T, H]
    token_to_packed_row,  # [T, R]
    packed_start,  # [R]
    slot_to_rank,  # [T, K]
    slot_to_row,  # [T, K]
    ready,
    arrived,
    out,  # [T, H]
    num_tokens: tl.int32,
    top_k: tl.int32,
    own_rank: tl.int32,
    NUM_RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    RANK_UNROLL: tl.constexpr,
    SLOT_UNROLL: tl.constexpr,
):
    ELEMENT: tl.constexpr = out.dtype.element_ty
    NUM_COLUMN_TILES: tl.constexpr = (WIDTH + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    failed = tl.minimum(tl.load(ready), tl.load(arrived)) < 0
    num_tiles = tl.cdiv(num_tokens, BLOCK_TOKENS) * NUM_COLUMN_TILES
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        token = tile_tokens(tile, WIDTH, BLOCK_TOKENS, BLOCK_COLUMNS)
        column, is_column = tile_columns(tile, WIDTH, BLOCK_COLUMNS)
        is_token = token < num_tokens
        total = tl.zeros((BLOCK_TOKENS, BLOCK_COLUMNS), tl.float32)
        own = tl.zeros((BLOCK_TOKENS, BLOCK_COLUMNS), ELEMENT)
        for first in range(0, NUM_RANKS, RANK_UNROLL):
            packed, values = (), ()
            for step in tl.static_range(RANK_UNROLL):
                rank = first + step
                mask = is_token & (rank < NUM_RANKS) & (rank != own_rank) & (not failed)
                packed += (tl.load(token_to_packed_row + token * NUM_RANKS + rank, mask=mask, other=-1),)
            for step in tl.static_range(RANK_UNROLL):
                rank = first + step
                region = rank - (own_rank < rank).to(tl.int32)
                start = tl.load(packed_start + rank, mask=rank < NUM_RANKS, other=0)
                row = region * num_tokens + packed[step] - start
                has = is_token & (packed[step] >= 0)
                source = returned + row.to(tl.int64)[:, None] * WIDTH + column
                values += (tl.load(source, mask=has[:, None] & is_column, other=0.0),)
            if first == 0:  # while those rows are on their way
                own = sum_own_rows(
                    slot_to_rank,
                    slot_to_row,
                    token,
                    is_token & (not failed),
                    top_k,
                    own_rank,
                    rows,
                    column,
                    is_column,
                    WIDTH,
                    BLOCK_TOKENS,
                    BLOCK_COLUMNS,
                    SLOT_UNROLL,
                )
            for step in tl.static_range(RANK_UNROLL):
                # Adding 0.0 for what is missing changes nothing: a sum that starts at 0.0 is never -0.0.
                total += tl.where(first + step == own_rank, own, values[step]).to(tl.float32)
        total = tl.where(failed, float("nan"), total)
        target = out + token.to(tl.int64)[:, None] * WIDTH + column
        tl.store(target, total.to(ELEMENT), mask=is_token[:, None] & is_column)


def sum_home(
    rows,
    returned,
    token_to_packed_row,
    packed_start,
    slot_to_rank,
    slot_to_row,
    ready,
    arrived,
    out,
    *,
    rank,
    num_ctas=None,
):
    num_tokens = out.shape[0]
    if num_tokens == 0:
        return
    top_k, num_ranks = slot_to_row.shape[1], packed_start.numel()
    tables = (token_to_packed_row, packed_start, slot_to_rank, slot_to_row, ready, arrived)
    if num_ranks > 1 and (on_hopper := _movers(out, num_ctas)) is not None:
        on_hopper.launch_sum_home(rows, returned, *tables, out, rank=rank, num_ctas=num_ctas)
        return
    grid, meta = _launch(out, num_tokens, HOME_ACCESSES, num_ctas)
    args = rows, returned, *tables, out, num_tokens, top_k, rank
    sum_home_kernel[grid](
        *args,
        NUM_RANKS=num_ranks,
        RANK_UNROLL=min(PEERS_UNROLL, next_power_of_2(num_ranks)),
        SLOT_UNROLL=min(OWN_UNROLL, next_power_of_2(top_k)),
        **meta,
    )


@fast_launch
@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["slot_to_rank", "token_to_packed_row", "bases", "received", "out"],
)
def pull_values_kernel(
    slot_to_rank,  # [T, K]
    token_to_packed_row,  # [T, R]
    bases,
    received,
    out,  # [T, K]
    num_tokens: tl.int32,
    COLUMN: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = slot // TOP_K
    is_slot = token < num_tokens
    failed = call_failed(received, COLUMN, NUM_RANKS, RANK_LANES)
    rank = tl.load(slot_to_rank + slot, mask=is_slot & (not failed), other=-1)
    packed = tl.load(token_to_packed_row + token * NUM_RANKS + rank, mask=rank >= 0, other=-1)
    has = packed >= 0
    base = tl.load(bases + rank, mask=has, other=0)
    offset = tl.load(received + rank * NUM_PUBLISHED + COLUMN, mask=has, other=0)
    entry = packed.to(tl.int64) * TOP_K + (slot - token * TOP_K)
    value = tl.load((base + offset).to(tl.pointer_type(tl.float32)) + entry, mask=has, other=0.0)
    tl.store(out + slot, tl.where(failed, float("nan"), value), mask=is_slot)


def pull_values(slot_to_rank, token_to_packed_row, peers, received, out, *, column):
    num_tokens, top_k = out.shape
    if num_tokens == 0:
        return
    args = slot_to_rank, token_to_packed_row, peers.bases, received, out, num_tokens
    pull_values_kernel[(ceil_div(num_tokens * top_k, SLOTS_PER_PROGRAM),)](
        *args,
        COLUMN=column,
        TOP_K=top_k,
        NUM_RANKS=peers.num_ranks,
        RANK_LANES=next_power_of_2(peers.num_ranks),
        **_SLOTS,
    )
