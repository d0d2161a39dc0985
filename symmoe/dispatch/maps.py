"""What a plan is: the maps of one layer call, and their sizes.

T tokens, K slots per token, E experts, e experts per rank, R ranks, N rows and P packed rows received by this rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from symmoe.dispatch.crossing import Crossing
from symmoe.errors import StalePlan
from symmoe.kernels import control
from symmoe.kernels.gemm_parts import bounds_of
from symmoe.symm_mem.heap import SymmetricHeap

Layout = Mapping[str, tuple[int, int, tuple[int, ...]]]  # (first element, number of elements, shape) of each tensor
_NOTHING_DISPATCHED = "this plan has dispatched nothing yet: dispatch_tokens comes before combine_tokens"


class Region(NamedTuple):
    """Consecutive tokens of a plan that are from one rank, and where they have their packed rows.

    Attributes:
        tokens: which of those that are sent together; None: all.
        slot_to_row, slot_to_rank, token_to_packed_row: their lines of the plan's maps.
        block_tokens: int32 [., R], tokens of each block of them that go to each rank.
        packed_start, packed_limit: int32 [R], their first packed row on each rank, and rows of the region there.
    """

    tokens: slice | None
    slot_to_row: torch.Tensor
    slot_to_rank: torch.Tensor
    token_to_packed_row: torch.Tensor
    block_tokens: torch.Tensor
    packed_start: torch.Tensor
    packed_limit: torch.Tensor


class _Part:
    """One of the tensors in the storage of a plan: a view that is made when it is first asked for."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, integers: PlanIntegers, owner: type) -> torch.Tensor:
        first, numel, shape = integers.layout[self._name]
        view = integers.storage[first : first + numel].view(shape)
        vars(integers)[self._name] = view  # found before this descriptor from now on
        return view


@dataclass(eq=False)
class PlanIntegers:
    """The tensors that the kernels of a plan fill: int32 views of one allocation, aligned to 16 bytes. See Plan.

    Attributes:
        storage: the allocation.
        layout: of its tensors.
    """

    storage: torch.Tensor
    layout: Layout

    splits, row_range, slot_start, slot_limit = _Part(), _Part(), _Part(), _Part()
    slot_to_row, slot_to_rank, token_to_primary_row, token_to_packed_row = _Part(), _Part(), _Part(), _Part()
    block_tokens, packed_start, packed_limit, source_to_packed_start = _Part(), _Part(), _Part(), _Part()
    source_to_row_start, source_to_rows, expert_load, report = _Part(), _Part(), _Part(), _Part()


