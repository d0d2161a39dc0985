"""A plan between nodes: which tokens go to which node, along which rows of a rail, and the maps that they bring along.

Every rank is on one rail, with the ranks of the same index on the other nodes. A token that has an expert on another
node goes there once, to the rank on this rail; that rank dispatches it inside its node, with its own tokens. To experts
it makes no difference: row numbers are those of the plan over all ranks, and a token's home sends its maps along. Rows
are ordered expert, source rank, token, k, and packed rows source rank, token, where a source is a rank of any node.

The words: a *trip* is one way of a call's rows, out or home; *own* tokens are this rank's, *foreign* ones come along
its rail, and go last, all at once; a *region* are the packed rows, next to each other, of one source on one rank.

Rows that have an order have those of all ranks before this node next to each other, and those of all ranks after it. So
two sources stand for all others: the first rank of the group and the last.

T tokens and K slots per token of this rank, N nodes, R ranks in all, G ranks of a node.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Generic, NamedTuple, TypeVar

import torch

from symmoe.kernels import control
from symmoe.kernels.control import PlanIntegers
from symmoe.symm_mem.heap import SymmetricHeap, nodes_of

_TOP_K_BITS = 8
_ALIGNED_ROWS = 4  # of int32, however many columns
P = TypeVar("P", bound=PlanIntegers)  # a plan


@dataclass(frozen=True, eq=False)
class RailRows:
    """Which tokens go to which node, as their home decides it before the plan is made.

    Attributes:
        topk_idx: as it came; -1 for the slots that a rail has no room for.
        token_to_rail_row: int32 [T, N], the row of a token among those that go to a node; -1 if it does not, or if that
            is its home.
        num_sent: int32 [N], tokens that go to each node.
        too_many, num_dropped: int32 [1], where a rail has a limit: the tokens that would go to the node to which most
            would, if the rail has no room for them, else 0; and slots that were dropped.
    """

    topk_idx: torch.Tensor
    token_to_rail_row: torch.Tensor
    num_sent: torch.Tensor
    too_many: torch.Tensor | None = None
    num_dropped: torch.Tensor | None = None


def find_rail_rows(topk_idx: torch.Tensor, heap: SymmetricHeap, *, num_experts: int, limit: int | None) -> RailRows:
    """Counts the tokens for each node, and takes the first ones, as many as a rail has room for. Ids that are out of
    range count as none. Local; does not synchronise."""
    rank = topk_idx.div(num_experts // heap.num_ranks, rounding_mode="floor").clamp(-1, heap.num_ranks)
    slot_to_node = nodes_of(heap).maps.to_other_node[rank.long()]  # -1 for this node, and for no expert
    goes = (slot_to_node[:, :, None] == nodes_of(heap).maps.nodes).any(1)
    row, num_sent = (goes.cumsum(0, dtype=torch.int32) * goes).sub_(1), goes.sum(0, dtype=torch.int32)
    if limit is None:
        return RailRows(topk_idx, row, num_sent)
    has_no_room = row >= limit
    lost = has_no_room.gather(1, slot_to_node.clamp(min=0)) & (slot_to_node >= 0)
    most = num_sent.max().view(1)
    return RailRows(
        topk_idx=topk_idx.masked_fill(lost, -1),
        token_to_rail_row=row.masked_fill(has_no_room, -1),
        num_sent=num_sent.clamp(max=limit),
        too_many=most.where(most > limit, 0),
        num_dropped=lost.sum(dtype=torch.int32).view(1),
    )


class RailCounts:
    """What the ranks of a group tell each other for a plan in addition to the counts of their node.

    Args:
        number: int32 [1], what only the device knows, of HEAD_RAIL_DROPPED in the header; None: nothing.

    Attributes:
        num_received, num_tokens: after :meth:`share`, int32 [N], tokens that each node sends to this rank; and by node,
            T of its rank on this rail, as hosts know it.
    """

    def __init__(self, heap: SymmetricHeap, rails: RailRows, number: torch.Tensor | None) -> None:
        self._heap, self._rails, self._number = heap, rails, number
        self.num_received = torch.zeros_like(rails.num_sent)
        self.num_tokens: list[int] = []

    def tell(self) -> None:
        """Writes the number into the header of this rank's counts, on all ranks of the node. Local, before the plan's
        barrier."""
        if self._number is None:
            return
        row = self._rows(barriers=1)[self._heap.rank : self._heap.rank + 1]
        for rank in range(self._heap.peers.num_ranks):
            self._table(rank)[:, control.HEAD_RAIL_DROPPED].index_copy_(0, row, self._number)

    def share(self, config: int) -> None:
        """Completes this rank's count table, which has the rows of its node's ranks, with those of all other ranks.
        Collective over the group, after the plan's barrier. config: as in PlanOptions."""
        topology, maps = self._heap.topology, nodes_of(self._heap).maps
        table, to_row = self._table(self._heap.peers.rank), self._rows()
        ours = table.index_select(0, to_row[maps.by_node[topology.node]])
        mine = torch.cat([ours.flatten(), self._rails.num_sent])
        received = mine.new_zeros((topology.num_nodes - 1, mine.numel()))  # in place of what does not come
        receives = [*received[: topology.node], mine, *received[topology.node :]]
        sends, num_tokens = [[mine] * topology.num_nodes], len(self._rails.topk_idx)
        phase = control.PHASE_NODES_PLAN
        exchange = nodes_of(self._heap).exchange
        self.num_tokens = exchange(sends, [receives], phase, num_tokens=num_tokens, config=config)
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
class RailPlan:
    """The way of one plan's tokens along the rail. *Sent* rows are those that this rank sends, an equal number for each
    other node, in their order; foreign tokens are in the order of nodes.

    Attributes:
        heap: of the plan.
        sent_row_to_token: int64 [A]; -1 in rows that stay unused.
        token_to_sent_row: int32 [T, N]; -1 if a token does not go to a node, or if that is its home.
        num_sent, num_received: by node, rows that go there and come from there; 0 of this node.
        number: of the plan, the same for the ranks of the rail; nodes count plans each by themselves.
    """

    heap: SymmetricHeap
    sent_row_to_token: torch.Tensor
    token_to_sent_row: torch.Tensor
    num_sent: tuple[int, ...]
    num_received: tuple[int, ...]
    number: int

    @contextmanager
    def bring_in(
        self, tensors: Sequence[torch.Tensor], phase: int, agreed: control.CallFields
    ) -> Iterator[Callable[[], list[torch.Tensor]]]:
        """A context in which rows of tensors [T, .] travel to the other nodes. Collective over the group; a barrier
        comes next. phase, agreed: as in Nodes.meet.

        Yields:
            a function that waits for what other nodes send: of each tensor, [F, .], F foreign tokens.
        """
        heap = self.heap
        sends = [self.to_nodes(self.sent_rows(tensor)) for tensor in tensors]
        num_foreign = sum(self.num_received)
        foreign = [tensor.new_empty((num_foreign, *tensor.shape[1:])) for tensor in tensors]
        nodes_of(heap).meet(phase, **self.agreed_on_rail(agreed))
        with ExitStack() as travels:
            moving = nodes_of(heap).moving(sends, [self.by_node(whole) for whole in foreign])
            begin = partial(travels.enter_context, moving)
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

    def sent_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """[A, .], the rows of a tensor [T, .] that go to other nodes; any row where none does."""
        if not len(tensor):
            return tensor.new_zeros((len(self._any_token), *tensor.shape[1:]))
        return tensor.index_select(0, self._any_token)

    def sent_rows_of_nodes(self, tensor: torch.Tensor) -> torch.Tensor:
        """[A, .], the same of a tensor [T, N, .]: the rows for the node where each goes."""
        token, others = self._any_token, nodes_of(self.heap).maps.other_nodes
        if not len(tensor):
            return tensor.new_zeros((len(token), *tensor.shape[2:]))
        node = others.repeat_interleave(max(self.num_sent), output_size=len(token))
        return tensor.flatten(0, 1).index_select(0, token * len(self.num_sent) + node)

    @cached_property
    def _any_token(self) -> torch.Tensor:
        return self.sent_row_to_token.clamp(min=0)

    @cached_property
    def token_to_home_row(self) -> torch.Tensor:
        """int32 [T, N], where what a node has for a token is, at home: among T of this rank's own tokens, and then the
        sent rows; -1 for nothing."""
        row = self.token_to_sent_row
        home = (row + len(row)).masked_fill_(row < 0, -1)
        home[:, self.heap.topology.node] = torch.arange(len(row), dtype=torch.int32, device=home.device)
        return home

    def to_nodes(self, sent: torch.Tensor) -> list[torch.Tensor]:
        """The rows of a tensor [A, .] that go to each node."""
        here, most = self.heap.topology.node, max(self.num_sent)
        starts = [most * (node - (node > here)) for node in range(len(self.num_sent))]
        return [sent[first : first + rows] for first, rows in zip(starts, self.num_sent, strict=True)]

    def by_node(self, foreign: torch.Tensor) -> list[torch.Tensor]:
        """The rows of a tensor [F, .] that belong to each node."""
        return [foreign[first:end] for first, end in self.foreign_ranges]

    @property
    def foreign_ranges(self) -> list[tuple[int, int]]:
        """By node, the first and the end of its tokens among the foreign ones; of this node none."""
        ends = itertools.accumulate(self.num_received)
        return [(end - num_rows, end) for end, num_rows in zip(ends, self.num_received, strict=True)]


