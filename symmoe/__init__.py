"""Expert-parallel Mixture-of-Experts for PyTorch training over symmetric memory.

Names are imported on first use, so that `import symmoe` is cheap and needs neither a GPU, nor NVSHMEM, nor Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from symmoe.combine.tokens import combine_tokens
    from symmoe.dispatch.plan import Plan, make_plan
    from symmoe.dispatch.tokens import dispatch_tokens
    from symmoe.moe.activations import (
        ScaledActivation,
        ScaledClampedSwiGLU,
        ScaledSReLU,
        ScaledSwiGLU,
        deinterleave_gate_up,
        interleave_gate_up,
    )
    from symmoe.moe.bias import balance_after, balance_step
    from symmoe.moe.config import MoEConfig
    from symmoe.moe.constant_weights import constant_weights
    from symmoe.moe.gradients import clip_grad_norm, reduce_gradients
    from symmoe.moe.grouped_linear import GroupedLinear
    from symmoe.moe.grouped_mlp import GroupedMLP
    from symmoe.moe.layer import MoELayer, MoEMetrics
    from symmoe.moe.lora import add_lora, merge_lora, unmerge_lora
    from symmoe.moe.memory import MemoryPlan, plan_memory
    from symmoe.moe.metrics import LayerRecord, MetricsLogger
    from symmoe.moe.pointers import copy_data_ptrs_to_device, copy_host_to_device, pack_weight_ptrs
    from symmoe.moe.precision_choice import choose_precision
    from symmoe.moe.replay import balanced_routing, record_routing, replay_routing
    from symmoe.moe.router import Router
    from symmoe.moe.sequential import Sequential
    from symmoe.moe.wrappers import prepare_for_ddp
    from symmoe.symm_mem.heap import SymmetricHeap
    from symmoe.symm_mem.lease import Lease

__version__ = "0.1.0"  # the one place: pyproject.toml and `symmoe --version` read it

_HOME = {
    "GroupedLinear": "symmoe.moe.grouped_linear",
    "GroupedMLP": "symmoe.moe.grouped_mlp",
    "LayerRecord": "symmoe.moe.metrics",
    "Lease": "symmoe.symm_mem.lease",
    "MemoryPlan": "symmoe.moe.memory",
    "MetricsLogger": "symmoe.moe.metrics",
    "MoEConfig": "symmoe.moe.config",
    "MoELayer": "symmoe.moe.layer",
    "MoEMetrics": "symmoe.moe.layer",
    "Plan": "symmoe.dispatch.plan",
    "Router": "symmoe.moe.router",
    "ScaledActivation": "symmoe.moe.activations",
    "ScaledClampedSwiGLU": "symmoe.moe.activations",
    "ScaledSReLU": "symmoe.moe.activations",
    "ScaledSwiGLU": "symmoe.moe.activations",
    "Sequential": "symmoe.moe.sequential",
    "SymmetricHeap": "symmoe.symm_mem.heap",
    "add_lora": "symmoe.moe.lora",
    "balance_after": "symmoe.moe.bias",
    "balance_step": "symmoe.moe.bias",
    "balanced_routing": "symmoe.moe.replay",
    "choose_precision": "symmoe.moe.precision_choice",
    "clip_grad_norm": "symmoe.moe.gradients",
    "combine_tokens": "symmoe.combine.tokens",
    "constant_weights": "symmoe.moe.constant_weights",
    "copy_data_ptrs_to_device": "symmoe.moe.pointers",
    "copy_host_to_device": "symmoe.moe.pointers",
    "deinterleave_gate_up": "symmoe.moe.activations",
    "dispatch_tokens": "symmoe.dispatch.tokens",
    "interleave_gate_up": "symmoe.moe.activations",
    "make_plan": "symmoe.dispatch.plan",
    "merge_lora": "symmoe.moe.lora",
    "pack_weight_ptrs": "symmoe.moe.pointers",
    "plan_memory": "symmoe.moe.memory",
    "prepare_for_ddp": "symmoe.moe.wrappers",
    "record_routing": "symmoe.moe.replay",
    "reduce_gradients": "symmoe.moe.gradients",
    "replay_routing": "symmoe.moe.replay",
    "unmerge_lora": "symmoe.moe.lora",
}

__all__ = [
    "GroupedLinear",
    "GroupedMLP",
    "LayerRecord",
    "Lease",
    "MemoryPlan",
    "MetricsLogger",
    "MoEConfig",
    "MoELayer",
    "MoEMetrics",
    "Plan",
    "Router",
    "ScaledActivation",
    "ScaledClampedSwiGLU",
    "ScaledSReLU",
    "ScaledSwiGLU",
    "Sequential",
    "SymmetricHeap",
    "add_lora",
    "balance_after",
    "balance_step",
    "balanced_routing",
    "choose_precision",
    "clip_grad_norm",
    "combine_tokens",
    "constant_weights",
    "copy_data_ptrs_to_device",
    "copy_host_to_device",
    "deinterleave_gate_up",
    "dispatch_tokens",
    "interleave_gate_up",
    "make_plan",
    "merge_lora",
    "pack_weight_ptrs",
    "plan_memory",
    "prepare_for_ddp",
    "record_routing",
    "reduce_gradients",
    "replay_routing",
    "unmerge_lora",
]


if not TYPE_CHECKING:  # to a type checker it would mean that there is every name

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            return getattr(import_module(_HOME[name]), name)
        raise AttributeError(f"module 'symmoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
