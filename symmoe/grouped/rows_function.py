"""A call of one grouped linear layer, or of two with an activation between them: arguments, checks, autograd function.

N rows sorted by group, C features of a row, O features of a result. Buffers of the caller take results and gradients in
place. Rows past the last group do not change in them, and are zero in memory allocated here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from symmoe import kernels
from symmoe.autograd import Context, Function, GradientBuffer, in_flight_problem, wrote_into
from symmoe.checks import arguments
from symmoe.checks.arguments import (
    Buffer,
    Problem,
    RowsLike,
    memory_problem,
    tensor_problem,
    working_dtype,
)
from symmoe.errors import ArgumentError, raise_for
from symmoe.grouped.parameters import GroupedParameters, local_tensors
from symmoe.grouped.weights import WeightProduct
from symmoe.kernels.operands import FLOATS
from symmoe.kernels.programs import run_program

Products = Any  # LinearProducts of linear.py, or MLPProducts of mlp.py

Splits = torch.Tensor | npt.NDArray[np.integer[Any]] | Sequence[int]

_KERNEL_DTYPES = (torch.int32, torch.int64)
_DTYPES = (
    *_KERNEL_DTYPES,
    torch.int8,
    torch.int16,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
MaybeTensor = torch.Tensor | None
Gradients = tuple[MaybeTensor, ...]
Layers = Sequence[GroupedParameters]  # of one linear layer, or of FC1 and FC2
Needs = tuple[bool, ...]  # whether the rows, the scale and each bias get a gradient


@dataclass(frozen=True, slots=True)
class RowArguments:
    """The arguments of a call other than the rows, as in GroupedLinear.forward."""

    splits: Splits
    scale: MaybeTensor = None  # `bias_scale` of a linear layer, `row_probs` of an MLP
    out: MaybeTensor = None
    grad_input_out: MaybeTensor = None
    overwrite_main_grad: tuple[bool, ...] = (False, False)  # for each layer

    def problem(self, rows: RowsLike, layers: Layers) -> Problem:
        """The error of the arguments for rows that go through these layers, or None. Reads no device memory."""
        first = layers[0]
        num_rows = None if rows.shape is None else math.prod(rows.shape)
        error = splits_problem(
            self.splits, num_groups=first.num_groups, device=rows.device, num_rows=num_rows
        )
        if error is None and len(layers) == 2:
            error = arguments.scale_problem("row_probs", self.scale, rows)
        elif error is None and self.scale is not None and first.has_bias and not first.return_bias:
            error = arguments.scale_problem("bias_scale", self.scale, rows)
        elif error is None and self.scale is not None:
            description = (
                list(self.scale.shape)
                if isinstance(self.scale, torch.Tensor)
                else type(self.scale).__name__
            )
            error = ArgumentError(
                f"bias_scale ({description}) needs a bias that is added; {first} adds none"
            )
        for name, buffer, width in (
            ("out", self.out, layers[-1].out_features),
            ("grad_input_out", self.grad_input_out, first.in_features),
        ):
            if error is None and buffer is not None:
                shape = None if rows.shape is None else (*rows.shape, width)
                error = arguments.buffer_problem(
                    name, buffer, shape=shape, dtype=rows.dtype, device=rows.device
                )
        # A checkpoint writes into `out` inside backward.
        return error or (None if self.out is None else in_flight_problem("out", self.out))

    def check(
        self, name: str, x: torch.Tensor, layers: Layers
    ) -> tuple[torch.Tensor, list[MaybeTensor], list[torch.Tensor]]:
        """x in the dtype to compute in, and the result of local_tensors, after a check of all arguments (x is argument
        `name`). ArgumentError, StaleLease: an argument is wrong."""
        problem = _rows_problem(name, x, layers[0])
        for layer in layers:
            problem = problem or layer.width_problem(x.device) or layer.cache_problem()
        raise_for(problem or self.problem(RowsLike.from_rows(x), layers))
        inputs = itertools.chain(
            (x, self.splits, self.scale), *(layer.parameters() for layer in layers)
        )
        buffers = [
            Buffer(name, buffer)
            for name, buffer in (("out", self.out), ("grad_input_out", self.grad_input_out))
            if buffer is not None
        ]
        raise_for(arguments.overlap_problem(buffers, inputs))
        x = x.to(working_dtype(x))
        return x, *local_tensors(
            layers, x.dtype, cast_biases=torch.is_autocast_enabled(x.device.type)
        )


def _rows_problem(name: str, x: object, linear: GroupedParameters) -> Problem:
    """The error if `x` cannot be the rows of a linear layer, or None. Does not check width_problem."""
    weight = next(linear.parameters())
    device = weight.device
    has_kernels = device.type in ("cpu", "cuda")
    casts = has_kernels and torch.is_autocast_enabled(device.type)
    dtypes = (*FLOATS, torch.float64) if casts else (weight.dtype,)
    error = tensor_problem(
        name, x, shape=("...", "N", linear.in_features), dtypes=dtypes, device=device
    )
    if error is None and not has_kernels:
        return ArgumentError(
            f"{name} and the weights are on {device}; they must be on a CUDA device or the CPU"
        )
    return error


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The rows of a linear layer, or of experts, in both directions. Row i is `rows[row_index[i]]`, or `rows[i]`
    without an index."""

    rows: torch.Tensor  # [., H]
    row_range: torch.Tensor  # int32 [2, G], first row of each group, and its end
    scale: Any = None  # fp32 [N], multiplies the activation of experts; None without one
    bias_scale: torch.Tensor | None = None  # fp32 [N], multiplies the last bias; None is 1
    row_index: torch.Tensor | None = None  # int32 [N]

    def without_tail(self, num_rows: int) -> ExpertRows:
        """The first `num_rows` rows: all rows of groups, and possibly some of the tail."""
        rows_or_index = (
            {"rows": self.rows[:num_rows]}
            if self.row_index is None
            else {"row_index": self.row_index[:num_rows]}
        )
        return replace(
            self,
            scale=self.scale[:num_rows],
            bias_scale=None if self.bias_scale is None else self.bias_scale[:num_rows],
            **rows_or_index,
        )


