"""The subcommand `symmoe trace`: a timeline of a step of a layer of known sizes, router to gradients."""

from __future__ import annotations

import argparse

import torch

from symmoe.errors import ArgumentError
from symmoe.moe.config import MoEConfig
from symmoe.moe.layer import MoELayer
from symmoe.precision.recipes import PRECISIONS
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.timeline.events import table
from symmoe.timeline.recording import capture_step, directed, record
from symmoe.tools.ranks import join
from symmoe.tools.shapes import PRESETS, add_config_arguments, add_shape_arguments, config_of, shape_of
from symmoe.training.memory_plan import plan_memory

_CAPACITY_FACTOR = 1.25  # static capacity, in T * K rows: a graph needs one
_WARM_UP_STEPS = 3
_PROFILED_STEPS = 3  # under the profiler, before what is recorded: its start makes hosts late
_REPLAYED_HEAP = 3  # times an eager step's: a graph's leases do not take over what was freed on other streams
HELP = "timeline of a training step: trace for Perfetto, table of exposed times"
DESCRIPTION = """\
Records training steps of one MoELayer, router to gradients, on the ranks that torchrun has started or on only one:

  torchrun --nproc-per-node=2 -m symmoe trace --preset qwen3-30b --out step.json

On GPUs the step is a CUDA graph: under a profiler the host is slower than the GPU, and an eager step would show it.

Writes step.json (open it in ui.perfetto.dev) and step.txt. docs/timeline.md says how to read them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what :func:`run` reads."""
    add_shape_arguments(parser, default=next(iter(PRESETS)))
    parser.add_argument("--tokens", type=int, default=8192, help="T, tokens of a rank (%(default)s)")
    parser.add_argument("--schedule", choices=("overlapped", "serial"), default="overlapped", help="see MoEConfig")
    parser.add_argument("--precision", choices=PRECISIONS, help="what experts multiply (default: bf16)")
    add_config_arguments(parser, quantized_wire="none")
    parser.add_argument("--eager", action="store_true", help="the step as the host launches it; always so on CPUs")
    parser.add_argument("--out", default="step.json", metavar="FILE.json", help="the trace (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Records, writes and prints. Returns the exit status."""
    shape = shape_of(args, next(iter(PRESETS)))
    if args.tokens < 1:
        raise ArgumentError(f"tokens ({args.tokens}) must be at least 1")
    config = config_of(
        shape,
        capacity=int(_CAPACITY_FACTOR * args.tokens * shape.top_k),
        overflow="drop",
        schedule=args.schedule,
        precision=None if args.precision is None else PRECISIONS[args.precision],
        quantized_wire=args.quantized_wire,
        aux_loss_coef=1e-2,
    )
    if report := trace_layer(config, num_tokens=args.tokens, path=args.out, eager=args.eager):
        print(report, flush=True)
    return 0


def trace_layer(config: MoEConfig, *, num_tokens: int, path: str, eager: bool = False) -> str:
    """Records a step of a layer with random weights, tokens and routing, bf16: a replay of the captured step, or, with
    `eager` and on CPUs, as the host launches it. Collective. Returns the table on rank 0; "" elsewhere. Raises
    ArgumentError if experts cannot be divided among the ranks. config: has a balance loss, and a static capacity if the
    step is captured."""
    with join() as ranks:
        plan = plan_memory(config, num_ranks=ranks.num_ranks, num_tokens=num_tokens, dtype=torch.bfloat16)
        replays = not eager and ranks.device.type == "cuda"
        heap_bytes = plan.heap_bytes * (_REPLAYED_HEAP if replays else 1)
        with SymmetricHeap(num_bytes=heap_bytes) as heap:
            torch.manual_seed(0)  # the router is the same on all ranks
            layer = MoELayer(config, heap, dtype=torch.bfloat16)
            torch.manual_seed(1 + heap.rank)
            x = torch.randn(num_tokens, config.hidden, dtype=torch.bfloat16, device=heap.device, requires_grad=True)
            dy = torch.randn_like(x)

            def forward() -> tuple[torch.Tensor, torch.Tensor]:
                y, metrics = layer(x)
                return y, metrics.aux_loss

            def backward(outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
                # Gradients do not accumulate, which would take additional time.
                torch.autograd.grad(outputs, (x, *layer.parameters()), (dy, torch.ones_like(outputs[1])))

            def step() -> None:
                backward(forward())

            for _ in range(_WARM_UP_STEPS):
                step()
            graph = capture_step(forward, backward) if replays else None
            run, finish = (step, ()) if graph is None else (graph.replay, (directed,))
            try:
                with record(path, heap, *finish) as recording:
                    for _ in range(_PROFILED_STEPS):
                        run()
                    recording.start()
                    run()
            finally:
                del run, graph
                heap.release_graphs()
            assert recording.timeline is not None
            return table(recording.timeline) if heap.rank == 0 else ""
