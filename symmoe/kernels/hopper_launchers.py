"""The kernels for Hopper by name: the launcher of each, and its condition on the operands of a call."""

import torch

from symmoe.kernels.hopper.act import launch_act, launch_dact, takes_act
from symmoe.kernels.hopper.gemm import launch_gemm
from symmoe.kernels.hopper.pipeline import MAX_ROWS
from symmoe.kernels.hopper.rows import (
    launch_fan_out,
    launch_push,
    launch_push_sums,
    launch_sum_home,
    takes_rows,
)
from symmoe.kernels.hopper.wgrad import launch_wgrad
from symmoe.kernels.low_precision import hopper_columns
from symmoe.kernels.low_precision.hopper_dact_quantize import (
    launch_dact_quantize,
    takes_dact_quantize,
)
from symmoe.kernels.low_precision.hopper_fp8 import launch_fp8_gemm
from symmoe.kernels.low_precision.hopper_fp8_wgrad import launch_fp8_wgrad
from symmoe.kernels.low_precision.hopper_weights import (
    launch_quantize_weight_pairs,
    takes_weight_pairs,
)


def _takes_few_rows(num_rows: int, *widths: int) -> bool:
    return num_rows <= MAX_ROWS and all(width % 8 == 0 for width in widths)


LAUNCHERS = {
    "push_rows": (launch_push, takes_rows),
    "fan_out": (launch_fan_out, takes_rows),
    "push_sums": (launch_push_sums, takes_rows),
    "sum_home": (launch_sum_home, takes_rows),
    "grouped_gemm": (launch_gemm, _takes_few_rows),
    "grouped_gemm_wgrad": (launch_wgrad, _takes_few_rows),
    "grouped_gemm_act": (launch_act, takes_act),
    "grouped_gemm_dact": (launch_dact, lambda: True),
    "grouped_gemm_fp8": (launch_fp8_gemm, _takes_few_rows),
    "grouped_gemm_wgrad_fp8": (
        launch_fp8_wgrad,
        lambda out: torch.is_tensor(out) or out.dtype == torch.float32,
    ),
    "quantize_columns": (hopper_columns.launch_quantize_columns, hopper_columns.takes_columns),
    "requantize_columns": (hopper_columns.launch_requantize_columns, hopper_columns.takes_columns),
    "quantize_weight_pairs": (launch_quantize_weight_pairs, takes_weight_pairs),
    "dact_quantize": (launch_dact_quantize, takes_dact_quantize),
}
