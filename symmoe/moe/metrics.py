"""What MoELayer returns in addition to its output."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from symmoe.moe import balance
from symmoe.torch_internals import pytree


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEMetrics:
    """Load, drops and losses of one call. Tensors on the device; only reading them synchronises the host.

    A pytree of its tensors: torch.export and what else flattens a module's output see them.

    Attributes:
        aux_loss: scalar to add to the training loss, already scaled by the coefficients; 0 if both are 0, or if the
            call brought probs.
        expert_load: int32 [E], slots of each expert over the whole EP group, before a static capacity drops any.
        num_dropped: int32 [1], slots of the whole group dropped by a static capacity.
        topk_idx: int32 [T, K], experts of this rank's tokens, before a static capacity drops any; -1 is none.
        num_over_capacity: int32 [1], slots of this rank dropped by the capacity factor; None without one.
    """

    aux_loss: torch.Tensor
    expert_load: torch.Tensor
    num_dropped: torch.Tensor
    topk_idx: torch.Tensor
    num_over_capacity: torch.Tensor | None

    @property
    def imbalance(self) -> torch.Tensor:
        """fp32 scalar, largest over mean load; computed when it is asked for."""
        return balance.imbalance(self.expert_load)

    @property
    def max_violation(self) -> torch.Tensor:
        """fp32 scalar, (largest - mean) / mean load; computed when it is asked for."""
        return balance.max_violation(self.expert_load)

    @property
    def coefficient_of_variation(self) -> torch.Tensor:
        """fp32 scalar, standard deviation over mean load; computed when it is asked for."""
        return balance.coefficient_of_variation(self.expert_load)

    @property
    def num_dead_experts(self) -> torch.Tensor:
        """int64 scalar, experts that no token of the group went to; computed when it is asked for."""
        return (self.expert_load == 0).sum()


pytree.register_dataclass(MoEMetrics, serialized_type_name="symmoe.MoEMetrics")
