"""Twins of the router's GEMMs of contract/router.py."""

import torch


def router_gemm(x: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor) -> None:
    torch.mm(x.float(), weight.t(), out=logits)


def router_gemm_grads(
    d_logits: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    dx: torch.Tensor | None,
    d_weight: torch.Tensor | None,
) -> None:
    if dx is not None:
        dx.copy_(d_logits @ weight)
    if d_weight is not None:
        torch.mm(d_logits.t(), x.float(), out=d_weight)
