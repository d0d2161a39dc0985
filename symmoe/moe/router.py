"""The router: which experts a token goes to, and with what weight.

T tokens on this rank, H hidden size, E experts in all, K experts per token, G groups of experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable

from symmoe import kernels
from symmoe.errors import ArgumentError
from symmoe.moe.config import MoEConfig

# Renormalising divides by the sum of K probs. Sigmoid scores that all underflow must give zeros, not NaN.
_TINY = 1e-20


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterOutput:
    """What the router decided for T tokens.

    Attributes:
        topk_idx: [T, K] int32, chosen experts, best first; all different within a token.
        probs: [T, K] fp32, weight of each choice, differentiable.
        scores: [T, E] fp32, scores of all experts without the bias, differentiable.
        logits: [T, E] fp32, differentiable.
    """

    topk_idx: torch.Tensor
    probs: torch.Tensor
    scores: torch.Tensor
    logits: torch.Tensor


class Router(nn.Module):
    """Linear scores, then top-k over (optionally) the best groups of experts.

    Selection uses scores + `expert_bias`; the probs come from the scores alone. Everything is computed in fp32, also
    under autocast (with tf32 products if torch is told to allow them). Equal scores go to the lower expert id, on every
    device and however many tokens share the call.

    Parameters stay fp32 when a model is cast (`model.to(torch.bfloat16)`).

    Attributes:
        weight: [E, H] fp32 parameter.
        expert_bias: [E] fp32 buffer, or None; changed by :func:`symmoe.moe.balance.update_expert_bias`, not
            by gradients.
    """

    def __init__(self, config: MoEConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden, dtype=torch.float32, device=device))
        bias = torch.zeros(config.num_experts, dtype=torch.float32, device=device)
        self.register_buffer("expert_bias", bias if config.expert_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of deviation H^-0.5 (logits of order one for normalised tokens) and no bias."""
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.config.hidden))
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def forward(self, x: torch.Tensor) -> RouterOutput:
        """Routes the tokens of this rank. Not collective; no host synchronisation.

        Args:
            x: [T, H] float of any precision. T may be 0.

        Raises:
            ArgumentError: `x` is not [T, H] or not floating point.
        """
        config = self.config
        if x.dim() != 2 or x.shape[1] != config.hidden:
            raise ArgumentError(f"x {tuple(x.shape)} must be [tokens, hidden ({config.hidden})]")
        if not x.is_floating_point():
            raise ArgumentError(f"x ({x.dtype}) must be floating point, like weight ({self.weight.dtype})")
        # Autocast would run the product in half precision, where close scores tie or swap.
        with torch.autocast(x.device.type, enabled=False):
            logits = nn.functional.linear(x.float(), self.weight)
            scores = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
            topk_idx = self._select(scores.detach())
            probs = _Gather.apply(scores, topk_idx)
            if config.renormalize:
                probs = probs / (probs.sum(-1, keepdim=True) + _TINY)
            probs = probs * config.route_scale
        return RouterOutput(topk_idx=topk_idx.int(), probs=probs, scores=scores, logits=logits)

    def _select(self, scores: torch.Tensor) -> torch.Tensor:
        """[T, K] int64, the chosen experts, from scores [T, E]."""
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        if self.config.num_groups > 1:
            scores = self._keep_top_groups(scores)
        return _stable_topk(scores, self.config.top_k)

    def _keep_top_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """[T, E] scores, -inf outside a token's best `top_groups` groups (DeepSeek-V3, arXiv:2412.19437)."""
        grouped_TGe = scores.unflatten(1, (self.config.num_groups, -1))
        # A group is worth its best expert (softmax, DeepSeek-V2) or its best two (sigmoid, DeepSeek-V3).
        best = 1 if self.config.score == "softmax" else min(2, grouped_TGe.shape[2])
        group_scores_TG = grouped_TGe.topk(best, dim=2).values.sum(2)
        keep_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool)
        keep_TG.scatter_(1, _stable_topk(group_scores_TG, self.config.top_groups), True)
        return grouped_TGe.masked_fill(~keep_TG.unsqueeze(2), -math.inf).flatten(1)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Follows `.to(device)` but not `.to(dtype)`: a bias of half precision would swallow its updates."""

        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)

    def extra_repr(self) -> str:
        c = self.config
        return f"hidden={c.hidden}, num_experts={c.num_experts}, top_k={c.top_k}, score={c.score!r}"


class _Gather(torch.autograd.Function):
    """scores.gather(1, topk_idx), of which torch's own backward copies a [T, E] tensor of zeros."""

    @staticmethod
    def forward(ctx: FunctionCtx, scores: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(topk_idx)
        ctx.shape = scores.shape
        return scores.gather(1, topk_idx)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_probs: torch.Tensor):
        (topk_idx,) = ctx.saved_tensors
        # A token's choices are distinct: nothing is added up.
        return d_probs.new_zeros(ctx.shape).scatter_(1, topk_idx, d_probs), None


def _stable_topk(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices [T, k] int64 of the k largest per row, best first, ties to the lower index."""
    topk_idx = torch.empty((values.shape[0], k), dtype=torch.int64, device=values.device)
    kernels.for_device(values.device).select_experts(values.contiguous(), topk_idx)
    return topk_idx
