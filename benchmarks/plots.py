"""The pictures of the layer: the docs' from the committed records, or one from records of your own.

    python benchmarks/plots.py docs/images
    python benchmarks/plots.py now.png now.json

speed-h200.png: TFLOP/s of whole steps, and others'; memory-h100.png: what a layer holds; layer-h200.png: of passes;
tokens-h200.png: time over tokens; skew-h200.png: time by routing. Your own picture is one of the last three, by
what the records of the suite "layer" differ in.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator
from pictures import BLACK, BLUE, ORANGE, PURPLE, SKY, picture

RESULTS = Path(__file__).resolve().parent / "results"
SHOWN = {  # variant: label, look of a line, look of a bar
    "gemms alone": (
        "the GEMMs alone",
        {"color": BLACK, "linestyle": ":"},
        {"facecolor": "none", "edgecolor": BLACK},
    ),
    "static": ("symmoe", {"color": BLUE, "marker": "o"}, {"color": BLUE}),
    "graph": (
        "symmoe, CUDA graph",
        {"color": SKY, "marker": "s", "linestyle": "--"},
        {"color": SKY},
    ),
    "stock torch": ("stock torch", {"color": ORANGE, "marker": "^"}, {"color": ORANGE}),
}
GROUPS = (
    "qwen3-30b",
    "deepseek-like",
    "mixtral-8x7b",
    "uniform",
    "zipf",
    "hot",
)  # of bars, from left to right
TITLE_WIDTH = 100  # characters
Records = list[dict[str, Any]]


def records(*names: str) -> Records:
    return [
        record
        for name in names
        for record in json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    ]


def draw(path: str, title: str, shown_records: Records, along: str) -> None:
    """Bars of every preset or skew, or lines over tokens, forward and backward; a row for each preset and number of
    ranks that are not along the axis."""
    unit = "GPU" if shown_records[0]["driver"] else "rank"  # CPUs have no driver
    rows: dict[str, Records] = {}
    for record in shown_records:
        preset = "" if along == "preset" else f"{record['preset']}, "
        rows.setdefault(f"{preset}{record['ep']} {unit}{'s' * (record['ep'] > 1)}", []).append(
            record
        )
    labels = {
        "preset": ("", f"TFLOP/s per {unit}"),
        "tokens": (f"tokens per {unit}", "ms"),
        "skew": ("routing", "ms"),
    }
    with picture(path, height_inches=0.9 + 2.6 * len(rows)) as figure:
        axes = figure.subplots(len(rows), 2, squeeze=False, sharey="row")
        for pair, (name, of_row) in zip(axes, rows.items(), strict=True):
            for axis, direction in zip(pair, ("forward", "backward"), strict=True):
                axis.set_title(f"{direction}, {name}", loc="left")
                shown = [record for record in of_row if record["direction"] == direction]
                if along == "tokens":
                    draw_lines(axis, shown)
                else:
                    draw_bars(axis, shown, along, "tflops" if along == "preset" else "ms_median")
            pair[0].set_ylabel(labels[along][1])
        for axis in axes[-1]:
            axis.set_xlabel(labels[along][0])
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        figure.suptitle(textwrap.fill(title, TITLE_WIDTH), fontsize=10)


def shown_in(measured: Records) -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """The entries of SHOWN with measurements: CPUs have no graphs."""
    return {
        variant: looks
        for variant, looks in SHOWN.items()
        if any(r["variant"] == variant for r in measured)
    }


def draw_bars(axis: Axes, measured: Records, along: str, figure: str) -> None:
    """A group of bars for each value of `along`."""
    values = list(dict.fromkeys(record[along] for record in measured))
    groups = sorted(values, key=[*GROUPS, *values].index)  # others after those that are known
    looks = {variant: (label, look) for variant, (label, _, look) in shown_in(measured).items()}
    heights = {(record[along], record["variant"]): record[figure] for record in measured}
    digits = (
        "{:.0f}" if min(heights.values()) >= 100 else "{:.3g}"
    )  # whole numbers where all are large
    draw_groups(axis, groups, looks, heights, digits.format)


def draw_groups(
    axis: Axes,
    groups: Sequence[str],
    looks: dict[str, tuple[str, dict[str, Any]]],
    figures: dict[tuple[str, str], float],
    text: Callable[[float], str],
) -> None:
    """Bars of each group for the variants in `looks`, as high as `of`[group, variant]."""
    width = 0.86 / len(looks)
    for index, (variant, (label, look)) in enumerate(looks.items()):
        middle = (index - (len(looks) - 1) / 2) * width
        where = [i + middle for i in range(len(groups))]
        heights = [figures[group, variant] for group in groups]
        bars = axis.bar(where, heights, 0.92 * width, label=label, **look)
        axis.bar_label(bars, fmt=text, padding=1, fontsize=7)
    axis.set_xticks(range(len(groups)), groups)
    axis.margins(y=0.1)


def draw_lines(axis: Axes, measured: Records) -> None:
    """Time over tokens, with bands."""
    for variant, (label, look, _) in shown_in(measured).items():
        points = sorted(
            (record for record in measured if record["variant"] == variant),
            key=lambda r: r["tokens"],
        )
        tokens, ms, low, high = (
            [p[key] for p in points] for key in ("tokens", "ms_median", "ms_p10", "ms_p90")
        )
        axis.plot(tokens, ms, label=label, markersize=4, linewidth=1.4, **look)
        axis.fill_between(tokens, low, high, color=look["color"], alpha=0.15, linewidth=0)
    axis.set(xscale="log", yscale="log")
    axis.minorticks_off()
    axis.set_xticks(tokens, [str(number) for number in tokens])
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(color="#e5e5e5", linewidth=0.6)


LAYERS = {  # of steps, and of what they hold
    "layer": ("symmoe, MoELayer and its router", {"color": BLUE}),
    "layer, graph": ("symmoe, CUDA graph", {"color": SKY}),
    "layer, packed": ('symmoe, layout="packed"', {"color": SKY}),
    "deepep": ("DeepEP 1.2.1, torch._grouped_mm", {"color": PURPLE}),
    "stock torch": ("stock torch: NCCL, torch._grouped_mm", {"color": ORANGE}),
}


def draw_presets(
    title: str,
    unit: str,
    suite: str,
    names: Sequence[str],
    figure: Callable[[dict[str, Any]], float],
    path: str,
) -> None:
    """Bars of each preset for the variants of LAYERS, by a figure of a suite's records of 8192 tokens."""
    heights = {
        (row["preset"], row["variant"]): figure(row)
        for row in records(*names)
        if row["suite"] == suite and row["tokens"] == 8192
    }
    looks = {variant: look for variant, look in LAYERS.items() if (GROUPS[0], variant) in heights}
    with picture(path, height_inches=3.4) as figures:
        axis = figures.subplots()
        draw_groups(axis, GROUPS[:3], looks, heights, "{:.0f}".format)
        axis.set_ylabel(unit)
        axis.set_title(title, loc="left")
        figures.legend(loc="outside lower center", ncols=2)


