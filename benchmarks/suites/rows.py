"""Where every slot of a problem goes, and what a rank's GEMMs work on; none of it by the package's plan.

P packed rows on a rank, one per (token, rank), in the order source rank, token; rows as problem.py has them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from suites.problem import Problem, Routing, Tokens


def order_of(routing: Routing) -> torch.Tensor:
    """Slots of all ranks [R * T * K] as rows lie."""
    return routing.topk_idx.reshape(-1).argsort(stable=True)


def rows_of(routing: Routing, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(token, slot) of every row of a rank: int64 [N], counted over all ranks' tokens [R * T] and slots."""
    slots = order_of(routing).split(routing.num_rows)[rank]
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
        place = torch.empty_like(order := order_of(routing))
        place[order] = torch.arange(place.numel())
        first_row = torch.tensor([0, *routing.num_rows]).cumsum(0)
        slot_to_row = place.view_as(slot_to_rank) - first_row[slot_to_rank]
        goes_to = torch.stack([(slot_to_rank == rank).any(2) for rank in range(num_ranks)], dim=2)
        return cls(slot_to_rank, slot_to_row, goes_to)


def packed_rows_of(routing: Routing, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The token of every packed row of a rank, int64 [P], and the packed row of every row, int64 [N]."""
    arrives = Places.of(routing).goes_to[:, :, rank].reshape(-1)
    token_to_packed = arrives.cumsum(0) - 1
    return arrives.nonzero().squeeze(1), token_to_packed[rows_of(routing, rank)[0]]


class LocalRows(NamedTuple):
    """What a rank's GEMMs work on once the tokens are there: packed, d_packed bf16 [P, H], row_to_packed_row int32 [N],
    row_range int32 [2, e], row_probs fp32 [N]."""

    packed: torch.Tensor
    d_packed: torch.Tensor
    row_to_packed_row: torch.Tensor
    row_range: torch.Tensor
    row_probs: torch.Tensor

    @classmethod
    def of(cls, problem: Problem) -> LocalRows:
        routing, rank, tokens = problem.routing, problem.rank, all_tokens(problem)
        token_of_packed, row_to_packed = (
            each.to(problem.device) for each in packed_rows_of(routing, rank)
        )
        ends = routing.splits[rank].cumsum(0)
        return cls(
            packed=tokens.x[token_of_packed],
            d_packed=tokens.dy[token_of_packed],
            row_to_packed_row=row_to_packed.int(),
            row_range=torch.stack((ends - routing.splits[rank], ends)).int().to(problem.device),
            row_probs=tokens.probs.reshape(-1)[rows_of(routing, rank)[1].to(problem.device)],
        )
