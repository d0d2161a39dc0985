"""One validator for every buffer a caller supplies for results to be written into."""

from __future__ import annotations

import torch

from symmoe.errors import ArgumentError, StaleLease
from symmoe.kernels import control
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.symm_mem.lease import released_lease


def dtype_problem(name: str, dtype: torch.dtype) -> ArgumentError | None:
    """What is wrong with `dtype` for rows that travel, or None."""
    if dtype in control.DTYPES:
        return None
    return ArgumentError(f"{name} has dtype {dtype}; it must be one of {', '.join(map(str, control.DTYPES))}")


def stale_problem(name: str, tensor: torch.Tensor) -> StaleLease | None:
    """The error if `tensor` is memory of a lease that has been released, or None."""
    lease = released_lease(tensor)
    if lease is None:
        return None
    return StaleLease(f"{name} is memory of lease '{lease.name}' (generation {lease.generation}), which was released")


def buffer_problem(
    name: str,
    buffer: object,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    inputs: tuple[torch.Tensor, ...] = (),
    heap: SymmetricHeap | None = None,
) -> ArgumentError | StaleLease | None:
    """What keeps `buffer` from taking a result, or None. Looks at no device memory.

    Args:
        name: of the argument, for the text.
        shape, dtype, device: what it must have.
        inputs: tensors it must not overlap: what is read or saved for backward, and other buffers.
        heap: given if peers will reach into the buffer, which then must lie on this heap.
    """
    if not isinstance(buffer, torch.Tensor):
        return ArgumentError(f"{name} ({type(buffer).__name__}) must be a tensor")
    if tuple(buffer.shape) != shape:
        return ArgumentError(f"{name} has shape {list(buffer.shape)}; it must be {list(shape)}")
    if buffer.dtype != dtype:
        return ArgumentError(f"{name} has dtype {buffer.dtype}; it must be {dtype}")
    if buffer.device != device:
        return ArgumentError(f"{name} is on {buffer.device}; it must be on {device}")
    if not buffer.is_contiguous():
        return ArgumentError(f"{name} has strides {list(buffer.stride())}; it must be contiguous")
    if buffer.requires_grad:
        return ArgumentError(f"{name} requires a gradient; a buffer for results must not")
    start = buffer.data_ptr()
    if start % control.ACCESS_BYTES:
        return ArgumentError(f"{name} starts at address {start}; it must be aligned to {control.ACCESS_BYTES}")
    if (error := stale_problem(name, buffer)) is not None:
        return error
    if heap is not None and not heap.owns(buffer):
        return ArgumentError(f"{name} is not on this symmetric heap; make it with heap.lease")
    end = start + buffer.numel() * buffer.element_size()
    for tensor in inputs:
        other_start, other_end = _span(tensor)
        if tensor.device == buffer.device and start < other_end and other_start < end:
            return ArgumentError(
                f"{name} {list(buffer.shape)} overlaps a tensor of shape {list(tensor.shape)} that the call also uses"
            )
    return None


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses from the first to past the last element."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()
