"""The combine trip without autograd: every token's rows come home from the ranks of its experts and are summed.

`order="rank"`: the expert's rank sums the rows of a peer's token and writes the sum into the peer's memory; home sums
the rows that it has itself, rounds as peers do, and sums one row per rank.
`order="slot"`: home reads the K rows where they are and sums them in k order, which gives the same bits for any number
of ranks.
Between nodes home reads the rows of a token that are inside its node, and what other nodes have summed comes along the
rails (combine/nodes.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from symmoe import kernels
from symmoe.combine.nodes import sums_from_nodes
from symmoe.dispatch.plan import Plan
from symmoe.kernels import control
from symmoe.kernels.operands import given
from symmoe.symm_mem.lease import Lease

# What a rank publishes: where its rows are (order "slot") or sums are to go (order "rank"), where the last row of the
# first region of these is, and where its per-row values are.
READY_ROWS, READY_LAST_ROW, READY_VALUES = range(3)
PHASE = control.PHASE_COMBINE_READY  # the trip's first barrier


def pulls(plan: Plan, order: str) -> bool:
    """Whether rows are read where they are, on the heap; else their sums are sent."""
    return order != "rank" or plan.across is not None


@contextmanager
def readable_rows(rows: torch.Tensor, plan: Plan, *, order: str, name: str) -> Iterator[torch.Tensor]:
    """`rows` [., H] itself where the trip can read it, else a copy in a lease (counted: it is the slow path)."""
    heap = plan.heap
    is_aligned = rows.is_contiguous() and rows.data_ptr() % control.ACCESS_BYTES == 0
    if is_aligned and (not pulls(plan, order) or heap.owns(rows)):
        yield rows
        return
    heap.statistics.num_staging_copies += 1
    with heap.lease((plan.row_capacity, rows.shape[1]), rows.dtype, name=name, phase=PHASE) as lease:
        lease.tensor[: rows.shape[0]].copy_(rows)
        yield lease.tensor


def collect_rows(rows: torch.Tensor, plan: Plan, *, order: str) -> torch.Tensor:
    """Sums each token's rows. Collective; does not synchronise the host.

    Args:
        rows: [N_cap, H]; on the heap with order "slot".

    Returns:
        [T, H].
    """
    with Collection(rows, plan, order=order) as collection:
        collection.collect()
    return given("rows", collection.out)


class Collection:
    """One combine trip, as a context: :meth:`collect`, or with order "rank" its steps :meth:`open`, :meth:`send` for
    every peer as soon as the rows of its tokens are complete, and :meth:`finish`.

    Every step but `send` is collective.

    Args:
        rows: [N_cap, H]; on the heap with order "slot". None: only values come home.
        row_values: fp32 [N_cap], values that come home, complete before the context begins.
        gradients: in backward, index of control.GRADIENTS; the same on all ranks.

    Attributes:
        out: [T, H], the sums, complete after :meth:`finish`; None without rows.
        values: fp32 [T, K], complete after :meth:`finish`; None without row_values.
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
        self._whole_plan, plan = plan, plan if plan.across is None else plan.across.inside
        self._rows, self._plan, self._order, self._row_values = rows, plan, order, row_values
        self._pulls = pulls(self._whole_plan, order)
        adds_at_home = self._whole_plan.across is not None and order == "slot"
        self._lines = plan.slot_to_rank, plan.slot_to_row
        if adds_at_home:  # one by one: the sums are made at home, of rows from all nodes
            self._lines = plan.slot_to_rank.view(-1, 1), plan.slot_to_row.view(-1, 1)
        self._ops, self._exit = kernels.for_device(plan.heap.device), ExitStack()
        self._packed_to_row, _ = plan.received_index()
        self._agreed: control.CallFields = {
            "order": int(adds_at_home if self._whole_plan.across is not None else self._pulls),
            "gradients": gradients,
            "probs": int(row_values is not None),
            "plan": plan.generation,
        }
        # Here, not in `collect`: that may run on another stream.
        self.out: torch.Tensor | None = None
        if rows is not None:
            self._agreed["hidden"], self._agreed["dtype"] = rows.shape[1], control.DTYPES.index(rows.dtype)
            self.out = rows.new_empty((len(self._lines[0]), rows.shape[1]))
        self.values: torch.Tensor | None = None
        if row_values is not None:
            self.values = row_values.new_empty((plan.num_tokens, plan.top_k))

    def __enter__(self) -> Collection:
        plan, heap = self._plan, self._plan.heap
        with self._exit:
            values_offset = 0
            if self._row_values is not None:
                packed_values = self._lease((plan.packed_row_capacity, plan.top_k), torch.float32, "values to collect")
                self._ops.gather_values(self._row_values, self._packed_to_row, plan.num_packed, packed_values.tensor)
                values_offset = packed_values.offset
            rows_offset = last_row_offset = 0
            if self._rows is not None and self._pulls:
                rows_offset = heap.offset_of(self._rows, phase=PHASE)
            elif self._rows is not None:
                width, region_rows = self._rows.shape[1], max(1, plan.num_tokens) if heap.num_ranks > 1 else 1
                shape = (max(1, heap.num_ranks - 1) * region_rows, width)
                returned = self._lease(shape, self._rows.dtype, "returned sums")
                self._returned, rows_offset = returned.tensor, returned.offset
                last_row_offset = rows_offset + (region_rows - 1) * width * self._rows.element_size()
            self._publish = (rows_offset, last_row_offset, values_offset)
            self._exit.enter_context(heap.one_call())
            self._exit = self._exit.pop_all()
        return self

    def _lease(self, shape: tuple[int, int], dtype: torch.dtype, name: str) -> Lease:
        return self._exit.enter_context(self._plan.heap.lease(shape, dtype, name=name, phase=PHASE))

    def collect(self, *, num_ctas: int | None = None) -> None:
        """Brings home and sums all rows, which are complete.

        Args:
            num_ctas: programs of the kernels that move rows; None: no limit.
        """
        self.open()
        if num_ctas is None:
            self.send()
        else:  # kernels for few programs take one rank at a time
            for source in self._plan.arrivals[:0:-1]:
                self.send(source, num_ctas=num_ctas)
        self.finish(num_ctas=num_ctas)

    def open(self) -> None:
        """Waits until every rank has a place for sums; with order "slot", until all rows are complete."""
        plan, heap = self._plan, self._plan.heap
        with heap.timed("combine"):
            self._ready = ready = heap.barrier(PHASE, publish=self._publish, **self._agreed)
            trip = (heap.peers, ready)
            if self.out is not None and self._pulls:
                self._ops.pull_rows(*self._lines, *trip, self.out, column=READY_ROWS)
            if self.values is not None:
                index = (plan.slot_to_rank, plan.token_to_packed_row)
                self._ops.pull_values(*index, *trip, self.values, column=READY_VALUES)

    def send(self, source: int | None = None, *, num_ctas: int | None = None) -> None:
        """With order "rank": sums the rows of a peer's tokens and sends them there; None: of all peers."""
        if self._rows is None or self._pulls:
            return
        plan, heap = self._plan, self._plan.heap
        index = (self._packed_to_row, plan.source_to_packed_start)
        with heap.timed("combine"):
            self._ops.push_sums(
                self._rows, *index, heap.peers, self._ready, column=READY_ROWS, source=source, num_ctas=num_ctas
            )

    def finish(self, *, num_ctas: int | None = None) -> None:
        """Waits until every rank has sent and read everything, and makes the sums at home."""
        plan, heap = self._plan, self._plan.heap
        with heap.timed("combine"):
            arrived = heap.barrier(control.PHASE_COMBINE_DONE, **self._agreed)
            if (across := self._whole_plan.across) is not None:
                inside = self.out, self.values
                self.out, self.values = sums_from_nodes(self._whole_plan, across, *inside, self._order, self._agreed)
                return
            if self._rows is None or self.out is None or self._pulls:
                return
            self._ops.sum_home(
                self._rows,
                self._returned,
                plan.token_to_packed_row,
                plan.packed_start,
                plan.slot_to_rank,
                plan.slot_to_row,
                self._ready,
                arrived,
                self.out,
                rank=heap.rank,
                num_ctas=num_ctas,
            )

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        self._exit.close()
