"""The dispatch trip without autograd: rows of tokens travel to the ranks of their experts.

The receive buffer has one of two layouts; H is the number of features:
* packed [P, H]: one row per (token, rank); readers gather from it through `plan.row_to_packed_row`.
* expert-major [N, H]: the token lands in its primary row and the receiver copies it to the secondary rows; a rank's own
  tokens are written to all their rows.

Forward sends rows and slots (which rows a token has here, and their probs); backward sends only rows.
"""

from __future__ import annotations

import torch

from symmoe import kernels
from symmoe.dispatch.maps import Across, Plan
from symmoe.dispatch.slots import PHASE, READY_ROWS, Slots
from symmoe.kernels import control


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
    if plan.across is not None:
        return _send_between_nodes(x, plan, plan.across, buffer, probs, layout=layout)
    heap, agreed = plan.heap, agreed_fields(x, plan, probs, layout, "serial")
    with Slots(plan, probs) as slots, heap.one_call(), heap.timed("dispatch"):
        offsets = (heap.offset_of(buffer, phase=PHASE), *slots.offsets)
        ready = heap.barrier(PHASE, publish=offsets, spoils=buffer, **agreed)
        _push(x, plan, buffer, ready, layout)
        slots.push(ready)
        arrived = heap.barrier(control.PHASE_DISPATCH_DONE, spoils=buffer, **agreed)
        slots.index(plan.source_to_packed_start[:1], plan.num_packed, ready, arrived)
    _fan_out(buffer, plan, layout)
    return slots.row_probs


def send_rows(x: torch.Tensor, plan: Plan, buffer: torch.Tensor, *, layout: str, gradients: int = 0) -> None:
    """Same as :func:`send`, but sends only rows, over a plan that has dispatched: for backward.

    gradients: index of control.GRADIENTS, what the backward pass will collect; the same on all ranks.
    """
    heap = plan.heap
    agreed = agreed_fields(x, plan, None, layout, "serial", gradients=gradients)
    if plan.across is not None:
        (rows,) = plan.across.crossing.bring_in([x], control.PHASE_NODES_OUT, agreed)
        send_rows(rows, plan.across.inside, buffer, layout=layout, gradients=gradients)
        heap.meet(control.PHASE_NODES_OUT, **plan.across.crossing.agreed_on_rail(agreed))
        return
    with heap.one_call(), heap.timed("dispatch"):
        ready = heap.barrier(PHASE, publish=(heap.offset_of(buffer, phase=PHASE),), spoils=buffer, **agreed)
        _push(x, plan, buffer, ready, layout)
        heap.barrier(control.PHASE_DISPATCH_DONE, spoils=buffer, **agreed)
    _fan_out(buffer, plan, layout)


def _send_between_nodes(
    x: torch.Tensor, plan: Plan, across: Across, buffer: torch.Tensor, probs: torch.Tensor | None, *, layout: str
) -> torch.Tensor | None:
    """Same as :func:`send`: first along the rails, then inside the node."""
    crossing, inside = across.crossing, across.inside
    agreed = agreed_fields(x, plan, probs, layout, "serial")
    rows, *values = crossing.bring_in([x] if probs is None else [x, probs], control.PHASE_NODES_OUT, agreed)
    row_probs = send(rows, inside, buffer, values[0] if values else None, layout=layout)
    # What has gone wrong inside another node.
    plan.heap.meet(control.PHASE_NODES_OUT, **crossing.agreed_on_rail(agreed))
    plan.packed_to_row, plan.row_to_packed_row = inside.received_index()
    return row_probs


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


def _fan_out(buffer: torch.Tensor, plan: Plan, layout: str) -> None:
    if layout == "packed":
        return
    packed_to_row, _ = plan.received_index()
    ops, start = kernels.for_device(buffer.device), plan.source_to_packed_start
    with plan.heap.timed("dispatch"):
        ops.fan_out(buffer, packed_to_row, start, rank=plan.own_source)


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


def token_to_row(plan: Plan, layout: str) -> torch.Tensor:
    """int32 [T, R]: where a token's row lands on each rank, -1 for nowhere."""
    return plan.token_to_packed_row if layout == "packed" else plan.token_to_primary_row
