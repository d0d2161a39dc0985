"""Replicas of experts on ranks that have less to do: which rows they get, their weights, and gradients of these.

Every rank has S places, each for a replica of one expert of another rank. M numbers of a weight of one expert.
"""

from typing import Protocol

from torch import Tensor

from symmoe.kernels.contract.operands import Matrices, writes
from symmoe.kernels.control import Peers, PlanIntegers

Pair = tuple[Matrices | None, Matrices | None]  # of both layers, or of one


class ReplicaKernels(Protocol):
    @writes("plan")
    def place_replicas(
        self, peers: Peers, plan: PlanIntegers, *, slack: int, num_near: int
    ) -> None:
        """Moves rows of ranks that have too many to replicas on ranks that have less, from the count table, the same
        way on every rank. Rows stay in a node: each `num_near` ranks that follow each other are for themselves.

        Too many are more than (1000 + slack) / 1000 times the mean of the ranks' rows, rounded up, the limit. While the
        rank with most rows has too many, it gives some of the expert that has most left there to the rank that has
        least and a place: as many as the first is above the mean, the second below it, or the expert has. Of equal ones
        the lowest number counts. Rows stay where their tokens are as far as both go there; other rows are given out in
        the order of source ranks and of the ranks with copies. So there are at most R * S moves, and a rank stays above
        the limit only if no place is left that could help. plan: gets expert_load, place_to_expert, place_rows,
        expert_to_place and copy_slots.
        """

    @writes("plan", "block_counts")
    def choose_copies(
        self, topk_idx: Tensor, block_starts: Tensor, plan: PlanIntegers, block_counts: Tensor
    ) -> None:
        """Gives every slot one of its expert's copies: this rank's first slots of an expert to that on the lowest rank.
        And counts them.

        Args:
            topk_idx, block_starts: that of count_slots, and the block_counts that send_counts leaves.
            plan: that of place_replicas; gets slot_to_copy, with an id past the last copy for one that is out of range.
            block_counts: int32 [B, R * e + R + 2], gets what count_slots makes of slot_to_copy.
        """

    @writes("peers")
    def push_replicas(
        self,
        weights: Pair,
        place_to_expert: Tensor,
        peers: Peers,
        received: Tensor,
        *,
        column: int,
        starts: tuple[int, int],
    ) -> None:
        """Writes the matrices of this rank's experts to the places that have replicas of them, unless the call has
        failed.

        weights: [E / R, ...], M numbers of each expert, a multiple of 16 bytes. A rank's places [S, M] for them begin
        `starts` bytes after the offset received[., column].
        """

    @writes("gradients")
    def add_from_replicas(
        self,
        gradients: Pair,
        places: tuple[Tensor, Tensor],
        peers: Peers,
        received: Tensor,
        *,
        column: int,
        starts: tuple[int, int],
    ) -> None:
        """Adds to this rank's gradients those that replicas have made, in the order of ranks, in fp32, rounded once;
        nothing if the call has failed. An expert without replicas keeps its bits.

        gradients: of the weights of push_replicas. Those that a rank has made of replicas, [S, M] of the same dtype,
        begin `starts` bytes after received[., column].
        places: place_to_expert, expert_to_place.
        """
