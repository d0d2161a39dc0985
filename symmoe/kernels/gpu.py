"""Kernels for NVIDIA GPUs, in Triton and Gluon: they compute what kernels/contract says, same as the twins."""

# mypy: implicit-reexport
# ruff: noqa: F401
from typing import TYPE_CHECKING

from symmoe.kernels.low_precision.act_quantized import act_quantize, dact_quantize
from symmoe.kernels.low_precision.products import grouped_gemm_quantized, grouped_gemm_wgrad_quantized
from symmoe.kernels.low_precision.quantize import (
    group_amax,
    quantize_columns,
    quantize_rows,
    quantize_weight_pairs,
    quantize_weights,
    weight_amax,
)
from symmoe.kernels.low_precision.scale_tiles import swizzle_scales, unswizzle_scales
from symmoe.kernels.low_precision.wire import decode_rows, encode_rows, requantize_columns, unpack_rows
from symmoe.kernels.triton.activation import scaled_activation, scaled_activation_grad
from symmoe.kernels.triton.bias import grouped_bias_dot, grouped_bias_grad, sum_dbias
from symmoe.kernels.triton.gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad
from symmoe.kernels.triton.gemm_act import dact_workspace_numel, grouped_gemm_act, grouped_gemm_dact, sum_dact_partials
from symmoe.kernels.triton.plan import (
    assign_packed_rows,
    assign_rows,
    count_slots,
    lay_out,
    send_counts,
    split_by_source,
)
from symmoe.kernels.triton.pointers import copy_host_to_device, read_addresses
from symmoe.kernels.triton.route import choose_experts, choose_experts_grad
from symmoe.kernels.triton.router_products import router_gemm, router_gemm_grads
from symmoe.kernels.triton.splits import splits_to_row_range
from symmoe.kernels.triton.sync import barrier, send_signal, wait_for_signal
from symmoe.kernels.triton.tokens import (
    fan_out,
    gather_values,
    index_rows,
    place_rows,
    pull_rows,
    pull_values,
    push_rows,
    push_slots,
    push_sums,
    sum_home,
)

if not TYPE_CHECKING:  # its checker takes literals only, and compares the names with the contract
    __all__ = sorted(name for name, each in globals().items() if callable(each))