class RowGradients(NamedTuple):
    """The gradients of a backward pass, except the rows' gradient, and functions that compute the rest."""

    d_scale: MaybeTensor  # fp32 [N]
    d_biases: Gradients  # of each layer
    products: tuple[Callable[[], WeightProduct], ...]  # make each layer's weight gradients
    adapter_gradients: Callable[[], Gradients]  # of all layers


def run_rows(
    products: Products,
    row_arguments: RowArguments,
    x: torch.Tensor,
    biases: Gradients,
    tensors: Sequence[torch.Tensor],
) -> torch.Tensor:
    """The result [..., O] of a call with checked arguments; differentiable in x, the scale and all tensors."""
    row_range = splits_to_row_range(
        row_arguments.splits, device=x.device, num_rows=math.prod(x.shape[:-1])
    )
    scale = None if row_arguments.scale is None else row_arguments.scale.float()
    y: torch.Tensor = _RowsFunction.apply(
        products, row_arguments, x, row_range, scale, *biases, *tensors
    )
    return y


def _rows_of(
    products: Products,
    x: torch.Tensor,
    row_range: torch.Tensor,
    scale: MaybeTensor,
) -> ExpertRows:
    """x [..., C] and its scale in the kernels' form."""
    scale = None if scale is None else scale.view(-1)
    return ExpertRows(
        x.view(-1, x.shape[-1]), row_range, scale, scale if products.scale_bias else None
    )


