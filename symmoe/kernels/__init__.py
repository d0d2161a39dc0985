"""Device code and its pure-PyTorch twin, of the same names and signatures (docs/design.md, kernel contract)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch


def for_device(device: torch.device) -> ModuleType:
    """The kernels for tensors on `device`: Triton on CUDA, the PyTorch twins elsewhere.

    The modules are imported on first use, so that `import symmoe` needs no Triton.
    """
    if device.type == "cuda":
        from symmoe.kernels import gpu

        return gpu
    from symmoe.kernels import twin

    return twin


def compiled_counter(device: torch.device) -> Callable[[], int]:
    """A function that says how many variants of the kernels for `device` this process has compiled so far, or found in
    a cache."""
    if device.type == "cuda":
        from symmoe.kernels.launch.launch import num_compiled

        return num_compiled
    return int  # PyTorch compiles nothing of the twins
