"""`dispatch_tokens`: tokens to their experts' ranks in expert-major rows, with autograd.

For experts of any kind that take rows sorted by expert. MoELayer uses the packed layout instead (symmoe.moe.fused).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, overload

import torch
from torch.autograd.function import once_differentiable

from symmoe.combine.collect import collect_rows, collect_rows_and_values, on_heap
from symmoe.dispatch.plan import Plan
from symmoe.dispatch.send import send_expert_major, send_packed, send_packed_gradient
from symmoe.dispatch.slots import PHASE
from symmoe.errors import ArgumentError, SymmoeError
from symmoe.kernels import control
from symmoe.symm_mem.autograd import Context, Function, wrote_into
from symmoe.symm_mem.buffers import buffer_problem, dtype_problem


@overload
def dispatch_tokens(
    x: torch.Tensor, plan: Plan, *, probs: torch.Tensor, out: torch.Tensor | None = None, order: str = "rank"
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def dispatch_tokens(
    x: torch.Tensor, plan: Plan, *, probs: None = None, out: torch.Tensor | None = None, order: str = "rank"
) -> tuple[torch.Tensor, None]: ...


def dispatch_tokens(
    x: torch.Tensor,
    plan: Plan,
    *,
    probs: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    order: str = "rank",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sends every token to the ranks of its experts. Collective; does not synchronise the host. Differentiable.

    Rows are ordered expert, source rank, token, k; `plan.splits` says how many each local expert has. One copy of a
    token goes over the wire per rank, however many experts it has there.

    Args:
        x: [T, H] fp32, fp16 or bf16, T as in the plan; H * itemsize must be a multiple of 16 on GPUs.
        plan: from make_plan.
        probs: fp32 [T, K], the weight of each slot; travels along and gets its gradient back.
        out: [plan.row_capacity, H] on the heap for the rows, which land there. None: the rows are copied out of a
            transient lease into memory of their own (counted in `heap.statistics`). Given by all ranks or by none.
        order: in which the backward pass sums a token's gradients (see combine_tokens). With "rank", backward
            overwrites a gradient of the rows that lies on the heap: a buffer given as `grad_input_out` or `grad_out`
            further up is consumed.

    Returns:
        rows [N, H] with exact capacity, [capacity, H] with an undefined tail with static capacity; and row_probs
        fp32 [N] or [capacity], or None without probs.

    Raises:
        ArgumentError: on every rank if an argument is wrong on any (on GPUs the peers raise at their next call on the
            heap, or in heap.synchronize).
        ConfigMismatch: ranks disagree on H, dtype, or whether there are probs or an `out` (then their layouts differ);
            likewise.
        PeerTimeout: a rank did not come.
    """
    if not isinstance(plan, Plan):
        raise ArgumentError(f"plan ({type(plan).__name__}) must be what make_plan returns")
    heap = plan.heap
    heap.check()
    heap.fail_for(rows_problem("x", x, plan, num_rows=plan.num_tokens) or _problem(x, plan, probs, out, order), PHASE)
    rows, row_probs = _Dispatch.apply(x, probs, plan, out, order)
    return rows, row_probs


class _Context(Context, Protocol):
    plan: Plan
    order: str


