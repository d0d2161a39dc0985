"""The experts of a call, and FC1, activation times scale, FC2 for all of them: the fused kernels in their order.

H hidden, I ffn, W width of FC1's output (2I if gated), G groups (experts of this rank), N rows sorted by group. This
module does not synchronise the host, copy rows, or use autograd.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch

from symmoe import kernels
from symmoe.grouped.activations import ScaledActivation
from symmoe.grouped.linear import GroupedLinear, write_gradients
from symmoe.grouped.parameters import local_tensors
from symmoe.grouped.rows_function import ExpertRows
from symmoe.grouped.weights import LayerWeights, WeightProduct
from symmoe.kernels.activation import Activation
from symmoe.kernels.gemm_parts import Part
from symmoe.kernels.operands import Matrices, Operand, require_tensor
from symmoe.precision.recipes import Recipe

T = TypeVar("T")
Biases = tuple[torch.Tensor | None, torch.Tensor | None]
Layers = tuple[GroupedLinear, ScaledActivation, GroupedLinear]


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """The properties of experts, besides tensors, that determine launches: fields of GroupedMLP; for fc1 and fc2 the
    number of weights, and whether they have biases."""

    num_groups: int
    hidden: int
    ffn: int
    activation: Activation
    precision: Recipe | None
    num_weights: tuple[int, int]
    have_biases: tuple[bool, bool]

    def split(self, tensors: Sequence[T]) -> tuple[tuple[T, ...], tuple[T, ...], tuple[T, ...]]:
        """Splits a sequence into the weights of fc1, the weights of fc2, and the adapters."""
        first = self.num_weights[0]
        end = sum(self.num_weights)
        return tuple(tensors[:first]), tuple(tensors[first:end]), tuple(tensors[end:])


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTensors:
    """The experts of one call: a frozen description, and tensors, which are a module's, this rank's parts of DTensors,
    results of parametrizations and adapters for this call, or an operator's inputs."""

    form: ExpertSpec
    biases: Biases
    tensors: tuple[torch.Tensor, ...]  # weights and adapters in one sequence, see ExpertSpec.split
    linears: tuple[GroupedLinear, GroupedLinear]  # whose options backward reads when it runs


def of_tensors(
    layers: Layers, biases: Sequence[torch.Tensor | None], tensors: Sequence[torch.Tensor]
) -> ExpertTensors:
    """Experts of these layers with these biases (or none), weights and adapters, in the form of local_tensors."""
    fc1, activation, fc2 = layers
    b1, b2 = biases or (None, None)
    form = ExpertSpec(
        fc1.num_groups,
        fc1.in_features,
        fc2.in_features,
        activation.activation,
        fc1.precision,
        num_weights=(len(fc1.weight_names), len(fc2.weight_names)),
        have_biases=(b1 is not None, b2 is not None),
    )
    return ExpertTensors(form, (b1, b2), tuple(tensors), (fc1, fc2))


def materialized(experts: Any, dtype: torch.dtype) -> ExpertTensors:
    """The experts of a GroupedMLP for a call in that dtype, see local_tensors. Returns ExpertTensors unchanged."""
    if isinstance(experts, ExpertTensors):
        return experts
    biases, tensors = local_tensors((experts.fc1, experts.fc2), dtype)
    return of_tensors((experts.fc1, experts.activation, experts.fc2), biases, tensors)


class SavedActivations(NamedTuple):
    """Tensors that forward keeps for backward besides its inputs; with a recipe the transposed weights as operands."""

    h: torch.Tensor  # [num_rows, W], FC1's output
    t1: torch.Tensor | None = None  # [num_rows, r], A1 times the rows
    t2: torch.Tensor | None = None  # and A2 times the activation
    w1_data: torch.Tensor | None = None
    w1_scale: torch.Tensor | None = None
    w1_global_scale: torch.Tensor | None = None
    w2_data: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w2_global_scale: torch.Tensor | None = None

    @property
    def transposed(self) -> tuple[Operand | None, Operand | None]:
        """W1 and W2 for dgrad; None if backward does not use it."""
        w1, w2 = (
            None if fields[0] is None else Operand._make(fields)
            for fields in (self[3:6], self[6:9])
        )
        return w1, w2


