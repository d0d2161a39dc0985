"""Expert-parallel Mixture-of-Experts for PyTorch training over symmetric memory.

Names are imported on first use, so that `import symmoe` is cheap and needs neither a GPU, nor NVSHMEM, nor Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from symmoe.dispatch.plan import Plan, make_plan
    from symmoe.grouped.activations import (
        ScaledActivation,
        ScaledClampedSwiGLU,
        ScaledSReLU,
        ScaledSwiGLU,
        deinterleave_gate_up,
        interleave_gate_up,
    )
    from symmoe.grouped.constant_weights import constant_weights
    from symmoe.grouped.linear import GroupedLinear
    from symmoe.grouped.mlp import GroupedMLP
    from symmoe.grouped.pointers import copy_data_ptrs_to_device, copy_host_to_device, pack_weight_ptrs
    from symmoe.grouped.sequential import Sequential
    from symmoe.kernels.activation import Activation
    from symmoe.moe.config import MoEConfig
    from symmoe.moe.ddp_and_fsdp import prepare_for_ddp
    from symmoe.moe.expert_bias import balance_after, balance_step
    from symmoe.moe.layer import MoELayer, MoEMetrics
    from symmoe.moe.router import Router
    from symmoe.symm_mem.heap import SymmetricHeap
    from symmoe.symm_mem.memory import Lease
    from symmoe.tokens import combine_tokens, dispatch_tokens
    from symmoe.training.captured_step import CapturedStep, capture_step
    from symmoe.training.gradients import broadcast_parameters, clip_grad_norm, reduce_gradients
    from symmoe.training.lora import add_lora, merge_lora, unmerge_lora
    from symmoe.training.memory_plan import MemoryPlan, plan_memory
    from symmoe.training.metrics import LayerRecord, MetricsLogger, tensorboard_sink
    from symmoe.training.precision_choice import choose_precision
    from symmoe.training.replay import balanced_routing, record_routing, replay_routing

__version__ = "0.1.0"  # the one place: pyproject.toml and `symmoe --version` read it

_HOME = {
    "Activation": "symmoe.kernels.activation",
    "CapturedStep": "symmoe.training.captured_step",
    "GroupedLinear": "symmoe.grouped.linear",
    "GroupedMLP": "symmoe.grouped.mlp",
    "LayerRecord": "symmoe.training.metrics",
    "Lease": "symmoe.symm_mem.memory",
    "MemoryPlan": "symmoe.training.memory_plan",
    "MetricsLogger": "symmoe.training.metrics",
    "MoEConfig": "symmoe.moe.config",
    "MoELayer": "symmoe.moe.layer",
    "MoEMetrics": "symmoe.moe.layer",
    "Plan": "symmoe.dispatch.plan",
    "Router": "symmoe.moe.router",
    "ScaledActivation": "symmoe.grouped.activations",
    "ScaledClampedSwiGLU": "symmoe.grouped.activations",
    "ScaledSReLU": "symmoe.grouped.activations",
    "ScaledSwiGLU": "symmoe.grouped.activations",
    "Sequential": "symmoe.grouped.sequential",
    "SymmetricHeap": "symmoe.symm_mem.heap",
    "add_lora": "symmoe.training.lora",
    "balance_after": "symmoe.moe.expert_bias",
    "balance_step": "symmoe.moe.expert_bias",
    "balanced_routing": "symmoe.training.replay",
    "broadcast_parameters": "symmoe.training.gradients",
    "capture_step": "symmoe.training.captured_step",
    "choose_precision": "symmoe.training.precision_choice",
    "clip_grad_norm": "symmoe.training.gradients",
    "combine_tokens": "symmoe.tokens",
    "constant_weights": "symmoe.grouped.constant_weights",
    "copy_data_ptrs_to_device": "symmoe.grouped.pointers",
    "copy_host_to_device": "symmoe.grouped.pointers",
    "deinterleave_gate_up": "symmoe.grouped.activations",
    "dispatch_tokens": "symmoe.tokens",
    "interleave_gate_up": "symmoe.grouped.activations",
    "make_plan": "symmoe.dispatch.plan",
    "merge_lora": "symmoe.training.lora",
    "pack_weight_ptrs": "symmoe.grouped.pointers",
    "plan_memory": "symmoe.training.memory_plan",
    "prepare_for_ddp": "symmoe.moe.ddp_and_fsdp",
    "record_routing": "symmoe.training.replay",
    "reduce_gradients": "symmoe.training.gradients",
    "replay_routing": "symmoe.training.replay",
    "tensorboard_sink": "symmoe.training.metrics",
    "unmerge_lora": "symmoe.training.lora",
}

__all__ = [
    "Activation",
    "CapturedStep",
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
    "broadcast_parameters",
    "capture_step",
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
    "tensorboard_sink",
    "unmerge_lora",
]


if not TYPE_CHECKING:  # to a type checker it would mean that there is every name

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            return getattr(import_module(_HOME[name]), name)
        raise AttributeError(f"module 'symmoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
