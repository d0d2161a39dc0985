"""Megatron's MoELayer with symmoe's dispatcher."""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from symmoe.errors import ArgumentError, raise_for
from symmoe.integrations.megatron.compat import groups_problem, layer_problem, process_groups, slots_per_token
from symmoe.integrations.megatron.dispatcher import DispatchOptions, FusedTokenDispatcher, SymmTokenDispatcher, begun
from symmoe.integrations.megatron.experts import SymmExperts
from symmoe.moe.config import MoEConfig
from symmoe.moe.listeners import Listeners, RoutingReport
from symmoe.moe.routed_experts import RoutedExperts
from symmoe.symm_mem.heap import SymmetricHeap


class SymmMoELayer(MoELayer):
    """An MoELayer whose tokens travel over the symmetric heap. Router, shared experts and recomputation are Megatron's.

    Use it through :func:`use_symmoe`. Forward and backward are collective over the EP group.

    Args:
        config, submodules, layer_number: as in MoELayer. `submodules.experts` may be SymmExperts or Megatron's own.
        pg_collection: process groups; None: Megatron's default ones.
        heap: of the EP group.
        options: how rows travel.
        others: further arguments that the version of Megatron passes to an MoELayer.

    Raises:
        ArgumentError: the layer does not support the configuration, or the heap is not the EP group's; the text names
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
        **others: object,
    ) -> None:
        pg_collection = process_groups(pg_collection)
        raise_for(layer_problem(config) or groups_problem(pg_collection, heap))
        super().__init__(config, submodules, layer_number, pg_collection, **others)
        self._routed: RoutedExperts | None = None
        if isinstance(self.experts, SymmExperts):
            self._routed = RoutedExperts.of(_settings(config, self.experts, options), heap, self.experts)
            self.token_dispatcher = FusedTokenDispatcher(config, pg_collection, heap=heap, options=options)
        elif options.capacity is not None:
            raise ArgumentError(
                f"capacity ({options.capacity}) needs SymmExperts, which skip rows that are not there; "
                f"the experts are {type(self.experts).__name__}"
            )
        else:
            self.token_dispatcher = SymmTokenDispatcher(config, pg_collection, heap=heap, options=options)
        self.listeners = Listeners(heap, num_experts=config.num_moe_experts, order=options.order)
        if self.shared_expert_overlap:
            self.token_dispatcher.set_shared_experts(self.shared_experts)

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Same as in MoELayer; with SymmExperts, tokens travel to their experts and home in here."""
        dispatcher = self.token_dispatcher
        if self._routed is not None:
            y, expert_load, num_dropped = dispatcher.compute(hidden_states, probs, self._routed, self.experts)
            if self.listeners.callbacks:
                self._tell(hidden_states, expert_load, num_dropped)
            return y, None
        rows, tokens_per_expert, row_probs = dispatcher.dispatch_postprocess(hidden_states, probs)
        output, bias = self.experts(rows, tokens_per_expert, row_probs)
        if self.listeners.callbacks:
            plan = begun(dispatcher.plan)
            self._tell(rows, plan.expert_load, plan.num_dropped)
        return dispatcher.combine_preprocess(output), bias

    def _tell(self, rows: torch.Tensor, expert_load: torch.Tensor, num_dropped: torch.Tensor) -> None:
        topk_idx = begun(self.token_dispatcher.topk_idx)
        row_bytes = rows.shape[1] * rows.element_size()
        report = RoutingReport(
            topk_idx=topk_idx,
            chosen_idx=topk_idx,
            expert_load=expert_load,
            num_dropped=num_dropped,
            row_bytes=row_bytes,
            sent_row_bytes=row_bytes,
            is_training=self.training,
        )
        self.listeners.tell(report)


def _settings(config: TransformerConfig, experts: SymmExperts, options: DispatchOptions) -> MoEConfig:
    """What happens to tokens that Megatron's router has routed."""
    return MoEConfig(
        hidden=experts.hidden,
        ffn=experts.ffn,
        num_experts=config.num_moe_experts,
        top_k=slots_per_token(config),
        activation=experts.activation.activation,
        router="none",
        order=options.order,
        capacity=options.capacity,
        overflow=options.overflow,
    )
