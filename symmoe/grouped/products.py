"""The products of one grouped linear layer: in the working dtype or in a recipe's numbers, and those of its adapters.

G groups, C input features, O output features, N rows sorted by group. Without autograd (grouped/rows_function.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from symmoe import kernels
from symmoe.autograd import Unmodified
from symmoe.grouped.low_rank import LowRank
from symmoe.grouped.parameters import GroupedParameters
from symmoe.grouped.rows_function import Gradients, RowInputs
from symmoe.grouped.weight_gradients import Compute
from symmoe.grouped.weights import kernel_matrices
from symmoe.kernels import flops  # noqa: F401 - a counter of FLOPs knows only the formulas that are there when it is made
from symmoe.kernels.operands import Operand, given
from symmoe.kernels.tensor_table import TensorTable
from symmoe.precision.operands import gradient_columns, gradient_rows, weight_operands
from symmoe.precision.recipes import Recipe


@dataclass(frozen=True, slots=True)
class LinearProducts:
    """A rows_function.Products: y = W x + bias * scale, += B (A x) with adapters.

    trains_rows: whether backward will ask for the gradient of the rows.
    """

    layers: tuple[GroupedParameters]
    trains_rows: bool

    def forward(self, rows: RowInputs, out: torch.Tensor, *, zero_tail: bool) -> Gradients:
        # Kept are A x, and the transposed weight in the recipe's numbers if rows are trained.
        (layer,), transposed = self.layers, None
        weights, low = _split(layer, rows.tensors)
        (weight,) = kernel_matrices({"weight": weights})
        ops, bias = kernels.for_device(out.device), (rows.biases[0], rows.scale)
        if layer.precision is None:
            ops.grouped_gemm(rows.x, weight, rows.row_range, out, bias=bias, zero_tail=zero_tail)
        else:
            recipe, held = layer.precision, layer.held_weight
            left = recipe.quantize(rows.x, rows.row_range).operand()
            right, transposed = weight_operands(recipe, weight, transposed=self.trains_rows, held=held)
            ops.grouped_gemm_quantized(left, right, rows.row_range, out, bias=bias, zero_tail=zero_tail)
        t = None
        if low is not None:
            t = low.down(rows.x, rows.row_range)
            low.add_up(t, rows.row_range, out)
        return t, *(transposed or (None, None, None))

    def backward(
        self, rows: RowInputs, kept: Gradients, d_out: torch.Tensor, needs: tuple[bool, ...]
    ) -> LinearGradients:
        return LinearGradients(self.layers[0], rows, kept, d_out, needs)


class LinearGradients:
    """Backward of LinearProducts. The gradient of the bias is there after input_gradient, if rows get a gradient."""

    def __init__(
        self, layer: GroupedParameters, rows: RowInputs, kept: Gradients, d_out: torch.Tensor, needs: tuple[bool, ...]
    ) -> None:
        (needs_x, needs_scale, needs_bias, *_), (bias,) = needs, rows.biases
        self._recipe, self._rows, self._d_out, self._kept = layer.precision, rows, d_out, kept
        self._weights, self._low = _split(layer, rows.tensors)
        self._ops = ops = kernels.for_device(d_out.device)
        self._d_bias = torch.empty_like(bias) if bias is not None and needs_bias else None
        self.d_scale: torch.Tensor | None = None
        if self._low is not None:
            self._d_t = self._low.down_gradient(d_out, rows.row_range)
        if not needs_x and self._d_bias is not None:
            ops.grouped_bias_grad(d_out, rows.row_range, self._d_bias, scale=rows.scale)
        if needs_scale and bias is not None:
            self.d_scale = torch.zeros_like(given("bias_scale", rows.scale))
            ops.grouped_bias_dot(d_out, bias, rows.row_range, self.d_scale)

    def input_gradient(self, d_rows: torch.Tensor, *, zero_tail: bool) -> None:
        """Fills d_rows [N, C], and the gradient of the bias by grouped_bias_grad's formula."""
        d_out, row_range = self._d_out, self._rows.row_range
        if self._recipe is None:
            (weight,) = kernel_matrices({"weight": self._weights})
            self._ops.grouped_gemm_dgrad(d_out, weight, row_range, d_rows, zero_tail=zero_tail)
            if self._d_bias is not None:
                self._ops.grouped_bias_grad(d_out, row_range, self._d_bias, scale=self._rows.scale)
        else:
            sums = {"dbias": self._d_bias, "bias_scale": self._rows.scale}
            lines = gradient_rows(self._recipe, d_out, row_range, **sums)
            _, data, scale, global_scale = self._kept
            transposed = Operand(given("data", data), given("scale", scale), global_scale)
            self._ops.grouped_gemm_quantized(lines, transposed, row_range, d_rows, zero_tail=zero_tail)
        if self._low is not None:
            self._low.add_up_gradient(self._d_t, row_range, d_rows)

    def bias_gradients(self) -> Gradients:
        """dbias [G, O], or None."""
        return (self._d_bias,)

    def weight_gradients(self) -> tuple[Compute, ...]:
        """Needs no weights, so a delayed gradient keeps none of them alive."""
        x, row_range, d_out = self._rows.x, self._rows.row_range, self._d_out
        return (functools.partial(_weight_gradient, self._recipe, x, row_range, d_out, Unmodified(x=x, d_y=d_out)),)

    def adapter_gradients(self) -> Gradients:
        """dA and dB; none without adapters."""
        if self._low is None:
            return ()
        t = given("t", self._kept[0])
        return self._low.gradients(self._rows.x, t, self._d_out, self._d_t, self._rows.row_range)


def _weight_gradient(
    recipe: Recipe | None,
    x: torch.Tensor,
    row_range: torch.Tensor,
    d_out: torch.Tensor,
    inputs: Unmodified,
    out: torch.Tensor | TensorTable,
    accumulate: bool,
) -> None:
    """out [G, O, C] (+)= d_out_g^T x_g."""
    inputs.check()
    ops = kernels.for_device(x.device)
    if recipe is None:
        ops.grouped_gemm_wgrad(d_out, x, row_range, out, accumulate=accumulate)
        return
    left, right = gradient_columns(recipe, d_out, row_range), recipe.quantize_columns(x, row_range).operand()
    ops.grouped_gemm_wgrad_quantized(left, right, row_range, out, accumulate=accumulate)


def _split(layer: GroupedParameters, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], LowRank | None]:
    weights, adapters = tensors[: len(layer.weight_names)], tensors[len(layer.weight_names) :]
    return weights, LowRank(*adapters) if adapters else None
