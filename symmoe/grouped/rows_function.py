"""A call of one grouped linear layer, or of two with an activation between them: arguments, checks, autograd function.

N rows sorted by group, C features of a row, O features of a result. Buffers of the caller take results and gradients in
place; what lies past the last group in them stays as it is, and is zero in what is allocated here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from symmoe.autograd import Context, Function, GradientBuffer, wrote_into
from symmoe.checks.arguments import (
    Buffer,
    Problem,
    RowsLike,
    buffer_problem,
    kernel_rows,
    memory_problem,
    overlap_problem,
    rows_problem,
    scale_problem,
    width_problem,
)
from symmoe.errors import ArgumentError, raise_for
from symmoe.grouped.splits import Splits, splits_problem, splits_to_row_range

if TYPE_CHECKING:
    from symmoe.grouped.linear import GroupedLinear
    from symmoe.grouped.mlp import MLPProducts
    from symmoe.grouped.products import LinearProducts

    Products: TypeAlias = LinearProducts | MLPProducts

Layers = Sequence["GroupedLinear"]  # one, or FC1 and FC2
Optional = torch.Tensor | None
Gradients = tuple[Optional, ...]


@dataclass(frozen=True, slots=True)
class RowArguments:
    """The arguments of a call other than the rows.

    Attributes:
        splits, out, grad_input_out: as in GroupedLinear.forward.
        scale: `bias_scale` of a linear layer, `row_probs` of an MLP.
        overwrite_main_grad: for each layer, whether its weight gradient overwrites `main_grad`.
    """

    splits: Splits
    scale: Optional = None
    out: Optional = None
    grad_input_out: Optional = None
    overwrite_main_grad: tuple[bool, ...] = (False, False)

    def problem(self, rows: RowsLike, layers: Layers) -> Problem:
        """What is wrong with them for rows that go through these layers, or None. Reads no device memory."""
        first, last = layers[0], layers[-1]
        num_rows = None if rows.shape is None else math.prod(rows.shape)
        error = splits_problem(self.splits, num_groups=first.num_groups, device=rows.device, num_rows=num_rows)
        if error is None and len(layers) == 2:
            error = scale_problem("row_probs", self.scale, rows)
        elif error is None and self.scale is not None:
            error = self._bias_scale_problem(first) or scale_problem("bias_scale", self.scale, rows)
        features = (("out", self.out, last.out_features), ("grad_input_out", self.grad_input_out, first.in_features))
        for name, buffer, width in features:
            if error is None and buffer is not None:
                shape = None if rows.shape is None else (*rows.shape, width)
                error = buffer_problem(name, buffer, shape=shape, dtype=rows.dtype, device=rows.device)
        return error

    def _bias_scale_problem(self, linear: GroupedLinear) -> ArgumentError | None:
        if linear.has_bias and not linear.return_bias:
            return None
        scale = self.scale
        found = list(scale.shape) if isinstance(scale, torch.Tensor) else type(scale).__name__
        return ArgumentError(f"bias_scale ({found}) needs a bias that is added; {linear} adds none")

    def check(self, name: str, x: torch.Tensor, layers: Layers) -> None:
        """Checks all arguments of a call, of which argument `name` is x, before anything is computed.

        Raises:
            ArgumentError, StaleLease: an argument is wrong, or a buffer shares memory with what the call also uses.
        """
        problem = rows_problem(name, x, layers[0])
        for layer in layers:
            problem = problem or width_problem(layer, x) or layer.held_problem()
        raise_for(problem or self.problem(RowsLike.of(x), layers))
        named = (("out", self.out), ("grad_input_out", self.grad_input_out))
        read = itertools.chain((x, self.splits, self.scale), *(layer.parameters() for layer in layers))
        raise_for(overlap_problem([Buffer(name, buffer) for name, buffer in named if buffer is not None], read))


class RowInputs(NamedTuple):
    """What the kernels of a call read.

    Attributes:
        x: the rows [N, C].
        row_range: int32 [2, G], where those of each group begin and end.
        scale: fp32 [N], or None.
        biases: one of each layer, or None.
        tensors: the weights of all layers, then the adapters.
    """

    x: torch.Tensor
    row_range: torch.Tensor
    scale: Optional
    biases: Gradients
    tensors: tuple[torch.Tensor, ...]


def _inputs(
    num_layers: int, x: torch.Tensor, row_range: torch.Tensor, scale: Optional, *tensors: torch.Tensor
) -> RowInputs:
    rows, scale = x.view(-1, x.shape[-1]), None if scale is None else scale.view(-1)
    return RowInputs(rows, row_range, scale, tensors[:num_layers], tensors[num_layers:])


def run_rows(
    products: Products, given: RowArguments, x: torch.Tensor, biases: Gradients, tensors: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The result [..., O] of a call whose arguments are checked; differentiable in x, the scale and all tensors."""
    row_range = splits_to_row_range(given.splits, device=x.device, num_rows=math.prod(x.shape[:-1]))
    scale = None if given.scale is None else given.scale.float()
    settings, buffers = (products, given.overwrite_main_grad), (given.out, given.grad_input_out)
    y: torch.Tensor = _RowsFunction.apply(settings, buffers, x, row_range, scale, *biases, *tensors)
    return y


