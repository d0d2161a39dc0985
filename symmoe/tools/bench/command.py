"""`symmoe bench`: measure, print, write. benchmarks/bench.py of a checkout has more suites, by the same arguments."""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from symmoe.errors import ArgumentError
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.bench.cases import PRESETS, SKEWS, Case, Shape, check_case
from symmoe.tools.bench.layer import LAYER, Choice, bench_layer, heap_bytes
from symmoe.tools.bench.problem import Problem, routing_of
from symmoe.tools.bench.ranks import Ranks, join
from symmoe.tools.bench.records import Record, machine, render, save
from symmoe.tools.bench.steps import bench_steps
from symmoe.tools.bench.timing import Run

MIN_REPETITIONS = 30  # for figures that are published; fewer are for a first look
_DESCRIPTION = """\
Times steps of the layer, and yardsticks in the same run, on the ranks that torchrun has started or on only one:

  torchrun --nproc-per-node=2 -m symmoe bench steps layer --preset qwen3-30b --tokens 128,8192 --json out.json

docs/benchmarking.md has the protocol, and what the records mean.
"""


@dataclass(frozen=True)
class Suite:
    """What is measured of a case, and the choices whose captured steps exist at the same time, which need the most
    memory."""

    bench: Callable[[Problem, Run], list[Record]]
    choices: Mapping[str, Choice] = field(default_factory=lambda: LAYER)


SUITES = {"steps": Suite(bench_steps), "layer": Suite(bench_layer)}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `bench` to the subcommands."""
    parser = commands.add_parser(
        "bench",
        help="times of the layer, and yardsticks",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, SUITES)
    parser.set_defaults(run=lambda args: run(args, SUITES))


def add_arguments(parser: argparse.ArgumentParser, suites: Collection[str]) -> None:
    """Adds what :func:`run` reads."""
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(suites)} (steps, layer)")
    add_shape_arguments(parser)
    parser.add_argument("--tokens", default="8192", help="comma-separated numbers of tokens per rank (8192)")
    parser.add_argument("--skew", default="uniform", help=f"comma-separated routings: {', '.join(SKEWS)} (uniform)")
    parser.add_argument(
        "--repetitions", type=int, default=MIN_REPETITIONS, help="of every variant (%(default)s; show none of fewer)"
    )
    parser.add_argument("--heap-gib", type=float, help="GiB of the symmetric heap (what the cases need)")
    parser.add_argument("--ranks-per-node", type=int, help="cuts machines into virtual nodes, see docs/nodes.md")
    parser.add_argument("--json", metavar="FILE", help="write the records to FILE")


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what :func:`shapes_of` reads."""
    parser.add_argument("--preset", help=f"comma-separated names, or all: {', '.join(PRESETS)} (qwen3-30b)")
    parser.add_argument("--hidden", type=int, help="H; with --ffn, --experts and --top-k instead of a preset")
    parser.add_argument("--ffn", type=int, help="I, width of one expert")
    parser.add_argument("--experts", type=int, help="E, experts in all")
    parser.add_argument("--top-k", type=int, help="K, experts per token")


def shapes_of(args: argparse.Namespace) -> list[Shape]:
    """The layers that the arguments name. Raises ArgumentError for what is unknown or incomplete."""
    sizes = {name: getattr(args, name) for name in ("hidden", "ffn", "experts", "top_k")}
    given = [name for name, value in sizes.items() if value is not None]
    if not given:
        return [PRESETS[name] for name in _names("preset", args.preset or "qwen3-30b", PRESETS)]
    if args.preset is not None:
        raise ArgumentError(f"preset ({args.preset}) and sizes ({', '.join(given)}) exclude each other")
    if len(given) < len(sizes):
        missing = [f"--{name.replace('_', '-')}" for name in sizes if name not in given]
        raise ArgumentError(f"explicit sizes also need {', '.join(missing)}")
    return [Shape("x".join(map(str, sizes.values())), *sizes.values())]


def run(args: argparse.Namespace, suites: Mapping[str, Suite]) -> int:
    """Measures what the arguments name, on all ranks. Returns the exit status.

    Raises:
        ArgumentError: for errors that argparse cannot find.
        WrongResult: a variant's results are wrong.
    """
    names = _names("suite", ",".join(args.suites or SUITES), suites)
    tokens, skews = [_number("tokens", text) for text in args.tokens.split(",")], _names("skew", args.skew, SKEWS)
    cases = [Case(shape, count, skew) for shape in shapes_of(args) for count in tokens for skew in skews]
    if args.repetitions < 1:
        raise ArgumentError(f"repetitions ({args.repetitions}) must be greater than 0")
    if args.heap_gib is not None and not 0 < args.heap_gib < 1 << 30:
        raise ArgumentError(f"heap-gib ({args.heap_gib}) must be greater than 0, and less than 2**30")
    if args.json and not os.access(os.path.dirname(args.json) or ".", os.W_OK):  # before an hour of measuring
        raise ArgumentError(f"json ({args.json}) cannot be written: no folder of yours")
    with join() as ranks:
        for case in cases:
            check_case(case, ranks.num_ranks)
        report = _Report(args.json, ranks)
        num_bytes = int((args.heap_gib or 0) * 2**30) or max(
            heap_bytes(case, ranks.num_ranks, max(routing_of(case, ranks.num_ranks).num_rows), suites[name].choices)
            for case in cases
            for name in names
        )
        with SymmetricHeap(num_bytes=num_bytes, ranks_per_node=args.ranks_per_node) as heap:
            for case in cases:
                problem = Problem(case, ranks)
                for name in names:
                    report.add(f"{name}: {case}", suites[name].bench(problem, Run(ranks, heap, args.repetitions)))
                del problem
                gc.collect()
                if ranks.device.type == "cuda":
                    torch.cuda.empty_cache()
    return 0


class _Report:
    """The records so far. Rank 0 prints them, and writes them to the file after every suite: a run may be cut off."""

    def __init__(self, path: str | None, ranks: Ranks) -> None:
        self._records: list[Record] = []
        self._facts = machine(ranks.device) | {"command": command_line(ranks)}
        self._path, self._speaks = path, ranks.rank == 0
        shown = ("gpu", "driver", "torch", "triton", "nvshmem", "commit")
        self._say(", ".join(f"{key} {self._facts[key]}" for key in shown if self._facts[key]))

    def add(self, heading: str, records: list[Record]) -> None:
        self._records += [record | self._facts for record in records]
        self._say(f"\n{heading}\n{render(records)}")
        if self._speaks and self._path:
            save(self._records, self._path)

    def _say(self, text: str) -> None:
        if self._speaks:
            print(text, flush=True)


def command_line(ranks: Ranks) -> str:
    """How this program was called."""
    program = Path(sys.argv[0]).name
    is_module = program == "__main__.py"
    launcher = [f"torchrun --nproc-per-node={ranks.num_ranks}"] if ranks.num_ranks > 1 else ["python"] * is_module
    return " ".join([*launcher, "-m symmoe" if is_module else program, *map(shlex.quote, sys.argv[1:])])


def _names(what: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    names = tuple(known) if text == "all" else tuple(text.split(","))
    for name in names:
        if name not in known:
            raise ArgumentError(f"{what} ({name}) must be of {', '.join(known)}, or all")
    return tuple(dict.fromkeys(names))


def _number(what: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ArgumentError(f"{what} ({text}) must be comma-separated whole numbers") from None
    if value < 1:
        raise ArgumentError(f"{what} ({value}) must be at least 1")
    return value
