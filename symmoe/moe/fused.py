"""Dispatch, experts and combine as one differentiable step on the packed layout: no copy between its parts.

The receive buffer of dispatch is the saved activation; FC2 writes into a lease that combine reads in place; in
backward, FC1's input gradient goes into a lease that combine reads in place.
"""

from __future__ import annotations

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from symmoe.combine.collect import PHASE as COLLECT
from symmoe.combine.collect import collect_rows, collect_rows_and_values
from symmoe.dispatch.plan import Plan
from symmoe.dispatch.send import PHASE as SEND
from symmoe.dispatch.send import send_packed, send_packed_gradient
from symmoe.moe.grouped_mlp import experts_backward, experts_forward


def expert_parallel_mlp(
    x: torch.Tensor,
    probs: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    plan: Plan,
    *,
    order: str = "rank",
) -> torch.Tensor:
    """y[t] = sum over k of probs[t, k] * MLP of expert topk_idx[t, k] (x[t]). Collective; does not synchronise.

    Backward is collective too and must be entered by all ranks in the same order.

    Args:
        x: [T, H] on the heap's device.
        probs: fp32 [T, K].
        w1, w2: [e, 2I, H] and [e, H, I] of this rank's experts, of the dtype of x.
        plan: of this call's routing.
        order: of the sums in combine, "rank" or "slot".

    Returns:
        [T, H].
    """
    return _ExpertParallelMLP.apply(x, probs, w1, w2, plan, order)


class _ExpertParallelMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: torch.Tensor,
        probs: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        plan: Plan,
        order: str,
    ) -> torch.Tensor:
        heap, hidden = plan.heap, x.shape[1]
        packed = heap.lease((plan.packed_row_capacity, hidden), x.dtype, name="packed rows", phase=SEND)
        row_probs = send_packed(x.contiguous(), plan, packed.tensor, probs.contiguous())
        with heap.lease((plan.row_capacity, hidden), x.dtype, name="expert output", phase=COLLECT) as out:
            h = experts_forward(
                packed.tensor,
                plan.row_start,
                row_probs,
                w1,
                w2,
                out.tensor,
                num_rows=plan.row_capacity if plan.num_rows is None else max(1, plan.num_rows),
                row_index=plan.row_to_packed_row,
            )
            y = collect_rows(out.tensor, plan, order=order)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(h, row_probs, w1, w2)
            ctx.packed, ctx.plan, ctx.order = packed, plan, order
        else:
            packed.release()
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: torch.Tensor):
        plan, packed = ctx.plan, ctx.packed.tensor  # a second backward finds the lease stale, on every rank
        h, row_probs, w1, w2 = ctx.saved_tensors
        heap, hidden = plan.heap, dy.shape[1]
        packed_shape, shape = (plan.packed_row_capacity, hidden), (plan.row_capacity, hidden)
        with (
            heap.lease(packed_shape, dy.dtype, name="packed output gradients", phase=SEND) as d_packed,
            heap.lease(shape, dy.dtype, name="input gradients", phase=SEND) as d_rows,
        ):
            send_packed_gradient(dy.contiguous(), plan, d_packed.tensor)
            d_row_probs, dw1, dw2 = experts_backward(
                d_packed.tensor,
                packed,
                plan.row_start,
                row_probs,
                h,
                w1,
                w2,
                d_rows.tensor,
                row_index=plan.row_to_packed_row,
            )
            dx, d_probs = collect_rows_and_values(d_rows.tensor, d_row_probs, plan, order=ctx.order)
        ctx.packed.release()
        return dx, d_probs, dw1, dw2, None, None
