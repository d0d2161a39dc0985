"""What can be wrong with the arguments of grouped layers; looked at before anything is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from symmoe.errors import ArgumentError, raise_for
from symmoe.kernels import control
from symmoe.symm_mem.autograd import in_flight_problem
from symmoe.symm_mem.buffers import buffer_problem

if TYPE_CHECKING:
    from symmoe.moe.grouped_linear import GroupedLinear

_GPU_MULTIPLE = 8  # TMA needs rows of a multiple of 16 bytes, also when fp32 weights are used in 16 bits


def rows_problem(name: str, x: torch.Tensor, linear: GroupedLinear) -> ArgumentError | None:
    """What keeps `x` from being the rows of a linear layer, or None."""
    if not isinstance(x, torch.Tensor):
        return ArgumentError(f"{name} ({type(x).__name__}) must be a tensor")
    if x.dim() < 2 or x.shape[-1] != linear.in_features:
        return ArgumentError(f"{name} has shape {list(x.shape)}; it must be [..., {linear.in_features}]")
    weight = next(linear.parameters())
    if x.device != weight.device:
        return ArgumentError(f"{name} is on {x.device}; the weights are on {weight.device}")
    autocast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else weight.dtype
    if dtype not in control.DTYPES or (not autocast and x.dtype != dtype) or not x.dtype.is_floating_point:
        return ArgumentError(f"{name} is {x.dtype}; the weights are {dtype}, and both must be one of {control.DTYPES}")
    return width_problem(linear, x)


def width_problem(linear: GroupedLinear, x: torch.Tensor) -> ArgumentError | None:
    """What keeps a linear layer from running on the device of x, or None."""
    for feature in ("in_features", "out_features"):
        width = getattr(linear, feature)
        if x.is_cuda and width % _GPU_MULTIPLE:
            return ArgumentError(f"{feature} ({width}) must be a multiple of {_GPU_MULTIPLE} on GPUs")
    return None


def result_buffers_problem(
    x: torch.Tensor,
    out_features: int,
    out: torch.Tensor | None,
    grad_input_out: torch.Tensor | None,
    *,
    inputs: tuple[torch.Tensor | None, ...],
) -> Exception | None:
    """What keeps the two buffers of a caller from taking the result [..., O] and the gradient of x, or None."""
    device_type = x.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype
    taken = tuple(tensor for tensor in inputs if tensor is not None)
    for name, buffer, features in (("out", out, out_features), ("grad_input_out", grad_input_out, x.shape[-1])):
        if buffer is None:
            continue
        shape = (*x.shape[:-1], features)
        error = buffer_problem(name, buffer, shape=shape, dtype=dtype, device=x.device, inputs=taken)
        if error is not None:
            return error
        taken = (*taken, buffer)
    return None


def scale_problem(name: str, scale: torch.Tensor, rows: torch.Tensor) -> ArgumentError | None:
    """What is wrong with a factor per row of `rows`, or None."""
    if not isinstance(scale, torch.Tensor):
        return ArgumentError(f"{name} ({type(scale).__name__}) must be a tensor")
    if scale.shape != rows.shape[:-1] or scale.device != rows.device or not scale.dtype.is_floating_point:
        given = f"{scale.dtype} {list(scale.shape)} on {scale.device}"
        return ArgumentError(
            f"{name} is {given}; it must be floating point {list(rows.shape[:-1])} on {rows.device}: one for each row"
        )
    return None


def kernel_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy if it is not contiguous or where kernels cannot read it in full accesses."""
    x = x.contiguous()
    return x if x.data_ptr() % control.ACCESS_BYTES == 0 else x.clone()


def gradient_buffer(buffer: torch.Tensor | None, x: torch.Tensor, d_y: torch.Tensor) -> torch.Tensor:
    """The caller's buffer for the gradient of x, or a new tensor. The kernel reads d_y while it writes."""
    if buffer is None:
        return torch.empty_like(x)
    problem = buffer_problem(
        "grad_input_out", buffer, shape=tuple(x.shape), dtype=x.dtype, device=x.device, inputs=(d_y,)
    )
    raise_for(problem or in_flight_problem("grad_input_out", buffer))
    return buffer
