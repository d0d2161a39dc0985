"""PyTorch twins of the kernels in `gpu`: simple loops, for any device. kernels/contract says what they compute."""

from symmoe.kernels.contract import kernels_in
from symmoe.kernels.twin import (
    act_quantized,
    activation,
    gemm,
    nodes,
    plan,
    pointers,
    quantize,
    quantized_gemm,
    route,
    splits,
    sync,
    tokens,
    wire,
)

_KERNELS = kernels_in(
    act_quantized, activation, gemm, nodes, plan, pointers, quantize, quantized_gemm, route, splits, sync, tokens, wire
)
globals().update(_KERNELS)
__all__ = sorted(_KERNELS)