class _RowsContext(Context, Protocol):
    settings: tuple[Products, Sequence[bool]]
    num_kept: int
    grad_input_out: GradientBuffer


class _RowsFunction(Function):
    @staticmethod
    def forward(
        ctx: _RowsContext,
        settings: tuple[Products, Sequence[bool]],
        buffers: tuple[Optional, Optional],
        x: torch.Tensor,
        row_range: torch.Tensor,
        scale: Optional,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        (products, _), (out, grad_input_out) = settings, buffers
        x, scale = kernel_rows(x), None if scale is None else scale.contiguous()
        width = products.layers[-1].out_features
        y = x.new_empty((*x.shape[:-1], width)) if out is None else out
        inputs = _inputs(len(products.layers), x, row_range, scale, *tensors)
        kept = products.forward(inputs, y.view(-1, width), zero_tail=out is None)
        ctx.save_for_backward(*kept, x, row_range, scale, *tensors)
        ctx.settings, ctx.num_kept = settings, len(kept)
        ctx.grad_input_out = GradientBuffer("grad_input_out", grad_input_out)
        # Not `mark_dirty(out)`: for a slice of a lease, autograd would make that a copy into the lease's gradient.
        return y if out is None else wrote_into(y).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: _RowsContext, d_y: torch.Tensor) -> Gradients:
        raise_for(memory_problem("d_y", d_y))
        (products, overwrites), buffer = ctx.settings, ctx.grad_input_out
        layers, kept, saved = products.layers, ctx.saved_tensors[: ctx.num_kept], ctx.saved_tensors[ctx.num_kept :]
        inputs, (x, _, scale, *_) = _inputs(len(layers), *saved), saved
        needs_x, _, needs_scale, *needs_biases = ctx.needs_input_grad[2:]
        d_y = kernel_rows(d_y).view(-1, d_y.shape[-1])
        gradients = products.backward(inputs, kept, d_y, (needs_x, needs_scale, *needs_biases))
        d_x = d_scale = None
        if needs_x:
            d_x = _gradient_rows(buffer, x, d_y)
            gradients.input_gradient(d_x.view(-1, x.shape[-1]), zero_tail=buffer.tensor is None)
            d_x = buffer.hand_on(d_x)
        if needs_scale and gradients.d_scale is not None:
            d_scale = gradients.d_scale.view(scale.shape)
        d_weights: list[Optional] = []
        end = sum(layer.num_weights for layer in layers)
        for layer, compute, overwrite in [*zip(layers, gradients.weight_gradients(), overwrites, strict=True)][::-1]:
            weights, end = inputs.tensors[end - layer.num_weights : end], end - layer.num_weights
            target = layer.gradient_target(weights, overwrite_main_grad=overwrite)
            d_weights[:0] = target.for_autograd(weights, compute)
        others = gradients.bias_gradients(), gradients.adapter_gradients()
        buffer.end_backward()
        return None, None, d_x, None, d_scale, *others[0], *d_weights, *others[1]


def _gradient_rows(buffer: GradientBuffer, x: torch.Tensor, d_y: torch.Tensor) -> torch.Tensor:
    """The caller's buffer for the gradient of x, or a new tensor. The kernel reads d_y while it writes.

    Raises:
        ArgumentError, StaleLease: the buffer cannot take the gradient, or is in use.
    """
    raise_for(buffer.problem())
    given, shape = buffer.tensor, tuple(x.shape)
    if given is None:
        return torch.empty_like(x)
    raise_for(buffer_problem("grad_input_out", given, shape=shape, dtype=x.dtype, device=x.device, inputs=(d_y,)))
    return given
