"""One peer on one rank, in a separate process: `python -m symmoe.tools.bench.peers.child`. run.py starts it.

Writes records, or why there are none, to a file of JSON lines, so that measurements before a crash are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module

from symmoe.tools.bench import ranks as launch
from symmoe.tools.bench.cases import Case, Shape
from symmoe.tools.bench.problem import Problem
from symmoe.tools.bench.records import gbs, tflops
from symmoe.tools.bench.run import case_record
from symmoe.tools.bench.timing import clock_for, measure, verify


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="symmoe.tools.bench.peers.child", description=__doc__)
    for name in ("module", "store", "out", "cases", "suites"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("rank", "num-ranks", "repetitions"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args(argv)
    cases = [Case(Shape(**case.pop("shape")), **case) for case in json.loads(args.cases)]
    with launch.join(f"file://{args.store}", args.rank, args.num_ranks) as ranks:
        run_peer(args, cases, ranks)
    return 0


def run_peer(args: argparse.Namespace, cases: list[Case], ranks: launch.Ranks) -> None:
    """Measures every case, each variant by itself."""
    module = import_module(args.module)
    opened = module.open_peer(cases, ranks)
    suites = args.suites.split(",")
    for case in cases:
        problem = Problem(case, ranks)
        for measured in module.make_variants(problem, ranks, opened):
            suite, variant = measured.suite, measured.variant
            if suite not in suites:
                continue
            wire_bytes = int(ranks.largest(measured.leaving_bytes)) or None
            error = verify(variant, ranks)
            align = ranks.align if suite == "layer" else ranks.align_ahead
            clock = clock_for(ranks.device)
            times = measure([variant], ranks, clock, repetitions=args.repetitions, align=align)[variant.name]
            for column, direction in enumerate(variant.directions):
                taken = times[:, column]
                figures = {"error": error, "wire_bytes": wire_bytes, "wire_gbs": gbs(wire_bytes, taken)}
                if suite == "layer":
                    figures["tflops"] = tflops((1 + column) * case.forward_flops, taken)
                record = case_record(problem, suite, variant.name, direction, taken, **figures)
                if ranks.rank == 0:
                    with open(args.out, "a", encoding="utf-8") as file:
                        print(json.dumps(record), file=file)


if __name__ == "__main__":
    sys.exit(main())
