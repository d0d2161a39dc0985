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
    from symmoe.moe.config import MoEConfig
    from symmoe.moe.gradients import clip_grad_norm, reduce_gradients
    from symmoe.moe.grouped_mlp import GroupedMLP
    from symmoe.moe.layer import MoELayer, MoEMetrics
    from symmoe.moe.router import Router
    from symmoe.symm_mem.heap import SymmetricHeap
    from symmoe.symm_mem.lease import Lease

__version__ = "0.1.0"

_HOME = {
    "GroupedMLP": "symmoe.moe.grouped_mlp",
    "Lease": "symmoe.symm_mem.lease",
    "MoEConfig": "symmoe.moe.config",
    "MoELayer": "symmoe.moe.layer",
    "MoEMetrics": "symmoe.moe.layer",
    "Plan": "symmoe.dispatch.plan",
    "Router": "symmoe.moe.router",
    "SymmetricHeap": "symmoe.symm_mem.heap",
    "clip_grad_norm": "symmoe.moe.gradients",
    "combine_tokens": "symmoe.combine.tokens",
    "dispatch_tokens": "symmoe.dispatch.tokens",
    "make_plan": "symmoe.dispatch.plan",
    "reduce_gradients": "symmoe.moe.gradients",
}

__all__ = [
    "GroupedMLP",
    "Lease",
    "MoEConfig",
    "MoELayer",
    "MoEMetrics",
    "Plan",
    "Router",
    "SymmetricHeap",
    "clip_grad_norm",
    "combine_tokens",
    "dispatch_tokens",
    "make_plan",
    "reduce_gradients",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'symmoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
