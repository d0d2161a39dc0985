"""Megatron-Core on CPUs, for tests; the shim is the one that the example uses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def install() -> None:
    """Makes megatron.core run on CPUs in this process; nothing where torch sees a GPU."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import megatron_cpu

    megatron_cpu.install()


class CudaIsCpu(TorchFunctionMode):
    """Within it, tensors that Megatron's schedules make on "cuda" are made on the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda" and not torch.cuda.is_available():
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)
