"""What a step must give, in fp32, for a few tokens and a few experts. Shares nothing with what it checks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from suites.problem import Problem, Tokens, all_tokens, relative_error, row_error, rows_of
from suites.timing import largest

_SAMPLED_TOKENS = 4
_SAMPLED_ROWS = 64
_CHUNK_ROWS = 4096


class ExpertReference(NamedTuple):
    """One local expert: its weights' gradients, and its first rows and their gradients. fp32."""

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
    """y, dx, dprobs of some of this rank's tokens, one expert after the other."""
    x = problem.tokens.x.detach()[index].float()
    dy = problem.tokens.dy[index].float()
    probs = problem.tokens.probs
    probs = probs.detach()[index]
    chosen = problem.topk_idx[index]
    y = torch.zeros_like(x)
    dx = torch.zeros_like(x)
    dprobs = torch.zeros_like(probs)
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
    end = int(counts[: local + 1].sum())
    w1, w2 = (w.float().requires_grad_() for w in problem.weights_of(problem.first_expert + local))
    dw1 = torch.zeros_like(w1)
    dw2 = torch.zeros_like(w2)
    first = (w1.new_zeros(0, w1.shape[1]), w1.new_zeros(0, w1.shape[1]))
    received = rows_of(problem.routing, problem.rank)
    for chunk in range(start, end, _CHUNK_ROWS):
        rows = slice(chunk, min(chunk + _CHUNK_ROWS, end))
        token, slot = (index[rows].to(problem.device) for index in received)
        x = everything.x[token].float().requires_grad_()
        out = expert_outputs(x, everything.probs.reshape(-1)[slot], w1, w2)
        dx, *dw = torch.autograd.grad(out, (x, w1, w2), everything.dy[token].float())
        dw1 = dw1 + dw[0]
        dw2 = dw2 + dw[1]
        if chunk == start:
            first = (out.detach()[:_SAMPLED_ROWS], dx[:_SAMPLED_ROWS])
    return ExpertReference(
        local, slice(start, min(start + _SAMPLED_ROWS, end)), *first, dw1.detach(), dw2.detach()
    )
