"""What autograd must know of memory that kernels write into behind its back."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

from symmoe.errors import ArgumentError, StaleRows

if TYPE_CHECKING:

    class Function(torch.autograd.Function):
        """torch's, whose `apply` has no annotations."""

        @classmethod
        def apply(cls, *args: Any) -> Any:
            """What forward returns."""

else:
    Function = torch.autograd.Function


class Context(Protocol):
    """What autograd gives to forward and backward of a Function. (torch's own FunctionCtx leaves half of it out.)"""

    saved_tensors: tuple[Any, ...]  # each a tensor, or None
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keeps them for backward, which finds them in `saved_tensors`."""


def wrote_into(tensor: torch.Tensor) -> torch.Tensor:
    """Tells autograd that a kernel has written into `tensor`, so that it refuses what was saved of it before."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
    return tensor


class Unmodified:
    """Tensors that a backward pass will read later than autograd checks what it has saved."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._versions = [(name, tensor, tensor._version) for name, tensor in tensors.items()]

    def check(self) -> None:
        """
        Raises:
            StaleRows: one of the tensors has been written to, or is memory of a lease that has been released.
        """
        for name, tensor, version in self._versions:
            if tensor._version != version:
                raise StaleRows(
                    f"{name} {list(tensor.shape)} is at version {tensor._version}, a gradient that was left for later "
                    f"needs version {version}: it has been written to, or its lease released, in between"
                )


def hand_on(buffer: torch.Tensor) -> torch.Tensor:
    """What a backward pass returns for a gradient that it has written into a caller's buffer.

    The caller keeps it as long as its graph node lives. That second reference keeps autograd from making the buffer's
    memory the `.grad` of a leaf, and :func:`in_flight_problem` finds out by it whether autograd still needs it.
    """
    gradient = wrote_into(buffer).detach()
    start = gradient.data_ptr()
    storage = buffer.untyped_storage()
    pending = [entry for entry in getattr(storage, "_gradients", ()) if _is_in_flight(entry[2])]
    storage._gradients = [  # type: ignore[attr-defined]  # our own, for as long as the memory lives
        *pending,
        (start, start + gradient.nbytes, weakref.ref(gradient)),
    ]
    return gradient


def in_flight_problem(name: str, buffer: torch.Tensor) -> ArgumentError | None:
    """The error if `buffer` holds a gradient that autograd has been given and has not used up, or None."""
    start, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
    for other_start, other_end, gradient in getattr(buffer.untyped_storage(), "_gradients", ()):
        if start < other_end and other_start < end and _is_in_flight(gradient):
            return ArgumentError(
                f"{name} {list(buffer.shape)} still holds another gradient of this backward pass, of "
                f"{other_end - other_start} bytes, that autograd has not used up; give each its own buffer"
            )
    return None


def _is_in_flight(reference: weakref.ref[torch.Tensor]) -> bool:
    gradient = reference()
    # One reference is the graph node's own; autograd holds one more until the gradient has been used or added up.
    return gradient is not None and gradient._use_count() > 1  # type: ignore[attr-defined]  # torch's stubs leave it out
