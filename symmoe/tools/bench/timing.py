"""Clocks, errors, and what a run has. docs/benchmarking.md has the protocol."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from symmoe.errors import WrongResult
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.bench.ranks import Ranks

WARM_UP = 3
MAX_ERROR = 3e-2  # of bf16 steps, relative; the layers measured so far have up to 1e-2
Mark = Any  # a point in time: a HostEvent or a torch.cuda.Event
Clock = Callable[[], Mark]  # takes the point in time that is now


class HostEvent:
    """A point in time of the host, which does not wait for a GPU; used as a torch.cuda.Event is."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing: it has been reached."""

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from here to `end`."""
        return (end._at_s - self._at_s) * 1e3


def stream_event() -> torch.cuda.Event:
    """A point in time of the current CUDA stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def clock_for(device: torch.device) -> Clock:
    """The clock of what runs on a device."""
    return stream_event if device.type == "cuda" else HostEvent


def intervals_ms(marks: Sequence[Mark]) -> list[float]:
    """Milliseconds between neighbouring marks; waits until the last has been reached."""
    marks[-1].synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """|got - expected| / |expected| (Euclidean); 0 for two zeros, infinite if only `expected` is zero."""
    return row_error(got.reshape(1, -1), expected.reshape(1, -1))


def row_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of any row of [., .]; 0 without rows."""
    if not expected.numel():
        return 0.0
    got, expected = got.detach().float(), expected.detach().float()
    difference = (got - expected).norm(dim=1)
    size = expected.norm(dim=1)
    return float(torch.where((difference == 0) & (size == 0), 0.0, difference / size).max())


def largest(errors: list[float]) -> float:
    """The largest error; NaN if any is NaN."""
    return float(np.max(errors)) if errors else 0.0


def largest_error(name: str, error: float, max_error: float, ranks: Ranks) -> float:
    """The largest relative error of any rank. Collective. Raises WrongResult on every rank if it is more than
    `max_error`."""
    error = ranks.largest(error)
    if not error <= max_error:  # NaN is wrong too
        raise WrongResult(f"{name} is wrong: relative error {error:.3g}, allowed {max_error:.3g}")
    return error


class Run(NamedTuple):
    """One run of the benchmark: the ranks, their heap, and how often everything is timed."""

    ranks: Ranks
    heap: SymmetricHeap
    repetitions: int
