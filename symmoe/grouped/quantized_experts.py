"""Experts whose products multiply a recipe's numbers: the steps of grouped/experts.py, without autograd.

H hidden, I ffn, W width of FC1's output, G groups, N rows; q() quantises (precision/products.py).

    h = q(x) q(W1)^T + b1             a = act(h) * scale            out = q(a) q(W2)^T + b2 * scale
    da = q(d_out) q(W2)               dh = act'(h) ...              d_rows = q(dh) q(W1)
    dW2 = q(d_out)^T q(a)             dW1 = q(dh)^T q(x)            along tokens

h, a, da and dh are rounded to the working dtype, as between separate modules, so GroupedLinear, activation and
GroupedLinear give the same bits. If takes_parts says so, rows that are still arriving are quantised (or taken off the
wire), multiplied and activated part by part. A recipe that needs all rows of a group to quantise one waits for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from symmoe import kernels
from symmoe.grouped.experts import ExpertRows, ExpertsBackward, ExpertWeights, Hidden, SecondInput
from symmoe.grouped.quantized_activation import first_layer, hidden_gradients
from symmoe.kernels.bias_sums import empty_row_sums
from symmoe.kernels.gemm_parts import Part
from symmoe.kernels.tensor_table import TensorTable
from symmoe.precision.cached_weights import HeldWeight, weight_operands
from symmoe.precision.operands import Operand, multiply, operand
from symmoe.precision.products import LowPrecision, weight_gradient
from symmoe.precision.recipes import Recipe
from symmoe.precision.wire import WireFormat

# Makes an operand of all rows: (rows, row_range, row_index); and sums them: dbias=, bias_scale=, if dbias is wanted.
Quantize = Callable[..., Operand]


@dataclass(frozen=True, slots=True)
class Wire:
    """The formats in which rows and gradients have travelled; None: not quantised."""

    rows: WireFormat | None = None
    gradients: WireFormat | None = None


FULL = Wire()


def takes_parts(recipe: Recipe | None) -> bool:
    """Whether experts compute some rows while others are on their way. For that, row i of an operand must be made of
    row i only: not so with scales in tiles."""
    return recipe is None or recipe.row_format.scale_dtype == torch.float32


@dataclass(frozen=True, slots=True)
class QuantizedWeights(ExpertWeights):
    """Weights of experts in the working dtype, and how they are multiplied.

    Attributes:
        recipe: for all products.
        needs_transposed: whether backward will need W1 for dgrad, and whether it will need W2.
        wire: the formats in which rows and gradients arrive.
        held: W1 and W2 as operands that several calls share; None: this call makes its own.
    """

    recipe: Recipe
    needs_transposed: tuple[bool, bool]
    wire: Wire
    held: tuple[HeldWeight | None, HeldWeight | None] = (None, None)

    def first_layer(
        self, x: ExpertRows, *, num_rows: int, parts: Iterable[Part] | None = None
    ) -> tuple[Hidden, SecondInput]:
        """Same as ExpertWeights.first_layer, but returns operands of the second layer, not `a`."""
        numbers = LowPrecision(self.recipe)
        h = torch.empty((num_rows, self.w1.shape[1]), dtype=self.w1.dtype, device=self.w1.device)
        x = x.without_tail(num_rows)
        arriving = _arriving(numbers.rows, self, self.wire.rows, x.rows, x, parts)
        (w1, transposed1), (w2, transposed2) = (
            weight_operands(numbers, weight, transposed=is_needed, held=held)
            for weight, is_needed, held in zip((self.w1, self.w2), self.needs_transposed, self.held, strict=True)
        )
        a = first_layer(numbers, arriving, w1, x.row_range, h, x.scale, self.activation, self.b1)
        return Hidden.with_weights(h, transposed1, transposed2), (a, w2)

    def second_layer(
        self,
        a: SecondInput,
        hidden: Hidden,
        x: ExpertRows,
        out: torch.Tensor,
        *,
        zero_tail: bool = False,
        part: Part | None = None,
    ) -> None:
        """Same as ExpertWeights.second_layer."""
        num_rows = hidden.h.shape[0]
        x = x.without_tail(num_rows)
        assert not isinstance(a, torch.Tensor)  # it is what first_layer has made
        multiply(
            *a,
            x.row_range if part is None else part.rows,
            out[:num_rows],
            group_range=None if part is None else x.row_range,
            bias=self.b2,
            bias_scale=x.bias_scale,
            zero_tail=zero_tail,
            num_sms=None if part is None else part.num_sms,
        )

    def backward(self, x: ExpertRows, hidden: Hidden, d_out: torch.Tensor, **options: Any) -> QuantizedBackward:
        """Same as ExpertWeights.backward."""
        return QuantizedBackward(x.without_tail(hidden.h.shape[0]), self, hidden, d_out, **options)


class QuantizedBackward(ExpertsBackward):
    """Backward of QuantizedWeights. What has travelled quantised is dequantised for weight and bias gradients; FC2's
    bias gradient otherwise comes from the pass that quantises, as FC1's does."""

    _weights: QuantizedWeights

    def _to_first_layer(self, hidden: Hidden, parts: Iterable[Part] | None) -> None:
        x, weights, h = self._x, self._weights, hidden.h
        self._numbers, self._dtype = LowPrecision(weights.recipe), h.dtype
        self._transposed1 = None if hidden.w1_data is None else hidden.transposed1
        quantize, received, wire = self._numbers.gradient_rows, self._received_gradients(), weights.wire.gradients
        da = h.new_empty((h.shape[0], weights.w2.shape[2]))
        dbias = self.db2 if wire is None else None
        for d_out, part in _arriving(quantize, weights, wire, received, x, parts, dbias):
            multiply(d_out, hidden.transposed2, part.rows, da, num_sms=part.num_sms)
        self._gradients = hidden_gradients(
            self._numbers, da, h, x.scale, x.row_range, weights.activation, self.d_scale, self.db1
        )

    def _output_bias_gradient(self, d_out: torch.Tensor, db2: torch.Tensor) -> None:
        if self._weights.wire.gradients is not None:  # otherwise the first step has made it
            super()._output_bias_gradient(d_out, db2)

    def _output_gradients(self) -> torch.Tensor:
        wire = self._weights.wire.gradients
        received = self._received_gradients()
        return received if wire is None else wire.decode(received, self._dtype)

    def _received_gradients(self) -> torch.Tensor:
        """The received gradients; where row i is at i, only as many rows as h has."""
        return self._d_out if self._x.row_index is not None else self._d_out[: self._x.scale.shape[0]]

    def input_gradient(self, d_rows: torch.Tensor, *, zero_tail: bool = False) -> None:
        """See ExpertsBackward."""
        assert self._transposed1 is not None  # forward has kept it for this
        dh, d_rows = self._gradients.rows(), d_rows[: self._x.scale.shape[0]]
        multiply(dh, self._transposed1, self._x.row_range, d_rows, zero_tail=zero_tail)
        self._transposed1 = None  # weight gradients do not use it, and may run much later

    def w1_gradient(self, out: torch.Tensor | TensorTable, accumulate: bool, *, num_sms: int | None = None) -> None:
        """See ExpertsBackward."""
        self._inputs.check()
        x, wire = self._x, self._weights.wire.rows
        if wire is None:
            right = self._numbers.columns(x.rows, x.row_range, x.row_index)
        else:
            right = operand(wire.columns(x.rows, x.row_range, self._dtype, x.row_index))
        weight_gradient(self._gradients.columns(), right, x.row_range, out, accumulate=accumulate, num_sms=num_sms)

    def w2_gradient(self, out: torch.Tensor | TensorTable, accumulate: bool, *, num_sms: int | None = None) -> None:
        """See ExpertsBackward."""
        self._inputs.check()
        x, wire = self._x, self._weights.wire.gradients
        if wire is None:
            left = self._numbers.gradient_columns(self._received_gradients(), x.row_range, x.row_index)
        else:
            left = operand(wire.columns(self._received_gradients(), x.row_range, self._dtype, x.row_index))
        right = self._gradients.activation_columns()
        weight_gradient(left, right, x.row_range, out, accumulate=accumulate, num_sms=num_sms)


