"""DeepEP, measured as benchmarks/bench.py measures: steps in a row, and dispatch and combine by themselves.

    torchrun --nproc-per-node=2 benchmarks/deepep.py --preset qwen3-30b,mixtral-8x7b --json deepep.json
    python benchmarks/compare.py ours.json deepep.json

`deep_ep.Buffer`'s intranode kernels, with a local permutation and torch._grouped_mm for the experts. The backward of
dispatch is combine with the same handle and the other way round, as DeepEP's documentation has it. Problems, protocol,
checks and records are those of docs/benchmarking.md. Run it under `timeout`: DeepEP waits without a bound.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from suites.cases import SKEWS, Case, shapes_of
from suites.layer import Step
from suites.memory import step_record
from suites.problem import DTYPE, MAX_ERROR, Problem, row_error
from suites.records import Record, case_record, measured_on, render, save, tflops
from suites.reference import Reference
from suites.rows import LocalRows, Places
from suites.stock_torch import torch_experts
from suites.timing import DIRECTIONS, Run, Variant, align_ahead, in_steps, measure
from suites.traced import of_step
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from symmoe.autograd import Context
from symmoe.tools.ranks import Ranks, join
from symmoe.tools.shapes import add_shape_arguments
from symmoe.tools.timing import times_in_a_row_ms

NAME = "deepep"


class TripVariant(NamedTuple):
    """A variant of dispatch or combine, and the bytes of rows that leave this rank in a call, or come to it."""

    suite: str
    variant: Variant
    moved_bytes: int


def open_buffer(cases: list[Case], ranks: Ranks) -> Any:
    """A Buffer for rows of the widest case. Collective."""
    from deep_ep import Buffer

    row_bytes = max(case.shape.hidden for case in cases) * DTYPE.itemsize
    configs = (
        Buffer.get_dispatch_config(ranks.num_ranks),
        Buffer.get_combine_config(ranks.num_ranks),
    )
    num_bytes = max(
        config.get_nvl_buffer_size_hint(row_bytes, ranks.num_ranks) for config in configs
    )
    return Buffer(dist.group.WORLD, num_bytes, 0)


def step_of(problem: Problem, buffer: Any) -> Step:
    """A whole step, without a router."""
    num_experts = problem.case.shape.num_experts
    x, probs, w1, w2 = problem.inputs
    experts = torch_experts(w1, w2)

    def forward() -> torch.Tensor:
        # The plan is a part of a step of ours: so is the conversion of the choice here.
        trip = _Trip(buffer, problem.topk_idx.long(), num_experts)
        arrived, arrived_probs = _Dispatch.apply(x, probs, trip)
        row_to_packed, slots, ends = trip.local_order()
        rows = arrived.index_select(0, row_to_packed)
        out = experts(rows, arrived_probs.reshape(-1).index_select(0, slots), ends)
        return _Combine.apply(torch.zeros_like(arrived).index_add(0, row_to_packed, out), trip)

    return Step(NAME, forward, problem.inputs, problem.tokens.dy, Reference(problem).step_error)


def step_records(problem: Problem, step: Step, ranks: Ranks, repetitions: int) -> list[Record]:
    """The records of whole steps, each following itself, and of what one holds. Collective.

    Raises:
        WrongResult: its results are wrong.
    """
    held = step_record(problem, step, ranks)
    times = times_in_a_row_ms({NAME: step.results}, ranks, repetitions)[NAME]
    figures = of_step(step.results, problem, ranks)
    flops = tflops(3 * problem.case.forward_flops, times)
    return [
        case_record(
            problem, "steps", NAME, "step", times, tflops=flops, error=held["error"], **figures
        ),
        held,
    ]


def trips(problem: Problem, buffer: Any) -> list[TripVariant]:
    """Both trips by themselves: forward with the layout, backward with the handle of the first."""
    topk_idx, num_experts = problem.topk_idx.long(), problem.case.shape.num_experts
    x, probs, _, _ = problem.inputs
    tokens, token_probs = x.detach(), probs.detach()
    first = _Trip(buffer, topk_idx, num_experts)
    arrived, _ = first.dispatch(tokens, token_probs)

    def dispatch() -> torch.Tensor:
        return _Trip(buffer, topk_idx, num_experts).dispatch(tokens, token_probs)[0]

    def dispatch_again() -> torch.Tensor:
        return first.dispatch_again(tokens)

    def combine() -> torch.Tensor:
        return first.combine(arrived)[0]

    def dispatch_error() -> float:
        # Both have their rows ordered by source rank and token.
        return max(
            row_error(got, LocalRows.of(problem).packed) for got in (dispatch(), dispatch_again())
        )

    def combine_error() -> float:
        copies = Places.of(problem.routing).goes_to[problem.rank].sum(1).to(problem.device)
        return row_error(combine(), tokens.float() * copies[:, None])

    goes_to, rank, row_bytes = (
        Places.of(problem.routing).goes_to,
        problem.rank,
        x.shape[1] * x.element_size(),
    )
    own = goes_to[rank, :, rank].sum()
    leave, come = (
        int(rows.sum() - own) * row_bytes for rows in (goes_to[rank], goes_to[:, :, rank])
    )
    both_ways = in_steps(dispatch, dispatch_again)
    return [
        TripVariant("dispatch", Variant(NAME, DIRECTIONS, both_ways, dispatch_error), leave),
        TripVariant(
            "combine",
            Variant(NAME, ("forward",), in_steps(combine), combine_error, MAX_ERROR),
            come,
        ),
    ]


class _Trip:
    """One routing on its way through DeepEP: dispatch first, then everything that needs its handle."""

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


def trip_records(
    problem: Problem, trip: TripVariant, ranks: Ranks, repetitions: int
) -> list[Record]:
    """One record for each direction. Collective.

    Raises:
        WrongResult: its results are wrong.
    """
    suite, variant, moved_bytes = trip
    wire_bytes = int(ranks.largest(moved_bytes)) or None
    times, errors = measure(Run(ranks, None, repetitions), [variant], align=align_ahead)
    records = []
    for column, direction in enumerate(variant.directions):
        taken, error = times[variant.name][:, column], errors[variant.name]
        records.append(
            case_record(
                problem, suite, variant.name, direction, taken, error=error, wire_bytes=wire_bytes
            )
        )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_shape_arguments(parser)
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank (%(default)s)")
    parser.add_argument("--skew", choices=SKEWS, default="uniform", help="routing (%(default)s)")
    parser.add_argument(
        "--repetitions", type=int, default=30, help="of every variant (%(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the records to FILE")
    options = parser.parse_args()
    cases = [Case(shape, options.tokens, options.skew) for shape in shapes_of(options)]
    records: list[Record] = []
    with join() as ranks:
        facts = measured_on(ranks)
        buffer = open_buffer(cases, ranks)
        for case in cases:
            problem = Problem(case, ranks)
            step = step_of(problem, buffer)
            records += [r | facts for r in step_records(problem, step, ranks, options.repetitions)]
            for trip in trips(problem, buffer):
                if ranks.rank == 0 and options.json:
                    save(records, options.json)  # the next one may crash
                records += [
                    r | facts for r in trip_records(problem, trip, ranks, options.repetitions)
                ]
        if ranks.rank == 0 and options.json:
            save(records, options.json)
        if ranks.rank == 0:
            print(render(records))


if __name__ == "__main__":
    main()
