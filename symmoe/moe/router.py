"""The router: which experts a token goes to, and with what weight.

T tokens on this rank, H hidden size, E experts in all, K experts per token, G groups of experts.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from symmoe.checks.arguments import memory_problem, tensor_problem, wrapped_problem
from symmoe.errors import ArgumentError, SymmoeError, raise_for
from symmoe.kernels import control
from symmoe.moe.config import MoEConfig
from symmoe.moe.routing import Route, route_tokens
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.torch_internals import has_hooks


@dataclass(frozen=True, slots=True)
class Choice:
    """Where T tokens go. topk_idx is -1 for a masked token, and where the capacity factor has dropped a slot; there,
    probs are 0. Backward reads it: change a copy."""

    topk_idx: torch.Tensor  # int32 [T, K]
    probs: torch.Tensor  # fp32 [T, K], weight of each choice, differentiable (once)
    chosen_idx: torch.Tensor  # int32 [T, K], topk_idx before the capacity factor's drops
    num_over_capacity: torch.Tensor | None  # int32 [1], slots that the capacity factor has dropped; None without one


@dataclass(frozen=True, slots=True)
class RouterOutput(Choice):
    """What the router decided for T tokens: experts best first, all different within a token."""

    scores: torch.Tensor  # fp32 [T, E], of all experts without the bias, differentiable (once)
    logits: torch.Tensor  # fp32 [T, E], differentiable


class Router(nn.Module):
    """Linear scores, then top-k over (optionally) the best groups of experts.

    Selection uses scores + `expert_bias`; the probs come only from the scores. Everything is computed in fp32, also
    under autocast (of fp32 and fp16 tokens with tf32 products if torch is told to allow them). Equal scores go to the
    lower expert id, on every device and however many tokens share the call.

    Args:
        heap: its tapes play what a call launches; None: no tapes.

    Parameters stay fp32 when a model is cast (`model.to(torch.bfloat16)`).

    Attributes:
        weight: [E, H] fp32 parameter.
        expert_bias: [E] fp32 buffer, or None; changed by :func:`symmoe.moe.balance.balance_step`, not by gradients.
        step_load: [E] int64, slots of each expert since the last balance_step, or None if nothing uses it. Not
            a buffer: DDP would overwrite it with that of another rank.
    """

    def __init__(
        self, config: MoEConfig, *, device: torch.device | str | None = None, heap: SymmetricHeap | None = None
    ) -> None:
        super().__init__()
        self.config, self._rule, self._heap = config, config.routing_rule, heap
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden, dtype=torch.float32, device=device))
        bias = torch.zeros(config.num_experts, dtype=torch.float32, device=device)
        self.expert_bias: torch.Tensor | None
        self.register_buffer("expert_bias", bias if config.expert_bias else None)
        counts = config.expert_bias or (config.aux_loss_coef and config.aux_loss == "global")
        self.step_load = torch.zeros(config.num_experts, dtype=torch.int64, device=device) if counts else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights of deviation H^-0.5 (logits of order one for normalised tokens) and no bias."""
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.config.hidden))
        if self.expert_bias is not None:
            self.expert_bias.zero_()
        if self.step_load is not None:
            self.step_load.zero_()

    def forward(
        self, x: torch.Tensor, *, token_mask: torch.Tensor | None = None, topk_idx: torch.Tensor | None = None
    ) -> RouterOutput:
        """Routes the tokens of this rank. Not collective; no host synchronisation.

        Args:
            x: [T, H] float of any precision. T may be 0.
            token_mask: bool [T]; tokens of False (padding) go to no expert.
            topk_idx: int [T, K], the experts to take instead of the best ones, e.g. `chosen_idx` of another forward;
                -1 is no expert. The router computes scores, and the probs of these experts.

        Raises:
            ArgumentError: `x` is not [T, H] or not floating point; token_mask or topk_idx does not fit it.
        """
        config = self.config
        if x.dim() != 2 or x.shape[1] != config.hidden:
            raise ArgumentError(f"x {tuple(x.shape)} must be [tokens, hidden ({config.hidden})]")
        if not x.is_floating_point():
            raise ArgumentError(f"x ({x.dtype}) must be floating point, like weight ({self.weight.dtype})")
        raise_for(memory_problem("x", x) or arguments_problem(config, x, token_mask=token_mask, topk_idx=topk_idx))
        if token_mask is not None:  # padding may hold anything, NaN too, and a gradient of 0 would not stop that
            x = x.masked_fill(~token_mask.unsqueeze(1), 0.0)
        # Autocast would run the product in half precision, where close scores tie or swap.
        with torch.autocast(x.device.type, enabled=False):
            given_idx = None if topk_idx is None else _int32(topk_idx).contiguous()
            routed = route_tokens(self._route(x, given_idx), self._heap)
            choice = choice_of(config, routed.topk_idx, routed.probs, token_mask)
        chosen = choice.topk_idx, choice.probs, choice.chosen_idx, choice.num_over_capacity
        return RouterOutput(*chosen, routed.scores, routed.logits)

    if TYPE_CHECKING:
        __call__ = forward  # nn.Module's has no types

    def route_of(self, x: torch.Tensor) -> Route | None:
        """How this router routes tokens [T, H] without a mask, for who does it in its place. None: its call does more,
        that of a subclass or with hooks, or is followed by drops over a capacity."""
        config = self.config
        if type(self) is not Router or config.capacity_factor is not None or has_hooks(self):
            return None
        return self._route(x, topk_idx=torch.empty((x.shape[0], config.top_k), dtype=torch.int32, device=x.device))

    def _route(
        self, x: torch.Tensor, given_idx: torch.Tensor | None = None, topk_idx: torch.Tensor | None = None
    ) -> Route:
        numbers, weight = (self.config.top_k, self._rule), self.weight.contiguous()
        return Route(x.contiguous(), weight, self.expert_bias, given_idx, *numbers, topk_idx)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Follows `.to(device)` but not `.to(dtype)`: a bias of half precision would swallow its updates."""

        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        if self.step_load is not None:
            self.step_load = keep_dtype(self.step_load)
        moved: nn.Module = super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        return moved

    def extra_repr(self) -> str:
        c = self.config
        return f"hidden={c.hidden}, num_experts={c.num_experts}, top_k={c.top_k}, score={c.score!r}"


def router_problem(router: nn.Module | None) -> ArgumentError | None:
    """Why a module cannot take the place of a layer's router, or None; a wrapper with a Router inside must show it."""
    if router is None:
        return None
    if any(isinstance(module, Router) for module in router.modules()):
        taken = inspect.signature(router.forward).parameters.values()
        if {"token_mask", "topk_idx"} <= {p.name for p in taken} or any(p.kind is p.VAR_KEYWORD for p in taken):
            return wrapped_problem("router", router, "step_load")
    return ArgumentError(
        f"router ({type(router).__name__}) must be a Router, called as router(x, token_mask=..., topk_idx=...); one of "
        "your own brings its choice to each call: layer(x, topk_idx=..., probs=...), see symmoe.MoELayer"
    )


