"""The ceiling: the layer's own GEMMs on the same rows, splits and weights, with no communication at all.

Rows lie in the order of the experts, also if the layer gathers them: this is the best that the GEMMs could do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from symmoe.grouped.experts import ExpertRows, ExpertsBackward, ExpertWeights, Hidden, experts_forward
from symmoe.kernels.activation import Activation
from symmoe.tools.bench.problem import Problem
from symmoe.tools.bench.reference import MAX_ERROR, Reference
from symmoe.tools.bench.timing import DIRECTIONS, Variant, in_steps


def experts_alone(name: str, problem: Problem, reference: Reference) -> Variant:
    """All six products of a step, forward and backward, in the order of the layer. Local."""
    local, num_rows = problem.local_rows, max(1, problem.num_rows)
    weights = ExpertWeights(problem.w1.detach(), None, problem.w2.detach(), None, Activation())
    received, d_out = (packed[local.row_to_packed_row] for packed in (local.packed, local.d_packed))
    rows = ExpertRows(received, local.row_range, local.row_probs)
    out = received.new_empty((num_rows, problem.case.shape.hidden))
    d_rows = torch.empty_like(out)
    kept: list[Hidden] = []

    def forward() -> None:
        kept[:] = [experts_forward(rows, weights, out, num_rows=num_rows)]

    def backward(new: Callable[[torch.Tensor], torch.Tensor] = torch.empty_like) -> tuple[torch.Tensor, torch.Tensor]:
        step = ExpertsBackward(rows, weights, kept.pop(), d_out)
        step.input_gradient(d_rows)
        dw1, dw2 = new(problem.w1), new(problem.w2)  # as large as the experts: not kept between calls
        step.w2_gradient(dw2, False)
        step.w1_gradient(dw1, False)
        return dw1, dw2

    def verify() -> float:
        out.fill_(torch.nan)
        d_rows.fill_(torch.nan)
        forward()
        return reference.experts_error(out, d_rows, *backward(partial(torch.full_like, fill_value=torch.nan)))

    return Variant(name, DIRECTIONS, in_steps(forward, backward), verify, MAX_ERROR)
