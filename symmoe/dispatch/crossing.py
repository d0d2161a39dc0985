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
from functools import cached_property, partial

import torch

from symmoe.kernels import control
from symmoe.symm_mem.heap import SymmetricHeap, nodes_of


@dataclass(frozen=True, eq=False)
class RailRows:
    """Which tokens go to which node, as their home decides it before the plan is made.

    Attributes:
        topk_idx: as it came; -1 for the slots that a rail has no room for.
        token_to_rail_row: int32 [T, N], the row of a token among those that go to a node; -1 if it does not, or if that
            is its home.
        num_sent: int32 [N], tokens that go to each node.
    """

    topk_idx: torch.Tensor
    token_to_rail_row: torch.Tensor
    num_sent: torch.Tensor


def find_rail_rows(topk_idx: torch.Tensor, heap: SymmetricHeap, *, num_experts: int) -> RailRows:
    """Counts the tokens for each node. Local; does not synchronise.

    topk_idx: int [T, K]; ids that are out of range count as none.
    """
    goes = (_slot_to_other_node(topk_idx, heap, num_experts)[:, :, None] == nodes_of(heap).maps.nodes).any(1)
    row = (goes.cumsum(0, dtype=torch.int32) * goes).sub_(1)
    return RailRows(topk_idx, row, goes.sum(0, dtype=torch.int32))


@dataclass(frozen=True, eq=False)
class Overflow:
    """What a rail has no room for.

    Attributes:
        too_many: int32 [1], the tokens that would go to the node to which most would, if the rail has no room for them;
            else 0.
        num_dropped: int32 [1], slots that were dropped.
    """

    too_many: torch.Tensor
    num_dropped: torch.Tensor


def keep_first(
    rails: RailRows, heap: SymmetricHeap, *, num_experts: int, rail_capacity: int
) -> tuple[RailRows, Overflow]:
    """The rows of the first tokens, as many as a rail has room for. Local; does not synchronise."""
    row = rails.token_to_rail_row
    has_no_room = row >= rail_capacity
    slot_to_node = _slot_to_other_node(rails.topk_idx, heap, num_experts)
    lost = has_no_room.gather(1, slot_to_node.clamp(min=0)) & (slot_to_node >= 0)
    most = rails.num_sent.max().view(1)
    return (
        RailRows(
            topk_idx=rails.topk_idx.masked_fill(lost, -1),
            token_to_rail_row=row.masked_fill(has_no_room, -1),
            num_sent=rails.num_sent.clamp(max=rail_capacity),
        ),
        Overflow(most.where(most > rail_capacity, 0), lost.sum(dtype=torch.int32).view(1)),
    )


