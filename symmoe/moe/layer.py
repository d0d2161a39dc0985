"""MoELayer: router, plan, and the fused expert-parallel MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from symmoe.dispatch.plan import MAX_TOP_K, make_plan
from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.moe import balance
from symmoe.moe.arguments import width_problem
from symmoe.moe.beside import join, start_beside
from symmoe.moe.config import MoEConfig
from symmoe.moe.fused import expert_parallel_mlp
from symmoe.moe.grouped_mlp import GroupedMLP
from symmoe.moe.router import Router, RouterOutput
from symmoe.symm_mem.buffers import dtype_problem
from symmoe.symm_mem.heap import SymmetricHeap


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEMetrics:
    """What one call of MoELayer says of itself. Tensors on the device; reading them is up to the caller.

    Attributes:
        aux_loss: scalar to add to the training loss, already scaled by the coefficients; 0 if both are 0.
        expert_load: int32 [E], slots of each expert over the whole EP group, before dropping.
        num_dropped: int32 [1], slots of the whole group dropped by a static capacity.
    """

    aux_loss: torch.Tensor
    expert_load: torch.Tensor
    num_dropped: torch.Tensor

    @property
    def imbalance(self) -> torch.Tensor:
        """fp32 scalar, largest over mean load; computed when it is asked for."""
        return balance.imbalance(self.expert_load)


class MoELayer(nn.Module):
    """A Mixture-of-Experts feed-forward layer whose experts are spread over the ranks of a heap's EP group.

    Rank r holds experts r * E / R to (r + 1) * E / R - 1. The router is replicated: its gradients are data-parallel,
    those of `experts` are not (see reduce_gradients).

    Args:
        config: the same on all ranks.
        heap: the EP group's symmetric heap; several layers share one.
        experts: this rank's E / R experts, e.g. with another activation or with biases; None makes a GroupedMLP with
            SwiGLU.
        shared_expert: a module that every token passes through, [..., H] to [..., H]; its output is added to the
            experts'. On GPUs it runs on a stream of its own, while tokens travel and experts compute, forward and
            backward. It is replicated, so its gradients are data-parallel.
        dtype: of the expert weights. The layer computes in the dtype of its input, or in autocast's.
        device: of the parameters; None is the heap's.

    Raises:
        ArgumentError: the configuration does not fit the group, or `experts` does not fit the configuration.
    """

    def __init__(
        self,
        config: MoEConfig,
        heap: SymmetricHeap,
        *,
        experts: GroupedMLP | None = None,
        shared_expert: nn.Module | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if config.num_experts % heap.num_ranks:
            raise ArgumentError(
                f"num_experts ({config.num_experts}) must be divisible by the number of ranks ({heap.num_ranks})"
            )
        for name, limit in (("num_experts", control.MAX_EXPERTS), ("top_k", MAX_TOP_K)):
            if getattr(config, name) > limit:
                raise ArgumentError(f"{name} ({getattr(config, name)}) must be at most {limit}")
        device = heap.device if device is None else device
        self.config, self.heap = config, heap
        self.router = Router(config, device=device)
        num_local = config.num_experts // heap.num_ranks
        if experts is None:
            experts = GroupedMLP(num_local, config.hidden, config.ffn, dtype=dtype, device=device)
        for name, value in (("num_groups", num_local), ("hidden", config.hidden), ("ffn", config.ffn)):
            if getattr(experts, name) != value:
                raise ArgumentError(
                    f"experts.{name} ({getattr(experts, name)}) must be {value} with this config and heap"
                )
        self.experts = experts
        self.shared_expert = shared_expert

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, MoEMetrics]:
        """Collective over the EP group, forward and backward. Synchronises the host only with exact capacity (one
        small read in make_plan).

        Args:
            x: [..., H] fp32, fp16 or bf16 on the heap's device. The number of tokens may differ from rank to rank.

        Returns:
            y like x (in autocast's dtype under autocast), and the metrics of the call.

        Raises:
            ArgumentError, ConfigMismatch, CapacityError, HeapExhausted, PeerTimeout: see make_plan; on every rank.
        """
        config = self.config
        self.heap.check()
        self.heap.fail_for(self._problem(x), control.PHASE_PLAN)
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        tokens = x.reshape(-1, config.hidden).to(dtype)
        routed = self.router(x.reshape(-1, config.hidden))  # not `tokens`: autocast would round what it sees
        plan = make_plan(
            routed.topk_idx,
            num_experts=config.num_experts,
            heap=self.heap,
            capacity=config.capacity,
            overflow=config.overflow,
            max_tokens=config.max_tokens,
            hidden=config.hidden,
            dtype=dtype,
        )
        shared = None
        if self.shared_expert is not None:
            # Enqueued before the trips, whose waits it is to fill.
            shared = start_beside(self.shared_expert, x, self.heap.side_stream)
        y = expert_parallel_mlp(tokens, routed.probs, self.experts, plan, order=config.order, stash=config.stash)
        y = y.view(x.shape)
        if shared is not None:
            y = y + join(shared, self.heap.side_stream)
        metrics = MoEMetrics(
            aux_loss=self._aux_loss(routed, plan.expert_load),
            expert_load=plan.expert_load,
            num_dropped=plan.num_dropped,
        )
        return y, metrics

    def update_expert_bias(self, expert_load: torch.Tensor) -> None:
        """Moves the router's bias towards balance; call it once per optimizer step. Not collective.

        Args:
            expert_load: [E], the load since the last call (of all ranks that share the router).
        """
        if self.router.expert_bias is None:
            raise ArgumentError("expert_bias is off in this layer's config (expert_bias=False)")
        balance.update_expert_bias(self.router.expert_bias, expert_load, self.config.bias_update_rate)

    def _aux_loss(self, routed: RouterOutput, expert_load: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros((), device=expert_load.device)
        if self.config.aux_loss_coef:
            loss = loss + self.config.aux_loss_coef * balance.load_balance_loss(routed.scores, expert_load)
        if self.config.z_loss_coef:
            loss = loss + self.config.z_loss_coef * balance.z_loss(routed.logits)
        return loss

    def _problem(self, x: torch.Tensor) -> ArgumentError | None:
        if not isinstance(x, torch.Tensor) or x.dim() < 1 or x.shape[-1] != self.config.hidden:
            given = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            return ArgumentError(f"x ({given}) must be a tensor whose last dimension is hidden ({self.config.hidden})")
        if (error := dtype_problem("x", x.dtype)) is not None:
            return error
        if x.device != self.heap.device:
            return ArgumentError(f"x is on {x.device}; the heap is on {self.heap.device}")
        return width_problem(self.experts.fc1, x) or width_problem(self.experts.fc2, x)
