"""Transformer Engine's permutations and GroupedLinear around all_to_all_single, in Megatron's order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from symmoe.tools.bench.cases import Case
from symmoe.tools.bench.peers.common import Measured, missing
from symmoe.tools.bench.problem import DTYPE, Problem
from symmoe.tools.bench.ranks import Ranks
from symmoe.tools.bench.reference import Reference
from symmoe.tools.bench.steps import eager_step
from symmoe.tools.bench.stock import all_to_all, differentiable_all_to_all, swiglu

NAME = "transformer-engine"


def find_problem(device: torch.device, num_ranks: int) -> str:
    """See peers/__init__.py."""
    return missing("transformer_engine", device, num_ranks)


def open_peer(cases: list[Case], ranks: Ranks) -> None:
    """Nothing to set up."""


def make_variants(problem: Problem, ranks: Ranks, opened: None) -> list[Measured]:
    """The layer."""
    layer, reference = _Layer(problem), Reference(problem)
    x, probs, _, _ = problem.inputs
    inputs = (x, probs, *layer.weights1, *layer.weights2)

    def forward() -> torch.Tensor:
        return layer(x, probs, problem.topk_idx)

    def verify() -> float:
        y = forward()
        dx, dprobs, *dw = torch.autograd.grad(y, inputs, problem.tokens.dy)
        dw1, dw2 = dw[: len(layer.weights1)], dw[len(layer.weights1) :]
        return reference.step_error(y, dx, dprobs, torch.stack(dw1), torch.stack(dw2))

    return [Measured("layer", replace(eager_step(NAME, problem, reference, forward, inputs), verify=verify))]


class _Layer:
    """The experts of this rank, and the way to them."""

    def __init__(self, problem: Problem) -> None:
        shape, self._num_ranks, self._num_local = problem.case.shape, problem.num_ranks, problem.experts_per_rank
        self._num_experts, self._top_k, device = shape.num_experts, shape.top_k, problem.device
        self._fc1, self.weights1 = _grouped_linear(problem.w1.detach(), device)
        self._fc2, self.weights2 = _grouped_linear(problem.w2.detach(), device)
        chunks = torch.arange(self._num_experts, device=device)  # one per (source rank, local expert)
        self._to_expert = chunks.view(self._num_ranks, self._num_local).t().reshape(-1)
        self._to_source = chunks.view(self._num_local, self._num_ranks).t().reshape(-1)

    def __call__(self, x: torch.Tensor, probs: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        from transformer_engine.pytorch.permutation import (
            moe_permute_with_probs,
            moe_sort_chunks_by_index,
            moe_sort_chunks_by_index_with_probs,
            moe_unpermute,
        )

        chosen, shape = topk_idx.long(), (len(x), self._num_experts)
        routing_map = torch.zeros(shape, dtype=torch.bool, device=x.device).scatter(1, chosen, True)
        dense_probs = torch.zeros(shape, device=x.device).scatter(1, chosen, probs)
        rows, row_probs, row_map = moe_permute_with_probs(
            x, dense_probs, routing_map, num_out_tokens=len(x) * self._top_k
        )
        counts, splits = routing_map.sum(0), [self._num_local] * self._num_ranks
        arriving = all_to_all(counts, splits, splits).view(self._num_ranks, self._num_local)
        sent, received = torch.stack([counts.view_as(arriving).sum(1), arriving.sum(1)]).tolist()
        m_splits = arriving.sum(0).tolist()
        rows = differentiable_all_to_all(rows, received, sent)
        row_probs = differentiable_all_to_all(row_probs, received, sent)
        rows, row_probs = moe_sort_chunks_by_index_with_probs(rows, row_probs, arriving.reshape(-1), self._to_expert)
        out = self._fc2(swiglu(self._fc1(rows, m_splits), row_probs), m_splits)
        out = moe_sort_chunks_by_index(out, arriving.t().reshape(-1), self._to_source)
        y: torch.Tensor = moe_unpermute(differentiable_all_to_all(out, sent, received), row_map, restore_shape=x.shape)
        return y


def _grouped_linear(weight: torch.Tensor, device: torch.device) -> tuple[Any, list[torch.nn.Parameter]]:
    from transformer_engine.pytorch import GroupedLinear

    num_groups, out_features, in_features = weight.shape
    layer = GroupedLinear(num_groups, in_features, out_features, bias=False, params_dtype=DTYPE, device=device)
    parameters = [getattr(layer, f"weight{g}") for g in range(num_groups)]
    for parameter, value in zip(parameters, weight, strict=True):
        parameter.data.copy_(value)
    return layer, parameters
