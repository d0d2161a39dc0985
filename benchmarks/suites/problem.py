"""The tensors of one case, where its slots must go, and what a rank's GEMMs work on. Every rank can make any other
rank's tokens and any expert's weights: the checks need them, without the package's plan.

R ranks, T tokens per rank, H hidden, I ffn, K slots per token, E experts, e = E / R, N rows on a rank, in the order
expert, source rank, token, k. P packed rows on a rank, one per (token, rank), in the order source rank, token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from suites.cases import Case, choose_experts
from symmoe.tools.ranks import Ranks

DTYPE = torch.bfloat16
MAX_ERROR = 3e-2  # of bf16 steps, relative; the layers measured so far have up to 1e-2
_TOKENS, _WEIGHTS, _EXPERTS_OF_TOKENS = 1, 2, 3  # streams of random numbers


class Tokens(NamedTuple):
    """A rank's inputs of a step: x, dy bf16 [T, H], probs fp32 [T, K] that sum to one."""

    x: torch.Tensor
    dy: torch.Tensor
    probs: torch.Tensor


class Routing:
    """The routing of all ranks, from the choice of every rank, int64 [T, K]; on the CPU. topk_idx: int64 [R, T, K];
    splits: int64 [R, e], rows of every expert; num_rows: N of every rank; order: slots [R * T * K] as rows lie."""

    def __init__(self, topk_idx: list[torch.Tensor], num_experts: int) -> None:
        self.topk_idx = torch.stack(topk_idx)
        self.splits = torch.bincount(self.topk_idx.reshape(-1), minlength=num_experts).view(
            len(topk_idx), -1
        )
        self.num_rows = self.splits.sum(1).tolist()
        self.order = self.topk_idx.reshape(-1).argsort(stable=True)


class Problem:
    """One case on one rank. Local; the same numbers in every run. Attributes: tokens of this rank, of which x and probs
    require gradients; topk_idx int32 [T, K] on the device; the routing of all ranks; and w1 and w2, bf16 [e, 2I, H] and
    [e, H, I], which require gradients."""

    def __init__(self, case: Case, ranks: Ranks) -> None:
        self.case, self.rank, self.num_ranks, self.device = (
            case,
            ranks.rank,
            ranks.num_ranks,
            ranks.device,
        )
        self.experts_per_rank = case.shape.num_experts // self.num_ranks
        self.first_expert = self.rank * self.experts_per_rank  # its global id
        self.routing = routing_of(case, self.num_ranks)
        self.num_rows = int(self.routing.num_rows[self.rank])  # N
        self.topk_idx = self.routing.topk_idx[self.rank].int().to(self.device)
        self.tokens = self.tokens_of(self.rank)
        local_experts = range(self.first_expert, self.first_expert + self.experts_per_rank)
        self.w1, self.w2 = map(torch.stack, zip(*map(self.weights_of, local_experts), strict=True))
        for tensor in self.inputs:
            tensor.requires_grad_()

    @property
    def static_capacity(self) -> int:
        """Rows of a static capacity: 1.2 times the mean, or 1.05 times the rows of the routing if these are more."""
        return int(max(1.2 * self.case.num_slots, 1.05 * max(self.routing.num_rows)))

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The differentiated inputs of a step: x, probs, w1, w2."""
        return self.tokens.x, self.tokens.probs, self.w1, self.w2

    def tokens_of(self, rank: int) -> Tokens:
        """The tokens of a rank."""
        generator = torch.Generator(self.device).manual_seed(_seed(_TOKENS, rank))
        shape = (self.case.num_tokens, self.case.shape.hidden)
        x, dy = (
            torch.randn(shape, dtype=DTYPE, generator=generator, device=self.device)
            for _ in range(2)
        )
        probs = 0.1 + torch.rand(
            (self.case.num_tokens, self.case.shape.top_k), generator=generator, device=self.device
        )
        return Tokens(x, dy, probs / probs.sum(1, keepdim=True))

    def weights_of(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """W1 [2I, H] and W2 [H, I] of an expert of any rank, bf16."""
        generator = torch.Generator(self.device).manual_seed(_seed(_WEIGHTS, expert))
        hidden, ffn = self.case.shape.hidden, self.case.shape.ffn
        sizes = ((2 * ffn, hidden), (hidden, ffn))
        w1, w2 = (
            torch.randn(size, generator=generator, dtype=DTYPE, device=self.device)
            for size in sizes
        )
        return w1.mul_(hidden**-0.5), w2.mul_(ffn**-0.5)


def routing_of(case: Case, num_ranks: int) -> Routing:
    """The routing of all ranks."""
    generators = (
        torch.Generator().manual_seed(_seed(_EXPERTS_OF_TOKENS, rank)) for rank in range(num_ranks)
    )
    return Routing(
        [choose_experts(case, generator) for generator in generators], case.shape.num_experts
    )


def rows_of(routing: Routing, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(token, slot) of every row of a rank: int64 [N], counted over all ranks' tokens [R * T] and slots."""
    slots = routing.order.split(routing.num_rows)[rank]
    return slots // routing.topk_idx.shape[2], slots


