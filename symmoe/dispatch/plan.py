"""The plan of one layer call: which row of which rank every slot of this rank's routing becomes.

T tokens, K slots per token, E experts, e experts per rank, R ranks, N rows and P packed rows received by this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from symmoe import kernels
from symmoe.checks.arguments import is_choice, words_problem
from symmoe.checks.buffers import tensor_problem
from symmoe.dispatch.crossing import RailCounts, find_rail_rows, keep_first, make_crossing
from symmoe.dispatch.maps import Layout, Plan, PlanIntegers, num_blocks, plan_layout
from symmoe.dispatch.node_plan import plan_inside
from symmoe.errors import ArgumentError, StaleLease
from symmoe.kernels import control
from symmoe.precision.recipes import Recipe, precision_word
from symmoe.symm_mem.heap import FailPeersOnError, SymmetricHeap, nodes_of
from symmoe.symm_mem.row_budget import RowBudget

__all__ = ["MAX_TOP_K", "Plan", "PlanOptions", "make_plan", "plan_call"]

MAX_TOP_K = 32
_OVERFLOW = {"raise": control.OVERFLOW_RAISE, "drop": control.OVERFLOW_DROP, "repeat": control.OVERFLOW_REPEAT}


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
    rail_capacity: int | None = None
    config: int = 0  # the number of a layer's configuration, see symm_mem/configurations.py


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
        rail_capacity: static capacity only, and without effect on one node: the most tokens that a rank sends to
            another node; each has its place in messages of that size. None: max_tokens, or T. More tokens are an
            overflow: with "drop" the last ones of a rank lose their slots on that node, and do not count as load.

    Returns:
        The plan.

    Raises:
        ArgumentError: an argument is wrong on some rank; raised on every rank.
        ExpertIdError: an id is out of range on some rank; raised on every rank.
        ConfigMismatch: ranks disagree on K, E, capacity, overflow, max_tokens, hidden, dtype, precision,
            quantized_wire or rail_capacity; on every rank.
        CapacityError: see `overflow`.
        PeerTimeout: a rank did not come.
    """
    options = PlanOptions(
        num_experts, capacity, overflow, max_tokens, hidden, dtype, precision, quantized_wire, rail_capacity
    )
    return plan_call(topk_idx, heap, options, lambda: None)


def plan_call(
    topk_idx: torch.Tensor, heap: SymmetricHeap, options: PlanOptions, find_room: Callable[[], RowBudget | None]
) -> Plan:
    """Same as make_plan, except that with exact capacity the host does not wait if there is room: see Plan.settle.

    Args:
        find_room: with exact capacity, what the buffers of this call can take on this rank; None, on all ranks: what
            its routing needs. Asked for once this rank has noticed the errors of earlier calls, as its peers have.
    """
    if not isinstance(heap, SymmetricHeap):
        raise ArgumentError(f"heap ({type(heap).__name__}) must be a SymmetricHeap")
    num_experts, capacity, overflow, max_tokens, hidden, dtype, precision, quantized_wire, *_ = options
    heap.check(control.PHASE_PLAN, waits=capacity is None)
    with FailPeersOnError(heap, control.PHASE_PLAN):
        heap.fail_for(_find_problem(topk_idx, heap, options), control.PHASE_PLAN)
        num_tokens, top_k = topk_idx.shape
        limit = token_limit = packed_limit = -1
        reports = heap.captured_reports
        # Between nodes the host reads the sizes of messages in any case, except in a capture.
        can_have_room = capacity is None and (reports is not None or heap.nodes is None)
        room = find_room() if can_have_room else None
        if can_have_room and (room is None or room.rows < 0) and reports is not None:
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
            control.HEAD_PRECISION: -1 if precision is None else precision_word(precision),
            control.HEAD_QUANTIZED_WIRE: control.QUANTIZED_WIRES.index(quantized_wire),
        }
        topk_idx = topk_idx.detach().contiguous()
        if heap.nodes is not None:
            plan = _plan_between_nodes(topk_idx, heap, words, options)
        else:
            plan = _place_slots(topk_idx, heap, words, options.config)
        if capacity is None and reports is not None:
            reports.append(plan.report)
        elif capacity is None and heap.nodes is None:
            plan._read_report = heap.streams.read_back(plan.report)
            if room is None or room.rows < 0:
                plan.settle()
        if room is not None:
            plan.expected_rows = room.expected_rows
        return plan


def _plan_between_nodes(
    topk_idx: torch.Tensor, heap: SymmetricHeap, words: dict[int, int], options: PlanOptions
) -> Plan:
    """The plan on a heap that spans nodes. words: of the header. With exact capacity and no room the host waits for the
    plan, and reads how long messages are."""
    num_tokens = words[control.HEAD_MAX_TOKENS]  # the most; -1 with exact capacity
    rail_capacity = None if options.capacity is None else options.rail_capacity or max(1, num_tokens)
    rails, overflow, drops = find_rail_rows(topk_idx, heap, num_experts=options.num_experts), None, False
    if rail_capacity is not None and rail_capacity < num_tokens:  # on all ranks, then
        rails, overflow = keep_first(rails, heap, num_experts=options.num_experts, rail_capacity=rail_capacity)
        drops = options.overflow == "drop"
    words[control.HEAD_RAIL_CAPACITY] = -1 if rail_capacity is None else rail_capacity
    counts = RailCounts(heap, rails)

    def tell() -> None:
        if overflow is not None:
            counts.tell(overflow.num_dropped if drops else overflow.too_many)

    plan = _place_slots(rails.topk_idx, heap, words, options.config, tell, counts.share)
    sent: Sequence[int]
    received: Sequence[int]
    if rail_capacity is not None:
        if drops:
            plan.num_dropped.add_(counts.told())
        sent = received = [rail_capacity] * heap.topology.num_nodes
    elif words[control.HEAD_CAPACITY] >= 0:  # there is room for all tokens, and all have the number of a replay
        sent, received = [len(topk_idx)] * heap.topology.num_nodes, counts.num_tokens
    else:
        plan._read_report = heap.streams.read_back(plan.report)
        read_sizes = heap.streams.read_back(torch.stack([rails.num_sent, counts.num_received]))
        plan.settle()
        sent, received = read_sizes()
    crossing = make_crossing(heap, rails.token_to_rail_row, sent, received)
    plan.across = plan_inside(plan, crossing, rail_capacity or 0)
    return plan


