"""The events of a timeline, the exposed time of each phase; a timeline as a table and as a trace for Perfetto."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from symmoe.timeline.phases import COMMUNICATION, GEMMS, PHASES

Span = tuple[float, float]  # microseconds: begin, end
DIRECTIONS = ("forward", "backward", "")
EXPOSED_LANE = "exposed communication"


class Event(NamedTuple):
    """One operator on a host, or one kernel on a GPU."""

    lane: str  # "host" or "stream 7"; in a replay, "compute" or "communication"
    phase: str
    direction: str  # "forward", "backward", or "" if unknown (kernels of other libraries)
    name: str  # of the operator or the kernel
    begin_us: float  # on the rank's clock, or, in a Timeline, from its start
    end_us: float


class PhaseTimes(NamedTuple):
    """One phase in one direction."""

    phase: str
    direction: str
    num_events: int  # on all ranks
    busy_us: tuple[float, ...]  # per rank: time during which the phase runs, on any lane
    exposed_us: tuple[
        float, ...
    ]  # per rank: the part of busy_us during which no GEMM of an expert runs on this rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """All ranks' events, on one clock: microseconds since the last rank was ready."""

    ranks: tuple[tuple[Event, ...], ...]  # each rank's events, in order of begin
    clock_error_us: tuple[
        float, ...
    ]  # per rank: the largest error of times, compared with times of rank 0
    device: str  # "cpu", or the name of the GPU

    @property
    def end_us(self) -> float:
        """The last event's end."""
        return max((event.end_us for events in self.ranks for event in events), default=0.0)

    def phases(self) -> list[PhaseTimes]:
        """The times of every phase that occurs, by direction."""
        times, gemms = [], [_spans_of(events, GEMMS) for events in self.ranks]
        for direction, phase in itertools.product(DIRECTIONS, PHASES):
            of_phase = [
                [e for e in events if (e.direction, e.phase) == (direction, phase)]
                for events in self.ranks
            ]
            if num_events := sum(map(len, of_phase)):
                spans = [_spans_of(events, {phase}) for events in of_phase]
                exposed = tuple(length(_without(*pair)) for pair in zip(spans, gemms, strict=True))
                times.append(
                    PhaseTimes(phase, direction, num_events, tuple(map(length, spans)), exposed)
                )
        return times

    def exposed_communication(self, rank: int) -> list[Span]:
        """Spans in which a rank communicates, or waits, without a GEMM of an expert."""
        events = self.ranks[rank]
        return _without(_spans_of(events, COMMUNICATION), _spans_of(events, GEMMS))

    def idle_us(self, rank: int) -> float:
        """The idle time of a rank."""
        return self.end_us - length(_spans_of(self.ranks[rank], PHASES))


def table(timeline: Timeline) -> str:
    """Busy and exposed microseconds by direction and phase, and the exposed communication in total."""
    num_ranks, error_us = len(timeline.ranks), max(timeline.clock_error_us)
    ranks = range(num_ranks)
    totals = {
        "communication, exposed": [length(timeline.exposed_communication(rank)) for rank in ranks],
        "nothing runs": [timeline.idle_us(rank) for rank in ranks],
    }
    lines = [
        f"{timeline.device}, {num_ranks} ranks, {timeline.end_us:.1f} us; rank clocks agree within {error_us:.1f} us",
        "exposed: of the time that a phase runs on a rank, the part in which no GEMM of its experts runs",
        "",
        f"{'':9} {'phase':16} {'launches':>8} {'busy us':>10}"
        + "".join(f" {f'exposed {r}':>11}" for r in ranks),
        *(
            f"{times.direction:9} {times.phase:16} {times.num_events:8} {fmean(times.busy_us):10.1f}"
            + "".join(f" {exposed:11.1f}" for exposed in times.exposed_us)
            for times in timeline.phases()
        ),
        *(
            f"{text:45} " + "".join(f" {value:11.1f}" for value in values)
            for text, values in totals.items()
        ),
        "launches: of all ranks; busy: their mean; exposed does not add up where phases run at the same time",
    ]
    return "\n".join(line.rstrip() for line in lines)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline in the Trace Event Format: a process per rank, a thread per lane, and a thread for exposed
    communication."""
    return {
        "traceEvents": [
            item for rank in range(len(timeline.ranks)) for item in _items_of(timeline, rank)
        ],
        "displayTimeUnit": "ms",
        "otherData": {
            "device": timeline.device,
            "clock_error_us": list(timeline.clock_error_us),
        },
    }


def _items_of(timeline: Timeline, rank: int) -> Iterator[dict[str, Any]]:
    lanes = [*lanes_of(timeline, rank), EXPOSED_LANE]
    named = [
        ("process", 0, f"rank {rank}", rank),
        *(("thread", n, lane, n) for n, lane in enumerate(lanes)),
    ]
    for kind, thread, text, order in named:
        where = {"ph": "M", "pid": rank, "tid": thread}
        yield where | {"name": f"{kind}_name", "args": {"name": text}}
        yield where | {"name": f"{kind}_sort_index", "args": {"sort_index": order}}
    exposed = [
        Event(EXPOSED_LANE, "exposed", "exposed", "", *s)
        for s in timeline.exposed_communication(rank)
    ]
    for e in (*timeline.ranks[rank], *exposed):
        yield {
            "ph": "X",
            "pid": rank,
            "tid": lanes.index(e.lane),
            "name": e.phase,
            "cat": e.direction or "step",
            "args": {"operator or kernel": e.name, "direction": e.direction} if e.name else {},
            "ts": round(e.begin_us, 3),
            "dur": round(e.end_us - e.begin_us, 3),
        }


def lanes_of(timeline: Timeline, rank: int) -> list[str]:
    """A rank's lanes: compute first, streams by number."""
    parts = (lane.partition(" ") for lane in {event.lane for event in timeline.ranks[rank]})
    return [
        "".join(p) for p in sorted(parts, key=lambda p: (p[0] != "compute", p[0], int(p[2] or 1)))
    ]


def length(spans: Sequence[Span]) -> float:
    """The length of all spans together, in microseconds."""
    return sum(end - begin for begin, end in spans)


def _spans_of(events: Sequence[Event], phases: Iterable[str]) -> list[Span]:
    """Spans in which an event of these phases runs: non-empty, disjoint, not adjacent, in order."""
    merged: list[Span] = []
    chosen = [event for event in events if event.phase in phases and event.begin_us < event.end_us]
    for begin, end in sorted((event.begin_us, event.end_us) for event in chosen):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _without(spans: Sequence[Span], excluded: Sequence[Span]) -> list[Span]:
    """The parts of `spans` outside all `excluded` spans; both from _spans_of."""
    edges = [-math.inf, *itertools.chain(*excluded), math.inf]
    gaps = list(zip(edges[::2], edges[1::2], strict=True))
    parts = ((max(a, c), min(b, d)) for a, b in spans for c, d in gaps)
    return [(begin, end) for begin, end in parts if begin < end]
