"""Replicas of experts on ranks that have less to do: which rows they get, their weights, and gradients of these.

Every rank has S places, each for a replica of one expert of another rank. M numbers of a weight of one expert.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from symmoe.kernels.control import Peers, PlanIntegers


class ReplicaKernels(Protocol):
    def place_replicas(self, peers: Peers, plan: PlanIntegers, *, slack: int) -> None:
        """Moves rows of ranks that have more than the limit to replicas on ranks that have less, from the count table,
        the same way on every rank.

        The limit is (1000 + slack) / 1000 times the mean of the ranks' rows, rounded up. As often as there are places
        the rank that is most above it gives rows of the expert that has most left there to the rank that is most below
        it and has a place: as many as the first has too many, the second too few, or the expert has. Of equal ones the
        lowest number counts. Rows stay where their tokens are as far as both go there; other rows are given out in the
        order of source ranks and of the ranks with copies. So there are at most R * S moves, and a rank stays above the
        limit only if no place is left that could help.

        Args:
            plan: gets expert_load, place_to_expert, place_rows, expert_to_place and copy_slots.
        """

    def choose_copies(self, topk_idx: Tensor, block_starts: Tensor, plan: PlanIntegers) -> None:
        """Gives every slot one of its expert's copies: this rank's first slots of an expert to that on the lowest rank.

        Args:
            topk_idx, block_starts: that of count_slots, and the block_counts that send_counts leaves.
            plan: that of place_replicas; gets slot_to_copy, with an id past the last copy for one that is out of range.
        """

    def push_replicas(
        self, weight: Tensor, place_to_expert: Tensor, peers: Peers, received: Tensor, *, column: int
    ) -> None:
        """Writes this rank's experts to the places that have a replica of them, unless the call has failed.

        weight: [E / R, M], rows of a multiple of 16 bytes. A rank's places [S, M] are at offset received[., column].
        """

    def add_from_replicas(
        self, gradient: Tensor, places: tuple[Tensor, Tensor], peers: Peers, received: Tensor, *, column: int
    ) -> None:
        """Adds to this rank's gradients those that replicas have made, in the order of ranks, in fp32, rounded once;
        nothing if the call has failed. An expert without replicas keeps its bits.

        gradient: [E / R, M], of a multiple of 16 bytes. A rank's gradients, fp32 [S, M], are at received[., column].
        places: place_to_expert, expert_to_place.
        """
