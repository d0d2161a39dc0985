"""Replicas of experts on less loaded ranks: their rows, weights and gradients.

Every rank has S places, each for a replica of one expert of another rank. A weight of one expert has M numbers.
"""

import torch

from symmoe.kernels import control
from symmoe.kernels.operands import Matrices, writes
from symmoe.kernels.twin.gemm import matrix, store_sum
from symmoe.kernels.twin.plan import PlanKernels, places_of_slots

Pair = tuple[Matrices | None, Matrices | None]  # of both layers, or of one layer


class ReplicaKernels:
    @staticmethod
    @writes("plan")
    def place_replicas(
        peers: control.Peers, plan: control.PlanIntegers, *, slack: int, num_near: int
    ) -> None:
        """Plans, from the count table and equally on every rank, which rows move from overloaded ranks to replicas on
        less loaded ranks. Rows stay in a node: every `num_near` consecutive ranks balance separately.

        The limit is (1000 + slack) / 1000 times the mean of the ranks' rows, rounded up. While the rank with the most
        rows exceeds the limit, it moves rows of its largest remaining expert to the rank with the fewest rows that has
        a free place. It moves the least of: its rows above the mean, the other rank's rows below the mean, the expert's
        rows. Ties go to the lowest number. A rank's rows first go to a copy on the same rank, as many as both counts
        allow; the rest is assigned in the order of source ranks and of the ranks with copies. There are at most R * S
        moves, and a rank exceeds the limit only if no remaining place could help. plan: gets expert_load,
        replica_to_expert, replica_rows, expert_to_place and copy_slots.
        """
        num_ranks, num_replica_slots = plan.replica_to_expert.shape
        num_experts, first = plan.expert_load.numel(), control.HEADER_WORDS
        counts = peers.count_table(peers.rank, peers.epoch)[
            :, first : first + num_experts
        ].long()  # [R, E]
        plan.expert_load.copy_(counts.sum(0))
        per_rank = num_experts // num_ranks
        left, rows = counts.sum(0).tolist(), counts.sum(0).view(num_ranks, -1).sum(1).tolist()
        moves, used = (
            torch.zeros((num_experts, num_ranks), dtype=torch.int64, device=counts.device),
            [0] * num_ranks,
        )
        plan.replica_to_expert.fill_(-1)
        plan.expert_to_place.fill_(-1)
        plan.replica_rows.zero_()
        for near in (range(first, first + num_near) for first in range(0, num_ranks, num_near)):
            total = sum(rows[near.start : near.stop])
            mean, limit = -(-total // num_near), -(-total * (1000 + slack) // (1000 * num_near))
            for _ in range(num_near * num_replica_slots):
                giver = max(near, key=rows.__getitem__)
                taker = min(near, key=lambda rank: (used[rank] == num_replica_slots, rows[rank]))
                expert = max(
                    range(num_experts),
                    key=lambda expert: (expert // per_rank == giver, left[expert]),
                )
                number = min(
                    rows[giver] - mean,
                    mean - rows[taker] if used[taker] < num_replica_slots else 0,
                    left[expert],
                )
                if rows[giver] <= limit or number <= 0:
                    break
                (
                    plan.replica_to_expert[taker, used[taker]],
                    plan.replica_rows[taker, used[taker]],
                ) = (
                    expert,
                    number,
                )
                plan.expert_to_place[expert, taker] = used[taker]
                moves[expert, taker] += number
                used[taker] += 1
                rows[giver], rows[taker], left[expert] = (
                    rows[giver] - number,
                    rows[taker] + number,
                    left[expert] - number,
                )
        experts = torch.arange(num_experts, device=counts.device)
        moves[experts, experts // per_rank] = torch.tensor(left, device=counts.device)
        own = peers.rank
        stay = counts.t().minimum(moves)  # [E, rank of a copy]
        rest, taken = counts.t() - stay, (moves - stay).cumsum(1)
        end = rest.cumsum(1)[:, own : own + 1]
        crossing = taken.minimum(end) - (taken - moves + stay).maximum(end - rest[:, own : own + 1])
        plan.copy_slots.copy_(crossing.clamp(min=0))
        plan.copy_slots[:, own] += stay[:, own].int()

    @staticmethod
    @writes("plan", "block_counts")
    def route_to_replicas(
        topk_idx: torch.Tensor,
        block_starts: torch.Tensor,
        plan: control.PlanIntegers,
        block_counts: torch.Tensor,
    ) -> None:
        """Assigns every slot to one of its expert's copies, this rank's first slots of an expert to the copy on the
        lowest rank, and counts the slots.

        Args:
            topk_idx, block_starts: as in count_slots, and block_counts after send_counts. plan: place_replicas' result;
            gets slot_to_copy, with an id past the last copy for an id out of range.
            block_counts: int32 [B, R * e + R + 2], gets count_slots' result for slot_to_copy.
        """
        (num_experts, num_ranks), num_local = plan.copy_slots.shape, plan.splits.numel()
        ids, per_rank = topk_idx.long(), num_experts // num_ranks
        valid = (ids >= 0) & (ids < num_experts)
        safe = ids.where(valid, 0).flatten()
        index = places_of_slots(safe, valid.flatten(), num_experts)
        ends, experts = plan.copy_slots.cumsum(1), torch.arange(num_experts, device=ids.device)
        copies = (
            num_local * torch.arange(num_ranks, device=ids.device) + per_rank + plan.expert_to_place
        )  # [E, R]
        copies[experts, experts // per_rank] = experts // per_rank * num_local + experts % per_rank
        which = (ends[safe] <= index[:, None]).sum(1).clamp(max=num_ranks - 1)
        found = copies[safe, which].view_as(ids).where(valid, -1)
        plan.slot_to_copy.copy_(
            found.where((ids >= -1) & (ids < num_experts), num_local * num_ranks)
        )
        PlanKernels.count_slots(
            plan.slot_to_copy, block_counts, num_experts=num_local * num_ranks, num_ranks=num_ranks
        )

    @staticmethod
    @writes("peers")
    def push_replicas(
        weights: Pair,
        replica_to_expert: torch.Tensor,
        peers: control.Peers,
        received: torch.Tensor,
        *,
        column: int,
        starts: tuple[int, int],
    ) -> None:
        """Writes the matrices of this rank's experts to the places with their replicas, unless the call has failed.

        weights: [E / R, ...], M numbers per expert, a multiple of 16 bytes. A rank's places [S, M] for a weight begin
        `starts` bytes after the offset received[., column].
        """
        for weight, start in _present(weights, starts, received):
            num_own, *shape = weight.shape
            for (rank, place), expert in _used(replica_to_expert, peers):
                if expert // num_own == peers.in_group(peers.rank):
                    places = peers.region(
                        rank, int(received[rank, column]) + start, (place + 1, *shape), weight.dtype
                    )
                    places[place] = matrix(weight, expert % num_own)

    @staticmethod
    @writes("gradients")
    def add_from_replicas(
        gradients: Pair,
        places: tuple[torch.Tensor, torch.Tensor],
        peers: control.Peers,
        received: torch.Tensor,
        *,
        column: int,
        starts: tuple[int, int],
    ) -> None:
        """Adds the replicas' gradients to this rank's gradients, in rank order, in fp32, rounded once; does nothing if
        the call has failed. An expert without replicas keeps its bits.

        gradients: gradients of push_replicas' weights. A rank's replica gradients, [S, M] in the same dtype, begin
        `starts` bytes after received[., column].
        places: replica_to_expert, expert_to_place.
        """
        for gradient, start in _present(gradients, starts, received):
            (num_own, *shape), sums = gradient.shape, dict[int, torch.Tensor]()
            for (rank, place), expert in _used(places[0], peers):
                if expert // num_own == peers.in_group(peers.rank):
                    theirs = peers.region(
                        rank,
                        int(received[rank, column]) + start,
                        (place + 1, *shape),
                        gradient.dtype,
                    )
                    g = expert % num_own
                    sums[g] = sums.get(g, matrix(gradient, g).float()) + theirs[place]
            for g, total in sums.items():
                store_sum(gradient, g, total, accumulate=False)


def _present(
    pair: Pair, starts: tuple[int, int], received: torch.Tensor
) -> list[tuple[Matrices, int]]:
    """The existing parts of the pair, with their starts; nothing if the call has failed."""
    if int(received.min()) < 0:
        return []
    return [(each, start) for each, start in zip(pair, starts, strict=True) if each is not None]


def _used(
    replica_to_expert: torch.Tensor, peers: control.Peers
) -> list[tuple[tuple[int, int], int]]:
    """((rank, place), expert) for the places with a replica, on the ranks of these peers."""
    places = replica_to_expert[peers.in_group(0) :][: peers.num_ranks]
    return [((int(r), int(p)), int(places[r, p])) for r, p in (places >= 0).nonzero()]
