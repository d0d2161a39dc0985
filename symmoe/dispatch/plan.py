"""The plan of one layer call: which row of which rank every slot of this rank's routing becomes.

T tokens, K slots per token, E experts, e experts per rank, R ranks, N rows and P packed rows received by this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from symmoe import kernels
from symmoe.checks.arguments import (
    Problem,
    check_kind,
    choices_problem,
    parameter_dtype_problem,
    tensor_problem,
)
from symmoe.dispatch.nodes import NodesPlan, RailRows, Region, plan_in_node
from symmoe.errors import ArgumentError, first_problem
from symmoe.kernels import control
from symmoe.kernels.control import PlanIntegers, in_storage, num_blocks, plan_layout
from symmoe.kernels.gemm_parts import Part
from symmoe.kernels.operands import bounds_of
from symmoe.precision.recipes import Recipe, precision_problem, precision_word
from symmoe.symm_mem.heap import FailPeersOnError, SymmetricHeap, nodes_of
from symmoe.symm_mem.row_budget import RowBudget, rounded_up

MAX_TOP_K = 32
FindBudget = Callable[[], RowBudget | None]
_RailOptions = tuple[int, bool] | None  # the last arguments of RailRows, if the group spans nodes
_OVERFLOW = {
    "raise": control.OVERFLOW_RAISE,
    "drop": control.OVERFLOW_DROP,
    "repeat": control.OVERFLOW_REPEAT,
}


class ReceivedIndex(NamedTuple):
    """The maps from the packed rows that a dispatch has received to their rows, and back.

    packed_to_row: int32 [P_cap, K], rows of each packed row in k order. row_to_packed_row: int32 [N_cap]; the tail
    is 0."""

    packed_to_row: torch.Tensor
    row_to_packed_row: torch.Tensor

    def with_rows_of(self, plan: Plan) -> ReceivedIndex:
        """The same index for the capacities of a plan that needs fewer rows."""
        return ReceivedIndex(
            self.packed_to_row[: plan.packed_row_capacity],
            self.row_to_packed_row[: plan.row_capacity],
        )


@dataclass(frozen=True, eq=False)
class Plan(PlanIntegers):
    """The result of :func:`make_plan`: tensors on the heap's device, and their sizes on the host. It never changes.

    Attributes:
        splits, expert_load, slot_to_row, slot_to_rank, ...: int32, see symmoe.kernels.control.PlanIntegers.
        heap: the symmetric heap of the plan.
        num_tokens, top_k, num_experts: T, K, E. num_replica_slots: S, replica slots of a rank, for other ranks'
            experts.
        row_capacity: rows that a buffer for this plan needs on this rank: the largest N of the group (exact capacity),
            the given capacity (static), or the rows reserved for the call here; -1: unknown until :meth:`settle`.
        packed_row_capacity: packed rows that a buffer for this plan needs on this rank.
        expected_rows: estimate of the rows of a rank, rounded up, equal on all ranks: row_capacity, or all slots of a
            rank's tokens if these are fewer.
        has_sizes: whether the host has read the report, or the plan posts none.
        generation: epoch of the plan's barrier; all ranks of a trip must pass the same plan.
        num_rows: N on the host; None with static capacity, where only the device knows N, and for a plan with a row
            budget until :meth:`settle`.
        max_rows, max_packed_rows: the largest N and P of any rank; None like num_rows.
        most_sent: the most tokens that this rank sends to another node, if num_rows is known.
        fits_budget: False if the budget of some rank is too small, which :meth:`settle` reads: no row then moves.
        nodes: the paths to other nodes, if the group spans nodes; else None.
    """

    heap: SymmetricHeap
    num_tokens: int
    top_k: int
    num_experts: int
    num_replica_slots: int
    row_capacity: int
    packed_row_capacity: int
    expected_rows: int
    has_sizes: bool
    generation: int
    num_rows: int | None = None
    max_rows: int | None = None
    max_packed_rows: int | None = None
    most_sent: int = 0
    fits_budget: bool = True
    nodes: NodesPlan[Plan] | None = None

    phase = control.PHASE_DISPATCH_READY  # the next barrier of its call

    def replaced(self, **changes: Any) -> Plan:
        """A copy of the plan with other values of these attributes."""
        plan = object.__new__(Plan)
        vars(plan).update(vars(self), **changes)
        return plan

    def settle(self) -> Plan:
        """Reads the rows that the routing needs, and whether they fit into the row budget: a plan with these. Waits
        until the device has made the plan, unless the host has its sizes. ExpertIdError, ConfigMismatch: see make_plan;
        on every rank."""
        if self.has_sizes:
            return self
        report = self.heap.await_report(self.generation)
        fits_budget = report[control.SUM_ERROR] != control.PLAN_OVER_BUDGET
        if fits_budget and report[control.SUM_ERROR] != control.PLAN_OK:
            if (
                report[control.SUM_ERROR] == control.PLAN_FAULT
                and self.heap.nodes is not None
                and self.nodes is None
            ):
                self.heap.barrier(control.PHASE_NODES_PLAN)  # one of another node, recorded here
            self.heap.synchronize()  # a peer's fault is recorded, and with a budget also the plan's own
            raise self.heap.faults.of_plan(report)
        num_rows = report[control.SUM_NUM_ROWS]
        max_rows = max(1, report[control.SUM_MAX_ROWS])
        max_packed_rows = max(1, report[control.SUM_MAX_PACKED])
        self.heap.waits.flight.note(
            self.generation, num_rows=num_rows, num_packed=report[control.SUM_NUM_PACKED]
        )
        settled = self.replaced(
            has_sizes=True,
            fits_budget=fits_budget,
            num_rows=num_rows,
            most_sent=report[control.SUM_MOST_SENT],
            max_rows=max_rows,
            max_packed_rows=max_packed_rows,
        )
        if self.row_capacity >= 0:
            return settled
        return settled.replaced(
            row_capacity=max_rows,
            packed_row_capacity=max_packed_rows,
            expected_rows=self.expected_rows or rounded_up(max_rows),
        )

    @property
    def needed_rows(self) -> tuple[int, int]:
        """Rows and packed rows that buffers need on every rank; with a row budget, after :meth:`settle`."""
        return self.max_rows or self.row_capacity, self.max_packed_rows or self.packed_row_capacity

    @property
    def row_start(self) -> torch.Tensor:
        """int32 [e + 1], the first row of each local expert and replica slot; the last is N. A new tensor."""
        return bounds_of(torch.cat([self.row_range, self.replica_ranges[0]], 1))

    @property
    def num_dropped(self) -> torch.Tensor:
        """int32 [1], slots of the whole EP group that were dropped."""
        return self.storage.narrow(0, self.layout["report"][0] + control.SUM_NUM_DROPPED, 1)

    @property
    def load(self) -> tuple[torch.Tensor, ...]:
        """expert_load and num_dropped; with replicas also replica_to_expert and replica_rows."""
        replicas = (self.replica_to_expert, self.replica_rows) if self.num_replica_slots else ()
        return self.expert_load, self.num_dropped, *replicas

    @property
    def num_present(self) -> torch.Tensor:
        """int32 [1], N on the device."""
        return self.report[control.SUM_NUM_ROWS : control.SUM_NUM_ROWS + 1]

    @property
    def num_packed(self) -> torch.Tensor:
        """int32 [1], P on the device."""
        return self.source_to_packed_start[-1:]

    @functools.cached_property
    def regions(self) -> tuple[Region, ...]:
        """The packed rows of this rank's tokens, by the tokens' source rank."""
        maps = self.token_to_packed_row, self.block_tokens, self.packed_start, self.packed_limit
        return ((slice(None), (self.slot_to_row, self.slot_to_rank), maps),)

    @property
    def in_node(self) -> Plan:
        """The plan inside the node: a separate plan between nodes, else this one."""
        return self if self.nodes is None else self.nodes.own_plan

    def parts_of_replicas(self, num_sms: int | None = None) -> Sequence[tuple[Part, ...]]:
        """Rows of replicas, in three groups: of the tokens of ranks before this one, of this rank (on num_sms SMs), and
        of ranks after it. A group is one part, or none if it cannot have rows."""
        have_ranks = self.heap.rank > 0, True, self.heap.rank < self.heap.num_ranks - 1
        return [
            (Part(self.replica_ranges[1 + i], num_sms if i == 1 else None, is_of_replicas=True),)
            if self.num_replica_slots and has_ranks
            else ()
            for i, has_ranks in enumerate(have_ranks)
        ]

    @functools.cached_property
    def arrivals(self) -> list[int]:
        """The source ranks in order of arrival, if every rank sends to the next one first."""
        return [
            (self.heap.rank - step) % self.heap.num_ranks for step in range(self.heap.num_ranks)
        ]

    def rows_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The part of a row buffer for callers: N rows (exact capacity) or all rows (static)."""
        return buffer if self.num_rows is None else buffer[: self.num_rows]


