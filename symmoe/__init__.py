"""Expert-parallel Mixture-of-Experts for PyTorch training over symmetric memory.

Names and the packages beside them are imported on first use, so that `import symmoe` is cheap and needs neither a GPU,
nor NVSHMEM, nor Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names as below; `as` says that they are public
    from symmoe.dispatch.plan import Plan as Plan
    from symmoe.dispatch.plan import make_plan as make_plan
    from symmoe.grouped.activations import ScaledActivation as ScaledActivation
    from symmoe.grouped.activations import ScaledClampedSwiGLU as ScaledClampedSwiGLU
    from symmoe.grouped.activations import ScaledSReLU as ScaledSReLU
    from symmoe.grouped.activations import ScaledSwiGLU as ScaledSwiGLU
    from symmoe.grouped.activations import deinterleave_gate_up as deinterleave_gate_up
    from symmoe.grouped.activations import interleave_gate_up as interleave_gate_up
    from symmoe.grouped.linear import GroupedLinear as GroupedLinear
    from symmoe.grouped.linear import constant_weights as constant_weights
    from symmoe.grouped.mlp import GroupedMLP as GroupedMLP
    from symmoe.grouped.pointers import copy_data_ptrs_to_device as copy_data_ptrs_to_device
    from symmoe.grouped.pointers import copy_host_to_device as copy_host_to_device
    from symmoe.grouped.pointers import pack_weight_ptrs as pack_weight_ptrs
    from symmoe.grouped.sequential import Sequential as Sequential
    from symmoe.kernels.activation import Activation as Activation
    from symmoe.kernels.launches import record_launches as record_launches
    from symmoe.moe.balance import balance_after as balance_after
    from symmoe.moe.balance import balance_step as balance_step
    from symmoe.moe.config import MoEConfig as MoEConfig
    from symmoe.moe.config import RouterConfig as RouterConfig
    from symmoe.moe.ddp_and_fsdp import prepare_for_ddp as prepare_for_ddp
    from symmoe.moe.layer import MoELayer as MoELayer
    from symmoe.moe.layer import MoEMetrics as MoEMetrics
    from symmoe.moe.router import Router as Router
    from symmoe.symm_mem.heap import SymmetricHeap as SymmetricHeap
    from symmoe.symm_mem.memory import Lease as Lease
    from symmoe.tokens import combine_tokens as combine_tokens
    from symmoe.tokens import dispatch_tokens as dispatch_tokens
    from symmoe.training.captured_step import CapturedStep as CapturedStep
    from symmoe.training.captured_step import capture_step as capture_step
    from symmoe.training.first_step import check_first_step as check_first_step
    from symmoe.training.gradients import broadcast_parameters as broadcast_parameters
    from symmoe.training.gradients import clip_grad_norm as clip_grad_norm
    from symmoe.training.gradients import reduce_gradients as reduce_gradients
    from symmoe.training.lora import add_lora as add_lora
    from symmoe.training.lora import merge_lora as merge_lora
    from symmoe.training.lora import unmerge_lora as unmerge_lora
    from symmoe.training.memory_plan import MemoryPlan as MemoryPlan
    from symmoe.training.memory_plan import plan_memory as plan_memory
    from symmoe.training.metrics import LayerRecord as LayerRecord
    from symmoe.training.metrics import MetricsLogger as MetricsLogger
    from symmoe.training.metrics import tensorboard_sink as tensorboard_sink
    from symmoe.training.precision_choice import choose_precision as choose_precision
    from symmoe.training.replay import balanced_routing as balanced_routing
    from symmoe.training.replay import record_routing as record_routing
    from symmoe.training.replay import replay_routing as replay_routing
    from symmoe.training.replay import routing_from_array as routing_from_array
    from symmoe.training.replay import routing_to_array as routing_to_array

__version__ = "0.1.0"  # the one place: pyproject.toml and `symmoe --version` read it

_PUBLIC = {  # by the module that has them
    "dispatch.plan": "Plan make_plan",
    "grouped.activations": "ScaledActivation ScaledClampedSwiGLU ScaledSReLU ScaledSwiGLU "
    "deinterleave_gate_up interleave_gate_up",
    "grouped.linear": "GroupedLinear constant_weights",
    "grouped.mlp": "GroupedMLP",
    "grouped.pointers": "copy_data_ptrs_to_device copy_host_to_device pack_weight_ptrs",
    "grouped.sequential": "Sequential",
    "kernels.activation": "Activation",
    "kernels.launches": "record_launches",
    "moe.config": "MoEConfig RouterConfig",
    "moe.ddp_and_fsdp": "prepare_for_ddp",
    "moe.balance": "balance_after balance_step",
    "moe.layer": "MoELayer MoEMetrics",
    "moe.router": "Router",
    "symm_mem.heap": "SymmetricHeap",
    "symm_mem.memory": "Lease",
    "tokens": "combine_tokens dispatch_tokens",
    "training.captured_step": "CapturedStep capture_step",
    "training.first_step": "check_first_step",
    "training.gradients": "broadcast_parameters clip_grad_norm reduce_gradients",
    "training.lora": "add_lora merge_lora unmerge_lora",
    "training.memory_plan": "MemoryPlan plan_memory",
    "training.metrics": "LayerRecord MetricsLogger tensorboard_sink",
    "training.precision_choice": "choose_precision",
    "training.replay": "balanced_routing record_routing replay_routing routing_from_array routing_to_array",
}
_PACKAGES = ("checkpoint", "errors", "integrations", "precision", "timeline")
_HOME = {name: f"symmoe.{module}" for module, names in _PUBLIC.items() for name in names.split()}

__all__ = list(_HOME)


if not TYPE_CHECKING:  # to a type checker it would mean that there is every name

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            return getattr(import_module(_HOME[name]), name)
        if name in _PACKAGES:
            return import_module(f"symmoe.{name}")
        raise AttributeError(f"module 'symmoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES, "__version__"])
