"""The command `symmoe`.

`symmoe plan` computes the memory of a configuration before any allocation, and its bound on several nodes; `symmoe
doctor` reports whether a machine can run symmoe, and which rank waited for which; `symmoe check` compares n ranks
with one.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Sequence

from symmoe import __version__
from symmoe.errors import ArgumentError
from symmoe.moe.config import RouterConfig
from symmoe.precision import PRECISIONS
from symmoe.tools.check import command as check
from symmoe.tools.check.runs import DTYPES
from symmoe.tools.doctor import command as doctor
from symmoe.tools.shapes import (
    Options,
    add_options,
    config_of,
    config_options,
    number,
    shape_of,
    shape_options,
)
from symmoe.training.memory_plan import MemoryPlan, plan_memory
from symmoe.training.network_plan import NetworkPlan, plan_network
from symmoe.training.precision_choice import (
    AUTO,
    FLOAT8,
    LEAST_SPEED_UP,
    MeasuredLayer,
    best_measured,
    in_full,
)

_PLAN = """\
Computes the memory of a rank that trains MoE layers, before any allocation: bytes of the symmetric heap and of
activations with exact capacity (uniform routing, and the worst) and with a static one. With --nodes: a model of the
bytes and the time of a forward pass on several nodes. The layer is a preset, or of the sizes given:

  symmoe plan --preset qwen3-30b --layout packed --ranks 8 --tokens 8192 --layers 48
  symmoe plan --hidden 2048 --ffn 768 --experts 128 --top-k 8 --ranks 32 --tokens 8192 --nodes 4