def all_tokens(problem: Problem) -> Tokens:
    """Every rank's tokens, [R * T, .]."""
    return Tokens(
        *map(torch.cat, zip(*map(problem.tokens_of, range(problem.num_ranks)), strict=True))
    )


class Places(NamedTuple):
    """On the CPU. slot_to_rank, slot_to_row: int64 [R, T, K], the rank of a slot's expert, and its row there. goes_to:
    bool [R, T, R], whether a token of a rank has an expert on another (or the same) rank."""

    slot_to_rank: torch.Tensor
    slot_to_row: torch.Tensor
    goes_to: torch.Tensor

    @classmethod
    def of(cls, routing: Routing) -> Places:
        num_ranks, experts_per_rank = routing.splits.shape
        slot_to_rank = routing.topk_idx // experts_per_rank
        position = routing.order.argsort()
        first_row = torch.tensor([0, *routing.num_rows]).cumsum(0)
        slot_to_row = position.view_as(slot_to_rank) - first_row[slot_to_rank]
        goes_to = torch.stack([(slot_to_rank == rank).any(2) for rank in range(num_ranks)], dim=2)
        return cls(slot_to_rank, slot_to_row, goes_to)


def packed_rows_of(routing: Routing, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The token of every packed row of a rank, int64 [P], and the packed row of every row, int64 [N]."""
    arrives = Places.of(routing).goes_to[:, :, rank].reshape(-1)
    token_to_packed = arrives.cumsum(0) - 1
    return arrives.nonzero().squeeze(1), token_to_packed[rows_of(routing, rank)[0]]


class LocalRows(NamedTuple):
    """The operands of a rank's GEMMs after dispatch: packed, d_packed bf16 [P, H], row_to_packed_row int32 [N],
    row_range int32 [2, e], row_probs fp32 [N]."""

    packed: torch.Tensor
    d_packed: torch.Tensor
    row_to_packed_row: torch.Tensor
    row_range: torch.Tensor
    row_probs: torch.Tensor

    def in_order(self, packed: torch.Tensor) -> torch.Tensor:
        """The rows in the order of the experts."""
        return packed[self.row_to_packed_row.long()]

    @classmethod
    def of(cls, problem: Problem) -> LocalRows:
        where = problem.routing, problem.rank
        splits = problem.routing.splits[problem.rank]
        tokens = all_tokens(problem)
        token_of_packed, row_to_packed = (
            index.to(problem.device) for index in packed_rows_of(*where)
        )
        ends = splits.cumsum(0)
        return cls(
            packed=tokens.x[token_of_packed],
            d_packed=tokens.dy[token_of_packed],
            row_to_packed_row=row_to_packed.int(),
            row_range=torch.stack((ends - splits, ends)).int().to(problem.device),
            row_probs=tokens.probs.reshape(-1)[rows_of(*where)[1].to(problem.device)],
        )


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """|got - expected| / |expected| (Euclidean); 0 for two zeros, infinite if only `expected` is zero."""
    return row_error(got.reshape(1, -1), expected.reshape(1, -1))


def row_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of any row of [., .]; 0 without rows."""
    if not expected.numel():
        return 0.0
    got = got.detach().float()
    expected = expected.detach().float()
    difference = (got - expected).norm(dim=1)
    size = expected.norm(dim=1)
    return float(torch.where((difference == 0) & (size == 0), 0.0, difference / size).max())


def _seed(stream: int, number: int) -> int:
    return stream * 1_000_003 + number
