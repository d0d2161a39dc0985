"""What the scripts for one GPU share: layer sizes, arguments, times of calls in turn, and the record."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from suites.machine import machine

WARM_UP = 5  # calls


def parser_of(doc: str, shapes: Iterable[str]) -> argparse.ArgumentParser:
    """The arguments that all scripts have."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=[*shapes], default=[*shapes], help="(all)")
    parser.add_argument("--repetitions", type=int, default=30, help="of every way (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results to FILE")
    return parser


def medians_in_turn_ms(ways: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Median milliseconds of one call of each, one after the other again and again: heat slows all alike."""
    for way in ways.values():
        for _ in range(WARM_UP):
            way()
    times: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in ways}
    for _ in range(repetitions):
        for name, way in ways.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            way()
            end.record()
            times[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) for start, end in pairs)
        for name, pairs in times.items()
    }


def write(path: Path | None, results: object, device: torch.device) -> None:
    """The results with where and how they were measured, as JSON, if there is a path."""
    if path is not None:
        record = {
            "env": machine(device) | {"command": " ".join(["python", *sys.argv])},
            "results": results,
        }
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
