"""The combine trip without autograd: every token's rows come home from the ranks of its experts and are summed, in one
of the orders of "Order of sums" in docs/design/trips.md. Between nodes home reads the rows of a token that are inside
its node, and what other nodes have summed comes along the rails (combine/nodes.py)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from symmoe import kernels
from symmoe.combine.nodes import Collected, FromNodes
from symmoe.dispatch.nodes import NodesPlan
from symmoe.dispatch.plan import Plan, reads_rows_in_place
from symmoe.kernels import control
from symmoe.kernels.gemm_parts import Division, Part
from symmoe.kernels.operands import require_tensor
from symmoe.symm_mem.memory import Lease

# What a rank publishes: where its rows are (order "slot") or sums are to go (order "rank"), where the last row of the
# first region of these is, and where its per-row values are.
READY_ROWS, READY_LAST_ROW, READY_VALUES = range(3)
PHASE = control.PHASE_COMBINE_READY  # the trip's first barrier


ComputePart = Callable[
    [Part | None], None
]  # computes a part of the rows that combine reads; None: all


def combine(
    rows: torch.Tensor,
    plan: Plan,
    compute: ComputePart = lambda part: None,
    *,
    order: str,
    division: Division | None = None,
) -> torch.Tensor:
    """Calls `compute` to fill `rows`, and sums each token's on its own rank. Collective; does not synchronise the host.

    Args:
        rows: [N_cap, H]; on the heap with order "slot". The result is [T, H].
        compute: called for all rows, or with a division for one part after the other, which goes home while the next
            one is computed: the parts of a dispatch in the opposite order. Between nodes rows of foreign tokens come
            first: their sums go home while those of this node's tokens are computed.
        division: the division of the SMs meanwhile; None: rows do not travel during GEMMs.
    """
    collection = CombineTrip(rows, plan, order=order)
    if division is None or plan.nodes is not None:
        with combine_during(collection, compute, division):
            pass
        return require_tensor("rows", collection.out)
    branch = plan.heap.streams.branch()
    of_sources = plan.source_to_rows
    # A tile with rows of two ranks belongs to the one that arrives later: so after its part all its rows are there.
    (last, *sources), (before, own, after) = (
        plan.arrivals[::-1],
        plan.parts_of_replicas(division.num_sms),
    )
    with collection:
        for part in (*before, *after, Part(of_sources[last])):
            compute(part)
        try:
            for sent, source in zip([last, *sources], sources, strict=False):
                point = branch.point()
                compute(Part(of_sources[source], division.num_sms))
                for part in own if source == sources[-1] else ():
                    compute(part)
                with branch.after(point):
                    if sent == last:
                        collection.open()
                    collection.send(sent, num_ctas=division.num_ctas)
        finally:
            branch.join()
        collection.finish()  # nothing else runs meanwhile
    return require_tensor("rows", collection.out)


@contextmanager
def combine_during(
    collection: CombineTrip, compute: ComputePart, division: Division | None = None
) -> Iterator[CombineTrip]:
    """Context of a collection, complete after it, of rows that `compute` fills, see :func:`combine`. The caller may
    compute other things in it, at the same time if there is a division of the SMs. Collective; does not synchronise the
    host."""
    if division is not None and (nodes := collection.plan.nodes) is not None:
        with _on_rails(collection, nodes, compute, division):
            yield collection
        return
    compute(None)
    if division is None:
        yield collection
        with collection:
            collection.collect()
        return
    branch = collection.plan.heap.streams.branch()
    with collection:
        point = branch.point()
        yield collection
        try:
            with branch.after(point):
                collection.collect(num_ctas=division.num_ctas)
        finally:
            branch.join()


@contextmanager
def _on_rails(
    collection: CombineTrip, nodes: NodesPlan[Plan], compute: ComputePart, division: Division
) -> Iterator[None]:
    """A collection whose rows of foreign tokens are computed first: their sums are on the rails while those of this
    node's tokens, and what the caller does in the context, are computed."""
    heap = collection.plan.heap
    branch = collection.plan.heap.streams.branch()
    with collection:
        for part in itertools.chain(*collection.plan.parts_of_replicas()):
            compute(part)
        for source in nodes.own.arrivals[len(heap.topology.ranks) :]:
            compute(Part(nodes.own.source_to_rows[source]))
        collection.open()  # before the next GEMM, for whose SMs these sums would wait
        point = branch.point()
        compute(Part(nodes.rails.found.own_rows, division.num_sms))
        try:
            with branch.after(point):
                collection.leave()
            yield
        finally:
            branch.join()
        collection.open_again()
        collection.finish()