class DispatchHandle(NamedTuple):
    """The results of a dispatch that a combine reads: the plan, and the index of the received rows. An opaque result
    of dispatch_tokens."""

    plan: Plan
    received_index: ReceivedIndex


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """The arguments of a plan's kernels, and the sizes of the plan that the host knows; see Plan."""

    heap: SymmetricHeap
    topk_idx: torch.Tensor  # as in make_plan; contiguous
    num_tokens: int
    top_k: int
    num_experts: int
    num_replica_slots: int
    header: tuple[int, ...]  # the words that peers read, see control.HEAD_*
    layout: control.PlanLayout
    row_capacity: int
    packed_row_capacity: int
    expected_rows: int
    config: int  # as in PlanOptions
    is_read: bool  # whether the host reads the report
    reports: list[torch.Tensor] | None  # of a capture, which get the report instead of the host
    rail_options: _RailOptions
    route: Any  # None, or a Route of moe/router.py that makes topk_idx first
    key: tuple[Hashable, ...]  # the values other than tensors that determine the launches

    phase = control.PHASE_PLAN  # the next barrier of its call
    num_rows = nodes = None  # as in Plan

    def make(self) -> PlanResult:
        """Launches the plan's kernels. Collective; waits for the device if sizes of buffers depend on the plan."""
        with torch.no_grad(), (heap := self.heap).one_call:
            generation = heap.epoch + 1
            inputs = (self.topk_idx,) if self.route is None else self.route.inputs
            storage, *routed = heap._run(
                self.key, functools.partial(self.launch, generation), inputs, plan=generation
            )
            plan = self.plan(storage, generation)
        return PlanResult(plan.settle() if self.row_capacity < 0 else plan, routed)

    def plan(self, storage: torch.Tensor, generation: int) -> Plan:
        """Same as plan_of, and records the plan. Called in the turn on the heap in which its kernels were launched."""
        heap = self.heap
        plan = self.plan_of(storage, generation)
        if self.reports is not None:
            self.reports.append(plan.report)
        heap.waits.flight.note(generation, num_tokens=self.num_tokens, top_k=self.top_k)
        if heap.streams.raises_at_once:
            heap.check()  # before another thread gets its turn and raises the error instead
        return plan

    def plan_of(self, storage: torch.Tensor, generation: int) -> Plan:
        """The plan that :meth:`launch` wrote into this storage."""
        return Plan(
            storage,
            self.layout,
            self.heap,
            self.num_tokens,
            self.top_k,
            self.num_experts,
            self.num_replica_slots,
            self.row_capacity,
            self.packed_row_capacity,
            self.expected_rows,
            has_sizes=not self.is_read,
            generation=generation,
        )

    def launch(self, generation: int) -> tuple[Any, ...]:
        """Returns the new, filled storage of the plan of this generation; with a route also logits, probs and scores;
        between nodes also the integers and num_received of RailRows. Collective."""
        heap = self.heap
        topk_idx = self.topk_idx
        route = self.route
        num_experts = self.num_experts
        num_ranks = heap.num_ranks
        blocks = num_blocks(len(topk_idx))
        counts = torch.empty(
            (blocks, num_experts + num_ranks + 2), dtype=torch.int32, device=heap.device
        )
        routed = () if route is None else route.choose(heap, counts)
        rails = self.rail_options and RailRows(topk_idx, heap, num_experts, *self.rail_options)
        ops = kernels.for_device(heap.device)
        numel, layout = plan_layout(*topk_idx.shape, num_experts, num_ranks, self.num_replica_slots)
        integers = in_storage(
            PlanIntegers, torch.empty(numel, dtype=torch.int32, device=heap.device), layout
        )
        if rails is not None:
            topk_idx = rails.topk_idx
        if route is None or topk_idx is not self.topk_idx:  # the route has counted all slots
            ops.count_slots(topk_idx, counts, num_experts=num_experts, num_ranks=num_ranks)
        received = self._exchange(counts, topk_idx, num_experts, rails)
        if self.num_replica_slots:  # the rest plans a call in which replicas are experts too
            num_experts += num_ranks * self.num_replica_slots
            num_near = num_ranks if rails is None else len(heap.topology.ranks)
            ops.place_replicas(
                heap.count_peers, integers, slack=self.header[control.HEAD_SLACK], num_near=num_near
            )
            starts = counts
            counts = counts.new_empty((blocks, num_experts + num_ranks + 2))
            ops.route_to_replicas(topk_idx, starts, integers, counts)
            received = self._exchange(counts, topk_idx, num_experts, rails)
            topk_idx = integers.slot_to_copy
        overflow = self.header[control.HEAD_OVERFLOW]
        ranks = (
            range(num_ranks)
            if rails is None or not heap.topology.is_in_order
            else heap.topology.ranks
        )
        ops.lay_out(
            heap.count_peers,
            received,
            heap.status,
            integers,
            capacity=self.header[control.HEAD_CAPACITY],
            overflow=overflow,
            ranks=ranks,
        )
        ops.assign_rows(topk_idx, counts, integers, drop=overflow == control.OVERFLOW_DROP)
        rail_results = () if rails is None else rails.complete(integers.report)
        if self.is_read:
            ops.post_report(integers.report, heap.waits.reports, plan=generation)
        return integers.storage, *routed, *rail_results

    def _exchange(
        self,
        counts: torch.Tensor,
        topk_idx: torch.Tensor,
        num_experts: int,
        rails: RailRows | None,
    ) -> torch.Tensor:
        """Sends this rank's counts, and waits in the barrier for the counts of all ranks. Returns the published words,
        a row for each rank of the group; a negative number if the call failed."""
        heap = self.heap
        send_counts = kernels.for_device(heap.device).send_counts
        send_counts(counts, topk_idx, self.header, heap.count_peers, num_experts=num_experts)
        if rails is not None:
            rails.publish_dropped()
        received = heap.barrier(control.PHASE_PLAN, config=self.config)
        return received if rails is None else rails.exchange_counts(self.config)


