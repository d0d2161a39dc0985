"""A timeline as a trace for Perfetto and as a table."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from symmoe.timeline.events import COMPUTE, Timeline, length

EXPOSED_LANE = "exposed communication"


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """In the Trace Event Format: a process per rank, a thread per lane, and one that shows exposed communication."""
    items: list[dict[str, Any]] = []
    for rank, events in enumerate(timeline.ranks):
        names = [*lanes_of(timeline, rank), EXPOSED_LANE]
        items.append(_label(rank, 0, "process_name", name=f"rank {rank}"))
        items.append(_label(rank, 0, "process_sort_index", sort_index=rank))
        for thread, name in enumerate(names):
            items.append(_label(rank, thread, "thread_name", name=name))
            items.append(_label(rank, thread, "thread_sort_index", sort_index=thread))
        for event in events:
            about = {"operator or kernel": event.name, "direction": event.direction}
            span = (event.begin_us, event.end_us)
            items.append(_complete(rank, names.index(event.lane), event.phase, span, event.direction or "step", about))
        for span in timeline.exposed_communication(rank):
            items.append(_complete(rank, len(names) - 1, "exposed", span, "exposed", {}))
    recorded = {"device": timeline.device, "clock_error_us": list(timeline.clock_error_us)}
    return {"traceEvents": items, "displayTimeUnit": "ms", "otherData": recorded}


def lanes_of(timeline: Timeline, rank: int) -> list[str]:
    """A rank's lanes; streams by number."""
    return sorted({event.lane for event in timeline.ranks[rank]}, key=_lane_order)


def table(timeline: Timeline) -> str:
    """Busy and exposed microseconds by direction and phase, and the exposed communication in total."""
    num_ranks = len(timeline.ranks)
    ranks = range(num_ranks)
    error_us = max(timeline.clock_error_us)
    lines = [
        f"{timeline.device}, {num_ranks} ranks, {timeline.end_us:.1f} us; rank clocks agree within {error_us:.1f} us",
        "exposed: of the time that a phase runs on a rank, the part in which no GEMM of its experts runs",
        "",
        f"{'':9} {'phase':16} {'launches':>8} {'busy us':>10}" + "".join(f" {f'exposed {r}':>11}" for r in ranks),
    ]
    for times in timeline.phases():
        start = f"{times.direction:9} {times.phase:16} {times.num_events:8} {fmean(times.busy_us):10.1f}"
        lines.append(start + "".join(f" {exposed:11.1f}" for exposed in times.exposed_us))
    exposed = [length(timeline.exposed_communication(rank)) for rank in ranks]
    idle = [timeline.idle_us(rank) for rank in ranks]
    for text, values in (("communication, exposed", exposed), ("nothing runs", idle)):
        lines.append(f"{text:45} " + "".join(f" {value:11.1f}" for value in values))
    lines.append("launches: of all ranks; busy: their mean; exposed does not add up where phases run at the same time")
    return "\n".join(line.rstrip() for line in lines)


def _lane_order(lane: str) -> tuple[int, str, int]:
    kind, _, number = lane.partition(" ")
    return kind != COMPUTE, kind, int(number or 1)


def _label(rank: int, thread: int, what: str, **value: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": value}


def _complete(
    rank: int, thread: int, name: str, span: tuple[float, float], category: str, about: dict[str, str]
) -> dict[str, Any]:
    begin, end = span
    times = {"ts": round(begin, 3), "dur": round(end - begin, 3)}
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, "cat": category, **times, "args": about}
