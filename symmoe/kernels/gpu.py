"""Kernels for NVIDIA GPUs, in Triton and Gluon: they compute what kernels/contract says, same as the twins."""

from symmoe.kernels.contract import kernels_in
from symmoe.kernels.low_precision import act_quantized, products, quantize, scale_tiles, wire
from symmoe.kernels.triton import (
    activation,
    bias,
    gemm,
    gemm_act,
    nodes,
    plan,
    pointers,
    replicas,
    route,
    router_products,
    sync,
    tokens,
)

_KERNELS = {
    **kernels_in(act_quantized, products, quantize, scale_tiles, wire, activation, bias, gemm, gemm_act),
    **kernels_in(nodes, plan, pointers, replicas, route, router_products, sync, tokens),
}
globals().update(_KERNELS)
__all__ = sorted(_KERNELS)
