"""Experts with adapters: the steps of grouped/experts.py with low-rank GEMMs in between, without autograd.

    h = W1 x + b1, += B1 (A1 x)        a = act(h) * scale        out = W2 a + b2, += B2 (A2 a)

What adapters add to h comes before the activation, so the kernels that fuse a GEMM with the activation do not fit:
GEMMs and activation run by themselves, with the same bits where the adapters add zeros. Backward computes `a` again;
t1 = A1 x and t2 = A2 a [N, r] are kept with h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from symmoe import kernels
from symmoe.grouped.experts import FC1, FC2, ExpertRows, ExpertsBackward, ExpertWeights, Hidden, Parts, SecondInput
from symmoe.grouped.low_rank import LowRank, write_gradients
from symmoe.kernels.gemm_parts import Part
from symmoe.kernels.operands import given
from symmoe.kernels.tensor_table import TensorTable


@dataclass(frozen=True, slots=True)
class AdaptedWeights(ExpertWeights):
    """Weights of experts, frozen or not, and the adapters of FC1 and FC2."""

    low1: LowRank
    low2: LowRank

    @property
    def matrices(self) -> tuple[torch.Tensor | TensorTable | None, ...]:
        return self.w1, self.b1, self.low1.a, self.low1.b, self.w2, self.b2, self.low2.a, self.low2.b

    def of_matrices(self, matrices: Sequence[Any]) -> AdaptedWeights:
        (w1, b1, *low1), (w2, b2, *low2) = matrices[FC1], matrices[FC2]
        return replace(self, w1=w1, b1=b1, low1=LowRank(*low1), w2=w2, b2=b2, low2=LowRank(*low2))

    def first_layer(self, x: ExpertRows, *, num_rows: int, parts: Parts = None) -> tuple[Hidden, torch.Tensor]:
        """Same as ExpertWeights.first_layer, but the activation runs after all parts."""
        ops = kernels.for_device(x.rows.device)
        h = x.rows.new_empty((num_rows, self.w1.shape[1]))
        a = x.rows.new_empty((num_rows, self.w2.shape[2]))
        rows, t1, t2 = (x.rows, x.row_index), self.low1.new_rows(num_rows), self.low2.new_rows(num_rows)
        for part, its in self.calls(x, parts):
            ops.grouped_gemm(rows, its.w1, part.rows, h, bias=its.b1, num_sms=part.num_sms)
            its.low1.down(rows, part, t1)
            its.low1.add_up(t1, part, h)
        ops.scaled_activation(h, x.scale[:num_rows], a, self.activation)
        for part, its in self.calls(x):
            its.low2.down(a, part, t2)
        return Hidden(h, t1, t2), a

    def second_layer(self, a: SecondInput, hidden: Hidden, x: ExpertRows, out: torch.Tensor, **options: Any) -> None:
        """Same as ExpertWeights.second_layer; the sum is made in `out`."""
        ExpertWeights.second_layer(self, a, hidden, x, out, **options)
        part = options.get("part")
        for its_part, its in self.calls(x) if part is None else ((part, self),):
            its.low2.add_up(given("t2", hidden.t2), its_part, out)

    def backward(self, x: ExpertRows, hidden: Hidden, d_out: torch.Tensor, **options: Any) -> AdaptedBackward:
        return AdaptedBackward(x, self, hidden, d_out, **options)


class AdaptedBackward(ExpertsBackward):
    """Backward of AdaptedWeights. Gradients of weights that are not frozen are computed as in ExpertsBackward."""

    _weights: AdaptedWeights

    def _fc2_dgrad(self, hidden: Hidden, parts: Parts) -> bool:
        ops, x, weights, h = self._ops, self._x, self._weights, hidden.h
        num_rows = h.shape[0]
        self._dh, self._a = self._rows_for_dh(h), h.new_empty((num_rows, weights.w2.shape[2]))
        scale, da = x.scale[:num_rows], torch.empty_like(self._a)
        self._t1, self._t2 = given("t1", hidden.t1), given("t2", hidden.t2)
        self._dt1, self._dt2 = weights.low1.new_rows(num_rows), weights.low2.new_rows(num_rows)
        for part, its in weights.calls(x, parts):
            d_out = self._d_out, x.row_index
            ops.grouped_gemm_dgrad(d_out, its.w2, part.rows, da, num_sms=part.num_sms)
            its.low2.down_gradient(d_out, part, self._dt2)
            its.low2.add_up_gradient(self._dt2, part, da)
        ops.scaled_activation(h, scale, self._a, weights.activation)
        d_scale = torch.empty_like(self.d_scale)
        ops.scaled_activation_grad(da, h, scale, self._dh, d_scale, weights.activation)
        for part, its in weights.calls(x):
            if (db1 := self._bias_gradients(its)[0]) is not None:
                ops.grouped_bias_grad(self._dh, part.rows, db1)
            its.low1.down_gradient(self._dh, part, self._dt1)
        ops.sum_dact_partials(d_scale, part.rows, self.d_scale, 1)  # the same, with zeros in the tail
        return False

    def _input_gradient(self, d_rows: torch.Tensor, part: Part, weights: Any, *, zero_tail: bool = False) -> None:
        """The sum is made in `d_rows`."""
        super()._input_gradient(d_rows, part, weights, zero_tail=zero_tail)
        weights.low1.add_up_gradient(self._dt1, part, d_rows)

    def adapter_gradients(self) -> tuple[torch.Tensor | None, ...]:
        """dA1, dB1, dA2, dB2; None for adapters that require none. Those of replicas are written, too."""
        low1, low2 = self._weights.low1, self._weights.low2
        gradients = *low1.new_gradients(), *low2.new_gradients()
        self._write_gradients(self._x.row_range, gradients)
        if (replicas := self._weights.replicas) is not None:
            of_first, of_second = replicas.gradients[FC1], replicas.gradients[FC2]
            self._write_gradients(replicas.row_range, (*of_first[2:], *of_second[2:]))
        return gradients

    def _write_gradients(self, row_range: torch.Tensor, gradients: Sequence[torch.Tensor | None]) -> None:
        rows, d_out = (self._x.rows, self._x.row_index), (self._d_out, self._x.row_index)
        write_gradients((rows, self._t1, self._dh, self._dt1), row_range, gradients[:2])
        write_gradients((self._a, self._t2, d_out, self._dt2), row_range, gradients[2:])
