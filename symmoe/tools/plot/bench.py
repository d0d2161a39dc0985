"""The docs' pictures of benchmark records: which records a picture takes follows from what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from symmoe.errors import ArgumentError
from symmoe.tools.bench.layer import CEILING, LAYER
from symmoe.tools.bench.records import Record, identity
from symmoe.tools.bench.stock_torch import STOCK
from symmoe.tools.bench.timing import DIRECTIONS
from symmoe.tools.picture import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, YELLOW, picture

_PANEL_INCHES = 2.6
# Variants that pictures show, and how. Others of ours would be too many; peers take what colours are left.
_SHOWN = {"static": ("symmoe", BLUE), "graph": ("symmoe, CUDA graph", SKY), STOCK: (STOCK, ORANGE)}
_CEILING = ("the GEMMs alone", BLACK)
_PEER_COLORS = (PURPLE, GREEN, YELLOW)
_SKEWS = ("uniform", "zipf", "hot")
_LINES = {  # told apart without colour too
    "static": {"marker": "o"},
    "graph": {"marker": "s", "linestyle": "--"},
    STOCK: {"marker": "^"},
    CEILING: {"linestyle": ":"},
}

Panel = tuple[str, int]  # preset, ranks


def draw_benchmarks(records: Sequence[Record], folder: str) -> list[str]:
    """Writes the pictures that the records have figures for, `<picture>-<gpu>.png`, one set for each kind of GPU.

    layer: TFLOP/s of whole steps, their ceiling, stock torch and others. tokens: time over tokens per rank. skew: time
    by routing. Of what was measured twice, the later figure counts.

    Returns:
        the paths written.

    Raises:
        ArgumentError: the records have figures for none, the folder cannot be written, or matplotlib is not installed.
    """
    written = []
    for gpu in sorted({record.get("gpu") or "unknown" for record in records}):
        mine = [record for record in records if (record.get("gpu") or "unknown") == gpu]
        for name, (choose, draw) in _PICTURES.items():
            if chosen := choose(mine):
                path = str(Path(folder, f"{name}-{_slug(gpu)}.png"))
                try:
                    Path(folder).mkdir(parents=True, exist_ok=True)
                    draw(chosen, gpu, path)
                except OSError as error:
                    raise ArgumentError(f"out ({folder}) cannot be written: {error}") from error
                written.append(path)
    if not written:
        raise ArgumentError("the records hold no figures for any picture: the suite layer has them")
    return written


# -- which records ----------------------------------------------------------------------------------------------------


def latest(records: Iterable[Record]) -> list[Record]:
    """One record for each measurement, the latest."""
    found: dict[tuple[Any, ...], Record] = {}
    for record in sorted(records, key=lambda record: record.get("date") or ""):
        found[identity(record)] = record
    return list(found.values())


def _layer_steps(records: list[Record]) -> list[Record]:
    """Steps, if possible from runs with one number of tokens: such a run measures what it compares closer together."""
    layer = [record for record in records if record["suite"] == "layer"]
    sweeps = {_run_of(run[0]) for run in _sweeps(layer)}
    return [record for record in layer if _run_of(record) not in sweeps] or layer


def _sweeps(layer: list[Record]) -> list[list[Record]]:
    """Runs over several numbers of tokens."""
    runs: dict[tuple[Any, ...], list[Record]] = {}
    for record in layer:
        runs.setdefault(_run_of(record), []).append(record)
    return [run for run in runs.values() if len({record["tokens"] for record in run}) > 1]


def _run_of(record: Record) -> tuple[Any, ...]:
    return (*_panel(record), record.get("date"), record.get("command"))


def _choose_layer(records: list[Record]) -> list[Record]:
    """Steps with uniform routing at the number of tokens that most presets were measured with."""
    uniform = [record for record in _layer_steps(records) if record["skew"] == "uniform"]
    presets: dict[int, set[Panel]] = {}
    for record in uniform:
        presets.setdefault(record["tokens"], set()).add(_panel(record))
    if not presets:
        return []
    tokens = max(presets, key=lambda tokens: (len(presets[tokens]), tokens))
    return latest(record for record in uniform if record["tokens"] == tokens)


def _choose_tokens(records: list[Record]) -> list[Record]:
    """Runs of several numbers of tokens, each from one run: another day's GPU would put a kink into a line."""
    sweeps = _sweeps([record for record in records if record["suite"] == "layer" and record["skew"] == "uniform"])
    newest = {_panel(run[0]): run for run in sorted(sweeps, key=lambda run: run[0].get("date") or "")}
    return [record for run in newest.values() for record in run]