docs/layouts.md helps to choose a layout, docs/tuning.md to reduce memory; docs/nodes.md describes the model.
"""
ROWS_SHOWN = (
    ("rows per rank and call", "num_rows"),
    ("packed rows per rank and call", "num_packed_rows"),
    ("heap, whole (num_bytes)", "heap_bytes"),
    ("  held by a call until its backward", "lease_bytes_per_call"),
    ("  during a forward besides", "forward_bytes_per_call"),
    ("  during a backward besides", "backward_bytes_per_call"),
    ("activations of a call", "activation_bytes_per_call"),
    ("activations, all in flight", "activation_bytes"),
    ("a step of one layer, at its peak", "peak_bytes"),
)

TRAFFIC_SHOWN = (
    ("network, a row per slot", "slots"),
    ("network, per rank", "ranks"),
    ("network, per node, exact", "nodes"),
    ("network, per node, fixed size", "fixed"),
    ("NVLink", "link"),
)

_OPTIONS: Options = {
    **shape_options(),
    "--ranks": {
        "type": int,
        "required": True,
        "help": "R, ranks of the expert-parallel group",
    },
    "--tokens": {"type": int, "required": True, "help": "T, tokens of a rank in one call"},
    "--layers": {
        "type": int,
        "default": 1,
        "help": "MoE layers that share the heap (default 1)",
    },
    "--micro-batches": {
        "type": int,
        "default": 1,
        "help": "micro-batches in flight, 1F1B (default 1)",
    },
    "--capacity-factor": {
        "type": lambda text: number(text, float),
        "default": 1.2,
        "help": "static capacity, in T * K rows (default 1.2)",
    },
    **config_options(stash="all", layout="auto", quantized_wire="none", balance="none"),
    "--dtype": {
        "choices": sorted(DTYPES),
        "default": "bf16",
        "help": "of the rows (default bf16)",
    },
    "--precision": {
        "choices": (*PRECISIONS, AUTO),
        "help": f"numbers that experts multiply (default: of --dtype); {AUTO}: float8-block if a layer that is "
        "nowhere larger was faster in it on H200s",
    },
    "--groups": {
        "type": int,
        "default": 1,
        "help": "groups of experts; see num_expert_groups of RouterConfig (default 1)",
    },
    "--topk-groups": {
        "type": int,
        "default": 1,
        "help": "groups that a token may choose from (default 1)",
    },
    "--nodes": {
        "type": int,
        "help": "instead of memory: bytes and time of a forward pass on N nodes",
    },
    "--nic-gbs": {
        "type": float,
        "default": 50.0,
        "help": "GB/s that a rank sends to other nodes (default 50)",
    },
    "--rail-capacity": {"type": int, "help": "see MoEConfig (default: --tokens)"},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # for Python's output at exit
        return 1


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="symmoe", description=__doc__)
    parser.add_argument("--version", action="version", version=f"symmoe {__version__}")
    commands = parser.add_subparsers(required=True)
    for name, text, description, options, run in (
        (
            "plan",
            "bytes of heap and activations, or bytes and time on several nodes, per rank",
            _PLAN,
            _OPTIONS,
            _plan,
        ),
        ("doctor", doctor.HELP, doctor.DESCRIPTION, doctor.OPTIONS, doctor.run),
        ("check", check.HELP, check.DESCRIPTION, check.OPTIONS, check.run),
    ):
        subparser = commands.add_parser(
            name,
            help=text,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_options(subparser, options)
        subparser.set_defaults(run=run)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except ArgumentError as error:
        parser.error(str(error))
    except OSError as error:
        if error.filename is None:
            raise
        parser.error(f"{error.filename}: {error.strerror}")


def _plan(args: argparse.Namespace) -> int:
    exact = config_of(
        shape_of(args),
        stash=args.stash,
        layout=args.layout,
        precision=FLOAT8 if args.precision == AUTO else PRECISIONS.get(args.precision),
        quantized_wire=args.quantized_wire,
        balance=args.balance,
        router=RouterConfig(num_expert_groups=args.groups, topk_groups=args.topk_groups),
    )
    reason = ""
    if args.precision == AUTO:
        layer, speed_up = best_measured(exact, num_ranks=args.ranks, num_tokens=args.tokens)
        reason = f"\n{_reason(layer, speed_up)}\n"
        exact = exact if speed_up >= LEAST_SPEED_UP else in_full(exact)
    static = dataclasses.replace(
        exact,
        capacity=math.ceil(args.capacity_factor * args.tokens * exact.top_k),
        rail_capacity=args.rail_capacity,
    )
    numbers = {"num_ranks": args.ranks, "num_tokens": args.tokens, "dtype": DTYPES[args.dtype]}
    if args.nodes is not None:
        print(_forward(plan_network(static, **numbers, num_nodes=args.nodes, nic_gbs=args.nic_gbs)))
    else:
        numbers |= {"num_layers": args.layers, "num_in_flight": args.micro_batches}
        plans = {
            "exact, uniform": plan_memory(exact, **numbers),
            f"static, {args.capacity_factor:g}": plan_memory(static, **numbers),
            "exact, worst": plan_memory(exact, **numbers, routing="worst"),
        }
        print(_table(plans))
    print(reason, end="")
    return 0


def _forward(plan: NetworkPlan) -> str:
    traffic = {
        f"{name}: {label}": getattr(trip, field)
        for name, trip in (("dispatch", plan.dispatch), ("combine", plan.combine))
        for label, field in TRAFFIC_SHOWN
    }
    lines = [
        f"{'a model, not a measurement; per rank':40}{'rows per token':>16}{'MB':>10}{'us':>10}",
        *(
            f"{label:40}{link.rows:16.2f}{link.num_bytes / 1e6:10.0f}{link.seconds * 1e6:10.0f}"
            for label, link in traffic.items()
        ),
        f"{'GEMMs of the forward pass':40}{plan.exact.gemms_s * 1e6:36.0f}",
        *(
            f"forward, {name}: serial {times.serial_s * 1e6:.0f} us; all hidden {times.hidden_s * 1e6:.0f} us, "
            f"bound by {times.bound}"
            for name, times in (("exact", plan.exact), ("fixed size", plan.fixed))
        ),
        f"a step, default schedule: forward {plan.step_forward_s * 1e6:.0f} us, "
        f"backward {plan.step_backward_s * 1e6:.0f} us",
    ]
    return "\n".join(lines)


def _table(plans: dict[str, MemoryPlan]) -> str:
    lines = [" " * 38 + "".join(f"{name:>20}" for name in plans)]
    for label, field in ROWS_SHOWN:
        values = [getattr(plan, field) for plan in plans.values()]
        shown = [
            _size(value) if field.endswith(("bytes", "_call")) else f"{value}" for value in values
        ]
        lines.append(f"{label:38}" + "".join(f"{text:>20}" for text in shown))
    return "\n".join(lines)


def _reason(layer: MeasuredLayer | None, speed_up: float) -> str:
    """The reason for a precision."""
    if layer is None:
        return f"{AUTO} takes bf16: no layer was measured that is nowhere larger than this one"
    chosen = "float8-block" if speed_up >= LEAST_SPEED_UP else "bf16"
    return (
        f"{AUTO} takes {chosen}: on H200s float8-block was {speed_up:.2f} times as fast for the layer of {layer.name} "
        f"(hidden {layer.hidden}, ffn {layer.ffn}, {layer.rows_per_expert} rows per expert), "
        f"and {LEAST_SPEED_UP:.2f} is the least"
    )


def _size(num_bytes: int) -> str:
    """The number rounded up to tenths of MiB, so that the shown memory is enough."""
    return f"{math.ceil(num_bytes / 2**20 * 10) / 10:.1f} MiB"
