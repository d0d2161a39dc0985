"""Experts whose products multiply a recipe's numbers: the steps of grouped/experts.py, without autograd.

H hidden, I ffn, W width of FC1's output, G groups, N rows; q() quantises (precision/operands.py).

    h = q(x) q(W1)^T + b1             a = act(h) * scale            out = q(a) q(W2)^T + b2 * scale
    da = q(d_out) q(W2)               dh = act'(h) ...              d_rows = q(dh) q(W1)
    dW2 = q(d_out)^T q(a)             dW1 = q(dh)^T q(x)            along tokens

h, a, da and dh are rounded to the working dtype, as between separate modules, so GroupedLinear, activation and
GroupedLinear give the same bits. If takes_parts is true, arriving rows are quantised (or read from the wire),
multiplied and activated part by part. The activation and its gradient run in kernels that also quantise their results
(kernels/act_quantized.py) if those support the arguments; the separate kernels give the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from symmoe import kernels
from symmoe.grouped.experts import (
    ExpertsBackward,
    ExpertWeights,
    Parts,
    SavedActivations,
    SecondInput,
)
from symmoe.grouped.rows_function import ExpertRows
from symmoe.grouped.weights import WeightProduct
from symmoe.kernels import act_quantized
from symmoe.kernels.act_quantized import DactOperands
from symmoe.kernels.bias_sums import empty_row_sums
from symmoe.kernels.gemm_parts import Part
from symmoe.kernels.operands import Operand
from symmoe.precision.operands import gradient_columns, gradient_rows, weight_operands
from symmoe.precision.recipes import Recipe
from symmoe.precision.wire import WireFormat


@dataclass(frozen=True, slots=True)
class Wire:
    """The wire formats of rows and gradients; None: not quantised."""

    rows: WireFormat | None = None
    gradients: WireFormat | None = None


def takes_parts(recipe: Recipe | None) -> bool:
    """Whether experts can compute some rows while others are in flight. For that, row i of an operand must depend on
    row i only, which scales in tiles prevent."""
    return recipe is None or recipe.row_format.scale_dtype == torch.float32


@dataclass(frozen=True, slots=True)
class QuantizedWeights(ExpertWeights):
    """Weights of experts in the working dtype, with the products in a recipe's numbers."""

    recipe: Recipe
    needs_transposed: tuple[bool, bool]  # whether backward will need W1, and W2, for dgrad
    wire: Wire

    def first_layer(
        self, x: ExpertRows, *, num_rows: int, parts: Parts = None
    ) -> tuple[SavedActivations, SecondInput]:
        """Same as ExpertWeights.first_layer, but returns operands of the second layer, not `a`."""
        recipe = self.recipe
        weight = self.fc1.weight
        ffn = self.fc2.weight.shape[2]
        ops = kernels.for_device(weight.device)
        h = torch.empty((num_rows, weight.shape[1]), dtype=weight.dtype, device=weight.device)
        x = x.without_tail(num_rows)
        operands = _arriving_operands(self, self.wire.rows, x, parts)
        (w1, transposed1), (w2, transposed2) = (
            fc.cached or weight_operands(recipe, fc.weight, transposed=is_needed)
            for fc, is_needed in zip((self.fc1, self.fc2), self.needs_transposed, strict=True)
        )
        is_fused = h.dtype in act_quantized.H and act_quantized.takes_act_quantize(
            recipe.row_format
        )
        a = recipe.empty("rows", num_rows, ffn, x.row_range) if is_fused else None
        for rows, part in operands:
            ops.grouped_gemm_quantized(
                rows, w1, part.rows, h, bias=(self.fc1.bias, None), num_sms=part.num_sms
            )
            if a is not None:
                ops.act_quantize(
                    h, x.scale, part.rows, a.buffers, self.activation, recipe.row_format
                )
        if a is None:
            a_NI = h.new_empty((num_rows, ffn))
            ops.scaled_activation(h, x.scale, a_NI, self.activation)
            a = recipe.quantize(a_NI, x.row_range)
        unused = (None,) * len(Operand._fields)  # in backward
        saved = SavedActivations(h, None, None, *(transposed1 or unused), *(transposed2 or unused))
        return saved, (a.operand(), w2)

    def second_layer(
        self,
        a: SecondInput,
        x: ExpertRows,
        out: torch.Tensor,
        part: Part | None = None,
        *,
        zero_tail: bool = False,
    ) -> None:
        rows, w2 = a
        x, out, ops = (
            x.without_tail(len(rows.data)),
            out[: len(rows.data)],
            kernels.for_device(out.device),
        )
        group_range = None if part is None else x.row_range
        part = part or Part(x.row_range)
        ops.grouped_gemm_quantized(
            rows,
            w2,
            part.rows,
            out,
            bias=(self.fc2.bias, x.bias_scale),
            group_range=group_range,
            zero_tail=zero_tail,
            num_sms=part.num_sms,
        )

    def backward(
        self, x: ExpertRows, hidden: SavedActivations, d_out: torch.Tensor, **options: Any
    ) -> QuantizedBackward:
        num_rows = len(hidden.h)
        d_out = d_out[:num_rows] if x.row_index is None else d_out  # d_out may be longer
        return QuantizedBackward(x.without_tail(num_rows), self, hidden, d_out, **options)


