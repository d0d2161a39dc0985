"""The combine trip without autograd: every token's rows return from the ranks of its experts and are summed, in one of
the orders of "Order of sums" in docs/design/trips.md. Between nodes, a token's rank reads the rows inside its node, and
other nodes' sums arrive along the rails (combine/nodes.py)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from symmoe import kernels
from symmoe.combine.nodes import Collected, FromNodes
from symmoe.dispatch.nodes import NodesPlan
from symmoe.dispatch.plan import Plan, ReceivedIndex, reads_rows_in_place
from symmoe.kernels import control
from symmoe.kernels.gemm_parts import Division, Part
from symmoe.kernels.operands import require_tensor
from symmoe.symm_mem.memory import Lease

# A rank publishes the offsets of its rows (order "slot") or of its buffer for sums (order "rank"), of the last row of
# that buffer's first region, and of its per-row values.
READY_ROWS, READY_LAST_ROW, READY_VALUES = range(3)
PHASE = control.PHASE_COMBINE_READY  # the trip's first barrier


ComputePart = Callable[[Part | None], None]  # computes a part of combine's input rows; None: all


def combine(
    rows: torch.Tensor,
    plan: Plan,
    index: ReceivedIndex,
    compute: ComputePart = lambda part: None,
    *,
    order: str,
    division: Division | None = None,
) -> torch.Tensor:
    """Calls `compute` to fill `rows`, and sums the rows of a token on the token's rank. Collective; does not
    synchronise the host.

    Args:
        rows: [N_cap, H]; on the heap with order "slot". The result is [T, H].
        index: of the forward dispatch.
        compute: called for all rows, or with a division for one part after the other: the parts of a dispatch in
            reverse order. A part travels while the next one is computed. Between nodes foreign tokens are first: their
            sums travel while this node's rows are computed.
        division: the division of the SMs; None: rows do not travel during GEMMs.
    """
    collection = CombineTrip(rows, plan, index, order=order)
    if division is None or plan.nodes is not None:
        with combine_during(collection, compute, division):
            pass
        return require_tensor("rows", collection.out)
    branch = plan.heap.streams.branch()
    source_to_rows = plan.source_to_rows
    # A tile with rows of two ranks belongs to the later one, so that its part has all rows of the tile.
    last, *sources = reversed(plan.arrivals)
    before, own_replicas, after = plan.parts_of_replicas(division.num_sms)
    with collection:
        for part in (*before, *after, Part(source_to_rows[last])):
            compute(part)
        try:
            for sent, source in zip([last, *sources], sources, strict=False):
                point = branch.point()
                compute(Part(source_to_rows[source], division.num_sms))
                for part in own_replicas if source == sources[-1] else ():
                    compute(part)
                with branch.after(point):
                    if sent == last:
                        collection.open()
                    collection.send(sent, num_ctas=division.num_ctas)
        finally:
            branch.join()
        collection.finish()  # no other work runs meanwhile
    return require_tensor("rows", collection.out)


@contextmanager
def combine_during(
    collection: CombineTrip, compute: ComputePart, division: Division | None = None
) -> Iterator[CombineTrip]:
    """A context that collects the rows that `compute` fills, see :func:`combine`; complete after it. Other work of the
    caller inside it runs at the same time if there is a division of the SMs. Collective; does not synchronise the
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
    """A collection that computes rows of foreign tokens first: their sums travel on the rails during the computation of
    this node's rows and the caller's work in the context."""
    heap = collection.plan.heap
    branch = collection.plan.heap.streams.branch()
    with collection:
        for part in itertools.chain(*collection.plan.parts_of_replicas()):
            compute(part)
        for source in nodes.own_plan.arrivals[len(heap.topology.ranks) :]:
            compute(Part(nodes.own_plan.source_to_rows[source]))
        collection.open()  # before the next GEMM, which would occupy the SMs of these sums
        point = branch.point()
        compute(Part(nodes.rails.integers.own_rows, division.num_sms))
        try:
            with branch.after(point):
                collection.send_foreign()
            yield
        finally:
            branch.join()
        collection.open_again()
        collection.finish()


