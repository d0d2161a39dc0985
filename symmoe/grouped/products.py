"""The products of one grouped linear layer, forward, dgrad and wgrad: in the working dtype, or in a recipe's numbers.

G groups, C input features, O output features, N rows sorted by group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from symmoe import kernels
from symmoe.grouped.weights import kernel_matrices
from symmoe.kernels import flops  # noqa: F401 - a counter of FLOPs knows only the formulas that are there when it is made
from symmoe.kernels.operands import given
from symmoe.kernels.tensor_table import TensorTable
from symmoe.precision.cached_weights import HeldWeight, weight_operands
from symmoe.precision.operands import Operand, multiply, multiply_columns
from symmoe.precision.products import LowPrecision
from symmoe.precision.recipes import Recipe

Kept = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
NOTHING: Kept = (None, None, None)


class Products(Protocol):
    """The products with the weights of one layer."""

    def forward(
        self,
        rows: torch.Tensor,
        row_range: torch.Tensor,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        bias_scale: torch.Tensor | None,
        zero_tail: bool,
    ) -> None:
        """out [N, O] = rows @ weight^T + bias * bias_scale."""

    def kept(self) -> Kept:
        """What forward has made for backward, in addition to the weights: tensors to save for :func:`products_of`."""

    def input_gradient(
        self,
        d_out: torch.Tensor,
        row_range: torch.Tensor,
        d_rows: torch.Tensor,
        *,
        dbias: torch.Tensor | None,
        bias_scale: torch.Tensor | None,
        zero_tail: bool,
    ) -> None:
        """d_rows [N, C] = d_out @ weight; and dbias [G, O], if given, by grouped_bias_grad's formula."""


def products_of(
    recipe: Recipe | None,
    weights: Sequence[torch.Tensor],
    kept: Kept = NOTHING,
    *,
    trains_rows: bool = False,
    held: HeldWeight | None = None,
) -> Products:
    """The products with weights in the working dtype, packed [G, O, C] or G single ones.

    kept: in backward, what forward has kept. trains_rows: in forward, whether backward will ask for their gradient.
    held: in forward, the weight as a recipe has quantised it.
    """
    return WorkingPrecision(weights) if recipe is None else Quantizing(recipe, weights, kept, trains_rows, held)


class WorkingPrecision:
    """Products of numbers in the working dtype."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights, self._ops = weights, kernels.for_device(weights[0].device)

    def forward(
        self,
        rows: torch.Tensor,
        row_range: torch.Tensor,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        bias_scale: torch.Tensor | None,
        zero_tail: bool,
    ) -> None:
        """See Products."""
        (weight,) = kernel_matrices({"weight": self._weights})
        self._ops.grouped_gemm(rows, weight, row_range, out, bias=bias, bias_scale=bias_scale, zero_tail=zero_tail)

    def kept(self) -> Kept:
        """See Products."""
        return NOTHING

    def input_gradient(
        self,
        d_out: torch.Tensor,
        row_range: torch.Tensor,
        d_rows: torch.Tensor,
        *,
        dbias: torch.Tensor | None,
        bias_scale: torch.Tensor | None,
        zero_tail: bool,
    ) -> None:
        """See Products."""
        (weight,) = kernel_matrices({"weight": self._weights})
        self._ops.grouped_gemm_dgrad(d_out, weight, row_range, d_rows, zero_tail=zero_tail)
        if dbias is not None:
            self._ops.grouped_bias_grad(d_out, row_range, dbias, scale=bias_scale)


class Quantizing:
    """Products of quantised numbers (precision/products.py)."""

    def __init__(
        self,
        recipe: Recipe,
        weights: Sequence[torch.Tensor],
        kept: Kept,
        trains_rows: bool,
        held: HeldWeight | None,
    ) -> None:
        self._numbers, self._weights, self._kept = LowPrecision(recipe), weights, kept
        self._trains_rows, self._held = trains_rows, held

    def forward(
        self,
        rows: torch.Tensor,
        row_range: torch.Tensor,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        bias_scale: torch.Tensor | None,
        zero_tail: bool,
    ) -> None:
        """See Products."""
        (weight,) = kernel_matrices({"weight": self._weights})
        left = self._numbers.rows(rows, row_range)
        right, transposed = weight_operands(self._numbers, weight, transposed=self._trains_rows, held=self._held)
        self._kept = NOTHING if transposed is None else transposed
        multiply(left, right, row_range, out, bias=bias, bias_scale=bias_scale, zero_tail=zero_tail)

    def kept(self) -> Kept:
        """The transposed weight, quantised; nothing where the rows are not trained."""
        return self._kept

    def input_gradient(
        self,
        d_out: torch.Tensor,
        row_range: torch.Tensor,
        d_rows: torch.Tensor,
        *,
        dbias: torch.Tensor | None,
        bias_scale: torch.Tensor | None,
        zero_tail: bool,
    ) -> None:
        """See Products."""
        lines = self._numbers.gradient_rows(d_out, row_range, dbias=dbias, bias_scale=bias_scale)
        data, scale, global_scale = self._kept
        weight = Operand(given("data", data), given("scale", scale), global_scale)
        multiply(lines, weight, row_range, d_rows, zero_tail=zero_tail)


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
    numbers = LowPrecision(recipe)
    left, right = numbers.gradient_columns(d_out, row_range), numbers.columns(rows, row_range)
    multiply_columns(left, right, row_range, out, accumulate=accumulate)
