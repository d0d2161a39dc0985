"""The two halves of a layer call that are not the router's: the plan, and what is done by it."""

from __future__ import annotations

import torch

from symmoe.dispatch.plan import Plan, make_plan
from symmoe.grouped.local_experts import local_experts
from symmoe.grouped.mlp import GroupedMLP
from symmoe.moe.config import MoEConfig
from symmoe.moe.ep_step import expert_parallel_mlp
from symmoe.symm_mem.heap import SymmetricHeap


def plan_step(config: MoEConfig, heap: SymmetricHeap, topk_idx: torch.Tensor, dtype: torch.dtype) -> Plan:
    """make_plan for tokens of `dtype`, as the configuration says. Collective."""
    return make_plan(
        topk_idx,
        num_experts=config.num_experts,
        heap=heap,
        capacity=config.capacity,
        overflow=config.overflow,
        max_tokens=config.max_tokens,
        hidden=config.hidden,
        dtype=dtype,
        precision=config.precision,
        quantized_wire=config.quantized_wire,
    )


def apply_experts(
    config: MoEConfig,
    tokens: torch.Tensor,
    probs: torch.Tensor,
    experts: GroupedMLP,
    plan: Plan,
    out_shape: torch.Size | None = None,
) -> torch.Tensor:
    """expert_parallel_mlp, as the configuration says. Collective, forward and backward."""
    return expert_parallel_mlp(
        tokens,
        probs,
        local_experts(experts),
        plan,
        order=config.order,
        stash=config.stash,
        layout=config.received_layout,
        schedule=config.schedule,
        quantized_wire=config.quantized_wire,
        out_shape=out_shape,
    )
