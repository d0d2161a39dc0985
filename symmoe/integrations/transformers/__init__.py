"""Expert parallelism for Hugging Face transformers' MoE models.

H hidden, I ffn, E experts in all, e experts on this rank, K experts per token, T tokens, R ranks.

Only `from_pretrained`, `register` and `Trainer` import transformers, on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from symmoe.integrations.transformers.checkpoint import load_checkpoint, save_checkpoint
from symmoe.integrations.transformers.experts import ExpertParallelExperts, StepConfig
from symmoe.integrations.transformers.swap import swap_moe

if TYPE_CHECKING:
    from symmoe.integrations.transformers.pretrained import from_pretrained
    from symmoe.integrations.transformers.registry import register
    from symmoe.integrations.transformers.trainer import Trainer

_HOME = {"Trainer": "trainer", "from_pretrained": "pretrained", "register": "registry"}

__all__ = [
    "ExpertParallelExperts",
    "StepConfig",
    "Trainer",
    "from_pretrained",
    "load_checkpoint",
    "register",
    "save_checkpoint",
    "swap_moe",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
