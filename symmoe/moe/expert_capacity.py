"""Dropping by expert: a limit on the tokens that each expert takes of one rank.

T tokens on this rank, K experts per token, E experts in all.
"""

from __future__ import annotations

import math

import torch


def expert_capacity(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """ceil(factor * T * K / E), `factor` times what balance would give an expert (GShard, arXiv:2006.16668)."""
    return math.ceil(num_tokens * top_k / num_experts * factor)


def drop_over_capacity(
    topk_idx: torch.Tensor, probs: torch.Tensor, *, num_experts: int, capacity: int, policy: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drops slots of the experts that have more than `capacity`. Local; does not synchronise the host.

    The remaining probs stay as they are: what a token loses is not given to its other experts (as in Megatron-Core).

    Args:
        topk_idx: int [T, K]; -1 is no expert.
        probs: fp32 [T, K], differentiable.
        capacity: slots an expert keeps.
        policy: an expert keeps the slots of the largest probs ("probs"; equal ones in the order of tokens) or those of
            the first tokens ("position").

    Returns:
        topk_idx with -1 and probs with 0 where a slot was dropped; and int32 [1], how many were.
    """
    # The plan reports ids out of range, on all ranks; here they are no experts.
    is_none = (topk_idx < 0) | (topk_idx >= num_experts)
    expert_N = topk_idx.masked_fill(is_none, num_experts).flatten().long()
    order_N = torch.arange(expert_N.numel(), device=expert_N.device)
    if policy == "probs":
        order_N = probs.detach().flatten().argsort(descending=True, stable=True)
    order_N = order_N[expert_N[order_N].argsort(stable=True)]
    sorted_N = expert_N[order_N]
    first_E = torch.searchsorted(sorted_N, torch.arange(num_experts + 1, device=sorted_N.device))
    place_N = torch.arange(sorted_N.numel(), device=sorted_N.device) - first_E[sorted_N]
    over_N = (place_N >= capacity) & (sorted_N < num_experts)
    over = torch.empty_like(over_N).scatter_(0, order_N, over_N).view(topk_idx.shape)
    return topk_idx.masked_fill(over, -1), probs.masked_fill(over, 0.0), over.sum(dtype=torch.int32).view(1)
