"""All suites: that of `symmoe bench`, the layer and its choices, its parts, and grouped modules by themselves.

    torchrun --nproc-per-node=2 benchmarks/bench.py variants dispatch combine --preset qwen3-30b --json out.json
    python benchmarks/bench.py gemm grouped overhead

docs/benchmarking.md has the suites, the protocol, and what the records mean; benchmarks/compare.py shows records again.
"""

import argparse
import functools
import sys

from suites.figures import of_choice, of_step
from suites.gemm import bench_gemm
from suites.grouped import bench_grouped
from suites.layer import LAYER, bench_layer
from suites.memory import bench_memory
from suites.overhead import bench_overhead
from suites.rail import bench_rail
from suites.trips import bench_combine, bench_dispatch, bench_plan
from suites.variants import bench_precision, bench_variants, precision_heap_bytes, variants_heap_bytes

from symmoe.errors import ArgumentError
from symmoe.tools.bench import command
from symmoe.tools.bench.command import Suite
from symmoe.tools.bench.steps import bench_steps, heap_bytes

SUITES = {
    "steps": Suite(functools.partial(bench_steps, figures_of=of_step)),
    "layer": Suite(functools.partial(bench_layer, more=of_choice), functools.partial(heap_bytes, choices=LAYER)),
    "memory": Suite(bench_memory),
    "variants": Suite(bench_variants, variants_heap_bytes),
    "precision": Suite(bench_precision, precision_heap_bytes),
    "plan": Suite(bench_plan),
    "dispatch": Suite(bench_dispatch),
    "combine": Suite(bench_combine),
    "gemm": Suite(bench_gemm),
    "grouped": Suite(bench_grouped),
    "overhead": Suite(bench_overhead),
    "rail": Suite(bench_rail),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_arguments(parser, SUITES)
    try:
        return command.run(parser.parse_args(arguments), SUITES)
    except ArgumentError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
