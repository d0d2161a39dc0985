"""Triton kernels for NVIDIA GPUs: the names, signatures and results of the twins."""

from symmoe.kernels.gpu.gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad
from symmoe.kernels.gpu.gemm_swiglu import dswiglu_partials_shape, grouped_gemm_dswiglu, grouped_gemm_swiglu
from symmoe.kernels.gpu.plan import assign_packed_rows, assign_rows, count_slots, lay_out, send_counts
from symmoe.kernels.gpu.sync import barrier
from symmoe.kernels.gpu.tokens import (
    fan_out,
    gather_values,
    index_rows,
    pre_reduce,
    pull_rows,
    pull_values,
    push_rows,
    push_slots,
)

__all__ = [
    "assign_packed_rows",
    "assign_rows",
    "barrier",
    "count_slots",
    "dswiglu_partials_shape",
    "fan_out",
    "gather_values",
    "grouped_gemm",
    "grouped_gemm_dgrad",
    "grouped_gemm_dswiglu",
    "grouped_gemm_swiglu",
    "grouped_gemm_wgrad",
    "index_rows",
    "lay_out",
    "pre_reduce",
    "pull_rows",
    "pull_values",
    "push_rows",
    "push_slots",
    "send_counts",
]
