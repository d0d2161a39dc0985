"""Events from a trace of torch.profiler (Kineto's Chrome format): a GPU's kernels, or a host's operators."""

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


def events_of(trace: Trace, *, on_gpu: bool) -> list[Event]:
    """What ran, by begin, on the clock of the trace; of a recording, what was launched after its start.

    A kernel has the phase and the direction of the range that it was launched in (ranges.py). Without a range, as in a
    CUDA graph, only its name says the phase. A host computes an operator while its range lasts.
    """
    kernels: list[Trace] = []
    launches: dict[Any, tuple[Any, float]] = {}  # by correlation: the thread, and the time
    ranges: dict[Any, list[tuple[float, float, str, str]]] = defaultdict(list)  # by thread
    started = -math.inf
    for item in trace["traceEvents"]:
        if item.get("ph") != "X":
            continue
        category, thread, begin = item.get("cat"), (item["pid"], item["tid"]), float(item["ts"])
        if category in _ON_GPU:
            kernels.append(item)
        elif category in _LAUNCHES:
            launches[item["args"].get("correlation")] = thread, begin
        elif category == "user_annotation" and item["name"] == START:
            started = max(started, begin)
        elif category == "user_annotation" and (named := parse_range(item["name"])) is not None:
            ranges[thread].append((begin, begin + float(item["dur"]), *named))

    def kernel(item: Trace) -> Event | None:
        thread, launched = launches.get(item["args"].get("correlation"), (None, float(item["ts"])))
        if launched < started:
            return None
        candidates = ranges.get(thread, [])
        place = bisect_right(candidates, launched, key=lambda found: found[0]) - 1
        is_in_range = place >= 0 and launched <= candidates[place][1]
        direction, operator = candidates[place][2:] if is_in_range else ("", "")
        phase = BY_OPERATOR.get(operator) or BY_KERNEL.get(item["name"], OTHER)
        return _event(f"stream {item['args'].get('stream', item['tid'])}", phase, direction, item)

    if on_gpu:
        for of_thread in ranges.values():
            of_thread.sort()
        events = [event for item in kernels if (event := kernel(item)) is not None]
    else:
        events = [
            Event(lane="host", phase=BY_OPERATOR[name], direction=direction, name=name, begin_us=begin, end_us=end)
            for of_thread in ranges.values()
            for begin, end, direction, name in of_thread
            if begin >= started
        ]
    return sorted(events, key=lambda event: (event.begin_us, event.end_us))


def _event(lane: str, phase: str, direction: str, item: Trace) -> Event:
    begin, name = float(item["ts"]), item["name"][:_NAME_LENGTH]
    end = begin + float(item["dur"])
    return Event(lane=lane, phase=phase, direction=direction, name=name, begin_us=begin, end_us=end)