def draw_records(title: str, names: Sequence[str], along: str, path: str) -> None:
    """Draws all records of the layer; along routings, those of the first record's preset."""
    rows = records(*names)
    alike = [r for r in rows if along != "skew" or r["preset"] == rows[0]["preset"]]
    draw(path, title, alike, along)


def draw_own(path: str, files: list[str]) -> None:
    """Draws records of the suite "layer", along the key in which they differ. Ends the program if there are none."""
    rows = [
        r
        for file in files
        for r in json.loads(Path(file).read_text(encoding="utf-8"))
        if r["suite"] == "layer"
    ]
    if not rows:
        sys.exit('these files have no records of the suite "layer"')
    along = next((key for key in ("tokens", "skew") if len({r[key] for r in rows}) > 1), "preset")
    about = [f"{rows[0]['tokens']} tokens per rank"] * (along != "tokens")
    about += [f"{rows[0]['skew']} routing"] * (along != "skew")
    draw(path, f"A MoE layer on {rows[0]['gpu']}, {', '.join(about)}", rows, along)


PICTURES = {
    "speed-h200.png": partial(
        draw_presets,
        "Training steps of a MoE layer, bf16, 2 NVIDIA H200s, 8192 tokens per GPU; more is better",
        "TFLOP/s per GPU",
        "steps",
        ("steps-h200-ep2", "deepep-h200-ep2"),
        lambda record: record["tflops"],
    ),
    "memory-h100.png": partial(
        draw_presets,
        "What a MoE layer keeps until its backward, bf16, 2 NVIDIA H100s, 8192 tokens per GPU; less is better",
        "MiB per GPU",
        "memory",
        ("memory-h100-ep2",),
        lambda record: (record["held_ordinary_bytes"] + record["held_heap_bytes"]) / 2**20,
    ),
    "layer-h200.png": partial(
        draw_records,
        "A MoE layer on NVIDIA H200s, 8192 tokens per GPU; more is better",
        ("layer-h200-ep2", "layer-h200-ep4"),
        "preset",
    ),
    "tokens-h200.png": partial(
        draw_records,
        "Time of a MoE layer on NVIDIA H200s; bands: 10th to 90th percentile",
        ("layer-tokens-h200-ep2",),
        "tokens",
    ),
    "skew-h200.png": partial(
        draw_records,
        "Time of a MoE layer on NVIDIA H200s by routing, 8192 tokens per GPU; less is better",
        ("layer-skew-h200-ep2", "layer-h200-ep2"),
        "skew",
    ),
}

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: python {sys.argv[0]} FOLDER, or PICTURE.png RECORDS.json...")
    if len(sys.argv) > 2:
        draw_own(sys.argv[1], sys.argv[2:])
    else:
        for name, draw_picture in PICTURES.items():
            draw_picture(str(Path(sys.argv[1], name)))