def _slot_to_other_node(topk_idx: torch.Tensor, heap: SymmetricHeap, num_experts: int) -> torch.Tensor:
    """int64 [T, K], the node of each slot's expert; -1 for this node, and for no expert."""
    rank = topk_idx.div(num_experts // heap.num_ranks, rounding_mode="floor").clamp(-1, heap.num_ranks)
    return nodes_of(heap).maps.to_other_node[rank.long()]


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

    def share(self, config: int) -> None:
        """Completes this rank's count table, which has the rows of its node's ranks, with those of all other ranks.
        Collective over the group, after the plan's barrier. config: as in PlanOptions."""
        topology, maps = self._heap.topology, nodes_of(self._heap).maps
        table, to_row = self._table(self._heap.peers.rank), self._rows()
        ours = table.index_select(0, to_row[maps.by_node[topology.node]])
        mine = torch.cat([ours.flatten(), self._rails.num_sent])
        received = mine.new_zeros((topology.num_nodes - 1, mine.numel()))  # in place of what does not come
        receives = [*received[: topology.node], mine, *received[topology.node :]]
        self.num_tokens = nodes_of(self._heap).exchange(
            [[mine] * topology.num_nodes],
            [receives],
            control.PHASE_NODES_PLAN,
            num_tokens=len(self._rails.topk_idx),
            config=config,
        )
        rows, num_received = received.split([ours.numel(), topology.num_nodes], 1)
        others = maps.by_node.index_select(0, maps.other_nodes).flatten()
        table.index_copy_(0, to_row[others], rows.reshape(len(others), -1))
        self.num_received.index_copy_(0, maps.other_nodes, num_received[:, topology.node])

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
    """The way of one plan's tokens to the other nodes. *Away* rows are those that this rank sends, an equal number for
    each other node, in their order; *foreign* tokens are those that it gets from other nodes, in the order of nodes.

    Attributes:
        heap: of the plan.
        away_row_to_token: int64 [A]; -1 in rows that stay unused.
        token_to_away_row: int32 [T, N]; -1 if a token does not go to a node, or if that is its home.
        num_sent, num_received: by node, rows that go there and come from there; 0 of this node.
        number: of the plan, the same for the ranks of the rail; nodes count plans each by themselves.
    """

    heap: SymmetricHeap
    away_row_to_token: torch.Tensor
    token_to_away_row: torch.Tensor
    num_sent: tuple[int, ...]
    num_received: tuple[int, ...]
    number: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_to_away_row.shape[0]

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
        sends = [self.to_nodes(self.away_rows(tensor)) for tensor in tensors]
        foreign = [tensor.new_empty((self.num_foreign, *tensor.shape[1:])) for tensor in tensors]
        nodes_of(heap).meet(phase, **self.agreed_on_rail(agreed))
        with ExitStack() as travels:
            begin = partial(
                travels.enter_context, nodes_of(heap).moving(sends, [self.by_node(whole) for whole in foreign])
            )
            # A graph may run branches one after the other, in any order: ranks that wait for other nodes before they
            # come to the barrier, or push their rows, and ranks that do so after it, would wait for each other.
            wait = None if heap.streams.capture else begin()

            def come() -> list[torch.Tensor]:
                (wait or begin())()
                return foreign

            yield come

    def agreed_on_rail(self, agreed: control.CallFields) -> control.CallFields:
        """Fields of a call on which the ranks of a rail must agree, from those of the ranks of a node."""
        return {**agreed, "plan": self.number}

    @property
    def num_away(self) -> int:
        """A."""
        return self.away_row_to_token.numel()

    def away_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """[A, .], the rows of a tensor [T, .] that go to other nodes; any row where none does."""
        if not self.num_tokens:
            return tensor.new_zeros((self.num_away, *tensor.shape[1:]))
        return tensor.index_select(0, self._any_token)

    def away_rows_of_nodes(self, tensor: torch.Tensor) -> torch.Tensor:
        """[A, .], the same of a tensor [T, N, .]: the rows for the node where each goes."""
        if not self.num_tokens:
            return tensor.new_zeros((self.num_away, *tensor.shape[2:]))
        node = nodes_of(self.heap).maps.other_nodes.repeat_interleave(max(self.num_sent), output_size=self.num_away)
        return tensor.flatten(0, 1).index_select(0, self._any_token * len(self.num_sent) + node)

    @cached_property
    def _any_token(self) -> torch.Tensor:
        return self.away_row_to_token.clamp(min=0)

    @cached_property
    def token_to_home_row(self) -> torch.Tensor:
        """int32 [T, N], where what a node has for a token is, at home: among T of this rank's own tokens, and then the
        away rows; -1 for nothing."""
        row = self.token_to_away_row
        home = (row + self.num_tokens).masked_fill_(row < 0, -1)
        home[:, self.heap.topology.node] = torch.arange(self.num_tokens, dtype=torch.int32, device=home.device)
        return home

    def to_nodes(self, away: torch.Tensor) -> list[torch.Tensor]:
        """The rows of a tensor [A, .] that go to each node."""
        here, most = self.heap.topology.node, max(self.num_sent)
        starts = [most * (node - (node > here)) for node in range(len(self.num_sent))]
        return [away[first : first + rows] for first, rows in zip(starts, self.num_sent, strict=True)]

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
    num_tokens, most, maps = len(token_to_rail_row), max(sent), nodes_of(heap).maps
    num_away = most * (heap.topology.num_nodes - 1)
    row, goes_not = token_to_rail_row + most * maps.others_before, token_to_rail_row < 0
    tokens = torch.arange(num_tokens, device=row.device)[:, None].expand_as(row).flatten()
    # Those that do not go share a row past the end.
    places = row.masked_fill(goes_not, num_away).flatten().long()
    token = tokens.new_full((num_away + 1,), -1).scatter_(0, places, tokens)
    row.masked_fill_(goes_not, -1)
    return Crossing(heap, token[:num_away], row, tuple(sent), tuple(received), nodes_of(heap).num_meetings)
