"""The combine trip without autograd: every token's rows come home from the ranks of its experts and are summed.

`order="rank"`: the expert's rank sums the rows of a peer's token into its primary row first, in place; home sums the
rows that it has itself, rounds as peers do, and sums one row per rank.
`order="slot"`: home sums the K rows in k order, which gives the same bits for any number of ranks.
`order="node"`: as "rank" inside each node, which rounds its sum; home sums one row per node (combine/nodes.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from symmoe import kernels
from symmoe.autograd import wrote_into
from symmoe.combine.nodes import order_inside, sums_from_nodes
from symmoe.dispatch.plan import Plan
from symmoe.kernels import control
from symmoe.kernels.operands import given

READY_ROWS, READY_VALUES = range(2)  # what a rank publishes: where its rows and its per-row values are
PHASE = control.PHASE_COMBINE_READY  # the trip's first barrier


@contextmanager
def on_heap(rows: torch.Tensor, plan: Plan, *, name: str) -> Iterator[torch.Tensor]:
    """`rows` [., H] itself where peers can read it in place, else a copy in a lease (counted: it is the slow path)."""
    heap = plan.heap
    if heap.owns(rows) and rows.is_contiguous() and rows.data_ptr() % control.ACCESS_BYTES == 0:
        yield rows
        return
    heap.statistics.num_staging_copies += 1
    with heap.lease((plan.row_capacity, rows.shape[1]), rows.dtype, name=name, phase=PHASE) as lease:
        lease.tensor[: rows.shape[0]].copy_(rows)
        yield lease.tensor


def collect_rows(rows: torch.Tensor, plan: Plan, *, order: str) -> torch.Tensor:
    """Sums each token's rows. Collective; does not synchronise the host.

    Args:
        rows: [N_cap, H] on the heap; with order "rank" the primary rows of peers' tokens are overwritten.

    Returns:
        [T, H].
    """
    with Collection(rows, plan, order=order) as collection:
        collection.collect()
    return given("rows", collection.out)


class Collection:
    """One combine trip, as a context in which the sums are made, at once or by panels of columns as rows are finished.

    Every call of :meth:`collect` is collective, and so is leaving the context.

    Args:
        rows: [N_cap, H] on the heap; with order "rank" the primary rows of peers' tokens are overwritten. None: only
            values come home.
        row_values: fp32 [N_cap], values that come home, complete before the first :meth:`collect`.
        num_panels: number of calls of :meth:`collect`, the same on all ranks.
        gradients: in backward, index of control.GRADIENTS; the same on all ranks.

    Attributes:
        out: [T, H], the sums, complete after the context; None without rows.
        values: fp32 [T, K], complete after the context; None without row_values.
    """

    def __init__(
        self,
        rows: torch.Tensor | None,
        plan: Plan,
        *,
        order: str,
        row_values: torch.Tensor | None = None,
        num_panels: int = 1,
        gradients: int = 0,
    ) -> None:
        self._whole_plan, plan = plan, plan if plan.across is None else plan.across.inside
        self._rows, self._plan, self._order, self._row_values = rows, plan, order, row_values
        self._ops, self._exit = kernels.for_device(plan.heap.device), ExitStack()
        self._packed_to_row, _ = plan.received_index()
        self._agreed: control.CallFields = {
            "order": control.ORDERS.index(order_inside(order)),
            "gradients": gradients,
            "probs": int(row_values is not None),
            "panels": num_panels,
            "plan": plan.generation,
        }
        # Here, not in `collect`: that may run on another stream.
        self.out: torch.Tensor | None = None
        if rows is not None:
            self._agreed["hidden"], self._agreed["dtype"] = rows.shape[1], control.DTYPES.index(rows.dtype)
            num_lines = plan.num_tokens if order_inside(order) == "rank" else len(plan.slots_to_sum[0])
            self.out = rows.new_empty((num_lines, rows.shape[1]))
        self.values: torch.Tensor | None = None
        if row_values is not None:
            self.values = row_values.new_empty((plan.num_tokens, plan.top_k))
        self._has_values = False

    def __enter__(self) -> Collection:
        plan, heap = self._plan, self._plan.heap
        with self._exit:
            values_offset = 0
            if self._row_values is not None:
                shape = (plan.packed_row_capacity, plan.top_k)
                lease = heap.lease(shape, torch.float32, name="values to collect", phase=PHASE)
                packed_values = self._exit.enter_context(lease)
                self._ops.gather_values(self._row_values, self._packed_to_row, plan.num_packed, packed_values.tensor)
                values_offset = packed_values.offset
            # The offset is looked up before anything is written there.
            rows_offset = 0 if self._rows is None else heap.offset_of(self._rows, phase=PHASE)
            self._publish = (rows_offset, values_offset)
            self._exit.enter_context(heap.one_call())
            self._exit = self._exit.pop_all()
        return self

    def collect(self, columns: tuple[int, int] | None = None, *, num_ctas: int | None = None) -> None:
        """Sums columns (the first, one past the last) of each token's rows, which are complete; None: all.

        Args:
            num_ctas: programs of the kernels that move rows; None: no limit.
        """
        with self._plan.heap.timed("combine"):
            self._collect(columns, num_ctas)

    def _collect(self, columns: tuple[int, int] | None, num_ctas: int | None) -> None:
        plan, heap, ops = self._plan, self._plan.heap, self._ops
        sums_ranks = order_inside(self._order) == "rank"
        if self._rows is not None and sums_ranks:
            ops.pre_reduce(
                self._rows,
                self._packed_to_row,
                plan.source_to_packed_start,
                rank=plan.unsummed_source,
                columns=columns,
                num_ctas=num_ctas,
            )
            # Autograd must refuse a later use of the old primary rows, even without peers: code that works on one rank
            # works on several.
            wrote_into(self._rows)
        received = heap.barrier(PHASE, publish=self._publish, **self._agreed)
        if self.out is not None:
            slots = plan.ranks_to_sum if sums_ranks else plan.slots_to_sum
            trip = partial(ops.pull_sums, plan.token_to_primary_row, plan.slot_to_rank, plan.slot_to_row)
            if slots is not None:
                trip = partial(ops.pull_rows, *slots)
            trip(heap.peers, received, self.out, column=READY_ROWS, columns=columns, num_ctas=num_ctas)
        if self.values is not None and not self._has_values:
            self._has_values = True
            ops.pull_values(
                plan.slot_to_rank, plan.token_to_packed_row, heap.peers, received, self.values, column=READY_VALUES
            )

    def __exit__(self, exc_type: type[BaseException] | None, *exc: object) -> None:
        with self._exit:
            if exc_type is None:
                with self._plan.heap.timed("combine"):
                    self._plan.heap.barrier(control.PHASE_COMBINE_DONE, **self._agreed)
                    if (across := self._whole_plan.across) is not None:
                        parts = self.out, self.values
                        sums = sums_from_nodes(self._whole_plan, across, *parts, self._order, self._agreed)
                        self.out, self.values = sums
