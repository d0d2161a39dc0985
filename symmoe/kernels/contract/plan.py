"""The plan of a call, for replicas and between nodes: which rows go where.

PlanKernels
-----------
The plan: maps from every slot of a rank's `topk_idx` to its place.

There are B blocks of TOKENS_PER_BLOCK tokens. A rank receives packed rows, one for each token that it needs. The
primary row of a token on a rank is that of its smallest k there; its other rows are secondary rows.

ReplicaKernels
--------------
Replicas of experts on ranks that have less to do: which rows they get, their weights, and gradients of these.

Every rank has S places, each for a replica of one expert of another rank. M numbers of a weight of one expert.

NodeKernels
-----------
A plan between nodes: which tokens go to which node, and where they are there. Words: dispatch/nodes.py.

There are N nodes with G ranks each, T tokens of this rank, and A lines that it sends, as many to each other node.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from symmoe.kernels.contract.operands import Matrices, writes
from symmoe.kernels.control import InNodeIntegers, Peers, PlanIntegers, RankMaps


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
                reporting an overflow. OVERFLOW_REPEAT: an overflow is reported as PLAN_OVER_BUDGET, and not recorded.
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


Pair = tuple[Matrices | None, Matrices | None]  # of both layers, or of one


class ReplicaKernels(Protocol):
    @writes("plan")
    def place_replicas(
        self, peers: Peers, plan: PlanIntegers, *, slack: int, num_near: int
    ) -> None:
        """Moves rows of ranks that have too many to replicas on ranks that have less, from the count table, the same
        way on every rank. Rows stay in a node: each `num_near` ranks that follow each other are for themselves.

        Too many are more than (1000 + slack) / 1000 times the mean of the ranks' rows, rounded up, the limit. While the
        rank with most rows has too many, it gives some of the expert that has most left there to the rank that has
        least and a place: as many as the first is above the mean, the second below it, or the expert has. Of equal ones
        the lowest number counts. Rows stay where their tokens are as far as both go there; other rows are given out in
        the order of source ranks and of the ranks with copies. So there are at most R * S moves, and a rank stays above
        the limit only if no place is left that could help. plan: gets expert_load, replica_to_expert, replica_rows,
        expert_to_place and copy_slots.
        """

    @writes("plan", "block_counts")
    def route_to_replicas(
        self, topk_idx: Tensor, block_starts: Tensor, plan: PlanIntegers, block_counts: Tensor
    ) -> None:
        """Gives every slot one of its expert's copies: this rank's first slots of an expert to that on the lowest rank.
        And counts them.

        Args:
            topk_idx, block_starts: that of count_slots, and the block_counts that send_counts leaves.
            plan: that of place_replicas; gets slot_to_copy, with an id past the last copy for one that is out of range.
            block_counts: int32 [B, R * e + R + 2], gets what count_slots makes of slot_to_copy.
        """

    @writes("peers")
    def push_replicas(
        self,
        weights: Pair,
        replica_to_expert: Tensor,
        peers: Peers,
        received: Tensor,
        *,
        column: int,
        starts: tuple[int, int],
    ) -> None:
        """Writes the matrices of this rank's experts to the places that have replicas of them, unless the call has
        failed.

        weights: [E / R, ...], M numbers of each expert, a multiple of 16 bytes. A rank's places [S, M] for them begin
        `starts` bytes after the offset received[., column].
        """

    @writes("gradients")
    def add_from_replicas(
        self,
        gradients: Pair,
        places: tuple[Tensor, Tensor],
        peers: Peers,
        received: Tensor,
        *,
        column: int,
        starts: tuple[int, int],
    ) -> None:
        """Adds to this rank's gradients those that replicas have made, in the order of ranks, in fp32, rounded once;
        nothing if the call has failed. An expert without replicas keeps its bits.

        gradients: of the weights of push_replicas. Those that a rank has made of replicas, [S, M] of the same dtype,
        begin `starts` bytes after received[., column].
        places: replica_to_expert, expert_to_place.
        """


class NodeKernels(Protocol):
    @writes("numbers", "token_to_rail_row")
    def rail_rows(
        self,
        topk_idx: Tensor,
        maps: RankMaps,
        numbers: Tensor,
        token_to_rail_row: Tensor,
        *,
        num_experts: int,
        most: int,
    ) -> None:
        """Numbers the tokens that go to each other node, in their order.

        Args:
            topk_idx: int32 or int64 [T, K]; ids out of range count as none.
            maps: of the topology.
            numbers: int32 [N + 2], gets how many tokens go to each node, the largest of these numbers, and 0 if no more
                than `most` go to any node, else the largest number again.
            token_to_rail_row: int32 [T, N], gets the row of each token; -1 if it does not go there, or if the row is
                not below `most`.
        """

    @writes("peers")
    def tell_header(self, number: Tensor, peers: Peers, source: int, *, word: int) -> None:
        """Writes number, int32 [1], into a word of the header of a rank (`source`, in the group) in every count table
        of the node; into the half of the next barrier."""

    @writes("rows", "cleared")
    def own_counts(self, ranks: Tensor, peers: Peers, rows: Tensor, cleared: Tensor) -> None:
        """Reads the rows of ranks, int64 [G], from this rank's count table, the half of the last barrier: int32
        [G, row_words]. cleared: int32 [., row_words], gets zeros."""

    @writes("peers", "received")
    def other_counts(self, rows: Tensor, ranks: Tensor, peers: Peers, received: Tensor) -> None:
        """Writes rows, int32 [R - G, row_words], to the places of ranks, int64 [R - G], in this rank's count table.
        received: int64 [R, NUM_PUBLISHED], gets 0, or negative numbers if the call has failed."""

    @writes("out")
    def take_rows(self, rows: Tensor, index: Tensor, out: Tensor) -> None:
        """Copies rows [T, .] of whole 4-byte words to out [A, .]: row a is row index[a], int32 [A]; 0 if T is 0."""

    @writes("found")
    def plan_in_node(
        self,
        plan: PlanIntegers,
        token_to_rail_row: Tensor,
        numbers: Tensor,
        maps: RankMaps,
        found: InNodeIntegers,
    ) -> None:
        """Finds where the tokens of a plan are inside each node.

        Args:
            plan: of all ranks, complete.
            token_to_rail_row, numbers: those of rail_rows.
            maps: of the topology.
            found: gets everything. Lines of sent rows that are not used are of token 0, and say that it goes nowhere;
                so do all lines of foreign tokens, which are to come, and their regions are empty.
        """