def choice_of(
    config: MoEConfig, topk_idx: torch.Tensor, probs: torch.Tensor, token_mask: torch.Tensor | None
) -> Choice:
    """The choice of experts int [T, K] with these weights fp32 [T, K], without padding and what is over capacity."""
    if token_mask is not None:
        padding_T1 = ~token_mask.unsqueeze(1)
        topk_idx, probs = topk_idx.masked_fill(padding_T1, -1), probs.masked_fill(padding_T1, 0.0)
    chosen_idx = topk_idx = _int32(topk_idx)
    num_over_capacity = None
    if config.capacity_factor is not None:
        # So many times what balance would give an expert (GShard, arXiv:2006.16668).
        capacity = math.ceil(topk_idx.numel() / config.num_experts * config.capacity_factor)
        topk_idx, probs, num_over_capacity = drop_over_capacity(
            topk_idx, probs, num_experts=config.num_experts, capacity=capacity, policy=config.drop_policy
        )
    return Choice(topk_idx=topk_idx, probs=probs, chosen_idx=chosen_idx, num_over_capacity=num_over_capacity)


def _int32(topk_idx: torch.Tensor) -> torch.Tensor:
    """The ids as int32. One that is too large stays too large, so that the plan reports it."""
    limits = torch.iinfo(torch.int32)
    return topk_idx if topk_idx.dtype == torch.int32 else topk_idx.clamp(limits.min, limits.max).int()


def arguments_problem(
    config: MoEConfig,
    x: torch.Tensor,
    *,
    token_mask: torch.Tensor | None,
    topk_idx: torch.Tensor | None,
    probs: torch.Tensor | None = None,
) -> SymmoeError | None:
    """Why these cannot be the mask, the choice of experts and its weights for the tokens of x [..., H], or None."""
    error: SymmoeError | None = None
    choice = math.prod(x.shape[:-1]), config.top_k
    if token_mask is not None:
        error = tensor_problem("token_mask", token_mask, shape=x.shape[:-1], dtypes=(torch.bool,), device=x.device)
    if topk_idx is not None:
        dtypes = torch.int32, torch.int64
        error = error or tensor_problem("topk_idx", topk_idx, shape=choice, dtypes=dtypes, device=x.device)
    if error is not None or (probs is None and config.router != "none"):
        return error
    if probs is None:
        return ArgumentError("probs (None) must be given, and topk_idx with it: the configuration has router='none'")
    if topk_idx is None:
        return ArgumentError("topk_idx (None) must be given with probs: which experts have these weights?")
    return tensor_problem("probs", probs, shape=choice, dtypes=control.DTYPES, device=x.device)


def drop_over_capacity(
    topk_idx: torch.Tensor, probs: torch.Tensor, *, num_experts: int, capacity: int, policy: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """topk_idx [T, K] with -1 and probs fp32 [T, K] with 0 where an expert has more slots than `capacity`; and int32
    [1], how many were dropped. Local; does not synchronise the host. An expert keeps the slots of the largest probs
    (policy "probs"; equal ones in the order of tokens) or those of the first tokens ("position"). The remaining probs
    stay as they are: what a token loses is not given to its other experts (as in Megatron-Core)."""
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