def reads_rows_in_place(order: str, nodes: object) -> bool:
    """Whether a combine in this order reads rows in place, on the heap; otherwise sums are sent. nodes: of the plan."""
    return order != "rank" or nodes is not None


class PlanResult(NamedTuple):
    """A plan whose kernels have been launched, and logits, probs and scores of its route."""

    plan: Plan
    routed: Sequence[torch.Tensor] = ()

    def make(self) -> PlanResult:
        """As in PlanRequest: returns self."""
        return self


class PlanOptions(NamedTuple):
    """Arguments of :func:`make_plan`."""

    num_experts: int
    capacity: int | None = None
    overflow: str = "raise"
    max_tokens: int | None = None
    hidden: int | None = None
    dtype: torch.dtype | None = None
    precision: Recipe | None = None
    quantized_wire: str = "none"
    rail_capacity: int | None = None
    config: int = 0  # the number of a layer's configuration, see symm_mem/reports.py
    replicas_per_rank: int = 0
    replica_slack: float = 0.05


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
    rail_capacity: int | None = None,
    replicas_per_rank: int = 0,
    replica_slack: float = 0.05,
) -> Plan:
    """Plans one layer call. Collective over the heap's group.

    With exact capacity (`capacity=None`) the host waits once for one small read; with static capacity it never waits.

    With `replicas_per_rank`, every call moves rows from overloaded ranks to replicas of their experts on ranks with
    fewer rows. After its own experts a rank computes the rows of each of its replica slots with the weights of the
    expert in `plan.replica_to_expert[rank]` (-1: no rows). A rank's experts in a plan are then its E / R experts and
    its replica slots; topk_idx and expert_load refer to the E experts. ReplicaKernels.place_replicas documents the
    placement.

    Args:
        topk_idx: int32 or int64 [T, K] on the heap's device; expert ids in [0, num_experts), or -1 for no expert. A
            token's repeated id counts twice. T may differ from rank to rank.
        num_experts: E, a multiple of the number of ranks; expert g lives on rank g // (E / R).
        heap: the EP group's heap.
        capacity: None (exact), or the rows that each rank can receive.
        overflow: static capacity only. "raise": if any rank would get more rows, no row moves and every rank raises
            CapacityError (on GPUs at its next call on the heap, or in heap.synchronize). "drop": the last tokens of the
            fullest experts lose those slots.
        max_tokens: static capacity only: the largest T of any rank, which bounds the packed rows. None: this rank's T,
            which must then be equal on all ranks.
        hidden, dtype: of the plan's rows. If they are given here and ranks differ, this call raises.
        precision, quantized_wire: the experts' number format, and which rows travel in it (MoEConfig); checked like
            hidden.
        rail_capacity: static capacity only, ignored on one node: the most tokens that a rank sends to another node,
            which is the size of its messages. None: max_tokens, or T. More tokens are an overflow: with "drop" a rank's
            last tokens lose their slots on that node, and do not count as load.
        replicas_per_rank: S, the most replicas of other ranks' experts on a rank, equal on all ranks; 0: none. The
            other ranks are in its node, whose ranks must be consecutive.
        replica_slack: the rows above the mean that a rank may keep, as a share of the mean.

    Returns:
        The plan.

    Raises:
        ArgumentError: an argument is wrong on some rank; raised on every rank.
        ExpertIdError: an id is out of range on some rank; raised on every rank.
        ConfigMismatch: ranks differ in K, E, capacity, overflow, max_tokens, hidden, dtype, precision, quantized_wire,
            rail_capacity or replicas; on every rank.
        CapacityError: see `overflow`.
        PeerTimeout: a rank did not enter the call in time.
    """
    options = PlanOptions(
        num_experts,
        capacity,
        overflow,
        max_tokens,
        hidden,
        dtype,
        precision,
        quantized_wire,
        rail_capacity,
        replicas_per_rank=replicas_per_rank,
        replica_slack=replica_slack,
    )
    check_kind("heap", heap, SymmetricHeap)
    plan = plan_call(topk_idx, heap, options)
    if heap.nodes is not None:
        with heap.one_call:  # an earlier error of any rank reaches all ranks now, not in a trip
            heap.nodes.rendezvous(control.PHASE_NODES_PLAN)
            heap.barrier(control.PHASE_NODES_PLAN)
    return plan


