"""Times of the layer, of its choices and parts, and of grouped modules by themselves, with yardsticks in the same run,
on the ranks that torchrun has started or on only one.

    torchrun --nproc-per-node=2 benchmarks/bench.py --preset qwen3-30b --tokens 128,8192 --json out.json
    torchrun --nproc-per-node=2 benchmarks/bench.py variants dispatch combine --preset qwen3-30b --json out.json
    python benchmarks/bench.py gemm grouped overhead

docs/benchmarking.md has the suites and the protocol, suites/records.py what the records mean; benchmarks/compare.py
shows records again.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from suites.balance import balance_heap_bytes, bench_balance
from suites.cases import SKEWS, Case, names_of, run_program, shapes_of
from suites.deepep import bench_deepep, bench_deepep_trips
from suites.fp8 import bench_fp8
from suites.gemm import bench_gemm
from suites.grouped import bench_grouped
from suites.layer import LAYER, VARIANTS, bench_layer, bench_precision, precision_heap_bytes
from suites.memory import bench_memory
from suites.overhead import bench_overhead
from suites.problem import Problem, routing_of
from suites.rail import bench_rail
from suites.records import Record, measured_on, render, save
from suites.router import bench_router
from suites.steps import bench_steps, heap_bytes
from suites.suspend import bench_suspend
from suites.timing import Run
from suites.trips import bench_combine, bench_dispatch, bench_plan

from symmoe.errors import ArgumentError
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.ranks import Ranks, join
from symmoe.tools.shapes import PRESETS, Options, config_of, number, shape_options


@dataclass(frozen=True)
class Suite:
    """The function that measures a case, and the bytes of the heap that it needs, by case, ranks, and the rows of the
    busiest rank."""

    bench: Callable[[Problem, Run], list[Record]]
    heap_bytes: Callable[[Case, int, int], int] = heap_bytes


def no_heap_bytes(case: Case, num_ranks: int, num_rows: int) -> int:
    """The bytes of a small heap, for suites that use none."""
    return 1 << 20


SUITES = {
    "steps": Suite(bench_steps),
    "layer": Suite(bench_layer, partial(heap_bytes, choices=LAYER)),
    "memory": Suite(bench_memory),
    "variants": Suite(
        partial(bench_layer, choices=VARIANTS, suite="variants"),
        partial(heap_bytes, choices=VARIANTS),
    ),
    "precision": Suite(bench_precision, precision_heap_bytes),
    "plan": Suite(bench_plan),
    "dispatch": Suite(bench_dispatch),
    "combine": Suite(bench_combine),
    "gemm": Suite(bench_gemm),
    "grouped": Suite(bench_grouped),
    "overhead": Suite(bench_overhead),
    "router": Suite(bench_router, no_heap_bytes),
    "fp8": Suite(bench_fp8, no_heap_bytes),
    "rail": Suite(bench_rail),
    "balance": Suite(bench_balance, balance_heap_bytes),
    "suspend": Suite(bench_suspend, lambda *_: 1 << 30),
    "deepep": Suite(bench_deepep, no_heap_bytes),
    "deepep-trips": Suite(bench_deepep_trips, no_heap_bytes),
}


OPTIONS: Options = {
    "suites": {"nargs": "*", "metavar": "SUITE", "help": f"{', '.join(SUITES)} (steps)"},
    **shape_options(default=next(iter(PRESETS)), noun="comma-separated names, or all"),
    "--tokens": {
        "default": "8192",
        "help": "comma-separated numbers of tokens per rank (%(default)s)",
    },
    "--skew": {
        "default": "uniform",
        "help": f"comma-separated routings: {', '.join(SKEWS)} (%(default)s)",
    },
    "--repetitions": {
        "type": number,
        "default": 30,
        "help": "of each variant (%(default)s; show none of fewer)",
    },
    "--heap-gib": {
        "type": partial(number, kind=float),
        "help": "GiB of the symmetric heap (what the cases need)",
    },
    "--ranks-per-node": {
        "type": number,
        "help": "cuts machines into virtual nodes, see docs/nodes.md",
    },
    "--json": {"metavar": "FILE", "help": "write the records to FILE"},
}


def run(args: argparse.Namespace) -> None:
    """Measures the suites and cases of the arguments, on all ranks. Raises ArgumentError for errors that argparse does
    not detect, WrongResult if a variant's results are wrong."""
    names = names_of("suite", ",".join(args.suites or ["steps"]), SUITES)
    tokens = args.tokens.split(",")
    skews = names_of("skew", args.skew, SKEWS)
    if wrong := [text for text in tokens if not text.strip().isdecimal() or int(text) < 1]:
        raise ArgumentError(
            f"tokens ({wrong[0]}) must be comma-separated whole numbers of at least 1"
        )
    shapes = shapes_of(args, next(iter(PRESETS)))
    cases = [
        Case(shape, count, skew) for shape in shapes for count in map(int, tokens) for skew in skews
    ]
    if args.json and not os.access(
        os.path.dirname(args.json) or ".", os.W_OK
    ):  # before an hour of measuring
        raise ArgumentError(f"json ({args.json}) cannot be written: no folder of yours")
    with join() as ranks:
        for shape in shapes:
            config_of(shape).experts_per_rank(ranks.num_ranks)
        facts = measured_on(ranks)
        records = list[Record]()
        _report(
            ranks,
            ", ".join(
                f"{key} {facts[key]}"
                for key in ("gpu", "driver", "torch", "triton", "nvshmem", "commit")
                if facts[key]
            ),
        )
        num_bytes = int((args.heap_gib or 0) * 2**30) or max(
            SUITES[name].heap_bytes(
                case, ranks.num_ranks, max(routing_of(case, ranks.num_ranks).num_rows)
            )
            for case in cases
            for name in names
        )
        with SymmetricHeap(num_bytes=num_bytes, ranks_per_node=args.ranks_per_node) as heap:
            for case in cases:
                problem = Problem(case, ranks)
                for name in names:
                    new_records = SUITES[name].bench(problem, Run(ranks, heap, args.repetitions))
                    records += [record | facts for record in new_records]
                    _report(ranks, f"\n{name}: {case}\n{render(new_records)}")
                    if ranks.rank == 0 and args.json:  # after every suite: a run may be cut off
                        save(records, args.json)
                del problem
                gc.collect()
                if ranks.device.type == "cuda":
                    torch.cuda.empty_cache()


def _report(ranks: Ranks, text: str) -> None:
    if ranks.rank == 0:
        print(text, flush=True)


main = partial(run_program, __doc__, OPTIONS, run)

if __name__ == "__main__":
    main()
