"""What the kernels for Hopper offer to the other modules of kernels/gpu."""

from symmoe.kernels.gpu.hopper.act import launch_act, launch_dact
from symmoe.kernels.gpu.hopper.columns import launch_quantize_columns, launch_requantize_columns, takes_columns
from symmoe.kernels.gpu.hopper.dact_quantize import launch_dact_quantize, takes_dact_quantize
from symmoe.kernels.gpu.hopper.fp8 import launch_fp8_gemm
from symmoe.kernels.gpu.hopper.fp8_wgrad import launch_fp8_wgrad
from symmoe.kernels.gpu.hopper.gemm import launch_gemm
from symmoe.kernels.gpu.hopper.rows import launch_pre_reduce, launch_pull, launch_push, takes_rows, takes_sums
from symmoe.kernels.gpu.hopper.weights import launch_quantize_weight_pairs, takes_weight_pairs
from symmoe.kernels.gpu.hopper.wgrad import launch_wgrad

__all__ = [
    "launch_act",
    "launch_dact",
    "launch_dact_quantize",
    "launch_fp8_gemm",
    "launch_fp8_wgrad",
    "launch_gemm",
    "launch_pre_reduce",
    "launch_pull",
    "launch_push",
    "launch_quantize_columns",
    "launch_quantize_weight_pairs",
    "launch_requantize_columns",
    "launch_wgrad",
    "takes_columns",
    "takes_dact_quantize",
    "takes_rows",
    "takes_sums",
    "takes_weight_pairs",
]
