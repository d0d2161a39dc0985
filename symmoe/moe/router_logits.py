"""The router's product in fp32, without an fp32 copy of bf16 tokens in forward or kept for backward."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from symmoe import kernels
from symmoe.autograd import Context, Function


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight^T, fp32 [T, E], of tokens [T, H] in any precision and weights [E, H]. Not collective, no host sync.

    For bf16 tokens and fp32 weights, kernels compute it with sums as good as those of fp32 products (never tf32); on
    GPUs a token's logits do not depend on the other tokens. Otherwise torch computes it from an fp32 copy of the
    tokens. Differentiable, once.
    """
    if x.dtype != torch.bfloat16 or weight.dtype != torch.float32:
        return nn.functional.linear(x.float(), weight)
    x, weight = x.contiguous(), weight.contiguous()
    if torch.compiler.is_compiling():
        logits: torch.Tensor = _router_gemm(x, weight)
        return logits
    applied: torch.Tensor = _RouterLogits.apply(x, weight)
    return applied


def _logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    logits = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    kernels.for_device(x.device).router_gemm(x, weight, logits)
    return logits


def _compute_gradients(
    d_logits: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    dx: torch.Tensor | None,
    d_weight: torch.Tensor | None,
) -> None:
    with torch.autocast(x.device.type, enabled=False):  # backward may be called inside autocast
        kernels.for_device(x.device).router_gemm_grads(d_logits.contiguous(), x, weight, dx, d_weight)


class _RouterLogits(Function):
    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _logits(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, d_logits: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        wants_dx, wants_d_weight = ctx.needs_input_grad
        dx = torch.empty_like(x) if wants_dx else None
        d_weight = torch.empty_like(weight) if wants_d_weight else None
        _compute_gradients(d_logits, x, weight, dx, d_weight)
        return dx, d_weight


# For torch.compile, operators.


def _both_gradients(d_logits: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dx, d_weight = torch.empty_like(x), torch.empty_like(weight)
    _compute_gradients(d_logits, x, weight, dx, d_weight)
    return dx, d_weight


_router_gemm = torch.library.custom_op("symmoe::router_gemm", _logits, mutates_args=())
_router_gemm_grads = torch.library.custom_op("symmoe::router_gemm_grads", _both_gradients, mutates_args=())


@_router_gemm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)


@_router_gemm_grads.register_fake
def _(d_logits: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx: Context, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Context, d_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gradients: tuple[torch.Tensor, torch.Tensor] = _router_gemm_grads(d_logits, *ctx.saved_tensors)
    return gradients


_router_gemm.register_autograd(_backward, setup_context=_keep)