def plan_call(
    topk_idx: torch.Tensor,
    heap: SymmetricHeap,
    options: PlanOptions,
    find_budget: FindBudget = lambda: None,
) -> Plan:
    """Same as make_plan, for calls that continue with a trip: between nodes, the trip raises an error at the plan's end
    on other ranks. With exact capacity the host does not wait if there is a row budget: see Plan.settle.
    find_budget: with exact capacity, returns the rows that this call's buffers can take on this rank; None, on all
    ranks: the rows that the routing needs. Called after this rank, like its peers, has read errors of earlier
    calls."""
    with FailPeersOnError(heap, control.PHASE_PLAN):
        heap.check(control.PHASE_PLAN, waits=options.capacity is None)
        heap._fail_for(plan_problem(topk_idx, heap, options), control.PHASE_PLAN)
        return begin_plan(topk_idx, heap, options, find_budget).make().plan


def begin_plan(
    topk_idx: torch.Tensor,
    heap: SymmetricHeap,
    options: PlanOptions,
    find_budget: FindBudget,
    route: Any = None,
) -> PlanRequest | PlanResult:
    """The first part of plan_call, after its checks; on one node it launches no kernel. route: first makes the values
    of topk_idx [T, K]."""
    capacity = options.capacity
    num_tokens, top_k = topk_idx.shape
    budget = None
    reports = None
    rail_options = None
    rail_capacity = 0  # exact capacity
    if capacity is None:
        budget = find_budget()
        reports = heap.captured_reports
    if reports is not None:  # no host can wait
        reason = budget.why_it_waits if budget else "calls a layer that earlier calls did not"
        heap._fail_for(ArgumentError(f"a step that is captured {reason}") if reason else None, None)
    if heap.nodes is not None:
        rail_options, rail_capacity = _rail_options(num_tokens, options, budget)
    sizes = _sizes_of(options, num_tokens, top_k, heap.num_ranks, budget, rail_capacity)
    is_read = capacity is None and reports is None
    request = PlanRequest(
        heap,
        topk_idx.detach().contiguous(),
        num_tokens,
        top_k,
        num_experts=options.num_experts,
        num_replica_slots=options.replicas_per_rank,
        header=sizes.header,
        layout=sizes.layout,
        row_capacity=sizes.row_capacity,
        packed_row_capacity=sizes.packed_row_capacity,
        expected_rows=sizes.expected_rows,
        config=options.config,
        is_read=is_read,
        reports=reports,
        rail_options=rail_options,
        route=route,
        key=("plan", sizes.header, options.config, is_read, rail_options, route and route.rule),
    )
    if rail_options is None:
        return request
    return _make_between_nodes(
        request, rail_capacity, reads_lengths=capacity is None and not budget
    )


