"""The plan: maps from every slot of a rank's `topk_idx` to its place.

There are B blocks of TOKENS_PER_BLOCK tokens. A rank receives packed rows, one for each token that it needs. The
primary row of a token on a rank is the row of its smallest k there; its other rows are secondary rows.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import torch

from symmoe.kernels import control
from symmoe.kernels.gemm_parts import PART_ROWS
from symmoe.kernels.operands import writes
from symmoe.kernels.twin.sync import record

_NO_SLOT = _NO_LIMIT = 2**31 - 1
_OVERFLOWS = control.PLAN_OVERFLOW, control.PLAN_RAIL_OVERFLOW


class PlanKernels:
    @staticmethod
    @writes("row_range")
    def splits_to_row_range(splits: torch.Tensor, row_range: torch.Tensor, num_rows: int) -> None:
        """row_range of whole groups, int32[2, G], from the groups' row counts: splits int32 or int64 [G].

        Negative splits count as 0 and sums are limited to num_rows: kernels stay inside their tensors for any splits.
        """
        sizes = splits.long().clamp(0, num_rows)
        ends = sizes.cumsum(0)
        row_range[0] = (ends - sizes).clamp(max=num_rows)
        row_range[1] = ends.clamp(max=num_rows)

    @staticmethod
    @writes("block_counts")
    def count_slots(
        topk_idx: torch.Tensor, block_counts: torch.Tensor, *, num_experts: int, num_ranks: int
    ) -> None:
        """Counts slots per expert and tokens per destination rank in each block of tokens.

        Args:
            topk_idx: int32 or int64 [T, K], expert ids; -1 is "no expert".
            block_counts: int32 [B, E + R + 2]; columns: slots of each expert, tokens for each rank, the number of ids
                out of range, and the first slot t * K + k with such an id (2**31 - 1 if none). Slots with such ids are
                not counted.
        """
        ids = topk_idx.long()
        valid = (ids >= 0) & (ids < num_experts)
        bad = (ids < -1) | (ids >= num_experts)
        slots = torch.zeros((ids.shape[0], num_experts), dtype=torch.int32, device=ids.device)
        slots.scatter_add_(1, ids.where(valid, 0), valid.int())
        ranks = torch.where(valid, ids // (num_experts // num_ranks), -1)
        columns = slots, _on_ranks(ranks, num_ranks).any(1), bad.sum(1, keepdim=True)
        block_counts[:, :-1] = _by_block(torch.cat(columns, 1)).sum(1)
        slot = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        block_counts[:, -1] = _by_block(slot.where(bad, _NO_SLOT), fill=_NO_SLOT).amin((1, 2))

    @staticmethod
    @writes("block_counts", "peers")
    def send_counts(
        block_counts: torch.Tensor,
        topk_idx: torch.Tensor,
        header: tuple[int, ...],
        peers: control.Peers,
        *,
        num_experts: int,
    ) -> None:
        """Writes this rank's row (header, slots per expert, tokens per rank) to every rank's count table.

        It writes to the half of the table for the next barrier.

        Args:
            block_counts: count_slots' result; its columns of experts and ranks get the sums over earlier blocks.
            topk_idx: as in count_slots.
            header: HEADER_WORDS integers; this function fills the HEAD_BAD_* words.
        """
        counts = block_counts[:, :-2]
        totals = counts.sum(0, dtype=torch.int32)
        counts.copy_(counts.cumsum(0) - counts)
        head = list(header)
        if block_counts.shape[0]:
            head[control.HEAD_BAD_SLOTS] = int(block_counts[:, -2].sum())
            head[control.HEAD_BAD_SLOT] = int(block_counts[:, -1].min())
            if head[control.HEAD_BAD_SLOTS]:
                id_32_bits = int(topk_idx.flatten()[head[control.HEAD_BAD_SLOT]])
                head[control.HEAD_BAD_ID] = max(-(2**31), min(2**31 - 1, id_32_bits))
        row = torch.cat([torch.tensor(head, dtype=torch.int32, device=totals.device), totals])
        epoch = peers.epoch + 1
        for rank in range(peers.num_ranks):
            peers.count_table(rank, epoch)[peers.rank, : row.numel()] = row

    @staticmethod
    @writes("status", "plan")
    def lay_out(
        peers: control.Peers,
        received: torch.Tensor,
        status: torch.Tensor,
        plan: control.PlanIntegers,
        *,
        capacity: int,
        overflow: int,
        ranks: Sequence[int],
    ) -> None:
        """Lays out every rank's rows from the count table; all ranks compute the same layout.

        After an error, which the report contains, all counts are zero.

        Each local expert's rows are cut into parts that can be computed as rows arrive: first from this rank, then from
        the previous rank and so on; the last of `ranks` follows the first. Then rows arrive from all earlier ranks
        together, as the part of rank 0, and from all later ranks, as the part of the last rank. A part needs only rows
        that have arrived by then. Parts begin at multiples of PART_ROWS, counted from the expert's first row, or at its
        end; together they cover all rows.

        Args:
            received: the result of the plan's barrier; negative words mean that a rank faulted.
            status: int64[STATUS_WORDS], pinned host memory on GPUs; gets a record of an error if no host waits: kernels
                that are launched before the host reads it must not move rows.
            plan: gets the places of rows, the report and, without replica places, expert_load.
            capacity: rows that this rank can receive; -1: its host waits for the report before it launches more.
            overflow: one of control.OVERFLOW_*. OVERFLOW_DROP: clips to `capacity`, equal on all ranks, instead of
                reporting an overflow. OVERFLOW_REPEAT: reports an overflow as PLAN_OVER_BUDGET and does not record it.
            ranks: consecutive ranks: this node's, or the whole group's.
        """
        num_ranks, rank, num_experts = peers.num_ranks, peers.rank, plan.slot_start.numel()
        widths = control.HEADER_WORDS, num_experts, num_ranks
        # [R, HEADER_WORDS], [R, E], [source, destination]
        table = peers.count_table(rank, peers.epoch)[:, : sum(widths)].long()
        headers, counts, tokens = table.split(widths, 1)

        load = counts.sum(0).view(num_ranks, -1)  # [R, e]
        capacities = headers[:, [control.HEAD_CAPACITY, control.HEAD_PACKED_CAPACITY]]
        limits = capacities.where(capacities >= 0, _NO_LIMIT).amin(0)
        drop = overflow == control.OVERFLOW_DROP
        sizes = [] if drop else zip((load.sum(1), tokens.sum(0)), limits.tolist(), strict=True)
        error = _find_error(headers, sizes, received, drop)
        if overflow == control.OVERFLOW_REPEAT and error[0] in _OVERFLOWS:
            error = control.PLAN_OVER_BUDGET, *error[1:]
        kept = torch.stack([_clip(row, capacity) for row in load]) if drop else load
        failed = error[0] != control.PLAN_OK
        if failed:
            kept = torch.zeros_like(kept)
        before = counts.cumsum(0) - counts  # slots of the expert on earlier sources
        kept_by_source = (kept.flatten() - before).clamp(min=0).minimum(counts)  # [R, E]
        regions = (
            kept_by_source.view(num_ranks, num_ranks, -1).sum(2).minimum(tokens)
        )  # [source, destination]
        region_starts = regions.cumsum(0) - regions

        starts = kept.cumsum(1) - kept
        plan.splits.copy_(kept[rank])
        num_own = plan.row_range.shape[1]
        ranges = torch.stack([starts[rank], starts[rank] + kept[rank]])
        plan.row_range.copy_(ranges[:, :num_own])
        plan.slot_start.copy_(starts.flatten() + before[rank].minimum(kept.flatten()))
        plan.slot_limit.copy_(kept_by_source[rank])
        plan.packed_start.copy_(region_starts[rank])
        plan.packed_limit.copy_(regions[rank])
        plan.source_to_packed_start[:-1] = region_starts[:, rank]
        plan.source_to_packed_start[-1] = regions[:, rank].sum()
        plan.source_to_row_start[:-1] = starts[rank] + before.view(num_ranks, num_ranks, -1)[
            :, rank
        ].minimum(kept[rank])
        plan.source_to_row_start[-1] = starts[rank] + kept[rank]
        parts = torch.empty(
            (num_ranks, 2, plan.splits.numel()), dtype=torch.int32, device=kept.device
        )
        split_rows(plan.source_to_row_start, parts, rank, ranks)
        known = sorted(
            {0, *ranks, num_ranks - 1}
        )  # the node's, and all earlier and all later ranks'
        plan.source_to_rows[known] = parts[known, :, :num_own]
        (begin, end), (first, last) = parts[rank, :, num_own:], ranges[:, num_own:]
        plan.replica_ranges.copy_(
            torch.stack([first, last, first, begin, begin, end, end, last]).view(4, 2, -1)
        )
        if not plan.replica_to_expert.numel():
            plan.expert_load.copy_(load.flatten())

        report = plan.report.zero_()
        report[control.SUM_ERROR : control.SUM_WHERE + 1] = report.new_tensor(error)
        report[control.SUM_NUM_ROWS] = kept[rank].sum()
        report[control.SUM_MAX_ROWS] = kept.sum(1).max()
        report[control.SUM_NUM_PACKED] = regions[:, rank].sum()
        report[control.SUM_MAX_PACKED] = regions.sum(0).max()
        report[control.SUM_NUM_DROPPED] = 0 if failed else (load - kept).sum()
        if (
            capacity >= 0
            and failed
            and error[0] not in (control.PLAN_FAULT, control.PLAN_OVER_BUDGET)
        ):
            peers.counters(rank)[control.FAULTED] = (
                1  # on every rank: no trip of this plan moves rows
            )
            record(status, control.STATUS_PLAN, control.PHASE_PLAN, *error[1:4], error[0], error[4])

    @staticmethod
    @writes("posted")
    def post_report(report: torch.Tensor, posted: torch.Tensor, *, plan: int) -> None:
        """Writes the report of the plan with this generation to its row of `posted`, which the host reads: see
        control.REPORT_SLOTS; pinned host memory on GPUs.

        Args:
            report: int32[SUMMARY_WORDS].
        """
        tag = plan % 2**control.GENERATION_BITS << 32
        posted[plan % control.REPORT_SLOTS] = (report.long() & 0xFFFFFFFF) | tag

    @staticmethod
    @writes("plan")
    def assign_rows(
        topk_idx: torch.Tensor,
        block_starts: torch.Tensor,
        plan: control.PlanIntegers,
        *,
        drop: bool,
    ) -> None:
        """Assigns a row to every slot of this rank, and a packed row to every pair of a token and a rank: a stable scan
        in order of token, then k.

        Args:
            topk_idx, block_starts: as in count_slots, and block_counts after send_counts. plan: lay_out's result; gets
            the maps from slots and tokens, and block_tokens.
            drop: whether lay_out clips.
        """
        num_experts = plan.slot_start.numel()
        num_ranks = plan.packed_start.numel()
        ids = topk_idx.flatten().long()
        valid = (ids >= 0) & (ids < num_experts)
        safe = ids.where(valid, 0)
        index = places_of_slots(safe, valid, num_experts)
        kept = valid & (index < plan.slot_limit.index_select(0, safe))
        rows = plan.slot_start.index_select(0, safe) + index
        plan.slot_to_row.copy_(rows.where(kept, -1).view_as(plan.slot_to_row))
        plan.slot_to_rank.copy_(
            (safe // plan.splits.numel()).where(kept, -1).view_as(plan.slot_to_rank)
        )
        here = _on_ranks(plan.slot_to_rank, num_ranks)
        present = here.any(1)
        plan.block_tokens.copy_(_by_block(present).sum(1))
        index = present.int().cumsum(0) - present.int()
        plan.token_to_packed_row.copy_((plan.packed_start + index).where(present, -1))
        smallest_k = here.int().argmax(1)
        primary = plan.slot_to_row.gather(1, smallest_k)
        plan.token_to_primary_row.copy_(primary.where(present, -1))


def places_of_slots(experts: torch.Tensor, valid: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The place of each valid slot among this rank's slots of its expert."""
    one_hot = torch.zeros((experts.numel(), num_experts), dtype=torch.int32, device=experts.device)
    one_hot.scatter_(1, experts[:, None], valid[:, None].int())
    return (one_hot.cumsum(0) - one_hot).gather(1, experts[:, None])[:, 0]


