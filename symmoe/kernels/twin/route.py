"""Which experts a token goes to: the definition, in PyTorch. See kernels/triton/route.py."""

import torch


def select_experts(scores: torch.Tensor, topk_idx: torch.Tensor) -> None:
    """topk_idx[t] = the K largest of scores[t], best first, ties to the lower index; NaN is larger than any number.

    scores fp32 [T, E]; topk_idx int64 [T, K].

    A stable sort, because `torch.topk` leaves ties open and picks its algorithm by shape, so that the same token could
    be routed differently in a batch of another size.
    """
    order = scores.sort(dim=1, descending=True, stable=True).indices
    topk_idx.copy_(order[:, : topk_idx.shape[1]])
