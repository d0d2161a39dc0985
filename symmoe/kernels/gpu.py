"""Kernels for NVIDIA GPUs, in Triton and Gluon, with the names, arguments and meaning of the twins."""

from importlib import import_module
from typing import Any

from symmoe.kernels import twin

_MODULES = {
    "low_precision": "act_quantized products quantize wire",
    "triton": "activation bias gemm gemm_act nodes plan pointers replicas route router_products sync tokens",
}
_NAMES = [
    f"symmoe.kernels.{folder}.{name}"
    for folder, names in _MODULES.items()
    for name in names.split()
]
_KERNELS = {
    name: kernel
    for module in map(import_module, _NAMES)
    for name, kernel in vars(module).items()
    if name in twin.__all__ and kernel.__module__ == module.__name__
}
globals().update(_KERNELS)


def __getattr__(name: str) -> Any:
    """Kernels that only MXFP8 and NVFP4 need; imported on first use."""
    if name in ("swizzle_scales", "unswizzle_scales"):
        module = "symmoe.kernels.low_precision.block_scaled.scale_tiles"
        return globals().setdefault(name, getattr(import_module(module), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
