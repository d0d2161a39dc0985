"""The dispatch trip without autograd: rows of tokens travel to the ranks of their experts.

The receive buffer has one of two layouts; H is the number of features:
* packed [P, H]: one row per (token, rank); readers gather from it through `plan.row_to_packed_row`.
* expert-major [N, H]: the token lands in its primary row and the receiver copies it to the secondary rows; a rank's own
  tokens are written to all their rows.

Forward sends rows and slots (which rows a token has here, and their probs); backward sends only rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from symmoe import kernels
from symmoe.dispatch.maps import Plan
from symmoe.dispatch.slots import PHASE, READY_ROWS, Slots
from symmoe.kernels import control
from symmoe.symm_mem.heap import nodes_of


def send(
    x: torch.Tensor, plan: Plan, buffer: torch.Tensor, probs: torch.Tensor | None, *, layout: str
) -> torch.Tensor | None:
    """Sends rows and slots of x [T, H] to every rank's `buffer` (on the heap), in forward.

    Collective; does not synchronise the host. Sets the plan's `packed_to_row` and `row_to_packed_row`.

    Args:
        layout: layout of `buffer`: "packed" [P_cap, H] or "expert-major" [N_cap, H].

    Returns:
        row_probs: fp32 [N_cap], or None without probs.
    """
    heap, agreed = plan.heap, agreed_fields(x, plan, probs, layout, "serial")
    tensors = [x] if probs is None else [x, probs]
    with (
        Slots(plan, has_probs=probs is not None) as slots,
        heap.one_call,
        heap.timed("dispatch"),
        legs(tensors, plan, agreed) as travelling,
    ):
        offsets = (heap.offset_of(buffer, phase=PHASE), *slots.offsets)
        ready = heap.barrier(PHASE, publish=offsets, nan_on_failure=buffer, **agreed)
        for leg, (rows, *values) in travelling:
            _push(rows, leg, buffer, ready, layout)
            slots.push(leg, values[0] if values else None, ready)
        arrived = heap.barrier(control.PHASE_DISPATCH_DONE, nan_on_failure=buffer, **agreed)
        slots.index(plan.source_to_packed_start[:1], plan.num_packed, ready, arrived)
        fan_out(buffer, slots.packed_to_row, plan, layout)
    return slots.row_probs


def send_rows(x: torch.Tensor, plan: Plan, buffer: torch.Tensor, *, layout: str, gradients: int = 0) -> None:
    """Same as :func:`send`, but sends only rows, over a plan that has dispatched: for backward.

    gradients: index of control.GRADIENTS, what the backward pass will collect; the same on all ranks.
    """
    heap = plan.heap
    agreed = agreed_fields(x, plan, None, layout, "serial", gradients=gradients)
    packed_to_row, _ = plan.received_index()
    with heap.one_call, heap.timed("dispatch"), legs([x], plan, agreed) as travelling:
        ready = heap.barrier(PHASE, publish=(heap.offset_of(buffer, phase=PHASE),), nan_on_failure=buffer, **agreed)
        for leg, (rows,) in travelling:
            _push(rows, leg, buffer, ready, layout)
        heap.barrier(control.PHASE_DISPATCH_DONE, nan_on_failure=buffer, **agreed)
        fan_out(buffer, packed_to_row, plan, layout)


Leg = tuple[Plan, list[torch.Tensor]]


@contextmanager
def legs(tensors: list[torch.Tensor], plan: Plan, agreed: control.CallFields) -> Iterator[Iterator[Leg]]:
    """A context in which a dispatch sends tensors [T, .] to the ranks of its node. The trip's two barriers are in it.

    Yields:
        an iterator over what is sent, with the plan of its tokens: this rank's own, and between nodes, once they have
        come, those that the ranks of its rail have sent it. It ends with a meeting, see SymmetricHeap.meet: the last
        barrier comes next.
    """
    if (across := plan.across) is None:
        yield iter([(plan, tensors)])
        return
    crossing = across.crossing
    with crossing.bring_in(tensors, control.PHASE_NODES_OUT, agreed) as come:

        def both() -> Iterator[Leg]:
            yield across.own, tensors
            yield across.foreign, come()
            nodes_of(plan.heap).meet(control.PHASE_NODES_OUT, **crossing.agreed_on_rail(agreed))

        yield both()


def _push(x: torch.Tensor, plan: Plan, buffer: torch.Tensor, ready: torch.Tensor, layout: str) -> None:
    """Writes the rows to all ranks."""
    ops, heap = kernels.for_device(x.device), plan.heap
    if layout == "packed":
        ops.push_rows(x, plan.token_to_packed_row, heap.peers, ready, column=READY_ROWS)
    else:
        ops.push_rows(x, plan.token_to_primary_row, heap.peers, ready, column=READY_ROWS, but=heap.peers.rank)
        place_own_rows(x, plan, buffer, ready)


def place_own_rows(x: torch.Tensor, plan: Plan, buffer: torch.Tensor, ready: torch.Tensor) -> None:
    """Writes this rank's own tokens to all their rows in an expert-major buffer."""
    slots = plan.slot_to_rank, plan.slot_to_row
    kernels.for_device(x.device).place_rows(x, *slots, buffer, ready, rank=plan.heap.peers.rank)


def fan_out(
    buffer: torch.Tensor,
    packed_to_row: torch.Tensor,
    plan: Plan,
    layout: str,
    *,
    source: int | None = None,
    num_ctas: int | None = None,
) -> None:
    """Copies rows that have come to an expert-major buffer, of one source rank or of all, to their secondary rows."""
    if layout == "expert-major":
        start = plan.source_to_packed_start
        ops = kernels.for_device(buffer.device)
        ops.fan_out(buffer, packed_to_row, start, rank=plan.heap.rank, source=source, num_ctas=num_ctas)


def agreed_fields(
    x: torch.Tensor, plan: Plan, probs: torch.Tensor | None, layout: str, schedule: str, *, gradients: int = 0
) -> control.CallFields:
    """Fields of a dispatch on which all ranks must agree, so that rows fit the peers' buffers."""
    return {
        "hidden": x.shape[1],
        "dtype": control.DTYPES.index(x.dtype),
        "probs": int(probs is not None),
        "gradients": gradients,
        "layout": control.LAYOUTS.index(layout),
        "schedule": control.SCHEDULES.index(schedule),
        "plan": plan.generation,
    }
