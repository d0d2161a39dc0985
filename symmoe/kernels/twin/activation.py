"""The activation of an expert times the row's scale, separate and fused with the grouped GEMMs before and after it.

    C, I, O  input features of the first GEMM, FFN width, output features of the second GEMM
    W        columns of h: 2I for gated activations, else I (Activation.hidden_width)

    forward   h = round(rows @ weight^T + bias);  a = round(act(h) * scale)
    backward  da = round(dout @ weight);  dscale = sum_I(da * act(h));  dh = round(da * scale * act'(h));
              dbias = sum_rows(dh);  a again

Between the roundings everything is fp32. So the fused functions give the bits of the separate functions in h, a, da, dh
and dscale (order of the sum: kernels/activation.py); only dbias has another order of sums. Clamps and relu propagate
NaN; derivatives at a limit are the same as in torch.clamp (1 at equality).

The fused functions here compose the separate functions: kernels must give these bits or, where they sum in another
order, these numbers up to rounding.
"""

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
from symmoe.kernels.operands import Matrices, MaybeTensor, Rows, writes
from symmoe.kernels.twin.gemm import (
    GemmKernels,
    groups,
    multiply_rows,
    packed,
    rows_of,
    sum_in_blocks,
    take_rows,
)


class ActivationKernels:
    @staticmethod
    @writes("out")
    def scaled_activation(
        h: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, activation: Activation
    ) -> None:
        """out[r] = act(h[r]) * scale[r], every row: h [N, W]; scale fp32[N]; out [N, I]."""
        value, _ = value_and_slopes(h, activation)
        torch.mul(value, scale[:, None], out=out)

    @staticmethod
    @writes("dh", "dscale")
    def scaled_activation_grad(
        dout: torch.Tensor,
        h: torch.Tensor,
        scale: torch.Tensor,
        dh: torch.Tensor,
        dscale: torch.Tensor,
        activation: Activation,
    ) -> None:
        """Gradient of scaled_activation, every row: dout [N, I]; h, dh [N, W], may be one; scale, dscale fp32[N]."""
        activation_gradients(dout, h, scale, dh, dscale, activation)

    @staticmethod
    @writes("results")
    def grouped_gemm_act(
        rows: Rows,
        weight: Matrices,
        row_range: torch.Tensor,
        row_scale: torch.Tensor,
        results: tuple[torch.Tensor, torch.Tensor],
        activation: Activation,
        *,
        bias: MaybeTensor = None,
        num_sms: int | None = None,
    ) -> None:
        """results h, a: h[r] = rows[r] @ weight[g]^T + bias[g]; a[r] = act(h[r]) * row_scale[r], from the rounded h.

        rows of C features; weight [G, W, C]; row_scale fp32[N]; h [N, W]; a [N, I]; bias [G, W].
        """
        h, a = results
        GemmKernels.grouped_gemm(rows, weight, row_range, h, bias=bias)
        row = rows_of(row_range)
        value, _ = value_and_slopes(h[row], activation)
        a[row] = (value * row_scale[row, None]).to(a.dtype)

    @staticmethod
    @writes("gradients", "workspace")
    def grouped_gemm_dact(
        dout: Rows,
        weight: Matrices,
        row_range: torch.Tensor,
        hidden: tuple[torch.Tensor, torch.Tensor],
        gradients: tuple[torch.Tensor, torch.Tensor, MaybeTensor, MaybeTensor],
        workspace: torch.Tensor,
        activation: Activation,
        *,
        num_sms: int | None = None,
    ) -> int:
        """Gradient through the second GEMM and the activation of hidden (h, row_scale). gradients: dh, forward's a
        again, dscale, and the first GEMM's dbias.

        dout of O features; weight [G, O, I]; h, dh [N, W], which may be one; a [N, I]; row_scale, dscale fp32[N]; dbias
        [G, W] or None; workspace: fp32, of dact_workspace_numel(...) elements. dscale and dbias need whole groups;
        dscale is 0 in the tail. dscale None: its partial sums stay in the workspace. When calls that differ only in
        row_range have computed all rows, sum_dact_partials adds them up (and grouped_bias_grad computes dbias from dh).
        Returns the number of partial sums of dscale per row in the workspace.
        """
        (h, row_scale), (dh, a, dscale, dbias) = hidden, gradients
        matrices = packed(weight)
        for g, span in groups(row_range):
            da = multiply_rows(take_rows(dout, span), matrices[g]).to(a.dtype)
            scale = row_scale[span]
            value = activation_gradients(da, h[span], scale, dh[span], workspace[span], activation)
            torch.mul(value, scale[:, None], out=a[span])
        if dscale is not None:
            ActivationKernels.sum_dact_partials(workspace, row_range, dscale, 1)
        if dbias is not None:
            GemmKernels.grouped_bias_grad(dh, row_range, dbias)
        return 1

    @staticmethod
    @writes()
    def dact_workspace_numel(
        num_rows: int, num_groups: int, ffn: int, activation: Activation
    ) -> int:
        """Elements of grouped_gemm_dact's fp32 workspace, enough for every dtype, with dbias or without."""
        return num_rows

    @staticmethod
    @writes("dscale")
    def sum_dact_partials(
        workspace: torch.Tensor, row_range: torch.Tensor, dscale: torch.Tensor, num_partials: int
    ) -> None:
        """dscale fp32[N], 0 in the tail, from the workspace that calls of grouped_gemm_dact have filled.

        row_range: whole groups; the calls have covered them. num_partials: the result of the calls.
        """
        num_rows = int(row_range[1, -1])
        dscale[:num_rows] = workspace[:num_rows]
        dscale[num_rows:] = 0


