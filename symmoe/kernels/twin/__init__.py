"""PyTorch twins of the kernels in `gpu`: simple loops, for any device. kernels/contract says what they compute."""

from symmoe.kernels.contract import kernels_in
from symmoe.kernels.twin import (
    activation,
    gemm,
    nodes,
    plan,
    pointers,
    quantize,
    quantized_gemm,
    replicas,
    route,
    sync,
    tokens,
    wire,
)

_KERNELS = {
    **kernels_in(activation, gemm, nodes, plan, pointers, quantize, quantized_gemm),
    **kernels_in(replicas, route, sync, tokens, wire),
}
globals().update(_KERNELS)
__all__ = sorted(_KERNELS)
