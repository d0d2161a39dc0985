"""symmoe as an expert-parallel implementation of transformers >= 5.23: models that transformers shards itself."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

from symmoe.checks.extras import extra
from symmoe.errors import first_problem, raise_for
from symmoe.integrations.transformers.experts import StepConfig, empty_experts
from symmoe.integrations.transformers.forms import ExpertsForm, StockExperts
from symmoe.symm_mem.heap import SymmetricHeap

with extra("transformers"):
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

NAME = "symmoe"


def register(heap: SymmetricHeap, *, step: StepConfig | None = None) -> None:
    """Makes `DistributedConfig(ep_implementation="symmoe")` run experts over `heap`, in models loaded from now on.

    Local; a second call replaces the heap. The parameters stay transformers' DTensors, so its FSDP2, its gradient
    scaling, `from_pretrained` and `save_pretrained` work as with its own implementations.

    Args:
        heap: over the ranks of the mesh's "ep" dimension, in their order.
        step: options of every call; None: exact capacity, and MoEConfig's defaults.
    """
    attributes = {"heap": heap, "step": step or StepConfig()}
    EPImplementationInterface.register(NAME, type("SymmoeEPOverHeap", (SymmoeEP,), attributes))


class SymmoeEP(EPImplementation):
    """The step of ExpertParallelExperts, with the local weights of a transformers experts module.

    Transposed weights (gpt-oss) are copied into symmoe's layout in every call; swap_moe does that once. ArgumentError:
    the mesh is not the heap's group, tp_size is not 1, or see ExpertsForm.of.
    """

    heap: SymmetricHeap
    step: StepConfig

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        heap = self.heap
        raise_for(
            first_problem(
                (
                    tp_mesh.size() > 1,
                    f"tp_size ({tp_mesh.size()}) must be 1: every rank brings tokens of its own",
                ),
                (
                    (ep_mesh.size(), ep_mesh.get_local_rank()) != (heap.num_ranks, heap.rank),
                    f"this is rank {ep_mesh.get_local_rank()} of {ep_mesh.size()} in the expert-parallel mesh, and "
                    f"rank {heap.rank} of {heap.num_ranks} in the heap; they must be the same",
                ),
            )
        )
        self._experts: StockExperts = experts
        self._form = ExpertsForm.of(self._experts)
        self._step_module = empty_experts(
            self._form, self._experts, cast(int, self.num_local_experts), heap, step=self.step
        )

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """ExpertParallelExperts.forward; transformers has converted the experts' parameters to local tensors."""
        weights = {
            f"mlp.{name}": weight.contiguous()
            for name, weight in self._form.local_weights(self._experts).items()
        }
        inputs = hidden_states, top_k_index, top_k_weights
        return cast(torch.Tensor, functional_call(self._step_module, weights, inputs))
