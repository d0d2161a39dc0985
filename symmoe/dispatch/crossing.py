"""What crosses to other nodes on the way out: which tokens, along which rows of a rail, and the maps they bring along.

Every rank is on one rail, with the ranks of the same index on the other nodes. A token that has an expert on another
node goes there once, to the rank on this rail; that rank dispatches it inside its node, with its own tokens. To experts
it makes no difference: the maps of every token are those of a plan over all ranks, and its home sends them along.

T tokens and K slots per token of this rank, N nodes, R ranks in all, G ranks of a node.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from symmoe.kernels import control
from symmoe.symm_mem.heap import SymmetricHeap


@dataclass(frozen=True, eq=False)
class RailRows:
    """Which tokens go to which node, as their home decides it before the plan is made.

    Attributes:
        topk_idx: as it came; -1 for the slots that a rail has no room for.
        token_to_rail_row: int32 [T, N], the row of a token among those that go to a node; -1 if it does not, or if that
            is its home.
        num_sent: int32 [N], tokens that go to each node.
        too_many: int32 [1], the tokens that would go to the node to which most would, if the rail has no room for them;
            else 0.
        num_dropped: int32 [1], slots that were dropped.
    """

    topk_idx: torch.Tensor
    token_to_rail_row: torch.Tensor
    num_sent: torch.Tensor
    too_many: torch.Tensor
    num_dropped: torch.Tensor


def find_rail_rows(topk_idx: torch.Tensor, heap: SymmetricHeap, *, num_experts: int, capacity: int | None) -> RailRows:
    """Counts the tokens for each node. Local; does not synchronise.

    Args:
        topk_idx: int [T, K]; ids that are out of range count as none.
        capacity: the most tokens that go to a node, the first ones; None: all.
    """
    maps = heap.rank_maps
    is_expert = (topk_idx >= 0) & (topk_idx < num_experts)
    slot_to_node = maps.to_node[topk_idx.where(is_expert, 0).long() // (num_experts // heap.num_ranks)]
    slot_to_node = slot_to_node.where(is_expert, -1)
    goes = (slot_to_node[:, :, None] == maps.nodes).any(1) & (maps.nodes != heap.topology.node)
    row = goes.cumsum(0) - goes.long()
    has_room = goes if capacity is None else goes & (row < capacity)
    lost = (goes & ~has_room).gather(1, slot_to_node.clamp(min=0)) & is_expert
    return RailRows(
        topk_idx=topk_idx.masked_fill(lost, -1),
        token_to_rail_row=row.where(has_room, -1).int(),
        num_sent=has_room.sum(0, dtype=torch.int32),
        too_many=_too_many(goes.sum(0), capacity),
        num_dropped=lost.sum(dtype=torch.int32).view(1),
    )


def _too_many(wanted: torch.Tensor, capacity: int | None) -> torch.Tensor:
    """int32 [1], see RailRows; wanted: [N], tokens for each node."""
    most = wanted.max().int().view(1)
    return torch.zeros_like(most) if capacity is None else most.where(most > capacity, 0)


class RailCounts:
    """What the ranks of a group tell each other for a plan in addition to the counts of their node.

    Attributes:
        num_received: int32 [N], tokens that each node sends to this rank; after :meth:`share`.
        num_tokens: by node, T of its rank on this rail, as hosts know it; after :meth:`share`.
    """

    def __init__(self, heap: SymmetricHeap, rails: RailRows) -> None:
        self._heap, self._rails = heap, rails
        self.num_received = torch.zeros_like(rails.num_sent)
        self.num_tokens: list[int] = []

    def tell(self, number: torch.Tensor) -> None:
        """Writes what only the device knows into the header of this rank's counts, on all ranks of the node. Local,
        before the plan's barrier.

        Args:
            number: int32 [1], of HEAD_RAIL_DROPPED.
        """
        row = self._rows(barriers=1)[self._heap.rank : self._heap.rank + 1]
        for rank in range(self._heap.peers.num_ranks):
            self._table(rank)[:, control.HEAD_RAIL_DROPPED].index_copy_(0, row, number)

    def share(self) -> None:
        """Completes this rank's count table, which has the rows of its node's ranks, with those of all other ranks.
        Collective over the group, after the plan's barrier."""
        topology, maps = self._heap.topology, self._heap.rank_maps
        table, to_row = self._table(self._heap.peers.rank), self._rows()
        mine = torch.cat([table.index_select(0, to_row[maps.ranks[topology.node]]).flatten(), self._rails.num_sent])
        received = [torch.zeros_like(mine) for _ in topology.nodes]  # in place of what does not come
        self.num_tokens = self._heap.exchange(
            [[mine] * topology.num_nodes],
            [received],
            control.PHASE_NODES_PLAN,
            num_tokens=len(self._rails.topk_idx),
        )
        for node, ranks in enumerate(maps.ranks):
            if node != topology.node:
                rows, theirs = received[node].split([mine.numel() - topology.num_nodes, topology.num_nodes])
                table.index_copy_(0, to_row[ranks], rows.view(len(ranks), -1))
                self.num_received[node : node + 1] = theirs[topology.node : topology.node + 1]

    def told(self) -> torch.Tensor:
        """int32 [1], the sum of what all ranks of the group have told; after :meth:`share`."""
        table = self._table(self._heap.peers.rank)
        return table[:, control.HEAD_RAIL_DROPPED].index_select(0, self._rows()).sum(dtype=torch.int32)

    def _table(self, rank: int) -> torch.Tensor:
        """int32 [2 * R, row_words], both halves of the count table of a rank of the node."""
        peers = self._heap.peers
        shape = 2 * self._heap.num_ranks, peers.layout.row_words
        return peers.region(rank, peers.layout.count_table, shape, torch.int32)

    def _rows(self, barriers: int = 0) -> torch.Tensor:
        """int64 [R], the rows of the last barrier's half in the table, or of the one that comes after so many more.
        The device knows which half that is; a host does not count the barriers of replays."""
        peers = self._heap.peers
        counters = peers.region(peers.rank, peers.layout.counters, (control.NUM_COUNTERS,), torch.int64)
        half = (counters[control.BARRIER_EPOCH] + barriers) & 1
        return half * self._heap.num_ranks + torch.arange(self._heap.num_ranks, device=half.device)


