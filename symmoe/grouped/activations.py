"""Activations with a scale per row, as modules between two grouped linear layers: out[i] = act(h[i]) * scale[i].

The scale is the router's prob, applied before the second GEMM, so that combining rows is a plain sum. The formulas are
in symmoe.kernels.activation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from symmoe import kernels
from symmoe.autograd import Context, Function
from symmoe.checks.arguments import Problem, RowsLike, memory_problem, scale_problem, tensor_problem
from symmoe.errors import ArgumentError, raise_for
from symmoe.kernels import control
from symmoe.kernels.activation import FUNCTIONS, RELU2, Activation
from symmoe.torch_internals import replaceable


def activation_problem(activation: object, kind: type = Activation) -> ArgumentError | None:
    """The error if this is no Activation (or ScaledActivation), with the alternatives, or None."""
    if isinstance(activation, kind):
        return None
    alternatives = (
        "an Activation"
        if kind is Activation
        else "a ScaledActivation, or None; it takes an Activation"
    )
    return ArgumentError(
        f"activation ({activation!r}) must be {alternatives}: symmoe.Activation(function='gelu', is_gated=False) is "
        f"one of functions {', '.join(FUNCTIONS)}. Experts with another function run by parts: see symmoe.MoELayer"
    )


class ScaledActivation(nn.Module):
    """out = act(h) * scale, with act from `activation`. Has no parameters. ArgumentError: `activation` is no
    Activation."""

    num_extra_inputs = 1  # Sequential passes the scale

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        raise_for(activation_problem(activation))
        self.activation = activation

    @replaceable
    def forward(self, h: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Differentiable in both arguments. Not collective; does not synchronise the host.

        Args:
            h: [..., W] fp32, fp16 or bf16.
            scale: [...], a factor for each row; the computation is in fp32.

        Returns:
            [..., I] in the dtype of h.

        Raises:
            ArgumentError, StaleLease: a shape, dtype, layout or device is wrong, or memory has been released.
        """
        raise_for(self._problem(h, scale))
        out: torch.Tensor = _ScaledActivation.apply(h, scale.float(), self.activation)
        return out

    if TYPE_CHECKING:
        __call__ = forward  # nn.Module's has no types

    def extra_repr(self) -> str:
        return str(self.activation)

    def _problem(self, h: object, scale: object) -> Problem:
        error = tensor_problem("h", h, shape=("...", "W"), dtypes=control.DTYPES, device=None)
        if error is not None or not isinstance(h, torch.Tensor):
            return error
        if h.shape[-1] % (unit := self.activation.hidden_width(self.activation.interleave or 1)):
            return ArgumentError(
                f"h has {h.shape[-1]} columns; {self.activation} needs a multiple of {unit}"
            )
        return scale_problem("scale", scale, RowsLike(h.shape[:-1], h.dtype, h.device))


class ScaledSwiGLU(ScaledActivation):
    """silu(gate) * up * scale, with [gate, up] = h (Shazeer 2020). interleave: gate and up features alternate in blocks
    of this many columns; None: two halves. On GPUs a power of two up to 32."""

    def __init__(self, *, interleave: int | None = None) -> None:
        super().__init__(Activation(interleave=interleave))


class ScaledClampedSwiGLU(ScaledActivation):
    """(u + offset) * g * sigmoid(alpha * g) * scale, with g = min(gate, limit) and u = clamp(up, -limit, limit). The
    defaults are those of gpt-oss (OpenAI 2025), whose checkpoints have an interleave (see ScaledSwiGLU) of 1."""

    def __init__(
        self,
        *,
        alpha: float = 1.702,
        limit: float = 7.0,
        offset: float = 1.0,
        interleave: int | None = None,
    ) -> None:
        super().__init__(Activation(alpha=alpha, limit=limit, offset=offset, interleave=interleave))


class ScaledSReLU(ScaledActivation):
    """relu(h)^2 * scale (So et al. 2021); not gated."""

    def __init__(self) -> None:
        super().__init__(Activation(function=RELU2, is_gated=False))


def interleave_gate_up(tensor: torch.Tensor, block: int, *, dim: int) -> torch.Tensor:
    """Reorders a weight or bias of FC1 from two halves, gate and up features, to blocks that alternate.

    Args:
        tensor: [.., 2I, ..], gate features first.
        block: features per block; I must be a multiple of it.
        dim: the dimension of the 2I features (-2 of a weight [G, 2I, H], -1 of a bias [G, 2I]).

    Raises:
        ArgumentError: the dimension is no multiple of two blocks.
    """
    return _reordered(tensor, block, dim, (2, -1))


def deinterleave_gate_up(tensor: torch.Tensor, block: int, *, dim: int) -> torch.Tensor:
    """The inverse of :func:`interleave_gate_up`."""
    return _reordered(tensor, block, dim, (-1, 2))


def _reordered(tensor: torch.Tensor, block: int, dim: int, blocks: tuple[int, int]) -> torch.Tensor:
    if block < 1 or tensor.shape[dim] % (2 * block):
        raise ArgumentError(
            f"dimension {dim} ({tensor.shape[dim]}) must be a multiple of 2 * block ({2 * block})"
        )
    shape = tensor.shape
    dim = dim % tensor.dim()
    return (
        tensor.reshape(*shape[:dim], *blocks, block, *shape[dim + 1 :])
        .transpose(dim, dim + 1)
        .reshape(shape)
    )


class _ScaledActivation(Function):
    label = "a scaled activation"

    @staticmethod
    def forward(
        ctx: Context, h: torch.Tensor, scale: torch.Tensor, activation: Activation
    ) -> torch.Tensor:
        h = h.contiguous()
        scale = scale.contiguous()
        ffn = h.shape[-1] // activation.hidden_width(1)
        out = h.new_empty((*h.shape[:-1], ffn))
        kernels.for_device(h.device).scaled_activation(
            h.view(-1, h.shape[-1]), scale.view(-1), out.view(-1, ffn), activation
        )
        ctx.save_for_backward(h, scale)
        ctx.activation = activation
        return out

    @staticmethod
    def backward(ctx: Context, d_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        raise_for(memory_problem("d_y", d_out))
        h, scale = ctx.saved_tensors
        d_h = torch.empty_like(h)
        d_scale = torch.empty_like(scale)
        d_rows, rows, d_h_rows = (t.view(-1, t.shape[-1]) for t in (d_out.contiguous(), h, d_h))
        kernels.for_device(h.device).scaled_activation_grad(
            d_rows, rows, scale.view(-1), d_h_rows, d_scale.view(-1), ctx.activation
        )
        return d_h, d_scale, None
