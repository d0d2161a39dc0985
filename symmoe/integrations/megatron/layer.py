"""Megatron's MoELayer and its token dispatcher over the symmetric heap.

T tokens on this rank, E experts, K = slots_per_token (compat.py), N rows received, H hidden.

torch.compile does not trace the two trips: it does not support plans, leases and signals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from symmoe.checks.arguments import Order, Overflow
from symmoe.dispatch.plan import DispatchHandle, PlanOptions, plan_call
from symmoe.dispatch.trip import PHASE as SEND
from symmoe.errors import ArgumentError, StalePlan, raise_for
from symmoe.grouped.mlp import experts_call_problem
from symmoe.integrations.megatron.compat import (
    groups_problem,
    layer_problem,
    process_groups,
    slots_per_token,
)
from symmoe.integrations.megatron.experts import SymmExperts, routed_config
from symmoe.kernels import control
from symmoe.moe.listeners import Choose, Listeners
from symmoe.moe.routed_experts import CALL_PHASES, RoutedExperts
from symmoe.symm_mem.heap import FailPeersOnError, SymmetricHeap
from symmoe.tokens import combine_tokens, dispatch_tokens

_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchOptions:
    """Options of a dispatch, as in make_plan; the same on all ranks.

    Attributes:
        order: order of the sums in combine. "rank": least traffic. "slot": a token's experts in ascending order, like
            Megatron's alltoall, the same bits for any number of ranks.
        capacity: rows that fit on a rank, without a host synchronisation per layer; None: exact, one small read.
        overflow: with a capacity, "raise" or "drop_tokens".
    """

    order: Order = "rank"
    capacity: int | None = None
    overflow: Overflow = "raise"


class SymmTokenDispatcher(MoETokenDispatcher):
    """Megatron's six calls through plan_call, dispatch_tokens and combine_tokens, for experts of any kind.

    Probs travel through arguments and results. Attributes pass everything else from one call to the next, as in
    Megatron's own dispatchers, until :meth:`combine_postprocess`. Results and gradients of the experts are copied to
    the heap, whose group is `pg_collection.ep`. `compat.layer_problem` must accept `config`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        *,
        heap: SymmetricHeap,
        options: DispatchOptions,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self._heap, self._options = heap, options
        self.hidden_shape: torch.Size | None = None
        self.topk_idx: torch.Tensor | None = None
        self.handle: DispatchHandle | None = None

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [T, H] and their probs fp32 [T, K], from [S / TP, B, H], bool [T, E] and dense [T, E]. Local."""
        self.hidden_shape = hidden_states.shape
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        self.topk_idx, topk_probs = select_slots(
            routing_map, probs, top_k=slots_per_token(self.config)
        )
        if self.shared_experts is not None:
            # A view of the tokens, as in Megatron's dispatchers: gradients then add up in the same order.
            self.shared_experts.pre_forward_comm(tokens.view(self.hidden_shape))
        return tokens, topk_probs

    @torch.compiler.disable
    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [N, H] sorted by local expert, in a lease, and their probs fp32 [N]. Collective over the EP group.

        With static capacity, [capacity, H] and [capacity] with an undefined tail.
        """
        options = PlanOptions(
            self.config.num_moe_experts,
            self._options.capacity,
            self._options.overflow,
            hidden=hidden_states.shape[1],
            dtype=hidden_states.dtype,
        )
        plan = plan_call(require_started(self.topk_idx), self._heap, options)
        # Autograd saves the rows: the lease ends when autograd, or recomputation, drops them.
        lease = self._heap.lease(
            (plan.row_capacity, hidden_states.shape[1]),
            hidden_states.dtype,
            name="dispatched rows",
            phase=SEND,
        )
        rows, row_probs, self.handle = dispatch_tokens(
            hidden_states, plan, probs=probs, out=lease.tensor, order=self._options.order
        )
        return rows, row_probs

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows, int64 [E / EP] rows of each local expert on the device, probs). Local."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(hidden_states)
        return hidden_states, require_started(self.handle).plan.splits.long(), probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns its argument. Local."""
        return hidden_states

    @torch.compiler.disable
    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The unweighted sum of every token's rows, [T, H]. Collective over the EP group."""
        return combine_tokens(
            hidden_states, require_started(self.handle), order=self._options.order
        )

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[S / TP, B, H], with the overlapped shared experts' output. Local."""
        output = hidden_states.view(require_started(self.hidden_shape))
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(hidden_states)
            self.shared_experts.post_forward_comm()
            output = output + self.shared_experts.get_output()
        self.hidden_shape = self.topk_idx = self.handle = None
        return output


