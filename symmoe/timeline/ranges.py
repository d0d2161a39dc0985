"""Ranges around the operators of `symmoe.kernels` while a step is recorded.

The step looks its operators up in a module when it calls them. So they can be replaced while a step is recorded, and
cost nothing otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from symmoe import kernels
from symmoe.errors import ArgumentError
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.timeline.phases import BY_OPERATOR
from symmoe.torch_internals import graph_task_id

_PREFIX = "symmoe"
START = "symmoe/start"  # a range that marks where a recording starts


class _Ranged:
    """An operator that runs in a range."""

    def __init__(self, name: str, operator: Callable[..., Any], on_gpu: bool) -> None:
        self._name, self._operator, self._on_gpu = name, operator, on_gpu

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Inside autograd's backward pass there is a graph task.
        direction = "forward" if graph_task_id() == -1 else "backward"
        name = f"{_PREFIX}/{direction}/{self._name}"
        with torch.profiler.record_function(name):
            if not self._on_gpu:
                return self._operator(*args, **kwargs)
            with torch.cuda.nvtx.range(name):
                return self._operator(*args, **kwargs)


@contextmanager
def annotate(heap: SymmetricHeap) -> Iterator[None]:
    """Ranges for profilers around what this process launches: `symmoe/<forward or backward>/<operator>`. Local.

    For a profiler of your own: torch.profiler sees them as user annotations, Nsight Systems as NVTX ranges. Does not
    synchronise. Costs nothing outside of the context. :func:`symmoe.timeline.record` turns them on.

    Raises:
        ArgumentError: they are on already.
    """
    operators = kernels.for_device(heap.device)
    originals = {name: getattr(operators, name) for name in BY_OPERATOR}
    if any(isinstance(operator, _Ranged) for operator in originals.values()):
        raise ArgumentError("a timeline is being recorded, or ranges are on, already in this process")
    try:
        for name, operator in originals.items():
            setattr(operators, name, _Ranged(name, operator, heap.device.type == "cuda"))
        yield
    finally:
        for name, operator in originals.items():
            setattr(operators, name, operator)


def parse_range(name: str) -> tuple[str, str] | None:
    """(direction, operator) of a range's name; None for others."""
    prefix, _, rest = name.partition("/")
    direction, _, operator = rest.partition("/")
    return (direction, operator) if prefix == _PREFIX and operator in BY_OPERATOR else None