class _PlanSizes(NamedTuple):
    """The fields of a PlanRequest that follow from its options."""

    header: tuple[int, ...]
    layout: control.PlanLayout
    row_capacity: int
    packed_row_capacity: int
    expected_rows: int


@functools.lru_cache(maxsize=1024)
def _sizes_of(
    options: PlanOptions,
    num_tokens: int,
    top_k: int,
    num_ranks: int,
    budget: RowBudget | None,
    rail_capacity: int,
) -> _PlanSizes:
    """The sizes of a plan that the host knows before its kernels run, from checked options and the number of ranks."""
    capacity = options.capacity
    max_tokens = options.max_tokens
    num_replica_slots = options.replicas_per_rank
    token_limit = num_tokens if capacity is not None and max_tokens is None else max_tokens
    limit = capacity if budget is None else budget.rows
    packed_limit = None if budget is None else budget.packed_rows
    words = {
        control.HEAD_NUM_TOKENS: num_tokens,
        control.HEAD_TOP_K: top_k,
        control.HEAD_NUM_EXPERTS: options.num_experts,
        control.HEAD_CAPACITY: -1 if limit is None else limit,
        control.HEAD_PACKED_CAPACITY: -1 if packed_limit is None else packed_limit,
        control.HEAD_MAX_TOKENS: -1 if token_limit is None else token_limit,
        control.HEAD_OVERFLOW: _OVERFLOW[options.overflow if budget is None else "repeat"],
        control.HEAD_HIDDEN: -1 if options.hidden is None else options.hidden,
        control.HEAD_DTYPE: -1 if options.dtype is None else control.DTYPES.index(options.dtype),
        control.HEAD_PRECISION: -1
        if options.precision is None
        else precision_word(options.precision),
        control.HEAD_QUANTIZED_WIRE: control.QUANTIZED_WIRES.index(options.quantized_wire),
        control.HEAD_RAIL_CAPACITY: rail_capacity,
        control.HEAD_NUM_REPLICA_SLOTS: num_replica_slots,
        control.HEAD_SLACK: round(1000 * options.replica_slack) if num_replica_slots else 0,
    }
    header = tuple([words.get(word, 0) for word in range(control.HEADER_WORDS)])
    _, layout = plan_layout(num_tokens, top_k, options.num_experts, num_ranks, num_replica_slots)
    rows = words[control.HEAD_CAPACITY]
    token_limit = words[control.HEAD_MAX_TOKENS]
    packed_rows = words[control.HEAD_PACKED_CAPACITY]
    if token_limit >= 0:
        packed_rows = max(1, min(rows, num_ranks * token_limit))
    if budget is not None:
        expected_rows = budget.expected_rows
    else:
        expected_rows = 0 if rows < 0 else rounded_up(max(1, min(rows, token_limit * top_k)))
    return _PlanSizes(header, layout, rows, packed_rows, expected_rows)


