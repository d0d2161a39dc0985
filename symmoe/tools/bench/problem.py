"""The tensors of one case. Every rank can make any other rank's tokens and any expert's weights: the checks need them.

T tokens, H hidden, I ffn, K slots per token, e experts and N rows and P packed rows on this rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property

import torch

from symmoe.tools.bench.cases import Case, choose_experts
from symmoe.tools.bench.ranks import Ranks
from symmoe.tools.bench.routing import Routing

DTYPE = torch.bfloat16
_TOKENS, _WEIGHTS, _EXPERTS_OF_TOKENS = 1, 2, 3  # streams of random numbers


@dataclass(frozen=True, slots=True)
class Tokens:
    """What one rank brings to a step: x, dy bf16 [T, H], probs fp32 [T, K] that sum to one."""

    x: torch.Tensor
    dy: torch.Tensor
    probs: torch.Tensor


@dataclass(frozen=True, slots=True)
class LocalRows:
    """What a rank's GEMMs work on once the tokens are there, in ordinary memory.

    Attributes:
        packed, d_packed: bf16 [P, H], the tokens and the gradients that arrive.
        row_to_packed_row: int32 [N].
        row_range: int32 [2, e].
        row_probs: fp32 [N].
    """

    packed: torch.Tensor
    d_packed: torch.Tensor
    row_to_packed_row: torch.Tensor
    row_range: torch.Tensor
    row_probs: torch.Tensor


class Problem:
    """One case on one rank. Local; the same numbers in every run.

    Attributes:
        tokens: this rank's; x and probs require gradients.
        topk_idx: int32 [T, K] on the device.
        routing: the routing of all ranks.
        w1, w2: bf16 [e, 2I, H] and [e, H, I], which require gradients.
    """

    def __init__(self, case: Case, ranks: Ranks) -> None:
        self.case, self.rank, self.num_ranks, self.device = case, ranks.rank, ranks.num_ranks, ranks.device
        shape = case.shape
        self.experts_per_rank = shape.num_experts // self.num_ranks
        self.routing = routing_of(case, self.num_ranks)
        self.topk_idx = self.routing.topk_idx[self.rank].int().to(self.device)
        self.tokens = self.tokens_of(self.rank)
        for tensor in (self.tokens.x, self.tokens.probs):
            tensor.requires_grad_()
        empty = functools.partial(torch.empty, dtype=DTYPE, device=self.device)
        self.w1 = empty(self.experts_per_rank, 2 * shape.ffn, shape.hidden)
        self.w2 = empty(self.experts_per_rank, shape.hidden, shape.ffn)
        for local in range(self.experts_per_rank):
            w1, w2 = self.weights_of(self.first_expert + local)
            self.w1[local], self.w2[local] = w1, w2
        self.w1.requires_grad_()
        self.w2.requires_grad_()

    @property
    def first_expert(self) -> int:
        """The global id of this rank's first expert."""
        return self.rank * self.experts_per_rank

    @property
    def num_rows(self) -> int:
        """N."""
        return int(self.routing.num_rows[self.rank])

    @property
    def static_capacity(self) -> int:
        """Rows of a static capacity: 1.2 times the mean, or, where the routing needs more, 1.05 times what it needs."""
        return int(max(1.2 * self.case.num_slots, 1.05 * max(self.routing.num_rows)))

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """What a step differentiates by: x, probs, w1, w2."""
        return self.tokens.x, self.tokens.probs, self.w1, self.w2

    def tokens_of(self, rank: int) -> Tokens:
        """What a rank brings."""
        generator = torch.Generator(self.device).manual_seed(_seed(_TOKENS, rank))
        shape = (self.case.num_tokens, self.case.shape.hidden)
        x, dy = (torch.randn(shape, dtype=DTYPE, generator=generator, device=self.device) for _ in range(2))
        slots = (self.case.num_tokens, self.case.shape.top_k)
        probs = 0.1 + torch.rand(slots, generator=generator, device=self.device)
        return Tokens(x, dy, probs / probs.sum(1, keepdim=True))

    def weights_of(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """W1 [2I, H] and W2 [H, I] of an expert of any rank, bf16."""
        generator = torch.Generator(self.device).manual_seed(_seed(_WEIGHTS, expert))
        hidden, ffn = self.case.shape.hidden, self.case.shape.ffn
        made = functools.partial(torch.randn, generator=generator, dtype=DTYPE, device=self.device)
        w1 = made(2 * ffn, hidden).mul_(hidden**-0.5)
        w2 = made(hidden, ffn).mul_(ffn**-0.5)
        return w1, w2

    @cached_property
    def all_tokens(self) -> Tokens:
        """Every rank's tokens, [R * T, .]."""
        brought = [self.tokens_of(rank) for rank in range(self.num_ranks)]
        return Tokens(*(torch.cat([getattr(t, name) for t in brought]) for name in ("x", "dy", "probs")))

    @cached_property
    def local_rows(self) -> LocalRows:
        """What this rank's GEMMs work on."""
        tokens, everything = self.routing.packed_rows_of(self.rank), self.all_tokens
        token_of_packed, row_to_packed = (index.to(self.device) for index in tokens)
        _, slots = self.routing.rows_of(self.rank)
        splits = self.routing.splits[self.rank]
        ends = splits.cumsum(0)
        return LocalRows(
            packed=everything.x[token_of_packed],
            d_packed=everything.dy[token_of_packed],
            row_to_packed_row=row_to_packed.int(),
            row_range=torch.stack((ends - splits, ends)).int().to(self.device),
            row_probs=everything.probs.reshape(-1)[slots.to(self.device)],
        )


def routing_of(case: Case, num_ranks: int) -> Routing:
    """The routing of all ranks."""
    seeds = (_seed(_EXPERTS_OF_TOKENS, rank) for rank in range(num_ranks))
    choices = [choose_experts(case, torch.Generator().manual_seed(seed)) for seed in seeds]
    return Routing(choices, case.shape.num_experts)


def _seed(stream: int, number: int) -> int:
    return stream * 1_000_003 + number