def split_rows(
    source_to_row_start: torch.Tensor, source_to_rows: torch.Tensor, rank: int, ranks: Sequence[int]
) -> None:
    """source_to_rows of lay_out."""
    starts, first_rank, last_rank = source_to_row_start.long(), ranks[0], ranks[-1]
    first, end = starts[0], starts[-1]
    # Whole tiles: from the first tile that begins in a source's rows to the last tile before rows of later ranks.
    high = end if last_rank + 2 == len(starts) else _whole_tiles(first, starts[last_rank + 1])
    low = _whole_tiles(first, starts[first_rank] + PART_ROWS - 1).minimum(high)
    source_to_rows[0], source_to_rows[-1] = torch.stack([first, low]), torch.stack([high, end])
    of_node = starts[first_rank : last_rank + 2].clamp(low, high)
    bounds = _whole_tiles(low, of_node + PART_ROWS - 1).minimum(high)
    if rank < last_rank:
        before = slice(rank + 2 - first_rank)
        bounds[before] = bounds[before].minimum(_whole_tiles(low, of_node[rank + 1 - first_rank]))
    source_to_rows[first_rank : last_rank + 1] = torch.stack([bounds[:-1], bounds[1:]], 1)


def _whole_tiles(first: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """The end of the last whole tile from `first` on, before `row`."""
    return first + (row - first) // PART_ROWS * PART_ROWS


def _on_ranks(slot_to_rank: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """bool [T, K, R]: whether a slot is on a rank."""
    return slot_to_rank[:, :, None] == torch.arange(num_ranks, device=slot_to_rank.device)


def _by_block(values: torch.Tensor, *, fill: int = 0) -> torch.Tensor:
    """[T, C] as [B, TOKENS_PER_BLOCK, C]; the last block is padded."""
    missing = -values.shape[0] % control.TOKENS_PER_BLOCK
    padded = torch.nn.functional.pad(values, (0, 0, 0, missing), value=fill)
    return padded.view(-1, control.TOKENS_PER_BLOCK, values.shape[1])


def _find_error(
    headers: torch.Tensor,
    sizes: Iterable[tuple[torch.Tensor, int]],
    received: torch.Tensor,
    drop: bool,
) -> tuple[int, int, int, int, int]:
    """(code, rank, limit, value, where) of the first error, in an order that is the same on every rank.

    sizes: rows that each rank would receive, and the smallest capacity; then both for packed rows; none with `drop`.
    """
    if received.numel() and int(received.min()) < 0:
        return control.PLAN_FAULT, -1, 0, 0, 0
    heads = headers.tolist()
    for rank, head in enumerate(heads):
        repeats = (
            head[control.HEAD_OVERFLOW]
            == heads[0][control.HEAD_OVERFLOW]
            == control.OVERFLOW_REPEAT
        )
        for word in control.AGREED_FIELDS:
            is_own = repeats and word in (control.HEAD_CAPACITY, control.HEAD_PACKED_CAPACITY)
            if head[word] != heads[0][word] and not is_own:
                return control.PLAN_MISMATCH, rank, heads[0][word], head[word], word
    for rank, head in enumerate(heads):
        if head[control.HEAD_BAD_SLOTS] > 0:
            bad_id, slot = head[control.HEAD_BAD_ID], head[control.HEAD_BAD_SLOT]
            return control.PLAN_BAD_ID, rank, head[control.HEAD_NUM_EXPERTS], bad_id, slot
    for rank, head in enumerate(heads):
        if head[control.HEAD_RAIL_DROPPED] > 0 and not drop:
            tokens = head[control.HEAD_RAIL_DROPPED]
            return control.PLAN_RAIL_OVERFLOW, rank, head[control.HEAD_RAIL_CAPACITY], tokens, 0
    for rows, limit in sizes:
        if limit < int(rows.max()):
            return control.PLAN_OVERFLOW, int(rows.argmax()), limit, int(rows.max()), 0
    return control.PLAN_OK, -1, 0, 0, 0


def _clip(load: torch.Tensor, capacity: int) -> torch.Tensor:
    """Rows kept of each expert of one rank: min(load, level) at the highest level that fits; the rest of the capacity
    goes to the first experts above the level, one row each."""
    # The levels whose sum fits come first, and level 0 fits.
    num_fitting = bisect_right(
        range(capacity + 1), capacity, key=lambda level: int(load.clamp(max=level).sum())
    )
    level = num_fitting - 1
    kept = load.clamp(max=level)
    above = load > level
    return kept + (above & (above.cumsum(0) <= capacity - int(kept.sum()))).long()
