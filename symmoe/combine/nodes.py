"""The way home between nodes: what each node has summed of a token comes back along the rail, and home adds it up.

`order="node"`: a node sends the sum of its rows, in k order, rounded; home adds the nodes' sums in fp32, in the order
of nodes, and rounds. Its own node's sum is rounded, too, so that the bits do not show where home is.
`order="slot"`: a node sends the rows themselves, K of each token; home adds them in k order. K times the bytes.
"""

from __future__ import annotations

import torch

from symmoe.dispatch.crossing import Crossing
from symmoe.dispatch.maps import Across, Plan
from symmoe.kernels import control


def sums_from_nodes(
    plan: Plan,
    across: Across,
    inside: torch.Tensor | None,
    values_inside: torch.Tensor | None,
    order: str,
    agreed: control.CallFields,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Sums and values of this rank's tokens. Collective over the group; does not synchronise the host.

    Args:
        plan: the plan over all ranks.
        inside: [num_inside, H] of order "node", [num_inside * K, H] of order "slot": of the tokens inside this node.
        values_inside: fp32 [num_inside, K].
        agreed: fields of the call.

    Returns:
        [T, H] and fp32 [T, K]; each None if there is none inside.
    """
    crossing = across.crossing
    num_rows = plan.top_k if order == "slot" else 1  # of a token
    tensors = [] if inside is None else [inside.view(crossing.num_inside, num_rows, inside.shape[1])]
    tensors += [] if values_inside is None else [values_inside]
    home = crossing.bring_home(tensors, control.PHASE_NODES_HOME, agreed)
    rows = None if inside is None else home[0]
    values = None if values_inside is None else home[-1]
    slot_to_node = _slot_to_node(plan)
    found = None
    if rows is not None:
        rows = [_of_tokens(crossing, node, of_node) for node, of_node in enumerate(rows)]
        found = _sum_of_slots(rows, slot_to_node) if order == "slot" else _sum_of_nodes(rows)
    found_values = None
    if values is not None:
        values = [_of_tokens(crossing, node, of_node) for node, of_node in enumerate(values)]
        found_values = _values_of_slots(values, slot_to_node)
    # An error of one rail's ranks reaches the others here.
    spoils = found_values if found is None else found
    plan.heap.barrier(control.PHASE_NODES_HOME, spoils=spoils, **agreed)
    return found, found_values


def _sum_of_nodes(rows: list[torch.Tensor]) -> torch.Tensor:
    """[T, H] from the sums of each node [T, 1, H], in the order of nodes."""
    total = torch.zeros_like(rows[0], dtype=torch.float32)
    for of_node in rows:
        total += of_node.float()
    return total[:, 0].to(rows[0].dtype)


def _sum_of_slots(rows: list[torch.Tensor], slot_to_node: torch.Tensor) -> torch.Tensor:
    """[T, H] from the rows of each node [T, K, H], in k order; slot_to_node says which of them a slot has."""
    total = torch.zeros_like(rows[0][:, 0], dtype=torch.float32)
    for k in range(slot_to_node.shape[1]):
        for node, of_node in enumerate(rows):
            here = (slot_to_node[:, k] == node)[:, None]
            total = torch.where(here, total + of_node[:, k].float(), total)
    return total.to(rows[0].dtype)


def _values_of_slots(values: list[torch.Tensor], slot_to_node: torch.Tensor) -> torch.Tensor:
    """fp32 [T, K] from the values of each node [T, K]; 0 for slots without an expert."""
    found = torch.zeros_like(values[0])
    for node, of_node in enumerate(values):
        found = torch.where(slot_to_node == node, of_node, found)
    return found


def _of_tokens(crossing: Crossing, node: int, rows: torch.Tensor) -> torch.Tensor:
    """[T, ...] from the rows that came from a node for the tokens that were sent there; 0 for other tokens."""
    if node == crossing.heap.topology.node:
        return rows
    row = crossing.token_to_rail_row[:, node].long()
    if not len(rows):
        return rows.new_zeros((crossing.num_tokens, *rows.shape[1:]))
    found = rows.index_select(0, row.clamp(min=0))
    return found.masked_fill((row < 0).view(-1, *[1] * (rows.dim() - 1)), 0)


def _slot_to_node(plan: Plan) -> torch.Tensor:
    """int64 [T, K], the node of each slot's expert; -1 for none."""
    return plan.heap.rank_maps.to_node[plan.slot_to_rank.long()]
