"""Draws the load of the experts of a run: `python examples/plot_load.py runs/lm/metrics.jsonl load.png`.

A heat map of each layer (tokens of an expert over the mean of the layer's experts), and below, over all layers, the
largest expert over the mean, the entropy of the load (1: equal, 0: one expert has every slot), experts without a
token, and dropped slots; if the log has them, the gate mass of the least used expert over its load (a small value: an
expert is chosen, and adds little), and with replicas the largest rank over the mean, before and after rows have
moved. The log has a line for every step: {"step", "expert_load": [layers][experts]} as train_lm.py writes them, with
replicas also "balanced_per_rank": [layers][ranks], or {"step", "layers": records} with the results of
`MetricsLogger.step` as dictionaries. If a restart has repeated a step, its last line counts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

MAX_LAYERS = 4  # with heat maps of their own: the most uneven ones
MAX_COLUMNS = 400  # of a heat map: more than its pixels show
BLUE, VERMILION, GREY = "#0072b2", "#d55e00", "#666666"


class Log(NamedTuple):
    """What a log has, of L layers and S steps."""

    steps: list[int]
    names: list[str]  # of the layers
    loads: list[np.ndarray]  # tokens per expert of each layer, [S, E]
    dropped: np.ndarray | None  # slots [S]
    ranks: np.ndarray  # of_ranks of each step, [S, L, 2], or empty
    masses: list[np.ndarray]  # gate mass of each layer, [S, E], or empty


def read_log(path: Path) -> Log:
    """The log in a file. An incomplete last line is ignored."""
    text = path.read_text(encoding="utf-8")
    by_step = {
        line["step"]: line for line in map(json.loads, text[: text.rfind("\n") + 1].splitlines())
    }
    if not by_step:
        raise ValueError(f"{path} holds no whole line")
    lines = [by_step[step] for step in sorted(by_step)]
    ranks = [of_ranks(line) for line in lines]
    ranks = np.array(ranks if all(ranks) else [])
    if "expert_load" in lines[0]:
        layers = [
            np.array(of_layer)
            for of_layer in zip(*(line["expert_load"] for line in lines), strict=True)
        ]
        names = [f"layer {i}" for i in range(len(layers))]
        return Log(sorted(by_step), names, layers, None, ranks, masses=[])
    records = list(zip(*(line["layers"] for line in lines), strict=True))  # by layer
    loads = [np.array([record["tokens_per_expert"] for record in of_layer]) for of_layer in records]
    dropped = sum(np.array([record["num_dropped"] for record in of_layer]) for of_layer in records)
    masses = [
        np.array([record["gate_mass"] for record in of_layer])
        for of_layer in records
        if all(record.get("gate_mass") for record in of_layer)
    ]
    names = [of_layer[0]["name"] for of_layer in records]
    return Log(
        sorted(by_step), names, loads, dropped, ranks, masses if len(masses) == len(loads) else []
    )


def shares_of(load: np.ndarray) -> np.ndarray:
    """Each expert's share of a layer's slots, or of its gate mass, [S, E]."""
    return load / np.maximum(load.sum(1, keepdims=True), 1e-30)


def entropy_of(load: np.ndarray) -> np.ndarray:
    """The entropy of a layer's load [S], over that of an equal load."""
    shares = shares_of(load)
    logarithms = np.log(np.where(shares > 0, shares, 1))
    return -(shares * logarithms).sum(1) / max(np.log(load.shape[1]), 1e-30)


