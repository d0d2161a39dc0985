"""The suites "deepep" and "deepep-trips": DeepEP, measured as ours is: steps in a row with what they hold, and dispatch
and combine by themselves. Their records have the names of our suites.

`deep_ep.Buffer`'s intranode kernels, with a local permutation and torch._grouped_mm for the experts. The backward of
dispatch is combine with the same handle and the other way round, as DeepEP's documentation has it. Problems, protocol,
checks and records are those of docs/benchmarking.md. Run it under `timeout`: DeepEP waits without a bound.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from suites.memory import step_record
from suites.problem import DTYPE, MAX_ERROR, LocalRows, Places, Problem, row_error
from suites.records import Record
from suites.reference import Reference
from suites.steps import Forward, Step, records_of
from suites.stock_torch import ByHand, torch_experts
from suites.timing import DIRECTIONS, Run, Variant, in_steps
from suites.trips import trip_records

NAME = "deepep"


def open_buffer(problem: Problem) -> Any:
    """A Buffer for rows of the problem. Collective."""
    from deep_ep import Buffer

    row_bytes, num_ranks = problem.case.shape.hidden * DTYPE.itemsize, problem.num_ranks
    configs = Buffer.get_dispatch_config(num_ranks), Buffer.get_combine_config(num_ranks)
    num_bytes = max(config.get_nvl_buffer_size_hint(row_bytes, num_ranks) for config in configs)
    return Buffer(dist.group.WORLD, num_bytes, 0)


def step_of(problem: Problem, buffer: Any) -> Step:
    """A whole step without a router."""
    x, probs, w1, w2 = problem.inputs
    experts = torch_experts(w1, w2)

    def forward() -> torch.Tensor:
        # The plan is a part of a step of ours: so is the conversion of the choice here.
        trip = _Trip(buffer, problem.topk_idx.long(), problem.case.shape.num_experts)
        arrived, arrived_probs = ByHand.apply(
            trip.dispatch,
            lambda d_rows, d_probs: trip.combine(d_rows.contiguous(), d_probs.contiguous()),
            *(x, probs),
        )
        row_to_packed, slots, ends = trip.local_order()
        rows = arrived.index_select(0, row_to_packed)
        out = experts(rows, arrived_probs.reshape(-1).index_select(0, slots), ends)
        return ByHand.apply(
            lambda sums: trip.combine(sums)[0],
            lambda dy: (trip.dispatch_again(dy.contiguous()),),
            torch.zeros_like(arrived).index_add(0, row_to_packed, out),
        )

    return Step(NAME, forward, problem.inputs, problem.tokens.dy, Reference(problem).step_error)


def bench_deepep(problem: Problem, run: Run) -> list[Record]:
    """The records of whole steps in a row, and of the memory of one step. Collective."""
    step = step_of(problem, open_buffer(problem))
    memory_record = step_record(problem, step, run)
    return [
        *records_of(problem, run, {NAME: step.results}, {NAME: memory_record["error"]}),
        memory_record,
    ]


def bench_deepep_trips(problem: Problem, run: Run) -> list[Record]:
    """Both trips by themselves: forward with the layout, backward with the handle of the first. Collective."""
    buffer = open_buffer(problem)
    topk_idx = problem.topk_idx.long()
    num_experts = problem.case.shape.num_experts
    x, probs, _, _ = problem.inputs
    tokens, token_probs = x.detach(), probs.detach()
    first = _Trip(buffer, topk_idx, num_experts)
    arrived, _ = first.dispatch(tokens, token_probs)

    def dispatch() -> torch.Tensor:
        return _Trip(buffer, topk_idx, num_experts).dispatch(tokens, token_probs)[0]

    def variant(expected: torch.Tensor, max_error: float, *steps: Forward) -> Variant:
        directions = DIRECTIONS[: len(steps)]
        return Variant(
            NAME,
            directions,
            in_steps(*steps),
            lambda: max(row_error(step(), expected) for step in steps),
            max_error,
        )

    goes_to = Places.of(problem.routing).goes_to
    rank = problem.rank
    packed = LocalRows.of(problem).packed  # both have their rows ordered by source rank and token
    sums = tokens.float() * goes_to[rank].sum(1).to(problem.device)[:, None]
    both_ways = variant(packed, 0.0, dispatch, lambda: first.dispatch_again(tokens))
    back = variant(sums, MAX_ERROR, lambda: first.combine(arrived)[0])
    records = []
    for suite, moved_rows, measured in (  # to or from each rank
        ("dispatch", goes_to[rank].sum(0), both_ways),
        ("combine", goes_to[:, :, rank].sum(1), back),
    ):
        moved = {NAME: (moved_rows * x.shape[1] * x.element_size()).numpy()}
        records += trip_records(suite, problem, run, [measured], moved)
    return records


class _Trip:
    """One routing in DeepEP: dispatch first, then the calls that need its handle."""

    def __init__(self, buffer: Any, topk_idx: torch.Tensor, num_experts: int) -> None:
        self._buffer, self._topk_idx, self._num_experts = buffer, topk_idx, num_experts

    def dispatch(self, x: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [P, H] and probs [P, K] that arrive here. Synchronises the host."""
        per_rank, _, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(
            self._topk_idx, self._num_experts
        )
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
        return self._buffer.dispatch(x, handle=self._handle)[0]

    def combine(
        self, rows: torch.Tensor, probs: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Sums of rows [T, H], and of probs [T, K]."""
        y, y_probs, *_ = self._buffer.combine(rows, self._handle, topk_weights=probs)
        return y, y_probs

    def local_order(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For rows sorted by expert: their packed rows and slots, int64 [N], and the ends of the experts, int32 [e]."""
        chosen = self._arrived_idx.reshape(-1)  # ids of this rank's experts, -1 for those of others
        slots = chosen.masked_fill(chosen < 0, len(self._counts)).argsort(stable=True)[
            : sum(self._counts)
        ]
        ends = torch.tensor(self._counts, device=slots.device).cumsum(0).int()
        return slots // self._arrived_idx.shape[1], slots, ends
