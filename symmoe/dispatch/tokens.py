"""`dispatch_tokens`: tokens to their experts' ranks in expert-major rows, with autograd.

For experts of any kind that take rows sorted by expert. MoELayer uses the packed layout instead (symmoe.moe.fused).
"""

from __future__ import annotations

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from symmoe.combine.collect import ORDERS, collect_rows, collect_rows_and_values, on_heap
from symmoe.dispatch.plan import Plan
from symmoe.dispatch.send import PHASES, send_expert_major
from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.symm_mem.buffers import buffer_problem


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
        out: [plan.row_capacity, H] on the heap for the rows. None: a lease that lives as long as the plan, or until
            the backward pass is through.
        order: in which the backward pass sums a token's gradients (see combine_tokens).

    Returns:
        rows [N, H] with exact capacity, [capacity, H] with an undefined tail with static capacity; and row_probs
        fp32 [N] or [capacity], or None without probs.

    Raises:
        ArgumentError: on every rank if an argument is wrong on any (on GPUs the peers raise at their next call).
        PeerTimeout: a rank did not come.
    """
    heap = plan.heap
    heap.check()
    error = rows_problem("x", x, plan, num_rows=plan.num_tokens) or _problem(x, plan, probs, out, order)
    if error is not None:
        heap.fail(error, PHASES)
    rows, row_probs = _Dispatch.apply(x, probs, plan, out, order)
    return rows, row_probs


class _Dispatch(torch.autograd.Function):
    """The backward of dispatch is combine over the same plan."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: torch.Tensor,
        probs: torch.Tensor | None,
        plan: Plan,
        out: torch.Tensor | None,
        order: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = out
        if rows is None:
            rows = plan.lease_rows(x.shape[1], x.dtype, name="dispatched rows", phases=PHASES)
        row_probs = send_expert_major(x.contiguous(), plan, rows, None if probs is None else probs.contiguous())
        ctx.plan, ctx.order = plan, order
        return plan.rows_of(rows).detach(), None if row_probs is None else plan.rows_of(row_probs).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_rows: torch.Tensor, d_row_probs: torch.Tensor | None):
        plan: Plan = ctx.plan
        with on_heap(d_rows, plan, name="input gradients") as rows:
            if ctx.needs_input_grad[1]:
                dx, d_probs = collect_rows_and_values(rows, d_row_probs.contiguous(), plan, order=ctx.order)
            else:
                dx, d_probs = collect_rows(rows, plan, order=ctx.order), None
        plan.release()
        return dx, d_probs, None, None, None


def rows_problem(name: str, rows: object, plan: Plan, *, num_rows: int) -> ArgumentError | None:
    """What is wrong with a [num_rows, H] tensor that is to travel by `plan`, or None."""
    if not isinstance(rows, torch.Tensor) or rows.dim() != 2:
        given = list(rows.shape) if isinstance(rows, torch.Tensor) else type(rows).__name__
        return ArgumentError(f"{name} ({given}) must be a tensor with 2 dimensions")
    if rows.shape[0] != num_rows:
        return ArgumentError(f"{name} has {rows.shape[0]} rows; this plan needs {num_rows}")
    if rows.dtype not in control.DTYPES:
        return ArgumentError(f"{name} has dtype {rows.dtype}; it must be one of {', '.join(map(str, control.DTYPES))}")
    if rows.device != plan.heap.device:
        return ArgumentError(f"{name} is on {rows.device}; the heap is on {plan.heap.device}")
    if rows.device.type == "cuda" and rows.shape[1] * rows.element_size() % 16:
        return ArgumentError(
            f"{name} has rows of {rows.shape[1]} x {rows.element_size()} bytes; on GPUs a row must be a multiple of 16"
        )
    return None


def _problem(
    x: torch.Tensor, plan: Plan, probs: torch.Tensor | None, out: torch.Tensor | None, order: str
) -> ArgumentError | None:
    if order not in ORDERS:
        return ArgumentError(f"order ({order!r}) must be one of {ORDERS}")
    if probs is not None:
        if not isinstance(probs, torch.Tensor):
            return ArgumentError(f"probs ({type(probs).__name__}) must be a tensor")
        if tuple(probs.shape) != (plan.num_tokens, plan.top_k):
            return ArgumentError(f"probs has shape {list(probs.shape)}; it must be {[plan.num_tokens, plan.top_k]}")
        if probs.dtype != torch.float32 or probs.device != x.device:
            return ArgumentError(f"probs is {probs.dtype} on {probs.device}; it must be torch.float32 on {x.device}")
    if out is None:
        return None
    return buffer_problem("out", out, shape=(plan.row_capacity, x.shape[1]), like=x, inputs=(x,), heap=plan.heap)
