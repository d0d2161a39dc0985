"""Replicas of experts on less loaded ranks: their rows, weights and gradients.

Every rank has S replica slots, each for a replica of one expert of another rank. A weight of one expert has M numbers.
"""

import torch

from symmoe.kernels import control
from symmoe.kernels.operands import Matrices, writes
from symmoe.kernels.twin.gemm import matrix, store_sum
from symmoe.kernels.twin.plan import PlanKernels, positions_of_slots

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
        rows exceeds the limit, that rank moves rows of its largest remaining expert to the rank with the fewest rows
        that has a free replica slot. The number of moved rows is the least of: the first rank's rows above the mean,
        the second rank's rows below the mean, the expert's rows. Ties go to the lowest number. A rank's rows first go
        to a copy on the same rank, as many as both counts allow; the rest is assigned in the order of source ranks and
        of the ranks with copies. There are at most R * S moves, and a rank exceeds the limit only if no remaining
        replica slot could help. plan: gets expert_load, replica_to_expert, replica_rows, expert_to_replica_slot and
        copy_slots.
        """
        num_ranks, num_replica_slots = plan.replica_to_expert.shape
        num_experts, first = plan.expert_load.numel(), control.HEADER_WORDS
        counts_RE = peers.count_table(peers.rank, peers.epoch)[
            :, first : first + num_experts
        ].long()  # [R, E]
        plan.expert_load.copy_(counts_RE.sum(0))
        per_rank = num_experts // num_ranks
        remaining, rows = (
            counts_RE.sum(0).tolist(),
            counts_RE.sum(0).view(num_ranks, -1).sum(1).tolist(),
        )
        moves_ER, used = (
            torch.zeros((num_experts, num_ranks), dtype=torch.int64, device=counts_RE.device),
            [0] * num_ranks,
        )
        plan.replica_to_expert.fill_(-1)
        plan.expert_to_replica_slot.fill_(-1)
        plan.replica_rows.zero_()
        for near in (range(first, first + num_near) for first in range(0, num_ranks, num_near)):
            total = sum(rows[near.start : near.stop])
            mean, limit = -(-total // num_near), -(-total * (1000 + slack) // (1000 * num_near))
            for _ in range(num_near * num_replica_slots):
                giver = max(near, key=rows.__getitem__)
                taker = min(near, key=lambda rank: (used[rank] == num_replica_slots, rows[rank]))
                expert = max(
                    range(num_experts),
                    key=lambda expert: (expert // per_rank == giver, remaining[expert]),
                )
                number = min(
                    rows[giver] - mean,
                    mean - rows[taker] if used[taker] < num_replica_slots else 0,
                    remaining[expert],
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
                plan.expert_to_replica_slot[expert, taker] = used[taker]
                moves_ER[expert, taker] += number
                used[taker] += 1
                rows[giver], rows[taker], remaining[expert] = (
                    rows[giver] - number,
                    rows[taker] + number,
                    remaining[expert] - number,
                )
        expert_E = torch.arange(num_experts, device=counts_RE.device)
        moves_ER[expert_E, expert_E // per_rank] = torch.tensor(remaining, device=counts_RE.device)
        own_rank = peers.rank
        stay_ER = counts_RE.t().minimum(moves_ER)  # [E, rank of a copy]
        surplus_ER, deficit_end_ER = counts_RE.t() - stay_ER, (moves_ER - stay_ER).cumsum(1)
        end_E1 = surplus_ER.cumsum(1)[:, own_rank : own_rank + 1]
        begin_E1 = end_E1 - surplus_ER[:, own_rank : own_rank + 1]
        crossing_ER = deficit_end_ER.minimum(end_E1) - (
            deficit_end_ER - moves_ER + stay_ER
        ).maximum(begin_E1)
        plan.copy_slots.copy_(crossing_ER.clamp(min=0))
        plan.copy_slots[:, own_rank] += stay_ER[:, own_rank].int()

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
        ids_TK, per_rank = topk_idx.long(), num_experts // num_ranks
        is_valid_TK = (ids_TK >= 0) & (ids_TK < num_experts)
        expert_TK = ids_TK.where(is_valid_TK, 0)
        position_TK = positions_of_slots(expert_TK, is_valid_TK, num_experts)
        end_ER = plan.copy_slots.cumsum(1)
        rank_R = torch.arange(num_ranks, device=ids_TK.device)
        copy_ER = num_local * rank_R + per_rank + plan.expert_to_replica_slot
        expert_E = torch.arange(num_experts, device=ids_TK.device)
        home_E = expert_E // per_rank
        copy_ER[expert_E, home_E] = home_E * num_local + expert_E % per_rank
        is_full_TKR = end_ER[expert_TK] <= position_TK[:, :, None]
        rank_TK = is_full_TKR.sum(2).clamp(max=num_ranks - 1)
        copy_TK = copy_ER[expert_TK, rank_TK].where(is_valid_TK, -1)
        is_in_range_TK = (ids_TK >= -1) & (ids_TK < num_experts)
        plan.slot_to_copy.copy_(copy_TK.where(is_in_range_TK, num_local * num_ranks))
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
        """Writes the matrices of this rank's experts to their replica slots on other ranks, unless the call has failed.

        weights: [E / R, ...], M numbers per expert, a multiple of 16 bytes. A rank's replica slots [S, M] for a weight
        begin `starts` bytes after the offset received[., column].
        """
        for weight, start in _present(weights, starts, received):
            num_own, *shape = weight.shape
            for (rank, replica_slot), expert in _used(replica_to_expert, peers):
                if expert // num_own == peers.in_group(peers.rank):
                    replica_slots = peers.region(
                        rank,
                        int(received[rank, column]) + start,
                        (replica_slot + 1, *shape),
                        weight.dtype,
                    )
                    replica_slots[replica_slot] = matrix(weight, expert % num_own)

    @staticmethod
    @writes("gradients")
    def add_from_replicas(
        gradients: Pair,
        replica_slots: tuple[torch.Tensor, torch.Tensor],
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
        replica_slots: replica_to_expert, expert_to_replica_slot.
        """
        for gradient, start in _present(gradients, starts, received):
            (num_own, *shape), sums = gradient.shape, dict[int, torch.Tensor]()
            for (rank, replica_slot), expert in _used(replica_slots[0], peers):
                if expert // num_own == peers.in_group(peers.rank):
                    replicas = peers.region(
                        rank,
                        int(received[rank, column]) + start,
                        (replica_slot + 1, *shape),
                        gradient.dtype,
                    )
                    g = expert % num_own
                    sums[g] = sums.get(g, matrix(gradient, g).float()) + replicas[replica_slot]
            for g, total in sums.items():
                store_sum(gradient, g, total, accumulate=False)


def _present(
    pair: Pair, starts: tuple[int, int], received: torch.Tensor
) -> list[tuple[Matrices, int]]:
    """The existing parts of the pair, with their starts; nothing if the call has failed."""
    if int(received.min()) < 0:
        return []
    return [
        (tensor, start) for tensor, start in zip(pair, starts, strict=True) if tensor is not None
    ]


def _used(
    replica_to_expert: torch.Tensor, peers: control.Peers
) -> list[tuple[tuple[int, int], int]]:
    """((rank, replica_slot), expert) for the replica slots with a replica, on the ranks of these peers."""
    replica_slots = replica_to_expert[peers.in_group(0) :][: peers.num_ranks]
    return [((int(r), int(s)), int(replica_slots[r, s])) for r, s in (replica_slots >= 0).nonzero()]
