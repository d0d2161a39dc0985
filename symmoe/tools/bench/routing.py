"""Where every slot of every rank must go, from the routing only, without the package's plan. The checks need it.

R ranks, T tokens per rank, K slots per token, E experts, e = E / R. Rows are ordered expert, source rank, token, k;
packed rows source rank, token.
"""

from __future__ import annotations

import torch


class Routing:
    """The routing of all ranks. Tensors are on the CPU.

    Args:
        topk_idx: the choice of every rank, int64 [T, K].

    Attributes:
        slot_to_rank, slot_to_row: int64 [R, T, K], the rank of a slot's expert, and its row there.
        num_rows, num_packed: N and P of every rank.
        splits: int64 [R, e], rows of every expert.
        goes_to: bool [R, T, R], whether a token of a rank has an expert on another (or the same) rank.
    """

    def __init__(self, topk_idx: list[torch.Tensor], num_experts: int) -> None:
        num_ranks, experts_per_rank = len(topk_idx), num_experts // len(topk_idx)
        self.topk_idx = torch.stack(topk_idx)
        flat = self.topk_idx.reshape(-1)
        self.slot_to_rank = self.topk_idx // experts_per_rank
        self.splits = torch.bincount(flat, minlength=num_experts).view(num_ranks, experts_per_rank)
        self.num_rows = self.splits.sum(1).tolist()
        order = flat.argsort(stable=True)  # by expert; then source rank, token, k, as they lie
        self._slot_of_row = order.split(self.num_rows)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel())
        first_row = torch.tensor([0, *self.num_rows]).cumsum(0)
        self.slot_to_row = place.view_as(self.topk_idx) - first_row[self.slot_to_rank]
        self.goes_to = torch.stack([(self.slot_to_rank == rank).any(2) for rank in range(num_ranks)], dim=2)
        self.num_packed = self.goes_to.sum((0, 1)).tolist()

    def rows_of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(token, slot) of every row of a rank: int64 [N], counted over all ranks' tokens [R * T] and slots."""
        slots = self._slot_of_row[rank]
        return slots // self.topk_idx.shape[2], slots

    def packed_rows_of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The token of every packed row, int64 [P], and the packed row of every row, int64 [N]."""
        arrives = self.goes_to[:, :, rank].reshape(-1)
        token_to_packed = arrives.cumsum(0) - 1
        return arrives.nonzero().squeeze(1), token_to_packed[self.rows_of(rank)[0]]
