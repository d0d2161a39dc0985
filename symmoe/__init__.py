"""Expert-parallel Mixture-of-Experts for PyTorch training over symmetric memory.

Names and sub-packages are imported on first use, so that `import symmoe` is cheap and needs neither a GPU,
nor NVSHMEM, nor Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names as below; `as` marks them public
    from symmoe import dispatch as dispatch
    from symmoe import errors as errors
    from symmoe import grouped as grouped
    from symmoe import lora as lora
    from symmoe import metrics as metrics
    from symmoe import pointers as pointers
    from symmoe import precision as precision
    from symmoe import routing as routing
    from symmoe import symm_mem as symm_mem
    from symmoe import training as training
    from symmoe.dispatch.plan import make_plan as make_plan
    from symmoe.grouped.linear import GroupedLinear as GroupedLinear
    from symmoe.grouped.mlp import GroupedMLP as GroupedMLP
    from symmoe.kernels.activation import Activation as Activation
    from symmoe.moe.config import MoEConfig as MoEConfig
    from symmoe.moe.config import RouterConfig as RouterConfig
    from symmoe.moe.layer import MoELayer as MoELayer
    from symmoe.moe.layer import MoEMetrics as MoEMetrics
    from symmoe.moe.router import Router as Router
    from symmoe.symm_mem.heap import SymmetricHeap as SymmetricHeap
    from symmoe.tokens import combine_tokens as combine_tokens
    from symmoe.tokens import dispatch_tokens as dispatch_tokens
    from symmoe.training.captured_step import capture_step as capture_step
    from symmoe.training.gradients import reduce_gradients as reduce_gradients
    from symmoe.training.memory_plan import plan_memory as plan_memory
    from symmoe.training.parallel import parallelize as parallelize

__version__ = "0.1.0"  # the one place: pyproject.toml and `symmoe --version` read it

_PUBLIC = {  # by module
    "dispatch.plan": "make_plan",
    "grouped.linear": "GroupedLinear",
    "grouped.mlp": "GroupedMLP",
    "kernels.activation": "Activation",
    "moe.config": "MoEConfig RouterConfig",
    "moe.layer": "MoELayer MoEMetrics",
    "moe.router": "Router",
    "symm_mem.heap": "SymmetricHeap",
    "tokens": "combine_tokens dispatch_tokens",
    "training.captured_step": "capture_step",
    "training.gradients": "reduce_gradients",
    "training.memory_plan": "plan_memory",
    "training.parallel": "parallelize",
}
_PACKAGES = tuple(
    (
        "checkpoint dispatch errors grouped integrations lora metrics pointers precision routing "
        "symm_mem timeline training"
    ).split()
)
_HOME = {name: f"symmoe.{module}" for module, names in _PUBLIC.items() for name in names.split()}

__all__ = list(_HOME)


if not TYPE_CHECKING:  # with it, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in _HOME:
            return getattr(import_module(_HOME[name]), name)
        if name in _PACKAGES:
            return import_module(f"symmoe.{name}")
        raise AttributeError(f"module 'symmoe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES, "__version__"])
