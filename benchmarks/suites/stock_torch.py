"""The yardstick: an expert-parallel layer of stock torch parts, which docs/benchmarking.md lists.

T tokens, K slots, H hidden, e experts per rank, R ranks, N rows received.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Back = Callable[..., tuple[torch.Tensor, ...]]
STOCK = "stock torch"  # name of variants that are made of these parts
Experts = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]  # rows, probs, ends to outputs


def grouped_mm(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """rows [N, C] @ weight [G, C, O] by groups that end at ends int32 [G]."""
    if rows.device.type == "cuda":
        return torch._grouped_mm(rows, weight, offs=ends)
    parts = rows.tensor_split(ends.tolist()[:-1])
    return torch.cat([part @ matrix for part, matrix in zip(parts, weight, strict=True)])


def swiglu(h: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """SwiGLU times the rows' scale, in plain torch."""
    gate, up = h.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up * scale.to(h.dtype)[:, None]


def torch_experts(w1: torch.Tensor, w2: torch.Tensor) -> Experts:
    """Both layers by torch._grouped_mm; w1 [e, 2I, H], w2 [e, H, I]."""

    def run(rows: torch.Tensor, row_probs: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        a = swiglu(grouped_mm(rows, w1.transpose(1, 2), ends), row_probs)
        return grouped_mm(a, w2.transpose(1, 2), ends)

    return run


def all_to_all(rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
    """Sends `sent[r]` rows to rank r, and receives `received[r]` from it. Collective."""
    if len(sent) == 1:
        return rows
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), received, sent)
    return out


class ByHand(Function):
    """`way(*tensors)`, whose gradients are `back(*gradients)`."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], back: Back, *tensors: torch.Tensor) -> Any:
        ctx.back = back
        return function(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.back(*gradients)


def _moved(rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
    """Same as :func:`all_to_all`; backward sends the gradients back."""
    return ByHand.apply(
        lambda rows: all_to_all(rows, received, sent),
        lambda d_rows: (all_to_all(d_rows, sent, received),),
        rows,
    )


def _permuted(
    rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, top_k: int = 1
) -> torch.Tensor:
    """rows[order // top_k]; `inverse` is the inverse permutation. The gradient is summed over a row's copies."""
    source = order if top_k == 1 else order // top_k

    def back(d_rows: torch.Tensor) -> tuple[torch.Tensor]:
        d_copies = d_rows.index_select(0, inverse)
        return (d_copies if top_k == 1 else d_copies.view(-1, top_k, d_rows.shape[1]).sum(1),)

    return ByHand.apply(lambda rows: rows.index_select(0, source), back, rows)


class Exchange(NamedTuple):
    """The plan of an all-to-all on the host: slots sorted by expert and back, int64 [T * K]; rows to and from each
    rank; received rows sorted by expert and back, int64 [N]; the end of each local expert, int32 [e]."""

    order: torch.Tensor
    inverse: torch.Tensor
    sent: list[int]
    received: list[int]
    local_order: torch.Tensor
    local_inverse: torch.Tensor
    ends: torch.Tensor


def plan_exchange(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> Exchange:
    """An exchange for topk_idx [T, K]. Collective; synchronises: all_to_all_single takes its splits from the host."""
    slots = topk_idx.reshape(-1).long()
    local = num_experts // num_ranks
    order = slots.argsort(stable=True)
    counts = torch.bincount(slots, minlength=num_experts)
    arriving = all_to_all(counts, [local] * num_ranks, [local] * num_ranks).view(num_ranks, local)
    both = torch.stack([counts.view(num_ranks, local).sum(1), arriving.sum(1)]).tolist()
    expert = torch.arange(local, device=slots.device).repeat(num_ranks)
    local_order = expert.repeat_interleave(arriving.reshape(-1), output_size=sum(both[1])).argsort(
        stable=True
    )
    ends = arriving.sum(0).cumsum(0).int()
    return Exchange(
        order, _inverse(order), both[0], both[1], local_order, _inverse(local_order), ends
    )


def stock_layer(
    x: torch.Tensor,
    probs: torch.Tensor,
    topk_idx: torch.Tensor,
    experts: Experts,
    num_experts: int,
    num_ranks: int,
) -> torch.Tensor:
    """y [T, H] of x [T, H], probs and topk_idx [T, K]. Collective, forward and backward. Differentiable."""
    top_k = topk_idx.shape[1]
    e = plan_exchange(topk_idx, num_experts, num_ranks)
    rows = _moved(_permuted(x, e.order, e.inverse, top_k), e.received, e.sent)
    row_probs = _moved(_permuted(probs.reshape(-1), e.order, e.inverse), e.received, e.sent)
    rows = _permuted(rows, e.local_order, e.local_inverse)
    out = experts(rows, _permuted(row_probs, e.local_order, e.local_inverse), e.ends)
    back = _moved(_permuted(out, e.local_inverse, e.local_order), e.sent, e.received)
    return _permuted(back, e.inverse, e.order).view(-1, top_k, x.shape[1]).sum(1)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse
