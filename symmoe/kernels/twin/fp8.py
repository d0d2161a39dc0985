"""Twins of the products of E4M3 numbers of contract/quantized_gemm.py.

A block's sum, the multiplication by its scales from left to right, and the addition to the blocks before it are fp32.
(On GPUs a multiplication and an addition may be one operation.)
"""

import torch

from symmoe.kernels.fp8 import BLOCK, check_fp8_gemm, check_fp8_wgrad, num_blocks
from symmoe.kernels.tensor_table import TensorTable
from symmoe.kernels.twin.gemm import (
    bias_rows,
    filled_groups,
    groups,
    matrix,
    multiply,
    multiply_rows,
    store_sum,
    zero_rows,
)


def grouped_gemm_fp8(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    weight: torch.Tensor | TensorTable,
    weight_scale: torch.Tensor | TensorTable,
    row_range: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    bias_scale: torch.Tensor | None = None,
    zero_tail: bool = False,
    num_sms: int | None = None,
) -> None:
    check_fp8_gemm(rows, row_scale, weight, weight_scale, out, bias, bias_scale)
    for g, span in filled_groups(row_range):
        total = torch.zeros((span.stop - span.start, out.shape[1]), dtype=torch.float32, device=out.device)
        partial = torch.empty_like(total)
        for b in range(num_blocks(rows.shape[1])):
            block = slice(b * BLOCK, (b + 1) * BLOCK)
            multiply_rows(partial, rows[span, block].float(), matrix(weight, g)[:, block].float().t())
            features = matrix(weight_scale, g)[:, b].repeat_interleave(BLOCK)[: out.shape[1]]
            total += partial * (row_scale[span, b, None] * features)
        addend = bias_rows(bias, bias_scale, g, span)
        total = total if addend is None else total + addend
        out[span] = total.to(out.dtype)
    if zero_tail:
        zero_rows(out, row_range)


def grouped_gemm_wgrad_fp8(
    dout: torch.Tensor,
    dout_scale: torch.Tensor,
    rows: torch.Tensor,
    rows_scale: torch.Tensor,
    row_range: torch.Tensor,
    out: torch.Tensor | TensorTable,
    *,
    accumulate: bool = False,
    num_sms: int | None = None,
) -> None:
    check_fp8_wgrad(dout, dout_scale, rows, rows_scale, out)
    first = 0
    for g, span in groups(row_range):
        end = first + num_blocks(span.stop - span.start)
        total = torch.zeros(out.shape[1:], dtype=torch.float32, device=out.device)
        for b in range(first, end):
            block = slice(b * BLOCK, (b + 1) * BLOCK)
            partial = multiply(dout[:, block].float(), rows[:, block].float().t())
            total += partial * rows_scale[:, b] * dout_scale[:, b, None]
        if first < end or not accumulate:
            store_sum(out, g, total, accumulate=accumulate)
        first = end
