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
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch

from symmoe.kernels import control
from symmoe.kernels.control import PlanIntegers
from symmoe.symm_mem.heap import SymmetricHeap, nodes_of

_ALIGNED_ROWS = 4  # of int32, however many columns
P = TypeVar("P", bound=PlanIntegers)  # a plan
Message = tuple[list[torch.Tensor], list[torch.Tensor]]  # by node, what goes there and what comes from there


class Excess(NamedTuple):
    """What the header of this rank's counts says where more tokens go to a node than fit in a message.

    Attributes:
        drops: whether their slots are dropped, and HEAD_RAIL_DROPPED is how many.
        room: this rank's HEAD_PACKED_CAPACITY, if it becomes 0 then, so that all plan again. None: HEAD_RAIL_DROPPED
            is how many tokens would go where most would.
    """

    drops: bool
    room: int | None


class RailRows:
    """Which tokens go to which node, as their home decides it before the plan is made: the first ones, as many as a
    rail has room for; and what ranks tell each other of that in addition to the counts of their node. Ids that are out
    of range count as none. Made locally; does not synchronise.

    Args:
        rail_rows: how many have room in a message.
        excess: None: there are no more.

    Attributes:
        topk_idx: as it came; -1 for the slots that are dropped.
        token_to_rail_row: int32 [T, N], the row of a token among those that go to a node; -1 if it does not, or if that
            is its home.
        num_sent: int32 [N], tokens that would go to each node.
        num_received, by_node: after :meth:`share`, int32 [N], tokens that would come from each node; and by node, how
            many have room in its messages, as hosts know it.
    """

    def __init__(
        self, topk_idx: torch.Tensor, heap: SymmetricHeap, num_experts: int, rail_rows: int, excess: Excess | None
    ) -> None:
        rank = topk_idx.div(num_experts // heap.num_ranks, rounding_mode="floor").clamp_(-1, heap.num_ranks)
        slot_goes = nodes_of(heap).maps.is_on_other[rank]  # [T, K, N]
        goes = slot_goes.any(1)
        self._heap, self.topk_idx, self.by_node = heap, topk_idx, [rail_rows]
        self.token_to_rail_row = (goes.cumsum(0, dtype=torch.int32) * goes).sub_(1)
        self.num_sent = goes.sum(0, dtype=torch.int32)
        self.num_received = torch.zeros_like(self.num_sent)
        self._word, self._number = control.HEAD_RAIL_DROPPED, None  # of the header, what only the device knows
        if excess is None:
            return
        has_no_room = self.token_to_rail_row >= rail_rows
        self.token_to_rail_row.masked_fill_(has_no_room, -1)
        if excess.drops:
            lost = (slot_goes & has_no_room[:, None]).any(2)
            self.topk_idx, self._number = topk_idx.masked_fill(lost, -1), lost.sum(dtype=torch.int32).view(1)
            return
        most = self.num_sent.amax(0, keepdim=True)
        if excess.room is None:
            self._number = most.where(most > rail_rows, 0)
        else:
            self._word = control.HEAD_PACKED_CAPACITY
            self._number = (most <= rail_rows).int().mul_(excess.room)

    def tell(self) -> None:
        """Writes what only the device knows into the header of this rank's counts, on all ranks of the node. Local,
        before the plan's barrier."""
        if self._number is None:
            return
        ranks = nodes_of(self._heap).maps.by_node[self._heap.topology.node]
        row = self._rows_of(ranks.narrow(0, self._heap.topology.local_rank, 1), barriers=1)
        for rank in range(self._heap.peers.num_ranks):
            self._table(rank)[:, self._word].index_copy_(0, row, self._number)

    def share(self, config: int) -> None:
        """Completes this rank's count table, which has the rows of its node's ranks, with those of all other ranks.
        Collective over the group, after the plan's barrier. config: as in PlanOptions."""
        nodes, topology, table = nodes_of(self._heap), self._heap.topology, self._table(self._heap.peers.rank)
        ours = table.index_select(0, self._rows_of(nodes.maps.by_node[topology.node]))
        theirs = ours.new_zeros((topology.num_nodes - 1, *ours.shape))  # in place of what does not come
        sends = [ours] * topology.num_nodes, self.num_sent.split(1)
        receives = [*theirs[: topology.node], ours, *theirs[topology.node :]], self.num_received.split(1)
        phase, (rail_rows,) = control.PHASE_NODES_PLAN, self.by_node
        nodes.exchange(sends, receives, phase, rail_rows=rail_rows, config=config)
        self.by_node = nodes.rail_rows
        table.index_copy_(0, self._rows_of(nodes.maps.other_ranks), theirs.flatten(0, 1))

    def told(self) -> torch.Tensor:
        """int32 [1], the sum of what all ranks of the group have told; after :meth:`share`."""
        told = self._table(self._heap.peers.rank)[:, control.HEAD_RAIL_DROPPED]
        ranks = nodes_of(self._heap).maps.by_node.flatten()
        return told.index_select(0, self._rows_of(ranks)).sum(dtype=torch.int32)

    def _table(self, rank: int) -> torch.Tensor:
        """int32 [2 * R, row_words], both halves of the count table of a rank of the node."""
        peers = self._heap.peers
        shape = 2 * self._heap.num_ranks, peers.layout.row_words
        return peers.region(rank, peers.layout.count_table, shape, torch.int32)

    def _rows_of(self, ranks: torch.Tensor, barriers: int = 0) -> torch.Tensor:
        """Where ranks (int64) have their rows in the last barrier's half of the table, or in that of the one that comes
        after so many more. The device knows which half that is; a host does not count the barriers of replays."""
        peers = self._heap.peers
        counters = peers.region(peers.rank, peers.layout.counters, (control.NUM_COUNTERS,), torch.int64)
        epoch = counters[control.BARRIER_EPOCH] + barriers if barriers else counters[control.BARRIER_EPOCH]
        return torch.add(ranks, epoch & 1, alpha=self._heap.num_ranks)


@dataclass(eq=False)
class RailPlan:
    """The way of one plan's tokens along the rail. *Sent* rows are those that this rank sends, an equal number for each
    other node, in their order; foreign tokens are in the order of nodes. *Home* rows are those of this rank's own
    tokens, and then the sent ones.

    Attributes:
        heap: of the plan.
        token_to_home_row: int32 [T, N], where what a node has for a token is, at home; -1 for nothing.
        home_row_to_token, home_row_to_pair: int64 [T + A], the token of a home row, and that times N, and the node.
        is_unused: bool [T + A], home rows that stay unused; they have any token.
        num_sent, num_received: by node, rows that go there and come from there; 0 of this node.
        sizes: what ranks of a rail must agree on, so that their messages fit.
        number: of the plan, the same for the ranks of the rail; nodes count plans each by themselves.
        maps: what travels with the first rows of the plan; () later.
    """

    heap: SymmetricHeap
    token_to_home_row: torch.Tensor
    home_row_to_token: torch.Tensor
    home_row_to_pair: torch.Tensor
    is_unused: torch.Tensor
    num_sent: tuple[int, ...]
    num_received: tuple[int, ...]
    sizes: int
    number: int
    maps: Sequence[Message] = ()

    @contextmanager
    def bring_in(
        self, tensors: Sequence[torch.Tensor], phase: int, agreed: control.CallFields
    ) -> Iterator[Callable[[], list[torch.Tensor]]]:
        """A context in which rows of tensors [T, .] travel to the other nodes. Collective over the group; a barrier
        comes next. phase, agreed: as in Nodes.meet.

        Yields:
            a function that waits for what other nodes send: of each tensor, [F, .], F foreign tokens.
        """
        heap, num_foreign = self.heap, sum(self.num_received)
        foreign = [tensor.new_empty((num_foreign, *tensor.shape[1:])) for tensor in tensors]
        sent = [self.to_nodes(self.sent_rows(tensor)) for tensor in tensors]
        messages = [*zip(sent, map(self.by_node, foreign), strict=True), *self.maps]
        self.meet(phase, agreed)
        self.maps = ()
        with ExitStack() as travels:
            moving = nodes_of(heap).moving(*zip(*messages, strict=True))
            begin = partial(travels.enter_context, moving)
            # A graph may run branches one after the other, in any order: ranks that wait for other nodes before they
            # come to the barrier, or push their rows, and ranks that do so after it, would wait for each other.
            wait = None if heap.streams.capture else begin()

            def come() -> list[torch.Tensor]:
                (wait or begin())()
                return foreign

            yield come

    @property
    def key(self) -> Hashable:
        """On what it depends what travels, besides tensors; see also :attr:`maps`."""
        return self.num_sent, self.num_received, self.sizes

    def meet(self, phase: int, agreed: control.CallFields) -> None:
        """The ranks of the rail meet, see Nodes.meet. agreed: on what those of a node agree."""
        nodes_of(self.heap).meet(phase, sizes=self.sizes, rail_plan=self.number, **agreed)

    def sent_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """[A, .], the rows of a tensor [T, .] that go to other nodes; any row where none does."""
        return _pick(tensor, self.home_row_to_token[len(self.token_to_home_row) :])

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
    heap: SymmetricHeap, token_to_rail_row: torch.Tensor, sent: Sequence[int], received: Sequence[int], sizes: int
) -> RailPlan:
    """The way with these numbers of rows to and from each other node. Local. sizes: as in RailPlan."""
    here, (num_tokens, num_nodes) = heap.topology.node, token_to_rail_row.shape
    sent, received = ([0 if node == here else rows for node, rows in enumerate(each)] for each in (sent, received))
    most, before = max(sent), nodes_of(heap).maps.others_before
    home_row = torch.add(token_to_rail_row, before, alpha=most).add_(num_tokens)
    home_row.masked_fill_(token_to_rail_row < 0, -1)
    home_row[:, here] = torch.arange(num_tokens, dtype=torch.int32, device=home_row.device)
    # Pairs that have none share a row past the end, which is that of -1.
    pair = home_row.new_full((num_tokens + most * (num_nodes - 1) + 1,), -1, dtype=torch.int64)
    pair[home_row.flatten()] = torch.arange(home_row.numel(), device=home_row.device)
    is_unused, pair = pair[:-1] < 0, pair[:-1].clamp_(min=0)
    index = home_row, pair.div(num_nodes, rounding_mode="floor"), pair, is_unused
    return RailPlan(heap, *index, tuple(sent), tuple(received), sizes, nodes_of(heap).lane.number)


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
        tensors: all of this is in their memory, and in that of the plan over all ranks.
    """

    rails: RailPlan
    own: P
    foreign: P
    own_rows: torch.Tensor | None
    tensors: list[torch.Tensor]


def plan_in_node(plan: P, rails: RailPlan) -> NodesPlan[P]:
    """The plans of the tokens inside the node. For those that are foreign, the ranks of the rail send each other the
    maps, with the first rows: lines of the plan's, with the slots of a token on the node it goes to, and where it is
    on the ranks of that. Collective over the group; does not synchronise the host."""
    heap, (num_tokens, top_k) = rails.heap, plan.slot_to_row.shape
    num_nodes, num_local = heap.topology.num_nodes, len(heap.topology.ranks)
    token, pair = rails.home_row_to_token, rails.home_row_to_pair
    # Lines of home rows: this rank's own tokens, then those that it sends.
    slot_to_rank = _pick(plan.slot_to_rank, token)
    place = torch.add(slot_to_rank, (pair % num_nodes)[:, None], alpha=heap.num_ranks + 1)
    slot_to_rank = nodes_of(heap).maps.to_local[place]
    packed, primary = (
        _pick(_by_node(each, heap).flatten(0, 1), pair)
        for each in (plan.token_to_packed_row, plan.token_to_primary_row)
    )
    for each in (slot_to_rank, packed, primary):
        each.masked_fill_(rails.is_unused[:, None], -1)
    slot_to_row = _pick(plan.slot_to_row, token).masked_fill_(slot_to_rank < 0, -1)
    names = "slot_to_row", "slot_to_rank", "token_to_packed_row", "token_to_primary_row"
    lines = slot_to_row, slot_to_rank, packed, primary
    block_tokens = plan.block_tokens.sum(0, dtype=torch.int32)
    regions = torch.stack([block_tokens, plan.packed_start, plan.packed_limit])
    regions = _by_node(regions, heap).transpose(0, 1).contiguous()

    num_foreign, widths = sum(rails.num_received), [top_k] * 2 + [num_local] * 2
    aligned = -(-num_foreign // _ALIGNED_ROWS) * _ALIGNED_ROWS
    room = slot_to_row.new_full((aligned * sum(widths),), -1)  # in place of what does not come: nothing
    parts = room.split([aligned * width for width in widths])
    come = [part.view(aligned, width)[:num_foreign] for part, width in zip(parts, widths, strict=True)]
    foreign_regions = torch.zeros_like(regions)
    maps = [(rails.to_nodes(go[num_tokens:]), rails.by_node(comes)) for go, comes in zip(lines, come, strict=True)]
    rails.maps = *maps, (list(regions), list(foreign_regions))
    heap.barrier(control.PHASE_NODES_PLAN)  # an error that one rail has learnt of reaches the others' ranks here

    own, foreign = copy.copy(plan), copy.copy(plan)
    # Found before the views of the storage, which are of the plan over all ranks.
    for made, its in ((own, [each[:num_tokens] for each in lines]), (foreign, come)):
        vars(made).update(zip(names, its, strict=True), num_tokens=len(its[0]), arrivals=arrivals_in_node(heap))
    own_rows = split_by_arrival(heap, (own, foreign)) if heap.topology.is_in_order else None
    vars(own)["regions"] = (_region(own, None, regions[heap.topology.node]),)
    vars(foreign)["regions"] = tuple(
        _region(foreign, slice(first, end), foreign_regions[source])
        for source, (first, end) in enumerate(rails.foreign_ranges)
        if end > first
    )
    tensors = [rails.token_to_home_row, rails.home_row_to_token, *lines, room, regions, foreign_regions]
    tensors += [] if own_rows is None else [own_rows, own.source_to_packed_start]
    return NodesPlan(rails, own, foreign, own_rows, tensors)


def _pick(lines: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Lines of a tensor; zeros if it has none."""
    return lines.index_select(0, index) if len(lines) else lines.new_zeros((len(index), *lines.shape[1:]))


