"""The dispatch trip without autograd: rows of tokens travel to the ranks of their experts.

Two layouts of the receive buffer, H hidden:
* packed [P, H]: one row per (token, rank); GEMMs gather from it through `plan.row_to_packed_row`.
* expert-major [N, H]: the token lands in its primary row and the receiver copies it to the secondary rows.
"""

from __future__ import annotations

import torch

from symmoe import kernels
from symmoe.dispatch.plan import Plan
from symmoe.kernels import control

READY_ROWS, READY_SLOTS, READY_PROBS = range(3)  # what a rank publishes: where it wants each of these
PHASES = (control.PHASE_DISPATCH_READY, control.PHASE_DISPATCH_DONE)


def send_packed(x: torch.Tensor, plan: Plan, packed: torch.Tensor, probs: torch.Tensor | None) -> torch.Tensor | None:
    """x [T, H] to every rank's `packed` [P_cap, H] (on the heap). Collective; does not synchronise the host.

    Returns:
        row_probs: fp32 [N_cap], or None without probs.
    """
    return _send(x, plan.token_to_packed_row, plan, packed, probs)


def send_expert_major(
    x: torch.Tensor, plan: Plan, rows: torch.Tensor, probs: torch.Tensor | None
) -> torch.Tensor | None:
    """x [T, H] to every rank's `rows` [N_cap, H] (on the heap). Collective; does not synchronise the host.

    Returns:
        row_probs: fp32 [N_cap], or None without probs.
    """
    row_probs = _send(x, plan.token_to_primary_row, plan, rows, probs)
    packed_to_row, _ = plan.received_index()
    kernels.for_device(x.device).fan_out(rows, packed_to_row, plan.num_packed)
    return row_probs


def _send(
    x: torch.Tensor, token_to_row: torch.Tensor, plan: Plan, buffer: torch.Tensor, probs: torch.Tensor | None
) -> torch.Tensor | None:
    ops, heap = kernels.for_device(x.device), plan.heap
    if plan.packed_to_row is not None and probs is None:  # a later dispatch of the plan: the index is here already
        received = heap.barrier(PHASES[0], publish=(heap.offset_of(buffer, phases=PHASES),))
        ops.push_rows(x, token_to_row, heap.peers, received, column=READY_ROWS)
        heap.barrier(PHASES[1])
        return None

    shape = (plan.packed_row_capacity, plan.top_k)
    with (
        heap.lease(shape, torch.int32, name="received slots", phases=PHASES) as wire_slots,
        heap.lease(shape, torch.float32, name="received probs", phases=PHASES) as wire_probs,
    ):
        offsets = (heap.offset_of(buffer, phases=PHASES), wire_slots.offset, wire_probs.offset)
        received = heap.barrier(PHASES[0], publish=offsets)
        ops.push_rows(x, token_to_row, heap.peers, received, column=READY_ROWS)
        ops.push_slots(
            plan.slot_to_row,
            plan.slot_to_rank,
            probs,
            plan.token_to_packed_row,
            plan.block_tokens,
            plan.packed_start,
            plan.packed_limit,
            heap.peers,
            received,
            row_column=READY_SLOTS,
            prob_column=READY_PROBS,
        )
        arrived = heap.barrier(PHASES[1])
        packed_to_row = torch.empty(shape, dtype=torch.int32, device=x.device)
        row_to_packed_row = torch.empty(plan.row_capacity, dtype=torch.int32, device=x.device)
        row_probs = None
        if probs is not None:
            row_probs = torch.empty(plan.row_capacity, dtype=torch.float32, device=x.device)
        ops.index_rows(
            wire_slots.tensor,
            None if probs is None else wire_probs.tensor,
            plan.num_packed,
            received,
            arrived,
            packed_to_row,
            row_to_packed_row,
            row_probs,
        )
    plan.packed_to_row, plan.row_to_packed_row = packed_to_row, row_to_packed_row
    return row_probs
