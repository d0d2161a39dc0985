"""What a step with replicas sends besides rows: weights to the places of replicas, and their gradients home.

Which experts have replicas where is in the plan. Weights travel in every forward and backward pass, before its rows, so
that a rank holds none of others between passes. Gradients of replicas have the dtype of those of the expert, whose rank
adds them up in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from symmoe import kernels
from symmoe.dispatch.plan import Plan
from symmoe.dispatch.trip import PHASE as DISPATCH
from symmoe.dispatch.trip import READY_W1, READY_W2
from symmoe.errors import ArgumentError
from symmoe.grouped.experts import CallExperts, ExpertWeights, Replicas
from symmoe.grouped.weights import Compute, Target
from symmoe.kernels import control
from symmoe.kernels.tensor_table import TensorTable
from symmoe.symm_mem.memory import Lease

_HOME = control.PHASE_REPLICAS_HOME


def replicas_problem(experts: CallExperts) -> ArgumentError | None:
    """Why these experts cannot have replicas, or None."""
    form, needs = experts.form, "balance ('replicas') needs experts"
    if form.precision is not None:
        return ArgumentError(f"{needs} with precision None; they have {form.precision}")
    if any(bias is not None for bias in experts.biases):
        return ArgumentError(f"{needs} without biases; they have bias=True")
    if form.split(experts.tensors)[2]:
        return ArgumentError(f"{needs} without adapters; they have some")
    if experts.linears[0].delay_wgrad or experts.linears[1].delay_wgrad:
        return ArgumentError(f"{needs} with delay_wgrad=False; they have delay_wgrad=True")
    if not all(form.are_packed):
        return ArgumentError(f"{needs} with weights='packed'; they have weights='discrete'")
    return None


def replica_bytes(weights: Sequence[torch.Tensor], num_places: int) -> int:
    """What a pass leases for replicas of experts with these packed weights: weights, and gradients, at most fp32."""
    return sum(num_places * weight[0].numel() * (weight.element_size() + 4) for weight in weights)


class ReplicaTrip:
    """What a pass with replicas sends: weights, as the rider of a dispatch, and gradients of replicas. Without places
    nothing. Collective; does not synchronise the host.

    Args:
        weights: of this rank's experts, packed.
        targets: of the gradients of W1 and of W2, which are computed on all ranks or on none.

    Attributes:
        weights: the same, with those of this rank's replicas.
    """

    def __init__(self, plan: Plan, weights: ExpertWeights, targets: tuple[Target, Target] | None = None) -> None:
        self.weights, self._plan, self._leases = weights, plan, list[Lease]()
        self._sums: dict[str, torch.Tensor] = {}  # what the gradients of replicas are added to
        if plan.num_places == 0:
            return
        w1, w2 = (self._lease(weight, weight.dtype) for weight in self._matrices)
        dw1, dw2 = (
            self._lease(weight, target.dtype_for(weight)) if target.computes else None
            for weight, target in zip(self._matrices, targets or (Target(), Target()), strict=True)
        )
        self.weights = replace(weights, replicas=Replicas(w1, w2, plan.replica_range, dw1, dw2))

    @property
    def rider(self) -> ReplicaTrip | None:
        """What a dispatch takes along."""
        return self if self._leases else None

    @property
    def offsets(self) -> tuple[int, int]:
        """Where this rank wants the weights."""
        return self._leases[0].offset, self._leases[1].offset

    def send(self, ready: torch.Tensor, *, num_ctas: int | None) -> None:
        """Sends weights of this rank's experts to their replicas."""
        w1, w2 = (weight.flatten(1) for weight in self._matrices)
        trip, push = (self._plan.place_to_expert, self._plan.heap.peers, ready), kernels.for_device(ready.device)
        push.push_replicas((w1, w2), *trip, columns=(READY_W1, READY_W2), num_ctas=num_ctas)

    @property
    def _matrices(self) -> list[torch.Tensor]:
        return [weight for weight in (self.weights.w1, self.weights.w2) if isinstance(weight, torch.Tensor)]  # both

    def _lease(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """For a weight of each place."""
        shape = self._plan.num_places, *weight.shape[1:]
        self._leases.append(self._plan.heap.lease(shape, dtype, name="replicas", phase=DISPATCH))
        return self._leases[-1].tensor

    def noting(self, name: str, compute: Compute) -> Compute:
        """The same as `compute`, of W1 or W2; :meth:`bring_home` adds to what that writes."""

        def noted(out: torch.Tensor | TensorTable, accumulate: bool) -> None:
            compute(out, accumulate)
            if self._leases:
                assert isinstance(out, torch.Tensor)  # replicas_problem
                self._sums[name] = out.flatten(1)

        return noted

    def bring_home(self) -> None:
        """Adds the gradients that replicas have made, all of which are launched, and ends the leases."""
        plan, heap, replicas = self._plan, self._plan.heap, self.weights.replicas
        if self._sums and replicas is not None:
            offsets = tuple(0 if dw is None else heap.offset_of(dw) for dw in (replicas.dw1, replicas.dw2))
            agreed = control.gradients_index(x="W1" in self._sums, probs="W2" in self._sums)
            ready = heap.barrier(_HOME, publish=offsets, plan=plan.generation, gradients=agreed)
            sums, places = (self._sums.get("W1"), self._sums.get("W2")), (plan.place_to_expert, plan.expert_to_place)
            add = kernels.for_device(heap.device).add_from_replicas
            add(sums, places, heap.peers, ready, columns=(0, 1))
            heap.barrier(_HOME, plan=plan.generation)  # until peers have read
        self.release()

    def release(self) -> None:
        """Ends the leases."""
        for lease in self._leases:
            lease.release()
        self._leases.clear()
