"""A timeline of a training step of one MoELayer, router to gradients, on the ranks that torchrun has started or on only
one.

    torchrun --nproc-per-node=2 benchmarks/trace_layer.py --preset qwen3-30b --out step.json

On GPUs the step is a CUDA graph: under a profiler the host is slower than the GPU, and an eager step would show it. Of
a graph's replays a profiler sees the kernels, but not who launched them, and on streams of the graph executor's choice.
So the graph has marks where the forward and the backward pass begin, and kernels get their direction from the marks
before them, their lane from their phase.

Writes step.json (open it in ui.perfetto.dev) and step.txt. docs/timeline.md says how to read them.
"""

from __future__ import annotations

import argparse
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from suites.cases import Case, run_program
from suites.problem import Problem
from suites.reference import Reference
from suites.steps import Choice, Forward, heap_bytes, layer_step

from symmoe import RouterConfig
from symmoe.precision import PRECISIONS
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.timeline.events import Event, Timeline, table
from symmoe.timeline.phases import COMMUNICATION
from symmoe.timeline.recording import record
from symmoe.tools.ranks import WARM_UP, join
from symmoe.tools.shapes import PRESETS, Options, config_options, number, shape_of, shape_options
from symmoe.torch_internals import SLEEP_KERNEL, gpu_sleep

_PROFILED_STEPS = 3  # under the profiler, before what is recorded: its start makes hosts late
_AFTER_MARKS = ("backward", "forward")  # after an even number of marks, after an odd one
_GEMMS = {
    "forward": "FC2",
    "backward": "FC1 dgrad",
}  # one kernel, of experts whose activations are in FC1's


OPTIONS: Options = {
    **shape_options(default=next(iter(PRESETS))),
    "--tokens": {"type": number, "default": 8192, "help": "T, tokens of a rank (%(default)s)"},
    "--schedule": {
        "choices": ("overlapped", "serial"),
        "default": "overlapped",
        "help": "see MoEConfig",
    },
    "--precision": {"choices": PRECISIONS, "help": "what experts multiply (default: bf16)"},
    **config_options(quantized_wire="none"),
    "--eager": {
        "action": "store_true",
        "help": "the step as the host launches it; always so on CPUs",
    },
    "--out": {
        "default": "step.json",
        "metavar": "FILE.json",
        "help": "the trace (%(default)s)",
    },
}


def run(args: argparse.Namespace) -> None:
    """Records the timeline, and writes and prints it."""
    shape = shape_of(args, next(iter(PRESETS)))
    choice = Choice(
        captured=not args.eager and torch.cuda.is_available(),
        precision=None if args.precision is None else PRECISIONS[args.precision],
        options={
            "overflow": "drop",
            "schedule": args.schedule,
            "router": RouterConfig(aux_loss_coef=1e-2),
            "quantized_wire": args.quantized_wire,
        },
    )
    if report := trace_layer(Case(shape, args.tokens, "uniform"), choice, path=args.out):
        print(report, flush=True)


def trace_layer(case: Case, choice: Choice, *, path: str) -> str:
    """Records a step of a layer with its own router, bf16: a replay of the captured step, or as the host launches it.
    Collective. Returns the table on rank 0; "" elsewhere. Raises ArgumentError if there is no such layer, or experts
    cannot be divided among the ranks. choice: has a balance loss."""
    config = choice.config(case.shape, case.num_slots)
    with join() as ranks:
        config.experts_per_rank(ranks.num_ranks)
        problem = Problem(case, ranks)
        num_bytes = heap_bytes(
            case, ranks.num_ranks, max(problem.routing.num_rows), {"layer": choice}
        )
        with SymmetricHeap(num_bytes=num_bytes) as heap:
            torch.manual_seed(0)  # the router is the same on all ranks
            step = layer_step("layer", choice, problem, heap, Reference(problem))
            for _ in range(WARM_UP):
                step.results()
            graph = capture_step(step.forward, step.backward) if choice.captured else None
            replay, finish = (step.results, ()) if graph is None else (graph.replay, (directed,))
            try:
                with record(path, heap, *finish) as recording:
                    for _ in range(_PROFILED_STEPS):
                        replay()
                    recording.start()
                    replay()
            finally:
                del replay, graph
                heap.release_graphs()
            assert recording.timeline is not None
            return table(recording.timeline) if heap.rank == 0 else ""


def capture_step(forward: Forward, backward: Callable[[Any], object]) -> torch.cuda.CUDAGraph:
    """`backward(forward())`, which have run on this device before, as a CUDA graph that marks where each begins.
    Collective if they are; synchronises. Gradients that accumulate do so in every replay."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gpu_sleep(1)
        outputs = forward()
        gpu_sleep(1)
        backward(outputs)
    return graph


def directed(timeline: Timeline) -> Timeline:
    """The events of replays of what :func:`capture_step` returns, with directions from the marks, which are removed,
    and with lanes from their phases: for :func:`symmoe.timeline.record`, as `finish`. Events before the first mark keep
    their direction. FC2 and FC1 dgrad are told apart as a bf16 layer has them."""
    return replace(timeline, ranks=tuple(tuple(_directed(events)) for events in timeline.ranks))


def _directed(events: Sequence[Event]) -> Iterator[Event]:
    """Communication and the rest are in separate lanes; two of a kind that run at the same time get two lanes."""
    # A step does not launch this kernel.
    marks = [event.begin_us for event in events if SLEEP_KERNEL in event.name]
    ends: dict[str, list[float]] = {"compute": [], "communication": []}
    for event in events:
        if SLEEP_KERNEL not in event.name:
            passed = bisect_right(marks, event.begin_us)
            direction = _AFTER_MARKS[passed % 2] if passed else event.direction
            phase = _GEMMS.get(direction, event.phase) if event.phase == "GEMM" else event.phase
            kind = "communication" if phase in COMMUNICATION else "compute"
            free = (number for number, end in enumerate(ends[kind]) if end <= event.begin_us)
            number = next(free, len(ends[kind]))
            ends[kind][number : number + 1] = [event.end_us]
            yield event._replace(
                lane=f"{kind} {number + 1}" if number else kind, direction=direction, phase=phase
            )


main = partial(run_program, __doc__, OPTIONS, run)

if __name__ == "__main__":
    main()
