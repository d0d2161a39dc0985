"""Megatron's MoELayer with symmoe's dispatcher."""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from symmoe.errors import ArgumentError, raise_for
from symmoe.integrations.megatron.buffers import SharedBuffers
from symmoe.integrations.megatron.compat import groups_problem, layer_problem, process_groups
from symmoe.integrations.megatron.dispatcher import DispatchOptions, SymmTokenDispatcher, begun
from symmoe.integrations.megatron.experts import SymmExperts
from symmoe.moe.listeners import Listeners, RoutingReport


class SymmMoELayer(MoELayer):
    """An MoELayer whose tokens travel over the symmetric heap. Router, shared experts and recomputation are Megatron's.

    Use it through :func:`use_symmoe`. Forward and backward are collective over the EP group.

    Args:
        config, submodules, layer_number: as in MoELayer. `submodules.experts` may be SymmExperts or Megatron's own.
        pg_collection: process groups; None: Megatron's default ones.
        buffers: on the EP group's heap; one object for all layers.
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
        buffers: SharedBuffers,
        options: DispatchOptions,
        **others: object,
    ) -> None:
        pg_collection = process_groups(pg_collection)
        raise_for(layer_problem(config) or groups_problem(pg_collection, buffers.heap))
        super().__init__(config, submodules, layer_number, pg_collection, **others)
        own_experts = isinstance(self.experts, SymmExperts)
        if options.capacity is not None and not own_experts:
            raise ArgumentError(
                f"capacity ({options.capacity}) needs SymmExperts, which skip rows that are not there; "
                f"the experts are {type(self.experts).__name__}"
            )
        self.token_dispatcher = SymmTokenDispatcher(
            config, pg_collection, buffers=buffers, options=options, own_experts=own_experts
        )
        self.listeners = Listeners(buffers.heap, num_experts=config.num_moe_experts, order=options.order)
        if self.shared_expert_overlap:
            self.token_dispatcher.set_shared_experts(self.shared_experts)

    def routed_experts_compute(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Same as in MoELayer, but always gives the experts the heap's buffers; some versions of Megatron do not."""
        dispatcher = self.token_dispatcher
        rows, tokens_per_expert, row_probs = dispatcher.dispatch_postprocess(hidden_states, probs)
        output_buffer, grad_input_buffer = dispatcher.get_expert_zero_copy_buffers()
        buffers = {}
        if output_buffer is not None:
            buffers = {"output_buffer": output_buffer, "grad_input_buffer": grad_input_buffer}
        output, bias = self.experts(rows, tokens_per_expert, row_probs, **buffers)
        if self.listeners.callbacks:
            self._tell(rows)
        return dispatcher.combine_preprocess(output), bias

    def _tell(self, rows: torch.Tensor) -> None:
        plan, topk_idx = begun(self.token_dispatcher.plan), begun(self.token_dispatcher.topk_idx)
        row_bytes = rows.shape[1] * rows.element_size()
        report = RoutingReport(
            topk_idx=topk_idx,
            chosen_idx=topk_idx,
            expert_load=plan.expert_load,
            num_dropped=plan.num_dropped,
            row_bytes=row_bytes,
            sent_row_bytes=row_bytes,
            is_training=self.training,
        )
        self.listeners.tell(report)