def _choose_skew(records: list[Record]) -> list[Record]:
    """Presets, ranks and numbers of tokens that were measured with several routings."""
    layer = latest(_layer_steps(records))
    skews: dict[tuple[Any, ...], set[str]] = {}
    for record in layer:
        skews.setdefault((*_panel(record), record["tokens"]), set()).add(record["skew"])
    several = [case for case, found in skews.items() if len(found) > 1]
    largest = {case[:2]: case for case in sorted(several, key=lambda case: case[2])}
    return [record for record in layer if (*_panel(record), record["tokens"]) in largest.values()]


# -- pictures ---------------------------------------------------------------------------------------------------------


def _draw_layer(records: list[Record], gpu: str, path: str) -> None:
    presets, shown = _ordered(record["preset"] for record in records), _shown(records)
    lines = {f"{ep} GPUs": [r for r in records if r["ep"] == ep] for ep in sorted({r["ep"] for r in records})}
    title = f"A MoE layer on {gpu}s, {records[0]['tokens']} tokens per GPU; more is better"
    with _panels(path, lines, title, labels=("", "TFLOP/s per GPU"), sharey=True) as panels:
        for axis, mine in panels:
            of = {(r["preset"], r["variant"]): r["tflops"] for r in mine}
            _grouped_bars(axis, presets, shown, of, fmt="{:.0f}")


def _draw_tokens(records: list[Record], gpu: str, path: str) -> None:
    from matplotlib.ticker import LogLocator

    shown = _shown(records) | {CEILING: _CEILING}
    title = f"Time of a MoE layer on {gpu}s; bands: 10th to 90th percentile"
    sharing = {"sharex": True, "sharey": "row"}
    with _panels(path, _by_panel(records), title, labels=("tokens per GPU", "ms"), **sharing) as panels:
        for axis, mine in panels:
            for variant, (label, color) in shown.items():
                points = sorted((r for r in mine if r["variant"] == variant), key=lambda r: r["tokens"])
                _line(axis, points, label=label, color=color, **_LINES.get(variant, {"marker": "D"}))
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            tokens = sorted({r["tokens"] for r in mine})
            axis.set_xticks(tokens, [_count(number) for number in tokens])
            axis.minorticks_off()
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.grid(color="#e5e5e5", linewidth=0.6)
            axis.tick_params(axis="x", labelsize=8)


def _draw_skew(records: list[Record], gpu: str, path: str) -> None:
    shown, tokens = _shown(records), ", ".join(map(_count, sorted({record["tokens"] for record in records})))
    title = f"Time of a MoE layer on {gpu}s by routing, {tokens} tokens per GPU; less is better"
    with _panels(path, _by_panel(records), title, labels=("routing", "ms")) as panels:
        for axis, mine in panels:
            skews = [skew for skew in _SKEWS if any(r["skew"] == skew for r in mine)]
            of = {(r["skew"], r["variant"]): r["ms_median"] for r in mine}
            _grouped_bars(axis, skews, shown, of, fmt=_ms)


_PICTURES: dict[str, tuple[Callable[[list[Record]], list[Record]], Callable[[list[Record], str, str], None]]] = {
    "layer": (_choose_layer, _draw_layer),
    "tokens": (_choose_tokens, _draw_tokens),
    "skew": (_choose_skew, _draw_skew),
}

# -- parts of pictures ------------------------------------------------------------------------------------------------