def _arriving(
    quantize: Quantize,
    weights: QuantizedWeights,
    wire: WireFormat | None,
    received: torch.Tensor,
    x: ExpertRows,
    parts: Iterable[Part] | None,
    dbias: torch.Tensor | None = None,
) -> Iterable[tuple[Operand, Part]]:
    """The operand of received rows or gradients and a part of it that has arrived, one part after the other.

    Without parts, or if the recipe does not take them, all rows are one part, which `quantize` makes.

    dbias: gets the sums of the rows times x.bias_scale, with the last part. None: not wanted, or they came by wire.
    """
    if parts is not None and takes_parts(weights.recipe):
        return _part_by_part(weights, wire, received, x, parts, dbias)
    deque(() if parts is None else parts, maxlen=0)  # waits
    if wire is None:
        sums = {} if dbias is None else {"dbias": dbias, "bias_scale": x.bias_scale}
        rows = quantize(received, x.row_range, x.row_index, **sums)
    else:
        rows = operand(wire.quantized(received, x.row_range, x.row_index))
    return ((rows, Part(x.row_range)),)


def _part_by_part(
    weights: QuantizedWeights,
    wire: WireFormat | None,
    received: torch.Tensor,
    x: ExpertRows,
    parts: Iterable[Part],
    dbias: torch.Tensor | None,
) -> Iterator[tuple[Operand, Part]]:
    recipe, ops = weights.recipe, kernels.for_device(received.device)
    num_rows = x.scale.shape[0]
    rows = recipe.empty_rows(num_rows, weights.w1.shape[2], x.row_range)
    options, sums = {"row_index": x.row_index}, None
    if dbias is not None:
        sums = empty_row_sums(num_rows, dbias)
        options |= {"bias_sums": sums, "bias_scale": x.bias_scale}
    for part in parts:
        if wire is None:
            ops.quantize_rows(received, part.rows, rows.data, rows.scale, recipe.row_format, **options)
        else:
            wire.unpack(received, part.rows, rows, x.row_index)
        yield operand(rows), part
    if dbias is not None and sums is not None:
        ops.sum_dbias(sums, x.row_range, dbias)
