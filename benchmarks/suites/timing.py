"""Times variants in turn: one protocol for all suites but "steps", described in docs/benchmarking.md."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from suites.problem import Problem
from suites.records import Record, case_record, rounded
from symmoe.dispatch.plan import Plan, make_plan
from symmoe.errors import WrongResult
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.ranks import WARM_UP, Ranks
from symmoe.torch_internals import gpu_sleep

DIRECTIONS = ("forward", "backward")
BLOCK = 10
_HEAD_START_CYCLES = 2_000_000  # about a millisecond: a trip has a dozen launches of 10 us
Times = dict[str, npt.NDArray[np.float64]]  # by variant, milliseconds [repetitions, directions]
Mark = Any  # a point in time: a HostEvent or a torch.cuda.Event
Clock = Callable[[], Mark]  # takes the point in time that is now


class Run(NamedTuple):
    """A run of the benchmark: the ranks, their heap, and the number of repetitions."""

    ranks: Ranks
    heap: SymmetricHeap
    repetitions: int


class HostEvent:
    """A point in time of the host, which does not wait for a GPU; has the methods of torch.cuda.Event."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        """Returns at once: the event is in the past."""

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from this event to `end`."""
        return (end._at_s - self._at_s) * 1e3


def stream_event() -> torch.cuda.Event:
    """A point in time of the current CUDA stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def intervals_ms(marks: Sequence[Mark]) -> list[float]:
    """Milliseconds between neighbouring marks; waits until the last has been reached."""
    marks[-1].synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]


@dataclass(frozen=True)
class Variant:
    """One implementation of the measured work."""

    name: str
    directions: tuple[str, ...]  # what lies between neighbouring marks of a call
    call: Callable[
        [Clock], Sequence[Mark]
    ]  # does it once and returns its marks; one more is only waited for
    verify: Callable[
        [], float
    ]  # does it once and returns the largest relative error; 0 where it must be exact
    max_error: float = 0.0
    reuses_marks: bool = (
        False  # marks are those of the call before: a captured graph records the same events
    )

    def once(self) -> None:
        """Runs the variant once, without a wait."""
        self.call(HostEvent)


def in_steps(*steps: Callable[[], object]) -> Callable[[Clock], list[Mark]]:
    """A Variant's call that runs the steps in sequence, with marks around each."""

    def call(clock: Clock) -> list[Mark]:
        marks = [clock()]
        for step in steps:
            step()
            marks.append(clock())
        return marks

    return call


def align(ranks: Ranks) -> None:
    """Makes later launches start at about the same time on all ranks. On GPUs the stream waits, not the host: steps can
    follow each other without a pause."""
    if ranks.num_ranks > 1 and ranks.device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=ranks.device))
    elif ranks.num_ranks > 1:
        ranks.barrier()


def head_start(ranks: Ranks) -> None:
    """Makes the stream sleep on GPUs, so that the host's launches are queued in the meantime."""
    if ranks.device.type == "cuda":
        gpu_sleep(_HEAD_START_CYCLES)


def align_ahead(ranks: Ranks) -> None:
    """A head start for the host, then :func:`align`: for calls so short that launches would hide their time."""
    head_start(ranks)
    align(ranks)


def measure(
    run: Run,
    variants: Sequence[Variant],
    *,
    clock: Clock | None = None,
    align: Callable[[Ranks], None] = align,
    block: int = BLOCK,
) -> tuple[Times, dict[str, float]]:
    """(milliseconds [repetitions, directions], the largest of all ranks, relative error) of every variant, by name.
    Collective. Raises WrongResult on every rank if one is wrong on any.

    Args:
        clock: by default that of the device.
        align: runs before every call.
    """
    ranks = run.ranks
    clock = clock or (stream_event if ranks.device.type == "cuda" else HostEvent)
    errors = {v.name: largest_error(v.name, v.verify(), v.max_error, ranks) for v in variants}
    for variant in variants:
        for _ in range(WARM_UP):
            align(ranks)
            variant.call(clock)
    times: dict[str, list[list[float]]] = {variant.name: [] for variant in variants}
    for first in range(0, run.repetitions, block):
        ranks.barrier()
        head_start(ranks)
        all_marks: dict[str, list[Sequence[Mark]]] = {variant.name: [] for variant in variants}
        for repetition in range(first, min(first + block, run.repetitions)):
            for variant in random.Random(repetition).sample(variants, len(variants)):
                marks = all_marks[variant.name]
                if variant.reuses_marks and marks:
                    times[variant.name].append(intervals_ms(marks.pop()))
                align(ranks)
                marks.append(variant.call(clock))
        for name, marks in all_marks.items():
            times[name] += map(intervals_ms, marks)
    ranks.barrier()
    local = {v.name: np.array(times[v.name])[:, : len(v.directions)] for v in variants}
    return {name: ranks.gather(all_marks).max(axis=0) for name, all_marks in local.items()}, errors


def timed_records(
    problem: Problem, suite: str, times: Times, figures_of: Callable[[str, int], Record]
) -> list[Record]:
    """A record of every variant and direction. figures_of: figures besides times, by name and column of the times."""
    return [
        case_record(
            problem,
            suite,
            name,
            DIRECTIONS[column],
            times_ms[:, column],
            **figures_of(name, column),
        )
        for name, times_ms in times.items()
        for column in range(times_ms.shape[1])
    ]


def now_s() -> float:
    """Seconds on the host's clock once the GPU, if there is one, is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def host_times_ms(call: Callable[[], object], ranks: Ranks, repetitions: int = 1) -> list[float]:
    """Milliseconds until a call returns on this host; before each call all ranks synchronise, and devices are idle."""
    times_ms = []
    for _ in range(repetitions):
        ranks.barrier()
        start = time.perf_counter()
        call()
        times_ms.append((time.perf_counter() - start) * 1e3)
    return times_ms


def largest_error(name: str, error: float, max_error: float, ranks: Ranks) -> float:
    """The largest relative error of any rank. Collective. Raises WrongResult on every rank if it is more than
    `max_error`."""
    error = ranks.largest(error)
    if not error <= max_error:  # NaN is wrong too
        raise WrongResult(f"{name} is wrong: relative error {error:.3g}, allowed {max_error:.3g}")
    return error


def largest(errors: list[float]) -> float:
    """The largest error; NaN if any is NaN, 0 if there is none."""
    return float(np.max(errors, initial=0.0))


def median_ms(times_ms: npt.NDArray[np.float64]) -> float:
    """The median of all repetitions."""
    return rounded(float(np.median(times_ms)))


def plan_of(run: Run, problem: Problem, capacity: int | None = None) -> Plan:
    """A plan of the problem's routing. Collective."""
    experts = problem.case.shape.num_experts
    return make_plan(problem.topk_idx, num_experts=experts, heap=run.heap, capacity=capacity)
