"""The first GEMM of E4M3 numbers with the activation, whose result is quantised again. Contract as in the twin.

One kernel on Hopper (hopper/fp8_act.py) for gated activations without limits, whose halves whole blocks fill; elsewhere
the product, and then act_quantize.
"""

from __future__ import annotations

import torch

from symmoe.kernels.act_quantized import FLOAT8_BLOCK, check_fp8_act
from symmoe.kernels.activation import Activation
from symmoe.kernels.gpu import hopper
from symmoe.kernels.gpu.act_quantized import act_quantize
from symmoe.kernels.gpu.fp8 import grouped_gemm_fp8


def grouped_gemm_fp8_act(
    rows: torch.Tensor,
    row_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    row_start: torch.Tensor,
    row_factor: torch.Tensor,
    h: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    activation: Activation,
    *,
    num_sms: int | None = None,
) -> None:
    """h = rows @ weight[g]^T as in grouped_gemm_fp8; a = act(h) * row_factor, rounded to the dtype of h and quantised.

    rows, row_scale, weight [G, W, C], weight_scale: as in grouped_gemm_fp8, with scales of blocks. row_start: the
    groups' bounds int32[G+1]; row_factor fp32[N]; h bf16 or fp16 [N, W]; data E4M3 [N, I] and scale fp32 [N, B(I)]:
    what the second GEMM multiplies. Of rows past the last group nothing is written. num_sms: as in grouped_gemm.
    ArgumentError if an argument is anything else.
    """
    operands = (rows, row_scale, weight, weight_scale, row_start)
    of_lines = check_fp8_act(*operands, row_factor, h, data, scale, activation)
    num_rows, ffn = data.shape
    special = hopper.kernels(h.device, h.dtype, h.shape[1])
    takes = num_rows > 0 and not of_lines and hopper.takes_fp8_act(num_rows, ffn, activation)
    if special is not None and takes:
        special.launch_fp8_act(*operands, row_factor, h, data, scale, activation, num_sms=num_sms)
        return
    grouped_gemm_fp8(*operands, h, num_sms=num_sms)
    act_quantize(h, row_factor, row_start, activation, FLOAT8_BLOCK, rows=(data, scale))
