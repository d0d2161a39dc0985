"""Checks of memory that a caller gives: tensors to read, and buffers for results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from symmoe.autograd import transform_problem
from symmoe.errors import ArgumentError, StaleLease
from symmoe.kernels import control
from symmoe.symm_mem.memory import ended_lease
from symmoe.torch_internals import has_storage, num_dispatch_modes

if TYPE_CHECKING:
    from symmoe.symm_mem.heap import SymmetricHeap

_PLAIN = torch.Tensor.__torch_dispatch__  # the attribute of tensor classes that keep their own memory


def dtype_problem(
    name: str, dtype: torch.dtype, dtypes: tuple[torch.dtype, ...] = control.DTYPES
) -> ArgumentError | None:
    """What is wrong with `dtype`, or None; by default `dtype` is that of rows that travel."""
    if dtype in dtypes:
        return None
    return ArgumentError(f"{name} has dtype {dtype}; it must be {' or '.join(map(str, dtypes))}")


def tensor_problem(
    name: str, tensor: object, *, shape: tuple[int | str, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> ArgumentError | StaleLease | None:
    """What keeps `tensor` from being an argument that kernels read, or None. Looks at no device memory.

    Args:
        name: name of the argument, for the text.
        shape: required shape; a word stands for any size, and "..." in front for any dimensions.
        dtypes, device: allowed dtypes, and required device.
    """
    if not isinstance(tensor, torch.Tensor):
        return ArgumentError(f"{name} ({type(tensor).__name__}) must be a tensor of shape {_shown(shape)}")
    if (error := memory_problem(name, tensor)) is not None:
        return error
    if not _fits(tensor.shape, shape):
        return ArgumentError(f"{name} has shape {list(tensor.shape)}; it must be {_shown(shape)}")
    if tensor.device != device:
        return ArgumentError(f"{name} is on {tensor.device}; it must be on {device}")
    return dtype_problem(name, tensor.dtype, dtypes)


def memory_problem(name: str, tensor: object) -> ArgumentError | StaleLease | None:
    """What keeps kernels from reading or writing the memory of `tensor` as its strides say, or None; wherever it is."""
    if not isinstance(tensor, torch.Tensor):
        return ArgumentError(f"{name} ({type(tensor).__name__}) must be a tensor")
    if torch.compiler.is_compiling():  # it passes tensors without memory, and runs no kernels
        return None
    if (error := transform_problem()) is not None:
        return error
    kind = None
    if tensor.is_nested:
        kind = "a nested tensor"
    elif tensor.layout is not torch.strided:
        kind = str(tensor.layout)
    elif type(tensor).__torch_dispatch__ is not _PLAIN and not _is_traced(tensor):
        kind = type(tensor).__name__
    elif not has_storage(tensor):  # of a backward pass with is_grads_batched
        kind = "a tensor of vmap"
    elif tensor.numel() and not tensor.untyped_storage().nbytes():
        kind = "a tensor whose memory has been freed"
    if kind is not None:
        return ArgumentError(f"{name} ({kind}) must be a strided tensor with memory of its own")
    return stale_problem(name, tensor)


def _is_traced(tensor: torch.Tensor) -> bool:
    """Whether FakeTensorMode made the tensor, under a mode: then operators that need no memory take it."""
    return hasattr(tensor, "fake_mode") and num_dispatch_modes() > 0


def _fits(shape: tuple[int, ...], wanted: tuple[int | str, ...]) -> bool:
    if wanted and wanted[0] == "...":
        wanted = wanted[1:]
        shape = shape[-len(wanted) :]
    if len(shape) != len(wanted):
        return False
    for size, want in zip(shape, wanted, strict=True):
        if size != want and not isinstance(want, str):
            return False
    return True


def _shown(shape: tuple[int | str, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def stale_problem(name: str, tensor: object) -> StaleLease | None:
    """The error if `tensor` is memory of a released lease or of a closed heap, or None; also takes tensors that are
    not dense."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return None
    lease = ended_lease(tensor)
    if lease is None:
        return None
    return StaleLease(f"{name} is memory of lease '{lease.name}' (generation {lease.generation}), {lease.end}")


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that a call writes, and the time for which its contents matter.

    Attributes:
        name: name of the argument, for texts.
        tensor: the memory, contiguous.
        first, last: points in time in any unit, both included; a call that is one step needs none.
    """

    name: str
    tensor: torch.Tensor
    first: float = 0
    last: float = math.inf


def overlap_problem(buffers: Sequence[Buffer], inputs: Iterable[torch.Tensor]) -> ArgumentError | None:
    """The error if a buffer shares memory with an input, or with another buffer while both matter, or None.

    Args:
        buffers: memory that is written.
        inputs: tensors that are read or saved for backward, at any time; those that are not dense are skipped.
    """
    if not buffers:
        return None
    spans = [(_span(buffer.tensor), buffer) for buffer in buffers]
    lowest, highest = min(start for (start, _), _ in spans), max(end for (_, end), _ in spans)
    near = [
        (span, tensor)
        for tensor in inputs
        if tensor.layout is torch.strided and _meet(span := _span(tensor), (lowest, highest))
    ]
    for i, (span, buffer) in enumerate(spans):
        others = [
            (other_span, other.tensor)
            for other_span, other in spans[:i]
            if buffer.first <= other.last and other.first <= buffer.last
        ]
        for other_span, tensor in (*near, *others):
            if _meet(span, other_span) and tensor.device == buffer.tensor.device:
                return ArgumentError(
                    f"{buffer.name} {list(buffer.tensor.shape)} overlaps a tensor of shape {list(tensor.shape)} that "
                    "the call also uses"
                )
    return None


def buffer_problem(
    name: str,
    buffer: object,
    *,
    shape: tuple[int, ...] | None,
    dtype: torch.dtype | None,
    device: torch.device | None,
    inputs: tuple[torch.Tensor, ...] = (),
    heap: SymmetricHeap | None = None,
) -> ArgumentError | StaleLease | None:
    """What keeps `buffer` from taking a result, or None. Looks at no device memory.

    Args:
        name: name of the argument, for the text.
        shape, dtype, device: required ones; None: unknown.
        inputs: tensors it must not overlap: those read or saved for backward, and other buffers.
        heap: the heap on which the buffer must lie, because peers reach into it; None: anywhere.
    """
    if (error := memory_problem(name, buffer)) is not None:
        return error
    assert isinstance(buffer, torch.Tensor)
    if shape is not None and tuple(buffer.shape) != shape:
        return ArgumentError(f"{name} has shape {list(buffer.shape)}; it must be {list(shape)}")
    if dtype is not None and buffer.dtype != dtype:
        return ArgumentError(f"{name} has dtype {buffer.dtype}; it must be {dtype}")
    if device is not None and buffer.device != device:
        return ArgumentError(f"{name} is on {buffer.device}; it must be on {device}")
    if not buffer.is_contiguous():
        return ArgumentError(f"{name} has strides {list(buffer.stride())}; it must be contiguous")
    if buffer.requires_grad:
        return ArgumentError(f"{name} requires a gradient; a buffer for results must not")
    start = buffer.data_ptr()
    if start % control.ACCESS_BYTES:
        return ArgumentError(f"{name} starts at address {start}; it must be aligned to {control.ACCESS_BYTES}")
    if heap is not None and not heap.owns(buffer):
        return ArgumentError(f"{name} is not on this symmetric heap; make it with heap.lease")
    return overlap_problem([Buffer(name, buffer)], inputs)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first element and of the end of the last one."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * tensor.element_size()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _meet(span: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two ranges of addresses share one; an empty range shares none."""
    return max(span[0], other[0]) < min(span[1], other[1])