class _RowsFunction(Function):
    label = "a grouped layer"

    @staticmethod
    def forward(
        ctx: Context,
        products: Products,
        row_arguments: RowArguments,
        x: torch.Tensor,
        row_range: torch.Tensor,
        scale: MaybeTensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        x = arguments.kernel_rows(x)
        scale = None if scale is None else scale.contiguous()
        width = products.layers[-1].out_features
        out = row_arguments.out
        y = x.new_empty((*x.shape[:-1], width)) if out is None else out
        rows = _rows_of(products, x, row_range, scale)
        weights: Any = products.weights(tensors, is_forward=True)
        saved = run_program(
            ("rows", products.key, out is None),
            lambda: products.forward(weights, rows, y.view(-1, width), zero_tail=out is None),
            [rows.rows, row_range, scale, *weights.operands, y],
        )
        ctx.save_for_backward(*saved, x, row_range, scale, *tensors)
        ctx.products = products
        ctx.overwrites = row_arguments.overwrite_main_grad
        ctx.num_results = len(saved)
        ctx.grad_input_out = GradientBuffer("grad_input_out", row_arguments.grad_input_out)
        # Not `mark_dirty(out)`: for a slice of a lease, autograd would make that a copy into the lease's gradient.
        return y if out is None else wrote_into(y).detach()

    @staticmethod
    def backward(ctx: Context, d_y: torch.Tensor) -> Gradients:
        raise_for(memory_problem("d_y", d_y))
        products = ctx.products
        buffer = ctx.grad_input_out
        saved = ctx.saved_tensors
        results = saved[: ctx.num_results]
        layers = products.layers
        x, row_range, scale, *tensors = saved[ctx.num_results :]
        rows = _rows_of(products, x, row_range, scale)
        weights: Any = products.weights(tensors, is_forward=False)
        needs_x, _, needs_scale, *needs_biases = ctx.needs_input_grad[2 : 5 + len(layers)]
        needs = needs_x, needs_scale, *needs_biases
        d_y = arguments.kernel_rows(d_y).view(-1, d_y.shape[-1])
        d_x = _input_gradient_buffer(buffer, x, d_y) if needs_x else None
        matrices = iter(tensors[len(layers) :])
        layer_weights = [
            tuple(itertools.islice(matrices, len(layer.weight_names))) for layer in layers
        ]
        targets = [
            layer.gradient_target(weight, overwrite_main_grad=overwrite)
            for layer, weight, overwrite in zip(layers, layer_weights, ctx.overwrites, strict=True)
        ]

        def compute() -> tuple[Any, ...]:
            d_rows = None if d_x is None else d_x.view(-1, x.shape[-1])
            gradients = products.backward(
                weights, rows, results, d_y, needs, d_rows, zero_tail=buffer.tensor is None
            )
            d_weights = [
                target.add(weight, product)
                for target, weight, product in zip(
                    targets, layer_weights, gradients.products, strict=True
                )
            ]
            return gradients.d_scale, gradients.d_biases, d_weights, gradients.adapter_gradients()

        options = [target.option for target in targets]
        key = "rows backward", products.key, *options, buffer.tensor is None, needs
        # The rows, not x: a program returns its input tensor itself, with its version.
        inputs = d_y, rows.rows, row_range, scale, *results, *weights.operands
        outputs = [tensor for target in targets for tensor in target.operands]
        d_scale, d_biases, d_weights, d_adapters = run_program(
            key, compute, [*inputs, *outputs, d_x]
        )
        if d_x is not None:
            d_x = buffer.pass_on(d_x)
        d_scale = d_scale.view(scale.shape) if needs_scale else None
        for_autograd = [
            target.for_autograd(weight, d_weight)
            for target, weight, d_weight in zip(targets, layer_weights, d_weights, strict=True)
        ]
        buffer.end_backward()
        d_tensors = itertools.chain(*for_autograd, d_adapters)
        return None, None, d_x, None, d_scale, *d_biases, *d_tensors


def _input_gradient_buffer(
    buffer: GradientBuffer, x: torch.Tensor, d_y: torch.Tensor
) -> torch.Tensor:
    """Memory for the gradient of x."""
    raise_for(buffer.problem())
    if buffer.tensor is None:
        return torch.empty_like(x)
    error = arguments.buffer_problem(
        "grad_input_out",
        buffer.tensor,
        shape=tuple(x.shape),
        dtype=x.dtype,
        device=x.device,
        inputs=(d_y,),  # the kernel reads it while it writes
    )
    raise_for(error)
    return buffer.tensor


# -- splits ------------------------------------------------------------------------------------------------------------


def splits_problem(
    splits: Splits, *, num_groups: int, device: torch.device | None, num_rows: int | None
) -> Problem:
    """The error of `splits` for `num_rows` rows on `device` (None: unknown), or None. Never waits for the device:
    values of splits on a GPU are not checked; kernels clamp them."""
    if not isinstance(splits, (torch.Tensor, np.ndarray, Sequence)):
        return ArgumentError(
            f"splits ({splits!r}) must be a tensor, an array or a list of {num_groups} counts"
        )
    shape = (len(splits),) if isinstance(splits, Sequence) else tuple(splits.shape)
    if shape != (num_groups,):
        return ArgumentError(
            f"splits has shape {list(shape)}; it must be [{num_groups}] (num_groups)"
        )
    dtype = torch.int64 if isinstance(splits, Sequence) else splits.dtype
    if not (dtype in _DTYPES if isinstance(dtype, torch.dtype) else dtype.kind in "iu"):
        return ArgumentError(
            f"splits has dtype {dtype}; it must be torch.int32, torch.int64 or another integer dtype"
        )
    if isinstance(splits, torch.Tensor):
        if device is not None and splits.device not in (device, torch.device("cpu")):
            return ArgumentError(f"splits is on {splits.device}; rows is on {device}")
        if (error := memory_problem("splits", splits)) is not None or splits.is_cuda:
            return error
    if device is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return ArgumentError(
            f"splits ({type(splits).__name__} on the CPU) would be frozen into the CUDA graph that is being captured; "
            f"give an integer tensor on {device}"
        )
    counts = splits if isinstance(splits, Sequence) else splits.tolist()
    if not _are_counts(counts) or (num_rows is not None and sum(map(int, counts)) > num_rows):
        limit = "" if num_rows is None else f" that add up to at most {num_rows} rows"
        return ArgumentError(f"splits ({list(counts)}) must be counts{limit}")
    return None


def splits_to_row_range(splits: Splits, *, device: torch.device, num_rows: int) -> torch.Tensor:
    """int32 [2, G] on `device` from checked splits: group g has rows row_range[0, g]:row_range[1, g], clamped to
    num_rows for any device splits. Does not synchronise the host."""
    counts = (
        splits if isinstance(splits, torch.Tensor) else torch.from_numpy(np.array(splits, np.int64))
    )
    counts = counts if counts.dtype in _KERNEL_DTYPES else counts.long()
    row_range = torch.empty((2, counts.shape[0]), dtype=torch.int32, device=counts.device)
    kernels.for_device(counts.device).splits_to_row_range(counts.contiguous(), row_range, num_rows)
    if counts.device == device:
        return row_range
    on_device = torch.empty_like(row_range, device=device)
    kernels.for_device(device).copy_host_to_device(row_range, on_device)
    return on_device


def same_splits(first: Splits, second: Splits) -> bool:
    """Whether two splits are certainly equal, without a wait for a device. Takes any objects."""
    if first is second:
        return True
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.layout is second.layout is torch.strided and all(
            getter(first) == getter(second)
            for getter in (
                torch.Tensor.data_ptr,
                torch.Tensor.size,
                torch.Tensor.stride,
                torch.Tensor.type,
            )
        )
    return (
        isinstance(first, Sequence)
        and isinstance(second, Sequence)
        and _are_counts(first)
        and _are_counts(second)
        and list(first) == list(second)
    )


def _are_counts(counts: Sequence[object]) -> TypeGuard[Sequence[int | np.integer[Any]]]:
    # A bool is an int for isinstance, but a mask is no count.
    return all(
        isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n >= 0 for n in counts
    )