FC1 = slice(0, 4)
FC2 = slice(4, 8)  # of the kinds of matrices, control.REPLICA_MATRICES
W1 = FC1.start
B1 = FC1.start + 1
W2 = FC2.start
B2 = FC2.start + 1


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas of other ranks' experts, S further groups, whose rows follow the rows of the experts."""

    weights: ExpertWeights
    row_range: torch.Tensor  # int32 [2, S]


# The first layer's output for the second: the activation, and A2 times it (None without adapters); or, with a recipe,
# the operands of the product.
SecondInput = tuple[Any, Any]
Parts = Iterable[Part] | None  # of the rows, as they arrive; None: all rows have arrived


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts' weights in the kernels' form, and the order in which the kernels run.

        h = W1 x + b1, += B1 (A1 x)        a = act(h) * scale        out = W2 a + b2, += B2 (A2 a)

    Adapters add to h before the activation, so with adapters the kernels that fuse a GEMM with the activation do not
    fit: GEMMs and activation run separately, with the same bits if the adapters add zeros."""

    fc1: LayerWeights  # W1 [G, W, H]
    fc2: LayerWeights  # W2 [G, H, I]
    activation: Activation
    replicas: Replicas | None = field(default=None, kw_only=True)
    # In backward, by kind, buffers for the gradients; None: no gradient, or the layer's target, as for W1 and W2.
    gradients: Sequence[torch.Tensor | None] = field(default=(), kw_only=True)

    @property
    def matrices(self) -> tuple[Matrices | None, ...]:
        """All tensors of the experts, by kind."""
        return *self.fc1[:4], *self.fc2[:4]

    @property
    def operands(self) -> list[torch.Tensor | None]:
        """The operands of both layers."""
        return self.fc1.operands + self.fc2.operands

    def of_matrices(self, matrices: Sequence[Any]) -> ExpertWeights:
        """Experts of the same kind with these :attr:`matrices`."""
        return replace(self, fc1=LayerWeights(*matrices[FC1]), fc2=LayerWeights(*matrices[FC2]))

    def calls(self, x: ExpertRows, parts: Parts | Part = None) -> Iterator[tuple[Part, Any]]:
        """Yields the parts of the rows, and the weights of each part."""
        if parts is None:
            parts = [Part(x.row_range)]
            parts += (
                []
                if self.replicas is None
                else [Part(self.replicas.row_range, is_of_replicas=True)]
            )
        for part in (parts,) if isinstance(parts, Part) else parts:
            yield (
                part,
                self.replicas.weights
                if part.is_of_replicas and self.replicas is not None
                else self,
            )

    def first_layer(
        self, x: ExpertRows, *, num_rows: int, parts: Parts = None
    ) -> tuple[SavedActivations, SecondInput]:
        """h [num_rows, W] and a [num_rows, I]. The first GEMM and the activation run once for each part, or for all
        rows; with adapters the activation runs after all parts."""
        ops = kernels.for_device(x.rows.device)
        rows = (x.rows, x.row_index)
        h = x.rows.new_empty((num_rows, self.fc1.weight.shape[1]))
        a = x.rows.new_empty((num_rows, self.fc2.weight.shape[2]))
        if self.fc1.a is None:
            for part, weights in self.calls(x, parts):
                ops.grouped_gemm_act(
                    rows,
                    weights.fc1.weight,
                    part.rows,
                    x.scale,
                    (h, a),
                    self.activation,
                    bias=weights.fc1.bias,
                    num_sms=part.num_sms,
                )
            return SavedActivations(h), (a, None)
        t1 = h.new_empty((num_rows, self.fc1.a.shape[1]))
        t2 = h.new_empty((num_rows, self.fc2.a.shape[1]))
        for part, weights in self.calls(x, parts):
            fc1 = weights.fc1
            num_sms = part.num_sms
            ops.grouped_gemm(rows, fc1.weight, part.rows, h, bias=fc1.bias, num_sms=num_sms)
            ops.grouped_gemm(rows, fc1.a, part.rows, t1, num_sms=num_sms)
            ops.grouped_gemm(t1, fc1.b, part.rows, h, accumulate=True, num_sms=num_sms)
        ops.scaled_activation(h, x.scale[:num_rows], a, self.activation)
        for part, weights in self.calls(x):
            ops.grouped_gemm(a, weights.fc2.a, part.rows, t2)
        return SavedActivations(h, t1, t2), (a, t2)

    def second_layer(
        self,
        a: SecondInput,
        x: ExpertRows,
        out: torch.Tensor,
        part: Part | None = None,
        *,
        zero_tail: bool = False,
    ) -> None:
        """out [N, H], or only a part of the rows, with b2 times bias_scale, up to the end of the last group, and with
        zeros past it if `zero_tail`. Adapters add their product in `out`."""
        a, t2 = a
        ops = kernels.for_device(out.device)
        for called_part, weights in self.calls(x, part):
            ops.grouped_gemm(
                a,
                weights.fc2.weight,
                called_part.rows,
                out,
                bias=(weights.fc2.bias, x.bias_scale),
                zero_tail=zero_tail,
                num_sms=called_part.num_sms,
            )
        if t2 is not None:
            for called_part, weights in self.calls(x, part):
                b2 = weights.fc2.b
                num_sms = called_part.num_sms
                ops.grouped_gemm(t2, b2, called_part.rows, out, accumulate=True, num_sms=num_sms)

    def backward(
        self, x: ExpertRows, hidden: SavedActivations, d_out: torch.Tensor, **options: Any
    ) -> ExpertsBackward:
        """The backward pass after its first step. Arguments as in ExpertsBackward."""
        return ExpertsBackward(x, self, hidden, d_out, **options)


class ExpertsBackward:
    """Backward of both layers of ExpertWeights, in three steps that the caller puts in order. Construction runs the
    first: FC2 dgrad, the activation's gradient, and the sums over rows and features. Then :meth:`input_gradient`,
    :meth:`w1_gradient` and :meth:`w2_gradient` may be called in any order, or not at all. Row i of d_out [., H] is at
    `row_index[i]`, or at i without an index; it is complete after the last of `parts`. d_scale fp32 [num_rows] is the
    gradient of the scale of the activation and (if it has the same) of b2, 0 in the tail; it is incomplete without
    `needs_scale`. `spends_h`: h has no later reader, and its gradient overwrites it."""

    def __init__(
        self,
        x: ExpertRows,
        weights: ExpertWeights,
        hidden: SavedActivations,
        d_out: torch.Tensor,
        *,
        parts: Parts = None,
        needs_scale: bool = True,
        spends_h: bool = False,
    ) -> None:
        h = hidden.h
        self._spends_h = spends_h
        self._ops = ops = kernels.for_device(h.device)
        self.d_scale = torch.empty(h.shape[0], dtype=torch.float32, device=h.device)
        self.gradients: list[
            Any
        ] = [  # by kind; with replicas, W1's and W2's are set when they are computed
            torch.empty_like(weight)
            if kind not in (W1, W2) and isinstance(weight, torch.Tensor) and weight.requires_grad
            else None
            for kind, weight in enumerate(weights.matrices)
        ]
        self._x, self._weights, self._d_out = x, replace(weights, gradients=self.gradients), d_out
        self.d_biases = self.db1, self.db2 = self.gradients[B1], self.gradients[B2]
        has_db2 = self._fc2_dgrad(hidden, parts)
        if weights.fc2.bias is not None:
            d_out = self._output_gradients()
            for part, called in self._weights.calls(x):
                db2 = None if has_db2 else called.gradients[B2]
                if db2 is not None:
                    ops.grouped_bias_grad((d_out, x.row_index), part.rows, db2, scale=x.bias_scale)
                if x.bias_scale is not None and needs_scale:
                    ops.grouped_bias_dot(
                        (d_out, x.row_index),
                        called.fc2.bias,
                        part.rows,
                        self.d_scale,
                        accumulate=True,
                    )

    def _fc2_dgrad(self, hidden: SavedActivations, parts: Parts) -> bool:
        """Makes dh, a, d_scale and db1 by FC2 dgrad and the activation's gradient. Returns whether it also made db2."""
        h = hidden.h
        weights = self._weights
        self._dh = self._rows_for_dh(h)
        self._a = h.new_empty((len(h), weights.fc2.weight.shape[2]))
        if weights.fc1.a is None:
            self._fused_dgrad(h, parts)
        else:
            self._dgrad_with_adapters(hidden, parts)
        return False

    def _fused_dgrad(self, h: torch.Tensor, parts: Parts) -> None:
        """Runs _fc2_dgrad in one kernel per part."""
        ops = self._ops
        x = self._x
        weights = self._weights
        num_rows, ffn = self._a.shape
        num_groups = max(called.fc2.weight.shape[0] for _, called in weights.calls(x))
        numel = ops.dact_workspace_numel(num_rows, num_groups, ffn, weights.activation)
        workspace = torch.empty(numel, dtype=torch.float32, device=h.device)
        if (
            parts is not None and self.db1 is not None
        ):  # db1 is summed over whole groups: wait for all rows
            deque(parts, maxlen=0)
            parts = None
        is_whole = parts is None and weights.replicas is None
        end = x.row_range if weights.replicas is None else weights.replicas.row_range
        num_partials = 0
        d_scale = self.d_scale if is_whole else None
        for part, called in weights.calls(x, parts):
            gradients = self._dh, self._a, d_scale, called.gradients[B1]
            num_partials = ops.grouped_gemm_dact(
                (self._d_out, x.row_index),
                called.fc2.weight,
                part.rows,
                (h, x.scale),
                gradients,
                workspace,
                weights.activation,
                num_sms=part.num_sms,
            )
        if not is_whole:
            ops.sum_dact_partials(workspace, end, self.d_scale, num_partials)

    def _dgrad_with_adapters(self, hidden: SavedActivations, parts: Parts) -> None:
        """Runs _fc2_dgrad in separate kernels, which recompute `a`."""
        ops = self._ops
        x = self._x
        weights = self._weights
        h = hidden.h
        scale = x.scale[: len(h)]
        da = torch.empty_like(self._a)
        d_out = (self._d_out, x.row_index)
        self._t1 = require_tensor("t1", hidden.t1)
        self._t2 = require_tensor("t2", hidden.t2)
        self._dt1, self._dt2 = torch.empty_like(self._t1), torch.empty_like(self._t2)
        for part, called in weights.calls(x, parts):
            fc2 = called.fc2
            num_sms = part.num_sms
            ops.grouped_gemm_dgrad(d_out, fc2.weight, part.rows, da, num_sms=num_sms)
            ops.grouped_gemm_dgrad(d_out, fc2.b, part.rows, self._dt2, num_sms=num_sms)
            ops.grouped_gemm_dgrad(
                self._dt2, fc2.a, part.rows, da, accumulate=True, num_sms=num_sms
            )
        ops.scaled_activation(h, scale, self._a, weights.activation)
        d_scale = torch.empty_like(self.d_scale)
        ops.scaled_activation_grad(da, h, scale, self._dh, d_scale, weights.activation)
        for part, called in weights.calls(x):
            if (db1 := called.gradients[B1]) is not None:
                ops.grouped_bias_grad(self._dh, part.rows, db1)
            ops.grouped_gemm_dgrad(self._dh, called.fc1.b, part.rows, self._dt1)
        ops.sum_dact_partials(
            d_scale, part.rows, self.d_scale, 1
        )  # the same with zeros in the tail

    def _rows_for_dh(self, h: torch.Tensor) -> torch.Tensor:
        return h if self._spends_h else torch.empty_like(h)

    def _output_gradients(self) -> torch.Tensor:
        """Output gradients [., H] in the working dtype, like d_out."""
        return self._d_out

    def input_gradient(
        self, d_rows: torch.Tensor, part: Part | None = None, *, zero_tail: bool = False
    ) -> None:
        """d_rows [N, H]: the gradient of row i (not summed over rows that share a packed row), or of a part. Adapters
        add their gradient in `d_rows`."""
        ops = self._ops
        x = self._x
        weights = self._weights
        for called_part, called in weights.calls(x, part):
            ops.grouped_gemm_dgrad(
                self._dh,
                called.fc1.weight,
                called_part.rows,
                d_rows,
                zero_tail=zero_tail,
                num_sms=called_part.num_sms,
            )
        if weights.fc1.a is not None:
            for called_part, called in weights.calls(x, part):
                a1 = called.fc1.a
                num_sms = called_part.num_sms
                ops.grouped_gemm_dgrad(
                    self._dt1, a1, called_part.rows, d_rows, accumulate=True, num_sms=num_sms
                )

    def w1_product(self) -> WeightProduct:
        """The product of dW1 [G, W, H]."""
        x = self._x
        return WeightProduct(self._dh, (x.rows, x.row_index), x.row_range, {"rows": x.rows})

    def w2_product(self) -> WeightProduct:
        """The product of dW2 [G, H, I]."""
        x = self._x
        d_out = self._d_out
        return WeightProduct((d_out, x.row_index), self._a, x.row_range, {"d_out": d_out})

    def w1_gradient(self, out: Matrices, accumulate: bool, *, num_sms: int | None = None) -> None:
        """Writes dW1; a weights.Compute."""
        self._weight_gradient(W1, self.w1_product(), out, accumulate, num_sms)

    def w2_gradient(self, out: Matrices, accumulate: bool) -> None:
        """Writes dW2; a weights.Compute."""
        self._weight_gradient(W2, self.w2_product(), out, accumulate)

    def _weight_gradient(
        self,
        kind: int,
        product: WeightProduct,
        out: Matrices,
        accumulate: bool,
        num_sms: int | None = None,
    ) -> None:
        """Writes the product to out, and the product of replicas' rows to their buffer, if any. kind: W1 or W2."""
        if (replicas := self._weights.replicas) is not None:
            self.gradients[kind] = out
            if (replica_gradients := replicas.weights.gradients[kind]) is not None:
                replica_product = product._replace(row_range=replicas.row_range)
                replica_product(replica_gradients, False, num_sms=num_sms)
        product(out, accumulate, num_sms=num_sms)

    def free_w2(self) -> None:
        """Frees tensors that only dW2 reads, after the computation of dW2 or if its target computes none."""
        for name in ("_a", "_a_columns", "_d_out"):
            vars(self).pop(name, None)

    def adapter_gradients(self) -> tuple[torch.Tensor | None, ...]:
        """dA1, dB1, dA2, dB2; None for adapters that require no gradient; empty without adapters. Also writes the
        gradients of replicas' adapters."""
        if self._weights.fc1.a is None:
            return ()
        rows = (self._x.rows, self._x.row_index)
        d_out = (self._d_out, self._x.row_index)
        for part, called in self._weights.calls(self._x):
            write_gradients(
                (rows, self._t1, self._dh, self._dt1), part.rows, called.gradients[FC1][2:]
            )
            write_gradients(
                (self._a, self._t2, d_out, self._dt2), part.rows, called.gradients[FC2][2:]
            )
        return *self._weights.gradients[FC1][2:], *self._weights.gradients[FC2][2:]