@functools.lru_cache(maxsize=256)
def plan_layout(num_tokens: int, top_k: int, num_experts: int, num_ranks: int) -> tuple[int, Layout]:
    """Elements of a plan's storage, and its layout."""
    num_local = num_experts // num_ranks
    shapes = {
        "splits": (num_local,),
        "row_range": (2, num_local),
        "slot_start": (num_experts,),
        "slot_limit": (num_experts,),
        "slot_to_row": (num_tokens, top_k),
        "slot_to_rank": (num_tokens, top_k),
        "token_to_primary_row": (num_tokens, num_ranks),
        "token_to_packed_row": (num_tokens, num_ranks),
        "block_tokens": (num_blocks(num_tokens), num_ranks),
        "packed_start": (num_ranks,),
        "packed_limit": (num_ranks,),
        "source_to_packed_start": (num_ranks + 1,),
        "source_to_row_start": (num_ranks + 1, num_local),
        "source_to_rows": (num_ranks, 2, num_local),
        "expert_load": (num_experts,),
        "report": (control.SUMMARY_WORDS,),
    }
    unit = control.ACCESS_BYTES // torch.int32.itemsize
    first, layout = 0, {}
    for name, shape in shapes.items():
        layout[name] = first, math.prod(shape), shape
        first += -(-math.prod(shape) // unit) * unit
    return first, layout


@dataclass(eq=False)
class Plan(PlanIntegers):
    """What :func:`make_plan` returns. Tensors are on the heap's device; -1 in a map means "none".

    Attributes:
        heap: the symmetric heap of the plan.
        num_tokens, top_k, num_experts: T, K, E.
        row_capacity: rows that a buffer for this plan needs on this rank: the largest N of the group (exact
            capacity), the capacity given (static), or the room that the call got here.
        packed_row_capacity: packed rows that a buffer for this plan needs on this rank.
        expected_rows: estimate of the rows of a rank, the same on all ranks: row_capacity, or all slots of a rank's
            tokens if these are fewer.
        num_rows: N as a host integer; None with static capacity, where only the device knows it, and for a plan with
            room until it is settled.
        splits: int32 [e], rows of each local expert.
        row_range: int32 [2, e], where each local expert's rows begin and end.
        slot_to_row, slot_to_rank: int32 [T, K], the row of each slot on its expert's rank, and that rank.
        token_to_primary_row, token_to_packed_row: int32 [T, R], per destination rank.
        source_to_packed_start: int32 [R + 1], where the packed rows of each source rank start here; the last is P.
        source_to_row_start: int32 [R + 1, e], where the rows of each source rank and local expert start here; the last
            row is where the experts' rows end.
        source_to_rows: int32 [R, 2, e]: per source rank and local expert, the rows (first, one past the last) that can
            be computed once that rank's rows have arrived, after those of the ranks before it in :attr:`arrivals`.
        generation: epoch of the plan's barrier; all ranks of a trip must bring the same plan.
        expert_load: int32 [E], slots of each expert over the whole EP group, before dropping.
        slot_start, slot_limit: int32 [E], the row of this rank's first slot for each expert, and how many are kept.
        packed_start, packed_limit: int32 [R], this rank's first packed row on each rank, and the rows of its region.
        block_tokens: int32 [blocks, R], tokens of each block of this rank's that go to each rank.
        report: int32 [control.SUMMARY_WORDS], sizes and errors for the host.
        packed_to_row: int32 [P_cap, K], rows of each packed row in k order; set by the plan's first dispatch.
        row_to_packed_row: int32 [N_cap], set by the plan's first dispatch; the tail is 0.
        max_rows, max_packed_rows: the largest N and P of any rank; None as num_rows is.
        has_room: False for a plan with too little room on some rank, once it is settled: it has no rows then.
        across: of a group that spans nodes, the way to the other nodes; else None.
    """

    heap: SymmetricHeap
    num_tokens: int
    top_k: int
    num_experts: int
    row_capacity: int
    packed_row_capacity: int
    expected_rows: int
    num_rows: int | None
    generation: int
    packed_to_row: torch.Tensor | None = None
    row_to_packed_row: torch.Tensor | None = None
    max_rows: int | None = None
    max_packed_rows: int | None = None
    has_room: bool = True
    across: Across | None = None
    _read_report: Callable[[], list[int]] | None = None

    def settle(self) -> None:
        """Finds out what the routing of a plan with room needs, and whether there is room for it.

        Waits until the device has made the plan. Other plans are settled from the start.

        Raises:
            ExpertIdError, ConfigMismatch: see make_plan; on every rank.
        """
        if self._read_report is None:
            return
        report, self._read_report = self._read_report(), None
        self.has_room = report[control.SUM_ERROR] != control.PLAN_OVERFLOW
        if self.has_room and report[control.SUM_ERROR] != control.PLAN_OK:
            self.heap.check()  # a fault of a peer is on record
            if report[control.SUM_ERROR] == control.PLAN_FAULT and self.heap.nodes is not None:
                self.heap.barrier(control.PHASE_NODES_PLAN)  # one of another node, which comes to the record here
                self.heap.synchronize()
            raise self.heap.faults.of_plan(report)
        self.num_rows = report[control.SUM_NUM_ROWS]
        self.max_rows = max(1, report[control.SUM_MAX_ROWS])
        self.max_packed_rows = max(1, report[control.SUM_MAX_PACKED])
        if self.row_capacity < 0:
            self.row_capacity = self.expected_rows = self.max_rows
            self.packed_row_capacity = self.max_packed_rows
        self.heap.waits.flight.note(self.generation, num_rows=self.num_rows, num_packed=report[control.SUM_NUM_PACKED])

    def shrink(self) -> None:
        """After forward with room: later buffers have the rows that the routing needs. Local, as buffers are."""
        self.row_capacity, self.packed_row_capacity = self.needed_rows
        packed_to_row, row_to_packed_row = self.received_index()
        self.packed_to_row = packed_to_row[: self.packed_row_capacity]
        self.row_to_packed_row = row_to_packed_row[: self.row_capacity]

    @property
    def needed_rows(self) -> tuple[int, int]:
        """Rows and packed rows that buffers need on every rank; with exact capacity and room, once it is settled."""
        return self.max_rows or self.row_capacity, self.max_packed_rows or self.packed_row_capacity

    @property
    def row_start(self) -> torch.Tensor:
        """int32 [e + 1], where each local expert's rows start; the last is N. A new tensor."""
        return bounds_of(self.row_range)

    @property
    def num_dropped(self) -> torch.Tensor:
        """int32 [1], slots of the whole EP group that were dropped."""
        return self.report[control.SUM_NUM_DROPPED : control.SUM_NUM_DROPPED + 1]

    @property
    def num_packed(self) -> torch.Tensor:
        """int32 [1], P on the device."""
        return self.source_to_packed_start[-1:]

    @functools.cached_property
    def regions(self) -> tuple[Region, ...]:
        """Where this rank's tokens have their packed rows, by the rank that they are from."""
        maps = self.slot_to_row, self.slot_to_rank, self.token_to_packed_row
        return (Region(None, *maps, self.block_tokens, self.packed_start, self.packed_limit),)

    @property
    def inside(self) -> Plan:
        """This plan as the ranks of a node have it: between nodes a plan of its own; else this one."""
        return self if self.across is None else self.across.own

    @property
    def arrivals(self) -> list[int]:
        """The source ranks in the order in which their rows arrive, if every rank sends to the next one first."""
        return [(self.heap.rank - step) % self.heap.num_ranks for step in range(self.heap.num_ranks)]

    def rows_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The part of a row buffer that callers see: N rows (exact capacity) or all of them (static)."""
        return buffer if self.num_rows is None else buffer[: self.num_rows]

    @property
    def not_dispatched(self) -> StalePlan | None:
        """The error of combining with this plan now, or None if something has been dispatched with it."""
        return None if self.packed_to_row is not None else StalePlan(_NOTHING_DISPATCHED)

    def received_index(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(packed_to_row, row_to_packed_row) of a plan whose tokens have been dispatched.

        Raises:
            StalePlan: nothing has been dispatched with this plan yet.
        """
        if self.packed_to_row is None or self.row_to_packed_row is None:
            raise StalePlan(_NOTHING_DISPATCHED)
        return self.packed_to_row, self.row_to_packed_row


@dataclass(frozen=True, eq=False)
class Across:
    """How the tokens of a plan get to other nodes, and what they do there.

    Attributes:
        crossing: the way there and back.
        own, foreign: the plans inside this node of this rank's tokens, and of those that its rail has sent, see
            dispatch/node_plan.py.
        own_rows: int32 [2, e], rows that can be computed when the tokens of this node's ranks have come; None: ranks of
            this node do not follow each other, so these rows are in several places.
    """

    crossing: Crossing
    own: Plan
    foreign: Plan
    own_rows: torch.Tensor | None


def num_blocks(num_tokens: int) -> int:
    """Blocks of tokens whose slots are counted together."""
    return -(-num_tokens // control.TOKENS_PER_BLOCK)
