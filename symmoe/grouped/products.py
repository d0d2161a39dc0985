"""The products of one grouped linear layer, forward, dgrad and wgrad: in the working dtype, or in a recipe's numbers.

G groups, C input features, O output features, N rows sorted by group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from symmoe import kernels
from symmoe.grouped.weights import kernel_matrices
from symmoe.kernels import flops  # noqa: F401 - a counter of FLOPs knows only the formulas that are there when it is made
from symmoe.kernels.operands import given
from symmoe.kernels.tensor_table import TensorTable
from symmoe.precision.operands import (
    HeldWeight,
    Operand,
    gradient_columns,
    gradient_rows,
    multiply,
    multiply_columns,
    operand,
    weight_operands,
)
from symmoe.precision.recipes import Recipe

Kept = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
NOTHING: Kept = (None, None, None)


def forward(
    recipe: Recipe | None,
    weights: Sequence[torch.Tensor],
    rows: torch.Tensor,
    row_range: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    bias_scale: torch.Tensor | None,
    zero_tail: bool,
    trains_rows: bool,
    held: HeldWeight | None,
) -> Kept:
    """out [N, O] = rows @ weight^T + bias * bias_scale.

    Args:
        weights: in the working dtype, packed [G, O, C] or G single ones.
        trains_rows: whether backward will ask for the gradient of the rows.
        held: the weight as a recipe has quantised it.

    Returns:
        what backward needs in addition to the weights: the transposed weight, quantised, if the rows are trained.
    """
    (weight,) = kernel_matrices({"weight": weights})
    if recipe is None:
        ops = kernels.for_device(weights[0].device)
        ops.grouped_gemm(rows, weight, row_range, out, bias=bias, bias_scale=bias_scale, zero_tail=zero_tail)
        return NOTHING
    left = operand(recipe.quantize(rows, row_range))
    right, transposed = weight_operands(recipe, weight, transposed=trains_rows, held=held)
    multiply(left, right, row_range, out, bias=bias, bias_scale=bias_scale, zero_tail=zero_tail)
    return NOTHING if transposed is None else transposed


def input_gradient(
    recipe: Recipe | None,
    weights: Sequence[torch.Tensor],
    kept: Kept,
    d_out: torch.Tensor,
    row_range: torch.Tensor,
    d_rows: torch.Tensor,
    *,
    dbias: torch.Tensor | None,
    bias_scale: torch.Tensor | None,
    zero_tail: bool,
) -> None:
    """d_rows [N, C] = d_out @ weight; and dbias [G, O], if given, by grouped_bias_grad's formula."""
    if recipe is None:
        (weight,), ops = kernel_matrices({"weight": weights}), kernels.for_device(weights[0].device)
        ops.grouped_gemm_dgrad(d_out, weight, row_range, d_rows, zero_tail=zero_tail)
        if dbias is not None:
            ops.grouped_bias_grad(d_out, row_range, dbias, scale=bias_scale)
        return
    lines = gradient_rows(recipe, d_out, row_range, dbias=dbias, bias_scale=bias_scale)
    data, scale, global_scale = kept
    transposed = Operand(given("data", data), given("scale", scale), global_scale)
    multiply(lines, transposed, row_range, d_rows, zero_tail=zero_tail)


def weight_gradient(
    recipe: Recipe | None,
    d_out: torch.Tensor,
    rows: torch.Tensor,
    row_range: torch.Tensor,
    out: torch.Tensor | TensorTable,
    *,
    accumulate: bool,
) -> None:
    """out [G, O, C] (+)= d_out_g^T rows_g. Needs no weights, so a delayed gradient keeps none of them alive."""
    if recipe is None:
        kernels.for_device(rows.device).grouped_gemm_wgrad(d_out, rows, row_range, out, accumulate=accumulate)
        return
    left, right = gradient_columns(recipe, d_out, row_range), operand(recipe.quantize_columns(rows, row_range))
    multiply_columns(left, right, row_range, out, accumulate=accumulate)
