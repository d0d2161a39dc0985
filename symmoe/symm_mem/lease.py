"""A lease: a sub-allocation of the symmetric heap's arena, with a tensor over it."""

from __future__ import annotations

import math

import torch

from symmoe.autograd import wrote_into
from symmoe.errors import ArgumentError, StaleLease
from symmoe.symm_mem.memory import Memory, Span
from symmoe.tape.recorder import recorded


def lease_problem(shape: object, dtype: object) -> ArgumentError | None:
    """What is wrong with the arguments of :meth:`SymmetricHeap.lease`, or None."""
    if not isinstance(dtype, torch.dtype):
        return ArgumentError(f"dtype ({dtype!r}) must be a torch.dtype")
    if not isinstance(shape, (tuple, list)):
        return ArgumentError(f"shape ({shape!r}) must be a tuple of ints")
    if not all(hasattr(size, "__index__") and not isinstance(size, bool) and size >= 0 for size in shape):
        return ArgumentError(f"shape ({shape!r}) must be of ints of at least 0")
    return None


def ended_lease(tensor: torch.Tensor) -> Span | None:
    """The span of the lease that `tensor` is memory of, if it was released or its heap closed; else None."""
    if tensor.layout != torch.strided:  # such a tensor has no storage
        return None
    span = getattr(tensor.untyped_storage(), "_lease_span", None)
    return span if span is not None and span.end else None


class Lease:
    """Memory of the symmetric heap, made by :meth:`SymmetricHeap.lease`. Contents are undefined at first.

    Attributes:
        name: purpose of the lease, shown in error texts.
        shape, dtype: shape and dtype of the tensor.
        offset: byte offset in the arena.
        num_bytes: size of the tensor.
        generation: how many leases the heap had made before this one.

    The memory goes back to the heap by :meth:`release`, or when neither the lease nor any tensor over it is alive. So
    autograd may save the tensor, checkpointing may drop it, and a graph that is dropped leaks nothing.
    Releasing is local and does not synchronise: later kernels on the same stream may reuse the memory, and peers write
    into it only after a barrier that this rank's stream reaches.
    """

    def __init__(self, memory: Memory, span: Span, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.name, self.offset, self.generation = span.name, span.offset, span.generation
        self.shape, self.dtype, self.num_bytes = shape, dtype, dtype.itemsize * math.prod(shape)
        self._memory: Memory | None = memory
        self._span = span
        self._tensor: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """This rank's memory as a contiguous tensor of `shape` and `dtype`."""
        if self._memory is None:
            raise StaleLease(f"lease '{self.name}' (generation {self.generation}) has been released")
        if self._tensor is None:  # leases whose memory only peers and kernels look at need none
            self._tensor = self._over(self._memory, self._memory.peers.rank)
            self._tensor.untyped_storage()._lease_span = self._span  # type: ignore[attr-defined]  # our attribute
        return self._tensor

    @property
    def address(self) -> int:
        """Where this rank's memory begins."""
        return self._span.address

    def peer(self, rank: int) -> torch.Tensor:
        """The same byte range of rank `rank`'s arena as a tensor.

        It is that rank's lease of the same name if all ranks lease and release in the same order.

        Raises:
            ArgumentError: the group has no such rank; raised only on this rank, as every error of a lease.
        """
        if self._memory is None:
            raise StaleLease(f"lease '{self.name}' (generation {self.generation}) has been released")
        num_ranks = self._memory.peers.num_ranks
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < num_ranks:
            raise ArgumentError(f"rank ({rank!r}) must be an int in [0, {num_ranks})")
        return self._over(self._memory, rank)

    @recorded
    def release(self) -> None:
        """Gives the memory back. A second call raises StaleLease. Local."""
        if self._memory is None:
            raise StaleLease(f"lease '{self.name}' (generation {self.generation}) was released twice")
        if self._tensor is not None:
            wrote_into(self._tensor)  # tensors that autograd has saved of it are no longer valid
        self._memory, self._tensor = None, None
        self._span.release()

    def shrink(self, num_bytes: int) -> None:
        """Gives back what comes after the first bytes; the tensor stays, but nobody may write there. Local."""
        self._span.shrink(num_bytes)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._memory is not None:
            self.release()

    def _over(self, memory: Memory, rank: int) -> torch.Tensor:
        arena = memory.arena_tensor(rank)
        tensor = arena[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)
        # Autograd takes a detached tensor for no view; it would track a write to a view as a write to the arena.
        return tensor.detach()
