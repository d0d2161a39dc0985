"""Twin of select_experts."""

import torch


def select_experts(scores: torch.Tensor, topk_idx: torch.Tensor) -> None:
    # A stable sort, because `torch.topk` leaves ties open and picks its algorithm by shape, so that the same token
    # could be routed differently in a batch of another size.
    order = scores.sort(dim=1, descending=True, stable=True).indices
    topk_idx.copy_(order[:, : topk_idx.shape[1]])
