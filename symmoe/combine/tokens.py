"""`combine_tokens`: expert outputs back to their tokens' ranks, summed, with autograd."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.autograd.function import once_differentiable

from symmoe.combine.collect import PHASE, collect_rows, on_heap
from symmoe.dispatch.plan import Plan, is_one_of
from symmoe.dispatch.send import send_expert_major_gradient
from symmoe.dispatch.slots import PHASE as SEND
from symmoe.dispatch.tokens import receive_gradient, rows_problem
from symmoe.errors import ArgumentError, SymmoeError
from symmoe.kernels import control
from symmoe.symm_mem.autograd import Context, Function, GradientBuffer
from symmoe.symm_mem.buffers import buffer_problem, memory_problem
from symmoe.symm_mem.told import told


def combine_tokens(
    expert_out: torch.Tensor, plan: Plan, *, order: str = "rank", grad_out: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums every token's rows on its own rank. Collective; does not synchronise the host. Differentiable.

    The sum is unweighted: apply the probs in the experts.

    Args:
        expert_out: [N, H] or [plan.row_capacity, H], rows as dispatch_tokens gave them out. On the heap it is read in
            place, and with order "rank" the primary rows of peers' tokens are overwritten (its version counter tells
            autograd, whether or not there are any). Anywhere else it is copied to the heap first: the slow path,
            counted in `heap.statistics`.
        plan: of the dispatch.
        order: "rank": a token's rows on one rank are summed first, then ranks are summed; least traffic. "slot": the
            K rows are summed in k order; bitwise independent of the number of ranks.
        grad_out: buffer on the heap, of the shape of `expert_out`, where its gradient lands; rows past N keep what
            they held. Given by all ranks or by none. None: the gradient is copied out of a transient lease into memory
            of its own (counted).

    Returns:
        [T, H].

    Raises:
        ArgumentError: on every rank if an argument is wrong on any (on GPUs the peers raise at their next call on the
            heap, or in heap.synchronize).
        ConfigMismatch: ranks disagree on H, dtype or order; likewise.
        StalePlan: nothing has been dispatched with the plan.
        PeerTimeout: a rank did not come.
    """
    if not isinstance(plan, Plan):
        raise ArgumentError(f"plan ({type(plan).__name__}) must be what make_plan returns")
    heap = plan.heap
    heap.check()
    with told(heap, PHASE):
        heap.fail_for(_problem(expert_out, plan, order, grad_out), PHASE)
        y: torch.Tensor = _Combine.apply(expert_out, plan, order, grad_out)
    return y


class _Context(Context, Protocol):
    plan: Plan
    grad_out: GradientBuffer
    num_rows: int


class _Combine(Function):
    """The backward of combine is dispatch over the same plan."""

    @staticmethod
    def forward(
        ctx: _Context, expert_out: torch.Tensor, plan: Plan, order: str, grad_out: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.plan, ctx.grad_out, ctx.num_rows = plan, GradientBuffer("grad_out", grad_out), expert_out.shape[0]
        with on_heap(expert_out, plan, name="expert output") as rows:
            return collect_rows(rows, plan, order=order)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan, buffer = ctx.plan, ctx.grad_out.tensor
        with told(plan.heap, SEND):
            plan.heap.fail_for(memory_problem("the gradient of y", dy) or ctx.grad_out.problem(), SEND)
            if buffer is None:
                d_rows = receive_gradient(dy.contiguous(), plan)
            else:
                send_expert_major_gradient(dy.contiguous(), plan, buffer)
                d_rows = ctx.grad_out.hand_on(buffer)
            ctx.grad_out.end_backward()
        if d_rows.shape[0] < ctx.num_rows:  # expert_out came with a tail, which has no gradient
            d_rows = torch.cat([d_rows, d_rows.new_zeros(ctx.num_rows - d_rows.shape[0], d_rows.shape[1])])
        return d_rows, None, None, None


def _problem(expert_out: torch.Tensor, plan: Plan, order: str, grad_out: torch.Tensor | None) -> SymmoeError | None:
    if not is_one_of(order, control.ORDERS):
        return ArgumentError(f"order ({order!r}) must be one of {control.ORDERS}")
    if plan.not_dispatched is not None:
        return plan.not_dispatched
    least = plan.row_capacity if plan.num_rows is None else plan.num_rows
    error = rows_problem("expert_out", expert_out, plan, least, plan.row_capacity)
    if error is not None or grad_out is None:
        return error
    return buffer_problem(
        "grad_out",
        grad_out,
        shape=tuple(expert_out.shape),
        dtype=expert_out.dtype,
        device=expert_out.device,
        inputs=(expert_out,),
        heap=plan.heap,
    )
