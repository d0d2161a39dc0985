"""Ranges around the operators of `symmoe.kernels` while a step is recorded.

The step looks its operators up in a module when it calls them. So they can be replaced while a step is recorded, and
cost nothing otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from symmoe import kernels
from symmoe.errors import ArgumentError
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.timeline.phases import BY_OPERATOR
from symmoe.torch_internals import graph_task_id

_PREFIX = "symmoe"
START = "symmoe/start"  # a range that marks where a recording starts

Around = Callable[[str], AbstractContextManager[object]]


class _Ranged:
    """An operator that runs in a context."""

    def __init__(self, name: str, operator: Callable[..., Any], around: Around) -> None:
        self._name, self.operator, self._around = name, operator, around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._around(self._name):
            return self.operator(*args, **kwargs)


@contextmanager
def ranged(device: torch.device, around: Around) -> Iterator[None]:
    """Calls every operator for `device` inside `around(its name)`, in this process, in this context.

    Raises:
        ArgumentError: such a context is active already.
    """
    operators = kernels.for_device(device)
    originals = {name: getattr(operators, name) for name in BY_OPERATOR}
    if any(isinstance(operator, _Ranged) for operator in originals.values()):
        raise ArgumentError("a timeline is being recorded, or ranges are on, already in this process")
    try:
        for name, operator in originals.items():
            setattr(operators, name, _Ranged(name, operator, around))
        yield
    finally:
        for name, operator in originals.items():
            setattr(operators, name, operator)


@contextmanager
def annotate(heap: SymmetricHeap) -> Iterator[None]:
    """Ranges for profilers around what this process launches: `symmoe/<forward or backward>/<operator>`. Local.

    For a profiler of your own: torch.profiler sees them as user annotations, Nsight Systems as NVTX ranges. Does not
    synchronise. Costs nothing outside of the context. :func:`symmoe.timeline.record` turns them on.

    Raises:
        ArgumentError: they are on already.
    """
    on_gpu = heap.device.type == "cuda"

    @contextmanager
    def around(operator: str) -> Iterator[None]:
        name = range_name(operator)
        with ExitStack() as ranges:
            ranges.enter_context(torch.profiler.record_function(name))
            if on_gpu:
                ranges.enter_context(torch.cuda.nvtx.range(name))
            yield

    with ranged(heap.device, around):
        yield


def direction() -> str:
    """The direction of the calling pass: "backward" inside autograd's, else "forward"."""
    return "forward" if graph_task_id() == -1 else "backward"


def range_name(operator: str) -> str:
    """The name of the range around a call of an operator at this moment."""
    return f"{_PREFIX}/{direction()}/{operator}"


def parse_range(name: str) -> tuple[str, str] | None:
    """(direction, operator) of a name that :func:`range_name` has made; None for others."""
    prefix, _, rest = name.partition("/")
    found, _, operator = rest.partition("/")
    return (found, operator) if prefix == _PREFIX and operator in BY_OPERATOR else None
