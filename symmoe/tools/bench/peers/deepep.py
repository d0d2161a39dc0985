"""DeepEP's intranode kernels (`deep_ep.Buffer`), with a local permutation and torch._grouped_mm for the experts.

The backward of dispatch is combine with the same handle and the other way round, as DeepEP's documentation has it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from symmoe.autograd import Context, Function
from symmoe.tools.bench.cases import Case
from symmoe.tools.bench.peers.common import Measured, missing
from symmoe.tools.bench.problem import DTYPE, Problem
from symmoe.tools.bench.ranks import Ranks
from symmoe.tools.bench.reference import MAX_ERROR, Reference, row_error
from symmoe.tools.bench.steps import eager_step
from symmoe.tools.bench.stock import torch_experts
from symmoe.tools.bench.timing import DIRECTIONS, Variant, in_steps

NAME = "deepep"


def find_problem(device: torch.device, num_ranks: int) -> str:
    """See peers/__init__.py."""
    return missing("deep_ep", device, num_ranks, least_ranks=2)


def open_peer(cases: list[Case], ranks: Ranks) -> Any:
    """A Buffer for rows of the widest case."""
    from deep_ep import Buffer

    row_bytes = max(case.shape.hidden for case in cases) * DTYPE.itemsize
    configs = Buffer.get_dispatch_config(ranks.num_ranks), Buffer.get_combine_config(ranks.num_ranks)
    num_bytes = max(config.get_nvl_buffer_size_hint(row_bytes, ranks.num_ranks) for config in configs)
    return Buffer(dist.group.WORLD, num_bytes, 0)


def make_variants(problem: Problem, ranks: Ranks, opened: Any) -> list[Measured]:
    """The layer, and both trips by themselves: forward with the layout, backward with the handle of the first."""
    reference, topk_idx = Reference(problem), problem.topk_idx.long()
    x, probs, w1, w2 = problem.inputs
    experts, num_experts = torch_experts(w1, w2), problem.case.shape.num_experts

    def forward() -> torch.Tensor:
        trip = _Trip(opened, topk_idx, num_experts)
        arrived, arrived_probs = _Dispatch.apply(x, probs, trip)
        row_to_packed, slots, ends = trip.local_order()
        rows = arrived.index_select(0, row_to_packed)
        out = experts(rows, arrived_probs.reshape(-1).index_select(0, slots), ends)
        y: torch.Tensor = _Combine.apply(torch.zeros_like(arrived).index_add(0, row_to_packed, out), trip)
        return y

    layer = eager_step(NAME, problem, reference, forward, problem.inputs)
    return [Measured("layer", layer), *_trips(problem, opened, topk_idx)]


def _trips(problem: Problem, buffer: Any, topk_idx: torch.Tensor) -> list[Measured]:
    x, probs, num_experts = problem.tokens.x.detach(), problem.tokens.probs.detach(), problem.case.shape.num_experts
    trip = _Trip(buffer, topk_idx, num_experts)
    arrived, _ = trip.dispatch(x, probs)

    def dispatch() -> torch.Tensor:
        return _Trip(buffer, topk_idx, num_experts).dispatch(x, probs)[0]

    def dispatch_again() -> torch.Tensor:
        return trip.dispatch_again(x)

    def combine() -> torch.Tensor:
        return trip.combine(arrived)[0]

    def dispatch_error() -> float:
        # Both have their rows ordered by source rank and token.
        return max(row_error(got, problem.local_rows.packed) for got in (dispatch(), dispatch_again()))

    def combine_error() -> float:
        copies = problem.routing.goes_to[problem.rank].sum(1).to(problem.device)
        return row_error(combine(), x.float() * copies[:, None])

    routing, rank, row_bytes = problem.routing, problem.rank, x.shape[1] * x.element_size()
    leave = int(routing.goes_to[rank].sum() - routing.goes_to[rank, :, rank].sum()) * row_bytes
    bring = int(routing.goes_to[:, :, rank].sum() - routing.goes_to[rank, :, rank].sum()) * row_bytes
    return [
        Measured("dispatch", Variant(NAME, DIRECTIONS, in_steps(dispatch, dispatch_again), dispatch_error), leave),
        Measured("combine", Variant(NAME, ("forward",), in_steps(combine), combine_error, MAX_ERROR), bring),
    ]


class _Trip:
    """One routing on its way through DeepEP: dispatch first, then everything that needs its handle."""

    def __init__(self, buffer: Any, topk_idx: torch.Tensor, num_experts: int) -> None:
        self._buffer, self._topk_idx, self._num_experts = buffer, topk_idx, num_experts

    def dispatch(self, x: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [P, H] and probs [P, K] that arrive here. Synchronises the host."""
        per_rank, _, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(self._topk_idx, self._num_experts)
        rows, self._arrived_idx, row_probs, self._counts, self._handle, _ = self._buffer.dispatch(
            x,
            topk_idx=self._topk_idx,
            topk_weights=probs,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        return rows, row_probs

    def dispatch_again(self, x: torch.Tensor) -> torch.Tensor:
        """Sends only rows, by the handle."""
        rows: torch.Tensor = self._buffer.dispatch(x, handle=self._handle)[0]
        return rows

    def combine(self, rows: torch.Tensor, probs: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        """Sums of rows [T, H], and of probs [T, K]."""
        y, y_probs, *_ = self._buffer.combine(rows, self._handle, topk_weights=probs)
        return y, y_probs

    def local_order(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For rows sorted by expert: their packed rows and slots, int64 [N], and the ends of the experts, int32 [e]."""
        chosen = self._arrived_idx.reshape(-1)  # ids of this rank's experts, -1 for those of others
        slots = chosen.masked_fill(chosen < 0, len(self._counts)).argsort(stable=True)[: sum(self._counts)]
        ends = torch.tensor(self._counts, device=slots.device).cumsum(0).int()
        return slots // self._arrived_idx.shape[1], slots, ends


class _TripContext(Context, Protocol):
    trip: _Trip


class _Dispatch(Function):
    @staticmethod
    def forward(
        ctx: _TripContext, x: torch.Tensor, probs: torch.Tensor, trip: _Trip
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.trip = trip
        return trip.dispatch(x, probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: _TripContext, d_rows: torch.Tensor, d_probs: torch.Tensor) -> tuple[Any, ...]:
        return *ctx.trip.combine(d_rows.contiguous(), d_probs.contiguous()), None


class _Combine(Function):
    @staticmethod
    def forward(ctx: _TripContext, rows: torch.Tensor, trip: _Trip) -> torch.Tensor:
        ctx.trip = trip
        return trip.combine(rows)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: _TripContext, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.trip.dispatch_again(dy.contiguous()), None
