"""Operands of kernels: combined operands, the declaration of written operands, and checks.

Terms: twin/__init__.py. Operands are tuples, because programs search tuples for tensors. A table has only addresses:
a table does not keep its matrices alive.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from symmoe.errors import ArgumentError


class TensorTable(NamedTuple):
    """G contiguous matrices of one shape, for kernels that take a packed [G, rows, columns] tensor."""

    pointers: torch.Tensor  # addresses of the matrices, int64 [G] on their device, multiples of 16
    shape: tuple[int, int, int]  # (G, rows, columns)
    dtype: torch.dtype  # dtype of the matrices

    @property
    def device(self) -> torch.device:
        """The device of the matrices."""
        return self.pointers.device


class ScaleTable(NamedTuple):
    """G matrices of one-byte scales, of any shapes, for swizzle_scales."""

    sources: torch.Tensor  # addresses of the matrices, int64 [G] on their device
    destinations: torch.Tensor  # addresses of their first tiles, int64 [G], multiples of 16
    shapes: torch.Tensor  # each matrix's index into `extents`, int32 [G]
    # int32 [S, 4] of (rows, blocks, row stride, block stride): sizes without padding, strides in bytes
    extents: torch.Tensor
    max_tiles: tuple[int, int]  # the largest (rows of tiles, tiles of a row) of any matrix


MaybeTensor = torch.Tensor | None
Matrices = torch.Tensor | TensorTable  # a packed tensor, or matrices anywhere
Rows = (
    torch.Tensor | tuple[torch.Tensor, MaybeTensor]
)  # rows; or a tensor of rows, and the index that row r has in it
Bias = (
    torch.Tensor | tuple[MaybeTensor, MaybeTensor] | None
)  # [G, O]; or [G, O] and each row's factor, fp32[N]
Buffers = tuple[torch.Tensor, torch.Tensor]  # data and scale, which a quantising kernel fills
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Operand(NamedTuple):
    """Quantised rows, columns or weights, ready for a grouped GEMM."""

    data: torch.Tensor  # quantised numbers, as in precision.Quantized
    scale: torch.Tensor  # compact fp32 scales, or 128x4 tiles of uint8 scales
    global_scale: torch.Tensor | None = None  # fp32[G], or None where the format has none


class ScatteredWeight(NamedTuple):
    """Quantised weights of G experts in separate allocations, e.g. from :func:`pack_weight_ptrs`. The caller keeps the
    memory alive."""

    data: TensorTable  # the matrices of Operand.data
    scale: TensorTable  # compact fp32 scales; or uint8 scales in tiles, [tiles down, tiles across * 512]
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
    """ArgumentError unless the tensor is contiguous, with this shape, one of these dtypes, this device if given."""
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
    ):  # a table's matrices are contiguous
        raise ArgumentError(f"{name} must be contiguous, got strides {list(tensor.stride())}")


def check_column_scale(name: str, scale: torch.Tensor) -> None:
    """ArgumentError unless scales of columns [C features, blocks] have the kernels' layout: contiguous bytes, or
    block-major fp32, strides (1, C): neighbouring features of the same tokens are adjacent."""
    num_features, num_blocks = scale.shape
    expected = (1, num_features) if scale.dtype == torch.float32 else (num_blocks, 1)
    strides = zip(scale.shape, scale.stride(), expected, strict=True)
    if scale.numel() and any(
        size > 1 and stride != expected_stride for size, stride, expected_stride in strides
    ):
        raise ArgumentError(
            f"{name} {list(scale.shape)} must have strides {list(expected)}, got {list(scale.stride())}"
        )


def require_tensor(name: str, tensor: torch.Tensor | None) -> torch.Tensor:
    """The tensor; ArgumentError if it is None."""
    if tensor is None:
        raise ArgumentError(f"{name} must be a tensor here, got None")
    return tensor


def check_multiple(noun: str, number: int, unit: int) -> None:
    """ArgumentError unless the number of `noun` is a multiple of the unit."""
    if number % unit:
        raise ArgumentError(f"the number of {noun} must be a multiple of {unit}, got {number}")


def packed_and_table(
    matrices: torch.Tensor | TensorTable,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The packed tensor and the table's addresses, for a kernel; one of them is None."""
    return (matrices, None) if isinstance(matrices, torch.Tensor) else (None, matrices.pointers)


F = TypeVar("F", bound=Callable[..., object])


def writes(*names: str) -> Callable[[F], F]:
    """Decorator of a kernel: names the arguments that the kernel writes and may read; other arguments are only
    read. name.n: part n of a tuple; a name without a number: all parts. "peers": other ranks' memory for the kernel."""

    def decorate(kernel: F) -> F:
        kernel.writes = names  # type: ignore[attr-defined]  # callers read it from the twins
        return kernel

    return decorate


def in_parts(arguments: Mapping[str, Any], names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Arguments by the names of their parameters; if names has parts of an argument, its parts as name.n."""
    for name, value in arguments.items():
        if f"{name}.0" in names:
            yield from ((f"{name}.{n}", part) for n, part in enumerate(value or ()))
        else:
            yield name, value


def as_pair(operand: Any) -> tuple[Any, Any]:
    """Rows and their index, or a bias and its scale; a missing second part is None."""
    return operand if isinstance(operand, tuple) else (operand, None)


def num_rows(rows: Rows) -> int:
    """N, the number of rows."""
    tensor, row_index = as_pair(rows)
    return int((tensor if row_index is None else row_index).shape[0])


def range_of(bounds: torch.Tensor) -> torch.Tensor:
    """The row_range of adjacent groups: int32[2, G] from int32[G + 1], the row where each group begins and the row
    where the last group ends."""
    return torch.stack((bounds[:-1], bounds[1:]))


def bounds_of(row_range: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`range_of`."""
    return torch.cat((row_range[0], row_range[1, -1:]))


def equal_groups(num_groups: int, num_rows: int, device: torch.device) -> torch.Tensor:
    """The row_range of groups that have num_rows rows each."""
    begin = torch.arange(num_groups, dtype=torch.int32, device=device) * num_rows
    return torch.stack((begin, begin + num_rows))


def checked_row_range(row_start: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The row_range int32[2, G] of groups of `rows`, from their bounds int32[G + 1] or their row_range itself;
    ArgumentError if it is neither. Values are not read."""
    is_range = row_start.dim() == 2
    shape = (2, max(1, row_start.shape[1])) if is_range else (max(2, row_start.numel()),)
    check_operand("row_start", row_start, shape, (torch.int32,), rows.device)
    return row_start if is_range else range_of(row_start)
