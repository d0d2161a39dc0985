"""`dispatch_tokens` and `combine_tokens` move tokens to the ranks of their experts, and rows home, with autograd. The
backward of each is the other's trip. Both support any experts that take rows sorted by expert (docs/own_experts.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast, overload

import torch

from symmoe.autograd import Context, Function, GradientBuffer, in_flight_problem, wrote_into
from symmoe.checks.arguments import (
    buffer_problem,
    check_kind,
    choices_problem,
    memory_problem,
    tensor_problem,
)
from symmoe.combine.trip import PHASE as COMBINE
from symmoe.combine.trip import CombineTrip, combine
from symmoe.dispatch.plan import DispatchHandle, Plan, ReceivedIndex, reads_rows_in_place
from symmoe.dispatch.trip import PHASE as DISPATCH
from symmoe.dispatch.trip import dispatch
from symmoe.errors import ArgumentError, StaleLease, SymmoeError
from symmoe.kernels import control
from symmoe.kernels.operands import require_tensor
from symmoe.symm_mem.heap import FailPeersOnError


@overload
def dispatch_tokens(
    x: torch.Tensor,
    plan: Plan,
    *,
    probs: torch.Tensor,
    out: torch.Tensor | None = None,
    order: str = "rank",
) -> tuple[torch.Tensor, torch.Tensor, DispatchHandle]: ...


@overload
def dispatch_tokens(
    x: torch.Tensor,
    plan: Plan,
    *,
    probs: None = None,
    out: torch.Tensor | None = None,
    order: str = "rank",
) -> tuple[torch.Tensor, None, DispatchHandle]: ...


def dispatch_tokens(
    x: torch.Tensor,
    plan: Plan,
    *,
    probs: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    order: str = "rank",
) -> tuple[torch.Tensor, torch.Tensor | None, DispatchHandle]:
    """Sends every token to the ranks of its experts. Collective; does not synchronise the host. Differentiable.

    Rows are ordered expert, source rank, token, k; `plan.splits` has the number of rows of each local expert. A rank
    receives one copy of a token for all of the token's experts there.

    Backward is collective too, and computes only required gradients: each of `x` and `probs` requires one on all ranks
    or on none.

    Args:
        x: [T, H] fp32, fp16 or bf16, T as in the plan; H * itemsize must be a multiple of 16 on GPUs.
        plan: the plan of make_plan.
        probs: fp32 [T, K], the weight of each slot; travels with the rows, and gets a gradient.
        out: buffer [plan.row_capacity, H] on the heap for the rows. None: the rows are copied from a temporary lease
            into new memory (counted in `heap.statistics`). All ranks must pass one, or none.
        order: order in which backward sums a token's gradients (see combine_tokens).

    Returns:
        rows [N, H] with exact capacity, [capacity, H] with an undefined tail with static capacity; row_probs fp32
        [N] or [capacity], or None without probs; and the handle that combine_tokens needs.

    Raises:
        ArgumentError: an argument is wrong on any rank; raised on every rank (on GPUs the peers raise at their next
            call on the heap, or in heap.synchronize).
        ConfigMismatch: ranks differ in H, dtype, or the presence of probs or `out` (then their layouts differ); raised
            as ArgumentError is.
        PeerTimeout: a rank did not enter the call in time.
    """
    check_kind("plan", plan, Plan, "what make_plan returns")
    heap = plan.heap
    heap.check()
    with FailPeersOnError(heap, DISPATCH):
        heap._fail_for(
            _rows_problem("x", x, plan, plan.num_tokens)
            or _dispatch_problem(x, plan, probs, out, order),
            DISPATCH,
        )
        return cast(
            "tuple[torch.Tensor, torch.Tensor | None, DispatchHandle]",  # not made in every call
            _Dispatch.apply(x, probs, plan, out, order),
        )


class _Dispatch(Function):
    """The backward of dispatch is combine over the same plan."""

    label = "dispatch_tokens"

    @staticmethod
    def forward(
        ctx: Context,
        x: torch.Tensor,
        probs: torch.Tensor | None,
        plan: Plan,
        out: torch.Tensor | None,
        order: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None, DispatchHandle]:
        ctx.order = order
        probs_TK = None if probs is None else probs.contiguous()
        rows_NH, row_probs_N, index = _receive(x.contiguous(), plan, out, probs_TK)
        ctx.handle = DispatchHandle(plan, index)
        if out is not None:
            rows_NH = plan.rows_of(wrote_into(out)).detach()
        row_probs_N = None if row_probs_N is None else plan.rows_of(row_probs_N).detach()
        return rows_NH, row_probs_N, ctx.handle

    @staticmethod
    def backward(
        ctx: Context, d_rows: torch.Tensor, d_row_probs: torch.Tensor | None, _: None
    ) -> tuple[torch.Tensor | None, ...]:
        plan = ctx.handle.plan
        needs_x, needs_probs = ctx.needs_input_grad[:2]
        heap = plan.heap
        gradients = control.gradients_index(x=needs_x, probs=needs_probs)
        readable_rows: AbstractContextManager[torch.Tensor | None] = nullcontext()
        with FailPeersOnError(heap, COMBINE):
            if needs_x:
                heap._fail_for(memory_problem("the gradient of rows", d_rows), COMBINE)
                readable_rows = _readable_rows(
                    d_rows, plan, order=ctx.order, name="input gradients"
                )
            if needs_probs:
                d_row_probs = require_tensor("d_row_probs", d_row_probs)
                heap._fail_for(memory_problem("the gradient of row_probs", d_row_probs), COMBINE)
                d_row_probs = d_row_probs.contiguous()
            else:
                d_row_probs = None
            with readable_rows as d_rows_NH:
                with CombineTrip(
                    d_rows_NH,
                    *ctx.handle,
                    row_values=d_row_probs,
                    order=ctx.order,
                    gradients=gradients,
                ) as collection:
                    collection.collect()
        return collection.out, collection.values, None, None, None


def _receive(
    x: torch.Tensor,
    plan: Plan,
    out: torch.Tensor | None,
    probs: torch.Tensor | None = None,
    index: ReceivedIndex | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, ReceivedIndex]:
    """Dispatches x into `out`, or through a temporary lease into new memory, [N, H] with exact capacity, [N_cap, H]
    with static capacity; also returns row_probs and the index. Collective. index: None in forward."""
    if out is not None:
        with dispatch(x, plan, out, probs, layout="expert-major", index=index) as arrival:
            return out, arrival.row_probs, arrival.index
    plan.heap.statistics.num_staging_copies += 1
    shape = (plan.packed_row_capacity, x.shape[1])
    with plan.heap.lease(shape, x.dtype, name="packed rows", phase=DISPATCH) as packed:
        with dispatch(x, plan, packed.tensor, probs, layout="packed", index=index) as arrival:
            pass
        row_to_packed_row_N = plan.rows_of(arrival.index.row_to_packed_row)
        rows_NH = packed.tensor.index_select(0, row_to_packed_row_N)
        return rows_NH, arrival.row_probs, arrival.index


def _dispatch_problem(
    x: torch.Tensor, plan: Plan, probs: torch.Tensor | None, out: torch.Tensor | None, order: str
) -> SymmoeError | None:
    error: SymmoeError | None = choices_problem(order=order)
    if error is None and probs is not None:
        error = tensor_problem(
            "probs",
            probs,
            shape=(plan.num_tokens, plan.top_k),
            dtypes=(torch.float32,),
            device=x.device,
        )
    if error is not None or out is None:
        return error
    return buffer_problem(
        "out",
        out,
        shape=(plan.row_capacity, x.shape[1]),
        dtype=x.dtype,
        device=x.device,
        inputs=(x,),
        heap=plan.heap,
    ) or in_flight_problem("out", out)


def combine_tokens(
    expert_out: torch.Tensor,
    handle: DispatchHandle,
    *,
    order: str = "rank",
    grad_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums every token's rows on its own rank. Collective; does not synchronise the host. Differentiable.

    The sum is unweighted: apply the probs in the experts. Raises the errors of dispatch_tokens.

    Args:
        expert_out: rows in the order of dispatch_tokens: with exact capacity [N, H] or [plan.row_capacity, H]; with
            static capacity, where only the device knows N, [plan.row_capacity, H] with an unused tail. With order
            "slot", and between nodes, peers read the rows, so rows outside the heap are copied to it: the slow path,
            counted in `heap.statistics`. Rows that are not contiguous, or not 16-byte aligned, are copied with any
            order.
        handle: from dispatch_tokens. It may be used more than once.
        order: "rank": a token's rows on one rank are summed first, then the sums of the ranks; least traffic. "slot":
            the K rows are summed in k order; bitwise independent of the number of ranks, and of nodes. "node": each
            node's rows in k order, then the sums of the nodes. On one node "node" equals "slot"; between nodes "rank"
            equals "node".
        grad_out: buffer on the heap, shaped like `expert_out`, for its gradient; rows past N keep their values. All
            ranks must pass one, or none. None: the gradient is copied from a temporary lease into new memory (counted).

    Returns:
        [T, H].
    """
    check_kind("handle", handle, DispatchHandle, "what dispatch_tokens returns")
    heap = handle.plan.heap
    heap.check()
    with FailPeersOnError(heap, COMBINE):
        heap._fail_for(_combine_problem(expert_out, handle.plan, order, grad_out), COMBINE)
        return cast(torch.Tensor, _Combine.apply(expert_out, handle, order, grad_out))