@dataclass(frozen=True, eq=False)
class Crossing:
    """The way of one plan's tokens to the other nodes. *Foreign* tokens are those that this rank gets from other nodes,
    in the order of nodes.

    Attributes:
        heap: of the plan.
        rail_row_to_token: by node, int64 [S] each: the tokens that go there; -1 in rows that stay unused. Of this node
            none.
        token_to_rail_row: int32 [T, N], see RailRows.
        num_received: by node, rows that it sends; 0 of this node.
        number: of the plan, the same for the ranks of the rail; nodes count plans each by themselves.
    """

    heap: SymmetricHeap
    rail_row_to_token: tuple[torch.Tensor, ...]
    token_to_rail_row: torch.Tensor
    num_received: tuple[int, ...]
    number: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_to_rail_row.shape[0]

    @property
    def num_foreign(self) -> int:
        """Tokens that other nodes send."""
        return sum(self.num_received)

    @contextmanager
    def bring_in(
        self, tensors: Sequence[torch.Tensor], phase: int, agreed: control.CallFields
    ) -> Iterator[Callable[[], list[torch.Tensor]]]:
        """A context in which rows of tensors [T, .] travel to the other nodes. Collective over the group; a barrier
        comes next.

        phase, agreed: as in SymmetricHeap.meet.

        Yields:
            a function that waits for what other nodes send: of each tensor, [num_foreign, .].
        """
        heap = self.heap
        sends = [[_rows(tensor, index) for index in self.rail_row_to_token] for tensor in tensors]
        foreign = [tensor.new_empty((self.num_foreign, *tensor.shape[1:])) for tensor in tensors]
        heap.meet(phase, **self.agreed_on_rail(agreed))
        with ExitStack() as travels:
            begin = partial(travels.enter_context, heap.moving(sends, [self.by_node(whole) for whole in foreign]))
            # A graph may run branches one after the other, in any order: ranks that wait for other nodes before they
            # come to the barrier, or push their rows, and ranks that do so after it, would wait for each other.
            wait = None if heap.capture else begin()

            def come() -> list[torch.Tensor]:
                (wait or begin())()
                return foreign

            yield come

    def agreed_on_rail(self, agreed: control.CallFields) -> control.CallFields:
        """Fields of a call on which the ranks of a rail must agree, from those of the ranks of a node."""
        return {**agreed, "plan": self.number}

    def room_at_home(self, foreign: torch.Tensor) -> list[torch.Tensor]:
        """By node, the rows [S, .] of the tokens that were sent there, of a tensor that has rows [num_foreign, .]."""
        return [foreign.new_empty((index.numel(), *foreign.shape[1:])) for index in self.rail_row_to_token]

    def by_node(self, foreign: torch.Tensor) -> list[torch.Tensor]:
        """The rows of a tensor [num_foreign, .] that belong to each node."""
        return [foreign[first:end] for first, end in self.foreign_ranges]

    @property
    def foreign_ranges(self) -> list[tuple[int, int]]:
        """By node, the first and the end of its tokens among the foreign ones; of this node none."""
        ends = itertools.accumulate(self.num_received)
        return [(end - num_rows, end) for end, num_rows in zip(ends, self.num_received, strict=True)]


def make_crossing(
    heap: SymmetricHeap, token_to_rail_row: torch.Tensor, sent: Sequence[int], received: Sequence[int]
) -> Crossing:
    """The crossing with these numbers of rows to and from each other node. Local."""
    here = heap.topology.node
    sent, received = ([0 if node == here else rows for node, rows in enumerate(each)] for each in (sent, received))
    tokens = torch.arange(token_to_rail_row.shape[0], device=token_to_rail_row.device)
    indices = []
    for node, num_rows in enumerate(sent):
        row = token_to_rail_row[:, node].long()
        # Those that do not go share a row past the end.
        index = tokens.new_full((num_rows + 1,), -1).scatter_(0, row.where(row >= 0, num_rows), tokens)
        indices.append(index[:num_rows])
    return Crossing(heap, tuple(indices), token_to_rail_row, tuple(received), heap.num_meetings)


def _rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """These rows, contiguous; where the index is -1, any row."""
    if not tensor.shape[0]:
        return tensor.new_zeros((index.numel(), *tensor.shape[1:]))
    return tensor.index_select(0, index.clamp(min=0))
