"""Device code and its pure-PyTorch twin, of the same names and signatures (docs/design.md, kernel contract)."""

from __future__ import annotations

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
