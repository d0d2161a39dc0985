"""Recording: what every rank does in a context, as torch.profiler sees it, brought together on one clock.

Also of a CUDA graph's replays, of which a profiler sees the kernels, but not who launched them, and on streams of the
graph executor's choice. So the graph has marks where the forward and the backward pass begin, and kernels get their
direction from the marks before them, their lane from their phase.
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.timeline.events import Event, Span, Timeline, chrome_trace, table
from symmoe.timeline.phases import COMMUNICATION
from symmoe.timeline.ranges import START, annotate, events_of
from symmoe.torch_internals import SLEEP_KERNEL, gpu_sleep

_Outputs = TypeVar("_Outputs")

_ALIGNING_BARRIERS = 16
_BARRIERS = ("barrier", "barrier_kernel")
_NOT_STARTED = "the recording was not started: call recording.start() in the context, after a step or two"
# About thirty milliseconds, in which the host launches the aligning barriers and, slowed down by the profiler, a step
# of a layer. With two, the barriers took all of it: ranks began forward 0.3 ms apart, backward up to 3.
_HEAD_START_CYCLES = 60_000_000
_AFTER_MARKS = ("backward", "forward")  # after an even number of marks, after an odd one
_GEMMS = {"forward": "FC2", "backward": "FC1 dgrad"}  # one kernel, of experts whose activations are in FC1's


class Recording:
    """What :func:`record` yields. `timeline` is that of all ranks, on every rank; None until the context has ended."""

    def __init__(self, heap: SymmetricHeap) -> None:
        self.timeline: Timeline | None = None
        self._heap = heap
        self._started = False

    def start(self) -> None:
        """Begins the recording: earlier events are dropped. Collective; synchronises the host, and all ranks leave
        together: see docs/timeline.md. PeerTimeout, PeerAborted: a rank does not come."""
        _meet(self._heap)
        with torch.profiler.record_function(START):
            pass
        if self._heap.device.type == "cuda":  # otherwise the first kernels would wait for their launches, not for peers
            gpu_sleep(_HEAD_START_CYCLES)
        self._started = True
        _enter_barriers(self._heap, _ALIGNING_BARRIERS)


@contextmanager
def record(
    path: str | Path, heap: SymmetricHeap, finish: Callable[[Timeline], Timeline] = lambda timeline: timeline
) -> Iterator[Recording]:
    """Records what the ranks of a heap do from `recording.start()`, which comes after a step or two, to the end of the
    context. Collective; synchronises the host at both ends. No other torch.profiler may run. After an exception in the
    context nothing is written.

    Rank 0 of the heap's group writes the trace to `path` (for ui.perfetto.dev and chrome://tracing), and next to it a
    table of exposed times (.txt). On GPUs the events are kernels, on CPUs the calls of operators.

    Args:
        path: ends with .json; of rank 0.
        finish: is applied to what was recorded before it is written; a pure function.

    Raises:
        ArgumentError: the path does not end with .json or cannot be written, or the recording was not started: on every
            rank. A timeline is being recorded already in this process.
        PeerTimeout, PeerAborted: a rank does not come to either end.
    """
    path, on_gpu = Path(path), heap.device.type == "cuda"
    heap.agree(None if path.suffix == ".json" else ArgumentError(f"path ({path}) must end with .json"))
    heap.synchronize()
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if on_gpu else [kinds.CPU]
    with annotate(heap), torch.profiler.profile(activities=activities) as profiler:
        recording = Recording(heap)
        yield recording
        heap.synchronize()
    _meet(heap)  # it has a time limit, unlike what follows: a rank that has failed does not come
    heap.agree(None if recording._started else ArgumentError(_NOT_STARTED))
    with tempfile.TemporaryDirectory(prefix="symmoe-timeline-") as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        payload = json.dumps(events_of(json.loads(file.read_text(encoding="utf-8")), on_gpu=on_gpu)).encode()
    ranks = [[Event(*values) for values in json.loads(data)] for data in heap.bootstrap.gather_bytes(payload)]
    device = torch.cuda.get_device_name(heap.device) if on_gpu else "cpu"
    recording.timeline, problem = finish(timeline_of(ranks, device, _ALIGNING_BARRIERS)), None
    if heap.rank == 0:
        try:
            path.write_text(json.dumps(chrome_trace(recording.timeline)), encoding="utf-8")
            path.with_suffix(".txt").write_text(table(recording.timeline) + "\n", encoding="utf-8")
        except OSError as error:
            problem = ArgumentError(f"path ({path}) cannot be written: {error}")
    heap.agree(problem)


def timeline_of(ranks: Sequence[Sequence[Event]], device: str, num_barriers: int) -> Timeline:
    """The timeline, on the clock of rank 0, of events by begin, each rank's on its own clock, that start with so many
    barriers."""
    barriers = [[(e.begin_us, e.end_us) for e in events if e.name in _BARRIERS][:num_barriers] for events in ranks]
    offsets, errors = align(barriers)
    start = min(mine[-1][1] - offset for mine, offset in zip(barriers, offsets, strict=True))
    moved = []
    for events, mine, offset in zip(ranks, barriers, offsets, strict=True):
        after, by_us = [e for e in events if e.begin_us >= mine[-1][1]], offset + start
        moved.append(tuple(e._replace(begin_us=e.begin_us - by_us, end_us=e.end_us - by_us) for e in after))
    return Timeline(ranks=tuple(moved), clock_error_us=tuple(errors), device=device)


def align(barriers: Sequence[Sequence[Span]]) -> tuple[list[float], list[float]]:
    """(how far each rank's clock is ahead of rank 0's, the largest error of that), in the unit of the barriers:
    (entered, left) by rank, of the same barriers in the same order, at least one.

    Nobody leaves a barrier before everybody has entered it. So a rank's clock is ahead of rank 0's by no less than its
    own entry minus rank 0's exit, and by no more than its own exit minus rank 0's entry.
    """
    offsets, errors = [0.0], [0.0]
    for mine in barriers[1:]:
        pairs = list(zip(mine, barriers[0], strict=True))
        least = max(entered - left_0 for (entered, _), (_, left_0) in pairs)
        most = min(left - entered_0 for (_, left), (entered_0, _) in pairs)
        offsets.append((least + most) / 2)
        errors.append(abs(most - least) / 2)  # least > most: the clocks have drifted, or are coarse, by as much
    return offsets, errors


def _meet(heap: SymmetricHeap) -> None:
    """A barrier of the hosts."""
    _enter_barriers(heap, 1)
    heap.synchronize()


def _enter_barriers(heap: SymmetricHeap, number: int) -> None:
    with heap.one_call:
        for _ in range(number):
            heap.barrier(control.PHASE_START)


# -- replays ----------------------------------------------------------------------------------------------------------


def capture_step(forward: Callable[[], _Outputs], backward: Callable[[_Outputs], object]) -> torch.cuda.CUDAGraph:
    """`backward(forward())`, which have run on this device before, as a CUDA graph that marks where each begins.
    Collective if they are; synchronises. Gradients that accumulate do so in every replay."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu_sleep(1)
        outputs = forward()
        gpu_sleep(1)
        backward(outputs)
    return graph


