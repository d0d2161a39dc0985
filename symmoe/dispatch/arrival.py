"""The dispatch trip while GEMMs run: rows travel on a branch stream, and what has arrived can be computed in parts.

Every rank sends to the next rank first, then to the one after it, and signals each as soon as its rows are there. So a
rank can begin with its own rows, go on with those of the rank before it, and so on (`plan.arrivals`), and
`plan.source_to_rows` says which rows each of these parts has. Same bytes as in send.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from symmoe import kernels
from symmoe.dispatch.plan import Plan
from symmoe.dispatch.send import PHASE, READY_PROBS, READY_ROWS, READY_SLOTS, agreed_fields
from symmoe.kernels import control
from symmoe.symm_mem.streams import Branch


@dataclass(frozen=True, slots=True)
class Arrival:
    """Rows that are on their way.

    Attributes:
        parts: int32 [2, e] per source rank, in the order of arrival: the rows (first, one past the last) of each local
            expert that the current stream may read once the iterator has handed them out. Together they are all rows.
            None: all rows are there.
        row_probs: fp32 [N_cap], complete for the parts that have been handed out; None without probs.
        row_to_packed_row: int32 [N_cap], likewise.
    """

    parts: Iterator[torch.Tensor] | None
    row_probs: torch.Tensor | None
    row_to_packed_row: torch.Tensor


@contextmanager
def arriving(
    x: torch.Tensor,
    plan: Plan,
    buffer: torch.Tensor,
    probs: torch.Tensor,
    *,
    expert_major: bool,
    num_ctas: int | None,
) -> Iterator[Arrival]:
    """Rows, slots and probs of x [T, H] to every rank's `buffer` (on the heap), in forward. Collective.

    Does not synchronise the host. Sets the plan's `packed_to_row` and `row_to_packed_row`.

    Args:
        expert_major: `buffer` is [N_cap, H] in expert-major order; otherwise [P_cap, H] packed.
        num_ctas: programs of the kernels that move rows to peers; None: as many as they like.
    """
    ops, heap, agreed = kernels.for_device(x.device), plan.heap, agreed_fields(x, probs)
    shape = (plan.packed_row_capacity, plan.top_k)
    with (
        heap.lease(shape, torch.int32, name="received slots", phase=PHASE) as wire_slots,
        heap.lease(shape, torch.float32, name="received probs", phase=PHASE) as wire_probs,
        heap.one_call(),
    ):
        offsets = (heap.offset_of(buffer, phase=PHASE), wire_slots.offset, wire_probs.offset)
        ready = heap.barrier(PHASE, publish=offsets, **agreed)
        ops.push_slots(
            plan.slot_to_row,
            plan.slot_to_rank,
            probs,
            plan.token_to_packed_row,
            plan.block_tokens,
            plan.packed_start,
            plan.packed_limit,
            heap.peers,
            ready,
            row_column=READY_SLOTS,
            prob_column=READY_PROBS,
        )
        packed_to_row = torch.empty(shape, dtype=torch.int32, device=x.device)
        # Zeros, not garbage, in the tail: whoever gathers by it stays inside the buffer.
        row_to_packed_row = torch.zeros(plan.row_capacity, dtype=torch.int32, device=x.device)
        row_probs = torch.empty(plan.row_capacity, dtype=torch.float32, device=x.device)

        def receive(source: int, arrived: torch.Tensor) -> None:
            begin, end = _packed_rows_of(plan, source)
            ops.index_rows(
                wire_slots.tensor,
                wire_probs.tensor,
                begin,
                end,
                ready,
                arrived,
                packed_to_row,
                row_to_packed_row,
                row_probs,
            )
            if expert_major:
                ops.fan_out(buffer, packed_to_row, begin, end)

        with _travelling(x, plan, ready, expert_major, num_ctas):
            arrivals = _arrivals(plan, ready, receive)
            yield Arrival(arrivals, row_probs, row_to_packed_row)
            for _ in arrivals:  # those that nobody asked for
                pass
    plan.packed_to_row, plan.row_to_packed_row = packed_to_row, row_to_packed_row


@contextmanager
def rows_arriving(
    x: torch.Tensor, plan: Plan, buffer: torch.Tensor, *, expert_major: bool, num_ctas: int | None
) -> Iterator[Iterator[torch.Tensor]]:
    """As :func:`arriving`, rows alone, over a plan that has dispatched: what backward does. Yields the parts."""
    ops, heap = kernels.for_device(x.device), plan.heap
    packed_to_row, _ = plan.received_index()

    def receive(source: int, arrived: torch.Tensor) -> None:
        if expert_major:
            ops.fan_out(buffer, packed_to_row, *_packed_rows_of(plan, source))

    with heap.one_call():
        ready = heap.barrier(PHASE, publish=(heap.offset_of(buffer, phase=PHASE),), **agreed_fields(x, None))
        with _travelling(x, plan, ready, expert_major, num_ctas):
            arrivals = _arrivals(plan, ready, receive)
            yield arrivals
            for _ in arrivals:
                pass


@contextmanager
def _travelling(
    x: torch.Tensor, plan: Plan, ready: torch.Tensor, expert_major: bool, num_ctas: int | None
) -> Iterator[None]:
    """Sends the rows of x: peers' on a branch stream, this rank's own on the current one."""
    ops, heap = kernels.for_device(x.device), plan.heap
    token_to_row = plan.token_to_primary_row if expert_major else plan.token_to_packed_row
    branch: Branch = heap.branch()

    def push(rank: int, num_ctas: int | None) -> None:
        ranks = range(rank, rank + 1)
        ops.push_rows(x, token_to_row, heap.peers, ready, column=READY_ROWS, ranks=ranks, num_ctas=num_ctas)

    try:
        with branch:
            for step in range(1, heap.num_ranks):
                rank = (heap.rank + step) % heap.num_ranks
                push(rank, num_ctas)
                heap.send_signal(rank)
        push(heap.rank, None)
        yield
    finally:
        branch.join()


def _arrivals(plan: Plan, ready: torch.Tensor, receive: Callable[[int, torch.Tensor], None]) -> Iterator[torch.Tensor]:
    """The parts, each once the current stream has waited for its rows and `receive`d them."""
    for source in plan.arrivals:
        arrived = ready
        if source != plan.heap.rank:
            arrived = plan.heap.wait_for_signal(source, control.PHASE_DISPATCH_DONE)
        receive(source, arrived)
        yield plan.source_to_rows[source]


def _packed_rows_of(plan: Plan, source: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [1] each: the first packed row of a source rank, and the one past its last."""
    start = plan.source_to_packed_start
    return start[source : source + 1], start[source + 1 : source + 2]
