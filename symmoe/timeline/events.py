"""What a timeline is made of, and how long which phase was exposed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from symmoe.timeline.phases import COMMUNICATION, GEMMS, PHASES

Span = tuple[float, float]  # microseconds: begin, end
DIRECTIONS = ("forward", "backward", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One operator on a host, or one kernel on a GPU.

    Attributes:
        lane: where it ran: "host" or "stream 7"; of a replay, "compute" or "communication".
        phase: its phase's name.
        direction: "forward", "backward", or "" if unknown (kernels of other libraries).
        name: the name of the operator or the kernel.
        begin_us, end_us: microseconds on the rank's clock, or, in a :class:`Timeline`, from its start.
    """

    lane: str
    phase: str
    direction: str
    name: str
    begin_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTimes:
    """One phase in one direction.

    Attributes:
        phase, direction: their names.
        num_events: number of events on all ranks.
        busy_us: per rank: time during which it runs, on any lane.
        exposed_us: per rank: the part of it during which no GEMM of an expert runs on this rank.
    """

    phase: str
    direction: str
    num_events: int
    busy_us: tuple[float, ...]
    exposed_us: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """What all ranks did, on one clock: microseconds since the last rank was ready.

    Attributes:
        ranks: events of each rank, in the order of their begins.
        clock_error_us: per rank: the largest error of its times compared with those of rank 0.
        device: "cpu", or the name of the GPU.
    """

    ranks: tuple[tuple[Event, ...], ...]
    clock_error_us: tuple[float, ...]
    device: str

    @property
    def end_us(self) -> float:
        """When the last event ends."""
        return max((event.end_us for events in self.ranks for event in events), default=0.0)

    def phases(self) -> list[PhaseTimes]:
        """The times of every phase that occurs, by direction."""
        found, gemms = [], [_spans_of(events, GEMMS) for events in self.ranks]
        for direction in DIRECTIONS:
            for phase in PHASES:
                mine = [[event for event in events if event.direction == direction] for events in self.ranks]
                spans = [_spans_of(events, {phase}) for events in mine]
                number = sum(event.phase == phase for events in mine for event in events)
                if number:
                    times = PhaseTimes(
                        phase=phase,
                        direction=direction,
                        num_events=number,
                        busy_us=tuple(map(length, spans)),
                        exposed_us=tuple(length(_without(*pair)) for pair in zip(spans, gemms, strict=True)),
                    )
                    found.append(times)
        return found

    def exposed_communication(self, rank: int) -> list[Span]:
        """When a rank communicates, or waits, and no GEMM of an expert runs there."""
        events = self.ranks[rank]
        return _without(_spans_of(events, COMMUNICATION), _spans_of(events, GEMMS))

    def idle_us(self, rank: int) -> float:
        """How long nothing runs on a rank."""
        return self.end_us - length(_spans_of(self.ranks[rank], PHASES))


def length(spans: Sequence[Span]) -> float:
    """The length of all spans together, in microseconds."""
    return sum(end - begin for begin, end in spans)


def _spans_of(events: Sequence[Event], phases: Iterable[str]) -> list[Span]:
    """When any event of these phases runs: spans that neither overlap nor touch, in order."""
    merged: list[Span] = []
    for begin, end in sorted((event.begin_us, event.end_us) for event in events if event.phase in phases):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The parts of `spans` that are in none of `others`; both as _spans_of gives them."""
    left: list[Span] = []
    for begin, end in spans:
        for other_begin, other_end in others:
            if other_end <= begin or end <= other_begin:
                continue
            if begin < other_begin:
                left.append((begin, other_begin))
            begin = min(end, other_end)
        if begin < end:
            left.append((begin, end))
    return left
