"""Sends weights to the replica slots, and the gradients of replicas home, besides a step's rows.

The plan places the replicas and routes rows to them (kernels/twin/replicas.py). Weights, biases and adapters travel in
every forward and backward pass, so a rank keeps no other rank's tensors between passes. Gradients of replicas have the
dtype of the expert's gradients, and the expert's rank adds them in fp32.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from symmoe import kernels
from symmoe.dispatch.plan import Plan
from symmoe.dispatch.trip import PHASE as DISPATCH
from symmoe.dispatch.trip import READY_WEIGHTS
from symmoe.errors import ArgumentError
from symmoe.grouped.experts import FC1, FC2, W1, W2, ExpertTensors, ExpertWeights, Replicas
from symmoe.grouped.weights import Target
from symmoe.kernels import control
from symmoe.kernels.operands import Matrices
from symmoe.kernels.twin.replicas import Pair
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.symm_mem.memory import ALIGNMENT_BYTES, Lease, aligned

# Shape and dtype of a matrix in a replica slot; None for a kind that no expert has.
_MatrixSpec = tuple[Sequence[int], torch.dtype] | None


def replicas_problem(experts: ExpertTensors) -> ArgumentError | None:
    """The reason why these experts cannot have replicas, or None."""
    form = experts.form
    needs = "balance ('replicas') needs experts"
    if form.precision is not None:
        return ArgumentError(f"{needs} with precision None; they have {form.precision}")
    if experts.linears[0].delay_wgrad or experts.linears[1].delay_wgrad:
        return ArgumentError(f"{needs} with delay_wgrad=False; they have delay_wgrad=True")
    return None


def replica_bytes(experts: ExpertTensors, num_replica_slots: int) -> int:
    """The most bytes that a pass leases for one or more replica slots: experts' tensors, and gradients up to fp32."""
    tensors = [tensor for tensor in (*experts.biases, *experts.tensors) if tensor is not None]
    num_bytes = (
        sum(tensor.numel() * (tensor.element_size() + 4) for tensor in tensors)
        // experts.form.num_groups
    )
    return num_replica_slots * num_bytes + 2 * len(control.REPLICA_MATRICES) * ALIGNMENT_BYTES


class _ReplicaSlots:
    """A lease with a matrix for each replica slot, of each kind with a spec; no lease if no kind has one. tensors: by
    kind, [S, *shape], or None. starts: by kind, the byte offset in the lease. lease: an existing lease; None: a new
    one."""

    def __init__(
        self,
        heap: SymmetricHeap,
        num_replica_slots: int,
        specs: Sequence[_MatrixSpec],
        lease: Lease | None = None,
    ) -> None:
        sizes = [
            0 if spec is None else num_replica_slots * math.prod(spec[0]) * spec[1].itemsize
            for spec in specs
        ]
        *self.starts, num_bytes = itertools.accumulate(map(aligned, sizes), initial=0)
        self.tensors: list[torch.Tensor | None] = [None] * len(sizes)
        if lease is None and num_bytes:
            lease = heap.lease((num_bytes,), torch.uint8, name="replicas", phase=DISPATCH)
        self.lease = lease
        for kind, spec in enumerate(specs):
            if self.lease is not None and spec is not None:
                memory = self.lease.tensor[self.starts[kind] :][: sizes[kind]].view(spec[1])
                self.tensors[kind] = memory.view(num_replica_slots, *spec[0])


