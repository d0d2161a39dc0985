"""What a MetricsLogger has seen, as JSON lines: one per step, with a record for each layer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from symmoe.errors import ArgumentError
from symmoe.training.metrics import LayerRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLoad:
    """One layer over the steps of a log.

    Attributes:
        name: the name of the layer.
        steps: [S], in order.
        tokens_per_expert: [S][E], slots of each expert.
        num_dropped: [S], slots dropped; None where the log does not say.
        num_ranks: the number of ranks of the EP group; None where the log does not say.
    """

    name: str
    steps: tuple[int, ...]
    tokens_per_expert: tuple[tuple[int, ...], ...]
    num_dropped: tuple[int, ...] | None
    num_ranks: int | None


def append_records(path: str | Path, step: int, records: Sequence[LayerRecord]) -> None:
    """Adds a line with what :meth:`MetricsLogger.step` returned. Call it on one rank of an EP group."""
    line = {"step": step, "layers": [dataclasses.asdict(record) for record in records]}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_loads(path: str | Path) -> list[LayerLoad]:
    """The layers of a log, in its order.

    Takes lines of :func:`append_records`, and lines with "step" and "expert_load", [layers][E], as examples/train_lm.py
    writes them. If a step occurs twice (a run that continued from a checkpoint), the last line counts. A last line that
    is cut off is left out: a process may have ended while it wrote.

    Raises:
        ArgumentError: the file cannot be read, or holds something else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"cannot read the log {path}: {error}") from error
    whole = text[: text.rfind("\n") + 1].splitlines()
    try:
        lines = {line["step"]: _layers_of(line) for line in map(json.loads, whole)}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArgumentError(f"{path} is no log of expert loads: {error!r}") from error
    if not lines:
        raise ArgumentError(f"{path} holds no whole line")
    steps = sorted(lines)
    shapes = {tuple((layer["name"], len(layer["tokens_per_expert"])) for layer in layers) for layers in lines.values()}
    if len(shapes) != 1:
        raise ArgumentError(f"{path} holds steps of different models: {len(shapes)} sets of layers and experts")
    return [_layer_load([lines[step][place] for step in steps], steps) for place in range(len(lines[steps[0]]))]


def _layers_of(line: dict[str, Any]) -> list[dict[str, Any]]:
    if "layers" in line:
        layers: list[dict[str, Any]] = line["layers"]
        return layers
    return [{"name": f"layer {i}", "tokens_per_expert": load} for i, load in enumerate(line["expert_load"])]


def _layer_load(over_steps: list[dict[str, Any]], steps: list[int]) -> LayerLoad:
    first = over_steps[0]
    return LayerLoad(
        name=first["name"],
        steps=tuple(steps),
        tokens_per_expert=tuple(tuple(layer["tokens_per_expert"]) for layer in over_steps),
        num_dropped=tuple(layer["num_dropped"] for layer in over_steps) if "num_dropped" in first else None,
        num_ranks=len(first["tokens_per_rank"]) if "tokens_per_rank" in first else None,
    )
