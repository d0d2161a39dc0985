"""The plans of the tokens inside a node: a rank's own, and those that the ranks of its rail have sent it.

Everything inside a node works with them as with the plan of a group that is on one node. Row numbers are those of the
plan over all ranks, so rows are ordered expert, source rank, token, k, and packed rows source rank, token, where a
source is a rank of any node.

Foreign tokens come last, all at once. Rows that have an order have those of all ranks before this node next to each
other, and those of all ranks after it. So two sources stand for all others: the first rank of the group and the last.
"""

from __future__ import annotations

from dataclasses import fields

import torch

from symmoe import kernels
from symmoe.dispatch.crossing import Crossing
from symmoe.dispatch.maps import Across, Plan, Region
from symmoe.kernels import control

_TOP_K_BITS = 8


class NodePlan(Plan):
    """A plan of T tokens inside a node of R ranks; see Plan. Its maps have a line for each of these tokens, and name
    ranks of the node."""

    @property
    def arrivals(self) -> list[int]:
        """See Plan: the ranks of this node, then those that stand for ranks before it and after it."""
        ranks, first = self.heap.topology.ranks, self.heap.topology.local_rank
        around = [ranks[(first - step) % len(ranks)] for step in range(len(ranks))]
        return around + [end for end in (0, self.heap.num_ranks - 1) if end not in ranks]


def plan_inside(plan: Plan, crossing: Crossing, rail_capacity: int) -> Across:
    """The plans of the tokens inside the node, of which the ranks of the rail send each other the maps.

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
    foreign = maps[node].new_full((crossing.num_foreign, maps[node].shape[1]), -1)
    received_regions = [torch.zeros_like(region) for region in regions]
    sizes = rail_capacity << _TOP_K_BITS | plan.top_k
    receives = [crossing.by_node(foreign), received_regions]
    heap.exchange([sends, regions], receives, control.PHASE_NODES_PLAN, sizes=sizes)
    heap.barrier(control.PHASE_NODES_PLAN)  # an error that one rail has learnt of reaches the others' ranks here

    made = _node_plan(plan, maps[node]), _node_plan(plan, foreign)
    own_rows = _split_by_arrival(plan, made) if heap.topology.is_in_order else None
    vars(made[0])["regions"] = (_region(made[0], None, regions[node]),)
    vars(made[1])["regions"] = tuple(
        _region(made[1], slice(first, end), region)
        for (first, end), region in zip(crossing.foreign_ranges, received_regions, strict=True)
        if end > first
    )
    return Across(crossing, *made, own_rows)


def _node_plan(plan: Plan, maps: torch.Tensor) -> NodePlan:
    """The plan of tokens with these maps, int32 [T, 2 K + 2 G]."""
    widths = plan.top_k, plan.top_k, *[len(plan.heap.topology.ranks)] * 2
    made = NodePlan(**{field.name: getattr(plan, field.name) for field in fields(Plan)})
    made.num_tokens = len(maps)
    # Found before the views of the storage, which are of the plan over all ranks.
    names = "slot_to_row", "slot_to_rank", "token_to_packed_row", "token_to_primary_row"
    vars(made).update(zip(names, (part.contiguous() for part in maps.split(widths, 1)), strict=True))
    return made


def _split_by_arrival(plan: Plan, made: tuple[NodePlan, NodePlan]) -> torch.Tensor:
    """Has both plans say which rows and packed rows come with each of their sources; Across.own_rows."""
    topology, num_ranks, ops = plan.heap.topology, plan.heap.num_ranks, kernels.for_device(plan.heap.device)
    first, end = topology.ranks[0], topology.ranks[-1] + 1
    row_start, packed_start = plan.source_to_row_start, plan.source_to_packed_start.clone()
    bounds = sorted({0, first, end, num_ranks})
    of_runs = plan.source_to_rows.new_empty((len(bounds) - 1, *plan.source_to_rows.shape[1:]))
    starts = torch.stack([row_start[bound] for bound in bounds])
    ops.split_by_source(starts, of_runs, rank=bounds.index(first))
    own_rows = of_runs[bounds.index(first)]
    rows = torch.zeros_like(plan.source_to_rows)
    starts = row_start[first : end + 1].clamp(*own_rows)
    ops.split_by_source(starts, rows[first:end], rank=topology.local_rank)
    if first > 0:
        rows[0], packed_start[1:first] = of_runs[0], plan.source_to_packed_start[first]
    if end < num_ranks:
        rows[-1], packed_start[end:num_ranks] = of_runs[-1], plan.source_to_packed_start[end]
    for each in made:
        vars(each).update(source_to_rows=rows, source_to_packed_start=packed_start)
    return own_rows


def _region(plan: NodePlan, tokens: slice | None, starts_and_limits: torch.Tensor) -> Region:
    """Of the tokens that are from one rank. starts_and_limits: int32 [2, G]."""
    which = slice(None) if tokens is None else tokens
    slots = plan.slot_to_row[which], plan.slot_to_rank[which]
    to_packed_row, (start, limit) = plan.token_to_packed_row[which], starts_and_limits
    block_tokens = (to_packed_row >= 0).sum(0, dtype=torch.int32)[None]
    return Region(tokens, *slots, to_packed_row, block_tokens, start, limit)


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
