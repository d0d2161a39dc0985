"""PyTorch twins of the kernels in `gpu`: simple loops, for any device. kernels/contract says what they compute."""

from importlib import import_module

from symmoe.kernels.contract import kernels_in

_MODULES = (
    "activation gemm nodes plan pointers quantize quantized_gemm replicas route sync tokens wire"
)
_KERNELS = kernels_in(*(import_module(f"{__name__}.{name}") for name in _MODULES.split()))
globals().update(_KERNELS)
__all__ = sorted(_KERNELS)