class _Dispatch(Function):
    """The backward of dispatch is combine over the same plan."""

    @staticmethod
    def forward(
        ctx: _Context,
        x: torch.Tensor,
        probs: torch.Tensor | None,
        plan: Plan,
        out: torch.Tensor | None,
        order: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.plan, ctx.order = plan, order
        x, probs = x.contiguous(), None if probs is None else probs.contiguous()
        if out is None:
            rows, row_probs = _send_and_unpack(x, plan, probs)
        else:
            row_probs = send_expert_major(x, plan, out, probs)
            rows = plan.rows_of(wrote_into(out)).detach()
        return rows, None if row_probs is None else plan.rows_of(row_probs).detach()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _Context, d_rows: torch.Tensor, d_row_probs: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        plan = ctx.plan
        d_probs: torch.Tensor | None = None
        with on_heap(d_rows, plan, name="input gradients") as rows:
            if ctx.needs_input_grad[1] and d_row_probs is not None:
                dx, d_probs = collect_rows_and_values(rows, d_row_probs.contiguous(), plan, order=ctx.order)
            else:
                dx = collect_rows(rows, plan, order=ctx.order)
        return dx, d_probs, None, None, None


def _send_and_unpack(
    x: torch.Tensor, plan: Plan, probs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    with packed_lease(x, plan) as packed:
        row_probs = send_packed(x, plan, packed, probs)
        return unpack_rows(packed, plan), row_probs


def receive_gradient(dy: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The gradient of the rows [N_cap, H] in memory of their own, from the gradient of the tokens. Collective."""
    with packed_lease(dy, plan) as packed:
        send_packed_gradient(dy, plan, packed)
        return unpack_rows(packed, plan)


@contextmanager
def packed_lease(x: torch.Tensor, plan: Plan) -> Iterator[torch.Tensor]:
    """A transient receive buffer for a caller that brought none: what arrives in it has to be copied out."""
    plan.heap.statistics.num_staging_copies += 1
    shape = (plan.packed_row_capacity, x.shape[1])
    with plan.heap.lease(shape, x.dtype, name="packed rows", phase=PHASE) as packed:
        yield packed.tensor


def unpack_rows(packed: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Each row's packed row: [P_cap, H] to [N, H] with exact capacity, [N_cap, H] with static capacity."""
    _, row_to_packed_row = plan.received_index()
    return packed.index_select(0, plan.rows_of(row_to_packed_row))


def rows_problem(name: str, rows: object, plan: Plan, *, num_rows: int) -> ArgumentError | None:
    """What is wrong with a [num_rows, H] tensor that is to travel by `plan`, or None."""
    if not isinstance(rows, torch.Tensor) or rows.dim() != 2:
        given = list(rows.shape) if isinstance(rows, torch.Tensor) else type(rows).__name__
        return ArgumentError(f"{name} ({given}) must be a tensor with 2 dimensions")
    if rows.shape[0] != num_rows:
        return ArgumentError(f"{name} has {rows.shape[0]} rows; this plan needs {num_rows}")
    if (error := dtype_problem(name, rows.dtype)) is not None:
        return error
    if rows.device != plan.heap.device:
        return ArgumentError(f"{name} is on {rows.device}; the heap is on {plan.heap.device}")
    if rows.device.type == "cuda" and rows.shape[1] * rows.element_size() % control.ACCESS_BYTES:
        return ArgumentError(
            f"{name} has rows of {rows.shape[1]} x {rows.element_size()} bytes; on GPUs a row must be a multiple of "
            f"{control.ACCESS_BYTES}"
        )
    return None


def _problem(
    x: torch.Tensor, plan: Plan, probs: torch.Tensor | None, out: torch.Tensor | None, order: str
) -> SymmoeError | None:
    if order not in control.ORDERS:
        return ArgumentError(f"order ({order!r}) must be one of {control.ORDERS}")
    if probs is not None:
        if not isinstance(probs, torch.Tensor):
            return ArgumentError(f"probs ({type(probs).__name__}) must be a tensor")
        if tuple(probs.shape) != (plan.num_tokens, plan.top_k):
            return ArgumentError(f"probs has shape {list(probs.shape)}; it must be {[plan.num_tokens, plan.top_k]}")
        if probs.dtype != torch.float32 or probs.device != x.device:
            return ArgumentError(f"probs is {probs.dtype} on {probs.device}; it must be torch.float32 on {x.device}")
    if out is None:
        return None
    shape = (plan.row_capacity, x.shape[1])
    return buffer_problem("out", out, shape=shape, dtype=x.dtype, device=x.device, inputs=(x,), heap=plan.heap)
