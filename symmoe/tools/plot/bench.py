"""The docs' pictures of benchmark records: which records a picture takes follows from what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from symmoe.checks.words import Stash
from symmoe.errors import ArgumentError
from symmoe.moe.config import MoEConfig
from symmoe.tools.bench.layer import CEILING, LAYER
from symmoe.tools.bench.problem import DTYPE
from symmoe.tools.bench.records import Record, identity
from symmoe.tools.bench.stock import STOCK
from symmoe.tools.bench.timing import DIRECTIONS
from symmoe.tools.picture import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, YELLOW, picture
from symmoe.training.memory_plan import plan_memory

_GIB = 2**30
_PANEL_INCHES = 2.5
# Variants that pictures show, and how. Others of ours would be too many; peers take what colours are left.
_SHOWN = {"static": ("symmoe", BLUE), "graph": ("symmoe, CUDA graph", SKY), STOCK: (STOCK, ORANGE)}
_CEILING = ("the GEMMs alone", BLACK)
_PEER_COLORS = (PURPLE, GREEN, YELLOW)
_STASHES: dict[str, Stash] = {"static": "all", "stash=rows": "rows", "stash=hidden": "hidden", "stash=none": "none"}
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

    layer: TFLOP/s of whole steps, their ceiling, stock torch and peers. tokens: time over tokens per rank. skew:
    time by routing. stash: memory kept for backward, and the time of a step. Of what was measured twice, the later
    figure counts.

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
        raise ArgumentError("the records hold no figures for any picture: suites layer and variants have them")
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


def _choose_stash(records: list[Record]) -> list[Record]:
    """Steps with every stash."""
    stashed = latest(r for r in records if r["suite"] == "variants" and r["variant"] in _STASHES)
    found = {(*_panel(record), record["variant"]) for record in stashed}
    return [record for record in stashed if all((*_panel(record), variant) in found for variant in _STASHES)]


# -- pictures ---------------------------------------------------------------------------------------------------------


def _draw_layer(records: list[Record], gpu: str, path: str) -> None:
    presets, ranks = _ordered(record["preset"] for record in records), sorted({record["ep"] for record in records})
    shown = _shown(records)
    with picture(path, height_inches=0.9 + _PANEL_INCHES * len(ranks)) as figure:
        axes = figure.subplots(len(ranks), 2, squeeze=False, sharey=True)
        for line, ep in zip(axes, ranks, strict=True):
            for axis, direction in zip(line, DIRECTIONS, strict=True):
                of = {(r["preset"], r["variant"]): r["tflops"] for r in records if _is(r, ep, direction)}
                _grouped_bars(axis, presets, shown, of, fmt="{:.0f}")
                axis.set_title(f"{direction}, {ep} GPUs", loc="left")
            line[0].set_ylabel("TFLOP/s per GPU")
        _legend(figure, axes[0, 0])
        figure.suptitle(f"A MoE layer on {gpu}s, {records[0]['tokens']} tokens per GPU; more is better", fontsize=10)


def _draw_tokens(records: list[Record], gpu: str, path: str) -> None:
    panels, shown = sorted({_panel(record) for record in records}), _shown(records)
    shown[CEILING] = _CEILING
    with picture(path, height_inches=0.9 + (_PANEL_INCHES + 0.3) * len(panels)) as figure:
        from matplotlib.ticker import LogLocator

        axes = figure.subplots(len(panels), 2, squeeze=False, sharex=True, sharey="row")
        for line, (preset, ep) in zip(axes, panels, strict=True):
            for axis, direction in zip(line, DIRECTIONS, strict=True):
                mine = [r for r in records if r["preset"] == preset and _is(r, ep, direction)]
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
                axis.set_title(f"{preset}, {direction}, {ep} GPUs", loc="left")
                axis.tick_params(axis="x", labelsize=8)
            line[0].set_ylabel("ms")
        for axis in axes[-1]:
            axis.set_xlabel("tokens per GPU")
        _legend(figure, axes[0, 0])
        figure.suptitle(f"Time of a MoE layer on {gpu}s; bands: 10th to 90th percentile", fontsize=10)


def _draw_skew(records: list[Record], gpu: str, path: str) -> None:
    panels, shown = sorted({_panel(record) for record in records}), _shown(records)
    with picture(path, height_inches=0.9 + _PANEL_INCHES * len(panels)) as figure:
        axes = figure.subplots(len(panels), 2, squeeze=False)
        for line, (preset, ep) in zip(axes, panels, strict=True):
            for axis, direction in zip(line, DIRECTIONS, strict=True):
                mine = [r for r in records if r["preset"] == preset and _is(r, ep, direction)]
                skews = [skew for skew in _SKEWS if any(r["skew"] == skew for r in mine)]
                of = {(r["skew"], r["variant"]): r["ms_median"] for r in mine}
                _grouped_bars(axis, skews, shown, of, fmt=_ms)
                axis.set_title(f"{preset}, {direction}, {ep} GPUs, {_count(mine[0]['tokens'])} tokens", loc="left")
            line[0].set_ylabel("ms")
        for axis in axes[-1]:
            axis.set_xlabel("routing")
        _legend(figure, axes[0, 0])
        figure.suptitle(f"Time of a MoE layer on {gpu}s by routing; less is better", fontsize=10)


def _draw_stash(records: list[Record], gpu: str, path: str) -> None:
    panels = _ordered(map(_panel, records))
    with picture(path, height_inches=1.1 + _PANEL_INCHES) as figure:
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, panel in zip(axes, panels, strict=True):
            of = {(r["variant"], r["direction"]): r for r in records if _panel(r) == panel}
            kept = [_kept_bytes(of[variant, "forward"], stash) for variant, stash in _STASHES.items()]
            heap, ordinary = ([sizes[i] / _GIB for sizes in kept] for i in range(2))
            places = range(len(_STASHES))
            axis.bar(places, heap, color=BLUE, label="symmetric heap")
            bars = axis.bar(places, ordinary, bottom=heap, color=SKY, label="ordinary memory")
            times = [sum(of[v, direction]["ms_median"] for direction in DIRECTIONS) for v in _STASHES]
            axis.bar_label(bars, [f"{_ms(time)} ms" for time in times], padding=2, fontsize=7)
            axis.set_xticks(places, list(_STASHES.values()))
            axis.set_xlabel("stash")
            axis.margins(y=0.12)
            axis.set_title(f"{panel[0]}, {panel[1]} GPUs", loc="left")
        axes[0].set_ylabel("GiB per layer, forward to backward")
        _legend(figure, axes[0])
        tokens = _count(records[0]["tokens"])
        figure.suptitle(
            f"What a call keeps for backward ({tokens} tokens per GPU, by `symmoe plan`),\n"
            f"and what a step then takes on {gpu}s (measured, over the bars)",
            fontsize=10,
        )


def _kept_bytes(record: Record, stash: Stash) -> tuple[int, int]:
    """On the heap and in ordinary memory: what one call of a layer keeps, with exact capacity and uniform routing."""
    sizes = {name: record[name] for name in ("hidden", "ffn", "num_experts", "top_k")}
    config = MoEConfig(**sizes, stash=stash)
    plan = plan_memory(config, num_ranks=record["ep"], num_tokens=record["tokens"], dtype=DTYPE)
    return plan.lease_bytes_per_call, plan.activation_bytes_per_call


_PICTURES: dict[str, tuple[Callable[[list[Record]], list[Record]], Callable[[list[Record], str, str], None]]] = {
    "layer": (_choose_layer, _draw_layer),
    "tokens": (_choose_tokens, _draw_tokens),
    "skew": (_choose_skew, _draw_skew),
    "stash": (_choose_stash, _draw_stash),
}

# -- parts of pictures ------------------------------------------------------------------------------------------------


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


def _legend(figure: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)))


def _panel(record: Record) -> Panel:
    return record["preset"], record["ep"]


def _is(record: Record, ep: int, direction: str) -> bool:
    return bool(record["ep"] == ep and record["direction"] == direction)


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
