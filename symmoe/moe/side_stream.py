"""A call of a module on a second CUDA stream, at the same time as the work of the current stream."""

from __future__ import annotations

import torch
from torch import nn

from symmoe.symm_mem.heap import SymmetricHeap


class SideCall:
    """module(x), on the heap's side stream from :meth:`start` to :meth:`join`; on CPUs at once.

    Autograd runs the module's backward on that stream too, and orders it with its neighbours'.
    """

    def __init__(self, module: nn.Module, x: torch.Tensor, heap: SymmetricHeap) -> None:
        self._module, self._x, self._heap = module, x, heap
        self._y: torch.Tensor | None = None

    def start(self) -> None:
        """Enqueues the call, from where the current stream is now."""
        stream = self._heap.side_stream
        if stream is None:
            self._y = self._module(self._x)
            return
        stream.wait_stream(torch.cuda.current_stream(self._x.device))
        with torch.cuda.stream(stream):
            self._y = self._module(self._x)
        self._x.record_stream(stream)  # or its memory might go to somebody else while `stream` still reads it

    def join(self) -> torch.Tensor:
        """The result, for use on the current stream. A call that has not been started runs there, now."""
        if self._y is None:
            y: torch.Tensor = self._module(self._x)
            return y
        stream = self._heap.side_stream
        if stream is not None:
            current = torch.cuda.current_stream(self._y.device)
            current.wait_stream(stream)
            self._y.record_stream(current)
        return self._y