class CombineTrip:
    """One combine trip, as a context: :meth:`collect`, or its steps, collective except `send`: :meth:`open`, with order
    "rank" :meth:`send` for every peer when the rows of its tokens are complete, and :meth:`finish`. Between nodes
    :meth:`open` sends the sums of foreign tokens, and :meth:`finish` makes the sums of this node's tokens. If the
    latter rows are complete later, call :meth:`open_again` in between.

    Args:
        rows: [N_cap, H]; on the heap with order "slot". None: only values return.
        index: of the forward dispatch.
        row_values: fp32 [N_cap], values to return, complete before the context begins.
        gradients: in backward, index of control.GRADIENTS; equal on all ranks.

    Attributes:
        out, values: [T, H], the sums, and fp32 [T, K], complete after :meth:`finish`; None without rows, row_values.
    """

    def __init__(
        self,
        rows: torch.Tensor | None,
        plan: Plan,
        index: ReceivedIndex,
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
        self._packed_to_row = index.packed_to_row
        self._agreed: control.CallFields = {
            "order": int(self._pulls if plan.nodes is None else order == "slot"),
            "gradients": gradients,
            "probs": int(row_values is not None),
            "plan": plan.generation,
        }
        # Here, because `collect` may run on another stream.
        self.out = None if rows is None else rows.new_empty((plan.num_tokens, rows.shape[1]))
        if rows is not None:
            self._agreed["hidden"] = rows.shape[1]
            self._agreed["dtype"] = control.DTYPES.index(rows.dtype)
        self.values = (
            None if row_values is None else row_values.new_empty((plan.num_tokens, plan.top_k))
        )
        self._from_nodes = (
            None
            if plan.nodes is None
            else FromNodes(plan, plan.nodes, rows, has_values=row_values is not None, order=order)
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
        """Collects and sums all rows, which are complete. num_ctas: limit for moving kernels; None: no limit."""
        self.open()
        self.send_foreign()
        # Kernels for few programs take one rank at a time.
        for source in (None,) if num_ctas is None else self.plan.arrivals[:0:-1]:
            self.send(source, num_ctas=num_ctas)
        self.finish(num_ctas=num_ctas)

    def open(self) -> None:
        """Waits until every rank has a buffer for sums; with order "slot", until all rows are complete. Between nodes,
        waits for the rows of other nodes' tokens, and sends their sums."""
        with self.plan.heap._timed("combine"):
            self._ready = self.plan.heap.barrier(PHASE, publish=self._publish, **self._agreed)
            if self._from_nodes is None:
                rows = self.out[:, None] if self._pulls and self.out is not None else None
                self._pull(Collected(self.plan, rows, self.values))
            else:
                self._pull(self._from_nodes.foreign_results)

    def send_foreign(self) -> None:
        """Between nodes, sends the sums of tokens of other nodes home."""
        if self._from_nodes is not None:
            with self.plan.heap._timed("combine"):
                self._wait_for_nodes = self._exit.enter_context(
                    self._from_nodes.exchange_sums(self._agreed)
                )

    def open_again(self) -> None:
        """Waits until all rows are complete, between nodes, if :meth:`open` has waited for other nodes' tokens only."""
        heap = self.plan.heap
        if heap.streams.capture and len(heap.topology.ranks) > 1:
            # A graph may run branches in sequence, in any order: ranks that wait for other nodes before the barrier,
            # and ranks that wait after it, would deadlock.
            self._wait_for_nodes()
        self._ready = heap.barrier(PHASE, publish=self._publish, **self._agreed)

    def _pull(self, results: Collected) -> None:
        """Sums rows in place, and reads values."""
        plan = results.plan
        trip = (self.plan.heap.peers, self._ready)
        if results.rows is not None:
            slots = plan.slot_to_rank, plan.slot_to_row
            if results.rows.shape[1] > 1:  # single rows
                slots = plan.slot_to_rank.view(-1, 1), plan.slot_to_row.view(-1, 1)
            self._ops.pull_rows(*slots, *trip, results.rows.flatten(0, 1), column=READY_ROWS)
        if results.values is not None:
            self._ops.pull_values(
                plan.slot_to_rank,
                plan.token_to_packed_row,
                *trip,
                results.values,
                column=READY_VALUES,
            )

    def send(self, source: int | None = None, *, num_ctas: int | None = None) -> None:
        """With order "rank": sums the rows of a peer's tokens and sends the sums to it; None: of all peers."""
        if self._rows is None or self._pulls:
            return
        with self.plan.heap._timed("combine"):
            self._ops.push_sums(
                self._rows,
                self._packed_to_row,
                self.plan.source_to_packed_start,
                self.plan.heap.peers,
                self._ready,
                column=READY_ROWS,
                source=source,
                num_ctas=num_ctas,
            )

    def finish(self, *, num_ctas: int | None = None) -> None:
        """Waits until every rank has sent and read all data, and makes the sums of this rank's tokens."""
        plan = self.plan
        heap = self.plan.heap
        with heap._timed("combine"):
            nan_on_failure = None
            if self._from_nodes is not None:
                self._pull(self._from_nodes.own_results)
                self._wait_for_nodes()
                self._from_nodes.add(self.out, self.values, self._ready)
                self._from_nodes.rails.rendezvous(control.PHASE_NODES_HOME, self._agreed)
                nan_on_failure = self.values if self.out is None else self.out
            arrived = heap.barrier(
                control.PHASE_COMBINE_DONE, nan_on_failure=nan_on_failure, **self._agreed
            )
            if self._rows is None or self.out is None or self._pulls:
                return
            self._ops.sum_home(
                (self._rows, self._returned),
                (plan.token_to_packed_row, plan.packed_start, plan.slot_to_rank, plan.slot_to_row),
                (self._ready, arrived),
                self.out,
                rank=heap.rank,
                num_ctas=num_ctas,
            )

    def __exit__(self, *exc: Any) -> None:
        self._exit.__exit__(*exc)