def _rail_options(
    num_tokens: int, options: PlanOptions, budget: RowBudget | None
) -> tuple[tuple[int, bool], int]:
    """The last arguments of RailRows, and a static capacity's number of tokens in a message; 0 for exact capacity."""
    if options.capacity is None:
        return (num_tokens if budget is None else budget.rail_rows, False), 0
    token_limit = num_tokens if options.max_tokens is None else options.max_tokens
    rail_rows = options.rail_capacity or max(1, token_limit)
    return (rail_rows, options.overflow == "drop" and rail_rows < token_limit), rail_rows


def _make_between_nodes(
    request: PlanRequest, rail_capacity: int, *, reads_lengths: bool
) -> PlanResult:
    """The plan on a heap that spans nodes. reads_lengths: with exact capacity and no row budget the host waits for the
    plan, and reads the lengths of messages."""
    heap = request.heap
    assert request.rail_options is not None
    # Without a row budget the host waits for the device before any barrier: ranks with a budget raise errors at once.
    plan, (*routed, integers, num_received) = request.make()
    sent = [request.rail_options[0]] * len(num_received)
    received = nodes_of(heap).rail_rows
    if reads_lengths:
        numbers = torch.stack([integers[: len(num_received)], num_received])
        sent, received = numbers.tolist()
    nodes = plan_in_node(
        heap, plan, integers, sent, received, rail_capacity * MAX_TOP_K + request.top_k
    )
    return PlanResult(plan.replaced(nodes=nodes), routed)


