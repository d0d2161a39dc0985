"""GPU events from a trace of torch.profiler (Kineto's Chrome format)."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from typing import Any

from symmoe.timeline.events import Event
from symmoe.timeline.phases import BY_KERNEL, BY_OPERATOR, OTHER
from symmoe.timeline.ranges import START, parse_range

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_NAME_LENGTH = 120  # names of templates are longer

Trace = dict[str, Any]
Thread = tuple[Any, Any]


def gpu_events(trace: Trace) -> list[Event]:
    """What ran on the GPU, by begin, on the clock of the trace; of a recording, what was launched after its start.

    A kernel has the phase and the direction of the range that it was launched in (ranges.py). Without a range, as in a
    CUDA graph, only its name says the phase.
    """
    on_gpu: list[Trace] = []
    launches: dict[Any, tuple[Thread, float]] = {}  # by correlation: the thread, and the time
    ranges: dict[Thread, list[tuple[float, float, str, str]]] = defaultdict(list)
    started = -math.inf
    for item in trace["traceEvents"]:
        if item.get("ph") != "X":
            continue
        category, thread, begin = item.get("cat"), (item["pid"], item["tid"]), float(item["ts"])
        if category in _ON_GPU:
            on_gpu.append(item)
        elif category in _LAUNCHES:
            launches[item["args"].get("correlation")] = thread, begin
        elif category == "user_annotation" and item["name"] == START:
            started = max(started, begin)
        elif category == "user_annotation" and (named := parse_range(item["name"])) is not None:
            ranges[thread].append((begin, begin + float(item["dur"]), *named))
    for found in ranges.values():
        found.sort()

    def launched(item: Trace) -> float:
        return launches.get(item["args"].get("correlation"), (None, float(item["ts"])))[1]

    def range_of(item: Trace) -> tuple[str, str] | None:
        thread, when = launches.get(item["args"].get("correlation"), (None, 0.0))
        candidates = [] if thread is None else ranges.get(thread, [])
        place = bisect_right(candidates, when, key=lambda found: found[0]) - 1
        return candidates[place][2:] if place >= 0 and when <= candidates[place][1] else None

    events = [_event(item, range_of(item)) for item in on_gpu if launched(item) >= started]
    return sorted(events, key=lambda event: (event.begin_us, event.end_us))


def _event(item: Trace, launched_in: tuple[str, str] | None) -> Event:
    direction, operator = launched_in or ("", "")
    phase = BY_OPERATOR.get(operator) or BY_KERNEL.get(item["name"], OTHER)
    begin = float(item["ts"])
    return Event(
        lane=f"stream {item['args'].get('stream', item['tid'])}",
        phase=phase.name,
        direction=direction,
        name=item["name"][:_NAME_LENGTH],
        begin_us=begin,
        end_us=begin + float(item["dur"]),
    )
