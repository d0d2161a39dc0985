"""What operands of kernels have to be."""

from __future__ import annotations

import torch

from symmoe.errors import ArgumentError


def check_operand(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """ArgumentError unless the tensor is contiguous, of this shape and of one of these dtypes."""
    if tensor.shape != shape:
        raise ArgumentError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ArgumentError(f"{name} must be of {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ArgumentError(f"{name} must be contiguous, got strides {list(tensor.stride())}")


def given(name: str, tensor: torch.Tensor | None) -> torch.Tensor:
    """The tensor; ArgumentError if it is None."""
    if tensor is None:
        raise ArgumentError(f"{name} must be a tensor here, got None")
    return tensor


def check_multiple(what: str, number: int, unit: int) -> None:
    """ArgumentError unless the number of `what` is a multiple of the unit."""
    if number % unit:
        raise ArgumentError(f"the number of {what} must be a multiple of {unit}, got {number}")
