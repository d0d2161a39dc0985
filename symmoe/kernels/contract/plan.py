"""The plan: maps from every slot of a rank's `topk_idx` to its place.

There are B blocks of TOKENS_PER_BLOCK tokens. A rank receives packed rows, one for each token that it needs. The
primary row of a token on a rank is that of its smallest k there; its other rows are secondary rows.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from symmoe.kernels.contract.operands import writes
from symmoe.kernels.control import Peers, PlanIntegers


class PlanKernels(Protocol):
    @writes("row_range")
    def splits_to_row_range(self, splits: Tensor, row_range: Tensor, num_rows: int) -> None:
        """row_range of whole groups, int32[2, G], from their numbers of rows: splits int32 or int64 [G].

        Negative splits count as 0 and sums are limited to num_rows: kernels stay inside their tensors for any splits.
        """

    @writes("block_counts")
    def count_slots(
        self, topk_idx: Tensor, block_counts: Tensor, *, num_experts: int, num_ranks: int
    ) -> None:
        """Counts slots per expert and tokens per destination rank in each block of tokens.

        Args:
            topk_idx: int32 or int64 [T, K], expert ids; -1 is "no expert".
            block_counts: int32 [B, E + R + 2]; columns: slots of each expert, tokens that go to each rank, number of
                ids out of range, and the first slot t * K + k with such an id (2**31 - 1 if none). Ids out of range
                are not counted as slots.
        """

    @writes("block_counts", "peers")
    def send_counts(
        self,
        block_counts: Tensor,
        topk_idx: Tensor,
        header: tuple[int, ...],
        peers: Peers,
        *,
        num_experts: int,
    ) -> None:
        """Puts this rank's row (header, slots per expert, tokens per rank) into every rank's count table.

        It uses the half of the table that belongs to the next barrier.

        Args:
            block_counts: that of count_slots; its columns of experts and ranks get the sums over earlier blocks.
            topk_idx: that of count_slots.
            header: HEADER_WORDS integers; the HEAD_BAD_* words are filled in here.
        """

    @writes("status", "plan")
    def lay_out(
        self,
        peers: Peers,
        received: Tensor,
        status: Tensor,
        plan: PlanIntegers,
        *,
        capacity: int,
        overflow: int,
        ranks: Sequence[int],
    ) -> None:
        """Lays out every rank's rows from the count table, the same way on every rank.

        After an error, which the report has, nothing is laid out: all counts are zero.

        Each local expert's rows are cut into the parts that can be computed as rows arrive: from this rank first, then
        from the one before it and so on, the last of `ranks` following the first. After those, rows arrive from all
        earlier ranks at once, as the part of rank 0, and from all later ones, as that of the last rank. A part needs
        only rows that have arrived by then. Parts begin at multiples of PART_ROWS, counted from the expert's first row,
        or at its end; together they are all rows.

        Args:
            received: result of the plan's barrier; negative words mean that a rank faulted.
            status: int64[STATUS_WORDS], pinned host memory on GPUs; gets a record of an error if no host waits: what
                is launched before it looks must move nothing.
            plan: gets what says where rows are, the report and, where there are no places, expert_load.
            capacity: rows that this rank can take; -1: its host waits for the report before it launches more.
            overflow: one of control.OVERFLOW_*. OVERFLOW_DROP: clips to the capacity, that of all ranks, instead of
                reporting an overflow. OVERFLOW_REPEAT: an overflow is reported as PLAN_NO_ROOM, and not recorded.
            ranks: consecutive ones, of this node, or all of the group.
        """

    @writes("posted")
    def post_report(self, report: Tensor, posted: Tensor, *, plan: int) -> None:
        """Writes the report of the plan with this generation to its row of `posted`, which the host reads: as
        control.REPORT_SLOTS says, pinned host memory on GPUs.

        Args:
            report: int32[SUMMARY_WORDS].
        """

    @writes("plan")
    def assign_rows(
        self, topk_idx: Tensor, block_starts: Tensor, plan: PlanIntegers, *, drop: bool
    ) -> None:
        """Gives every slot of this rank its row, and every pair of a token and a rank its packed row: a stable scan in
        order of token, then k.

        Args:
            topk_idx, block_starts: that of count_slots, and the block_counts that send_counts leaves.
            plan: that of lay_out; gets the maps from slots and tokens, and block_tokens.
            drop: whether lay_out has clipped.
        """
