"""A step as a CUDA graph, and a recording of its replays: what the GPU does when no host holds it up.

A profiler sees the kernels of a replay, but not who launched them, and their streams are the graph executor's choice.
So the graph has marks where the forward and the backward pass begin, and kernels get their direction from the marks
before them, their lane from their phase.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.timeline.events import Event, Timeline
from symmoe.timeline.phases import COMMUNICATION
from symmoe.timeline.recording import Recording, record_as
from symmoe.torch_internals import SLEEP_KERNEL, gpu_sleep

_Outputs = TypeVar("_Outputs")

_MARK = SLEEP_KERNEL  # which a step does not launch
_AFTER_MARKS = ("backward", "forward")  # after an even number of marks, after an odd one
_GEMMS = {"forward": "FC2", "backward": "FC1 dgrad"}  # one kernel, of experts whose activations are in FC1's


def capture_step(forward: Callable[[], _Outputs], backward: Callable[[_Outputs], object]) -> torch.cuda.CUDAGraph:
    """`backward(forward())` as a CUDA graph, which marks where each begins. Collective if they are; synchronises.

    Both must have run on this device before. Gradients that accumulate do so in every replay.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu_sleep(1)
        outputs = forward()
        gpu_sleep(1)
        backward(outputs)
    return graph


@contextmanager
def record_replays(path: str | Path, heap: SymmetricHeap) -> Iterator[Recording]:
    """Same as :func:`symmoe.timeline.record`, but only for replays of what :func:`capture_step` returns."""
    with record_as(path, heap, directed) as recording:
        yield recording


def directed(timeline: Timeline) -> Timeline:
    """The events of replays with directions from the marks, which are removed, and with lanes from their phases.

    Events before the first mark keep their direction. FC2 and FC1 dgrad are told apart as a bf16 layer has them.
    """
    return replace(timeline, ranks=tuple(_in_lanes(_directed(events)) for events in timeline.ranks))


def _directed(events: Sequence[Event]) -> list[Event]:
    marks = [event.begin_us for event in events if _MARK in event.name]
    found = []
    for event in events:
        if _MARK not in event.name:
            passed = bisect_right(marks, event.begin_us)
            direction = _AFTER_MARKS[passed % 2] if passed else event.direction
            phase = _GEMMS.get(direction, event.phase) if event.phase == "GEMM" else event.phase
            found.append(replace(event, direction=direction, phase=phase))
    return found


def _in_lanes(events: Sequence[Event]) -> tuple[Event, ...]:
    """Puts communication and the rest into separate lanes; two of a kind that run at the same time get two lanes."""
    ends: dict[str, list[float]] = {"compute": [], "communication": []}
    found = []
    for event in events:
        kind = "communication" if event.phase in COMMUNICATION else "compute"
        free = (number for number, end in enumerate(ends[kind]) if end <= event.begin_us)
        number = next(free, len(ends[kind]))
        ends[kind][number : number + 1] = [event.end_us]
        found.append(replace(event, lane=f"{kind} {number + 1}" if number else kind))
    return tuple(found)