def mass_over_load(load: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """The least ratio of an expert's share of the gate mass and its share of the slots, [S]."""
    shares = shares_of(load)
    ratios = shares_of(mass) / np.where(shares > 0, shares, 1)
    return np.where(shares > 0, ratios, np.inf).min(1)


def of_ranks(line: dict) -> list[list[float]]:
    """The largest rank over the mean, before and after balance, for each layer with replicas of a step."""
    if "layers" in line:
        loads = [
            (record["tokens_per_expert"], record.get("balanced_per_rank"))
            for record in line["layers"]
        ]
    else:
        loads = list(zip(line["expert_load"], line.get("balanced_per_rank", []), strict=False))
    pairs = [
        (np.reshape(load, (len(after), -1)).sum(1), np.array(after))
        for load, after in loads
        if after
    ]
    return [[float(rows.max() / max(rows.mean(), 1e-30)) for rows in pair] for pair in pairs]


def draw(log: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps, names, loads, dropped, ranks, masses = read_log(log)
    over_mean = [load / np.maximum(load.mean(1, keepdims=True), 1e-30) for load in loads]
    uneven = np.stack([ratio.max(1) for ratio in over_mean])
    shown = sorted(np.argsort(-uneven.mean(1), kind="stable")[:MAX_LAYERS])
    ratios = [1.9] * len(shown) + [1.5] * (4 if ranks.size else 3)
    figure, axes = plt.subplots(
        len(ratios),
        figsize=(8, 0.6 + sum(ratios)),
        sharex=True,
        height_ratios=ratios,
        layout="constrained",
    )
    # A balanced model must not look uneven, and one hot expert must not hide the others.
    brightest = float(np.clip(max(np.quantile(over_mean[i], 0.99) for i in shown), 2, 4))
    width = -(-len(steps) // MAX_COLUMNS)
    starts = np.arange(0, len(steps), width)
    edges = np.array([*(steps[start] for start in starts), steps[-1] + 1]) - 0.5
    for axis, i in zip(axes, shown, strict=False):
        means = np.add.reduceat(over_mean[i], starts) / np.diff([*starts, len(steps)])[:, None]
        experts = np.arange(means.shape[1] + 1) - 0.5
        mesh = axis.pcolormesh(edges, experts, means.T, cmap="cividis", vmin=0, vmax=brightest)
        axis.set(ylabel="expert", ylim=(means.shape[1] - 0.5, -0.5))
        axis.set_title(names[i], loc="left", fontsize=9)
    figure.colorbar(
        mesh, ax=list(axes[: len(shown)]), label="tokens of an expert over the mean", extend="max"
    )
    of_experts = axes[len(shown)]
    of_experts.plot(steps, uneven.max(0), color=VERMILION, label="most uneven layer")
    of_experts.plot(steps, uneven.mean(0), color=BLUE, label="mean of layers")
    of_experts.set(ylabel="largest expert\nover the mean", ylim=(0.9, None))
    entropies = np.stack([entropy_of(load) for load in loads])
    health = axes[len(shown) + 1]
    health.plot(steps, entropies.min(0), color=VERMILION, label="entropy, most uneven layer")
    health.plot(steps, entropies.mean(0), color=BLUE, label="mean of layers")
    if masses:
        min_ratio = np.min([mass_over_load(*pair) for pair in zip(loads, masses, strict=True)], 0)
        health.plot(steps, min_ratio, color=GREY, label="gate mass over load, least expert")
    health.set(ylabel="health\nof routing", ylim=(0, 1.05))
    if ranks.size:
        before, after = ranks.max(1).T
        axes[-2].plot(steps, before, color=VERMILION, label="before balance, most uneven layer")
        axes[-2].plot(steps, after, color=BLUE, label="after")
        axes[-2].set(ylabel="largest rank\nover the mean", ylim=(0.9, None))
    axes[-1].plot(
        steps,
        sum((load == 0).sum(1) for load in loads),
        color=BLUE,
        label="experts without a token",
    )
    if dropped is not None:
        percent = 100 * dropped / np.maximum(sum(load.sum(1) for load in loads), 1)
        axes[-1].plot(steps, percent, color=VERMILION, label="dropped slots, %")
    axes[-1].set(xlabel="step", ylim=(0, None))
    for axis in axes[len(shown) :]:
        axis.legend(loc="best", ncols=2, fontsize=8)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
