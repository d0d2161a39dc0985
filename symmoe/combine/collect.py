"""The combine trip without autograd: every token's rows come home from the ranks of its experts and are summed.

`order="rank"`: the expert's rank sums a token's rows into its primary row first, in place; home sums one row per rank.
`order="slot"`: home sums the K rows in k order, which gives the same bits for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from symmoe import kernels
from symmoe.dispatch.plan import Plan
from symmoe.kernels import control
from symmoe.symm_mem.autograd import wrote_into

READY_ROWS, READY_VALUES = range(2)  # what a rank publishes: where its rows are, and its per-row values
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
        rows: [N_cap, H] on the heap; with order "rank" its primary rows are overwritten.

    Returns:
        [T, H].
    """
    return _collect(rows, plan, order, None)[0]


def collect_rows_and_values(
    rows: torch.Tensor, row_values: torch.Tensor, plan: Plan, *, order: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`collect_rows`, and brings one fp32 value per row home: [N_cap] to [T, K], 0 for slots without a row."""
    packed_to_row, _ = plan.received_index()
    shape = (plan.packed_row_capacity, plan.top_k)
    with plan.heap.lease(shape, torch.float32, name="values to collect", phase=PHASE) as packed_values:
        ops = kernels.for_device(rows.device)
        ops.gather_values(row_values, packed_to_row, plan.num_packed, packed_values.tensor)
        return _collect(rows, plan, order, packed_values.offset)


def _collect(
    rows: torch.Tensor, plan: Plan, order: str, values_offset: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One trip: the sums, and the values that the ranks have gathered at `values_offset`, if any."""
    ops, heap = kernels.for_device(rows.device), plan.heap
    packed_to_row, _ = plan.received_index()
    agreed = {
        "hidden": rows.shape[1],
        "dtype": control.DTYPES.index(rows.dtype),
        "order": control.ORDERS.index(order),
        "probs": int(values_offset is not None),
    }
    offset = heap.offset_of(rows, phase=PHASE)  # before anything is written there
    if order == "rank":
        ops.pre_reduce(rows, packed_to_row, plan.num_packed)
        # Autograd must refuse a later use of what stood in the primary rows.
        wrote_into(rows)
        sources = (None, plan.token_to_primary_row)
    else:
        sources = (plan.slot_to_rank, plan.slot_to_row)
    out = torch.empty((plan.num_tokens, rows.shape[1]), dtype=rows.dtype, device=rows.device)
    values = None
    with heap.one_call():
        received = heap.barrier(PHASE, publish=(offset, values_offset or 0), **agreed)
        ops.pull_rows(*sources, heap.peers, received, out, column=READY_ROWS)
        if values_offset is not None:
            values = torch.empty((plan.num_tokens, plan.top_k), dtype=torch.float32, device=rows.device)
            ops.pull_values(
                plan.slot_to_rank, plan.token_to_packed_row, heap.peers, received, values, column=READY_VALUES
            )
        heap.barrier(control.PHASE_COMBINE_DONE, **agreed)
    return out, values
