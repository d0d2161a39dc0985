"""Expert load over time as a picture: who got how much, how uneven that is, and what was dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from symmoe.tools.picture import BLUE, GREY, ORANGE, VERMILION, picture
from symmoe.tools.plot.load_log import LayerLoad

MAX_LAYERS = 4
_MAX_COLUMNS = 400  # columns of a heat map: more than its pixels show
_HEAT_INCHES, _LINES_INCHES = 1.9, 1.5
_BRIGHTEST = (2.0, 4.0)  # times the mean: a balanced model shall not look uneven, nor one hot expert hide the others
_ROOM = 1.4  # height of the axis over the highest point, for legends


def draw_load(loads: Sequence[LayerLoad], path: str) -> None:
    """A heat map for each layer (tokens of an expert over the mean of the layer's experts), and below, over all layers,
    the largest and the mean imbalance (largest expert over the mean), experts without a token, and dropped slots.

    Of many layers, heat maps show the MAX_LAYERS whose imbalance is largest on average.

    Raises:
        ArgumentError: matplotlib is not installed, or the path does not end with .png.
    """
    shown = _most_uneven(loads)
    ratios = [_HEAT_INCHES] * len(shown) + [_LINES_INCHES] * 2
    with picture(path, height_inches=0.6 + sum(ratios)) as figure:
        axes = figure.subplots(len(ratios), 1, sharex=True, gridspec_kw={"height_ratios": ratios})
        brightest = float(np.clip(max(np.quantile(over_mean(load), 0.99) for load in shown), *_BRIGHTEST))
        for axis, load in zip(axes, shown, strict=False):
            mesh = _draw_heat(axis, load, brightest)
        figure.colorbar(
            mesh,
            ax=list(axes[: len(shown)]),
            label="tokens of an expert over the mean",
            extend="max",
            fraction=0.03,
            pad=0.01,
            aspect=30 * len(shown),
        )
        about = ["white lines: ranks"] * bool(shown[0].num_ranks)
        about += [f"{len(shown)} of {len(loads)} layers, the most uneven"] * (len(shown) < len(loads))
        axes[0].set_title("; ".join(about), loc="right", fontsize=8)
        _draw_imbalance(axes[-2], loads)
        _draw_counters(axes[-1], loads)
        axes[-1].set_xlabel("step")


def over_mean(load: LayerLoad) -> npt.NDArray[np.float64]:
    """[S, E]: tokens of each expert over the mean of the step; 0 where nothing was counted."""
    tokens = np.array(load.tokens_per_expert, dtype=np.float64)
    over: npt.NDArray[np.float64] = tokens / np.maximum(tokens.mean(1, keepdims=True), 1e-30)
    return over


def imbalance(load: LayerLoad) -> npt.NDArray[np.float64]:
    """[S]: the largest expert over the mean; 1 is even."""
    largest: npt.NDArray[np.float64] = over_mean(load).max(1)
    return largest


def _most_uneven(loads: Sequence[LayerLoad]) -> list[LayerLoad]:
    chosen = sorted(loads, key=lambda load: -float(imbalance(load).mean()))[:MAX_LAYERS]
    return [load for load in loads if load in chosen]


def _draw_heat(axis: Any, load: LayerLoad, brightest: float) -> Any:
    values, steps = over_mean(load), np.array(load.steps, dtype=np.float64)
    width = -(-len(steps) // _MAX_COLUMNS)
    starts = np.arange(0, len(steps), width)
    values = np.add.reduceat(values, starts, axis=0) / np.diff([*starts, len(steps)])[:, None]
    step = (steps[-1] - steps[0]) / max(1, len(steps) - 1) or 1.0
    edges = np.array([*steps[starts], steps[-1] + step]) - step / 2
    experts = np.arange(values.shape[1] + 1) - 0.5
    mesh = axis.pcolormesh(edges, experts, values.T, cmap="cividis", vmin=0.0, vmax=brightest, rasterized=True)
    for rank in range(1, load.num_ranks or 1):
        axis.axhline(rank * values.shape[1] / load.num_ranks - 0.5, color="white", linewidth=0.8)
    axis.set_ylabel("expert")
    axis.set_ylim(values.shape[1] - 0.5, -0.5)
    axis.set_title(load.name, loc="left")
    return mesh


def _draw_imbalance(axis: Any, loads: Sequence[LayerLoad]) -> None:
    uneven = np.stack([imbalance(load) for load in loads])
    axis.plot(loads[0].steps, uneven.max(0), color=VERMILION, linewidth=1.2, label="most uneven layer")
    axis.plot(loads[0].steps, uneven.mean(0), color=BLUE, linewidth=1.2, label="mean of layers")
    axis.axhline(1.0, color=GREY, linewidth=0.8)
    axis.set_ylabel("largest expert\nover the mean")
    axis.set_ylim(0.9, max(2.0, _ROOM * np.max(uneven)))
    axis.legend(loc="upper right", ncols=2)


def _draw_counters(axis: Any, loads: Sequence[LayerLoad]) -> None:
    steps = loads[0].steps
    dead = sum((np.array(load.tokens_per_expert) == 0).sum(1) for load in loads)
    (dead_line,) = axis.plot(steps, dead, color=BLUE, linewidth=1.2, label="experts without a token")
    axis.set_ylabel("experts,\nall layers", color=BLUE)
    axis.set_ylim(0, max(1.0, _ROOM * dead.max()))
    axis.yaxis.get_major_locator().set_params(integer=True)
    lines = [dead_line]
    if all(load.num_dropped is not None for load in loads):
        slots = np.array([np.sum(load.tokens_per_expert, axis=1) for load in loads]).sum(0)
        dropped = np.array([load.num_dropped for load in loads]).sum(0)
        other = axis.twinx()
        other.spines["right"].set_visible(True)
        percent = 100 * dropped / np.maximum(slots, 1)
        lines += other.plot(steps, percent, color=ORANGE, linewidth=1.2, label="dropped slots")
        other.set_ylabel("% of slots", color=ORANGE)
        other.set_ylim(0, max(1.0, _ROOM * percent.max()))
    axis.legend(handles=lines, loc="upper right", ncols=2)