@contextmanager
def _panels(
    path: str, lines: dict[str, list[Record]], title: str, *, labels: tuple[str, str], **sharing: Any
) -> Iterator[list[tuple[Any, list[Record]]]]:
    """(axis, its records): forward and backward of every line, by its name. labels: of x and y."""
    with picture(path, height_inches=0.9 + _PANEL_INCHES * len(lines)) as figure:
        axes = figure.subplots(len(lines), 2, squeeze=False, **sharing)
        panels = []
        for line, (name, records) in zip(axes, lines.items(), strict=True):
            line[0].set_ylabel(labels[1])
            for axis, direction in zip(line, DIRECTIONS, strict=True):
                axis.set_title(f"{direction}, {name}", loc="left")
                panels.append((axis, [record for record in records if record["direction"] == direction]))
        yield panels
        for axis in axes[-1]:
            axis.set_xlabel(labels[0])
        handles, names = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=min(6, len(names)))
        figure.suptitle(title, fontsize=10)


def _by_panel(records: list[Record]) -> dict[str, list[Record]]:
    panels = sorted({_panel(record) for record in records})
    return {f"{preset}, {ep} GPUs": [r for r in records if _panel(r) == (preset, ep)] for preset, ep in panels}


def _shown(records: list[Record]) -> dict[str, tuple[str, str]]:
    """Variant to label and colour: some of ours, stock torch, and all peers."""
    variants = _ordered(record["variant"] for record in records)
    peers = [v for v in variants if v not in (*LAYER, STOCK, CEILING)]
    shown = {variant: look for variant, look in _SHOWN.items() if variant in variants}
    return shown | {peer: (peer, _PEER_COLORS[i % len(_PEER_COLORS)]) for i, peer in enumerate(peers)}


def _grouped_bars(
    axis: Any,
    groups: Sequence[str],
    shown: dict[str, tuple[str, str]],
    of: dict[tuple[str, str], float],
    fmt: str | Callable[[float], str],
) -> None:
    """A group of bars for each of `groups`; the bar of "the GEMMs alone" comes first, as an outline."""
    looks = {CEILING: _CEILING} | shown
    width = 0.86 / len(looks)
    for place, (variant, (label, color)) in enumerate(looks.items()):
        middle = (place - (len(looks) - 1) / 2) * width
        there = [(i + middle, of[group, variant]) for i, group in enumerate(groups) if (group, variant) in of]
        if there:
            fill = {"facecolor": "none", "edgecolor": color} if variant == CEILING else {"color": color}
            bars = axis.bar(*zip(*there, strict=True), width * 0.92, label=label, **fill)
            axis.bar_label(bars, fmt=fmt, padding=1, fontsize=7)
    axis.set_xticks(range(len(groups)), groups)
    highest = max((value for value in of.values() if value is not None), default=1.0)
    axis.set_ylim(0, max(1.1 * highest, axis.get_ylim()[1]))  # panels may share the axis


def _line(axis: Any, points: list[Record], *, label: str, color: str, **style: str) -> None:
    if points:
        tokens = [record["tokens"] for record in points]
        times = [record["ms_median"] for record in points]
        axis.plot(tokens, times, label=label, color=color, markersize=4, linewidth=1.4, **style)
        low, high = ([record[key] for record in points] for key in ("ms_p10", "ms_p90"))
        axis.fill_between(tokens, low, high, color=color, alpha=0.15, linewidth=0)


def _panel(record: Record) -> Panel:
    return record["preset"], record["ep"]


def _ordered(values: Iterable[Any]) -> list[Any]:
    """The values without repetitions, in their order."""
    return list(dict.fromkeys(values))


def _count(number: int) -> str:
    """A number of tokens, short: 32K."""
    return f"{number // 1024}K" if number % 1024 == 0 else str(number)


def _ms(time: float) -> str:
    """Milliseconds in three digits or so, short enough for a bar."""
    return f"{time:.2f}" if time < 10 else f"{time:.1f}"


def _slug(gpu: str) -> str:
    """The GPU's part of a file name: "h200" for "NVIDIA H200"."""
    words = "".join(char if char.isalnum() else " " for char in gpu.lower()).split()
    return "-".join(word for word in words if word != "nvidia")[:40] or "unknown"
