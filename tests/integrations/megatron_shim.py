"""Megatron-Core on CPUs, for tests; the shim is the one that the example uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from example_runs import module_of
from torch.overrides import TorchFunctionMode


def install() -> None:
    """Makes megatron.core run on CPUs in this process; nothing where torch sees a GPU."""
    module_of("megatron_cpu").install()


class CudaIsCpu(TorchFunctionMode):
    """Within it, tensors that Megatron's schedules make on "cuda" are made on the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda" and not torch.cuda.is_available():
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)
