"""The subcommand `symmoe trace`: a timeline of a step of a layer of known sizes. What it does is in step.py."""

from __future__ import annotations

import argparse

from symmoe.checks.choices import CHOICES
from symmoe.errors import ArgumentError
from symmoe.moe.config import MoEConfig
from symmoe.precision.names import PRECISIONS
from symmoe.tools.bench.command import add_shape_arguments, shapes_of

_CAPACITY_FACTOR = 1.25  # static capacity, in T * K rows: a graph needs one
_DESCRIPTION = """\
Records training steps of one MoELayer, router to gradients, on the ranks that torchrun has started or on one alone:

  torchrun --nproc-per-node=2 -m symmoe trace --preset qwen3-30b --out step.json

On GPUs the step is a CUDA graph: under a profiler the host is slower than the GPU, and an eager step would show it.

Writes step.json (open it in ui.perfetto.dev), step.png and step.txt. docs/timeline.md says how to read them.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `trace` to the subcommands."""
    parser = commands.add_parser(
        "trace",
        help="timeline of a training step: trace, picture, table of exposed times",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_shape_arguments(parser)
    parser.add_argument("--tokens", type=int, default=8192, help="T, tokens of a rank (%(default)s)")
    parser.add_argument("--schedule", choices=("overlapped", "serial"), default="overlapped", help="see MoEConfig")
    parser.add_argument("--precision", choices=PRECISIONS, help="what experts multiply (default: bf16)")
    parser.add_argument(
        "--quantized-wire", choices=CHOICES["quantized_wire"], default="none", help="see MoEConfig (%(default)s)"
    )
    parser.add_argument("--eager", action="store_true", help="the step as the host launches it; always so on CPUs")
    parser.add_argument("--out", default="step.json", metavar="FILE.json", help="the trace (%(default)s)")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    shapes = shapes_of(args)
    if len(shapes) != 1:
        raise ArgumentError(f"preset ({args.preset}) must be one")
    if args.tokens < 1:
        raise ArgumentError(f"tokens ({args.tokens}) must be at least 1")
    from symmoe.timeline.step import trace_layer

    shape = shapes[0]
    config = MoEConfig(
        hidden=shape.hidden,
        ffn=shape.ffn,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
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
