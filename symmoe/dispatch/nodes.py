"""A plan between nodes: which tokens go to which node, along which rows of a rail, and the maps that travel with them
(docs/design/nodes.md).

Row numbers are numbers of the plan over all ranks. Rows are ordered expert, source rank, token, k; packed rows are
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

_MAPS = "slot_to_row", "slot_to_rank", "token_to_packed_row", "token_to_primary_row"
P = TypeVar("P", bound=PlanIntegers)  # a plan
NodeSlices = Sequence[tuple[int, slice]]  # for each other node, the rows to or from it


class RailRows:
    """The tokens for each node, which their home selects before the plan's kernels run: the first tokens up to the size
    of a message, `rail_rows`. Ranks publish the number of further tokens, HEAD_RAIL_DROPPED, with their node's counts.
    Ids out of range count as none. Local; does not synchronise. drops: whether slots of further tokens are dropped,
    equal on all ranks. topk_idx: the argument, with -1 for dropped slots."""

    def __init__(
        self,
        topk_idx: torch.Tensor,
        heap: SymmetricHeap,
        num_experts: int,
        rail_rows: int,
        drops: bool,
    ) -> None:
        num_tokens = topk_idx.shape[0]
        num_nodes = heap.topology.num_nodes
        maps = nodes_of(heap).maps
        self._integers = topk_idx.new_empty(
            num_tokens * num_nodes + num_nodes + 2, dtype=torch.int32
        )
        numbers, token_to_rail_row_TN = self.results_in(self._integers, num_nodes)
        kernels.for_device(heap.device).rail_rows(
            topk_idx,
            maps,
            numbers,
            token_to_rail_row_TN,
            num_experts=num_experts,
            max_rows=rail_rows,
        )
        self._heap = heap
        self.topk_idx = topk_idx
        self._rail_rows = rail_rows
        self._numbers = numbers
        self._drops = drops
        self._num_dropped = numbers[-1:] if rail_rows < num_tokens else None
        if drops:
            rank_TK = topk_idx.div(num_experts // heap.num_ranks, rounding_mode="floor")
            is_expert_TK = (rank_TK >= 0) & (rank_TK < heap.num_ranks)
            node_TK = maps.to_node[torch.where(is_expert_TK, rank_TK, -1)]
            rail_row_TK = token_to_rail_row_TN.gather(1, node_TK)
            is_dropped_TK = is_expert_TK & (node_TK != maps.own_node) & (rail_row_TK < 0)
            self.topk_idx = topk_idx.masked_fill(is_dropped_TK, -1)
            self._num_dropped = is_dropped_TK.sum(dtype=torch.int32).view(1)

    @staticmethod
    def results_in(integers: torch.Tensor, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The results of the kernel `rail_rows`: numbers [N + 2], and token_to_rail_row [T, N]."""
        return integers[: num_nodes + 2], integers[num_nodes + 2 :].view(-1, num_nodes)

    def publish_dropped(self) -> None:
        """Writes the header words that only the device knows into this rank's counts, on all ranks of the node. Local,
        before the plan's barrier."""
        if self._num_dropped is not None:
            kernels.for_device(self._heap.device).publish_header(
                self._num_dropped,
                self._heap.peers,
                self._heap.rank,
                word=control.HEAD_RAIL_DROPPED,
            )

    def exchange_counts(self, config: int) -> torch.Tensor:
        """Adds the rows of all other nodes' ranks to this rank's count table. Collective over the group, after the
        plan's barrier. config: as in PlanOptions. Returns that barrier's result for all ranks."""
        heap = self._heap
        nodes = nodes_of(self._heap)
        topology = self._heap.topology
        peers = self._heap.peers
        ops = kernels.for_device(heap.device)
        shape = (len(topology.ranks), peers.layout.row_words)
        # Zeros where no count arrives.
        own_counts = self._numbers.new_empty(shape)
        received_words = self._numbers.new_empty((topology.num_nodes, *shape))
        ops.own_counts(nodes.maps.own_ranks, peers, own_counts, received_words)
        other_counts = received_words[:-1]
        self._num_received = received_words[-1].flatten()[: topology.num_nodes]
        other_nodes = [node for node in range(topology.num_nodes) if node != topology.node]
        sends = [(node, self._numbers[node : node + 1]) for node in other_nodes]
        receives = [(node, self._num_received[node : node + 1]) for node in other_nodes]
        sends += [(node, own_counts) for node in other_nodes]
        receives += zip(other_nodes, other_counts, strict=True)
        nodes.rendezvous(control.PHASE_NODES_PLAN, rail_rows=self._rail_rows, config=config)
        with nodes.transfer(sends, receives):
            pass  # no other work
        received = torch.empty(
            (heap.num_ranks, control.NUM_PUBLISHED), dtype=torch.int64, device=heap.device
        )
        ops.other_counts(other_counts.flatten(0, 1), nodes.maps.other_ranks, peers, received)
        return received

    def complete(self, report: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the rails' sent and dropped numbers to the plan's report. Returns integers, see :meth:`results_in`; and
        int32 [N], tokens that each node would send here."""
        report[control.SUM_MOST_SENT :][:1].copy_(self._numbers[-2:-1])
        if self._drops:
            counts = self._numbers.new_empty(
                (self._heap.num_ranks, self._heap.peers.layout.row_words)
            )
            ranks = nodes_of(self._heap).maps.by_node.flatten()
            kernels.for_device(self._heap.device).own_counts(
                ranks, self._heap.peers, counts, counts[:0]
            )
            num_dropped = counts[:, control.HEAD_RAIL_DROPPED].sum(dtype=torch.int32)
            report[control.SUM_NUM_DROPPED :][:1].add_(num_dropped)
        return self._integers, self._num_received


@dataclass(frozen=True, eq=False)
class RailPlan:
    """The path of one plan's tokens along the rail. *Sent* rows are the rows that this rank sends, in the order of
    nodes, an equal number for each other node; foreign tokens are in the order of nodes. *Home* rows are the rows of
    this rank's own tokens, then the sent rows."""

    heap: SymmetricHeap
    integers: InNodeIntegers  # the maps of tokens inside each node
    num_sent: tuple[int, ...]  # by node, rows to it; 0 for this node
    num_received: tuple[int, ...]  # and rows from it
    sizes: int  # ranks of a rail must agree on it, so that messages fit
    number: int  # of the plan, equal on the ranks of the rail; each node counts plans by itself

    @contextmanager
    def exchange_tokens(
        self,
        tensors: Sequence[torch.Tensor],
        phase: int,
        agreed: control.CallFields,
        *,
        sends_maps: bool,
    ) -> Iterator[Callable[[], list[torch.Tensor]]]:
        """A context in which rows of tensors [T, .] travel to the other nodes. Collective over the group; a barrier
        follows. phase, agreed: as in RemoteNodes.rendezvous. sends_maps: whether the maps travel with the rows. Yields
        a function that waits for other nodes' rows: of each tensor [F, .], for F foreign tokens."""
        heap = self.heap
        num_foreign = sum(self.num_received)
        to_nodes, from_nodes = self.node_slices
        foreign = [tensor.new_empty((num_foreign, *tensor.shape[1:])) for tensor in tensors]
        sends = slices_by_node([self.sent_rows(tensor) for tensor in tensors], to_nodes)
        receives = slices_by_node(foreign, from_nodes)
        if sends_maps:
            num_tokens = len(self.integers.token_to_home_row)
            num_home = len(self.integers.home_row_to_token)
            maps = [getattr(self.integers, name) for name in _MAPS]
            sent_regions, received_regions = self.integers.regions
            sends += slices_by_node([rows[num_tokens:num_home] for rows in maps], to_nodes)
            receives += slices_by_node([rows[num_home:] for rows in maps], from_nodes)
            sends += [(node, sent_regions[node]) for node, _ in to_nodes]
            receives += [(node, received_regions[node]) for node, _ in from_nodes]
        self.rendezvous(phase, agreed)
        with ExitStack() as travels:
            begin = partial(travels.enter_context, nodes_of(heap).transfer(sends, receives))
            # A graph may run branches in sequence, in any order. Ranks that wait for other nodes before they reach the
            # barrier, or push their rows, and ranks that wait after it, would deadlock.
            wait = None if heap.streams.capture else begin()

            def wait_for_foreign() -> list[torch.Tensor]:
                (wait or begin())()
                return foreign

            yield wait_for_foreign

    @property
    def key(self) -> Hashable:
        """The values other than tensors that determine the messages."""
        return self.num_sent, self.num_received, self.sizes

    def rendezvous(self, phase: int, agreed: control.CallFields) -> None:
        """A barrier of the rail's ranks, see RemoteNodes.rendezvous. agreed: the values on which a node's ranks
        agree."""
        nodes_of(self.heap).rendezvous(phase, sizes=self.sizes, rail_plan=self.number, **agreed)

    def sent_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """[A, .], the rows of a tensor [T, .] for other nodes; an unused row has any values."""
        token = self.integers.home_row_to_token[len(self.integers.token_to_home_row) :]
        sent = tensor.new_empty((len(token), tensor.shape[1]))
        kernels.for_device(sent.device).take_rows(tensor.contiguous(), token, sent)
        return sent

    @functools.cached_property
    def node_slices(self) -> tuple[NodeSlices, NodeSlices]:
        """For each other node, the sent rows that go to it, and the foreign tokens that it sends."""
        other_nodes = [*range(len(self.num_sent))]
        other_nodes.remove(self.heap.topology.node)
        stride = max(self.num_sent)
        ends = [*itertools.accumulate(self.num_received)]
        starts = [0, *ends]
        to_nodes = [
            (node, slice(n * stride, n * stride + self.num_sent[node]))
            for n, node in enumerate(other_nodes)
        ]
        return to_nodes, [(node, slice(starts[node], ends[node])) for node in other_nodes]


# Consecutive tokens of a plan from one rank: their range among the tokens sent together; their rows of slot_to_row and
# slot_to_rank; their rows of token_to_packed_row, int32 [., R]; each block's tokens for each rank; int32 [R], their
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
    def own_plan(self) -> P:
        """The plan of the own tokens inside this node. Its maps have a row for each own token, and refer to ranks of
        the node. Code inside a node uses it like the plan of a group on one node."""
        own_plan = self._restricted(slice(len(self.rails.integers.token_to_home_row)))
        regions = self.rails.integers.regions[0]
        vars(own_plan)["regions"] = (_region(own_plan, slice(None), regions[self._topology.node]),)
        return own_plan

    @functools.cached_property
    def foreign_plan(self) -> P:
        """The plan of the foreign tokens inside this node."""
        foreign_plan = self._restricted(slice(len(self.rails.integers.home_row_to_token), None))
        regions = self.rails.integers.regions[1]
        _, from_nodes = self.rails.node_slices
        vars(foreign_plan)["regions"] = tuple(
            _region(foreign_plan, tokens, regions[node])
            for node, tokens in from_nodes
            if tokens.stop > tokens.start
        )
        return foreign_plan

    def _restricted(self, rows: slice) -> P:
        """The plan with only these rows of the maps."""
        integers = self.rails.integers
        plan = copy.copy(self._plan)
        maps = [getattr(integers, name)[rows] for name in _MAPS]
        # These maps take precedence over views of the storage, which belong to the plan over all ranks.
        vars(plan).update(zip(_MAPS, maps, strict=True), num_tokens=len(maps[0]))
        vars(plan)["arrivals"] = arrivals_in_node(self.rails.heap)
        if self._topology.is_in_order:
            vars(plan)["source_to_packed_start"] = integers.source_to_packed_start
        return plan


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
    # Not of a view, which a replayed call does not need.
    num_tokens, top_k = plan.layout["slot_to_row"][2]
    sent, received = (
        [0 if node == topology.node else rows for node, rows in enumerate(rows_by_node)]
        for rows_by_node in (sent, received)
    )
    node_sizes = (
        (topology.num_nodes, len(topology.ranks)),
        max(sent) * (topology.num_nodes - 1),
        sum(received),
    )
    numel, layout = in_node_layout(num_tokens, top_k, num_local, *node_sizes)

    def launch() -> list[torch.Tensor]:
        in_node = in_storage(InNodeIntegers, plan.storage.new_empty(numel), layout)
        all_ranks = in_storage(PlanIntegers, plan.storage, plan.layout)
        numbers, token_to_rail_row_TN = RailRows.results_in(integers, topology.num_nodes)
        kernels.for_device(heap.device).plan_in_node(
            all_ranks, token_to_rail_row_TN, numbers, nodes.maps, in_node
        )
        # An error of one rail reaches the ranks of the other rails here.
        heap.barrier(control.PHASE_NODES_PLAN)
        return [in_node.storage]

    key = "plan in node", num_tokens, top_k, num_local, *node_sizes
    with heap.one_call:
        (storage,) = heap._run(key, launch, (plan.storage, integers))
    in_node = InNodeIntegers(storage, layout)
    rails = RailPlan(heap, in_node, tuple(sent), tuple(received), sizes, nodes.channel.number)
    return NodesPlan(plan, rails)


def slices_by_node(
    tensors: Sequence[torch.Tensor], node_slices: NodeSlices
) -> list[tuple[int, torch.Tensor]]:
    """For each tensor, and in it for each node, the rows to or from that node."""
    return [(node, tensor[rows]) for tensor in tensors for node, rows in node_slices]


def arrivals_in_node(heap: SymmetricHeap) -> list[int]:
    """See Plan.arrivals: the ranks of this node, then the ranks that represent all ranks before and after it."""
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