def _by_node(by_rank: torch.Tensor, heap: SymmetricHeap) -> torch.Tensor:
    """[., R] as [., N, G]."""
    by_node = nodes_of(heap).maps.by_node
    return by_rank.view(len(by_rank), *by_node.shape) if heap.topology.is_in_order else by_rank[:, by_node]


def arrivals_in_node(heap: SymmetricHeap) -> list[int]:
    """See Plan.arrivals: the ranks of this node, then those that stand for ranks before it and after it."""
    ranks, first = heap.topology.ranks, heap.topology.local_rank
    around = [ranks[(first - step) % len(ranks)] for step in range(len(ranks))]
    return around + [end for end in (0, heap.num_ranks - 1) if end not in ranks]


def split_by_arrival(heap: SymmetricHeap, plans: tuple[PlanIntegers, PlanIntegers]) -> torch.Tensor:
    """Has both plans say which packed rows come with each of their sources; NodesPlan.own_rows."""
    plan, first, end = plans[0], heap.topology.ranks[0], heap.topology.ranks[-1] + 1
    packed_start = plan.source_to_packed_start.index_select(0, nodes_of(heap).maps.first_with)
    for each in plans:
        vars(each).update(source_to_packed_start=packed_start)
    return torch.stack([plan.source_to_rows[first, 0], plan.source_to_rows[end - 1, 1]])


def _region(plan: PlanIntegers, tokens: slice | None, numbers: torch.Tensor) -> Region:
    """Of the tokens that are from one rank. numbers: int32 [3, G], tokens that go to each rank, starts and limits."""
    which = slice(None) if tokens is None else tokens
    slots = plan.slot_to_row[which], plan.slot_to_rank[which]
    return Region(tokens, slots, (plan.token_to_packed_row[which], numbers[:1], numbers[1], numbers[2]))