def plan_problem(
    topk_idx: torch.Tensor, heap: SymmetricHeap, options: PlanOptions, *, is_output: bool = False
) -> Problem:
    """The error of this rank's arguments of make_plan, or None. Reads no device memory. is_output: topk_idx is memory
    that the package allocated for a route."""
    error = None
    if not is_output:
        error = tensor_problem(
            "topk_idx",
            topk_idx,
            shape=("T", "K"),
            dtypes=(torch.int32, torch.int64),
            device=heap.device,
        )
    if error is not None:
        return error
    if not 1 <= topk_idx.shape[1] <= MAX_TOP_K:
        return ArgumentError(
            f"topk_idx has K = {topk_idx.shape[1]} slots per token; K must be in [1, {MAX_TOP_K}]"
        )
    if topk_idx.numel() >= 2**31:  # slots have int32 numbers
        return ArgumentError(f"topk_idx {list(topk_idx.shape)} must have less than 2**31 slots")
    is_in_order = heap.nodes is None or heap.topology.is_in_order
    # MoEConfig has checked a layer's options, which can be hashed.
    if not (options.config and _are_valid(options, heap.num_ranks, is_in_order)):
        error = _options_problem(options, heap.num_ranks, is_in_order)
    if error is not None:
        return error
    max_tokens = options.max_tokens
    if options.capacity is None and heap.captured_reports is None and heap.streams.capture:
        return ArgumentError(
            "capacity (None) makes the host read the plan, which a CUDA graph cannot; give it rows, or capture whole "
            "steps with symmoe.capture_step"
        )
    if max_tokens is not None and max_tokens < topk_idx.shape[0]:
        return ArgumentError(
            f"max_tokens ({max_tokens}) must be at least T, this rank's tokens ({topk_idx.shape[0]})"
        )
    return None


