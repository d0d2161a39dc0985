"""Memory on the heap that the layers of a model use one after the other.

An MoE layer keeps the dispatched rows for backward, in a lease that only they use. Three more row buffers are needed
only while a layer is at work: the experts' output until combine has read it, and in backward the gradient
of that output and the gradient of the rows. All layers share one buffer for each of them.
"""

from __future__ import annotations

import torch

from symmoe.kernels import control
from symmoe.symm_mem.heap import SymmetricHeap

_SLACK = 1.25  # of a buffer that grows, so that slightly larger batches do not make it grow each time


class SharedBuffers:
    """Row buffers by name, as large as the largest that was asked for. One object per heap.

    Args:
        heap: the heap that holds them.
    """

    def __init__(self, heap: SymmetricHeap) -> None:
        self.heap = heap
        self._memory: dict[str, torch.Tensor] = {}

    def rows(self, name: str, num_rows: int, row_capacity: int, like: torch.Tensor) -> torch.Tensor:
        """[num_rows, H] with H and dtype of `like`, in the buffer `name`. Local; contents are undefined.

        A buffer that grows leaves its old memory to the graphs that still refer to it.

        Args:
            row_capacity: least rows of the buffer: the largest num_rows of any rank, so that all ranks grow equally.

        Raises:
            HeapExhausted: on every rank, in the combine that would follow.
        """
        hidden = like.shape[1]
        num_bytes = row_capacity * hidden * like.element_size()
        memory = self._memory.get(name)
        if memory is None or memory.numel() < num_bytes:
            wanted = num_bytes if memory is None else max(num_bytes, int(memory.numel() * _SLACK))
            memory = None
            self._memory.pop(name, None)  # first, so that the old memory can be taken if nobody else holds it
            lease = self.heap.lease((wanted,), torch.uint8, name=name, phase=control.PHASE_COMBINE_READY)
            memory = self._memory[name] = lease.tensor
        return memory[:num_bytes].view(like.dtype).view(row_capacity, hidden)[:num_rows]

    def __deepcopy__(self, memo: dict[int, object]) -> SharedBuffers:
        """Copies of a layer spec share the buffers, as they share the heap."""
        return self
