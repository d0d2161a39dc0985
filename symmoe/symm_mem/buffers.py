"""One validator for every buffer a caller supplies for results to be written into."""

from __future__ import annotations

import torch

from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.symm_mem.heap import SymmetricHeap


def dtype_problem(name: str, dtype: torch.dtype) -> ArgumentError | None:
    """What is wrong with `dtype` for rows that travel, or None."""
    if dtype in control.DTYPES:
        return None
    return ArgumentError(f"{name} has dtype {dtype}; it must be one of {', '.join(map(str, control.DTYPES))}")


def buffer_problem(
    name: str,
    buffer: object,
    *,
    shape: tuple[int, ...],
    like: torch.Tensor,
    inputs: tuple[torch.Tensor, ...] = (),
    heap: SymmetricHeap | None = None,
) -> ArgumentError | None:
    """What keeps `buffer` from taking a result, or None. Looks at no device memory.

    Args:
        name: of the argument, for the text.
        shape: the shape it must have.
        like: gives dtype and device.
        inputs: tensors it must not overlap.
        heap: given if peers will reach into the buffer, which then must lie on this heap.
    """
    if not isinstance(buffer, torch.Tensor):
        return ArgumentError(f"{name} ({type(buffer).__name__}) must be a tensor")
    if tuple(buffer.shape) != shape:
        return ArgumentError(f"{name} has shape {list(buffer.shape)}; it must be {list(shape)}")
    if buffer.dtype != like.dtype:
        return ArgumentError(f"{name} has dtype {buffer.dtype}; it must be {like.dtype}")
    if buffer.device != like.device:
        return ArgumentError(f"{name} is on {buffer.device}; it must be on {like.device}")
    if not buffer.is_contiguous():
        return ArgumentError(f"{name} has strides {list(buffer.stride())}; it must be contiguous")
    if buffer.requires_grad:
        return ArgumentError(f"{name} requires a gradient; a buffer for results must not")
    if buffer.data_ptr() % control.ACCESS_BYTES:
        start = buffer.data_ptr()
        return ArgumentError(f"{name} starts at address {start}; it must be aligned to {control.ACCESS_BYTES}")
    if heap is not None and not heap.owns(buffer):
        return ArgumentError(f"{name} is not on this symmetric heap; make it with heap.lease")
    start, end = _span(buffer)
    for tensor in inputs:
        other_start, other_end = _span(tensor)
        if tensor.device == buffer.device and start < other_end and other_start < end:
            return ArgumentError(f"{name} {list(buffer.shape)} overlaps an input of shape {list(tensor.shape)}")
    return None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses from the first to past the last element."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
