"""The plans of the tokens inside a node: a rank's own, and those that the ranks of its rail have sent it.

Everything inside a node works with them as with the plan of a group that is on one node. Row numbers are those of the
plan over all ranks, so rows are ordered expert, source rank, token, k, and packed rows source rank, token, where a
source is a rank of any node.

Foreign tokens come last, all at once. Rows that have an order have those of all ranks before this node next to each
other, and those of all ranks after it. So two sources stand for all others: the first rank of the group and the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch

from symmoe import kernels
from symmoe.dispatch.crossing import Crossing
from symmoe.dispatch.maps import Across, Plan, Region
from symmoe.kernels import control
from symmoe.symm_mem.heap import nodes_of

_TOP_K_BITS = 8
_ALIGNED_ROWS = 4  # of int32, however many columns


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
    """The plans of the tokens inside the node, of which the ranks of the rail send each other the maps: lines of the
    plan's, with all slots of a token, and where it is on the ranks of the node it goes to.

    Collective over the group; does not synchronise the host.

    rail_capacity: of a static capacity; 0: messages have the sizes that all ranks have read.
    """
    heap, node, maps = plan.heap, plan.heap.topology.node, nodes_of(plan.heap).maps
    slots = torch.cat([plan.slot_to_row, plan.slot_to_rank], 1)
    to_rows = (each[:, maps.by_node] for each in (plan.token_to_packed_row, plan.token_to_primary_row))
    on_nodes = torch.cat(list(to_rows), 2)  # [T, N, 2 G]
    away = torch.cat([crossing.away_rows(slots), crossing.away_rows_of_nodes(on_nodes)], 1)
    away.masked_fill_((crossing.away_row_to_token < 0)[:, None], -1)
    regions = torch.stack([plan.packed_start, plan.packed_limit])[:, maps.by_node].transpose(0, 1).contiguous()

    # This rank's own tokens, then the foreign ones, which begin at 16 bytes. In place of what does not come: nothing.
    first_foreign = -(-plan.num_tokens // _ALIGNED_ROWS) * _ALIGNED_ROWS
    lines = slots.new_full((first_foreign + crossing.num_foreign, away.shape[1]), -1)
    lines[: plan.num_tokens] = torch.cat([slots, on_nodes[:, node]], 1)
    foreign_regions = torch.zeros_like(regions)
    sizes = rail_capacity << _TOP_K_BITS | plan.top_k
    sends = [crossing.to_nodes(away), list(regions)]
    receives = [crossing.by_node(lines[first_foreign:]), list(foreign_regions)]
    nodes_of(heap).exchange(sends, receives, control.PHASE_NODES_PLAN, sizes=sizes)
    heap.barrier(control.PHASE_NODES_PLAN)  # an error that one rail has learnt of reaches the others' ranks here

    slot_to_row, slot_to_rank, packed, primary = lines.split([plan.top_k] * 2 + [len(heap.topology.ranks)] * 2, 1)
    slot_to_rank = maps.to_local[slot_to_rank.long()]
    index = slot_to_row.where(slot_to_rank >= 0, -1), slot_to_rank, packed.contiguous(), primary.contiguous()
    own = _node_plan(plan, [each[: plan.num_tokens] for each in index])
    foreign = _node_plan(plan, [each[first_foreign:] for each in index])
    own_rows = _split_by_arrival(plan, (own, foreign)) if heap.topology.is_in_order else None
    vars(own)["regions"] = (_region(own, None, regions[node]),)
    vars(foreign)["regions"] = tuple(
        _region(foreign, slice(first, end), foreign_regions[source])
        for source, (first, end) in enumerate(crossing.foreign_ranges)
        if end > first
    )
    return Across(crossing, own, foreign, own_rows)


def _node_plan(plan: Plan, index: Sequence[torch.Tensor]) -> NodePlan:
    """The plan of the tokens with these lines of slot_to_row, slot_to_rank, token_to_packed_row and
    token_to_primary_row."""
    made = NodePlan(**{field.name: getattr(plan, field.name) for field in fields(Plan)})
    made.num_tokens = len(index[0])
    # Found before the views of the storage, which are of the plan over all ranks.
    names = "slot_to_row", "slot_to_rank", "token_to_packed_row", "token_to_primary_row"
    vars(made).update(zip(names, index, strict=True))
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
