"""Recording: what every rank does in a context, as torch.profiler sees it, brought together on one clock."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path

import torch

from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.timeline.events import Event, Span, Timeline
from symmoe.timeline.profile import events_of
from symmoe.timeline.ranges import START, annotate
from symmoe.timeline.report import chrome_trace, table
from symmoe.torch_internals import gpu_sleep

_ALIGNING_BARRIERS = 16
_ALIGNING_NAMES = ("barrier", "barrier_kernel")
_NOT_STARTED = "the recording was not started: call recording.start() in the context, after a step or two"
# About thirty milliseconds, in which the host launches the aligning barriers and, slowed down by the profiler, a step
# of a layer. With two, the barriers took all of it: ranks began forward 0.3 ms apart, backward up to 3.
_HEAD_START_CYCLES = 60_000_000


class Recording:
    """What :func:`record` yields.

    Attributes:
        timeline: the timeline of all ranks, on every rank; None until the context has ended.
    """

    def __init__(self, heap: SymmetricHeap) -> None:
        self.timeline: Timeline | None = None
        self._heap = heap
        self._started = False

    def start(self) -> None:
        """Begins the recording: earlier events are dropped. Collective; synchronises the host.

        The hosts of all ranks leave together, and on GPUs 30 ms before the streams do: whatever they launch meanwhile
        begins on all ranks at the same time, and shows no time of a host.

        Raises:
            PeerTimeout, PeerAborted: a rank does not come.
        """
        _meet(self._heap)
        _mark_start(self._heap.device)
        self._started = True
        _enter_barriers(self._heap, _ALIGNING_BARRIERS)


@contextmanager
def record(path: str | Path, heap: SymmetricHeap) -> Iterator[Recording]:
    """Records what the ranks of a heap do from `recording.start()` to the end of the context. Collective; synchronises
    the host at both ends. No other torch.profiler may run.

    Run a step or two before :meth:`Recording.start`: the first step under a profiler is not like others (CUPTI starts,
    kernels are seen for the first time), and is milliseconds late on one rank or another.

    Rank 0 of the heap's group writes the trace to `path` (for ui.perfetto.dev and chrome://tracing), and next to it a
    table of exposed times (.txt). On GPUs the events are kernels, on CPUs the calls of operators.

    An exception in the context goes through, and nothing is written.

    Args:
        path: ends with .json; of rank 0.

    Raises:
        ArgumentError: the path does not end with .json or cannot be written, or the recording was not started: on
            every rank. A timeline is being recorded already in this process.
        PeerTimeout, PeerAborted: a rank does not come to either end.
    """
    with record_as(path, heap, lambda timeline: timeline) as recording:
        yield recording


@contextmanager
def record_as(path: str | Path, heap: SymmetricHeap, finish: Callable[[Timeline], Timeline]) -> Iterator[Recording]:
    """Same as :func:`record`, but applies `finish`, a pure function, to what was recorded before it is written."""
    path, on_gpu = Path(path), heap.device.type == "cuda"
    heap.agree(None if path.suffix == ".json" else ArgumentError(f"path ({path}) must end with .json"))
    heap.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
    with annotate(heap), torch.profiler.profile(activities=activities) as profiler:
        recording = Recording(heap)
        yield recording
        heap.synchronize()
    _meet(heap)  # it has a time limit, unlike what follows: a rank that has failed does not come
    heap.agree(None if recording._started else ArgumentError(_NOT_STARTED))
    payload = json.dumps([astuple(event) for event in _events(profiler, on_gpu)]).encode()
    ranks = [[Event(**dict(zip(Event.__slots__, values, strict=True))) for values in json.loads(data)]
             for data in heap.bootstrap.gather_bytes(payload)]  # fmt: skip
    device = torch.cuda.get_device_name(heap.device) if on_gpu else "cpu"
    recording.timeline = finish(timeline_of(ranks, device, _ALIGNING_BARRIERS))
    heap.agree(_write(recording.timeline, path) if heap.rank == 0 else None)


def timeline_of(ranks: Sequence[Sequence[Event]], device: str, num_barriers: int) -> Timeline:
    """The timeline, on the clock of rank 0, of events by begin, each rank's on its own clock, that start with so many
    barriers."""
    barriers = [
        [(e.begin_us, e.end_us) for e in events if e.name in _ALIGNING_NAMES][:num_barriers] for events in ranks
    ]
    offsets, errors = align(barriers)
    start = min(mine[-1][1] - offset for mine, offset in zip(barriers, offsets, strict=True))
    moved = []
    for events, mine, offset in zip(ranks, barriers, offsets, strict=True):
        after, by_us = [e for e in events if e.begin_us >= mine[-1][1]], offset + start
        moved.append(tuple(replace(e, begin_us=e.begin_us - by_us, end_us=e.end_us - by_us) for e in after))
    return Timeline(ranks=tuple(moved), clock_error_us=tuple(errors), device=device)


def align(barriers: Sequence[Sequence[Span]]) -> tuple[list[float], list[float]]:
    """(how far each rank's clock is ahead of rank 0's, the largest error of that), in the unit of the barriers.

    Nobody leaves a barrier before everybody has entered it. So a rank's clock is ahead of rank 0's by no less than its
    own entry minus rank 0's exit, and by no more than its own exit minus rank 0's entry. The middle of what all
    barriers allow is taken; half of that range is the error.

    Args:
        barriers: per rank: (entered, left) of the same barriers in the same order, at least one.
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


def _mark_start(device: torch.device) -> None:
    with torch.profiler.record_function(START):
        pass
    if device.type == "cuda":  # otherwise the first kernels would wait for their launches, not for peers
        gpu_sleep(_HEAD_START_CYCLES)


def _events(profiler: torch.profiler.profile, on_gpu: bool) -> list[Event]:
    with tempfile.TemporaryDirectory(prefix="symmoe-timeline-") as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        return events_of(json.loads(file.read_text(encoding="utf-8")), on_gpu=on_gpu)


def _write(timeline: Timeline, path: Path) -> ArgumentError | None:
    """Writes both files; returns the error, or None."""
    try:
        path.write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")
        path.with_suffix(".txt").write_text(table(timeline) + "\n", encoding="utf-8")
    except OSError as error:
        return ArgumentError(f"path ({path}) cannot be written: {error}")
    return None
