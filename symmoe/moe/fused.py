"""Dispatch, experts and combine as one differentiable step on the packed layout: no copy between its parts.

The receive buffer of dispatch is the saved activation; FC2 writes into a lease that combine reads in place; in
backward, FC1's input gradient goes into a lease that combine reads in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from symmoe.combine.collect import PHASE as COLLECT
from symmoe.combine.collect import collect_rows, collect_rows_and_values
from symmoe.dispatch.plan import Plan
from symmoe.dispatch.send import PHASE as SEND
from symmoe.dispatch.send import send_packed, send_packed_gradient
from symmoe.moe.arguments import kernel_rows
from symmoe.moe.experts import ExpertRows, ExpertsBackward, ExpertWeights, first_layer, second_layer
from symmoe.moe.grouped_mlp import GroupedMLP, kernel_weights, split_weights

PACKED = "packed rows"


@dataclass(frozen=True, slots=True)
class Stash:
    """What forward keeps for backward beside the tokens, the plan and the weights.

    Attributes:
        keeps_rows: the packed rows, in a lease; without them backward dispatches the tokens again.
        keeps_h: FC1's output; without it backward computes it again.
    """

    keeps_rows: bool
    keeps_h: bool


STASHES = {
    "all": Stash(True, True),
    "rows": Stash(True, False),
    "hidden": Stash(False, True),
    "none": Stash(False, False),
}


def expert_parallel_mlp(
    x: torch.Tensor,
    probs: torch.Tensor,
    experts: GroupedMLP,
    plan: Plan,
    *,
    order: str = "rank",
    stash: str = "all",
) -> torch.Tensor:
    """y[t] = sum over k of probs[t, k] * MLP of expert topk_idx[t, k] (x[t]). Collective; does not synchronise.

    Backward is collective too and must be entered by all ranks in the same order.

    Args:
        x: [T, H] on the heap's device; the experts' weights are cast to its dtype.
        probs: fp32 [T, K].
        experts: this rank's.
        plan: of this call's routing.
        order: of the sums in combine, "rank" or "slot".
        stash: what is kept for backward, see MoEConfig.

    Returns:
        [T, H].
    """
    weights1 = tuple(weight.to(x.dtype) for weight in experts.fc1.weight_parameters())
    weights2 = tuple(weight.to(x.dtype) for weight in experts.fc2.weight_parameters())
    b1, b2 = (None if fc.bias is None else fc.bias.to(x.dtype) for fc in (experts.fc1, experts.fc2))
    call = _Call(experts=experts, plan=plan, order=order, stash=STASHES[stash])
    return _ExpertParallelMLP.apply(call, x, probs, b1, b2, *weights1, *weights2)


@dataclass(frozen=True, slots=True)
class _Call:
    """What one call hands to autograd beside the tensors it differentiates."""

    experts: GroupedMLP
    plan: Plan
    order: str
    stash: Stash

    @property
    def num_rows(self) -> int:
        """Rows of h."""
        return self.plan.row_capacity if self.plan.num_rows is None else max(1, self.plan.num_rows)

    def operands(
        self,
        packed: torch.Tensor,
        row_probs: torch.Tensor,
        b1: torch.Tensor | None,
        b2: torch.Tensor | None,
        weights: tuple[torch.Tensor, ...],
    ) -> tuple[ExpertRows, ExpertWeights]:
        """Inputs as the kernels take them."""
        w1, w2 = kernel_weights(*split_weights(self.experts.fc1, weights))
        plan = self.plan
        return (
            ExpertRows(packed, plan.row_start, row_probs, None if b2 is None else row_probs, plan.row_to_packed_row),
            ExpertWeights(w1, b1, w2, b2, self.experts.activation.activation),
        )


class _ExpertParallelMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        call: _Call,
        x: torch.Tensor,
        probs: torch.Tensor,
        b1: torch.Tensor | None,
        b2: torch.Tensor | None,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        plan, hidden = call.plan, x.shape[1]
        heap, x = plan.heap, kernel_rows(x)
        packed = heap.lease((plan.packed_row_capacity, hidden), x.dtype, name=PACKED, phase=SEND)
        row_probs = send_packed(x, plan, packed.tensor, probs.contiguous())
        rows, experts = call.operands(packed.tensor, row_probs, b1, b2, weights)
        h, a = first_layer(rows, experts, num_rows=call.num_rows)
        keeps, stash = any(ctx.needs_input_grad), call.stash
        if keeps:
            # The tensor holds its lease: that goes back when autograd frees, or checkpointing drops, what is saved.
            kept = (None, packed.tensor) if stash.keeps_rows else (x, None)
            ctx.save_for_backward(*kept, h if stash.keeps_h else None, row_probs, b1, b2, *weights)
            ctx.call = call
        if not (keeps and stash.keeps_rows):
            packed.release()
        with heap.lease((plan.row_capacity, hidden), x.dtype, name="expert output", phase=COLLECT) as out:
            second_layer(a, rows, experts, out.tensor)
            return collect_rows(out.tensor, plan, order=call.order)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: torch.Tensor):
        call: _Call = ctx.call
        x, packed, h, row_probs, b1, b2, *weights = ctx.saved_tensors
        weights1, weights2 = split_weights(call.experts.fc1, tuple(weights))
        plan, fc1, fc2 = call.plan, call.experts.fc1, call.experts.fc2
        heap, hidden = plan.heap, dy.shape[1]
        packed_shape, shape = (plan.packed_row_capacity, hidden), (plan.row_capacity, hidden)
        if packed is None:
            packed = heap.lease(packed_shape, dy.dtype, name=PACKED, phase=SEND).tensor
            send_packed_gradient(x, plan, packed)  # the rows alone: who goes where is in the plan
        rows, experts = call.operands(packed, row_probs, b1, b2, tuple(weights))
        if h is None:
            h, _ = first_layer(rows, experts, num_rows=call.num_rows)
        d_packed = heap.lease(packed_shape, dy.dtype, name="packed output gradients", phase=SEND).tensor
        send_packed_gradient(kernel_rows(dy), plan, d_packed)
        # Holds both leases, beyond this call if weight gradients are delayed.
        step = ExpertsBackward(rows, experts, h, d_packed)
        with heap.lease(shape, dy.dtype, name="input gradients", phase=COLLECT) as d_rows:
            step.input_gradient(d_rows.tensor)
            dw2 = fc2.weight_gradients(weights2, step.w2_gradient, overwrite_main_grad=False)
            dw1 = fc1.weight_gradients(weights1, step.w1_gradient, overwrite_main_grad=False)
            dx, d_probs = collect_rows_and_values(d_rows.tensor, step.d_scale, plan, order=call.order)
        return None, dx, d_probs, step.db1, step.db2, *dw1, *dw2
