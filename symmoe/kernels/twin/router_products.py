"""The router's GEMMs: the definition, in PyTorch. See kernels/triton/router_products.py."""

import torch


def router_gemm(x: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor) -> None:
    """logits = x @ weight^T. x bf16 [T, H], weight fp32 [E, H], logits fp32 [T, E]; all contiguous.

    Products and sums are those of fp32: as good as, not the bits of, a sum of fp32 products in any order.
    """
    torch.mm(x.float(), weight.t(), out=logits)


def router_gemm_grads(
    d_logits: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    dx: torch.Tensor | None,
    d_weight: torch.Tensor | None,
) -> None:
    """dx = d_logits @ weight and d_weight = d_logits^T @ x, as far as they are given.

    d_logits fp32 [T, E]; x and dx bf16 [T, H]; weight and d_weight fp32 [E, H]; all contiguous. dx is rounded to bf16
    once; the sum before that is good to 2^-15 of its terms' magnitudes.
    """
    if dx is not None:
        dx.copy_(d_logits @ weight)
    if d_weight is not None:
        torch.mm(d_logits.t(), x.float(), out=d_weight)
