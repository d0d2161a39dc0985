"""Adds ranges around operators of `symmoe.kernels` during a recording, and converts a profiler's trace to events."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from symmoe import kernels
from symmoe.errors import ArgumentError
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.timeline.events import Event
from symmoe.timeline.phases import BY_KERNEL, BY_OPERATOR, OTHER
from symmoe.torch_internals import graph_task_id

_PREFIX = "symmoe"
START = "symmoe/start"  # a range that marks where a recording starts
_NAME_LENGTH = 120  # names of templates are longer

Trace = dict[str, Any]


def _ranged(operator: str, kernel: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """A hook (kernels/select.py): the kernel runs in a range, if it is an operator of a timeline."""
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
    ran: list[Trace] = []
    launches: dict[Any, tuple[Any, float]] = {}  # by correlation: the thread, and the time
    ranges: dict[Any, list[tuple[float, float, str, str]]] = defaultdict(
        list
    )  # by thread: span, direction, operator
    started = -math.inf
    for item in trace["traceEvents"]:
        if item.get("ph") != "X":
            continue
        category, thread, begin = item.get("cat"), (item["pid"], item["tid"]), float(item["ts"])
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            ran.append(item)
        elif category in ("cuda_runtime", "cuda_driver"):
            launches[item["args"].get("correlation")] = thread, begin
        elif category == "user_annotation" and item["name"] == START:
            started = max(started, begin)
        elif category == "user_annotation":
            prefix, *named = item["name"].split("/")
            if prefix == _PREFIX and len(named) == 2 and named[1] in BY_OPERATOR:
                ranges[thread].append((begin, begin + float(item["dur"]), *named))
    events = []
    for of_thread in ranges.values():
        of_thread.sort()
        spans = [] if on_gpu else [span for span in of_thread if span[0] >= started]
        events += [
            Event("host", BY_OPERATOR[name], direction, name, *span)
            for *span, direction, name in spans
        ]
    for item in ran if on_gpu else ():
        begin, name = float(item["ts"]), item["name"]
        thread, launched = launches.get(item["args"].get("correlation"), (None, begin))
        if launched >= started:
            candidates = ranges.get(thread, [])
            place = bisect_right(candidates, launched, key=lambda found: found[0]) - 1
            is_in_range = place >= 0 and launched <= candidates[place][1]
            direction, operator = candidates[place][2:] if is_in_range else ("", "")
            phase = BY_OPERATOR.get(operator) or BY_KERNEL.get(name, OTHER)
            lane = f"stream {item['args'].get('stream', item['tid'])}"
            events.append(
                Event(
                    lane, phase, direction, name[:_NAME_LENGTH], begin, begin + float(item["dur"])
                )
            )
    return sorted(events, key=lambda event: (event.begin_us, event.end_us))
