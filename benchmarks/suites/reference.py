"""The expected results of a step, in fp32, for a few tokens and a few experts. Shares no code with the measured
steps."""

from __future__ import annotations

from typing import NamedTuple

import torch

from suites.problem import Problem, Tokens, all_tokens, relative_error, row_error, rows_of
from suites.timing import largest

_SAMPLED_TOKENS = 4
_SAMPLED_ROWS = 64
_CHUNK_ROWS = 4096


class ExpertReference(NamedTuple):
    """One local expert: its weights' gradients, and its first rows and their gradients, in fp32."""

    local: int
    rows: slice
    out: torch.Tensor
    d_rows: torch.Tensor
    dw1: torch.Tensor
    dw2: torch.Tensor


class Reference:
    """Results of a few tokens of this rank, spread over the batch, and of its busiest and its last expert."""

    def __init__(self, problem: Problem) -> None:
        count = min(_SAMPLED_TOKENS, problem.case.num_tokens)
        self.token_index = (
            torch.linspace(0, problem.case.num_tokens - 1, count).long().to(problem.device)
        )
        self.y, self.dx, self.dprobs = _tokens(problem, self.token_index)
        splits = problem.routing.splits[problem.rank]
        everything = all_tokens(problem)
        self.experts = [
            _expert(problem, everything, local)
            for local in sorted({int(splits.argmax()), len(splits) - 1})
        ]

    def step_error(
        self,
        y: torch.Tensor,
        dx: torch.Tensor,
        dprobs: torch.Tensor,
        dw1: torch.Tensor,
        dw2: torch.Tensor,
    ) -> float:
        """The largest relative error of a step's results: of any row of y and dx, of dprobs, and of any dw."""
        index = self.token_index
        errors = [row_error(y[index], self.y), row_error(dx[index], self.dx)]
        return largest(
            [*errors, relative_error(dprobs[index], self.dprobs), self.weight_error(dw1, dw2)]
        )

    def weight_error(self, dw1: torch.Tensor, dw2: torch.Tensor) -> float:
        """The largest relative error of any dw."""
        pairs = [
            pair for e in self.experts for pair in ((dw1[e.local], e.dw1), (dw2[e.local], e.dw2))
        ]
        return largest([relative_error(*pair) for pair in pairs])


def expert_outputs(
    x: torch.Tensor, probs: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """One expert's rows in the dtype of the inputs; differentiable."""
    gate, up = (x @ w1.t()).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up * probs[:, None]) @ w2.t()


def _tokens(
    problem: Problem, index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, dx, dprobs of some of this rank's tokens, computed expert by expert."""
    x, dy, probs = (tensor.detach()[index].float() for tensor in problem.tokens)
    chosen = problem.topk_idx[index]
    y, dx, dprobs = (torch.zeros_like(like) for like in (x, x, probs))
    for expert in chosen.unique().tolist():
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        rows = x[token].requires_grad_()
        row_probs = probs[token, slot].requires_grad_()
        out = expert_outputs(rows, row_probs, *(w.float() for w in problem.weights_of(expert)))
        d_rows, d_row_probs = torch.autograd.grad(out, (rows, row_probs), dy[token])
        y.index_add_(0, token, out.detach())
        dx.index_add_(0, token, d_rows)
        dprobs[token, slot] = d_row_probs
    return y, dx, dprobs


def _expert(problem: Problem, everything: Tokens, local: int) -> ExpertReference:
    counts = problem.routing.splits[problem.rank]
    start = int(counts[:local].sum())
    token, slot = (
        index[start : start + counts[local]].to(problem.device)
        for index in rows_of(problem.routing, problem.rank)
    )
    w1, w2 = (w.float().requires_grad_() for w in problem.weights_of(problem.first_expert + local))
    first = []  # its first rows, and their gradients
    # At least one chunk: an expert without rows has gradients, too.
    for its_token, its_slot in zip(token.split(_CHUNK_ROWS), slot.split(_CHUNK_ROWS), strict=True):
        x = everything.x[its_token].float().requires_grad_()
        out = expert_outputs(x, everything.probs.reshape(-1)[its_slot], w1, w2)
        out.backward(everything.dy[its_token].float())
        first = first or [tensor[:_SAMPLED_ROWS] for tensor in (out.detach(), x.grad)]
    rows = slice(start, start + len(first[0]))
    return ExpertReference(local, rows, *first, w1.grad, w2.grad)