@functools.lru_cache(maxsize=256)
def _are_valid(options: PlanOptions, num_ranks: int, is_in_order: bool) -> bool:
    return _options_problem(options, num_ranks, is_in_order) is None


def _options_problem(options: PlanOptions, num_ranks: int, is_in_order: bool) -> Problem:
    """The error of options for a group of so many ranks, or None. is_in_order: a node's ranks are consecutive."""
    num_experts = options.num_experts
    num_replica_slots = options.replicas_per_rank
    slack = options.replica_slack
    sizes = (
        "num_experts",
        "capacity",
        "max_tokens",
        "hidden",
        "rail_capacity",
        "replicas_per_rank",
    )
    for name in () if options.config else sizes:  # MoEConfig has checked a layer's
        value = getattr(options, name)
        if value is None and name != "num_experts":
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            return ArgumentError(f"{name} ({value!r}) must be an int, not {type(value).__name__}")
        if value >= 2**31:
            return ArgumentError(f"{name} ({value}) must be less than 2**31")
        if value < 1 and name in ("capacity", "hidden", "rail_capacity"):
            return ArgumentError(f"{name} ({value}) must be at least 1")
    num_copies = num_experts + num_replica_slots * num_ranks
    error: Problem = first_problem(
        (
            not 1 <= num_experts <= control.MAX_EXPERTS,
            f"num_experts ({num_experts}) must be in [1, {control.MAX_EXPERTS}]",
        ),
        (
            num_experts % num_ranks != 0,
            f"num_experts ({num_experts}) must be divisible by the number of ranks ({num_ranks})",
        ),
        (num_replica_slots < 0, f"replicas_per_rank ({num_replica_slots}) must be at least 0"),
        (
            num_copies > control.MAX_EXPERTS,
            f"num_experts ({num_experts}) and replicas_per_rank ({num_replica_slots}) on each rank make "
            f"{num_copies} experts; there must be at most {control.MAX_EXPERTS}",
        ),
        (
            num_replica_slots > 0 and not is_in_order,
            f"replicas_per_rank ({num_replica_slots}) must be 0 where ranks of a node do not follow each other",
        ),
        (
            not isinstance(slack, (int, float)) or not 0 <= slack <= 1,
            f"replica_slack ({slack!r}) must be a number in [0, 1]",
        ),
    )
    if not options.config:  # as above
        error = error or choices_problem(
            overflow=options.overflow, quantized_wire=options.quantized_wire
        )
    if error := error or (
        None if options.dtype is None else parameter_dtype_problem(options.dtype)
    ):
        return error
    for name in ("max_tokens", "overflow", "rail_capacity") if options.capacity is None else ():
        if (value := getattr(options, name)) not in (None, "raise"):
            return ArgumentError(
                f"{name} ({value!r}) needs a static capacity, and capacity is None"
            )
    return None if options.precision is None else precision_problem(options.precision)
