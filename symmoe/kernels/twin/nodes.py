"""A plan between nodes: the destination nodes of tokens, and the tokens' places there. Terms: dispatch/nodes.py.

There are N nodes with G ranks each. This rank has T tokens and sends A lines in all, equally many to each other node.
"""

import torch

from symmoe.kernels import control
from symmoe.kernels.operands import writes


class NodeKernels:
    @staticmethod
    @writes("numbers", "token_to_rail_row")
    def rail_rows(
        topk_idx: torch.Tensor,
        maps: control.RankMaps,
        numbers: torch.Tensor,
        token_to_rail_row: torch.Tensor,
        *,
        num_experts: int,
        max_rows: int,
    ) -> None:
        """Numbers the tokens that go to each other node, in their order.

        Args:
            topk_idx: int32 or int64 [T, K]; ids out of range count as none.
            maps: of the topology.
            numbers: int32 [N + 2], gets the number of tokens for each node, the largest of these numbers, and 0 if the
                largest is at most `max_rows`, else the largest again.
            token_to_rail_row: int32 [T, N], gets the row of each token; -1 if the token does not go there, or if the
                row is at least `max_rows`.
        """
        node_N, is_valid_TK = (
            torch.arange(token_to_rail_row.shape[1], device=topk_idx.device),
            (topk_idx >= 0) & (topk_idx < num_experts),
        )
        node_TK = maps.to_node[
            torch.where(is_valid_TK, topk_idx, 0) // (num_experts // (maps.to_node.numel() - 1))
        ]
        goes_TN = ((node_TK[..., None] == node_N) & is_valid_TK[..., None]).any(1) & (
            node_N != maps.own_node
        )
        row_TN = goes_TN.cumsum(0, dtype=torch.int32) - 1
        token_to_rail_row.copy_(torch.where(goes_TN & (row_TN < max_rows), row_TN, -1))
        numbers[:-2] = goes_TN.sum(0)
        numbers[-2] = largest = int(numbers[:-2].max())
        numbers[-1] = largest if largest > max_rows else 0

    @staticmethod
    @writes("peers")
    def publish_header(
        number: torch.Tensor, peers: control.Peers, source: int, *, word: int
    ) -> None:
        """Writes number, int32 [1], to a word of a rank's header (`source`, in the group) in every count table of the
        node, in the half of the next barrier."""
        for rank in range(peers.num_ranks):
            peers.count_table(rank, peers.epoch + 1)[source, word] = number[0]

    @staticmethod
    @writes("rows", "cleared")
    def own_counts(
        ranks: torch.Tensor, peers: control.Peers, rows: torch.Tensor, cleared: torch.Tensor
    ) -> None:
        """Reads the rows of ranks, int64 [G], from this rank's count table, the half of the last barrier: int32
        [G, row_words]. cleared: int32 [., row_words], gets zeros."""
        rows.copy_(peers.count_table(peers.rank, peers.epoch)[ranks])
        cleared.zero_()

    @staticmethod
    @writes("peers", "received")
    def other_counts(
        rows: torch.Tensor, ranks: torch.Tensor, peers: control.Peers, received: torch.Tensor
    ) -> None:
        """Writes rows, int32 [R - G, row_words], to the places of ranks, int64 [R - G], in this rank's count table.
        received: int64 [R, NUM_PUBLISHED], gets 0, or negative numbers if the call has failed."""
        peers.count_table(peers.rank, peers.epoch)[ranks] = rows
        failed = peers.counters(peers.rank)[control.ABORTED : control.RAIL_FAULT + 1].amax()
        received.copy_(-failed.expand_as(received))

    @staticmethod
    @writes("out")
    def take_rows(rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
        """Copies rows [T, .] of whole 4-byte words to out [A, .]: row a is row index[a], int32 [A]; 0 if T is 0."""
        out.copy_(rows[index] if len(rows) else torch.zeros_like(out))

    @staticmethod
    @writes("integers")
    def plan_in_node(
        plan: control.PlanIntegers,
        token_to_rail_row: torch.Tensor,
        numbers: torch.Tensor,
        maps: control.RankMaps,
        integers: control.InNodeIntegers,
    ) -> None:
        """Finds where the tokens of a plan are inside each node.

        Args:
            plan: the complete plan of all ranks.
            token_to_rail_row, numbers: results of rail_rows.
            maps: of the topology.
            integers: gets all tensors. Lines of unused sent rows have token 0 and no destination. Lines of foreign
            tokens,
                which arrive later, have no destination either, and their regions are empty.
        """
        (num_tokens, num_nodes), top_k = token_to_rail_row.shape, plan.slot_to_row.shape[1]
        num_ranks, max_rows = (
            maps.to_node.numel() - 1,
            (len(integers.home_row_to_token) - num_tokens) // (num_nodes - 1),
        )
        node_N = torch.arange(num_nodes, device=token_to_rail_row.device)
        home_TN = (
            token_to_rail_row + (node_N - (node_N > maps.own_node).int()) * max_rows + num_tokens
        )
        home_TN.masked_fill_(token_to_rail_row < 0, -1)
        home_TN[:, maps.own_node] = torch.arange(num_tokens, device=home_TN.device)
        integers.token_to_home_row.copy_(home_TN)
        for name in ("slot_to_row", "slot_to_rank", "token_to_packed_row", "token_to_primary_row"):
            getattr(integers, name).fill_(-1)
        integers.home_row_to_token.zero_()
        for node in range(num_nodes):
            token = (home_TN[:, node] >= 0).nonzero().flatten()
            row = home_TN[token, node]
            rank = maps.to_local[
                plan.slot_to_rank[token] % (num_ranks + 1) + node * (num_ranks + 1)
            ]
            integers.home_row_to_token[row] = token.int()
            integers.slot_to_rank[row] = rank
            integers.slot_to_row[row] = torch.where(rank < 0, -1, plan.slot_to_row[token])
            integers.token_to_packed_row[row] = plan.token_to_packed_row[token][
                :, maps.by_node[node]
            ]
            integers.token_to_primary_row[row] = plan.token_to_primary_row[token][
                :, maps.by_node[node]
            ]
        row = home_TN.gather(1, maps.to_node[plan.slot_to_rank])
        is_none_TK = (plan.slot_to_rank < 0) | (row < 0)
        integers.slot_to_home_row.copy_(
            torch.where(is_none_TK, -1, row * top_k + torch.arange(top_k, device=home_TN.device))
        )
        integers.zeros.zero_()
        integers.ends.copy_(torch.tensor([0, num_tokens], device=home_TN.device))
        regions = torch.stack(
            [plan.block_tokens.sum(0, dtype=torch.int32), plan.packed_start, plan.packed_limit]
        )
        integers.regions[0] = regions[:, maps.by_node].transpose(0, 1)
        integers.regions[1] = 0
        integers.source_to_packed_start.copy_(plan.source_to_packed_start[maps.first_with])
        end = maps.first + maps.by_node.shape[1] - 1
        integers.own_rows.copy_(
            torch.stack([plan.source_to_rows[maps.first, 0], plan.source_to_rows[end, 1]])
        )
