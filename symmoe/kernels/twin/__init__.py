"""PyTorch twins of the kernels in `gpu`: simple loops, for any device. kernels/contract says what they compute."""

# mypy: implicit-reexport
# ruff: noqa: F401
from typing import TYPE_CHECKING

from symmoe.kernels.twin.act_quantized import act_quantize, dact_quantize
from symmoe.kernels.twin.activation import scaled_activation, scaled_activation_grad
from symmoe.kernels.twin.gemm import (
    dact_workspace_numel,
    grouped_bias_dot,
    grouped_bias_grad,
    grouped_gemm,
    grouped_gemm_act,
    grouped_gemm_dact,
    grouped_gemm_dgrad,
    grouped_gemm_wgrad,
    sum_dact_partials,
    sum_dbias,
)
from symmoe.kernels.twin.plan import assign_packed_rows, assign_rows, count_slots, lay_out, send_counts, split_by_source
from symmoe.kernels.twin.pointers import copy_host_to_device, read_addresses
from symmoe.kernels.twin.quantize import (
    group_amax,
    quantize_columns,
    quantize_rows,
    quantize_weight_pairs,
    quantize_weights,
    swizzle_scales,
    unswizzle_scales,
    weight_amax,
)
from symmoe.kernels.twin.quantized_gemm import grouped_gemm_quantized, grouped_gemm_wgrad_quantized
from symmoe.kernels.twin.route import choose_experts, choose_experts_grad, router_gemm, router_gemm_grads
from symmoe.kernels.twin.splits import splits_to_row_range
from symmoe.kernels.twin.sync import barrier, send_signal, wait_for_signal
from symmoe.kernels.twin.tokens import (
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
from symmoe.kernels.twin.wire import decode_rows, encode_rows, requantize_columns, unpack_rows

if not TYPE_CHECKING:  # its checker takes literals only, and compares the names with the contract
    __all__ = sorted(name for name, each in globals().items() if callable(each))
