"""What a MetricsLogger has seen: JSON lines, one per step with a record of each layer, or TensorBoard's event files."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
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
    writes them; or a folder of event files that a :func:`tensorboard_sink` has filled. If a step occurs twice (a run
    that continued from a checkpoint), the last one counts. A last line or step that is cut off is left out: a process
    may have ended while it wrote.

    Raises:
        ArgumentError: the file cannot be read, or holds something else; or it takes a package that is not installed.
    """
    if Path(path).is_dir():
        return _loads_of_events(path)
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


_LOAD_TAG = re.compile(r"moe/(.*)/tokens_per_expert/(\d+)")


def _loads_of_events(folder: str | Path) -> list[LayerLoad]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ArgumentError(f"event files in {folder} need TensorBoard: pip install 'symmoe[tensorboard]'") from error
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    num_experts = Counter(match[1] for match in map(_LOAD_TAG.fullmatch, tags) if match)
    if not num_experts:
        raise ArgumentError(f"{folder} holds no event files with moe/../tokens_per_expert/..")

    def series(tag: str) -> dict[int, int]:
        return {event.step: round(event.value) for event in events.Scalars(tag)}

    loads = []
    for name, count in num_experts.items():
        columns = [series(f"moe/{name}/tokens_per_expert/{expert}") for expert in range(count)]
        dropped = series(f"moe/{name}/num_dropped")
        steps = sorted(set(dropped).intersection(*columns))  # the last one may be incomplete
        loads.append(
            LayerLoad(
                name=name,
                steps=tuple(steps),
                tokens_per_expert=tuple(tuple(column[step] for column in columns) for step in steps),
                num_dropped=tuple(dropped[step] for step in steps),
                num_ranks=sum(tag.startswith(f"moe/{name}/tokens_per_rank/") for tag in tags),
            )
        )
    return loads
