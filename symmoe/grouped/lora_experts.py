"""Experts with adapters: the steps of grouped/experts.py with low-rank GEMMs in between, without autograd.

    h = W1 x + b1, += B1 (A1 x)        a = act(h) * scale        out = W2 a + b2, += B2 (A2 a)

What adapters add to h comes before the activation, so the kernels that fuse a GEMM with the activation do not fit:
GEMMs and activation run by themselves, with the same bits where the adapters add zeros. Backward computes `a` again;
t1 = A1 x and t2 = A2 a [N, r] are kept with h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from symmoe import kernels
from symmoe.grouped.experts import ExpertRows, ExpertsBackward, ExpertWeights, Hidden, Parts, SecondInput
from symmoe.grouped.low_rank import LowRank
from symmoe.kernels.gemm_parts import Part
from symmoe.kernels.operands import given


@dataclass(frozen=True, slots=True)
class AdaptedWeights(ExpertWeights):
    """Weights of experts, frozen or not, and the adapters of FC1 and FC2."""

    low1: LowRank
    low2: LowRank

    def first_layer(self, x: ExpertRows, *, num_rows: int, parts: Parts = None) -> tuple[Hidden, torch.Tensor]:
        """Same as ExpertWeights.first_layer, but the activation runs after all parts."""
        ops = kernels.for_device(x.rows.device)
        h = x.rows.new_empty((num_rows, self.w1.shape[1]))
        a = x.rows.new_empty((num_rows, self.w2.shape[2]))
        t1 = self.low1.new_rows(num_rows)
        for part in (Part(x.row_range),) if parts is None else parts:
            rows = x.rows, x.row_index
            ops.grouped_gemm(rows, self.w1, part.rows, h, bias=self.b1, num_sms=part.num_sms)
            self.low1.down(rows, part, t1)
            self.low1.add_up(t1, part, h)
        ops.scaled_activation(h, x.scale[:num_rows], a, self.activation)
        return Hidden(h, t1, self.low2.down(a, Part(x.row_range))), a

    def second_layer(self, a: SecondInput, hidden: Hidden, x: ExpertRows, out: torch.Tensor, **options: Any) -> None:
        """Same as ExpertWeights.second_layer; the sum is made in `out`."""
        ExpertWeights.second_layer(self, a, hidden, x, out, **options)
        self.low2.add_up(given("t2", hidden.t2), options.get("part") or Part(x.row_range), out)

    def backward(self, x: ExpertRows, hidden: Hidden, d_out: torch.Tensor, **options: Any) -> AdaptedBackward:
        """Same as ExpertWeights.backward."""
        return AdaptedBackward(x, self, hidden, d_out, **options)


class AdaptedBackward(ExpertsBackward):
    """Backward of AdaptedWeights. Gradients of weights that are not frozen are computed as in ExpertsBackward."""

    _weights: AdaptedWeights

    def _fc2_dgrad(self, hidden: Hidden, parts: Parts) -> bool:
        ops, x, weights, h = self._ops, self._x, self._weights, hidden.h
        num_rows, low2 = h.shape[0], weights.low2
        self._dh, self._a = self._rows_for_dh(h), h.new_empty((num_rows, weights.w2.shape[2]))
        scale, da = x.scale[:num_rows], torch.empty_like(self._a)
        self._t1, self._t2 = given("t1", hidden.t1), given("t2", hidden.t2)
        self._dt2 = low2.new_rows(num_rows)
        for part in (Part(x.row_range),) if parts is None else parts:
            d_out = self._d_out, x.row_index
            ops.grouped_gemm_dgrad(d_out, weights.w2, part.rows, da, num_sms=part.num_sms)
            low2.down_gradient(d_out, part, self._dt2)
            low2.add_up_gradient(self._dt2, part, da)
        ops.scaled_activation(h, scale, self._a, weights.activation)
        d_scale = torch.empty_like(self.d_scale)
        ops.scaled_activation_grad(da, h, scale, self._dh, d_scale, weights.activation)
        ops.sum_dact_partials(d_scale, x.row_range, self.d_scale, 1)  # the same, with zeros in the tail
        if self.db1 is not None:
            ops.grouped_bias_grad(self._dh, x.row_range, self.db1)
        self._dt1 = weights.low1.down_gradient(self._dh, Part(x.row_range))
        return False

    def input_gradient(self, d_rows: torch.Tensor, *, zero_tail: bool = False, part: Part | None = None) -> None:
        """Same as in ExpertsBackward; the sum is made in `d_rows`."""
        super().input_gradient(d_rows, zero_tail=zero_tail, part=part)
        self._weights.low1.add_up_gradient(self._dt1, part or Part(self._x.row_range), d_rows)

    def adapter_gradients(self) -> tuple[torch.Tensor | None, ...]:
        """dA1, dB1, dA2, dB2; None for adapters that require none."""
        x, weights = self._x, self._weights
        rows, d_out = (x.rows, x.row_index), (self._d_out, x.row_index)
        of_first = weights.low1.gradients(rows, self._t1, self._dh, self._dt1, x.row_range)
        return *of_first, *weights.low2.gradients(self._a, self._t2, d_out, self._dt2, x.row_range)
