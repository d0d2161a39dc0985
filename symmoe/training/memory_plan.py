"""Predicts the memory of MoE layers without allocating it: simulates the allocations of a dry step for all layers.

T tokens per rank, E experts, K slots per token, R ranks; N rows and P packed rows that a rank receives.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from symmoe.checks.arguments import check_kind, size_problem
from symmoe.dispatch.plan import Plan, plan_call
from symmoe.errors import ArgumentError, choice_problem, raise_for
from symmoe.grouped.mlp import kind_of
from symmoe.kernels.control import ControlLayout
from symmoe.moe.config import MoEConfig, RouterConfig
from symmoe.moe.ep_step import expert_parallel_mlp
from symmoe.moe.overlap import chance_of_part
from symmoe.moe.routed_experts import RoutedExperts, experts_of
from symmoe.moe.router import Route, route_tokens
from symmoe.symm_mem.dry_heap import ENDLESS_BYTES, DryHeap, Event
from symmoe.symm_mem.memory import ALIGNMENT_BYTES, Arena
from symmoe.symm_mem.row_budget import RowHistory
from symmoe.torch_internals import storage_of

Routing = Literal["uniform", "worst"]
_TOO_LARGE = f"these sizes would need a heap of more than {ENDLESS_BYTES} bytes"
_MOST_BYTES = 8  # bytes of two fp32 numbers, a gate and its feature


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The result of :func:`plan_memory`, for one rank.

    Attributes:
        num_rows, num_packed_rows: N and P of these figures.
        heap_bytes: `num_bytes` of a SymmetricHeap that can run the schedule, eagerly or in one CUDA graph: the control
            block and the arena up to the highest leased byte.
        lease_bytes_per_call: the part of heap_bytes that one call of one layer leases from its forward to its backward,
            if its routing fills all of its budget.
        forward_bytes_per_call, backward_bytes_per_call: leases that live only during that pass, at their peak.
        activation_bytes_per_call: ordinary memory that one call of one layer keeps from forward to backward: h, the
            plan, the probs of the rows, the tokens, and with a recipe the quantised transposed weights, which live as
            long as h. Memory of the router (a few fp32 [T, E]) and of a shared expert is not counted.
        activation_bytes: activation memory of all layers and micro-batches in flight.
        peak_bytes: ordinary memory and leases at the peak of a step of one layer, beyond x, dy and the weights: y and
            all gradients count. Losses, a shared expert, drops of a capacity factor, and temporary memory of kernels
            do not count.
    """

    num_rows: int
    num_packed_rows: int
    heap_bytes: int
    lease_bytes_per_call: int
    forward_bytes_per_call: int
    backward_bytes_per_call: int
    activation_bytes_per_call: int
    activation_bytes: int
    peak_bytes: int


def plan_memory(
    config: MoEConfig,
    *,
    num_ranks: int,
    num_tokens: int,
    num_layers: int = 1,
    num_in_flight: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    routing: Routing = "uniform",
) -> MemoryPlan:
    """Bytes that a rank needs to train `num_layers` layers that share one heap. Local; allocates nothing.

    The schedule is 1F1B: `num_in_flight` micro-batches run forward, then backward and forward alternate. Its
    high-water mark equals that of plain training (1 in flight), gradient accumulation (1), and pipeline stages (depth).
    ArgumentError: a number is out of range.

    Args:
        config: the configuration of every layer.
        num_ranks, num_tokens: R, and T of a call, the maximum over ranks.
        dtype: the dtype of the rows.
        routing: the assumed rows with exact capacity. "uniform": K distinct experts for every token, all equally
            likely; this is the mean, real routing needs more. "worst": every token of every rank chooses this rank.
            A static capacity ignores it.
    """
    check_kind("config", config, MoEConfig)
    raise_for(
        size_problem(
            num_ranks=num_ranks,
            num_tokens=num_tokens,
            num_layers=num_layers,
            num_in_flight=num_in_flight,
        )
        or choice_problem("routing", routing, get_args(Routing))
    )
    rows = num_ranks * num_tokens * min(config.top_k, config.experts_per_rank(num_ranks))
    packed_rows = num_ranks * num_tokens  # "worst"
    if routing == "uniform":
        rows = num_tokens * config.top_k
        packed_rows = math.ceil(
            packed_rows * chance_of_part(config.num_experts, num_ranks, config.top_k)
        )
    lines = max(
        config.capacity or rows,
        num_ranks * num_tokens * config.top_k,
        config.num_experts * config.ffn,
    )
    if (
        lines * max(config.hidden, config.ffn) * _MOST_BYTES > ENDLESS_BYTES
    ):  # torch makes no tensors of this size
        raise ArgumentError(_TOO_LARGE)
    heap = DryHeap(num_ranks, num_rows=rows, num_packed_rows=packed_rows)
    plan, passes, activation_bytes, peak_bytes = _dry_call(config, heap, num_tokens, dtype)
    schedule = list(_one_forward_one_backward(num_layers, num_in_flight))
    forward, backward = map(_bytes_after, passes.values())
    num_rows, num_packed_rows = plan.needed_rows
    return MemoryPlan(
        num_rows=num_rows,
        num_packed_rows=num_packed_rows,
        heap_bytes=max(
            _heap_bytes(passes, schedule, num_ranks, in_graph=in_graph)
            for in_graph in (False, True)
        ),
        lease_bytes_per_call=forward[-1],
        forward_bytes_per_call=max(forward) - forward[-1],
        backward_bytes_per_call=max(backward),
        activation_bytes_per_call=activation_bytes,
        activation_bytes=activation_bytes * num_layers * num_in_flight,
        peak_bytes=peak_bytes,
    )


