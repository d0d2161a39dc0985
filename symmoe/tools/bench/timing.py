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


@dataclass(frozen=True)
class Variant:
    """One way to do what is measured."""

    name: str
    directions: tuple[str, ...]  # what lies between neighbouring marks of a call
    call: Callable[[Clock], Sequence[Mark]]  # does it once and returns its marks; one more is only waited for
    verify: Callable[[], float]  # does it once and returns the largest relative error; 0 where it must be exact
    max_error: float = 0.0
    reuses_marks: bool = False  # marks are those of the call before: a captured graph records the same events


def in_steps(*steps: Callable[[], object]) -> Callable[[Clock], list[Mark]]:
    """A Variant's call: the steps one after the other, with marks around each."""

    def call(clock: Clock) -> list[Mark]:
        marks = [clock()]
        for step in steps:
            step()
            marks.append(clock())
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
        clock: Clock | None = None,
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
                        times[variant.name].append(intervals_ms(marks.pop()))
                    align()
                    marks.append(variant.call(clock))
            for name, marks in taken.items():
                times[name] += map(intervals_ms, marks)
        ranks.barrier()
        own = {v.name: np.array(times[v.name])[:, : len(v.directions)] for v in variants}
        return {name: ranks.gather(taken).max(axis=0) for name, taken in own.items()}, errors

    def plan(self, problem: Problem, capacity: int | None = None) -> Plan:
        """A plan of the problem's routing. Collective."""
        experts = problem.case.shape.num_experts
        return make_plan(problem.topk_idx, num_experts=experts, heap=self.heap, capacity=capacity)
