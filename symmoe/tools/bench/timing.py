"""How things are timed: one protocol for everything that is measured. docs/benchmarking.md has it, and why it is so."""

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

from symmoe.dispatch.plan import Plan, make_plan
from symmoe.errors import WrongResult
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.bench.problem import Problem
from symmoe.tools.bench.ranks import Ranks

DIRECTIONS = ("forward", "backward")
WARM_UP = 3
BLOCK = 10
Mark = Any  # a point in time as a clock takes it


class HostClock:
    """Takes points in time on the host, which does not wait for a GPU, and says how far they are apart."""

    def mark(self) -> Mark:
        """Now."""
        return time.perf_counter()

    def intervals_ms(self, marks: Sequence[Mark]) -> list[float]:
        """Milliseconds between neighbouring marks; waits until they have been reached."""
        return [(end - start) * 1e3 for start, end in itertools.pairwise(marks)]


class StreamMark(NamedTuple):
    """A point in time on a stream: an event, and a later one, or the same, for the host to wait for. It cannot wait for
    an event that a graph records: until the replay gets there, that is the event of the replay before."""

    event: torch.cuda.Event
    reached: torch.cuda.Event


class StreamClock(HostClock):
    """The same on the current CUDA stream, by events."""

    def mark(self) -> StreamMark:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return StreamMark(event, event)

    def intervals_ms(self, marks: Sequence[StreamMark]) -> list[float]:
        marks[-1].reached.synchronize()
        return [start.event.elapsed_time(end.event) for start, end in itertools.pairwise(marks)]


def clock_for(device: torch.device) -> HostClock:
    """The clock of what runs on a device."""
    return StreamClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class Variant:
    """One way to do what is measured."""

    name: str
    directions: tuple[str, ...]  # what lies between neighbouring marks of a call
    call: Callable[[HostClock], Sequence[Mark]]  # does it once and returns its marks
    verify: Callable[[], float]  # does it once and returns the largest relative error; 0 where it must be exact
    max_error: float = 0.0
    reuses_marks: bool = False  # marks are those of the call before: a captured graph records the same events


def in_steps(*steps: Callable[[], object]) -> Callable[[HostClock], list[Mark]]:
    """A Variant's call: the steps one after the other, with marks around each."""

    def call(clock: HostClock) -> list[Mark]:
        marks = [clock.mark()]
        for step in steps:
            step()
            marks.append(clock.mark())
        return marks

    return call


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

    def measure(
        self,
        variants: Sequence[Variant],
        *,
        clock: HostClock | None = None,
        align: Callable[[], None] | None = None,
        block: int = BLOCK,
    ) -> tuple[dict[str, npt.NDArray[np.float64]], dict[str, float]]:
        """(milliseconds [repetitions, directions], the largest of all ranks, relative error) of every variant, by name.
        Collective. Raises WrongResult on every rank if one is wrong on any.

        Args:
            align: runs before every call; None is `ranks.align`. `ranks.align_ahead` is for calls that are so short
                that launches would hide their time.
        """
        ranks, clock = self.ranks, clock or clock_for(self.ranks.device)
        errors = {v.name: largest_error(v.name, v.verify(), v.max_error, ranks) for v in variants}
        align = align or ranks.align
        for variant in variants:
            for _ in range(WARM_UP):
                align()
                variant.call(clock)
        times: dict[str, list[list[float]]] = {variant.name: [] for variant in variants}
        for first in range(0, self.repetitions, block):
            ranks.barrier()
            ranks.head_start()
            taken: dict[str, list[Sequence[Mark]]] = {variant.name: [] for variant in variants}
            for repetition in range(first, min(first + block, self.repetitions)):
                for variant in random.Random(repetition).sample(variants, len(variants)):
                    marks = taken[variant.name]
                    if variant.reuses_marks and marks:
                        times[variant.name].append(clock.intervals_ms(marks.pop()))
                    align()
                    marks.append(variant.call(clock))
            for name, marks in taken.items():
                times[name] += [clock.intervals_ms(m) for m in marks]
        ranks.barrier()
        return {name: ranks.gather(np.array(rows)).max(axis=0) for name, rows in times.items()}, errors

    def plan(self, problem: Problem, capacity: int | None = None) -> Plan:
        """A plan of the problem's routing. Collective."""
        experts = problem.case.shape.num_experts
        return make_plan(problem.topk_idx, num_experts=experts, heap=self.heap, capacity=capacity)