class QuantizedBackward(ExpertsBackward):
    """Backward of QuantizedWeights. Tensors from a quantised wire are dequantised for weight and bias gradients.
    Otherwise the pass that quantises also makes FC2's bias gradient, like FC1's."""

    _weights: QuantizedWeights
    # dh for dgrad, dh for wgrad, and the activation again for wgrad: made together, or each on its first use.
    _dh_rows: Callable[[], Operand]
    _dh_columns: Callable[[], Operand]
    _a_columns: Callable[[], Operand]

    def _fc2_dgrad(self, hidden: SavedActivations, parts: Parts) -> bool:
        weights = self._weights
        h = hidden.h
        self._dtype = h.dtype
        wire = weights.wire.gradients
        self._transposed1, transposed2 = hidden.transposed
        assert transposed2 is not None  # forward has saved it for this pass
        da = h.new_empty((h.shape[0], weights.fc2.weight.shape[2]))
        received = replace(self._x, rows=self._d_out)
        dbias = self.db2 if wire is None else None
        for d_out, part in _arriving_operands(
            weights, wire, received, parts, is_gradient=True, dbias=dbias
        ):
            self._ops.grouped_gemm_quantized(
                d_out, transposed2, part.rows, da, num_sms=part.num_sms
            )
        is_fused = act_quantized.takes_dact_quantize(
            da.shape[1], weights.activation, weights.recipe.row_format
        )
        if is_fused and h.dtype in act_quantized.H:
            self._differentiate_and_quantize(da, h)
        else:
            self._differentiate(da, h)
        return wire is None

    def _differentiate_and_quantize(self, da: torch.Tensor, h: torch.Tensor) -> None:
        """The gradients from da [N, I]; d_scale fp32 [N], 0 in the tail; and db1 [G, W] if wanted, the sum of dh."""
        x = self._x
        recipe = self._weights.recipe
        num_rows, ffn = da.shape
        numel = act_quantized.dact_quantize_workspace_numel(num_rows, ffn, self.db1)
        workspace = torch.empty(numel, dtype=torch.float32, device=h.device)
        rows = recipe.empty("rows", num_rows, h.shape[1], x.row_range)
        columns = recipe.empty("columns", num_rows, h.shape[1], x.row_range)
        a_columns = recipe.empty("columns", num_rows, ffn, x.row_range)
        out = DactOperands(self.d_scale, rows.buffers, columns.buffers, a_columns.buffers, self.db1)
        self._ops.dact_quantize(
            da,
            h,
            x.scale,
            x.row_range,
            out,
            workspace,
            self._weights.activation,
            recipe.row_format,
        )
        # Now, not on first use: this may launch kernels.
        dh_rows = rows.operand()
        dh_columns = columns.operand()
        a_operand = a_columns.operand()
        self._dh_rows = lambda: dh_rows
        self._dh_columns = lambda: dh_columns
        self._a_columns = lambda: a_operand

    def _differentiate(self, da: torch.Tensor, h: torch.Tensor) -> None:
        """Same as _differentiate_and_quantize, by separate kernels."""
        ops = self._ops
        x = self._x
        activation = self._weights.activation
        recipe = self._weights.recipe
        dh = self._rows_for_dh(h)
        a = torch.empty_like(da)
        sums = torch.empty_like(self.d_scale)
        ops.scaled_activation(h, x.scale, a, activation)
        ops.scaled_activation_grad(da, h, x.scale, dh, sums, activation)
        ops.sum_dact_partials(sums, x.row_range, self.d_scale, 1)  # the same with zeros in the tail
        rows = None if self.db1 is None else gradient_rows(recipe, dh, x.row_range, dbias=self.db1)
        self._dh_rows = lambda: rows or gradient_rows(recipe, dh, x.row_range)
        self._dh_columns = lambda: gradient_columns(recipe, dh, x.row_range)
        self._a_columns = lambda: recipe.quantize_columns(a, x.row_range).operand()

    def _output_gradients(self) -> torch.Tensor:
        wire = self._weights.wire.gradients
        return self._d_out if wire is None else wire.decode(self._d_out, self._dtype)

    def input_gradient(
        self, d_rows: torch.Tensor, part: Part | None = None, *, zero_tail: bool = False
    ) -> None:
        """See ExpertsBackward. All rows are made with the first part."""
        if part is not None and self._transposed1 is None:
            return
        assert self._transposed1 is not None  # forward has saved it for this pass
        self._ops.grouped_gemm_quantized(
            self._dh_rows(),
            self._transposed1,
            self._x.row_range,
            d_rows[: self._x.scale.shape[0]],
            zero_tail=zero_tail,
        )
        self._transposed1 = None  # the rows have been made

    def w1_product(self) -> WeightProduct:
        x = self._x
        wire = self._weights.wire.rows
        columns = (
            self._weights.recipe.quantize_columns(x.rows, x.row_range, row_index=x.row_index)
            if wire is None
            else wire.columns(x.rows, x.row_range, self._dtype, x.row_index)
        )
        return WeightProduct(self._dh_columns(), columns.operand(), x.row_range)

    def w2_product(self) -> WeightProduct:
        x = self._x
        wire = self._weights.wire.gradients
        lhs = (
            gradient_columns(self._weights.recipe, self._d_out, x.row_range, x.row_index)
            if wire is None
            else wire.columns(self._d_out, x.row_range, self._dtype, x.row_index).operand()
        )
        return WeightProduct(lhs, self._a_columns(), x.row_range)


