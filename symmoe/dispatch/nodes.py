"""A plan between nodes: which tokens go to which node, along which rows of a rail, and the maps that travel with them
(docs/design/nodes.md).

Row numbers are those of the plan over all ranks. Rows are ordered expert, source rank, token, k; packed rows are
ordered source rank, token. A source is a rank of any node. So rows of all ranks before this node are adjacent, and so
are rows of all ranks after it: two sources, the group's first and last rank, represent all other nodes.

Terms: a *trip* moves a call's rows out or home. *Own* tokens are this rank's; *foreign* tokens arrive along its rail,
and are sent last, together. A *region* is the adjacent packed rows of one source on one rank.

T tokens and K slots per token of this rank, N nodes, R ranks in all, G ranks of a node.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch

from symmoe import kernels
from symmoe.kernels import control
from symmoe.kernels.control import InNodeIntegers, PlanIntegers, in_node_layout, in_storage
from symmoe.symm_mem.heap import SymmetricHeap, nodes_of

_LINES = "slot_to_row", "slot_to_rank", "token_to_packed_row", "token_to_primary_row"
P = TypeVar("P", bound=PlanIntegers)  # a plan
Ways = Sequence[tuple[int, slice]]  # other nodes, and rows to or from each


class RailRows:
    """The tokens for each node, which their home selects before the plan is made: the first tokens up to the size of a
    message, `rail_rows`. Ranks publish the number of the others, HEAD_RAIL_DROPPED, with their node's counts. Ids out
    of range count as none. Made locally; does not synchronise. drops: whether slots of the others are dropped, equal on
    all ranks. topk_idx: the argument, with -1 for dropped slots."""

    def __init__(
        self,
        topk_idx: torch.Tensor,
        heap: SymmetricHeap,
        num_experts: int,
        rail_rows: int,
        drops: bool,
    ) -> None:
        (num_tokens, _), num_nodes, maps = (
            topk_idx.shape,
            heap.topology.num_nodes,
            nodes_of(heap).maps,
        )
        self._integers = topk_idx.new_empty(
            num_tokens * num_nodes + num_nodes + 2, dtype=torch.int32
        )
        numbers, rows = self.of(self._integers, num_nodes)
        kernels.for_device(heap.device).rail_rows(
            topk_idx, maps, numbers, rows, num_experts=num_experts, most=rail_rows
        )
        self._heap = heap
        self.topk_idx = topk_idx
        self._rail_rows = rail_rows
        self._numbers = numbers
        self._drops = drops
        self._number = numbers[-1:] if rail_rows < num_tokens else None
        if drops:
            rank = topk_idx.div(num_experts // heap.num_ranks, rounding_mode="floor")
            is_expert = (rank >= 0) & (rank < heap.num_ranks)
            node = maps.to_node[torch.where(is_expert, rank, -1)]
            lost = is_expert & (node != maps.here) & (rows.gather(1, node) < 0)
            self.topk_idx = topk_idx.masked_fill(lost, -1)
            self._number = lost.sum(dtype=torch.int32).view(1)

    @staticmethod
    def of(integers: torch.Tensor, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The results of the kernel `rail_rows`: numbers [N + 2], and token_to_rail_row [T, N]."""
        return integers[: num_nodes + 2], integers[num_nodes + 2 :].view(-1, num_nodes)

    def tell(self) -> None:
        """Writes the header words that only the device knows into this rank's counts, on all ranks of the node. Local,
        before the plan's barrier."""
        if self._number is not None:
            peers = self._heap.peers
            tell = kernels.for_device(self._heap.device).tell_header
            tell(self._number, peers, self._heap.rank, word=control.HEAD_RAIL_DROPPED)

    def share(self, config: int) -> torch.Tensor:
        """Adds the rows of all other nodes' ranks to this rank's count table. Collective over the group, after the
        plan's barrier. config: as in PlanOptions. Returns that barrier's result for all ranks."""
        heap = self._heap
        nodes = nodes_of(self._heap)
        topology = self._heap.topology
        peers = self._heap.peers
        ops = kernels.for_device(heap.device)
        shape = (len(topology.ranks), peers.layout.row_words)
        # Zeros where no count arrives.
        ours = self._numbers.new_empty(shape)
        come = self._numbers.new_empty((topology.num_nodes, *shape))
        ops.own_counts(nodes.maps.own_ranks, peers, ours, come)
        theirs = come[:-1]
        self._num_received = come[-1].flatten()[: topology.num_nodes]
        others = [node for node in range(topology.num_nodes) if node != topology.node]
        sends = [(node, self._numbers[node : node + 1]) for node in others]
        receives = [(node, self._num_received[node : node + 1]) for node in others]
        sends += [(node, ours) for node in others]
        receives += zip(others, theirs, strict=True)
        nodes.meet(control.PHASE_NODES_PLAN, rail_rows=self._rail_rows, config=config)
        with nodes.moving(sends, receives):
            pass  # no other work
        received = torch.empty(
            (heap.num_ranks, control.NUM_PUBLISHED), dtype=torch.int64, device=heap.device
        )
        ops.other_counts(theirs.flatten(0, 1), nodes.maps.other_ranks, peers, received)
        return received

    def complete(self, report: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the rails' sent and dropped numbers to the plan's report. Returns integers, see :meth:`of`; and int32
        [N], tokens that each node would send here."""
        report[control.SUM_MOST_SENT :][:1].copy_(self._numbers[-2:-1])
        if self._drops:
            rows = self._numbers.new_empty(
                (self._heap.num_ranks, self._heap.peers.layout.row_words)
            )
            ranks = nodes_of(self._heap).maps.by_node.flatten()
            kernels.for_device(self._heap.device).own_counts(
                ranks, self._heap.peers, rows, rows[:0]
            )
            dropped = rows[:, control.HEAD_RAIL_DROPPED].sum(dtype=torch.int32)
            report[control.SUM_NUM_DROPPED :][:1].add_(dropped)
        return self._integers, self._num_received


@dataclass(frozen=True, eq=False)
class RailPlan:
    """The path of one plan's tokens along the rail. *Sent* rows are the rows that this rank sends, in the order of
    nodes, an equal number for each other node; foreign tokens are in the order of nodes. *Home* rows are the rows of
    this rank's own tokens, then the sent rows."""

    heap: SymmetricHeap
    found: InNodeIntegers  # where tokens are inside each node
    num_sent: tuple[int, ...]  # by node, rows to it; 0 for this node
    num_received: tuple[int, ...]  # and rows from it
    sizes: int  # ranks of a rail must agree on it, so that messages fit
    number: int  # of the plan, equal on the ranks of the rail; each node counts plans by itself

    @contextmanager
    def bring_in(
        self,
        tensors: Sequence[torch.Tensor],
        phase: int,
        agreed: control.CallFields,
        *,
        brings_maps: bool,
    ) -> Iterator[Callable[[], list[torch.Tensor]]]:
        """A context in which rows of tensors [T, .] travel to the other nodes. Collective over the group; a barrier
        follows. phase, agreed: as in RemoteNodes.meet. brings_maps: whether the rows carry the maps. Yields a function
        that waits for other nodes' rows: of each tensor [F, .], for F foreign tokens."""
        heap, num_foreign, (there, back) = self.heap, sum(self.num_received), self.ways
        foreign = [tensor.new_empty((num_foreign, *tensor.shape[1:])) for tensor in tensors]
        sends = of_ways([self.sent_rows(tensor) for tensor in tensors], there)
        receives = of_ways(foreign, back)
        if brings_maps:
            num_tokens = len(self.found.token_to_home_row)
            num_home = len(self.found.home_row_to_token)
            lines, (sent, come_from) = (
                [getattr(self.found, name) for name in _LINES],
                self.found.regions,
            )
            sends += of_ways([each[num_tokens:num_home] for each in lines], there)
            receives += of_ways([each[num_home:] for each in lines], back)
            sends += [(node, sent[node]) for node, _ in there]
            receives += [(node, come_from[node]) for node, _ in back]
        self.meet(phase, agreed)
        with ExitStack() as travels:
            begin = partial(travels.enter_context, nodes_of(heap).moving(sends, receives))
            # A graph may run branches in sequence, in any order. Ranks that wait for other nodes before they reach the
            # barrier, or push their rows, and ranks that wait after it, would deadlock.
            wait = None if heap.streams.capture else begin()

            def come() -> list[torch.Tensor]:
                (wait or begin())()
                return foreign

            yield come

    @property
    def key(self) -> Hashable:
        """What determines the messages besides tensors."""
        return self.num_sent, self.num_received, self.sizes

    def meet(self, phase: int, agreed: control.CallFields) -> None:
        """A barrier of the rail's ranks, see RemoteNodes.meet. agreed: the values on which a node's ranks agree."""
        nodes_of(self.heap).meet(phase, sizes=self.sizes, rail_plan=self.number, **agreed)

    def sent_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """[A, .], the rows of a tensor [T, .] for other nodes; an unused place has any row."""
        token = self.found.home_row_to_token[len(self.found.token_to_home_row) :]
        sent = tensor.new_empty((len(token), tensor.shape[1]))
        kernels.for_device(sent.device).take_rows(tensor.contiguous(), token, sent)
        return sent

    @functools.cached_property
    def ways(self) -> tuple[Ways, Ways]:
        """For each other node, the sent rows that go to it, and the foreign tokens that come from it."""
        others = [*range(len(self.num_sent))]
        others.remove(self.heap.topology.node)
        most = max(self.num_sent)
        ends = [*itertools.accumulate(self.num_received)]
        starts = [0, *ends]
        sent = [slice(n * most, n * most + self.num_sent[node]) for n, node in enumerate(others)]
        received = [slice(starts[node], ends[node]) for node in others]
        return [*zip(others, sent, strict=True)], [*zip(others, received, strict=True)]


# Consecutive tokens of a plan from one rank: their range among the tokens sent together; their lines of slot_to_row and
# slot_to_rank; their lines of token_to_packed_row, int32 [., R]; each block's tokens for each rank; int32 [R], their
# first packed row on each rank; and the rows of the region there.
Region = tuple[
    slice,
    tuple[torch.Tensor, torch.Tensor],
    tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
]


class NodesPlan(Generic[P]):
    """The paths of a plan's tokens to other nodes, along `rails`, and inside them."""

    def __init__(self, plan: P, rails: RailPlan) -> None:
        self._plan = plan
        self._topology = rails.heap.topology
        self.rails = rails

    @functools.cached_property
    def own(self) -> P:
        """The plan of the own tokens inside this node. Its maps have a line for each own token, and refer to ranks of
        the node. Code inside a node uses it like the plan of a group on one node."""
        own = self._made(slice(len(self.rails.found.token_to_home_row)))
        regions = self.rails.found.regions[0]
        vars(own)["regions"] = (_region(own, slice(None), regions[self._topology.node]),)
        return own

    @functools.cached_property
    def foreign(self) -> P:
        """The plan of the foreign tokens inside this node."""
        foreign = self._made(slice(len(self.rails.found.home_row_to_token), None))
        regions, (_, received) = self.rails.found.regions[1], self.rails.ways
        its = (
            _region(foreign, tokens, regions[node])
            for node, tokens in received
            if tokens.stop > tokens.start
        )
        vars(foreign)["regions"] = tuple(its)
        return foreign

    def _made(self, lines: slice) -> P:
        """A plan with these lines of the maps."""
        found = self.rails.found
        made = copy.copy(self._plan)
        its = [getattr(found, name)[lines] for name in _LINES]
        # These take precedence over views of the storage, which belong to the plan over all ranks.
        vars(made).update(zip(_LINES, its, strict=True), num_tokens=len(its[0]))
        vars(made)["arrivals"] = arrivals_in_node(self.rails.heap)
        if self._topology.is_in_order:
            vars(made)["source_to_packed_start"] = found.source_to_packed_start
        return made


def plan_in_node(
    heap: SymmetricHeap,
    plan: P,
    integers: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    sizes: int,
) -> NodesPlan[P]:
    """The plans of the tokens inside the node, with these numbers of rows to and from each other node. The ranks of the
    rail exchange the maps of foreign tokens with the first rows. Collective over the group; does not synchronise the
    host. integers: of RailRows; sizes: as in RailPlan."""
    nodes = nodes_of(heap)
    topology = heap.topology
    num_local = plan.layout["row_range"][2][1]
    num_tokens, top_k = plan.layout["slot_to_row"][
        2
    ]  # not of a view, which a replayed call does not need
    sent, received = (
        [0 if node == topology.node else rows for node, rows in enumerate(each)]
        for each in (sent, received)
    )
    of_nodes = (
        (topology.num_nodes, len(topology.ranks)),
        max(sent) * (topology.num_nodes - 1),
        sum(received),
    )
    numel, layout = in_node_layout(num_tokens, top_k, num_local, *of_nodes)

    def launch() -> list[torch.Tensor]:
        found = in_storage(InNodeIntegers, plan.storage.new_empty(numel), layout)
        its = in_storage(PlanIntegers, plan.storage, plan.layout)
        numbers, rows = RailRows.of(integers, topology.num_nodes)
        kernels.for_device(heap.device).plan_in_node(its, rows, numbers, nodes.maps, found)
        heap.barrier(
            control.PHASE_NODES_PLAN
        )  # an error known to one rail reaches the other rails' ranks here
        return [found.storage]

    key = "plan in node", num_tokens, top_k, num_local, *of_nodes
    with heap.one_call:
        (storage,) = heap._run(key, launch, (plan.storage, integers))
    found = InNodeIntegers(storage, layout)
    return NodesPlan(
        plan, RailPlan(heap, found, tuple(sent), tuple(received), sizes, nodes.channel.number)
    )


def of_ways(tensors: Sequence[torch.Tensor], ways: Ways) -> list[tuple[int, torch.Tensor]]:
    """For each tensor, and in it for each node, the rows to or from that node."""
    return [(node, each[rows]) for each in tensors for node, rows in ways]


def arrivals_in_node(heap: SymmetricHeap) -> list[int]:
    """See Plan.arrivals: the ranks of this node, then those that represent ranks before it and after it."""
    ranks = heap.topology.ranks
    first = heap.topology.local_rank
    return [
        *ranks[first::-1],
        *ranks[:first:-1],
        *(end for end in (0, heap.num_ranks - 1) if end not in ranks),
    ]


def _region(plan: PlanIntegers, tokens: slice, numbers: torch.Tensor) -> Region:
    """The Region of tokens from one rank. numbers: int32 [3, G], tokens for each rank, starts and limits."""
    slots = plan.slot_to_row[tokens], plan.slot_to_rank[tokens]
    return tokens, slots, (plan.token_to_packed_row[tokens], numbers[:1], numbers[1], numbers[2])
