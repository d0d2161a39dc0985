"""Experts whose products multiply a recipe's numbers: the steps of grouped/experts.py, without autograd.

H hidden, I ffn, W width of FC1's output, G groups, N rows; q() quantises (precision/products.py).

    h = q(x) q(W1)^T + b1             a = act(h) * scale            out = q(a) q(W2)^T + b2 * scale
    da = q(d_out) q(W2)               dh = act'(h) ...              d_rows = q(dh) q(W1)
    dW2 = q(d_out)^T q(a)             dW1 = q(dh)^T q(x)            along tokens

h, a, da and dh are rounded to the working dtype, as between separate modules, so GroupedLinear, activation and
GroupedLinear give the same bits. If takes_parts says so, rows that are still arriving are quantised (or taken off the
wire), multiplied and activated part by part. A recipe that needs all rows of a group to quantise one waits for all. The
activation and its gradient run in kernels that also quantise their results (kernels/act_quantized.py) where those take
the arguments; the separate kernels give the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from symmoe import kernels
from symmoe.grouped.experts import ExpertRows, ExpertsBackward, ExpertWeights, Hidden, SecondInput
from symmoe.kernels import act_quantized
from symmoe.kernels.activation import Activation
from symmoe.kernels.bias_sums import empty_row_sums
from symmoe.kernels.gemm_parts import Part
from symmoe.kernels.tensor_table import TensorTable
from symmoe.precision.cached_weights import HeldWeight, weight_operands
from symmoe.precision.operands import Operand, multiply, multiply_columns, operand
from symmoe.precision.products import LowPrecision
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
        a = _first_layer(numbers, arriving, w1, x.row_range, h, x.scale, self.activation, self.b1)
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
        self._gradients = _hidden_gradients(
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
        multiply_columns(self._gradients.columns(), right, x.row_range, out, accumulate=accumulate, num_sms=num_sms)

    def w2_gradient(self, out: torch.Tensor | TensorTable, accumulate: bool, *, num_sms: int | None = None) -> None:
        """See ExpertsBackward."""
        self._inputs.check()
        x, wire = self._x, self._weights.wire.gradients
        if wire is None:
            left = self._numbers.gradient_columns(self._received_gradients(), x.row_range, x.row_index)
        else:
            left = operand(wire.columns(self._received_gradients(), x.row_range, self._dtype, x.row_index))
        right = self._gradients.activation_columns()
        multiply_columns(left, right, x.row_range, out, accumulate=accumulate, num_sms=num_sms)


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


def _first_layer(
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


class _HiddenGradients(NamedTuple):
    """dh [N, W], and the activation a [N, I] again, as operands: computed all at once, or each when it is needed.

    Attributes:
        rows: dh, for dgrad.
        columns: dh, for wgrad.
        activation_columns: a, for wgrad.
    """

    rows: Callable[[], Operand]
    columns: Callable[[], Operand]
    activation_columns: Callable[[], Operand]


def _hidden_gradients(
    numbers: LowPrecision,
    da: torch.Tensor,
    h: torch.Tensor,
    scale: torch.Tensor,
    row_range: torch.Tensor,
    activation: Activation,
    d_scale: torch.Tensor,
    db1: torch.Tensor | None,
) -> _HiddenGradients:
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
        return _HiddenGradients(lambda: for_dgrad, lambda: for_wgrad, lambda: a_operand)
    dh, a = torch.empty_like(h), torch.empty_like(da)
    ops.scaled_activation(h, scale, a, activation)
    sums = torch.empty_like(d_scale)
    ops.scaled_activation_grad(da, h, scale, dh, sums, activation)
    ops.sum_dact_partials(sums, row_range, d_scale, 1)  # the same, with zeros in the tail
    dh_rows = None if db1 is None else numbers.gradient_rows(dh, row_range, dbias=db1)
    return _HiddenGradients(
        lambda: dh_rows or numbers.gradient_rows(dh, row_range),
        lambda: numbers.gradient_columns(dh, row_range),
        lambda: numbers.columns(a, row_range),
    )
