"""One call of `symmoe bench`: measure or load, print, write, draw, compare."""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.bench import ranks as launch
from symmoe.tools.bench.back_to_back import bench_steps
from symmoe.tools.bench.cases import check_case
from symmoe.tools.bench.gemm import bench_gemm
from symmoe.tools.bench.grouped import bench_grouped
from symmoe.tools.bench.heap_size import heap_bytes
from symmoe.tools.bench.layer import PRECISION, VARIANTS, bench_layer, bench_precision, bench_variants
from symmoe.tools.bench.options import Options
from symmoe.tools.bench.overhead import bench_overhead
from symmoe.tools.bench.problem import Problem, routing_of
from symmoe.tools.bench.rail import bench_rail
from symmoe.tools.bench.ranks import Ranks
from symmoe.tools.bench.records import Record, load, machine, save
from symmoe.tools.bench.regression import compare
from symmoe.tools.bench.run import Run
from symmoe.tools.bench.table import render
from symmoe.tools.bench.trips import bench_combine, bench_dispatch, bench_plan

CASE_SUITES: dict[str, Callable[[Problem, Run], list[Record]]] = {
    "steps": bench_steps,
    "layer": bench_layer,
    "variants": bench_variants,
    "precision": bench_precision,
    "plan": bench_plan,
    "dispatch": bench_dispatch,
    "combine": bench_combine,
    "gemm": bench_gemm,
    "grouped": bench_grouped,
}


def run_session(options: Options) -> int:
    """Collective over the ranks. Returns the exit status: 1 on rank 0 if a check failed."""
    baseline = load(options.check) if options.check else None  # read before an hour of measuring
    if options.load:
        records = [record for path in options.load for record in load(path)]
        print(render(records), flush=True)
        if options.json:
            save(records, options.json)
    else:
        with launch.join() as ranks:
            records = _measure_all(options, ranks)
            if ranks.rank:
                return 0
    if baseline is None:
        return 0
    passed, report = compare(records, baseline)
    print(report, flush=True)
    return 0 if passed else 1


class _Report:
    """The records so far. Rank 0 prints them, and writes them to the file after every suite: a run may be cut off."""

    def __init__(self, options: Options, ranks: Ranks) -> None:
        self.records: list[Record] = []
        self._facts = machine(ranks.device) | {"command": command_line(ranks)}
        self._path, self._speaks = options.json, ranks.rank == 0
        shown = ("gpu", "driver", "torch", "triton", "nvshmem", "commit")
        self.say(", ".join(f"{key} {self._facts[key]}" for key in shown if self._facts[key]))

    def say(self, text: str) -> None:
        if self._speaks:
            print(text, flush=True)

    def add(self, heading: str, records: list[Record]) -> None:
        self.records += [record | self._facts for record in records]
        self.say(f"\n{heading}\n{render(records)}")
        if self._speaks and self._path:
            save(self.records, self._path)


def _measure_all(options: Options, ranks: Ranks) -> list[Record]:
    """The records of all suites, complete on rank 0. Collective."""
    for case in options.cases:
        check_case(case, ranks.num_ranks)
    report = _Report(options, ranks)
    num_bytes = int(options.heap_gib * 2**30) if options.heap_gib else _heap_bytes(options, ranks)
    with SymmetricHeap(num_bytes=num_bytes, ranks_per_node=options.ranks_per_node) as heap:
        run = Run(ranks, heap, options.repetitions)
        for case in options.cases:
            problem = Problem(case, ranks)
            for suite in options.suites:
                if suite in CASE_SUITES:
                    report.add(f"{suite}: {case}", CASE_SUITES[suite](problem, run))
            del problem
            _free(ranks)
        if "overhead" in options.suites:
            report.add("overhead", bench_overhead(run))
        if "rail" in options.suites and heap.spans_nodes:
            report.add("rail", bench_rail(run, options.cases))
        elif "rail" in options.suites:
            report.say("\nrail: not measured, all ranks are on one node; --ranks-per-node cuts it")
    return report.records


def _heap_bytes(options: Options, ranks: Ranks) -> int:
    num_ranks = ranks.num_ranks
    suites = (VARIANTS, PRECISION) if "precision" in options.suites else (VARIANTS,)
    return max(heap_bytes(case, num_ranks, max(routing_of(case, num_ranks).num_rows), suites) for case in options.cases)


def command_line(ranks: Ranks) -> str:
    """How this program was called."""
    program = Path(sys.argv[0]).name
    is_module = program == "__main__.py"
    launcher = [f"torchrun --nproc-per-node={ranks.num_ranks}"] if ranks.num_ranks > 1 else ["python"] * is_module
    return " ".join([*launcher, "-m symmoe" if is_module else program, *map(shlex.quote, sys.argv[1:])])


def _free(ranks: Ranks) -> None:
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
