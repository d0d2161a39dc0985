"""Maps operators and kernels to phases of a step: one table for hosts and GPUs.

Operators are the functions of `symmoe.kernels`; kernels are their launches on a GPU, here without "_kernel". A
kernel that several operators launch is in the least specific phase: the range of its launch is more specific.
"""

from __future__ import annotations

# Phase: names of operators and kernels, of operators only, of kernels only. In the order of tables.
_TABLE = {
    "route": ("router_gemm choose_experts choose_experts_grad router_losses_grad", "router_gemm_grads router_losses",
              "bf16_parts router_dgrad router_wgrad router_loss router_loss_sums"),
    "plan": ("count_slots send_counts lay_out assign_rows post_report rail_rows publish_header own_counts other_counts"
             " plan_in_node place_replicas route_to_replicas", "", "assign_packed_rows"),
    "wait": ("barrier wait_for_signal count_exchange receive_fault_flags", "", ""),
    "push": ("push_rows place_rows push_slots send_signal take_rows", "", "hopper_push"),
    "replicas": ("push_replicas add_from_replicas", "", ""),
    "index": ("index_rows", "", ""),
    "fan-out": ("fan_out unpack_rows", "", "hopper_fan_out"),
    "FC1": ("grouped_gemm_act", "", "hopper_act"),
    "FC2": ("", "grouped_gemm", ""),
    "FC2 dgrad": ("grouped_gemm_dact", "sum_dact_partials", "hopper_dact sum_dscale"),
    "FC1 dgrad": ("", "grouped_gemm_dgrad", ""),
    "wgrad": ("grouped_gemm_wgrad", "grouped_gemm_wgrad_quantized",
              "grouped_gemm_wgrad_fp8 grouped_gemm_wgrad_scaled hopper_wgrad hopper_fp8_wgrad zero_matrices"),
    "GEMM": ("", "grouped_gemm_quantized",
             "grouped_gemm_fp8 grouped_gemm_scaled grouped_gemm hopper_gemm hopper_fp8_gemm"),
    "send sums": ("push_sums gather_values", "", "hopper_push_sums"),
    "sum at home": ("sum_home pull_rows pull_values", "", "hopper_sum_home"),
    "activation, bias": ("scaled_activation scaled_activation_grad grouped_bias_grad grouped_bias_dot sum_dbias",
                         "", ""),
    "quantize": ("dact_quantize decode_rows encode_rows group_amax quantize_columns quantize_rows quantize_weight_pairs"
                 " quantize_weights requantize_columns swizzle_scales unswizzle_scales weight_amax", "act_quantize",
                 "act_quantize_rows hopper_dact_quantize hopper_quantize_columns hopper_quantize_weight_pairs"),
    "splits, pointers": ("splits_to_row_range", "copy_host_to_device read_addresses", ""),
}  # fmt: skip
OTHER = "other"  # work outside the table: a loss, an optimizer
PHASES = (*_TABLE, OTHER)
# GEMMs of the experts: concurrent work is not exposed.
GEMMS = frozenset({"FC1", "FC2", "FC2 dgrad", "FC1 dgrad", "wgrad", "GEMM"})
# A layer's work due to experts on several ranks.
COMMUNICATION = frozenset(
    {"plan", "wait", "push", "replicas", "index", "fan-out", "send sums", "sum at home"}
)
BY_OPERATOR = {
    name: phase for phase, (both, only, _) in _TABLE.items() for name in f"{both} {only}".split()
}
BY_KERNEL = {
    f"{name}_kernel": phase
    for phase, (both, _, only) in _TABLE.items()
    for name in f"{both} {only}".split()
}
