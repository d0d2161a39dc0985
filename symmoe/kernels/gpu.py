"""Kernels for NVIDIA GPUs, in Triton and Gluon: they compute what kernels/contract says, same as the twins."""

from importlib import import_module

from symmoe.kernels.contract import kernels_in

_MODULES = {
    "low_precision": "act_quantized products quantize scale_tiles wire",
    "triton": "activation bias gemm gemm_act nodes plan pointers replicas route router_products sync tokens",
}
_NAMES = [
    f"symmoe.kernels.{room}.{name}" for room, names in _MODULES.items() for name in names.split()
]
_KERNELS = kernels_in(*map(import_module, _NAMES))
globals().update(_KERNELS)
__all__ = sorted(_KERNELS)
