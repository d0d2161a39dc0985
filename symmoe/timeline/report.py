"""A timeline as a trace for Perfetto and as a table."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from symmoe.timeline.events import Timeline, length

EXPOSED_LANE = "exposed communication"


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """In the Trace Event Format: a process per rank, a thread per lane, and one that shows exposed communication."""
    items: list[dict[str, Any]] = []

    def label(rank: int, thread: int, what: str, text: str) -> None:
        items.append({"ph": "M", "pid": rank, "tid": thread, "name": f"{what}_name", "args": {"name": text}})
        order = {"sort_index": thread if what == "thread" else rank}
        items.append({"ph": "M", "pid": rank, "tid": thread, "name": f"{what}_sort_index", "args": order})

    def show(rank: int, thread: int, name: str, begin: float, end: float, category: str, **about: str) -> None:
        times = {"ts": round(begin, 3), "dur": round(end - begin, 3)}
        items.append({"ph": "X", "pid": rank, "tid": thread, "name": name, "cat": category, **times, "args": about})

    for rank, events in enumerate(timeline.ranks):
        lanes = [*lanes_of(timeline, rank), EXPOSED_LANE]
        label(rank, 0, "process", f"rank {rank}")
        for thread, lane in enumerate(lanes):
            label(rank, thread, "thread", lane)
        for e in events:
            about = {"operator or kernel": e.name, "direction": e.direction}
            show(rank, lanes.index(e.lane), e.phase, e.begin_us, e.end_us, e.direction or "step", **about)
        for span in timeline.exposed_communication(rank):
            show(rank, len(lanes) - 1, "exposed", *span, "exposed")
    recorded = {"device": timeline.device, "clock_error_us": list(timeline.clock_error_us)}
    return {"traceEvents": items, "displayTimeUnit": "ms", "otherData": recorded}


def lanes_of(timeline: Timeline, rank: int) -> list[str]:
    """A rank's lanes: compute first, streams by number."""

    def order(lane: str) -> tuple[bool, str, int]:
        kind, _, number = lane.partition(" ")
        return kind != "compute", kind, int(number or 1)

    return sorted({event.lane for event in timeline.ranks[rank]}, key=order)


def table(timeline: Timeline) -> str:
    """Busy and exposed microseconds by direction and phase, and the exposed communication in total."""
    num_ranks, error_us = len(timeline.ranks), max(timeline.clock_error_us)
    ranks = range(num_ranks)
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
    for text, values in (("communication, exposed", exposed), ("nothing runs", map(timeline.idle_us, ranks))):
        lines.append(f"{text:45} " + "".join(f" {value:11.1f}" for value in values))
    lines.append("launches: of all ranks; busy: their mean; exposed does not add up where phases run at the same time")
    return "\n".join(line.rstrip() for line in lines)