def make_rail_plan(
    heap: SymmetricHeap, token_to_rail_row: torch.Tensor, sent: Sequence[int], received: Sequence[int]
) -> RailPlan:
    """The way with these numbers of rows to and from each other node. Local."""
    here = heap.topology.node
    sent, received = ([0 if node == here else rows for node, rows in enumerate(each)] for each in (sent, received))
    num_tokens, most, maps = len(token_to_rail_row), max(sent), nodes_of(heap).maps
    num_sent_rows = most * (heap.topology.num_nodes - 1)
    row, goes_not = token_to_rail_row + most * maps.others_before, token_to_rail_row < 0
    tokens = torch.arange(num_tokens, device=row.device)[:, None].expand_as(row).flatten()
    # Those that do not go share a row past the end.
    places = row.masked_fill(goes_not, num_sent_rows).flatten().long()
    token = tokens.new_full((num_sent_rows + 1,), -1).scatter_(0, places, tokens)
    row.masked_fill_(goes_not, -1)
    return RailPlan(heap, token[:num_sent_rows], row, tuple(sent), tuple(received), nodes_of(heap).num_meetings)


class Region(NamedTuple):
    """Consecutive tokens of a plan that are from one rank, and where they have their packed rows.

    Attributes:
        tokens: which of those that are sent together; None: all.
        slots: their lines of slot_to_row and slot_to_rank.
        places: their lines of token_to_packed_row; int32 [., R], tokens of each block of them that go to each rank;
            int32 [R], their first packed row on each rank, and rows of the region there.
    """

    tokens: slice | None
    slots: tuple[torch.Tensor, torch.Tensor]
    places: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class NodesPlan(Generic[P]):
    """How the tokens of a plan get to other nodes, and what they do there.

    Attributes:
        rails: the way there and back.
        own, foreign: the plans inside this node of the own tokens, and of the foreign ones. Their maps have a line for
            each of these tokens, and name ranks of the node. Everything inside a node works with them as with the plan
            of a group that is on one node.
        own_rows: int32 [2, e], rows that can be computed when the tokens of this node's ranks have come; None: ranks of
            this node do not follow each other, so these rows are in several places.
    """

    rails: RailPlan
    own: P
    foreign: P
    own_rows: torch.Tensor | None


