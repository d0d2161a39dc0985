"""The tensors of one case, and where its slots must go. Every rank can make any other rank's tokens and any expert's
weights: the checks need them, without the package's plan.

R ranks, T tokens per rank, H hidden, I ffn, K slots per token, E experts, e = E / R, N rows and P packed rows on a
rank. Rows are ordered expert, source rank, token, k; packed rows source rank, token.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch

from symmoe.tools.bench.cases import Case, choose_experts
from symmoe.tools.bench.ranks import Ranks

DTYPE = torch.bfloat16
_TOKENS, _WEIGHTS, _EXPERTS_OF_TOKENS = 1, 2, 3  # streams of random numbers


class Tokens(NamedTuple):
    """What one rank brings to a step: x, dy bf16 [T, H], probs fp32 [T, K] that sum to one."""

    x: torch.Tensor
    dy: torch.Tensor
    probs: torch.Tensor


class LocalRows(NamedTuple):
    """What a rank's GEMMs work on once the tokens are there: packed, d_packed bf16 [P, H], row_to_packed_row int32 [N],
    row_range int32 [2, e], row_probs fp32 [N]."""

    packed: torch.Tensor
    d_packed: torch.Tensor
    row_to_packed_row: torch.Tensor
    row_range: torch.Tensor
    row_probs: torch.Tensor


class Routing:
    """The routing of all ranks, from the choice of every rank, int64 [T, K]. Tensors are on the CPU.

    Attributes:
        slot_to_rank, slot_to_row: int64 [R, T, K], the rank of a slot's expert, and its row there.
        num_rows, num_packed: N and P of every rank.
        splits: int64 [R, e], rows of every expert.
        goes_to: bool [R, T, R], whether a token of a rank has an expert on another (or the same) rank.
    """

    def __init__(self, topk_idx: list[torch.Tensor], num_experts: int) -> None:
        num_ranks, experts_per_rank = len(topk_idx), num_experts // len(topk_idx)
        self.topk_idx = torch.stack(topk_idx)
        flat = self.topk_idx.reshape(-1)
        self.slot_to_rank = self.topk_idx // experts_per_rank
        self.splits = torch.bincount(flat, minlength=num_experts).view(num_ranks, experts_per_rank)
        self.num_rows = self.splits.sum(1).tolist()
        order = flat.argsort(stable=True)  # by expert; then source rank, token, k, as they lie
        self._slot_of_row = order.split(self.num_rows)
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel())
        first_row = torch.tensor([0, *self.num_rows]).cumsum(0)
        self.slot_to_row = place.view_as(self.topk_idx) - first_row[self.slot_to_rank]
        self.goes_to = torch.stack([(self.slot_to_rank == rank).any(2) for rank in range(num_ranks)], dim=2)
        self.num_packed = self.goes_to.sum((0, 1)).tolist()

    def rows_of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(token, slot) of every row of a rank: int64 [N], counted over all ranks' tokens [R * T] and slots."""
        slots = self._slot_of_row[rank]
        return slots // self.topk_idx.shape[2], slots

    def packed_rows_of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The token of every packed row, int64 [P], and the packed row of every row, int64 [N]."""
        arrives = self.goes_to[:, :, rank].reshape(-1)
        token_to_packed = arrives.cumsum(0) - 1
        return arrives.nonzero().squeeze(1), token_to_packed[self.rows_of(rank)[0]]


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
        self.experts_per_rank = case.shape.num_experts // self.num_ranks
        self.first_expert = self.rank * self.experts_per_rank  # its global id
        self.routing = routing_of(case, self.num_ranks)
        self.num_rows = int(self.routing.num_rows[self.rank])  # N
        self.topk_idx = self.routing.topk_idx[self.rank].int().to(self.device)
        self.tokens = self.tokens_of(self.rank)
        shape, count = case.shape, self.experts_per_rank
        self.w1 = torch.empty(count, 2 * shape.ffn, shape.hidden, dtype=DTYPE, device=self.device)
        self.w2 = torch.empty(count, shape.hidden, shape.ffn, dtype=DTYPE, device=self.device)
        for local in range(count):
            self.w1[local], self.w2[local] = self.weights_of(self.first_expert + local)
        for tensor in self.inputs:
            tensor.requires_grad_()

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
        sizes = ((2 * ffn, hidden), (hidden, ffn))
        w1, w2 = (torch.randn(size, generator=generator, dtype=DTYPE, device=self.device) for size in sizes)
        return w1.mul_(hidden**-0.5), w2.mul_(ffn**-0.5)

    @cached_property
    def all_tokens(self) -> Tokens:
        """Every rank's tokens, [R * T, .]."""
        return Tokens(*map(torch.cat, zip(*map(self.tokens_of, range(self.num_ranks)), strict=True)))

    @cached_property
    def local_rows(self) -> LocalRows:
        """What this rank's GEMMs work on."""
        token_of_packed, row_to_packed = (each.to(self.device) for each in self.routing.packed_rows_of(self.rank))
        _, slots = self.routing.rows_of(self.rank)
        splits = self.routing.splits[self.rank]
        ends = splits.cumsum(0)
        return LocalRows(
            packed=self.all_tokens.x[token_of_packed],
            d_packed=self.all_tokens.dy[token_of_packed],
            row_to_packed_row=row_to_packed.int(),
            row_range=torch.stack((ends - splits, ends)).int().to(self.device),
            row_probs=self.all_tokens.probs.reshape(-1)[slots.to(self.device)],
        )


def routing_of(case: Case, num_ranks: int) -> Routing:
    """The routing of all ranks."""
    seeds = (_seed(_EXPERTS_OF_TOKENS, rank) for rank in range(num_ranks))
    choices = [choose_experts(case, torch.Generator().manual_seed(seed)) for seed in seeds]
    return Routing(choices, case.shape.num_experts)


def _seed(stream: int, number: int) -> int:
    return stream * 1_000_003 + number
