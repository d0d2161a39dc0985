"""Which phase of a step an operator or a kernel belongs to: one table for hosts and GPUs.

Operators are the functions of `symmoe.kernels`, kernels what they launch on a GPU, by the names that a profiler shows,
here without their "_kernel". A kernel that several operators launch is in the least specific phase: the range of its
launch is more specific.
"""

from __future__ import annotations

# Phase: operators, kernels. In the order of tables.
_TABLE = {
    "route": (
        "router_gemm router_gemm_grads choose_experts choose_experts_grad",
        "bf16_parts router_gemm router_dgrad router_wgrad choose_experts choose_experts_grad",
    ),
    "plan": (
        "count_slots send_counts lay_out split_by_source assign_rows assign_packed_rows",
        "count_slots send_counts lay_out split_by_source assign_rows assign_packed_rows",
    ),
    "wait": ("barrier wait_for_signal", "barrier wait_for_signal"),
    "push": (
        "push_rows place_rows push_slots send_signal",
        "push_rows hopper_push place_rows push_slots send_signal",
    ),
    "index": ("index_rows", "index_rows"),
    "fan-out": ("fan_out unpack_rows", "fan_out hopper_fan_out unpack_rows"),
    "FC1": ("grouped_gemm_act", "grouped_gemm_act hopper_act"),
    "FC2": ("grouped_gemm", ""),
    "FC2 dgrad": ("grouped_gemm_dact sum_dact_partials", "grouped_gemm_dact hopper_dact sum_dscale"),
    "FC1 dgrad": ("grouped_gemm_dgrad", ""),
    "wgrad": (
        "grouped_gemm_wgrad grouped_gemm_wgrad_quantized",
        "grouped_gemm_wgrad hopper_wgrad zero_matrices grouped_gemm_wgrad_fp8 hopper_fp8_wgrad "
        "grouped_gemm_wgrad_scaled",
    ),
    "GEMM": (
        "grouped_gemm_quantized",
        "grouped_gemm hopper_gemm grouped_gemm_fp8 hopper_fp8_gemm grouped_gemm_scaled",
    ),
    "send sums": ("push_sums gather_values", "push_sums hopper_push_sums gather_values"),
    "sum at home": ("sum_home pull_rows pull_values", "sum_home hopper_sum_home pull_rows pull_values"),
    "activation, bias": (
        "scaled_activation scaled_activation_grad grouped_bias_grad grouped_bias_dot sum_dbias",
        "scaled_activation scaled_activation_grad grouped_bias_grad grouped_bias_dot sum_dbias",
    ),
    "quantize": (
        "act_quantize dact_quantize decode_rows encode_rows group_amax quantize_columns quantize_rows "
        "quantize_weight_pairs quantize_weights requantize_columns swizzle_scales unswizzle_scales weight_amax",
        "act_quantize_rows dact_quantize decode_rows encode_rows group_amax hopper_dact_quantize "
        "hopper_quantize_columns hopper_quantize_weight_pairs hopper_requantize_columns quantize_columns quantize_rows "
        "quantize_weight_pairs quantize_weights requantize_columns swizzle_scales unswizzle_scales weight_amax",
    ),
    "splits, pointers": ("splits_to_row_range copy_host_to_device read_addresses", "splits_to_row_range"),
}
OTHER = "other"  # work that is in no table: a loss, an optimizer
PHASES = (*_TABLE, OTHER)
# Products of the experts: what runs at the same time is not exposed.
GEMMS = frozenset({"FC1", "FC2", "FC2 dgrad", "FC1 dgrad", "wgrad", "GEMM"})
# What a layer does because its experts are on several ranks.
COMMUNICATION = frozenset({"plan", "wait", "push", "index", "fan-out", "send sums", "sum at home"})
BY_OPERATOR = {name: phase for phase, (operators, _) in _TABLE.items() for name in operators.split()}
BY_KERNEL = {f"{name}_kernel": phase for phase, (_, kernels) in _TABLE.items() for name in kernels.split()}
