"""Twins of act_quantize and dact_quantize.

Each function is the composition of the functions that it fuses. Numbers are rounded to the dtype of h and then
quantised, so the bits are those of scaled_activation or its gradient, followed by quantize_rows, quantize_columns and
grouped_bias_grad.
"""

from __future__ import annotations

import torch

from symmoe.kernels.act_quantized import Buffers, check_act_quantize, check_dact_quantize
from symmoe.kernels.formats import BlockFormat
from symmoe.kernels.twin.activation import activation_gradients, scaled_activation
from symmoe.kernels.twin.gemm import grouped_bias_grad, spans_of
from symmoe.kernels.twin.quantize import quantize_columns, quantize_rows


def act_quantize(h, row_scale, row_range, activation, block_format, *, rows=None, columns=None):
    check_act_quantize(h, row_scale, row_range, activation, block_format, rows, columns)
    a = torch.empty((h.shape[0], h.shape[1] // activation.hidden_width(1)), dtype=h.dtype, device=h.device)
    for span in spans_of(row_range):
        scaled_activation(h[span], row_scale[span], a[span], activation)
    _quantize(a, row_range, block_format, rows, columns)


def dact_quantize(
    da,
    h,
    row_scale,
    row_range,
    dscale,
    workspace,
    activation,
    block_format,
    *,
    rows=None,
    columns=None,
    a_columns=None,
    dbias=None,
):
    check_dact_quantize(
        da, h, row_scale, row_range, dscale, workspace, activation, block_format, rows, columns, a_columns, dbias
    )
    end = int(row_range[1, -1])
    dh, a = torch.empty_like(h), torch.empty_like(da)
    scale = row_scale[:end]
    value = activation_gradients(da[:end], h[:end], scale, dh[:end], dscale[:end], activation)
    torch.mul(value, scale[:, None], out=a[:end])
    dscale[end:] = 0
    _quantize(dh, row_range, block_format, rows, columns)
    _quantize(a, row_range, block_format, None, a_columns)
    if dbias is not None:
        grouped_bias_grad(dh, row_range, dbias)


def _quantize(
    x: torch.Tensor, row_range: torch.Tensor, block_format: BlockFormat, rows: Buffers | None, columns: Buffers | None
) -> None:
    if rows is not None:
        quantize_rows(x, row_range, *rows, block_format)
    if columns is not None:
        quantize_columns(x, row_range, *columns, block_format)
