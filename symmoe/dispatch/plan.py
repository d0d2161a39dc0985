"""The plan of one layer call: which row of which rank every slot of this rank's routing becomes.

T tokens, K slots per token, E experts, e experts per rank, R ranks, N rows and P packed rows received by this rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from symmoe import kernels
from symmoe.checks.buffers import tensor_problem
from symmoe.checks.choices import is_choice, words_problem
from symmoe.errors import ArgumentError, StaleLease, StalePlan
from symmoe.kernels import control
from symmoe.kernels.gemm_parts import bounds_of
from symmoe.precision.names import precision_word
from symmoe.precision.recipes import Recipe
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.symm_mem.room_for_rows import Room
from symmoe.symm_mem.tell_peers import told

MAX_TOP_K = 32
_OVERFLOW = {"raise": control.OVERFLOW_RAISE, "drop": control.OVERFLOW_DROP, "repeat": control.OVERFLOW_REPEAT}


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
        layout: (first element, number of elements, shape) of each tensor.
    """

    storage: torch.Tensor
    layout: Mapping[str, tuple[int, int, tuple[int, ...]]]

    splits = _Part()
    row_range = _Part()
    slot_start = _Part()
    slot_limit = _Part()
    slot_to_row = _Part()
    slot_to_rank = _Part()
    token_to_primary_row = _Part()
    token_to_packed_row = _Part()
    block_tokens = _Part()
    packed_start = _Part()
    packed_limit = _Part()
    source_to_packed_start = _Part()
    source_to_row_start = _Part()
    source_to_rows = _Part()
    expert_load = _Part()
    report = _Part()


