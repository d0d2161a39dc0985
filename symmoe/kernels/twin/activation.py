"""The activation of an expert times the row's scale, and its gradient: the definition, in PyTorch.

    N rows; I columns of the result; W columns of h: 2I for gated activations, else I (Activation.hidden_width).

    forward   s = act(h);  out = round(s * scale)
    backward  dscale = sum_I(dout * s);  ds = dout * scale;  dh = round(ds * act'(h))

Everything between the roundings is fp32. NaN goes through clamps and relu; derivatives at a limit are torch.clamp's.
"""

import math

import torch

from symmoe.errors import ArgumentError
from symmoe.kernels.activation import SRELU, Activation


def scaled_activation(h: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, activation: Activation) -> None:
    """out[r] = act(h[r]) * scale[r], every row: h [N, W]; scale fp32[N]; out [N, I]."""
    value, _ = _value_and_slopes(h, activation, need_slopes=False)
    out.copy_(value * scale[:, None])


def scaled_activation_grad(
    dout: torch.Tensor,
    h: torch.Tensor,
    scale: torch.Tensor,
    dh: torch.Tensor,
    dscale: torch.Tensor,
    activation: Activation,
) -> None:
    """Gradient of scaled_activation, every row: dout [N, I]; h, dh [N, W]; scale, dscale fp32[N]."""
    value, slopes = _value_and_slopes(h, activation, need_slopes=True)
    grad = dout.float()
    dscale.copy_((grad * value).sum(dim=1))
    grad = grad * scale[:, None]
    if activation.is_gated:
        for part, slope in zip(gate_and_up(dh, activation), slopes, strict=True):
            part.copy_((grad * slope).view(part.shape))
    else:
        dh.copy_(grad * slopes[0])


def gate_and_up(h: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the gate and the up features of h [N, 2I]: [N, I], or [N, I / k, k] if they alternate in blocks of k."""
    if activation.interleave is None:
        return h.chunk(2, dim=1)
    block = activation.interleave
    if h.shape[1] % (2 * block):
        raise ArgumentError(f"interleave ({block}) must divide the FFN width ({h.shape[1] // 2})")
    return h.view(h.shape[0], h.shape[1] // (2 * block), 2, block).unbind(dim=2)


def _value_and_slopes(
    h: torch.Tensor, activation: Activation, *, need_slopes: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """act(h) fp32 [N, I], and its derivatives by the gate and the up features (by h if not gated), shaped alike."""
    if activation.kind == SRELU:
        x = h.float()
        positive = torch.where(x < 0, 0.0, x)
        return positive * positive, [2 * positive] if need_slopes else []
    limit, alpha, offset = activation.limit, activation.alpha, activation.offset
    gate, up = (part.float().reshape(h.shape[0], h.shape[1] // 2) for part in gate_and_up(h, activation))
    has_limit = math.isfinite(limit)
    if has_limit:
        gate_above, up_outside = gate > limit, up.abs() > limit
        # Not clamp with a minimum of two numbers: comparisons let NaN through.
        gate = torch.where(gate_above, limit, gate)
        up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    # Not torch.sigmoid: on CPUs its vector code and the code for the last few elements round differently.
    sigmoid = 1 / (1 + torch.exp(-alpha * gate))
    swish = gate * sigmoid
    shifted = up + offset if offset else up
    value = shifted * swish
    if not need_slopes:
        return value, []
    by_gate = shifted * (sigmoid * (1 + alpha * gate * (1 - sigmoid)))
    if has_limit:
        by_gate, swish = by_gate.masked_fill(gate_above, 0), swish.masked_fill(up_outside, 0)
    return value, [by_gate, swish]
