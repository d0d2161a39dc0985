"""Sets the choice of experts in Megatron's router, through its own RouterReplay: see symmoe.routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import nn

from symmoe.errors import ArgumentError
from symmoe.moe.listeners import Choose


def recorder_of(router: nn.Module) -> RouterReplay | None:
    """A router's RouterReplay; a missing one is created, and records; None: the router cannot use one."""
    if (
        not isinstance(router, TopKRouter)
        or router.config.moe_router_fusion
        or router.routing_type == "sinkhorn"
    ):
        return None
    if router.router_replay is None:  # without moe_enable_routing_replay
        router.router_replay = RouterReplay()
        RouterReplay.global_router_replay_instances.pop()  # lists only enabled ones
        router.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
    return router.router_replay


def recorded_by(recorder: RouterReplay | None) -> torch.Tensor | None:
    """A router's choice in the current forward, before a capacity factor's drops; None: not recorded."""
    if recorder is None or recorder.router_replay_action != RouterReplayAction.RECORD:
        return None  # the record may be of an earlier forward
    recorded: torch.Tensor | None = recorder.recorded_topk_idx
    return recorded


def give_routing(model: nn.Module, name: str, choose: Choose) -> Callable[[], None]:
    """See Give, for SymmMoELayers. The router's statistics spread tokens without an expert over all experts; its map
    omits these tokens. ArgumentError: the router has no choice by scores to replace."""
    router: Any = model.get_submodule(f"{name}.router" if name else "router")
    if (replay := recorder_of(router)) is None:
        config = router.config
        raise ArgumentError(
            f"moe_router_load_balancing_type ({config.moe_router_load_balancing_type!r}) and moe_router_fusion "
            f"({config.moe_router_fusion}) must not be 'sinkhorn' or True: such a router cannot be given a choice"
        )
    before = replay.router_replay_action

    def give(_router: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        ids = choose(args[0].shape[:-1].numel(), router.topk).long()
        spread = torch.arange(ids.numel(), device=ids.device).view_as(ids) % router.num_experts
        replay.recorded_topk_idx, replay.target_topk_idx = ids, torch.where(ids < 0, spread, ids)
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def drop(
        _router: nn.Module, _args: Any, output: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        replay.set_router_replay_action(
            RouterReplayAction.RECORD
        )  # the layer reports the given choice as this
        is_none = replay.recorded_topk_idx[:, :1] < 0
        return output[0].masked_fill(is_none, 0.0), output[1] & ~is_none

    hooks = router.register_forward_pre_hook(give), router.register_forward_hook(drop)

    def end() -> None:
        for hook in hooks:
            hook.remove()
        replay.set_router_replay_action(before)

    return end