def directed(timeline: Timeline) -> Timeline:
    """The events of replays of what :func:`capture_step` returns, with directions from the marks, which are removed,
    and with lanes from their phases: for :func:`record`, as `finish`. Events before the first mark keep their
    direction. FC2 and FC1 dgrad are told apart as a bf16 layer has them."""
    return replace(timeline, ranks=tuple(tuple(_directed(events)) for events in timeline.ranks))


def _directed(events: Sequence[Event]) -> Iterator[Event]:
    """Communication and the rest are in separate lanes; two of a kind that run at the same time get two lanes."""
    marks = [event.begin_us for event in events if SLEEP_KERNEL in event.name]  # a step does not launch it
    ends: dict[str, list[float]] = {"compute": [], "communication": []}
    for event in events:
        if SLEEP_KERNEL not in event.name:
            passed = bisect_right(marks, event.begin_us)
            direction = _AFTER_MARKS[passed % 2] if passed else event.direction
            phase = _GEMMS.get(direction, event.phase) if event.phase == "GEMM" else event.phase
            kind = "communication" if phase in COMMUNICATION else "compute"
            free = (number for number, end in enumerate(ends[kind]) if end <= event.begin_us)
            number = next(free, len(ends[kind]))
            ends[kind][number : number + 1] = [event.end_us]
            yield event._replace(lane=f"{kind} {number + 1}" if number else kind, direction=direction, phase=phase)