@functools.lru_cache(maxsize=256)
def _layout(
    num_tokens: int, top_k: int, num_experts: int, num_ranks: int
) -> tuple[int, dict[str, tuple[int, int, tuple[int, ...]]]]:
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
        row_capacity: rows that a buffer for this plan needs on every rank: the largest N of the group (exact
            capacity), the capacity given (static), or the room that the call got.
        packed_row_capacity: packed rows that a buffer for this plan needs on every rank.
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
            raise self.heap.plan_failure(report)
        self.num_rows = report[control.SUM_NUM_ROWS]
        self.max_rows, self.max_packed_rows = (
            max(1, report[control.SUM_MAX_ROWS]),
            max(1, report[control.SUM_MAX_PACKED]),
        )
        if self.row_capacity < 0:
            self.row_capacity = self.expected_rows = self.max_rows
            self.packed_row_capacity = self.max_packed_rows
        self.heap.note_counts(self.generation, num_rows=self.num_rows, num_packed=report[control.SUM_NUM_PACKED])

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
        if self.packed_to_row is not None:
            return None
        return _nothing_dispatched()

    def received_index(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(packed_to_row, row_to_packed_row) of a plan whose tokens have been dispatched.

        Raises:
            StalePlan: nothing has been dispatched with this plan yet.
        """
        if self.packed_to_row is None or self.row_to_packed_row is None:
            raise _nothing_dispatched()
        return self.packed_to_row, self.row_to_packed_row


def _nothing_dispatched() -> StalePlan:
    return StalePlan("this plan has dispatched nothing yet: dispatch_tokens comes before combine_tokens")


class PlanOptions(NamedTuple):
    """Arguments of :func:`make_plan`."""

    num_experts: int
    capacity: int | None
    overflow: str
    max_tokens: int | None
    hidden: int | None
    dtype: torch.dtype | None
    precision: Recipe | None
    quantized_wire: str


def make_plan(
    topk_idx: torch.Tensor,
    *,
    num_experts: int,
    heap: SymmetricHeap,
    capacity: int | None = None,
    overflow: str = "raise",
    max_tokens: int | None = None,
    hidden: int | None = None,
    dtype: torch.dtype | None = None,
    precision: Recipe | None = None,
    quantized_wire: str = "none",
) -> Plan:
    """Plans one layer call. Collective over the heap's group.

    With exact capacity (`capacity=None`) the host waits once for one small read; with static capacity it never waits.

    Args:
        topk_idx: int32 or int64 [T, K] on the heap's device; expert ids in [0, num_experts), or -1 for no expert. An
            id that a token has twice counts twice. T may differ from rank to rank.
        num_experts: E, a multiple of the number of ranks; expert g lives on rank g // (E / R).
        heap: the EP group's heap.
        capacity: None (exact), or the rows each rank can take.
        overflow: static capacity only. "raise": if any rank would get more rows, nothing moves and every rank raises
            CapacityError (on GPUs at its next call on the heap, or in heap.synchronize). "drop": the last tokens of
            the fullest experts lose those slots.
        max_tokens: static capacity only: the largest T of any rank, which bounds the packed rows. None: this
            rank's T, which then must be the same on all ranks.
        hidden, dtype: of the rows the plan will carry. Given here, ranks that disagree raise in this call.
        precision, quantized_wire: numbers of the experts, and what travels in them (MoEConfig); checked as hidden is.

    Returns:
        The plan.

    Raises:
        ArgumentError: an argument is wrong on some rank; raised on every rank.
        ExpertIdError: an id is out of range on some rank; raised on every rank.
        ConfigMismatch: ranks disagree on K, E, capacity, overflow, max_tokens, hidden, dtype, precision or
            quantized_wire; on every rank.
        CapacityError: see `overflow`.
        PeerTimeout: a rank did not come.
    """
    options = PlanOptions(num_experts, capacity, overflow, max_tokens, hidden, dtype, precision, quantized_wire)
    return plan_call(topk_idx, heap, options, lambda: None)


def plan_call(
    topk_idx: torch.Tensor, heap: SymmetricHeap, options: PlanOptions, find_room: Callable[[], Room | None]
) -> Plan:
    """Same as make_plan, except that with exact capacity the host does not wait if there is room: see Plan.settle.

    Args:
        find_room: with exact capacity, what the buffers of this call can take, the same on all ranks; None: what its
            routing needs. Asked for once this rank has noticed the errors of earlier calls, as its peers have.
    """
    if not isinstance(heap, SymmetricHeap):
        raise ArgumentError(f"heap ({type(heap).__name__}) must be a SymmetricHeap")
    num_experts, capacity, overflow, max_tokens, hidden, dtype, precision, quantized_wire = options
    heap.check(control.PHASE_PLAN, waits=capacity is None)
    with told(heap, control.PHASE_PLAN):
        heap.fail_for(_find_problem(topk_idx, heap, options), control.PHASE_PLAN)
        num_tokens, top_k = topk_idx.shape
        limit = token_limit = packed_limit = -1
        room = find_room() if capacity is None else None
        if capacity is None and room is None and heap.captured_reports is not None:
            heap.fail(ArgumentError("a step that is captured calls a layer that earlier calls did not"), None)
        if capacity is not None:
            limit, token_limit = capacity, num_tokens if max_tokens is None else max_tokens
        elif room is not None:
            limit, packed_limit, overflow = room.rows, room.packed_rows, "repeat"
        words = {
            control.HEAD_NUM_TOKENS: num_tokens,
            control.HEAD_TOP_K: top_k,
            control.HEAD_NUM_EXPERTS: num_experts,
            control.HEAD_CAPACITY: limit,
            control.HEAD_PACKED_CAPACITY: packed_limit,
            control.HEAD_MAX_TOKENS: token_limit,
            control.HEAD_OVERFLOW: _OVERFLOW[overflow],
            control.HEAD_HIDDEN: -1 if hidden is None else hidden,
            control.HEAD_DTYPE: -1 if dtype is None else control.DTYPES.index(dtype),
            control.HEAD_PRECISION: precision_word(precision),
            control.HEAD_QUANTIZED_WIRE: control.QUANTIZED_WIRES.index(quantized_wire),
        }
        header = tuple(words.get(word, 0) for word in range(control.HEADER_WORDS))
        plan = _place_slots(topk_idx.detach().contiguous(), heap, header)
        if capacity is not None:
            return plan
        if room is not None and heap.captured_reports is not None:
            plan.expected_rows = room.expected_rows
            heap.captured_reports.append(plan.report)
            return plan
        plan._read_report = heap.read_back(plan.report)
        if room is None:
            plan.settle()
        else:
            plan.expected_rows = room.expected_rows
        return plan


def _place_slots(topk_idx: torch.Tensor, heap: SymmetricHeap, header: tuple[int, ...]) -> Plan:
    """The plan; `header` has the other arguments of make_plan. Does not wait."""
    num_tokens, top_k = topk_idx.shape
    num_experts, limit = header[control.HEAD_NUM_EXPERTS], header[control.HEAD_CAPACITY]
    packed_limit, most_tokens = header[control.HEAD_PACKED_CAPACITY], header[control.HEAD_MAX_TOKENS]
    numel, layout = _layout(num_tokens, top_k, num_experts, heap.num_ranks)
    with heap.one_call():
        (storage,) = heap.run(("plan", header), partial(_fill, topk_idx, heap, header, numel, layout), (topk_idx,))
        generation = heap.epoch
        heap.note_counts(generation, num_tokens=num_tokens, top_k=top_k)
        if heap.device.type == "cpu":
            heap.check()  # before another thread gets its turn and raises the error instead
    return Plan(
        storage=storage,
        layout=layout,
        heap=heap,
        num_rows=None,
        row_capacity=limit,
        packed_row_capacity=packed_limit if most_tokens < 0 else max(1, min(limit, heap.num_ranks * most_tokens)),
        expected_rows=max(1, min(limit, most_tokens * top_k)),
        num_tokens=num_tokens,
        top_k=top_k,
        num_experts=num_experts,
        generation=generation,
    )


def _fill(
    topk_idx: torch.Tensor,
    heap: SymmetricHeap,
    header: tuple[int, ...],
    numel: int,
    layout: Mapping[str, tuple[int, int, tuple[int, ...]]],
) -> tuple[torch.Tensor]:
    """A new storage of a plan, filled. Collective."""
    num_tokens, num_ranks, num_experts = len(topk_idx), heap.num_ranks, header[control.HEAD_NUM_EXPERTS]
    ops = kernels.for_device(heap.device)
    integers = PlanIntegers(torch.empty(numel, dtype=torch.int32, device=heap.device), layout)
    shape = num_blocks(num_tokens), num_experts + num_ranks + 2
    block_counts = torch.empty(shape, dtype=torch.int32, device=heap.device)
    block_starts = torch.empty((shape[0], num_experts), dtype=torch.int32, device=heap.device)
    ops.count_slots(topk_idx, block_counts, num_experts=num_experts, num_ranks=num_ranks)
    ops.send_counts(block_counts, topk_idx, header, block_starts, heap.peers, num_experts=num_experts)
    received = heap.barrier(control.PHASE_PLAN)
    ops.lay_out(
        heap.peers,
        received,
        heap.status,
        num_experts=num_experts,
        capacity=header[control.HEAD_CAPACITY],
        packed_capacity=header[control.HEAD_PACKED_CAPACITY],
        drop=header[control.HEAD_OVERFLOW] == control.OVERFLOW_DROP,
        record_errors=header[control.HEAD_CAPACITY] >= 0,  # what is launched before the host looks must move nothing
        splits=integers.splits,
        row_range=integers.row_range,
        slot_start=integers.slot_start,
        slot_limit=integers.slot_limit,
        packed_start=integers.packed_start,
        packed_limit=integers.packed_limit,
        source_to_packed_start=integers.source_to_packed_start,
        source_to_row_start=integers.source_to_row_start,
        expert_load=integers.expert_load,
        report=integers.report,
    )
    ops.assign_rows(
        topk_idx,
        block_starts,
        integers.slot_start,
        integers.slot_limit,
        integers.slot_to_row,
        integers.slot_to_rank,
        integers.block_tokens,
        experts_per_rank=num_experts // num_ranks,
    )
    ops.assign_packed_rows(
        integers.slot_to_row,
        integers.slot_to_rank,
        integers.block_tokens,
        integers.packed_start,
        integers.token_to_packed_row,
        integers.token_to_primary_row,
    )
    ops.split_by_source(integers.source_to_row_start, integers.source_to_rows, rank=heap.rank)
    return (integers.storage,)


def num_blocks(num_tokens: int) -> int:
    """Blocks of tokens whose slots are counted together."""
    return -(-num_tokens // control.TOKENS_PER_BLOCK)


def _find_problem(
    topk_idx: torch.Tensor, heap: SymmetricHeap, options: PlanOptions
) -> ArgumentError | StaleLease | None:
    """What is wrong with this rank's arguments, found without looking at device memory."""
    num_experts, capacity, overflow, max_tokens, hidden, dtype, precision, quantized_wire = options
    dtypes = (torch.int32, torch.int64)
    error = tensor_problem("topk_idx", topk_idx, shape=("T", "K"), dtypes=dtypes, device=heap.device)
    if error is not None:
        return error
    if not 1 <= topk_idx.shape[1] <= MAX_TOP_K:
        return ArgumentError(f"topk_idx has K = {topk_idx.shape[1]} slots per token; K must be in [1, {MAX_TOP_K}]")
    if topk_idx.numel() >= 2**31:  # a slot is known by its number
        return ArgumentError(f"topk_idx {list(topk_idx.shape)} must have less than 2**31 slots")
    integers = {"num_experts": num_experts, "capacity": capacity, "max_tokens": max_tokens, "hidden": hidden}
    for name, value in integers.items():
        if value is None and name != "num_experts":
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            return ArgumentError(f"{name} ({value!r}) must be an int, not {type(value).__name__}")
        if value >= 2**31:
            return ArgumentError(f"{name} ({value}) must be less than 2**31")
    if not 1 <= num_experts <= control.MAX_EXPERTS:
        return ArgumentError(f"num_experts ({num_experts}) must be in [1, {control.MAX_EXPERTS}]")
    if num_experts % heap.num_ranks:
        return ArgumentError(f"num_experts ({num_experts}) must be divisible by the number of ranks ({heap.num_ranks})")
    if not is_choice("overflow", overflow):
        return ArgumentError(f"overflow ({overflow!r}) must be 'raise' or 'drop'")
    if hidden is not None and hidden < 1:
        return ArgumentError(f"hidden ({hidden}) must be at least 1")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in control.DTYPES):
        return ArgumentError(f"dtype ({dtype}) must be one of {', '.join(map(str, control.DTYPES))}")
    if capacity is None and (max_tokens is not None or overflow != "raise"):
        setting = f"max_tokens ({max_tokens})" if max_tokens is not None else f"overflow ({overflow!r})"
        return ArgumentError(f"{setting} needs a static capacity, and capacity is None")
    if capacity is None and heap.captured_reports is None and heap.capture:
        return ArgumentError(
            "capacity (None) makes the host read the plan, which a CUDA graph cannot; give it rows, or capture whole "
            "steps with symmoe.capture_step"
        )
    if capacity is not None and capacity < 1:
        return ArgumentError(f"capacity ({capacity}) must be at least 1 row")
    if max_tokens is not None and max_tokens < topk_idx.shape[0]:
        return ArgumentError(f"max_tokens ({max_tokens}) must be at least T, this rank's tokens ({topk_idx.shape[0]})")
    if precision is not None and not isinstance(precision, Recipe):
        return ArgumentError(f"precision ({precision!r}) must be a recipe of symmoe.precision, or None")
    return words_problem(quantized_wire=quantized_wire)