class _Combine(Function):
    """The backward of combine is dispatch over the same plan."""

    label = "combine_tokens"

    @staticmethod
    def forward(
        ctx: Context,
        expert_out: torch.Tensor,
        handle: DispatchHandle,
        order: str,
        grad_out: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.handle = handle
        ctx.grad_out = GradientBuffer("grad_out", grad_out)
        ctx.num_rows = expert_out.shape[0]
        with _readable_rows(expert_out, handle.plan, order=order, name="expert output") as rows_NH:
            return combine(rows_NH, *handle, order=order)

    @staticmethod
    def backward(ctx: Context, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan, index = ctx.handle
        buffer = ctx.grad_out.tensor
        with FailPeersOnError(plan.heap, DISPATCH):
            plan.heap._fail_for(
                memory_problem("the gradient of y", dy) or ctx.grad_out.problem(), DISPATCH
            )
            d_rows_NH, *_ = _receive(dy.contiguous(), plan, buffer, index=index)
            d_rows_NH = ctx.grad_out.pass_on(d_rows_NH)
            ctx.grad_out.end_backward()
        num_tail_rows = ctx.num_rows - d_rows_NH.shape[0]
        if num_tail_rows > 0:  # of expert_out, without a gradient
            tail = d_rows_NH.new_zeros(num_tail_rows, d_rows_NH.shape[1])
            d_rows_NH = torch.cat([d_rows_NH, tail])
        return d_rows_NH, None, None, None


@contextmanager
def _readable_rows(
    rows: torch.Tensor, plan: Plan, *, order: str, name: str
) -> Iterator[torch.Tensor]:
    """`rows` [., H] itself where the trip can read it, else a copy in a lease (counted: it is the slow path)."""
    heap = plan.heap
    is_aligned = rows.is_contiguous() and rows.data_ptr() % control.ACCESS_BYTES == 0
    if is_aligned and (not reads_rows_in_place(order, plan.nodes) or heap.owns(rows)):
        yield rows
        return
    heap.statistics.num_staging_copies += 1
    with heap.lease(
        (plan.row_capacity, rows.shape[1]), rows.dtype, name=name, phase=COMBINE
    ) as lease:
        lease.tensor[: rows.shape[0]].copy_(rows)
        yield lease.tensor


def _combine_problem(
    expert_out: torch.Tensor, plan: Plan, order: str, grad_out: torch.Tensor | None
) -> SymmoeError | None:
    error: SymmoeError | None = choices_problem(order=order)
    if error is not None:
        return error
    num_rows = plan.row_capacity if plan.num_rows is None else plan.num_rows
    error = _rows_problem("expert_out", expert_out, plan, num_rows, plan.row_capacity)
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


def _rows_problem(
    name: str, rows: torch.Tensor, plan: Plan, *num_rows: int
) -> ArgumentError | StaleLease | None:
    """The error of a [N, H] tensor for a trip by `plan`, or None. num_rows: allowed values of N."""
    error = tensor_problem(
        name, rows, shape=("N", "H"), dtypes=control.DTYPES, device=plan.heap.device
    )
    if error is not None:
        return error
    if rows.shape[0] not in num_rows:
        return ArgumentError(f"{name} has {rows.shape[0]} rows; this plan needs {num_rows[0]}")
    if not 1 <= rows.shape[1] <= control.MAX_HIDDEN:
        return ArgumentError(
            f"{name} has rows of {rows.shape[1]} features; it must be 1 to {control.MAX_HIDDEN}"
        )
    if rows.device.type == "cuda" and rows.shape[1] * rows.element_size() % control.ACCESS_BYTES:
        return ArgumentError(
            f"{name} has rows of {rows.shape[1]} x {rows.element_size()} bytes; on GPUs a row must be a multiple of "
            f"{control.ACCESS_BYTES}"
        )
    return None
