"""Records as a picture: everything that was measured, a panel for each case. The docs' pictures are in symmoe/plot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from symmoe.errors import ArgumentError
from symmoe.tools.bench.records import Record
from symmoe.tools.picture import BLUE, GREY, picture

# Suite to the figure that is drawn and its axis; milliseconds where a suite has none.
_FIGURES = {
    "layer": ("tflops", "TFLOP/s per GPU"),
    "variants": ("tflops", "TFLOP/s per GPU"),
    "grouped": ("tflops", "TFLOP/s per GPU"),
    "gemm": ("tflops", "TFLOP/s per GPU"),
    "dispatch": ("wire_gbs", "GB/s on the wire"),
    "combine": ("wire_gbs", "GB/s on the wire"),
}
_PANELS_PER_ROW = 2  # forward and backward
_PANEL_INCHES = 2.6

Panel = tuple[Any, ...]


def draw(records: Sequence[Record], path: str) -> None:
    """A panel for every suite, preset, number of ranks, skew and direction.

    A panel has a line for each variant over the number of tokens, or bars if there is one such number; those of
    yardsticks and peers are grey.

    Raises:
        ArgumentError: there is nothing to draw, or no matplotlib to draw with.
    """
    panels = _panels(records)
    if not panels:
        raise ArgumentError(f"plot ({path}): there are no records to draw")
    columns = min(_PANELS_PER_ROW, len(panels))
    lines = -(-len(panels) // columns)
    with picture(path, height_inches=lines * _PANEL_INCHES) as figure:
        axes = list(figure.subplots(lines, columns, squeeze=False).flat)
        for axis, (panel, drawn) in zip(axes, panels.items(), strict=False):
            _draw_panel(axis, panel, drawn)
        for axis in axes[len(panels) :]:
            axis.remove()


def _panels(records: Sequence[Record]) -> dict[Panel, list[Record]]:
    panels: dict[Panel, list[Record]] = defaultdict(list)
    for record in records:
        panel = tuple(record.get(key) for key in ("suite", "preset", "ep", "skew", "direction"))
        panels[panel].append(record)
    return dict(panels)


def _draw_panel(axis: Any, panel: Panel, records: list[Record]) -> None:
    suite, preset, ep, skew, direction = panel
    key, label = _FIGURES.get(suite, ("ms_median", "ms"))
    if not any(record.get(key) for record in records):
        key, label = "ms_median", "ms"
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    yardsticks = set()
    for record in records:
        if record.get(key) is not None:
            name = record.get("variant") or suite
            lines[name].append((record["tokens"], record[key]))
            if not record.get("yardstick"):
                yardsticks.add(name)
    if len({tokens for points in lines.values() for tokens, _ in points}) > 1:
        for name, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens per rank")
        axis.set_ylabel(label)
        axis.legend(fontsize="xx-small")
    else:
        names = list(lines)
        colors = [GREY if name in yardsticks else BLUE for name in names]
        bars = axis.barh(names, [lines[name][0][1] for name in names], color=colors)
        axis.bar_label(bars, fmt="{:.3g}", padding=2, fontsize="x-small")
        axis.margins(x=0.1)
        axis.invert_yaxis()
        axis.tick_params(axis="y", labelsize="x-small")
        axis.set_xlabel(label)
    (axis.set_ylim if axis.get_legend() else axis.set_xlim)(0)
    axis.set_title(f"{suite} {direction}, {preset}, EP {ep}, {skew}", fontsize="small")
