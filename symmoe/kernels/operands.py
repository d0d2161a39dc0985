"""Quantised operands of kernels as records, and checks of operands."""

from typing import NamedTuple

import torch

from symmoe.errors import ArgumentError
from symmoe.kernels.tensor_table import TensorTable

Buffers = tuple[torch.Tensor, torch.Tensor]  # data and scale, which a quantising kernel fills
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Operand(NamedTuple):
    """Quantised rows, columns or weights, ready for a grouped GEMM."""

    data: torch.Tensor  # quantised numbers, as in precision.Quantized
    scale: torch.Tensor  # compact fp32 scales, or 128x4 tiles of uint8 scales
    global_scale: torch.Tensor | None = None  # fp32[G], or None where the format has none


class ScatteredWeight(NamedTuple):
    """Quantised weights of G experts, each with memory of its own, e.g. from :func:`pack_weight_ptrs`. Nothing here
    keeps that memory alive."""

    data: TensorTable  # the matrices of Operand.data
    scale: TensorTable  # of its compact fp32 scales; or of uint8 scales in tiles, [tiles down, tiles across * 512]
    global_scale: torch.Tensor | None = None  # as in Operand


def check_operand(
    name: str,
    tensor: torch.Tensor | TensorTable,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
    *,
    any_strides: bool = False,
) -> None:
    """ArgumentError unless the tensor is contiguous, of this shape, of one of these dtypes, on the device if given."""
    if tensor.shape != shape:
        raise ArgumentError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ArgumentError(
            f"{name} must be of {' or '.join(map(str, dtypes))}, got {tensor.dtype}"
        )
    if device is not None and tensor.device != device:
        raise ArgumentError(f"{name} must be on {device}, got {tensor.device}")
    if (
        not any_strides and isinstance(tensor, torch.Tensor) and not tensor.is_contiguous()
    ):  # matrices of a table are
        raise ArgumentError(f"{name} must be contiguous, got strides {list(tensor.stride())}")


def check_column_scale(name: str, scale: torch.Tensor) -> None:
    """ArgumentError unless scales of columns [C features, blocks] lie as kernels read them: bytes contiguous; fp32
    block-major, with strides (1, C), so that neighbouring features of the same tokens are neighbours."""
    num_features, num_blocks = scale.shape
    wanted = (1, num_features) if scale.dtype == torch.float32 else (num_blocks, 1)
    strides = zip(scale.shape, scale.stride(), wanted, strict=True)
    if scale.numel() and any(size > 1 and stride != want for size, stride, want in strides):
        raise ArgumentError(
            f"{name} {list(scale.shape)} must have strides {list(wanted)}, got {list(scale.stride())}"
        )


def require_tensor(name: str, tensor: torch.Tensor | None) -> torch.Tensor:
    """The tensor; ArgumentError if it is None."""
    if tensor is None:
        raise ArgumentError(f"{name} must be a tensor here, got None")
    return tensor


def check_multiple(what: str, number: int, unit: int) -> None:
    """ArgumentError unless the number of `what` is a multiple of the unit."""
    if number % unit:
        raise ArgumentError(f"the number of {what} must be a multiple of {unit}, got {number}")


def present_tensors(*tensors: torch.Tensor | None) -> list[torch.Tensor]:
    """Those that are not None."""
    return [tensor for tensor in tensors if tensor is not None]


def address_or_self(matrices: torch.Tensor | TensorTable) -> torch.Tensor:
    """The tensor that stands for matrices among the operands of a call: the packed one, or the table's addresses."""
    return matrices if isinstance(matrices, torch.Tensor) else matrices.pointers
