"""Records every rank's work in a context with torch.profiler, and merges the records on one clock. During a recording,
ranges surround operators of `symmoe.kernels`: the ranges turn the profiler's trace into events."""

from __future__ import annotations

import json
import math
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from symmoe import kernels
from symmoe.errors import ArgumentError
from symmoe.kernels import control
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.timeline.events import Event, Span, Timeline, chrome_trace, table
from symmoe.timeline.phases import BY_KERNEL, BY_OPERATOR, OTHER
from symmoe.torch_internals import gpu_sleep, graph_task_id

_PREFIX = "symmoe"
START = "symmoe/start"  # a range that marks where a recording starts
_NAME_LENGTH = 120  # names of templates are longer
_ALIGNING_BARRIERS = 16
_BARRIERS = ("barrier", "barrier_kernel")
_NOT_STARTED = (
    "the recording was not started: call recording.start() in the context, after a step or two"
)
# About thirty milliseconds: in this time the host launches the aligning barriers and, slowed by the profiler, a step
# of a layer. Two milliseconds sufficed for the barriers alone: ranks began forward 0.3 ms apart, backward up to 3.
_HEAD_START_CYCLES = 60_000_000

Trace = dict[str, Any]


class Recording:
    """The value of :func:`record`. `timeline` covers all ranks, on every rank; None until the context has ended."""

    def __init__(self, heap: SymmetricHeap) -> None:
        self.timeline: Timeline | None = None
        self._heap = heap
        self._started = False

    def start(self) -> None:
        """Begins the recording: drops earlier events. Collective; synchronises the host, and all ranks return
        together: see docs/timeline.md. PeerTimeout, PeerAborted: a rank does not arrive."""
        _synchronize_hosts(self._heap)
        with torch.profiler.record_function(START):
            pass
        if (
            self._heap.device.type == "cuda"
        ):  # else the first kernels would wait for launches, not for peers
            gpu_sleep(_HEAD_START_CYCLES)
        self._started = True
        _enter_barriers(self._heap, _ALIGNING_BARRIERS)


@contextmanager
def record(
    path: str | Path,
    heap: SymmetricHeap,
    finish: Callable[[Timeline], Timeline] = lambda timeline: timeline,
) -> Iterator[Recording]:
    """Records the ranks of a heap from `recording.start()`, which follows a step or two, to the end of the
    context. Collective; synchronises the host at both ends. No other torch.profiler may run. An exception in the
    context discards the recording.

    Rank 0 of the heap's group writes the trace to `path` (for ui.perfetto.dev and chrome://tracing), and next to it a
    table of exposed times (.txt). On GPUs the events are kernels, on CPUs the calls of operators.

    Args:
        path: ends with .json; rank 0's is used.
        finish: transforms the recording before it is written; a pure function.

    Raises:
        ArgumentError: the path does not end with .json or cannot be written, or the recording was not started: on every
            rank. Or this process is already recording a timeline.
        PeerTimeout, PeerAborted: a rank does not reach either end.
    """
    path, on_gpu = Path(path), heap.device.type == "cuda"
    heap.bootstrap.agree(
        None if path.suffix == ".json" else ArgumentError(f"path ({path}) must end with .json")
    )
    heap.synchronize()
    with annotate(heap), torch.profiler.profile() as profiler:  # of the CPU, and of GPUs if any
        recording = Recording(heap)
        yield recording
        heap.synchronize()
    _synchronize_hosts(heap)  # has a time limit, unlike later calls: a failed rank does not arrive
    heap.bootstrap.agree(None if recording._started else ArgumentError(_NOT_STARTED))
    with tempfile.TemporaryDirectory(prefix="symmoe-timeline-") as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        payload = json.dumps(
            events_of(json.loads(file.read_text(encoding="utf-8")), on_gpu=on_gpu)
        ).encode()
    ranks = [
        [Event(*values) for values in json.loads(data)]
        for data in heap.bootstrap.gather_bytes(payload)
    ]
    device = torch.cuda.get_device_name(heap.device) if on_gpu else "cpu"
    recording.timeline, problem = finish(timeline_of(ranks, device, _ALIGNING_BARRIERS)), None
    if heap.rank == 0:
        try:
            path.write_text(json.dumps(chrome_trace(recording.timeline)), encoding="utf-8")
            path.with_suffix(".txt").write_text(table(recording.timeline) + "\n", encoding="utf-8")
        except OSError as error:
            problem = ArgumentError(f"path ({path}) cannot be written: {error}")
    heap.bootstrap.agree(problem)


def timeline_of(ranks: Sequence[Sequence[Event]], device: str, num_barriers: int) -> Timeline:
    """The timeline on rank 0's clock. ranks: events by begin, on each rank's own clock, of which the first
    num_barriers are barriers."""
    barriers = [
        [(e.begin_us, e.end_us) for e in events if e.name in _BARRIERS][:num_barriers]
        for events in ranks
    ]
    offsets, errors = align(barriers)
    start = min(spans[-1][1] - offset for spans, offset in zip(barriers, offsets, strict=True))
    moved = tuple(
        tuple(
            e._replace(begin_us=e.begin_us - (offset + start), end_us=e.end_us - (offset + start))
            for e in events
            if e.begin_us >= spans[-1][1]
        )
        for events, spans, offset in zip(ranks, barriers, offsets, strict=True)
    )
    return Timeline(ranks=moved, clock_error_us=tuple(errors), device=device)


