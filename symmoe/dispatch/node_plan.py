"""The plan of the tokens inside a node: a rank's own, and those that the ranks of its rail have sent it.

Everything inside a node works with it as with the plan of a group that is on one node. Row numbers are those of the
plan over all ranks, so rows are ordered expert, source rank, token, k, and packed rows source rank, token, where a
source is a rank of any node.
"""

from __future__ import annotations

from dataclasses import fields

import torch

from symmoe.dispatch.crossing import Crossing
from symmoe.dispatch.maps import Plan, Region
from symmoe.kernels import control

_TOP_K_BITS = 8


class NodePlan(Plan):
    """A plan of T tokens inside a node of R ranks; see Plan. Its maps have a line for each token inside, and name ranks
    of the node."""

    @property
    def own_source(self) -> int:
        """See Plan. source_to_packed_start is [0, 0, P] here: no packed rows, since a rank's own are not together."""
        return 0


def plan_inside(plan: Plan, crossing: Crossing, rail_capacity: int) -> NodePlan:
    """The plan of the tokens inside the node, of which the ranks of the rail send each other the maps.

    Collective over the group; does not synchronise the host.

    rail_capacity: of a static capacity; 0: messages have the sizes that all ranks have read.
    """
    heap, node = plan.heap, plan.heap.topology.node
    rank_maps = heap.rank_maps
    maps = [_maps_of_node(plan, *of_node) for of_node in zip(rank_maps.ranks, rank_maps.to_local, strict=True)]
    starts_and_limits = torch.stack([plan.packed_start, plan.packed_limit])
    regions = [starts_and_limits.index_select(1, ranks) for ranks in rank_maps.ranks]  # int32 [2, G]
    sends = [_rows_or_none(of_node, index) for of_node, index in zip(maps, crossing.rail_row_to_token, strict=True)]
    # In place of what does not come: nothing.
    received = [maps[node].new_full((num_rows, maps[node].shape[1]), -1) for num_rows in crossing.num_received]
    received_regions = [torch.zeros_like(region) for region in regions]
    sizes = rail_capacity << _TOP_K_BITS | plan.top_k
    heap.exchange([sends, regions], [received, received_regions], control.PHASE_NODES_PLAN, sizes=sizes)
    heap.barrier(control.PHASE_NODES_PLAN)  # an error that one rail has learnt of reaches the others' ranks here

    widths = plan.top_k, plan.top_k, *[len(heap.topology.ranks)] * 2
    slot_to_row, slot_to_rank, to_packed_row, to_primary_row = torch.cat([maps[node], *received]).split(widths, 1)
    made = NodePlan(**{field.name: getattr(plan, field.name) for field in fields(Plan)})
    made.num_tokens = crossing.num_inside
    # Found before the views of the storage, which are of the plan over all ranks.
    vars(made).update(
        slot_to_row=slot_to_row.contiguous(),
        slot_to_rank=slot_to_rank.contiguous(),
        token_to_packed_row=to_packed_row.contiguous(),
        token_to_primary_row=to_primary_row.contiguous(),
        source_to_packed_start=torch.cat([plan.num_packed.new_zeros(2), plan.num_packed]),
    )
    received_regions[node] = regions[node]
    vars(made)["regions"] = _regions_inside(made, crossing, received_regions)
    return made


def _regions_inside(plan: NodePlan, crossing: Crossing, starts_and_limits: list[torch.Tensor]) -> tuple[Region, ...]:
    """Of each node's tokens. starts_and_limits: by node, int32 [2, G]."""
    regions = []
    for (first, end), of_node in zip(crossing.ranges, starts_and_limits, strict=True):
        if end > first:
            tokens = slice(first, end)
            slots = plan.slot_to_row[tokens], plan.slot_to_rank[tokens]
            to_packed_row, (start, limit) = plan.token_to_packed_row[tokens], of_node
            block_tokens = (to_packed_row >= 0).sum(0, dtype=torch.int32)[None]
            regions.append(Region(tokens, *slots, to_packed_row, block_tokens, start, limit))
    return tuple(regions)


def _rows_or_none(maps: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """These lines of maps; -1 where the index is."""
    if not len(maps):
        return maps.new_full((index.numel(), maps.shape[1]), -1)
    return maps.index_select(0, index.clamp(min=0)).masked_fill((index < 0)[:, None], -1)


def _maps_of_node(plan: Plan, ranks: torch.Tensor, to_local: torch.Tensor) -> torch.Tensor:
    """int32 [T, 2 K + 2 G]: slot_to_row, slot_to_rank, token_to_packed_row and token_to_primary_row, as far as they are
    about these ranks, which are numbered from 0. ranks, to_local: of RankMaps."""
    slot_to_rank = to_local[plan.slot_to_rank.long()]
    slot_to_row = plan.slot_to_row.where(slot_to_rank >= 0, -1)
    to_rows = (rows.index_select(1, ranks) for rows in (plan.token_to_packed_row, plan.token_to_primary_row))
    return torch.cat([slot_to_row, slot_to_rank, *to_rows], 1)
