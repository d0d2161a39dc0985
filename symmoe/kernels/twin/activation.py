"""Twins of the activation of contract/gemm.py. The order of the sum is that of kernels/activation.py."""

import math
from functools import partial

import torch

from symmoe.errors import ArgumentError
from symmoe.kernels.activation import (
    GELU,
    GELU_CUBIC,
    GELU_LINEAR,
    GELU_TANH,
    RELU2,
    SILU,
    SUM_COLUMNS,
    Activation,
)


def scaled_activation(h, scale, out, activation):
    value, _ = value_and_slopes(h, activation)
    torch.mul(value, scale[:, None], out=out)


def scaled_activation_grad(dout, h, scale, dh, dscale, activation):
    activation_gradients(dout, h, scale, dh, dscale, activation)


def activation_gradients(dout, h, scale, dh, dscale, activation) -> torch.Tensor:
    """Same as scaled_activation_grad; returns act(h), fp32 [N, I]."""
    value, slopes = value_and_slopes(h, activation)
    grad = dout.float()
    dscale.copy_(sum_in_blocks(grad * value, SUM_COLUMNS))
    grad = grad * scale[:, None]
    parts = gate_and_up(dh, activation) if activation.is_gated else [dh]
    for part, slope in zip(parts, slopes, strict=True):
        torch.mul(grad.view(part.shape), slope.view(part.shape), out=part)
    return value


def sum_in_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """Sums fp32 [N] of fp32 [N, I]: in blocks of columns neighbours, then neighbouring sums, and so on; then blocks."""
    total = x.new_zeros(x.shape[0])
    for sums in block_sums(x, block).unbind(1):
        total += sums
    return total


def block_sums(x: torch.Tensor, block: int) -> torch.Tensor:
    """The sums of the blocks, fp32 [N, blocks]; zeros fill the last one."""
    num_blocks = -(-x.shape[1] // block)
    x = torch.nn.functional.pad(x, (0, num_blocks * block - x.shape[1])).view(
        x.shape[0], num_blocks, block
    )
    while x.shape[2] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x.squeeze(2)


def gate_and_up(h: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the gate and the up features of h [N, 2I]: [N, I], or [N, I / k, k] if they alternate in blocks of k."""
    if activation.interleave is None:
        gate, up = h.chunk(2, dim=1)
        return gate, up
    block = activation.interleave
    if h.shape[1] % (2 * block):
        raise ArgumentError(f"interleave ({block}) must divide the FFN width ({h.shape[1] // 2})")
    gate, up = h.view(h.shape[0], h.shape[1] // (2 * block), 2, block).unbind(dim=2)
    return gate, up


def value_and_slopes(
    h: torch.Tensor, activation: Activation
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """act(h) fp32 [N, I], and its derivatives by the gate and the up features (by h if not gated), same shape."""
    function = partial(_FUNCTIONS[activation.function], alpha=activation.alpha)
    if not activation.is_gated:
        value, slope = function(h.float())
        return value, [slope]
    limit, offset = activation.limit, activation.offset
    gate, up = (
        part.float().reshape(h.shape[0], h.shape[1] // 2) for part in gate_and_up(h, activation)
    )
    has_limit = math.isfinite(limit)
    if has_limit:
        gate_above, up_outside = gate > limit, up.abs() > limit
        # A comparison and not clamp: comparisons let NaN through.
        gate = torch.where(gate_above, limit, gate)
        up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    shifted = up + offset if offset else up
    value, slope = function(gate)
    by_gate, by_up = slope.mul_(shifted), value
    if has_limit:
        by_gate, by_up = by_gate.masked_fill(gate_above, 0), by_up.masked_fill(up_outside, 0)
    return shifted * value, [by_gate, by_up]


ValueAndSlope = tuple[torch.Tensor, torch.Tensor]  # f(x) and f'(x), new tensors, fp32 like x


def _silu(x: torch.Tensor, *, alpha: float) -> ValueAndSlope:
    # Not torch.sigmoid: on CPUs its vector code and the code for the last few elements round differently.
    sigmoid = torch.mul(x, -alpha).exp_().add_(1).reciprocal_()
    # sigmoid * (1 + alpha * x * (1 - sigmoid))
    slope = torch.rsub(sigmoid, 1).mul_(x if alpha == 1 else alpha * x).add_(1).mul_(sigmoid)
    return sigmoid.mul_(x), slope


def _gelu(x: torch.Tensor, *, alpha: float) -> ValueAndSlope:
    cdf = torch.mul(x, math.sqrt(0.5)).erf_().add_(1).mul_(0.5)
    density = torch.square(x).mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
    return x * cdf, density.mul_(x).add_(cdf)


def _gelu_tanh(x: torch.Tensor, *, alpha: float) -> ValueAndSlope:
    """(1 + tanh(z)) / 2 is sigmoid(2 z), and 2 z is x * (GELU_LINEAR + GELU_CUBIC * x^2)."""
    square = torch.square(x)
    sigmoid = torch.mul(square, -GELU_CUBIC).sub_(GELU_LINEAR).mul_(x).exp_().add_(1).reciprocal_()
    slope = (
        torch.rsub(sigmoid, 1)
        .mul_(x)
        .mul_(square.mul_(3 * GELU_CUBIC).add_(GELU_LINEAR))
        .add_(1)
        .mul_(sigmoid)
    )
    return sigmoid.mul_(x), slope


def _relu2(x: torch.Tensor, *, alpha: float) -> ValueAndSlope:
    positive = torch.where(x < 0, 0.0, x)
    return positive * positive, 2 * positive


_FUNCTIONS = {SILU: _silu, GELU: _gelu, GELU_TANH: _gelu_tanh, RELU2: _relu2}
