"""A plan between nodes: which tokens go to which node, and where they are there. Words: dispatch/nodes.py.

There are N nodes with G ranks each, T tokens of this rank, and A lines that it sends, as many to each other node.
"""

from typing import Protocol

from torch import Tensor

from symmoe.kernels.contract.operands import writes
from symmoe.kernels.control import InNodeIntegers, Peers, PlanIntegers, RankMaps


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