def activation_gradients(
    dout: torch.Tensor,
    h: torch.Tensor,
    scale: torch.Tensor,
    dh: torch.Tensor,
    dscale: torch.Tensor,
    activation: Activation,
) -> torch.Tensor:
    """As scaled_activation_grad; returns act(h), fp32 [N, I]."""
    value, slopes = value_and_slopes(h, activation)
    grad = dout.float()
    dscale.copy_(sum_in_blocks(grad * value, SUM_COLUMNS))
    grad = grad * scale[:, None]
    parts = gate_and_up(dh, activation) if activation.is_gated else [dh]
    for part, slope in zip(parts, slopes, strict=True):
        torch.mul(grad.view(part.shape), slope.view(part.shape), out=part)
    return value


def gate_and_up(h: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, ...]:
    """Views of the gate and the up features of h [N, 2I], which alternate in blocks of k: [N, I / k, k]. Without
    interleave k is I."""
    ffn = h.shape[1] // 2
    block = activation.interleave or ffn
    if ffn % block:
        raise ArgumentError(f"interleave ({block}) must divide the FFN width ({ffn})")
    return h.view(len(h), ffn // block, 2, block).unbind(2)


def value_and_slopes(
    h: torch.Tensor, activation: Activation
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """act(h) fp32 [N, I], and its derivatives by the gate and the up features (by h if not gated), same shape."""
    function = partial(_FUNCTIONS[activation.function], alpha=activation.alpha)
    if not activation.is_gated:
        value, slope = function(h.float())
        return value, [slope]
    limit, offset = activation.limit, activation.offset
    gate, up = gate_and_up(h.float(), activation)
    gate_above, up_outside = gate > limit, up.abs() > limit
    # A comparison, not clamp: comparisons propagate NaN.
    gate = torch.where(gate_above, limit, gate)
    up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    shifted = up + offset if offset else up
    value, slope = function(gate)
    by_gate = slope.mul_(shifted).masked_fill(gate_above, 0)
    by_up = value.masked_fill(up_outside, 0)
    return (shifted * value).flatten(1), [by_gate.flatten(1), by_up.flatten(1)]


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
