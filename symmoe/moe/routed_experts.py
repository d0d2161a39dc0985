"""From routed tokens to the weighted sums of their experts' outputs: plan, dispatch, experts, combine.

MoELayer and the experts of symmoe.integrations.transformers use it. If a compiler or a dispatch mode traces the call,
the step is one operator of torch (moe/torch_operators.py); otherwise it is not. The bits are the same.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch

from symmoe.dispatch.plan import PlanOptions, begin_plan, plan_call
from symmoe.grouped.activations import ScaledActivation
from symmoe.grouped.experts import CallExperts, evaluated
from symmoe.grouped.mlp import GroupedMLP, kind_of, without_memory
from symmoe.kernels import control
from symmoe.moe.config import MoEConfig
from symmoe.moe.ddp_and_fsdp import device_problem
from symmoe.moe.ep_step import WORDS, more_of, most_bytes, run_experts
from symmoe.moe.router import Route, Routed
from symmoe.symm_mem.heap import FailPeersOnError, SymmetricHeap
from symmoe.symm_mem.row_budget import RowBudget, RowHistory


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """What a layer does with tokens once they are routed. It holds no parameters: every call brings the experts. Layers
    of the same configuration, heap and kind of experts share one, and so one compiled graph: see :meth:`of`. Operators
    take tensors and numbers only, so it has a number in this process."""

    config: MoEConfig
    heap: SymmetricHeap
    meta_experts: GroupedMLP  # of the shape and activation of the layers' experts, without memory
    kind: tuple[object, ...]  # see kind_of
    number: int = field(default_factory=itertools.count().__next__)

    @classmethod
    def of(cls, config: MoEConfig, heap: SymmetricHeap, experts: GroupedMLP) -> RoutedExperts:
        """The RoutedExperts for a layer with these experts. Only the layers keep it alive. Local."""
        kind = kind_of(experts)
        for other in BY_NUMBER.values():
            if other.heap is heap and other.config == config and other.kind == kind:
                return other
        new = cls(config, heap, without_memory(experts), kind)
        BY_NUMBER[new.number] = new
        return new

    def __deepcopy__(self, memo: dict[int, object]) -> RoutedExperts:
        """Copies of a layer share this with it, as they share the heap."""
        return self

    def run(
        self,
        x: torch.Tensor,
        probs: torch.Tensor | Route,
        topk_idx: torch.Tensor,
        experts: GroupedMLP | CallExperts,
        *,
        out_shape: torch.Size | None = None,
        before_trips: Callable[[], object] | None = None,
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor], Routed | None]:
        """y [T, H] or out_shape; the plan's expert_load and num_dropped, with replicas place_to_expert and place_rows
        too, as in MoEMetrics; with a route for probs, the choice of experts, which is a part of the step then. Who may
        be traced calls torch_operators.run_routed.

        Collective over the EP group, forward and backward. Synchronises the host only with exact capacity: until the
        device has made the plan, once everything is launched; in the first calls, and in the rare one that needs more
        rows than recent ones (symm_mem/row_budget.py), before that. Raises what make_plan does.

        Args:
            x: [T, H] in the dtype to compute in. probs: fp32 [T, K]. topk_idx: int32 or int64 [T, K], expert ids or -1;
                that of the route, if there is one.
            before_trips: called when the plan is made and before any row travels, e.g. to enqueue work on another
                stream that shall fill the waits of the trips.
        """
        heap, options = self.heap, self.plan_options(x.dtype)
        if not isinstance(experts, CallExperts):
            heap.fail_for(device_problem("experts", experts, heap.device), control.PHASE_PLAN)
        with FailPeersOnError(heap, control.PHASE_PLAN):
            experts = evaluated(experts, x.dtype)  # once, also for a call that is planned again
        find_room = partial(self._find_room, topk_idx.shape[0], x.dtype.itemsize, experts)
        route = probs._replace(x=probs.x.detach(), weight=probs.weight.detach()) if isinstance(probs, Route) else None
        plan = begin_plan(topk_idx, heap, options, find_room, route)
        if before_trips is not None:
            with FailPeersOnError(heap, control.PHASE_PLAN):
                plan.fill()
            before_trips()
        y, routed = run_experts(x, probs, experts, plan, out_shape=out_shape, **self.words)
        if not plan.has_room:  # on all ranks; nothing has moved
            plan = plan_call(topk_idx, heap, options)
            probs = probs if routed is None else routed.probs
            y, _ = run_experts(x, probs, experts, plan, out_shape=out_shape, **self.words)
        if self.config.capacity is None and heap.captured_reports is None:
            self._history.note(plan.num_tokens, *plan.needed_rows, plan.most_sent)
        places = (plan.place_to_expert, plan.place_rows) if plan.num_places else ()
        return y, (plan.expert_load, plan.num_dropped, *places), routed

    @functools.cached_property
    def words(self) -> dict[str, str]:
        """The options of expert_parallel_mlp."""
        return {name: getattr(self.config, name) for name in WORDS}

    @functools.cached_property
    def _config_number(self) -> int:
        """By which plans compare all of the configuration, which must be equal on every rank."""
        names = [field.name for field in fields(MoEConfig)]
        return self.heap.configurations.number({name: getattr(self.config, name) for name in names})

    @property
    def _history(self) -> RowHistory:
        config = self.config
        return self.heap.row_histories[config.num_experts, config.top_k, config.num_places]

    def _find_room(self, num_tokens: int, item_bytes: int, experts: CallExperts) -> RowBudget | None:
        config, heap = self.config, self.heap
        room = self._history.room(num_tokens, config.max_room, heap.room_factor)
        if room is None or room.rows < 0 or heap.captured_reports is not None:
            return room
        received = room.packed_rows if config.received_layout == "packed" else room.rows
        sizes, row_bytes = (received, room.rows, room.packed_rows), config.hidden * item_bytes
        needed = most_bytes(sizes, num_tokens, heap, row_bytes, more_of(experts, config.num_places))
        # Where there is no memory for that, what the routing needs may fit.
        return replace(room, rows=-1, packed_rows=-1) if heap.memory.lacks(needed) else room

    def plan_options(self, dtype: torch.dtype) -> PlanOptions:
        """Those of plan_call for tokens of `dtype`, as the configuration says."""
        c = self.config
        sizes = c.num_experts, c.capacity, c.overflow, c.max_tokens, c.hidden
        travel = c.precision, c.quantized_wire, c.rail_capacity
        return PlanOptions(*sizes, dtype, *travel, self._config_number, c.num_places, c.replica_slack)


BY_NUMBER: weakref.WeakValueDictionary[int, RoutedExperts] = weakref.WeakValueDictionary()


def experts_of(config: MoEConfig, num_ranks: int, **options: Any) -> GroupedMLP:
    """Experts of one of so many ranks, as the configuration has them, with these other options of GroupedMLP."""
    sizes = config.experts_per_rank(num_ranks), config.hidden, config.ffn
    return GroupedMLP(*sizes, activation=ScaledActivation(config.activation), precision=config.precision, **options)
