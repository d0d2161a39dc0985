"""Twins of act_quantize and dact_quantize.

Each function is the composition of the functions that it fuses. Numbers are rounded to the dtype of h and then
quantised, so the bits are those of scaled_activation or its gradient, followed by quantize_rows, quantize_columns and
grouped_bias_grad.
"""

from __future__ import annotations

import torch

from symmoe.kernels.twin.activation import activation_gradients, scaled_activation
from symmoe.kernels.twin.gemm import grouped_bias_grad, spans_of
from symmoe.kernels.twin.quantize import quantize_columns, quantize_rows


def act_quantize(h, row_scale, row_range, out, activation, block_format):
    a = torch.empty((h.shape[0], h.shape[1] // activation.hidden_width(1)), dtype=h.dtype, device=h.device)
    for span in spans_of(row_range):
        scaled_activation(h[span], row_scale[span], a[span], activation)
    quantize_rows(a, row_range, out, block_format)


def dact_quantize(da, h, row_scale, row_range, out, workspace, activation, block_format):
    end = int(row_range[1, -1])
    dh, a, scale = torch.empty_like(h), torch.empty_like(da), row_scale[:end]
    value = activation_gradients(da[:end], h[:end], scale, dh[:end], out.dscale[:end], activation)
    torch.mul(value, scale[:, None], out=a[:end])
    out.dscale[end:] = 0
    quantize_rows(dh, row_range, out.rows, block_format)
    quantize_columns(dh, row_range, out.columns, block_format)
    quantize_columns(a, row_range, out.a_columns, block_format)
    if out.dbias is not None:
        grouped_bias_grad(dh, row_range, out.dbias)
