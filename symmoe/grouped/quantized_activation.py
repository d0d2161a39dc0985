"""The activation of experts and its gradient, with results as operands of a recipe: in one kernel, or in two.

N rows in G groups, I columns of the activation's result, W of h. The kernels that do both (kernels/act_quantized.py)
give the same bits as the separate kernels, which run for arguments that the former do not take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from symmoe import kernels
from symmoe.kernels import act_quantized
from symmoe.kernels.activation import Activation
from symmoe.kernels.gemm_parts import Part
from symmoe.precision.operands import Operand, multiply, operand
from symmoe.precision.products import LowPrecision


def first_layer(
    numbers: LowPrecision,
    arriving: Iterable[tuple[Operand, Part]],
    weight: Operand,
    row_range: torch.Tensor,
    h: torch.Tensor,
    scale: torch.Tensor,
    activation: Activation,
    bias: torch.Tensor | None,
) -> Operand:
    """Fills h [N, W] = rows @ weight^T + bias, and returns the rows of act(h) * scale, rounded to the dtype of h.

    arriving: one part after the other, the rows and the part of them that can be multiplied. A kernel that makes the
    quantised activation runs for each part when the part has been multiplied.
    """
    recipe, ops = numbers.recipe, kernels.for_device(h.device)
    num_rows, ffn = h.shape[0], h.shape[1] // activation.hidden_width(1)
    fused = h.dtype in act_quantized.H and act_quantized.takes_act_quantize(recipe.row_format)
    quantized = recipe.empty_rows(num_rows, ffn, row_range) if fused else None
    for rows, part in arriving:
        multiply(rows, weight, part.rows, h, bias=bias, num_sms=part.num_sms)
        if quantized is not None:
            result = quantized.data, quantized.scale
            ops.act_quantize(h, scale, part.rows, activation, recipe.row_format, rows=result)
    if quantized is not None:
        return operand(quantized)
    a = h.new_empty((num_rows, ffn))
    ops.scaled_activation(h, scale, a, activation)
    return numbers.rows(a, row_range)


class HiddenGradients(NamedTuple):
    """dh [N, W], and the activation a [N, I] again, as operands: computed all at once, or each when it is needed.

    Attributes:
        rows: dh, for dgrad.
        columns: dh, for wgrad.
        activation_columns: a, for wgrad.
    """

    rows: Callable[[], Operand]
    columns: Callable[[], Operand]
    activation_columns: Callable[[], Operand]


def hidden_gradients(
    numbers: LowPrecision,
    da: torch.Tensor,
    h: torch.Tensor,
    scale: torch.Tensor,
    row_range: torch.Tensor,
    activation: Activation,
    d_scale: torch.Tensor,
    db1: torch.Tensor | None,
) -> HiddenGradients:
    """The gradients from da [N, I]. Fills d_scale fp32 [N], 0 in the tail, and db1 [G, W] if given, the sum of dh."""
    ops, row_format = kernels.for_device(h.device), numbers.recipe.row_format
    num_rows, ffn = da.shape
    takes = act_quantized.takes_dact_quantize(ffn, activation, row_format)
    if takes and h.dtype in act_quantized.H:
        numel = act_quantized.dact_quantize_workspace_numel(num_rows, ffn, db1)
        workspace = torch.empty(numel, dtype=torch.float32, device=h.device)
        recipe = numbers.recipe
        made = (
            recipe.empty_rows(num_rows, h.shape[1], row_range),
            recipe.empty_columns(num_rows, h.shape[1], row_range),
            recipe.empty_columns(num_rows, ffn, row_range),
        )
        rows, columns, a_columns = ((quantized.data, quantized.scale) for quantized in made)
        results = {"rows": rows, "columns": columns, "a_columns": a_columns}
        ops.dact_quantize(da, h, scale, row_range, d_scale, workspace, activation, row_format, **results, dbias=db1)
        for_dgrad, for_wgrad, a_operand = map(operand, made)
        return HiddenGradients(lambda: for_dgrad, lambda: for_wgrad, lambda: a_operand)
    dh, a = torch.empty_like(h), torch.empty_like(da)
    ops.scaled_activation(h, scale, a, activation)
    sums = torch.empty_like(d_scale)
    ops.scaled_activation_grad(da, h, scale, dh, sums, activation)
    ops.sum_dact_partials(sums, row_range, d_scale, 1)  # the same, with zeros in the tail
    dh_rows = None if db1 is None else numbers.gradient_rows(dh, row_range, dbias=db1)
    return HiddenGradients(
        lambda: dh_rows or numbers.gradient_rows(dh, row_range),
        lambda: numbers.gradient_columns(dh, row_range),
        lambda: numbers.columns(a, row_range),
    )