class _Memory(TorchFunctionMode):
    """Records allocations and frees of ordinary memory among a heap's events. spent: memory that its gradient reuses,
    as autograd allows in the last backward pass."""

    def __init__(self, heap: DryHeap) -> None:
        super().__init__()
        self._heap = heap
        self.spent = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        argument_keys = [storage_of(tensor) for tensor in args if isinstance(tensor, torch.Tensor)]
        if function is torch.empty_like and self.spent in argument_keys:
            return args[0]
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and (key := storage_of(result)) not in argument_keys:
            storage = result.untyped_storage()
            events = self._heap.events
            if storage.nbytes() < ENDLESS_BYTES:  # excludes arenas: their leases count
                events.append((storage.nbytes(), key))
                weakref.finalize(storage, events.append, (None, key))
        return result


def _dry_call(
    config: MoEConfig, heap: DryHeap, num_tokens: int, dtype: torch.dtype
) -> tuple[Plan, dict[str, list[Event]], int, int]:
    """Runs a layer forward and backward on tensors without memory. Returns the plan; the events of leases, forward and
    backward; bytes kept from forward to backward; and peak bytes of memory and leases."""

    def empty(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_rows, width, dtype=dtype, device=heap.device, requires_grad=True)

    with torch.inference_mode(False):  # this turns gradients on
        experts = experts_of(config, heap.num_ranks, dtype=dtype, device=heap.device)
        routed_experts = RoutedExperts(config, heap, experts, kind_of(experts))
        history = RowHistory()
        history.note(num_tokens, heap.num_rows, heap.num_packed_rows)
        budget = history.budget(num_tokens, config.max_row_budget)
        x = empty(num_tokens, config.expert_hidden, dtype)
        dy = empty(num_tokens, config.expert_hidden, dtype)
        tokens = x if config.latent is None else empty(num_tokens, config.hidden, dtype)
        weight = empty(config.num_experts, config.hidden, torch.float32)
        with _Memory(heap) as memory:
            router = config.router or RouterConfig()
            routed = route_tokens(Route(tokens, weight, None, None, config.top_k, router.rule))
            plan = plan_call(
                routed.topk_idx, heap, routed_experts.plan_options(dtype), lambda: budget
            )
            y = expert_parallel_mlp(
                x, routed.probs, experts, plan, out_shape=None, **routed_experts.choices
            )
            node = cast(Any, y.grad_fn)
            plan = node.step.plan
            num_forward = len(heap.events)
            saved_bytes = {
                storage_of(t): t.untyped_storage().nbytes()
                for t in (*vars(plan).values(), *node.index, *node.saved_tensors, tokens)
                if isinstance(t, torch.Tensor)
                and not isinstance(t, nn.Parameter)
                and not heap.owns(t)
            }
            h = node.saved_tensors[2]
            scores = routed.scores
            _kept_y = y.detach()
            memory.spent = 0 if h is None else storage_of(h)
            del routed, h
            # Not `y.backward`: autograd would start threads, after which a process should not fork.
            gradients = node.apply(dy)
            del node, y  # y owns the node
            # The router's backward queries autocast, which tensors without memory lack.
            gradients += tuple(map(torch.empty_like, (scores, tokens, weight)))
            events = list(heap.events)
    passes = {
        name: [event for event in part if isinstance(event[1], tuple)]
        for name, part in (("forward", events[:num_forward]), ("backward", events[num_forward:]))
    }
    return plan, passes, sum(saved_bytes.values()), max(_bytes_after(events))


def _bytes_after(events: list[Event]) -> list[int]:
    """Total bytes of the live allocations of these events, after each event."""
    live: dict[object, int] = {}
    totals = []
    for num_bytes, lease in events:
        live[lease] = num_bytes or 0
        totals.append(sum(live.values()))
    return totals


def _one_forward_one_backward(
    num_layers: int, num_in_flight: int
) -> Iterator[tuple[str, int, int]]:
    """("forward" or "backward", micro-batch, layer), for twice as many micro-batches as are in flight."""
    for turn in range(3 * num_in_flight - 1):
        if turn < 2 * num_in_flight:
            yield from (("forward", turn, layer) for layer in range(num_layers))
        if turn + 1 >= num_in_flight:
            yield from (
                ("backward", turn + 1 - num_in_flight, layer)
                for layer in reversed(range(num_layers))
            )


def _heap_bytes(
    passes: dict[str, list[Event]],
    schedule: list[tuple[str, int, int]],
    num_ranks: int,
    *,
    in_graph: bool,
) -> int:
    """End of the highest lease when the schedule runs on an empty heap."""
    control_bytes = ControlLayout(num_ranks).num_bytes
    full_arena = Arena(control_bytes, ENDLESS_BYTES)
    arena = Arena(0, 0) if in_graph else full_arena
    end = control_bytes + ALIGNMENT_BYTES
    live: dict[object, tuple[int, int]] = {}
    for direction, micro_batch, layer in schedule:
        for num_bytes, lease in passes[direction]:
            key = lease, micro_batch, layer
            if num_bytes is None:
                arena.give_back(*live.pop(key))
                continue
            span = arena.take_or_grow(num_bytes, full_arena) if in_graph else arena.take(num_bytes)
            if span is None:
                raise ArgumentError(_TOO_LARGE)
            live[key] = span
            end = max(end, sum(span))
    return end
