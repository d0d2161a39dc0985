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
        ids_TK = topk_idx.long()
        is_valid_TK = (ids_TK >= 0) & (ids_TK < num_experts)
        is_bad_TK = (ids_TK < -1) | (ids_TK >= num_experts)
        slots_TE = torch.zeros(
            (ids_TK.shape[0], num_experts), dtype=torch.int32, device=ids_TK.device
        )
        slots_TE.scatter_add_(1, ids_TK.where(is_valid_TK, 0), is_valid_TK.int())
        rank_TK = torch.where(is_valid_TK, ids_TK // (num_experts // num_ranks), -1)
        columns = slots_TE, _on_ranks(rank_TK, num_ranks).any(1), is_bad_TK.sum(1, keepdim=True)
        block_counts[:, :-1] = _by_block(torch.cat(columns, 1)).sum(1)
        slot_TK = torch.arange(ids_TK.numel(), device=ids_TK.device).view(ids_TK.shape)
        block_counts[:, -1] = _by_block(slot_TK.where(is_bad_TK, _NO_SLOT), fill=_NO_SLOT).amin(
            (1, 2)
        )

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
        """Writes this rank's row (header, slots per expert, tokens per rank) to every rank's count table, to the half
        for the next barrier.

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
            plan: gets the places of rows, the report and, without replica slots, expert_load.
            capacity: rows that this rank can receive; -1: its host waits for the report before it launches more.
            overflow: one of control.OVERFLOW_*. OVERFLOW_DROP: clips to `capacity`, equal on all ranks, instead of
                reporting an overflow. OVERFLOW_REPEAT: reports an overflow as PLAN_OVER_BUDGET and does not record it.
            ranks: consecutive ranks: this node's, or the whole group's.
        """
        num_ranks, rank, num_experts = peers.num_ranks, peers.rank, plan.slot_start.numel()
        widths = control.HEADER_WORDS, num_experts, num_ranks
        # Rows of sources; a second R is the destination.
        table = peers.count_table(rank, peers.epoch)[:, : sum(widths)].long()
        headers, counts_RE, tokens_RR = table.split(widths, 1)

        load_Re = counts_RE.sum(0).view(num_ranks, -1)
        capacities = headers[:, [control.HEAD_CAPACITY, control.HEAD_PACKED_CAPACITY]]
        limits = capacities.where(capacities >= 0, _NO_LIMIT).amin(0)
        drop = overflow == control.OVERFLOW_DROP
        sizes = (
            [] if drop else zip((load_Re.sum(1), tokens_RR.sum(0)), limits.tolist(), strict=True)
        )
        error = _find_error(headers, sizes, received, drop)
        if overflow == control.OVERFLOW_REPEAT and error[0] in _OVERFLOWS:
            error = control.PLAN_OVER_BUDGET, *error[1:]
        kept_Re = torch.stack([_clip(row, capacity) for row in load_Re]) if drop else load_Re
        failed = error[0] != control.PLAN_OK
        if failed:
            kept_Re = torch.zeros_like(kept_Re)
        before_RE = counts_RE.cumsum(0) - counts_RE  # slots of the expert on earlier sources
        kept_by_source_RE = (kept_Re.flatten() - before_RE).clamp(min=0).minimum(counts_RE)
        kept_by_source_RRe = kept_by_source_RE.view(num_ranks, num_ranks, -1)
        regions_RR = kept_by_source_RRe.sum(2).minimum(tokens_RR)
        region_start_RR = regions_RR.cumsum(0) - regions_RR

        start_Re = kept_Re.cumsum(1) - kept_Re
        plan.splits.copy_(kept_Re[rank])
        num_own = plan.row_range.shape[1]
        ranges_2e = torch.stack([start_Re[rank], start_Re[rank] + kept_Re[rank]])
        plan.row_range.copy_(ranges_2e[:, :num_own])
        plan.slot_start.copy_(start_Re.flatten() + before_RE[rank].minimum(kept_Re.flatten()))
        plan.slot_limit.copy_(kept_by_source_RE[rank])
        plan.packed_start.copy_(region_start_RR[rank])
        plan.packed_limit.copy_(regions_RR[rank])
        plan.source_to_packed_start[:-1] = region_start_RR[:, rank]
        plan.source_to_packed_start[-1] = regions_RR[:, rank].sum()
        before_RRe = before_RE.view(num_ranks, num_ranks, -1)
        plan.source_to_row_start[:-1] = start_Re[rank] + before_RRe[:, rank].minimum(kept_Re[rank])
        plan.source_to_row_start[-1] = ranges_2e[1]
        parts_R2e = plan.splits.new_empty((num_ranks, 2, plan.splits.numel()))
        split_rows(plan.source_to_row_start, parts_R2e, rank, ranks)
        sources = sorted({0, *ranks, num_ranks - 1})  # the node's; all earlier, all later ranks'
        plan.source_to_rows[sources] = parts_R2e[sources, :, :num_own]
        (begin, end), (first, last) = parts_R2e[rank, :, num_own:], ranges_2e[:, num_own:]
        plan.replica_ranges.copy_(
            torch.stack([first, last, first, begin, begin, end, end, last]).view(4, 2, -1)
        )
        if not plan.replica_to_expert.numel():
            plan.expert_load.copy_(load_Re.flatten())

        report = plan.report.zero_()
        report[control.SUM_ERROR : control.SUM_NUM_DROPPED + 1] = report.new_tensor(
            [
                *error,
                int(kept_Re[rank].sum()),
                int(kept_Re.sum(1).max()),
                int(regions_RR[:, rank].sum()),
                int(regions_RR.sum(0).max()),
                0 if failed else int((load_Re - kept_Re).sum()),
            ]
        )
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
        ids_TK = topk_idx.long()
        is_valid_TK = (ids_TK >= 0) & (ids_TK < num_experts)
        expert_TK = ids_TK.where(is_valid_TK, 0)
        position_TK = positions_of_slots(expert_TK, is_valid_TK, num_experts)
        is_kept_TK = is_valid_TK & (position_TK < plan.slot_limit[expert_TK])
        row_TK = plan.slot_start[expert_TK] + position_TK
        rank_TK = expert_TK // plan.splits.numel()
        plan.slot_to_row.copy_(row_TK.where(is_kept_TK, -1))
        plan.slot_to_rank.copy_(rank_TK.where(is_kept_TK, -1))
        is_there_TKR = _on_ranks(plan.slot_to_rank, num_ranks)
        goes_TR = is_there_TKR.any(1)
        plan.block_tokens.copy_(_by_block(goes_TR).sum(1))
        packed_row_TR = plan.packed_start + goes_TR.cumsum(0) - 1
        plan.token_to_packed_row.copy_(packed_row_TR.where(goes_TR, -1))
        smallest_k_TR = is_there_TKR.int().argmax(1)
        primary_row_TR = plan.slot_to_row.gather(1, smallest_k_TR)
        plan.token_to_primary_row.copy_(primary_row_TR.where(goes_TR, -1))


def positions_of_slots(
    experts: torch.Tensor, valid: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """[T, K], the position, from 0, of each valid slot among this rank's slots of its expert."""
    column = experts.reshape(-1, 1)
    one_hot = torch.zeros((len(column), num_experts), dtype=torch.int32, device=experts.device)
    one_hot.scatter_(1, column, valid.reshape(-1, 1).int())
    return (one_hot.cumsum(0) - one_hot).gather(1, column).view_as(experts)


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
    kept_rows = load.clamp(max=level)
    above = load > level
    return kept_rows + (above & (above.cumsum(0) <= capacity - int(kept_rows.sum()))).long()
