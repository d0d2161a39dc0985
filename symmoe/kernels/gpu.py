"""Kernels for NVIDIA GPUs, in Triton and Gluon, with the names, arguments and meaning of the twins."""

from importlib import import_module

from symmoe.kernels import twin

_MODULES = {
    "low_precision": "act_quantized products quantize scale_tiles wire",
    "triton": "activation bias gemm gemm_act nodes plan pointers replicas route router_products sync tokens",
}
_NAMES = [
    f"symmoe.kernels.{room}.{name}" for room, names in _MODULES.items() for name in names.split()
]
_KERNELS = {
    name: each
    for module in map(import_module, _NAMES)
    for name, each in vars(module).items()
    if name in twin.__all__ and each.__module__ == module.__name__
}
globals().update(_KERNELS)
__all__ = sorted(_KERNELS)
