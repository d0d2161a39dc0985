"""`dispatch_tokens`: tokens to their experts' ranks in expert-major rows, with autograd.

For experts of any kind that take rows sorted by expert. MoELayer uses the packed layout instead (symmoe.moe.fused).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol, overload

import torch
from torch.autograd.function import once_differentiable

from symmoe.combine.collect import PHASE as COLLECT
from symmoe.combine.collect import Collection, on_heap
from symmoe.dispatch.plan import Plan, is_one_of
from symmoe.dispatch.send import send_expert_major, send_packed, send_packed_gradient
from symmoe.dispatch.slots import PHASE
from symmoe.errors import ArgumentError, StaleLease, SymmoeError
from symmoe.kernels import control
from symmoe.kernels.operands import given
from symmoe.symm_mem.autograd import Context, Function, wrote_into
from symmoe.symm_mem.buffers import buffer_problem, memory_problem, tensor_problem
from symmoe.symm_mem.told import told


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

    Backward is collective too and computes what is asked for: each of `x` and `probs` requires a gradient on all ranks
    or on none.

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
    with told(heap, PHASE):
        heap.fail_for(rows_problem("x", x, plan, plan.num_tokens) or _problem(x, plan, probs, out, order), PHASE)
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
        plan, (needs_x, needs_probs, *_) = ctx.plan, ctx.needs_input_grad
        heap, gradients = plan.heap, control.gradients_index(x=needs_x, probs=needs_probs)
        with told(heap, COLLECT):
            if needs_x:
                heap.fail_for(memory_problem("the gradient of rows", d_rows), COLLECT)
            if needs_probs:
                d_row_probs = given("d_row_probs", d_row_probs)
                heap.fail_for(memory_problem("the gradient of row_probs", d_row_probs), COLLECT)
                d_row_probs = d_row_probs.contiguous()
            else:
                d_row_probs = None
            with on_heap(d_rows, plan, name="input gradients") if needs_x else nullcontext() as rows:
                collection = Collection(rows, plan, order=ctx.order, row_values=d_row_probs, gradients=gradients)
                with collection:
                    collection.collect()
        return collection.out, collection.values, None, None, None


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


def rows_problem(name: str, rows: torch.Tensor, plan: Plan, *num_rows: int) -> ArgumentError | StaleLease | None:
    """What is wrong with a [N, H] tensor that is to travel by `plan`, or None. num_rows: what N may be."""
    error = tensor_problem(name, rows, shape=("N", "H"), dtypes=control.DTYPES, device=plan.heap.device)
    if error is not None:
        return error
    if rows.shape[0] not in num_rows:
        return ArgumentError(f"{name} has {rows.shape[0]} rows; this plan needs {num_rows[0]}")
    if not 1 <= rows.shape[1] <= control.MAX_HIDDEN:
        return ArgumentError(f"{name} has rows of {rows.shape[1]} features; it must be 1 to {control.MAX_HIDDEN}")
    if rows.device.type == "cuda" and rows.shape[1] * rows.element_size() % control.ACCESS_BYTES:
        return ArgumentError(
            f"{name} has rows of {rows.shape[1]} x {rows.element_size()} bytes; on GPUs a row must be a multiple of "
            f"{control.ACCESS_BYTES}"
        )
    return None


def _problem(
    x: torch.Tensor, plan: Plan, probs: torch.Tensor | None, out: torch.Tensor | None, order: str
) -> SymmoeError | None:
    if not is_one_of(order, control.ORDERS):
        return ArgumentError(f"order ({order!r}) must be one of {control.ORDERS}")
    if probs is not None:
        shape = plan.num_tokens, plan.top_k
        error = tensor_problem("probs", probs, shape=shape, dtypes=(torch.float32,), device=x.device)
        if error is not None:
            return error
    if out is None:
        return None
    shape = (plan.row_capacity, x.shape[1])
    return buffer_problem("out", out, shape=shape, dtype=x.dtype, device=x.device, inputs=(x,), heap=plan.heap)