def _arriving_operands(
    weights: QuantizedWeights,
    wire: WireFormat | None,
    x: ExpertRows,
    parts: Parts,
    *,
    is_gradient: bool = False,
    dbias: torch.Tensor | None = None,
) -> Iterable[tuple[Operand, Part]]:
    """Yields the operand of received rows (or gradients, as x.rows) with each part of it that has arrived. Without
    parts, or if the recipe does not support parts, all rows are one part. dbias: gets the sums of the rows times
    x.bias_scale, with the last part. None: not wanted, or the rows arrived quantised."""
    recipe = weights.recipe
    if parts is not None and takes_parts(recipe):
        return _part_by_part(weights, wire, x, parts, dbias)
    deque(() if parts is None else parts, maxlen=0)  # waits
    if wire is not None:
        rows = wire.quantized(x.rows, x.row_range, x.row_index).operand()
    elif is_gradient:
        rows = gradient_rows(
            recipe, x.rows, x.row_range, row_index=x.row_index, dbias=dbias, bias_scale=x.bias_scale
        )
    else:
        rows = recipe.quantize(x.rows, x.row_range, row_index=x.row_index).operand()
    return ((rows, Part(x.row_range)),)


def _part_by_part(
    weights: QuantizedWeights,
    wire: WireFormat | None,
    x: ExpertRows,
    parts: Iterable[Part],
    dbias: torch.Tensor | None,
) -> Iterator[tuple[Operand, Part]]:
    recipe = weights.recipe
    ops = kernels.for_device(x.rows.device)
    num_rows = x.scale.shape[0]
    rows = recipe.empty("rows", num_rows, weights.fc1.weight.shape[2], x.row_range)
    sums = None if dbias is None else (empty_row_sums(num_rows, dbias), x.bias_scale)
    for part in parts:
        if wire is None:
            ops.quantize_rows(
                x.rows, part.rows, rows.buffers, recipe.row_format, row_index=x.row_index, sums=sums
            )
        else:
            wire.unpack(x.rows, part.rows, rows, x.row_index)
        yield rows.operand(), part
    if dbias is not None and sums is not None:
        ops.sum_dbias(sums[0], x.row_range, dbias)