class ReplicaTrip:
    """Sends weights, as extra payload of a pass's first dispatch, and gradients of replicas. Without replica slots it
    sends nothing. Collective; does not synchronise the host. targets: in backward, the targets of both layers' weight
    gradients. lease: the weights' lease, if they have arrived. Attributes: agreed, the values on which ranks must
    agree, since a rank lays out its replica slots by its own experts; and weights_offset, where this rank receives the
    weights."""

    def __init__(
        self,
        plan: Plan,
        weights: ExpertWeights,
        targets: tuple[Target, Target] | None = None,
        lease: Lease | None = None,
    ) -> None:
        self._weights = weights
        self._matrices = weights.matrices
        self._plan = plan
        self._is_sent = not plan.num_replica_slots or lease is not None
        specs = tuple(
            None if matrices is None else (matrices.shape[1:], matrices.dtype)
            for matrices in (self._matrices if plan.num_replica_slots else ())
        )
        self._replica_slots = _ReplicaSlots(plan.heap, plan.num_replica_slots, specs, lease)
        self.weights_offset = 0 if self.lease is None else self.lease.offset
        gradient_specs = (
            _gradient_specs(self._matrices, targets) if targets and plan.num_replica_slots else ()
        )
        self._gradients = _ReplicaSlots(plan.heap, plan.num_replica_slots, gradient_specs)
        self.agreed: Mapping[str, object] = (
            _descriptions("", specs) | _descriptions("gradient of ", gradient_specs)
            if plan.num_replica_slots
            else {}
        )
        if plan.num_replica_slots:
            replica_slots = replace(
                weights.of_matrices(self._replica_slots.tensors), gradients=self._gradients.tensors
            )
            self._weights = replace(
                weights, replicas=Replicas(replica_slots, plan.replica_ranges[0])
            )

    @property
    def lease(self) -> Lease | None:
        """The lease of the weights of replicas."""
        return self._replica_slots.lease

    @property
    def weights(self) -> ExpertWeights:
        """The weights of this rank's experts and of its replicas. Available in the context of the dispatch that carries
        the latter: from the parts of replicas on, or without parts from the start."""
        assert self._is_sent, "the weights of replicas have not been sent"
        return self._weights

    @property
    def extra_payload(self) -> ReplicaTrip | None:
        """The payload of the next dispatch besides rows."""
        return None if self._is_sent else self

    def send(self, ready: torch.Tensor) -> None:
        """Sends the tensors that replicas of this rank's experts need."""
        for pair, starts in self._pairs(self._matrices, self._replica_slots):
            kernels.for_device(ready.device).push_replicas(
                pair,
                self._plan.replica_to_expert,
                self._plan.heap.peers,
                ready,
                column=READY_WEIGHTS,
                starts=starts,
            )
        self._is_sent = True

    def finish(self, gradients: Sequence[Matrices | None] = ()) -> None:
        """Adds the gradients of replicas to these of this rank's experts, by kind, and ends the leases. All work is
        launched."""
        heap = self._plan.heap
        generation = self._plan.generation
        if (lease := self._gradients.lease) is not None:
            ready = heap.barrier(
                control.PHASE_REPLICAS_HOME, publish=(lease.offset,), plan=generation
            )
            replica_slots = self._plan.replica_to_expert, self._plan.expert_to_replica_slot
            for pair, starts in self._pairs(gradients, self._gradients):
                kernels.for_device(heap.device).add_from_replicas(
                    pair, replica_slots, heap.peers, ready, column=0, starts=starts
                )
            heap.barrier(control.PHASE_REPLICAS_HOME, plan=generation)  # until peers have read
        for lease in (self._replica_slots.lease, self._gradients.lease):
            if lease is not None:
                lease.release()

    @staticmethod
    def _pairs(
        matrices: Sequence[Matrices | None], replica_slots: _ReplicaSlots
    ) -> Iterator[tuple[Pair, tuple[int, int]]]:
        """For each existing kind, both layers' matrices and where the replica slots' matrices begin. Weights travel by
        these pairs, and gradients home."""
        for fc1, fc2 in zip(range(FC1.start, FC1.stop), range(FC2.start, FC2.stop), strict=True):
            if matrices[fc1] is not None or matrices[fc2] is not None:
                yield (
                    (matrices[fc1], matrices[fc2]),
                    (replica_slots.starts[fc1], replica_slots.starts[fc2]),
                )


@functools.lru_cache(maxsize=256)
def _descriptions(prefix: str, specs: tuple[_MatrixSpec, ...]) -> dict[str, object]:
    """A description of the matrix of each kind."""
    return {
        prefix + kind: None if spec is None else f"{spec[1]} {list(spec[0])}"
        for kind, spec in zip(control.REPLICA_MATRICES, specs, strict=False)
    }


def _gradient_specs(
    matrices_by_kind: Sequence[Matrices | None], targets: tuple[Target, Target]
) -> tuple[_MatrixSpec, ...]:
    """By kind, the gradients of replicas: of the kinds whose gradients backward computes for this rank's experts."""
    specs: list[_MatrixSpec] = [
        (matrices.shape[1:], matrices.dtype)
        if isinstance(matrices, torch.Tensor) and matrices.requires_grad
        else None
        for matrices in matrices_by_kind
    ]
    for kind, target in zip((W1, W2), targets, strict=True):
        weight = matrices_by_kind[kind]
        assert weight is not None
        like = target.tensors[0] if target.tensors else weight
        specs[kind] = (weight.shape[1:], like.dtype) if target.computes else None
    return tuple(specs)
