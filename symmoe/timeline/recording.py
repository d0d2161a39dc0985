"""Recording: what every rank does in a context, brought together on one clock."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

import torch

from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.timeline.clocks import align
from symmoe.timeline.events import Event, Span, Timeline
from symmoe.timeline.kineto import gpu_events
from symmoe.timeline.phases import BY_OPERATOR
from symmoe.timeline.picture import draw
from symmoe.timeline.ranges import START, annotate, direction, ranged
from symmoe.timeline.report import chrome_trace, table
from symmoe.torch_internals import gpu_sleep

logger = logging.getLogger("symmoe")

_ALIGNING_BARRIERS = 16
_ALIGNING_NAMES = ("barrier", "barrier_kernel")
_NOT_STARTED = "the recording was not started: call recording.start() in the context, after a step or two"
# About thirty milliseconds, in which the host launches the aligning barriers and, slowed down by the profiler, a step
# of a layer. With two, the barriers took all of it: ranks began forward 0.3 ms apart, backward up to 3.
_HEAD_START_CYCLES = 60_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class _Watch:
    """An observer of this rank's events.

    Attributes:
        forget: drops the events that it has seen so far.
        collect: returns the events since then, by begin; call it after the watch has ended.
    """

    forget: Callable[[], None]
    collect: Callable[[], list[Event]]


class Recording:
    """What :func:`record` yields.

    Attributes:
        timeline: the timeline of all ranks, on every rank; None until the context has ended.
    """

    def __init__(self, heap: SymmetricHeap, forget: Callable[[], None]) -> None:
        self.timeline: Timeline | None = None
        self._heap, self._forget = heap, forget
        self._started = False

    def start(self) -> None:
        """Begins the recording: earlier events are dropped. Collective; synchronises the host.

        The hosts of all ranks leave together, and on GPUs 30 ms before the streams do: whatever they launch meanwhile
        begins on all ranks at the same time, and shows no time of a host.

        Raises:
            PeerTimeout, PeerAborted: a rank does not come.
        """
        _meet(self._heap)
        self._forget()
        self._started = True
        _enter_barriers(self._heap, _ALIGNING_BARRIERS)


@contextmanager
def record(path: str | Path, heap: SymmetricHeap) -> Iterator[Recording]:
    """Records what the ranks of a heap do from `recording.start()` to the end of the context. Collective; synchronises
    the host at both ends.

    Run a step or two before :meth:`Recording.start`: the first step under a profiler is not like others (CUPTI starts,
    kernels are seen for the first time), and is milliseconds late on one rank or another.

    Rank 0 of the heap's group writes the trace to `path` (for ui.perfetto.dev and chrome://tracing), and next to it a
    picture (.png, if matplotlib is installed) and a table of exposed times (.txt). On GPUs the events are the kernels
    that torch.profiler saw, on CPUs the calls of operators.

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
    path = Path(path)
    heap.agree(None if path.suffix == ".json" else ArgumentError(f"path ({path}) must end with .json"))
    heap.synchronize()
    watch_here = _watch_gpu if heap.device.type == "cuda" else _watch_host
    with watch_here(heap) as watch:
        recording = Recording(heap, watch.forget)
        yield recording
        heap.synchronize()
    _meet(heap)  # it has a time limit, unlike what follows: a rank that has failed does not come
    heap.agree(None if recording._started else ArgumentError(_NOT_STARTED))
    recording.timeline = finish(_together(heap.gather_bytes(_pack(watch.collect())), _device_name(heap.device)))
    heap.agree(_write(recording.timeline, path) if heap.rank == 0 else None)


def _meet(heap: SymmetricHeap) -> None:
    """A barrier of the hosts."""
    _enter_barriers(heap, 1)
    heap.synchronize()


def _enter_barriers(heap: SymmetricHeap, number: int) -> None:
    with heap.one_call():
        for _ in range(number):
            heap.barrier(control.PHASE_START)


@contextmanager
def _watch_host(heap: SymmetricHeap) -> Iterator[_Watch]:
    """Watches the calls of operators: a CPU computes them when they are called."""
    events: list[Event] = []

    @contextmanager
    def around(operator: str) -> Iterator[None]:
        begin_ns = time.perf_counter_ns()
        yield
        end_ns = time.perf_counter_ns()
        phase = BY_OPERATOR[operator].name
        times = {"begin_us": begin_ns / 1e3, "end_us": end_ns / 1e3}
        events.append(Event(lane="host", phase=phase, direction=direction(), name=operator, **times))

    with ranged(heap.device, around):
        yield _Watch(forget=events.clear, collect=lambda: events)


@contextmanager
def _watch_gpu(heap: SymmetricHeap) -> Iterator[_Watch]:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with annotate(heap), torch.profiler.profile(activities=activities) as profiler:
        yield _Watch(forget=_mark_start, collect=lambda: _exported(profiler))


def _mark_start() -> None:
    with torch.profiler.record_function(START):
        pass
    gpu_sleep(_HEAD_START_CYCLES)  # otherwise the first kernels would wait for their launches, not for peers


def _exported(profiler: torch.profiler.profile) -> list[Event]:
    with tempfile.TemporaryDirectory(prefix="symmoe-timeline-") as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        return gpu_events(json.loads(file.read_text(encoding="utf-8")))


def _pack(events: Sequence[Event]) -> bytes:
    return json.dumps([astuple(event) for event in events]).encode()


def _together(payloads: Sequence[bytes], device: str) -> Timeline:
    """All ranks' events on the clock of rank 0, from the end of the aligning barriers on."""
    fields = tuple(Event.__dataclass_fields__)
    ranks = [[Event(**dict(zip(fields, values, strict=True))) for values in json.loads(data)] for data in payloads]
    return timeline_of(ranks, device, _ALIGNING_BARRIERS)


def timeline_of(ranks: Sequence[Sequence[Event]], device: str, num_barriers: int) -> Timeline:
    """The timeline of events by begin, each rank's on its own clock, that start with so many barriers."""
    aligning = [_first_barriers(events, num_barriers) for events in ranks]
    offsets, errors = align(aligning)
    start = min(barriers[-1][1] - offset for barriers, offset in zip(aligning, offsets, strict=True))
    shifted = []
    for events, barriers, offset in zip(ranks, aligning, offsets, strict=True):
        shifted.append(tuple(_moved(e, -offset - start) for e in events if e.begin_us >= barriers[-1][1]))
    return Timeline(ranks=tuple(shifted), clock_error_us=tuple(errors), device=device)


def _first_barriers(events: Sequence[Event], number: int) -> list[Span]:
    return [(e.begin_us, e.end_us) for e in events if e.name in _ALIGNING_NAMES][:number]


def _moved(event: Event, by_us: float) -> Event:
    fields = {name: getattr(event, name) for name in Event.__dataclass_fields__}
    return Event(**fields | {"begin_us": event.begin_us + by_us, "end_us": event.end_us + by_us})


def _write(timeline: Timeline, path: Path) -> ArgumentError | None:
    """Writes the three files; returns the error, or None."""
    try:
        path.write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")
        path.with_suffix(".txt").write_text(table(timeline) + "\n", encoding="utf-8")
    except OSError as error:
        return ArgumentError(f"path ({path}) cannot be written: {error}")
    try:
        draw(timeline, str(path.with_suffix(".png")))
    except ArgumentError as error:
        logger.warning("%s", error)
    return None


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
