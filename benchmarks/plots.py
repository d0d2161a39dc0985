"""The docs' pictures of the layer, from the committed records: `python benchmarks/plots.py docs/images`.

speed-h200.png: TFLOP/s of whole steps, and others'; layer-h200.png: of passes; tokens-h200.png: time over tokens;
skew-h200.png: time by routing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator
from pictures import BLACK, BLUE, ORANGE, PURPLE, SKY, picture

RESULTS = Path(__file__).resolve().parent / "results"
SHOWN = {  # variant: label, look of a line, look of a bar
    "gemms alone": ("the GEMMs alone", {"color": BLACK, "linestyle": ":"}, {"facecolor": "none", "edgecolor": BLACK}),
    "static": ("symmoe", {"color": BLUE, "marker": "o"}, {"color": BLUE}),
    "graph": ("symmoe, CUDA graph", {"color": SKY, "marker": "s", "linestyle": "--"}, {"color": SKY}),
    "stock torch": ("stock torch", {"color": ORANGE, "marker": "^"}, {"color": ORANGE}),
}
GROUPS = ("qwen3-30b", "deepseek-like", "mixtral-8x7b", "uniform", "zipf", "hot")  # of bars, from left to right
Records = list[dict[str, Any]]


def records(*names: str) -> Records:
    return [record for name in names for record in json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))]


def panels(path: str, title: str, rows: dict[str, Records], labels: tuple[str, str]) -> Iterator[tuple[Axes, Records]]:
    """(axis, its records): forward and backward of every row, by its name. labels: of x and y."""
    with picture(path, height_inches=0.9 + 2.6 * len(rows)) as figure:
        axes = figure.subplots(len(rows), 2, squeeze=False, sharey="row")
        for pair, (name, of_row) in zip(axes, rows.items(), strict=True):
            for axis, direction in zip(pair, ("forward", "backward"), strict=True):
                axis.set_title(f"{direction}, {name}", loc="left")
                yield axis, [record for record in of_row if record["direction"] == direction]
            pair[0].set_ylabel(labels[1])
        for axis in axes[-1]:
            axis.set_xlabel(labels[0])
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        figure.suptitle(title, fontsize=10)


def draw_bars(axis: Axes, mine: Records, along: str, figure: str, text: Callable[[float], str]) -> None:
    """A group of bars for each value of `along`."""
    groups = [group for group in GROUPS if any(record[along] == group for record in mine)]
    width = 0.86 / len(SHOWN)
    for place, (variant, (label, _, look)) in enumerate(SHOWN.items()):
        of = {record[along]: record[figure] for record in mine if record["variant"] == variant}
        middle = (place - (len(SHOWN) - 1) / 2) * width
        bars = axis.bar(
            [i + middle for i in range(len(groups))], [of[g] for g in groups], 0.92 * width, label=label, **look
        )
        axis.bar_label(bars, fmt=text, padding=1, fontsize=7)
    axis.set_xticks(range(len(groups)), groups)
    axis.margins(y=0.1)


def draw_speed(path: str) -> None:
    looks = {
        "layer": ("symmoe, MoELayer and its router", {"color": BLUE}),
        "layer, graph": ("symmoe, CUDA graph", {"color": SKY}),
        "deepep": ("DeepEP 1.2.1, torch._grouped_mm", {"color": PURPLE}),
        "stock torch": ("stock torch: NCCL, torch._grouped_mm", {"color": ORANGE}),
    }
    found = records("steps-h200-ep2", "deepep-h200-ep2")
    of = {
        (one["preset"], one["variant"]): one["tflops"]
        for one in found
        if one["suite"] == "steps" and one["tokens"] == 8192
    }
    groups, width = GROUPS[:3], 0.86 / len(looks)
    with picture(path, height_inches=3.4) as figure:
        axis = figure.subplots()
        for place, (variant, (label, look)) in enumerate(looks.items()):
            where = [i + (place - (len(looks) - 1) / 2) * width for i in range(len(groups))]
            bars = axis.bar(where, [of[group, variant] for group in groups], 0.92 * width, label=label, **look)
            axis.bar_label(bars, fmt="{:.0f}".format, padding=1, fontsize=7)
        axis.set_xticks(range(len(groups)), groups)
        axis.set_ylabel("TFLOP/s per GPU")
        axis.margins(y=0.1)
        axis.set_title(
            "Training steps of a MoE layer, bf16, 2 NVIDIA H200s, 8192 tokens per GPU; more is better", loc="left"
        )
        figure.legend(loc="outside lower center", ncols=2)


def draw_layer(path: str) -> None:
    found = records("layer-h200-ep2", "layer-h200-ep4")
    rows = {f"{ep} GPUs": [record for record in found if record["ep"] == ep] for ep in (2, 4)}
    title = "A MoE layer on NVIDIA H200s, 8192 tokens per GPU; more is better"
    for axis, mine in panels(path, title, rows, ("", "TFLOP/s per GPU")):
        draw_bars(axis, mine, "preset", "tflops", "{:.0f}".format)


def draw_tokens(path: str) -> None:
    rows = {"qwen3-30b, 2 GPUs": records("layer-tokens-h200-ep2")}
    title = "Time of a MoE layer on NVIDIA H200s; bands: 10th to 90th percentile"
    for axis, mine in panels(path, title, rows, ("tokens per GPU", "ms")):
        for variant, (label, look, _) in SHOWN.items():
            points = sorted((record for record in mine if record["variant"] == variant), key=lambda r: r["tokens"])
            tokens, ms, low, high = ([p[key] for p in points] for key in ("tokens", "ms_median", "ms_p10", "ms_p90"))
            axis.plot(tokens, ms, label=label, markersize=4, linewidth=1.4, **look)
            axis.fill_between(tokens, low, high, color=look["color"], alpha=0.15, linewidth=0)
        axis.set(xscale="log", yscale="log")
        axis.minorticks_off()
        axis.set_xticks(tokens, [str(number) for number in tokens])
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(color="#e5e5e5", linewidth=0.6)


def draw_skew(path: str) -> None:
    uneven = records("layer-skew-h200-ep2")
    even = [record for record in records("layer-h200-ep2") if record["preset"] == uneven[0]["preset"]]
    title = "Time of a MoE layer on NVIDIA H200s by routing, 8192 tokens per GPU; less is better"
    for axis, mine in panels(path, title, {"qwen3-30b, 2 GPUs": even + uneven}, ("routing", "ms")):
        draw_bars(axis, mine, "skew", "ms_median", "{:.3g}".format)


PICTURES = {
    "speed-h200.png": draw_speed,
    "layer-h200.png": draw_layer,
    "tokens-h200.png": draw_tokens,
    "skew-h200.png": draw_skew,
}

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} FOLDER")
    for name, draw in PICTURES.items():
        draw(str(Path(sys.argv[1], name)))
