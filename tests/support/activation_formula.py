"""The formulas of activations, in float64, with autograd. It shares no code with the package."""

from functools import partial

import torch

SCORES = {  # of a router
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)).sqrt(),
}


def gate_columns(ffn, interleave, device="cpu"):
    """Where the gates and the ups of h stand, which alternate in blocks of so many columns, if any."""
    block = interleave or ffn
    column = torch.arange(ffn, device=device)
    gate = column // block * 2 * block + column % block
    return gate, gate + block


def formula(h, activation):
    """act(h) [.., I] of float64 h [.., W], with autograd."""
    function = {
        "silu": lambda x: x * torch.sigmoid(activation.alpha * x),
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
        "relu2": lambda x: torch.relu(x) ** 2,
    }[activation.function]
    if not activation.is_gated:
        return function(h)
    gate, up = gate_columns(h.shape[-1] // 2, activation.interleave, h.device)
    g = h[..., gate].clamp(max=activation.limit)
    u = h[..., up].clamp(min=-activation.limit, max=activation.limit)
    return (u + activation.offset) * function(g)


def scaled(h, scale, d_out, activation):
    """act(h) * scale [.., I], and its gradients by h and scale for this gradient of it, in float64."""
    h, scale = (tensor.detach().double().requires_grad_() for tensor in (h, scale))
    out = formula(h, activation) * scale[..., None]
    out.backward(d_out.double())
    return out.detach(), h.grad, scale.grad