class FusedTokenDispatcher(SymmTokenDispatcher):
    """The six calls for SymmExperts: tokens travel within :meth:`compute`, with the experts, in one step.

    Between Megatron's dispatch and combine, tokens keep their own order.
    """

    @torch.compiler.disable
    def compute(
        self,
        hidden_states: torch.Tensor,
        probs: torch.Tensor,
        routed: RoutedExperts,
        experts: SymmExperts,
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """RoutedExperts.run on tokens [T, H] and probs fp32 [T, K]. Collective over the EP group."""
        routed.heap._fail_for(experts_call_problem(experts), control.PHASE_PLAN)
        shared = self.shared_experts
        before_trips = (
            None if shared is None else partial(shared.linear_fc1_forward_and_act, hidden_states)
        )
        with FailPeersOnError(routed.heap, *CALL_PHASES):
            return routed.run(
                hidden_states,
                probs,
                require_started(self.topk_idx),
                experts,
                before_trips=before_trips,
            )[:2]

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns its arguments. Local."""
        require_started(self.topk_idx)
        return hidden_states, probs

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns its argument. Local."""
        return hidden_states


class SymmMoELayer(MoELayer):
    """An MoELayer whose tokens travel over the symmetric heap. Router, shared experts and recomputation are Megatron's.

    Use it through :func:`use_symmoe`. Forward and backward are collective over the EP group. Arguments: those of the
    version's MoELayer, the EP group's heap, and DispatchOptions; `submodules.experts` may be SymmExperts or Megatron's
    own. ArgumentError: the layer does not support the configuration, or the heap is not the EP group's; the text names
    the field.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        heap: SymmetricHeap,
        options: DispatchOptions,
        **kwargs: object,
    ) -> None:
        pg_collection = process_groups(pg_collection)
        raise_for(layer_problem(config) or groups_problem(pg_collection, heap))
        super().__init__(config, submodules, layer_number, pg_collection, **kwargs)
        self._routed: RoutedExperts | None = None
        if isinstance(self.experts, SymmExperts):
            self._routed = RoutedExperts.of(
                routed_config(config, **asdict(options)), heap, self.experts
            )
        elif options.capacity is not None:
            raise ArgumentError(
                f"capacity ({options.capacity}) needs SymmExperts, which skip rows that are not there; "
                f"the experts are {type(self.experts).__name__}"
            )
        dispatcher = SymmTokenDispatcher if self._routed is None else FusedTokenDispatcher
        self.token_dispatcher = dispatcher(config, pg_collection, heap=heap, options=options)
        self.listeners = Listeners(
            heap,
            num_experts=config.num_moe_experts,
            order=options.order,
            override_router=override_routing,
        )
        self._recorder = recorder_of(self.router)
        if self.shared_expert_overlap:
            self.token_dispatcher.set_shared_experts(self.shared_experts)

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As in MoELayer; with SymmExperts, this call includes both trips of the tokens."""
        dispatcher = self.token_dispatcher
        if self._routed is not None:
            y, load = dispatcher.compute(hidden_states, probs, self._routed, self.experts)
            self._notify(hidden_states, load)
            return y, None
        rows, tokens_per_expert, row_probs = dispatcher.dispatch_postprocess(hidden_states, probs)
        output, bias = self.experts(rows, tokens_per_expert, row_probs)
        self._notify(rows, require_started(dispatcher.handle).plan.load)
        return dispatcher.combine_preprocess(output), bias

    def _notify(self, rows: torch.Tensor, load: Sequence[torch.Tensor]) -> None:
        # The choice before a capacity factor's drops; another action's record may be of an earlier forward.
        recorder = self._recorder
        recorded = (
            recorder.recorded_topk_idx
            if recorder and recorder.router_replay_action == RouterReplayAction.RECORD
            else None
        )
        ids = require_started(self.token_dispatcher.topk_idx)
        self.listeners.notify(ids, load, rows, is_training=self.training, chosen_idx=recorded)


def require_started(value: _Value | None) -> _Value:
    """The value from an earlier one of the six calls. StalePlan: it is None."""
    if value is None:
        raise StalePlan(
            "the token dispatcher's calls must come in Megatron's order: dispatch_preprocess is the first"
        )
    return value


def select_slots(
    routing_map: torch.Tensor, probs: torch.Tensor, *, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts in ascending order, from Megatron's dense form. Local; does not synchronise the host.

    Args:
        routing_map: bool [T, E], at most `top_k` per token.
        probs: floating point [T, E].

    Returns:
        topk_idx int32 [T, K], -1 where a token has fewer; and fp32 [T, K], through which gradients reach `probs`.
    """
    num_experts = routing_map.shape[1]
    # The larger the key, the smaller the expert's number; 0 is none. Keys differ, so topk has one answer.
    descending = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=routing_map.device)
    keys = (routing_map * descending).topk(min(top_k, num_experts), dim=1).values
    topk_idx = torch.where(keys > 0, num_experts - keys, -1)
    # A slot without an expert has no row and so no gradient, whatever its prob.
    return topk_idx, probs.gather(1, topk_idx.clamp(min=0).long()).float()


# -- Megatron's RouterReplay: see symmoe.routing ----------------------------------------------------------------------


def recorder_of(router: nn.Module) -> RouterReplay | None:
    """A router's RouterReplay; a missing one is created, and records; None: the router cannot use one."""
    if (
        not isinstance(router, TopKRouter)
        or router.config.moe_router_fusion
        or router.routing_type == "sinkhorn"
    ):
        return None
    if router.router_replay is None:  # without moe_enable_routing_replay
        router.router_replay = RouterReplay()
        RouterReplay.global_router_replay_instances.pop()  # lists only enabled ones
        router.router_replay.set_router_replay_action(RouterReplayAction.RECORD)
    return router.router_replay


def override_routing(model: nn.Module, name: str, choose: Choose) -> Callable[[], None]:
    """An OverrideRouter for SymmMoELayers. The router's statistics spread tokens without an expert over all experts;
    the router's map omits these tokens. ArgumentError: the router has no choice by scores to replace."""
    router: Any = model.get_submodule(f"{name}.router" if name else "router")
    if (replay := recorder_of(router)) is None:
        raise ArgumentError(
            f"moe_router_load_balancing_type ({router.config.moe_router_load_balancing_type!r}) and "
            f"moe_router_fusion ({router.config.moe_router_fusion}) must not be 'sinkhorn' or True: such a router "
            "cannot be given a choice"
        )
    before = replay.router_replay_action

    def set_choice(_router: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        ids = choose(args[0].shape[:-1].numel(), router.topk).long()
        spread = torch.arange(ids.numel(), device=ids.device).view_as(ids) % router.num_experts
        replay.recorded_topk_idx, replay.target_topk_idx = ids, torch.where(ids < 0, spread, ids)
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def drop_tokens(
        _router: nn.Module, _args: Any, output: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        replay.set_router_replay_action(
            RouterReplayAction.RECORD
        )  # the layer reports the given choice as this
        is_none = replay.recorded_topk_idx[:, :1] < 0
        return output[0].masked_fill(is_none, 0.0), output[1] & ~is_none

    hooks = router.register_forward_pre_hook(set_choice), router.register_forward_hook(drop_tokens)

    def end() -> None:
        for hook in hooks:
            hook.remove()
        replay.set_router_replay_action(before)

    return end
