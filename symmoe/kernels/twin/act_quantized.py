"""The activation of an expert and its gradient with quantised results: the definition, in PyTorch.

    N rows in G groups; I columns of the activation's result; W columns of h (twin/activation.py). Operands (data,
    scale) of rows and of columns: twin/quantize.py.

Each function is the composition of those it fuses: numbers are rounded to the dtype of h before they are quantised, so
the bits are those of scaled_activation or its gradient, followed by quantize_rows and quantize_columns.
"""

from __future__ import annotations

import torch

from symmoe.kernels.act_quantized import Buffers, check_act_quantize, check_dact_quantize
from symmoe.kernels.activation import Activation
from symmoe.kernels.formats import BlockFormat
from symmoe.kernels.twin.activation import activation_gradients, scaled_activation
from symmoe.kernels.twin.gemm import spans_of
from symmoe.kernels.twin.quantize import quantize_columns, quantize_rows


def act_quantize(
    h: torch.Tensor,
    row_scale: torch.Tensor,
    row_start: torch.Tensor,
    activation: Activation,
    block_format: BlockFormat,
    *,
    rows: Buffers | None = None,
    columns: Buffers | None = None,
) -> None:
    """a = act(h) * row_scale, rounded to the dtype of h and quantised: the operands that the second GEMM has of it.

    h bf16 or fp16 [N, W]; row_scale fp32[N]; row_start int32[G+1]: the groups' bounds, or without columns ranges of
    rows int32[2, G]; other rows are not read. rows: data [N, I] and its scales along features; columns: data [I, P], P
    a multiple of TILE and at least TILE * max_tiles(N, G), and its scales along a group's tokens, block-major if they
    are fp32 (kernels/operands.py). What is None is not made; one must be given. block_format: E4M3, blocks of 32 or
    128. ArgumentError if an argument is not like that.
    """
    check_act_quantize(h, row_scale, row_start, activation, block_format, rows, columns)
    a = torch.empty((h.shape[0], h.shape[1] // activation.hidden_width(1)), dtype=h.dtype, device=h.device)
    for span in spans_of(row_start):
        scaled_activation(h[span], row_scale[span], a[span], activation)
    _quantize(a, row_start, block_format, rows, columns)


def dact_quantize(
    da: torch.Tensor,
    h: torch.Tensor,
    row_scale: torch.Tensor,
    row_start: torch.Tensor,
    dscale: torch.Tensor,
    workspace: torch.Tensor,
    activation: Activation,
    block_format: BlockFormat,
    *,
    rows: Buffers | None = None,
    columns: Buffers | None = None,
    a_columns: Buffers | None = None,
) -> None:
    """Gradient of a = act(h) * row_scale, rounded to the dtype of h and quantised; dscale; and columns of a again.

    da [N, I] of the dtype of h; dscale fp32[N], 0 past the last row; workspace: fp32, of
    dact_quantize_workspace_numel(...) elements. rows, columns: dh's, of W features: operands of the first GEMM's input
    gradient and weight gradient. a_columns: the second GEMM's, so that a forward pass need not keep them. The others as
    in act_quantize; all operands may be None. If h has halves, blocks must divide I (takes_dact_quantize).
    ArgumentError if an argument is not like that.
    """
    check_dact_quantize(
        da, h, row_scale, row_start, dscale, workspace, activation, block_format, rows, columns, a_columns
    )
    end = int(row_start[-1])
    dh, a = torch.empty_like(h), torch.empty_like(da)
    scale = row_scale[:end]
    value = activation_gradients(da[:end], h[:end], scale, dh[:end], dscale[:end], activation)
    torch.mul(value, scale[:, None], out=a[:end])
    dscale[end:] = 0
    _quantize(dh, row_start, block_format, rows, columns)
    _quantize(a, row_start, block_format, None, a_columns)


def _quantize(
    x: torch.Tensor, row_start: torch.Tensor, block_format: BlockFormat, rows: Buffers | None, columns: Buffers | None
) -> None:
    if rows is not None:
        quantize_rows(x, row_start, *rows, block_format)
    if columns is not None:
        quantize_columns(x, row_start, *columns, block_format)