def align(barriers: Sequence[Sequence[Span]]) -> tuple[list[float], list[float]]:
    """By rank, the clock's offset from rank 0 and the offset's largest error. barriers: by rank, entry and exit of the
    same barriers in the same order, at least one.

    No rank exits a barrier before all ranks have entered it. So a rank's offset from rank 0 is at least the rank's
    entry minus rank 0's exit, and at most the rank's exit minus rank 0's entry.
    """
    offsets, errors = [0.0], [0.0]
    for spans in barriers[1:]:
        pairs = list(zip(spans, barriers[0], strict=True))
        lower = max(entered - exited_0 for (entered, _), (_, exited_0) in pairs)
        upper = min(exited - entered_0 for (_, exited), (entered_0, _) in pairs)
        offsets.append((lower + upper) / 2)
        # lower > upper if clocks drift, or are coarse.
        errors.append(abs(upper - lower) / 2)
    return offsets, errors


def _synchronize_hosts(heap: SymmetricHeap) -> None:
    """Waits until every rank's host arrives."""
    _enter_barriers(heap, 1)
    heap.synchronize()


def _enter_barriers(heap: SymmetricHeap, number: int) -> None:
    with heap.one_call:
        for _ in range(number):
            heap.barrier(control.PHASE_START)


def _ranged(operator: str, kernel: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """A hook (kernels/select.py): runs the kernel of an operator in a range, if the operator is in BY_OPERATOR."""
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
    """Ranges for your own profilers around this process's launches: `symmoe/<forward or backward>/<operator>`, in
    torch.profiler as user annotations, in Nsight Systems as NVTX ranges. Local; does not synchronise. Costs nothing
    outside of the context. ArgumentError: ranges are already on, as in :func:`symmoe.timeline.record`."""
    if kernels.has_hook(heap.device, _ranged):
        raise ArgumentError(
            "a timeline is being recorded, or ranges are on, already in this process"
        )
    with kernels.hooked(heap.device, _ranged):
        yield


def events_of(trace: Trace, *, on_gpu: bool) -> list[Event]:
    """A trace's events by begin, on the clock of the trace (Kineto's Chrome format); in a recording, only launches
    after its start. A kernel has the phase and the direction of its launch's range; without a range, as in a CUDA
    graph, its name determines the phase. A host computes an operator while its range lasts."""
    items = [item for item in trace["traceEvents"] if item.get("ph") == "X"]

    def items_of(*categories: str) -> list[Trace]:
        return [item for item in items if item.get("cat") in categories]

    # By correlation: the thread, and the time.
    launches: dict[Any, tuple[Any, float]] = {
        item["args"].get("correlation"): ((item["pid"], item["tid"]), float(item["ts"]))
        for item in items_of("cuda_runtime", "cuda_driver")
    }
    started = max(
        (float(item["ts"]) for item in items_of("user_annotation") if item["name"] == START),
        default=-math.inf,
    )
    # By thread: span, direction, operator.
    ranges: dict[Any, list[tuple[float, float, str, str]]] = defaultdict(list)
    for item in items_of("user_annotation"):
        prefix, *named = item["name"].split("/")
        if prefix == _PREFIX and len(named) == 2 and named[1] in BY_OPERATOR:
            begin, end = float(item["ts"]), float(item["ts"]) + float(item["dur"])
            ranges[item["pid"], item["tid"]].append((begin, end, *named))
    events = []
    for of_thread in ranges.values():
        of_thread.sort()
        spans = [] if on_gpu else [span for span in of_thread if span[0] >= started]
        events += [
            Event("host", BY_OPERATOR[name], direction, name, *span)
            for *span, direction, name in spans
        ]
    for item in items_of("kernel", "gpu_memcpy", "gpu_memset") if on_gpu else ():
        begin, name = float(item["ts"]), item["name"]
        thread, launched = launches.get(item["args"].get("correlation"), (None, begin))
        if launched >= started:
            candidates = ranges.get(thread, [])
            index = bisect_right(candidates, launched, key=lambda span: span[0]) - 1
            is_in_range = index >= 0 and launched <= candidates[index][1]
            direction, operator = candidates[index][2:] if is_in_range else ("", "")
            events.append(
                Event(
                    lane=f"stream {item['args'].get('stream', item['tid'])}",
                    phase=BY_OPERATOR.get(operator) or BY_KERNEL.get(name, OTHER),
                    direction=direction,
                    name=name[:_NAME_LENGTH],
                    begin_us=begin,
                    end_us=begin + float(item["dur"]),
                )
            )
    return sorted(events, key=lambda event: (event.begin_us, event.end_us))
