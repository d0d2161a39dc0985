"""Which phase of a step an operator or a kernel belongs to: one table for hosts and GPUs.

Operators are the functions of `symmoe.kernels`, kernels what they launch on a GPU, by the names that a profiler shows.
"""

from __future__ import annotations

from dataclasses import dataclass

from symmoe.tools.picture import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, YELLOW


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """One kind of work.

    Attributes:
        name: the name in tables and pictures.
        color: the color in pictures.
        operators, kernels: those that do it.
        is_gemm: whether it is a product of the experts. What runs at the same time is not exposed.
        is_communication: what a layer does because its experts are on several ranks.
    """

    name: str
    color: str
    operators: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    is_gemm: bool = False
    is_communication: bool = False


OTHER = Phase(name="other", color="#cccccc")  # work that is in no table: a loss, an optimizer

# A kernel that several operators launch is in the least specific phase: the range of its launch is more specific.
PHASES = (
    Phase(
        name="route",
        color=GREY,
        operators=("router_gemm", "router_gemm_grads", "choose_experts", "choose_experts_grad"),
        kernels=(
            "bf16_parts_kernel",
            "router_gemm_kernel",
            "router_dgrad_kernel",
            "router_wgrad_kernel",
            "choose_experts_kernel",
            "choose_experts_grad_kernel",
        ),
    ),
    Phase(
        name="plan",
        color=GREEN,
        operators=("count_slots", "send_counts", "lay_out", "split_by_source", "assign_rows", "assign_packed_rows"),
        kernels=(
            "count_slots_kernel",
            "send_counts_kernel",
            "lay_out_kernel",
            "split_by_source_kernel",
            "assign_rows_kernel",
            "assign_packed_rows_kernel",
        ),
        is_communication=True,
    ),
    Phase(
        name="wait",
        color=BLACK,
        operators=("barrier", "wait_for_signal"),
        kernels=("barrier_kernel", "wait_for_signal_kernel"),
        is_communication=True,
    ),
    Phase(
        name="push",
        color=ORANGE,
        operators=("push_rows", "place_rows", "push_slots", "send_signal"),
        kernels=(
            "push_rows_kernel",
            "hopper_push_kernel",
            "place_rows_kernel",
            "push_slots_kernel",
            "send_signal_kernel",
        ),
        is_communication=True,
    ),
    Phase(
        name="index",
        color="#f5d6a0",
        operators=("index_rows",),
        kernels=("index_rows_kernel",),
        is_communication=True,
    ),
    Phase(
        name="fan-out",
        color=YELLOW,
        operators=("fan_out", "unpack_rows"),
        kernels=("fan_out_kernel", "hopper_fan_out_kernel", "unpack_rows_kernel"),
        is_communication=True,
    ),
    Phase(
        name="FC1",
        color=BLUE,
        operators=("grouped_gemm_act",),
        kernels=("grouped_gemm_act_kernel", "hopper_act_kernel"),
        is_gemm=True,
    ),
    Phase(name="FC2", color=BLUE, operators=("grouped_gemm",), is_gemm=True),
    Phase(
        name="FC2 dgrad",
        color=BLUE,
        operators=("grouped_gemm_dact", "sum_dact_partials"),
        kernels=("grouped_gemm_dact_kernel", "hopper_dact_kernel", "sum_dscale_kernel"),
        is_gemm=True,
    ),
    Phase(name="FC1 dgrad", color=BLUE, operators=("grouped_gemm_dgrad",), is_gemm=True),
    Phase(
        name="wgrad",
        color=SKY,
        operators=("grouped_gemm_wgrad", "grouped_gemm_wgrad_fp8", "grouped_gemm_wgrad_scaled"),
        kernels=(
            "grouped_gemm_wgrad_kernel",
            "hopper_wgrad_kernel",
            "zero_matrices_kernel",
            "grouped_gemm_wgrad_fp8_kernel",
            "hopper_fp8_wgrad_kernel",
            "grouped_gemm_wgrad_scaled_kernel",
        ),
        is_gemm=True,
    ),
    Phase(
        name="GEMM",
        color=BLUE,
        operators=("grouped_gemm_fp8", "grouped_gemm_scaled"),
        kernels=(
            "grouped_gemm_kernel",
            "hopper_gemm_kernel",
            "grouped_gemm_fp8_kernel",
            "hopper_fp8_gemm_kernel",
            "grouped_gemm_scaled_kernel",
        ),
        is_gemm=True,
    ),
    Phase(
        name="send sums",
        color=PURPLE,
        operators=("push_sums", "gather_values"),
        kernels=("push_sums_kernel", "hopper_push_sums_kernel", "gather_values_kernel"),
        is_communication=True,
    ),
    Phase(
        name="sum at home",
        color=VERMILION,
        operators=("sum_home", "pull_rows", "pull_values"),
        kernels=("sum_home_kernel", "hopper_sum_home_kernel", "pull_rows_kernel", "pull_values_kernel"),
        is_communication=True,
    ),
    Phase(
        name="activation, bias",
        color=GREY,
        operators=("scaled_activation", "scaled_activation_grad", "grouped_bias_grad", "grouped_bias_dot", "sum_dbias"),
        kernels=(
            "scaled_activation_kernel",
            "scaled_activation_grad_kernel",
            "grouped_bias_grad_kernel",
            "grouped_bias_dot_kernel",
            "sum_dbias_kernel",
        ),
    ),
    Phase(
        name="quantize",
        color=GREY,
        operators=(
            "act_quantize",
            "dact_quantize",
            "decode_rows",
            "encode_rows",
            "group_amax",
            "quantize_columns",
            "quantize_rows",
            "quantize_weight_pairs",
            "quantize_weights",
            "requantize_columns",
            "swizzle_scales",
            "unswizzle_scales",
            "weight_amax",
        ),
        kernels=(
            "act_quantize_columns_kernel",
            "act_quantize_rows_kernel",
            "dact_quantize_kernel",
            "decode_rows_kernel",
            "encode_rows_kernel",
            "group_amax_kernel",
            "hopper_dact_quantize_kernel",
            "hopper_quantize_columns_kernel",
            "hopper_quantize_weight_pairs_kernel",
            "hopper_requantize_columns_kernel",
            "quantize_columns_kernel",
            "quantize_rows_kernel",
            "quantize_weight_pairs_kernel",
            "quantize_weights_kernel",
            "requantize_columns_kernel",
            "swizzle_scales_kernel",
            "unswizzle_scales_kernel",
            "weight_amax_kernel",
        ),
    ),
    Phase(
        name="splits, pointers",
        color=GREY,
        operators=("splits_to_row_range", "copy_host_to_device", "read_addresses"),
        kernels=("splits_to_row_range_kernel",),
    ),
    OTHER,
)

BY_NAME = {phase.name: phase for phase in PHASES}
BY_OPERATOR = {operator: phase for phase in PHASES for operator in phase.operators}
BY_KERNEL = {kernel: phase for phase in PHASES for kernel in phase.kernels}
