"""The ceiling: the layer's own GEMMs on the same rows, splits and weights, with no communication at all.

Rows lie in the order of the experts, also if the layer gathers them: this is the best that the GEMMs could do.
"""

from __future__ import annotations

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
    d_rows, dw1, dw2 = torch.empty_like(out), torch.empty_like(problem.w1), torch.empty_like(problem.w2)
    kept: list[Hidden] = []

    def forward() -> None:
        kept[:] = [experts_forward(rows, weights, out, num_rows=num_rows)]

    def backward() -> None:
        step = ExpertsBackward(rows, weights, kept.pop(), d_out)
        step.input_gradient(d_rows)
        step.w2_gradient(dw2, False)
        step.w1_gradient(dw1, False)

    def verify() -> float:
        for tensor in (out, d_rows, dw1, dw2):
            tensor.fill_(torch.nan)
        forward()
        backward()
        return reference.experts_error(out, d_rows, dw1, dw2)

    return Variant(name, DIRECTIONS, in_steps(forward, backward), verify, MAX_ERROR)
