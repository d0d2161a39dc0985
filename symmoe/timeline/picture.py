"""A timeline as a picture: a lane for each rank and stream, and one that shows exposed communication."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from typing import Any

from symmoe.timeline.events import Span, Timeline, length, spans_of
from symmoe.timeline.phases import OTHER, PHASES
from symmoe.timeline.report import lanes_of
from symmoe.tools.picture import BLACK, BLUE, GREEN, VERMILION, picture

_LANE_INCHES = 0.34
_FRAME_INCHES = 1.9  # height of title, names of passes, axis and legend
_BAR, _EXPOSED_BAR = 0.8, 0.5  # heights, as parts of a lane
_CHARACTER_SHARE = 0.0095  # width of a character of a bar's name, as a share of the picture
_DARK = (BLACK, BLUE, GREEN, VERMILION)  # phases whose names are white
# Not a colour of any phase.
_EXPOSED: dict[str, Any] = {"facecolor": "white", "edgecolor": BLACK, "hatch": "//////", "linewidth": 0.5}


def draw(timeline: Timeline, path: str) -> None:
    """Writes the PNG.

    Raises:
        ArgumentError: matplotlib is not installed.
    """
    ranks = range(len(timeline.ranks))
    lanes = [(rank, lane) for rank in ranks for lane in (*lanes_of(timeline, rank), "exposed")]
    with picture(path, height_inches=_FRAME_INCHES + _LANE_INCHES * len(lanes)) as figure:
        axis = figure.subplots()
        for place, (rank, lane) in enumerate(lanes):
            if lane == "exposed":
                _bars(axis, place, timeline.exposed_communication(rank), _EXPOSED_BAR, **_EXPOSED)
                axis.axhline(place + 0.5, color="#dddddd", linewidth=0.8, zorder=0)
            else:
                _draw_lane(axis, place, timeline, rank, lane)
        axis.set_yticks(range(len(lanes)), [f"rank {rank}, {lane}" for rank, lane in lanes])
        axis.set_ylim(len(lanes) - 0.5, -0.5)
        axis.set_xlim(0, timeline.end_us or 1.0)
        error_us = max(timeline.clock_error_us)
        axis.set_xlabel(f"µs from when all ranks were ready (their clocks agree within {error_us:.1f} µs)")
        exposed = [length(timeline.exposed_communication(rank)) for rank in ranks]
        about = f"{timeline.device}, {timeline.end_us:.0f} µs; communication exposed on a rank: "
        axis.set_title(f"{about}{min(exposed):.0f} to {max(exposed):.0f} µs", loc="left", pad=16)
        _draw_directions(axis, timeline)
        _legend(figure, timeline)


def _draw_lane(axis: Any, place: int, timeline: Timeline, rank: int, lane: str) -> None:
    events = [event for event in timeline.ranks[rank] if event.lane == lane]
    for phase in PHASES:
        mine = [event for event in events if event.phase == phase.name]
        edge = 0.5 if phase.is_gemm else 0.0  # neighbours have one colour
        look = {"facecolor": phase.color, "edgecolor": "white", "linewidth": edge}
        _bars(axis, place, [(e.begin_us, e.end_us) for e in mine], _BAR, **look)
        for begin, end in () if phase is OTHER else spans_of(mine):
            if end - begin >= _CHARACTER_SHARE * len(phase.name) * timeline.end_us:
                color = "white" if phase.color in _DARK else "black"
                axis.text((begin + end) / 2, place, phase.name, ha="center", va="center", color=color, size=7)


def _draw_directions(axis: Any, timeline: Timeline) -> None:
    """Where rank 0's passes begin: lines through all lanes, and their names above."""
    known = [event for event in timeline.ranks[0] if event.direction]
    place = {"textcoords": "offset points", "xycoords": ("data", "axes fraction"), "annotation_clip": False}
    for direction, events in groupby(known, key=lambda event: event.direction):
        begin_us = next(events).begin_us
        axis.axvline(begin_us, color="#666666", linewidth=0.8, linestyle=":", zorder=0)
        axis.annotate(direction, (begin_us, 1.0), (2, 3), ha="left", color="#444444", size=8, **place)


def _bars(axis: Any, place: int, spans: list[Span], height: float, **look: Any) -> None:
    axis.broken_barh([(begin, end - begin) for begin, end in spans], (place - height / 2, height), **look)


def _legend(figure: Any, timeline: Timeline) -> None:
    """One entry for each colour in the picture, and one for the lanes that have none."""
    from matplotlib.patches import Patch

    seen = {event.phase for events in timeline.ranks for event in events}
    names: dict[str, list[str]] = defaultdict(list)
    for phase in PHASES:
        if phase.name in seen:
            names[phase.color].append(phase.name)
    patches = [Patch(color=color, label=", ".join(phases)) for color, phases in names.items()]
    patches.append(Patch(**_EXPOSED, label="exposed: communication while no GEMM runs"))
    figure.legend(handles=patches, loc="outside lower left", ncols=2)