def _place_slots(
    topk_idx: torch.Tensor,
    heap: SymmetricHeap,
    words: dict[int, int],
    config: int,
    tell: Callable[[], None] | None = None,
    share: Callable[[int], None] | None = None,
) -> Plan:
    """The plan; `words` of the header are the other arguments of make_plan. Does not wait.

    config: as in PlanOptions.
    tell, share: complete the count table before and after the barrier, if the group spans nodes.
    """
    num_tokens, top_k = topk_idx.shape
    header = tuple(words.get(word, 0) for word in range(control.HEADER_WORDS))
    num_experts, limit = header[control.HEAD_NUM_EXPERTS], header[control.HEAD_CAPACITY]
    packed_limit, most_tokens = header[control.HEAD_PACKED_CAPACITY], header[control.HEAD_MAX_TOKENS]
    sizes = plan_layout(num_tokens, top_k, num_experts, heap.num_ranks)
    with heap.one_call:
        fill = partial(_fill, topk_idx, heap, header, config, sizes, tell, share)
        is_special = heap.nodes is not None or heap.first_step is not None
        (storage,) = fill() if is_special else heap.run(("plan", header, config), fill, (topk_idx,))
        generation = heap.epoch
        heap.waits.flight.note(generation, num_tokens=num_tokens, top_k=top_k)
        if heap.streams.raises_at_once:
            heap.check()  # before another thread gets its turn and raises the error instead
    return Plan(
        storage=storage,
        layout=sizes[1],
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
    config: int,
    sizes: tuple[int, Layout],
    tell: Callable[[], None] | None,
    share: Callable[[int], None] | None,
) -> tuple[torch.Tensor]:
    """A new storage of a plan, filled. Collective."""
    num_tokens, num_ranks, num_experts = len(topk_idx), heap.num_ranks, header[control.HEAD_NUM_EXPERTS]
    ops = kernels.for_device(heap.device)
    integers = PlanIntegers(torch.empty(sizes[0], dtype=torch.int32, device=heap.device), sizes[1])
    shape = num_blocks(num_tokens), num_experts + num_ranks + 2
    block_counts = torch.empty(shape, dtype=torch.int32, device=heap.device)
    block_starts = torch.empty((shape[0], num_experts), dtype=torch.int32, device=heap.device)
    ops.count_slots(topk_idx, block_counts, num_experts=num_experts, num_ranks=num_ranks)
    ops.send_counts(block_counts, topk_idx, header, block_starts, heap.count_peers, num_experts=num_experts)
    if tell is not None:
        tell()
    first_step = heap.first_step
    if first_step is None or heap.streams.capture:
        received = heap.barrier(control.PHASE_PLAN, config=config)
    else:
        heap.first_step = None
        received = heap.barrier(control.PHASE_PLAN, config=config, publish=first_step.words())
        first_step.compare(heap.streams.read_back(received)())
    if share is not None:
        share(config)
        # A line for each rank of the group, of which other nodes' ranks may have failed, too.
        received = torch.where(nodes_of(heap).failed_so_far > 0, -1, received.amin(0, keepdim=True)).repeat(
            num_ranks, 1
        )
    ops.lay_out(
        heap.count_peers,
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


def _find_problem(
    topk_idx: torch.Tensor, heap: SymmetricHeap, options: PlanOptions
) -> ArgumentError | StaleLease | None:
    """What is wrong with this rank's arguments, found without looking at device memory."""
    num_experts, capacity, overflow, max_tokens, hidden, dtype, precision, quantized_wire, rail_capacity, _ = options
    dtypes = (torch.int32, torch.int64)
    error = tensor_problem("topk_idx", topk_idx, shape=("T", "K"), dtypes=dtypes, device=heap.device)
    if error is not None:
        return error
    if not 1 <= topk_idx.shape[1] <= MAX_TOP_K:
        return ArgumentError(f"topk_idx has K = {topk_idx.shape[1]} slots per token; K must be in [1, {MAX_TOP_K}]")
    if topk_idx.numel() >= 2**31:  # a slot is known by its number
        return ArgumentError(f"topk_idx {list(topk_idx.shape)} must have less than 2**31 slots")
    integers = {"num_experts": num_experts, "capacity": capacity, "max_tokens": max_tokens, "hidden": hidden}
    integers["rail_capacity"] = rail_capacity
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
    if capacity is None and rail_capacity is not None:
        return ArgumentError(f"rail_capacity ({rail_capacity}) needs a static capacity, and capacity is None")
    if rail_capacity is not None and rail_capacity < 1:
        return ArgumentError(f"rail_capacity ({rail_capacity}) must be at least 1 token")
    if capacity is None and heap.captured_reports is None and heap.streams.capture:
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
