"""`symmoe bench`: measure, print, write. benchmarks/bench.py of a checkout has more suites, by the same arguments."""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from symmoe.errors import ArgumentError
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.bench.cases import PRESETS, SKEWS, Case, add_shape_arguments, config_of, names_of, shapes_of
from symmoe.tools.bench.problem import Problem, routing_of
from symmoe.tools.bench.ranks import Ranks, Run, join
from symmoe.tools.bench.records import Record, machine, render, save
from symmoe.tools.bench.steps import bench_steps, heap_bytes

HELP = "times of the layer, and yardsticks"
DESCRIPTION = """\
Times steps of the layer, and of stock torch in the same run, on the ranks that torchrun has started or on only one:

  torchrun --nproc-per-node=2 -m symmoe bench --preset qwen3-30b --tokens 128,8192 --json out.json

docs/benchmarking.md has the protocol, and what the records mean.
"""


@dataclass(frozen=True)
class Suite:
    """What is measured of a case, and bytes of the heap that it needs, by case, ranks, and the rows of the busiest."""

    bench: Callable[[Problem, Run], list[Record]]
    heap_bytes: Callable[[Case, int, int], int] = heap_bytes


SUITES = {"steps": Suite(bench_steps)}


def add_arguments(parser: argparse.ArgumentParser, suites: Collection[str] = tuple(SUITES)) -> None:
    """Adds what :func:`run` reads."""
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(suites)} (steps)")
    add_shape_arguments(parser, several=True, default=next(iter(PRESETS)))
    parser.add_argument("--tokens", default="8192", help="comma-separated numbers of tokens per rank (8192)")
    parser.add_argument("--skew", default="uniform", help=f"comma-separated routings: {', '.join(SKEWS)} (uniform)")
    parser.add_argument("--repetitions", type=int, default=30, help="of each variant (%(default)s; show none of fewer)")
    parser.add_argument("--heap-gib", type=float, help="GiB of the symmetric heap (what the cases need)")
    parser.add_argument("--ranks-per-node", type=int, help="cuts machines into virtual nodes, see docs/nodes.md")
    parser.add_argument("--json", metavar="FILE", help="write the records to FILE")


def run(args: argparse.Namespace, suites: Mapping[str, Suite] = SUITES) -> int:
    """Measures what the arguments name, on all ranks. Returns the exit status. Raises ArgumentError for what argparse
    does not find, WrongResult if a variant's results are wrong."""
    names = names_of("suite", ",".join(args.suites or SUITES), suites)
    tokens, skews = args.tokens.split(","), names_of("skew", args.skew, SKEWS)
    if wrong := [text for text in tokens if not text.strip().isdecimal() or int(text) < 1]:
        raise ArgumentError(f"tokens ({wrong[0]}) must be comma-separated whole numbers of at least 1")
    shapes = shapes_of(args, next(iter(PRESETS)))
    cases = [Case(shape, count, skew) for shape in shapes for count in map(int, tokens) for skew in skews]
    if args.repetitions < 1:
        raise ArgumentError(f"repetitions ({args.repetitions}) must be greater than 0")
    if args.heap_gib is not None and not 0 < args.heap_gib < 1 << 30:
        raise ArgumentError(f"heap-gib ({args.heap_gib}) must be greater than 0, and less than 2**30")
    if args.json and not os.access(os.path.dirname(args.json) or ".", os.W_OK):  # before an hour of measuring
        raise ArgumentError(f"json ({args.json}) cannot be written: no folder of yours")
    with join() as ranks:
        for shape in shapes:
            config_of(shape).experts_per_rank(ranks.num_ranks)
        facts, records = machine(ranks.device) | {"command": command_line(ranks)}, list[Record]()
        shown = ("gpu", "driver", "torch", "triton", "nvshmem", "commit")
        _say(ranks, ", ".join(f"{key} {facts[key]}" for key in shown if facts[key]))
        num_bytes = int((args.heap_gib or 0) * 2**30) or max(
            suites[name].heap_bytes(case, ranks.num_ranks, max(routing_of(case, ranks.num_ranks).num_rows))
            for case in cases
            for name in names
        )
        with SymmetricHeap(num_bytes=num_bytes, ranks_per_node=args.ranks_per_node) as heap:
            for case in cases:
                problem = Problem(case, ranks)
                for name in names:
                    found = suites[name].bench(problem, Run(ranks, heap, args.repetitions))
                    records += [record | facts for record in found]
                    _say(ranks, f"\n{name}: {case}\n{render(found)}")
                    if ranks.rank == 0 and args.json:  # after every suite: a run may be cut off
                        save(records, args.json)
                del problem
                gc.collect()
                if ranks.device.type == "cuda":
                    torch.cuda.empty_cache()
    return 0


def command_line(ranks: Ranks) -> str:
    """How this program was called."""
    program = Path(sys.argv[0]).name
    is_module = program == "__main__.py"
    launcher = [f"torchrun --nproc-per-node={ranks.num_ranks}"] if ranks.num_ranks > 1 else ["python"] * is_module
    return " ".join([*launcher, "-m symmoe" if is_module else program, *map(shlex.quote, sys.argv[1:])])


def _say(ranks: Ranks, text: str) -> None:
    if ranks.rank == 0:
        print(text, flush=True)