def plan_in_node(plan: P, rails: RailPlan, rail_capacity: int) -> NodesPlan[P]:
    """The plans of the tokens inside the node, of which the ranks of the rail send each other the maps: lines of the
    plan's, with all slots of a token, and where it is on the ranks of the node it goes to. Collective over the group;
    does not synchronise the host.

    rail_capacity: of a static capacity; 0: messages have the sizes that all ranks have read.
    """
    heap, maps, (num_tokens, top_k) = rails.heap, nodes_of(rails.heap).maps, plan.slot_to_row.shape
    node, num_local = heap.topology.node, len(heap.topology.ranks)
    slots = torch.cat([plan.slot_to_row, plan.slot_to_rank], 1)
    to_rows = (each[:, maps.by_node] for each in (plan.token_to_packed_row, plan.token_to_primary_row))
    on_nodes = torch.cat(list(to_rows), 2)  # [T, N, 2 G]
    sent = torch.cat([rails.sent_rows(slots), rails.sent_rows_of_nodes(on_nodes)], 1)
    sent.masked_fill_((rails.sent_row_to_token < 0)[:, None], -1)
    regions = torch.stack([plan.packed_start, plan.packed_limit])[:, maps.by_node].transpose(0, 1).contiguous()

    # This rank's own tokens, then the foreign ones, which begin at 16 bytes. In place of what does not come: nothing.
    first_foreign = -(-num_tokens // _ALIGNED_ROWS) * _ALIGNED_ROWS
    lines = slots.new_full((first_foreign + sum(rails.num_received), sent.shape[1]), -1)
    lines[:num_tokens] = torch.cat([slots, on_nodes[:, node]], 1)
    foreign_regions = torch.zeros_like(regions)
    sends = [rails.to_nodes(sent), list(regions)]
    receives = [rails.by_node(lines[first_foreign:]), list(foreign_regions)]
    nodes_of(heap).exchange(sends, receives, control.PHASE_NODES_PLAN, sizes=rail_capacity << _TOP_K_BITS | top_k)
    heap.barrier(control.PHASE_NODES_PLAN)  # an error that one rail has learnt of reaches the others' ranks here

    slot_to_row, slot_to_rank, packed, primary = lines.split([top_k] * 2 + [num_local] * 2, 1)
    slot_to_rank = maps.to_local[slot_to_rank.long()]
    index = slot_to_row.where(slot_to_rank >= 0, -1), slot_to_rank, packed.contiguous(), primary.contiguous()
    own, foreign = copy.copy(plan), copy.copy(plan)
    for made, lines_of in ((own, slice(num_tokens)), (foreign, slice(first_foreign, None))):
        names = "slot_to_row", "slot_to_rank", "token_to_packed_row", "token_to_primary_row"
        # Found before the views of the storage, which are of the plan over all ranks.
        vars(made).update(zip(names, (each[lines_of] for each in index), strict=True))
        vars(made).update(num_tokens=len(made.slot_to_row), arrivals=arrivals_in_node(heap))
    own_rows = split_by_arrival(heap, (own, foreign)) if heap.topology.is_in_order else None
    vars(own)["regions"] = (_region(own, None, regions[node]),)
    vars(foreign)["regions"] = tuple(
        _region(foreign, slice(first, end), foreign_regions[source])
        for source, (first, end) in enumerate(rails.foreign_ranges)
        if end > first
    )
    return NodesPlan(rails, own, foreign, own_rows)


def arrivals_in_node(heap: SymmetricHeap) -> list[int]:
    """See Plan.arrivals: the ranks of this node, then those that stand for ranks before it and after it."""
    ranks, first = heap.topology.ranks, heap.topology.local_rank
    around = [ranks[(first - step) % len(ranks)] for step in range(len(ranks))]
    return around + [end for end in (0, heap.num_ranks - 1) if end not in ranks]


def split_by_arrival(heap: SymmetricHeap, plans: tuple[PlanIntegers, PlanIntegers]) -> torch.Tensor:
    """Has both plans say which packed rows come with each of their sources; NodesPlan.own_rows."""
    plan, first, end = plans[0], heap.topology.ranks[0], heap.topology.ranks[-1] + 1
    packed_start = plan.source_to_packed_start.clone()
    packed_start[1:first] = plan.source_to_packed_start[first]
    packed_start[end : heap.num_ranks] = plan.source_to_packed_start[end]
    for each in plans:
        vars(each).update(source_to_packed_start=packed_start)
    return torch.stack([plan.source_to_rows[first, 0], plan.source_to_rows[end - 1, 1]])


def _region(plan: PlanIntegers, tokens: slice | None, starts_and_limits: torch.Tensor) -> Region:
    """Of the tokens that are from one rank. starts_and_limits: int32 [2, G]."""
    which = slice(None) if tokens is None else tokens
    slots = plan.slot_to_row[which], plan.slot_to_rank[which]
    to_packed_row, (start, limit) = plan.token_to_packed_row[which], starts_and_limits
    block_tokens = (to_packed_row >= 0).sum(0, dtype=torch.int32)[None]
    return Region(tokens, slots, (to_packed_row, block_tokens, start, limit))
