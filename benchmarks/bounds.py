"""What bounded waits cost: steps whose kernels look at the clock while they wait and steps whose kernels do not.

    torchrun --nproc-per-node=2 benchmarks/bounds.py [--preset qwen3-30b] [--json bounds.json]

Eager and replayed steps with a bound of `timeout_s` and with none (math.inf), interleaved, in one run, as
docs/benchmarking.md says. Every result is checked first. Without a bound a lost rank leaves the others spinning: run it
under `timeout`.
"""

import argparse
import math
import sys

from symmoe.moe.ep_step import expert_parallel_mlp
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tools.bench.cases import PRESETS, Case
from symmoe.tools.bench.layer import Step, heap_bytes, make_experts
from symmoe.tools.bench.problem import Problem
from symmoe.tools.bench.ranks import join
from symmoe.tools.bench.records import case_record, machine, render, save
from symmoe.tools.bench.reference import Reference
from symmoe.tools.bench.timing import DIRECTIONS, Run, Variant

BOUNDS_S = {"bounded": 120.0, "unbounded": math.inf}


def variants(problem: Problem, run: Run) -> list[Variant]:
    """Every step with every bound."""
    experts, reference = make_experts(problem), Reference(problem)
    x, probs, *_ = problem.inputs
    inputs = (x, probs, experts.fc1.weight, experts.fc2.weight)

    def forward_of(timeout_s: float):
        def forward():
            run.heap.timeout_s = timeout_s  # kernels of this step and of its backward pass are launched with it
            return expert_parallel_mlp(x, probs, experts, run.plan(problem, problem.static_capacity))

        return forward

    makers = {"eager": Step.eager} | ({"graph": Step.captured} if problem.device.type == "cuda" else {})
    return [
        make(Step(f"{kind}, {name}", forward_of(timeout_s), inputs, problem.tokens.dy, reference.step_error))
        for kind, make in makers.items()
        for name, timeout_s in BOUNDS_S.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3-30b", choices=PRESETS)
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank")
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--json", help="where to write the records")
    options = parser.parse_args()
    with join() as ranks:
        case = Case(PRESETS[options.preset], options.tokens, "uniform")
        problem = Problem(case, ranks)
        num_bytes = heap_bytes(case, ranks.num_ranks, max(problem.routing.num_rows))
        with SymmetricHeap(num_bytes=num_bytes, timeout_s=BOUNDS_S["bounded"]) as heap:
            run = Run(ranks, heap, options.repetitions)
            timed = variants(problem, run)
            times, errors = run.measure(timed)
            heap.timeout_s = BOUNDS_S["bounded"]
            del timed  # the graphs, before their memory goes
            heap.release_graphs()
        facts = machine(ranks.device) | {"command": " ".join(sys.argv)}
        records = [
            case_record(problem, "bounds", name, direction, taken[:, column], error=errors[name]) | facts
            for name, taken in times.items()
            for column, direction in enumerate(DIRECTIONS)
        ]
        if ranks.rank == 0:
            print(render(records))
            if options.json:
                save(records, options.json)


if __name__ == "__main__":
    main()
