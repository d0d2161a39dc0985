"""What a step with replicas sends besides rows: weights to the places of replicas, and their gradients home.

Which experts have replicas where is in the plan. Weights travel in every forward and backward pass, before its rows, so
that a rank holds none of others between passes. Gradients of replicas are made in fp32 and added by the expert's rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from symmoe import kernels
from symmoe.dispatch.plan import Plan
from symmoe.errors import ArgumentError
from symmoe.grouped.experts import CallExperts, ExpertWeights, Replicas
from symmoe.grouped.weights import Compute
from symmoe.kernels import control
from symmoe.kernels.tensor_table import TensorTable
from symmoe.symm_mem.memory import Lease

_OUT, _HOME = control.PHASE_REPLICAS_OUT, control.PHASE_REPLICAS_HOME


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


def replica_bytes(plan: Plan, experts: CallExperts) -> int:
    """What a pass leases for replicas at most: weights, and their gradients in fp32."""
    numel = sum(weight[0].numel() for weight in experts.tensors)
    return plan.num_places * numel * (experts.tensors[0].element_size() + 4)


class ReplicaTrip:
    """What a pass with replicas sends: from its construction on weights, which are there when the rows of the next
    dispatch are; then gradients. Without places it does nothing. Collective; does not synchronise the host.

    Args:
        weights: of this rank's experts, packed.
        wants: whether gradients of W1 and of W2 are made, the same on all ranks.

    Attributes:
        weights: the same, with those of this rank's replicas.
    """

    def __init__(self, plan: Plan, weights: ExpertWeights, wants: tuple[bool, bool] = (False, False)) -> None:
        self.weights, self._plan, self._leases = weights, plan, list[Lease]()
        self._sums: dict[int, torch.Tensor] = {}  # by column of HOME, what the gradients of replicas are added to
        if plan.num_places == 0:
            return
        heap, matrices = plan.heap, [w for w in (weights.w1, weights.w2) if isinstance(w, torch.Tensor)]  # both
        ops = kernels.for_device(heap.device)
        w1, w2 = (self._lease(weight, weight.dtype) for weight in matrices)
        agreed: control.CallFields = {
            "hidden": w1.shape[2],
            "dtype": control.DTYPES.index(w1.dtype),
            "gradients": control.gradients_index(x=wants[0], probs=wants[1]),
            "plan": plan.generation,
        }
        ready = heap.barrier(_OUT, publish=(self._leases[0].offset, self._leases[1].offset), **agreed)
        for column, weight in enumerate(matrices):
            ops.push_replicas(weight.flatten(1), plan.place_to_expert, heap.peers, ready, column=column)
        dw1, dw2 = (
            self._lease(w, torch.float32) if wanted else None for w, wanted in zip(matrices, wants, strict=True)
        )
        self.weights = replace(weights, replicas=Replicas(w1, w2, plan.replica_range, dw1, dw2))

    def _lease(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """For a weight of each place."""
        shape = self._plan.num_places, *weight.shape[1:]
        self._leases.append(self._plan.heap.lease(shape, dtype, name="replicas", phase=_OUT))
        return self._leases[-1].tensor

    def noting(self, compute: Compute) -> Compute:
        """The same as `compute`, first of W2 and then of W1; :meth:`bring_home` adds to what that writes."""

        def noted(out: torch.Tensor | TensorTable, accumulate: bool) -> None:
            compute(out, accumulate)
            if self._leases:
                assert isinstance(out, torch.Tensor)  # replicas_problem
                self._sums[len(self._sums)] = out

        return noted

    def bring_home(self) -> None:
        """Adds the gradients that replicas have made, all of which are launched, and ends the leases."""
        plan, heap, made = self._plan, self._plan.heap, self._leases[2:]
        if self._sums:
            offsets = tuple(lease.offset for lease in made[::-1])
            ready = heap.barrier(_HOME, publish=offsets, plan=plan.generation)
            places = plan.place_to_expert, plan.expert_to_place
            add = kernels.for_device(heap.device).add_from_replicas
            for column, gradient in self._sums.items():
                add(gradient.flatten(1), places, heap.peers, ready, column=column)
            heap.barrier(_HOME, plan=plan.generation)  # until peers have read
        self.release()

    def release(self) -> None:
        """Ends the leases."""
        for lease in self._leases:
            lease.release()
        self._leases.clear()
