"""torchtitan's expert parallelism over symmetric memory: a token dispatcher for its MoE (torchtitan 0.3).

    sizes = {"hidden_dim": 2048, "num_max_tokens_per_rank": 8192}
    config.override.imports = [("symmoe.integrations.torchtitan.token_dispatcher", sizes)]

T tokens on this rank, D hidden size, K experts per token, R rows received by this rank. Experts are torchtitan's own:
rows are copied between the heap and ordinary memory, and scores are applied after the experts, in fp32, as torchtitan's
other dispatchers do. A rank's tokens may differ in number from its peers'; a rank may receive none.

torch.compile does not look into the two trips: it cannot trace plans, leases and signals.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.config.override import derive, override
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, LocalDispatchMetadata, LocalTokenDispatcher

from symmoe.dispatch.plan import Plan, PlanOptions, plan_call
from symmoe.errors import ArgumentError
from symmoe.integrations.given_topk import give_topk
from symmoe.moe.listeners import Listeners, RoutingReport
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tokens import combine_tokens, dispatch_tokens

_ROW_ITEM_BYTES = 4  # fp32, the widest dtype of rows
_SPARE_BYTES = 4 << 20  # what the heap itself needs, and gaps between leases


@dataclass(frozen=True, kw_only=True, slots=True)
class SymmoeDispatchMetadata:
    """What combine needs from dispatch: the plan, and the score of every row, fp32 [R], differentiable."""

    plan: Plan
    row_scores: torch.Tensor


class SymmoeTokenDispatcher(BaseEPTokenDispatcher):
    """Dispatch and combine through a symmetric heap that all layers of a model share.

    Both are collective over the EP group, forward and backward; dispatch reads one small tensor back to the host.

    Config:
        hidden_dim: D.
        num_max_tokens_per_rank: the largest T of any rank; the heap holds the worst routing of that many tokens.
        order: of the sums in combine, "rank" or "slot" (the latter has the same bits for any number of ranks).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        hidden_dim: int
        num_max_tokens_per_rank: int
        order: str = "rank"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.config = config
        self.heap: SymmetricHeap | None = None
        self.listeners: Listeners | None = None

    def init_buffer(self) -> None:
        """Makes the heap of the EP group, or takes the one that an earlier layer has made. Collective.

        Raises:
            ArgumentError: num_experts is not divisible by the ranks of the mesh.
        """
        if self.ep_mesh is None:
            return  # no expert parallelism: dispatch is local
        num_ranks = self.ep_mesh.size()
        if self.num_experts % num_ranks:
            raise ArgumentError(f"num_experts ({self.num_experts}) must be divisible by the {num_ranks} ranks of 'ep'")
        group, num_bytes = self.ep_mesh.get_group(), self.heap_bytes(num_ranks)
        self.heap = _HEAPS.get((group, num_bytes))
        if self.heap is None:
            self.heap = _HEAPS[group, num_bytes] = SymmetricHeap(group, num_bytes=num_bytes)
        give = partial(give_topk, router="router", position=2)
        self.listeners = Listeners(self.heap, num_experts=self.num_experts, order=self.config.order, give=give)

    def heap_bytes(self, num_ranks: int) -> int:
        """Bytes of symmetric memory that one layer's trips need at most; layers take turns."""
        packed = num_ranks * self.config.num_max_tokens_per_rank
        rows = packed * min(self.top_k, self.num_experts // num_ranks)
        row_bytes = self.config.hidden_dim * _ROW_ITEM_BYTES
        return int((packed + rows) * row_bytes + packed * self.top_k * 8 + _SPARE_BYTES)

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, SymmoeDispatchMetadata | LocalDispatchMetadata]:
        """Rows of this rank's experts [R, D] in expert order, how many each expert has (int64), and the metadata.

        Raises:
            ArgumentError, ExpertIdError, ConfigMismatch, HeapExhausted, PeerTimeout: see make_plan; on every rank.
        """
        dispatched: tuple[torch.Tensor, torch.Tensor, SymmoeDispatchMetadata | LocalDispatchMetadata]
        arguments = (x_TD, topk_scores_TK, topk_expert_ids_TK)
        if self.heap is None:
            dispatched = LocalTokenDispatcher.dispatch(self, *arguments, num_local_tokens_per_expert_E)
        else:
            dispatched = self._dispatch(self.heap, *arguments)
        return dispatched

    def combine(
        self,
        routed_output_RD: torch.Tensor,
        metadata: SymmoeDispatchMetadata | LocalDispatchMetadata,
        x_TD: torch.Tensor,
    ) -> torch.Tensor:
        """The sum of every token's rows, each times its score: [T, D]."""
        y_TD: torch.Tensor
        if isinstance(metadata, LocalDispatchMetadata):
            y_TD = LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
        else:
            y_TD = self._combine(routed_output_RD, metadata)
        return y_TD

    @torch.compiler.disable
    def _dispatch(
        self, heap: SymmetricHeap, x_TD: torch.Tensor, topk_scores_TK: torch.Tensor, topk_expert_ids_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, SymmoeDispatchMetadata]:
        options = PlanOptions(self.num_experts, hidden=x_TD.shape[1], dtype=x_TD.dtype)
        plan = plan_call(topk_expert_ids_TK, heap, options)
        rows_RD, row_scores_R = dispatch_tokens(x_TD, plan, probs=topk_scores_TK.float(), order=self.config.order)
        metadata = SymmoeDispatchMetadata(plan=plan, row_scores=row_scores_R)
        if self.listeners is not None and self.listeners.callbacks:
            ids, sizes = (topk_expert_ids_TK,) * 2, (x_TD.shape[1] * x_TD.element_size(),) * 2
            counts = plan.expert_load, plan.num_dropped
            self.listeners.tell(RoutingReport(*ids, *counts, *sizes, is_training=torch.is_grad_enabled()))
        return rows_RD, plan.splits.to(torch.int64), metadata

    @torch.compiler.disable
    def _combine(self, routed_output_RD: torch.Tensor, metadata: SymmoeDispatchMetadata) -> torch.Tensor:
        scored_RD = (routed_output_RD.float() * metadata.row_scores[:, None]).to(routed_output_RD.dtype)
        return combine_tokens(scored_RD, metadata.plan, order=self.config.order)

    def close(self) -> None:
        """Closes the heap, for every layer that shares it. Collective."""
        if self.heap is not None:
            _HEAPS.pop((self.ep_mesh.get_group(), self.heap.num_bytes), None)
            self.heap.close()


# Heaps that dispatchers use now, by group and size: with NVSHMEM a process can have only one.
_HEAPS: weakref.WeakValueDictionary[tuple[dist.ProcessGroup, int], SymmetricHeap] = weakref.WeakValueDictionary()


@override(target=LocalTokenDispatcher.Config, description="dispatch and combine over symmetric memory")
def token_dispatcher(config: LocalTokenDispatcher.Config, **fields: Any) -> SymmoeTokenDispatcher.Config:
    """The configuration in place of any other dispatcher's: an override of torchtitan's, for `override.imports`.

    Args:
        config: what it replaces; num_experts and top_k are taken from there.
        fields: the others of `SymmoeTokenDispatcher.Config`, hidden_dim and num_max_tokens_per_rank at least.
    """
    replacement: SymmoeTokenDispatcher.Config = derive(config, SymmoeTokenDispatcher.Config, **fields)
    return replacement
