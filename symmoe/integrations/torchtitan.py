"""torchtitan's expert parallelism over symmetric memory: a token dispatcher for its MoE (torchtitan 0.3).

    sizes = {"hidden_dim": 2048, "num_max_tokens_per_rank": 8192}
    config.override.imports = [("symmoe.integrations.torchtitan.token_dispatcher", sizes)]

T tokens on this rank, D hidden size, K experts per token, R rows received by this rank. Experts are torchtitan's own:
rows are copied between the heap and ordinary memory, and scores are applied after the experts, in fp32, as torchtitan's
other dispatchers do. A rank's tokens may differ in number from its peers'; a rank may receive none.

torch.compile does not trace the two trips: it does not support plans, leases and signals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torchtitan.config.override import derive, override
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, LocalTokenDispatcher

from symmoe.dispatch.plan import DispatchHandle, PlanOptions, plan_call
from symmoe.errors import ArgumentError
from symmoe.integrations.topk_override import override_topk
from symmoe.moe.listeners import Listeners
from symmoe.symm_mem.heap import SymmetricHeap, shared_heap
from symmoe.tokens import combine_tokens, dispatch_tokens

_ROW_ITEM_BYTES = 4  # fp32, the widest dtype of rows
_SPARE_BYTES = 4 << 20  # the heap's own needs, and gaps between leases


class SymmoeTokenDispatcher(BaseEPTokenDispatcher):
    """Dispatch and combine through a symmetric heap that all layers of a model share.

    Both are collective over the EP group, forward and backward; dispatch reads one small tensor back to the host.

    Config:
        hidden_dim: D.
        num_max_tokens_per_rank: the largest T of any rank; the heap fits the worst routing of that many tokens.
        order: order of the sums in combine, "rank" or "slot" ("slot": the same bits for any number of ranks).
        load_factor: the most rows that a rank receives, over num_max_tokens_per_rank * top_k; None: the worst routing.
        num_kept_layers: for torchtitan_experts.routed_experts: layers whose rows stay on the heap until backward; 1 if
            layers are recomputed; 0: none, backward sends tokens again.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        hidden_dim: int
        num_max_tokens_per_rank: int
        order: str = "rank"
        load_factor: float | None = None
        num_kept_layers: int | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config
        self.heap: SymmetricHeap | None = None
        self.listeners: Listeners | None = None

    def init_buffer(self) -> None:
        """Creates the heap of the EP group, or uses the heap that an earlier layer created. Collective.

        Raises:
            ArgumentError: the number of ranks does not divide num_experts.
        """
        if self.ep_mesh is None:
            return  # no expert parallelism: dispatch is local
        num_ranks = self.ep_mesh.size()
        if self.num_experts % num_ranks:
            raise ArgumentError(
                f"num_experts ({self.num_experts}) must be divisible by the {num_ranks} ranks of 'ep'"
            )
        # Layers share a heap: with NVSHMEM a process can have only one.
        self.heap = shared_heap(self.ep_mesh.get_group(), num_bytes=self.heap_bytes(num_ranks))
        self.listeners = Listeners(
            self.heap,
            num_experts=self.num_experts,
            order=self.config.order,
            override_router=partial(override_topk, router="router", position=2),
        )

    def heap_bytes(self, num_ranks: int) -> int:
        """The most bytes of symmetric memory that layers need in turn, without the rows that they keep."""
        config, num_kept = self.config, self.config.num_kept_layers
        packed = num_ranks * config.num_max_tokens_per_rank
        rows = packed * min(self.top_k, self.num_experts // num_ranks)
        if config.load_factor is not None:
            rows = min(rows, int(config.load_factor * config.num_max_tokens_per_rank * self.top_k))
        buffers = packed + rows * (
            1 if num_kept is None else 1 + max(1, num_kept)
        )  # for a trip, or a step
        return int(
            buffers * config.hidden_dim * _ROW_ITEM_BYTES + packed * self.top_k * 8 + _SPARE_BYTES
        )

    def dispatch(self, x_TD: torch.Tensor, *routed: torch.Tensor) -> Any:
        """Rows of this rank's experts [R, D] in expert order, the count of each expert (int64), and metadata for
        combine. routed: scores and ids of the experts [T, K], and tokens of every expert.

        Raises:
            ArgumentError, ExpertIdError, ConfigMismatch, HeapExhausted, PeerTimeout: see make_plan; on every rank.
        """
        if self.heap is None:
            return LocalTokenDispatcher.dispatch(self, x_TD, *routed)
        return self._dispatch(self.heap, x_TD, *routed[:2])

    def combine(self, routed_output_RD: torch.Tensor, metadata: Any, x_TD: torch.Tensor) -> Any:
        """The sum of every token's rows, each times its score: [T, D]."""
        if self.heap is None:
            return LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
        return self._combine(routed_output_RD, *metadata)

    @torch.compiler.disable
    def _dispatch(
        self,
        heap: SymmetricHeap,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[DispatchHandle, torch.Tensor]]:
        plan = plan_call(
            topk_expert_ids_TK,
            heap,
            PlanOptions(self.num_experts, hidden=x_TD.shape[1], dtype=x_TD.dtype),
        )
        rows_RD, row_scores_R, handle = dispatch_tokens(
            x_TD, plan, probs=topk_scores_TK.float(), order=self.config.order
        )
        self.notify(topk_expert_ids_TK, plan.load, x_TD)
        return rows_RD, plan.splits.to(torch.int64), (handle, row_scores_R)

    @torch.compiler.disable
    def _combine(
        self, routed_output_RD: torch.Tensor, handle: DispatchHandle, row_scores_R: torch.Tensor
    ) -> torch.Tensor:
        scored_RD = (routed_output_RD * row_scores_R[:, None]).to(
            routed_output_RD.dtype
        )  # the product is fp32
        return combine_tokens(scored_RD, handle, order=self.config.order)

    def notify(self, ids: torch.Tensor, load: Sequence[torch.Tensor], x_TD: torch.Tensor) -> None:
        """Reports a call to listeners. load: the plan's expert_load and num_dropped."""
        if self.listeners is not None:
            self.listeners.notify(ids, load, x_TD, is_training=torch.is_grad_enabled())

    def close(self) -> None:
        """Closes the heap, for every layer that shares it. Collective."""
        if self.heap is not None:
            self.heap.close()


@override(
    target=LocalTokenDispatcher.Config, description="dispatch and combine over symmetric memory"
)
def token_dispatcher(
    config: LocalTokenDispatcher.Config, **fields: Any
) -> SymmoeTokenDispatcher.Config:
    """Replaces the configuration of any other dispatcher: a torchtitan override, for `override.imports`.

    Args:
        config: the replaced one, which gives num_experts and top_k.
        fields: other fields of `SymmoeTokenDispatcher.Config`, at least hidden_dim and num_max_tokens_per_rank.
    """
    return cast(
        SymmoeTokenDispatcher.Config, derive(config, SymmoeTokenDispatcher.Config, **fields)
    )
