"""The way home between nodes: what each node has summed of a token comes back along the rail, and home adds it up.

`order="node"`: a node sends the sum of its rows, in k order, rounded; home adds the nodes' sums in fp32, in the order
of nodes, and rounds. Its own node's sum is rounded, too, so that the bits do not show where home is.
`order="slot"`: a node sends the rows themselves, K of each token; home adds them in k order. K times the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from symmoe.dispatch.crossing import Crossing
from symmoe.dispatch.maps import Across, Plan
from symmoe.kernels import control


@dataclass(frozen=True, eq=False)
class Inside:
    """What is collected inside a node, for the tokens of one plan.

    Attributes:
        plan: of tokens inside the node.
        rows: [T, 1, H], sums, or with order "slot" between nodes [T, K, H], the rows one by one, which home adds. None:
            only values come home.
        values: fp32 [T, K], or None.
    """

    plan: Plan
    rows: torch.Tensor | None
    values: torch.Tensor | None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Rows and values, as far as there are any."""
        return [tensor for tensor in (self.rows, self.values) if tensor is not None]


class FromNodes:
    """One way home between nodes. Memory is allocated when it is made.

    Args:
        plan: the plan over all ranks.
        like: rows [., H] of the experts; None: only values come home.
        has_values: whether values come home.
        order: "slot": row by row; else a sum of each node.

    Attributes:
        own, foreign: what has to be collected inside this node.
    """

    def __init__(self, plan: Plan, across: Across, like: torch.Tensor | None, *, has_values: bool, order: str) -> None:
        self._plan, self._crossing, self._order = plan, across.crossing, order
        self.own, self.foreign = (
            _inside(of_tokens, like, has_values, plan.top_k if order == "slot" else 1)
            for of_tokens in (across.own, across.foreign)
        )
        self._home = [self._crossing.room_at_home(tensor) for tensor in self.foreign.tensors]

    @contextmanager
    def travel(self, agreed: control.CallFields) -> Iterator[Callable[[], None]]:
        """A context in which what has been collected for foreign tokens goes home. Collective over the group.

        Yields:
            a function that waits for what comes from other nodes.
        """
        heap, crossing = self._plan.heap, self._crossing
        sends = [crossing.by_node(tensor) for tensor in self.foreign.tensors]
        heap.meet(control.PHASE_NODES_HOME, **crossing.agreed_on_rail(agreed))
        with heap.moving(sends, self._home) as wait:
            yield wait

    def add(self, out: torch.Tensor | None, values: torch.Tensor | None) -> None:
        """Makes sums [T, H] and values fp32 [T, K] of this rank's tokens of what has come and what is its own."""
        crossing, slot_to_node = self._crossing, _slot_to_node(self._plan)
        found = []
        for mine, home in zip(self.own.tensors, self._home, strict=True):
            here = crossing.heap.topology.node
            found.append([mine if node == here else _of_tokens(crossing, node, rows) for node, rows in enumerate(home)])
        if out is not None:
            rows = found[0]
            out.copy_(_sum_of_slots(rows, slot_to_node) if self._order == "slot" else _sum_of_nodes(rows))
        if values is not None:
            values.copy_(_values_of_slots(found[-1], slot_to_node))

    def meet(self, agreed: control.CallFields) -> None:
        """The meeting before the trip's last barrier, see SymmetricHeap.meet."""
        self._plan.heap.meet(control.PHASE_NODES_HOME, **self._crossing.agreed_on_rail(agreed))


def _inside(plan: Plan, like: torch.Tensor | None, has_values: bool, num_rows: int) -> Inside:
    """Room for what is collected; num_rows: of a token."""
    rows = None if like is None else like.new_empty((plan.num_tokens, num_rows, like.shape[1]))
    values = None
    if has_values:
        values = torch.empty((plan.num_tokens, plan.top_k), dtype=torch.float32, device=plan.heap.device)
    return Inside(plan, rows, values)


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
    row = crossing.token_to_rail_row[:, node].long()
    if not len(rows):
        return rows.new_zeros((crossing.num_tokens, *rows.shape[1:]))
    found = rows.index_select(0, row.clamp(min=0))
    return found.masked_fill((row < 0).view(-1, *[1] * (rows.dim() - 1)), 0)


def _slot_to_node(plan: Plan) -> torch.Tensor:
    """int64 [T, K], the node of each slot's expert; -1 for none."""
    return plan.heap.rank_maps.to_node[plan.slot_to_rank.long()]