class CombineTrip:
    """One combine trip, as a context: :meth:`collect`, or its steps, collective but for `send`: :meth:`open`, with
    order "rank" :meth:`send` for every peer as soon as the rows of its tokens are complete, and :meth:`finish`. Between
    nodes :meth:`open` has the sums of foreign tokens leave, and :meth:`finish` makes those of this node's; where the
    rows of the latter are complete later, :meth:`open_again` comes between.

    Args:
        rows: [N_cap, H]; on the heap with order "slot". None: only values come home.
        row_values: fp32 [N_cap], values that come home, complete before the context begins.
        gradients: in backward, index of control.GRADIENTS; the same on all ranks.

    Attributes:
        out, values: [T, H], the sums, and fp32 [T, K], complete after :meth:`finish`; None without rows, row_values.
    """

    def __init__(
        self,
        rows: torch.Tensor | None,
        plan: Plan,
        *,
        order: str,
        row_values: torch.Tensor | None = None,
        gradients: int = 0,
    ) -> None:
        self._rows = rows
        self.plan = plan
        self._order = order
        self._row_values = row_values
        self._pulls = reads_rows_in_place(order, plan.nodes)
        self._ops = kernels.for_device(plan.heap.device)
        self._exit = ExitStack()
        self._packed_to_row, _ = plan.received_index()
        self._agreed: control.CallFields = {
            "order": int(self._pulls if plan.nodes is None else order == "slot"),
            "gradients": gradients,
            "probs": int(row_values is not None),
            "plan": plan.generation,
        }
        # Here, not in `collect`: that may run on another stream.
        self.out: torch.Tensor | None = None
        if rows is not None:
            self._agreed["hidden"], self._agreed["dtype"] = (
                rows.shape[1],
                control.DTYPES.index(rows.dtype),
            )
            self.out = rows.new_empty((plan.num_tokens, rows.shape[1]))
        self.values = (
            None if row_values is None else row_values.new_empty((plan.num_tokens, plan.top_k))
        )
        self._from_nodes: FromNodes | None = None
        if plan.nodes is not None:
            self._from_nodes = FromNodes(
                plan, plan.nodes, rows, has_values=row_values is not None, order=order
            )

    def __enter__(self) -> CombineTrip:
        plan = self.plan
        heap = self.plan.heap
        with self._exit:
            values_offset = 0
            if self._row_values is not None:
                packed_values = self._lease(
                    (plan.packed_row_capacity, plan.top_k), torch.float32, "values to collect"
                )
                self._ops.gather_values(
                    self._row_values, self._packed_to_row, plan.num_packed, packed_values.tensor
                )
                values_offset = packed_values.offset
            rows_offset = last_row_offset = 0
            if self._rows is not None and self._pulls:
                rows_offset = heap._offset_of(self._rows, phase=PHASE)
            elif self._rows is not None:
                width = self._rows.shape[1]
                region_rows = max(1, plan.num_tokens) if heap.num_ranks > 1 else 1
                shape = (max(1, heap.num_ranks - 1) * region_rows, width)
                returned = self._lease(shape, self._rows.dtype, "returned sums")
                self._returned = returned.tensor
                rows_offset = returned.offset
                last_row_offset = (
                    rows_offset + (region_rows - 1) * width * self._rows.element_size()
                )
            self._publish = (rows_offset, last_row_offset, values_offset)
            self._exit.enter_context(heap.one_call)
            self._exit = self._exit.pop_all()
        return self

    def _lease(self, shape: tuple[int, int], dtype: torch.dtype, name: str) -> Lease:
        return self._exit.enter_context(self.plan.heap.lease(shape, dtype, name=name, phase=PHASE))

    def collect(self, *, num_ctas: int | None = None) -> None:
        """Brings home and sums all rows, which are complete. num_ctas: of kernels that move rows; None: no limit."""
        self.open()
        self.leave()
        # Kernels for few programs take one rank at a time.
        for source in (None,) if num_ctas is None else self.plan.arrivals[:0:-1]:
            self.send(source, num_ctas=num_ctas)
        self.finish(num_ctas=num_ctas)

    def open(self) -> None:
        """Waits until every rank has a place for sums; with order "slot", until all rows are complete. Between nodes,
        until the rows of tokens of other nodes are, whose sums then leave."""
        with self.plan.heap._timed("combine"):
            self._ready = self.plan.heap.barrier(PHASE, publish=self._publish, **self._agreed)
            if self._from_nodes is None:
                rows = self.out[:, None] if self._pulls and self.out is not None else None
                self._pull(Collected(self.plan, rows, self.values))
            else:
                self._pull(self._from_nodes.foreign)

    def leave(self) -> None:
        """Between nodes, sends the sums of tokens of other nodes home."""
        if self._from_nodes is not None:
            with self.plan.heap._timed("combine"):
                self._come = self._exit.enter_context(self._from_nodes.travel(self._agreed))

    def open_again(self) -> None:
        """Between nodes, where only the rows of other nodes' tokens were complete: waits until all are."""
        heap = self.plan.heap
        if heap.streams.capture and len(heap.topology.ranks) > 1:
            # A graph may run branches one after the other, in any order: ranks that wait for other nodes before the
            # barrier, and ranks that do so after it, would wait for each other.
            self._come()
        self._ready = heap.barrier(PHASE, publish=self._publish, **self._agreed)

    def _pull(self, wanted: Collected) -> None:
        """Sums rows where they are, and brings values."""
        plan = wanted.plan
        trip = (self.plan.heap.peers, self._ready)
        if wanted.rows is not None:
            lines = plan.slot_to_rank, plan.slot_to_row
            if wanted.rows.shape[1] > 1:  # one by one
                lines = plan.slot_to_rank.view(-1, 1), plan.slot_to_row.view(-1, 1)
            self._ops.pull_rows(*lines, *trip, wanted.rows.flatten(0, 1), column=READY_ROWS)
        if wanted.values is not None:
            index = (plan.slot_to_rank, plan.token_to_packed_row)
            self._ops.pull_values(*index, *trip, wanted.values, column=READY_VALUES)

    def send(self, source: int | None = None, *, num_ctas: int | None = None) -> None:
        """With order "rank": sums the rows of a peer's tokens and sends them there; None: of all peers."""
        if self._rows is None or self._pulls:
            return
        index = (self._packed_to_row, self.plan.source_to_packed_start)
        trip = (self.plan.heap.peers, self._ready)
        with self.plan.heap._timed("combine"):
            self._ops.push_sums(
                self._rows, *index, *trip, column=READY_ROWS, source=source, num_ctas=num_ctas
            )

    def finish(self, *, num_ctas: int | None = None) -> None:
        """Waits until every rank has sent and read everything, and makes the sums at home."""
        plan = self.plan
        heap = self.plan.heap
        with heap._timed("combine"):
            nan_on_failure = None
            if self._from_nodes is not None:
                self._pull(self._from_nodes.own)
                self._come()
                self._from_nodes.add(self.out, self.values, self._ready)
                self._from_nodes.rails.meet(control.PHASE_NODES_HOME, self._agreed)
                nan_on_failure = self.values if self.out is None else self.out
            arrived = heap.barrier(
                control.PHASE_COMBINE_DONE, nan_on_failure=nan_on_failure, **self._agreed
            )
            if self._rows is None or self.out is None or self._pulls:
                return
            index = plan.token_to_packed_row, plan.packed_start, plan.slot_to_rank, plan.slot_to_row
            rows = (self._rows, self._returned)
            trip = (self._ready, arrived)
            self._ops.sum_home(rows, index, trip, self.out, rank=heap.rank, num_ctas=num_ctas)

    def __exit__(self, *exc: Any) -> None:
        self._exit.__exit__(*exc)
