"""A choice of experts that is given to Megatron's router, where it asks its own RouterReplay: symmoe.training.replay.

T tokens, E experts, K of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from symmoe.errors import ArgumentError
from symmoe.moe.listeners import Choose


class RouterChoice:
    """In a TopKRouter, between it and its RouterReplay (None without moe_enable_routing_replay).

    Attributes:
        choose: gives the experts, in place of the router's own choice.
        topk_idx: int64 [T, K], the last choice, in the router's order and before its capacity factor's drops; None
            where it makes none by scores.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.choose: Choose | None = None
        self.topk_idx: torch.Tensor | None = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores [T, K] of the experts chosen, and their ids int64 [T, K], as RouterReplay. Tokens that are given
        none keep the router's choice here, and so in its statistics; :meth:`drop` then takes it from them."""
        assert default_compute_topk is not None
        if self._inner is None:
            values, topk_idx = default_compute_topk(scores, topk, num_groups, group_topk)
        else:
            values, topk_idx = self._inner.get_replay_topk(scores, topk, num_groups, group_topk, default_compute_topk)
        self.topk_idx = topk_idx
        if self.choose is not None:
            self.topk_idx = self.choose(len(scores), topk).long()
            topk_idx = torch.where(self.topk_idx < 0, topk_idx, self.topk_idx)
            values = scores.gather(1, topk_idx)
        return values, topk_idx

    def drop(
        self, _router: nn.Module, _args: Any, output: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The router's probs [T, E] and map bool [T, E] without the tokens that have no expert; a forward hook."""
        if self.topk_idx is None:
            return output
        (probs, routing_map), is_none = output, self.topk_idx[:, :1] < 0
        return probs.masked_fill(is_none, 0.0), routing_map & ~is_none


def watch(router: nn.Module) -> RouterChoice | None:
    """Puts a RouterChoice into a router; None where it asks none."""
    if not isinstance(router, TopKRouter) or router.config.moe_router_fusion or router.routing_type == "sinkhorn":
        return None
    router.router_replay = RouterChoice(router.router_replay)
    return router.router_replay


def give_routing(model: nn.Module, name: str, choose: Choose) -> Callable[[], None]:
    """See Give, for SymmMoELayers. ArgumentError: the router makes no choice by scores that could be replaced."""
    router: Any = model.get_submodule(f"{name}.router" if name else "router")
    choice = router.router_replay
    if not isinstance(choice, RouterChoice):
        config = router.config
        raise ArgumentError(
            f"moe_router_load_balancing_type ({config.moe_router_load_balancing_type!r}) and moe_router_fusion "
            f"({config.moe_router_fusion}) must not be 'sinkhorn' or True: routing cannot be given to such a router"
        )
    choice.choose = choose
    hook = router.register_forward_hook(choice.drop)

    def end() -> None:
        hook.remove()
        choice.choose = None

    return end
