"""Ranges around the operators of `symmoe.kernels` while a step is recorded: a hook (kernels/select.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from symmoe import kernels
from symmoe.errors import ArgumentError
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.timeline.phases import BY_OPERATOR
from symmoe.torch_internals import graph_task_id

_PREFIX = "symmoe"
START = "symmoe/start"  # a range that marks where a recording starts


def _ranged(operator: str, kernel: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """A hook: the kernel runs in a range, if it is an operator of a timeline."""
    if operator not in BY_OPERATOR:
        return kernel(*args, **kwargs)
    # Inside autograd's backward pass there is a graph task.
    direction = "forward" if graph_task_id() == -1 else "backward"
    name = f"{_PREFIX}/{direction}/{operator}"
    nvtx = torch.cuda.nvtx.range(name) if torch.cuda.is_initialized() else nullcontext()
    with torch.profiler.record_function(name), nvtx:
        return kernel(*args, **kwargs)


@contextmanager
def annotate(heap: SymmetricHeap) -> Iterator[None]:
    """Ranges for profilers around what this process launches: `symmoe/<forward or backward>/<operator>`. Local.

    For a profiler of your own: torch.profiler sees them as user annotations, Nsight Systems as NVTX ranges. Does not
    synchronise. Costs nothing outside of the context. :func:`symmoe.timeline.record` turns them on.

    Raises:
        ArgumentError: they are on already.
    """
    if kernels.has_hook(heap.device, _ranged):
        raise ArgumentError("a timeline is being recorded, or ranges are on, already in this process")
    with kernels.hooked(heap.device, _ranged):
        yield


def parse_range(name: str) -> tuple[str, str] | None:
    """(direction, operator) of a range's name; None for others."""
    prefix, _, rest = name.partition("/")
    direction, _, operator = rest.partition("/")
    return (direction, operator) if prefix == _PREFIX and operator in BY_OPERATOR else None
