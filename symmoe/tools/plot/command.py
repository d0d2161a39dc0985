"""The subcommand `symmoe plot`: `plot load` for expert loads, `plot bench` for what was measured."""

from __future__ import annotations

import argparse

from symmoe.errors import ArgumentError
from symmoe.tools.bench.records import load as load_records


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `plot` to the subcommands."""
    kinds = commands.add_parser("plot", help="pictures of logged expert loads and of benchmark records").add_subparsers(
        required=True
    )
    load = kinds.add_parser("load", help="tokens per expert over time, imbalance, drops")
    load.add_argument(
        "log",
        metavar="LOG",
        help="FILE.jsonl of symmoe.tools.plot.load_log.append_records or of the example job; or TensorBoard's folder",
    )
    load.add_argument("--layer", action="append", metavar="NAME", help="only this layer; may be given several times")
    load.add_argument("--png", required=True, metavar="OUT.png", help="the picture")
    load.set_defaults(run=_plot_load)
    bench = kinds.add_parser("bench", help="TFLOP/s, time over tokens, time by routing: a picture for each")
    bench.add_argument("records", nargs="+", metavar="FILE.json", help="written by `symmoe bench --json`")
    bench.add_argument("--out", required=True, metavar="FOLDER", help="where the pictures go")
    bench.set_defaults(run=_plot_bench)


def _plot_load(args: argparse.Namespace) -> int:
    from symmoe.tools.plot.load import draw_load
    from symmoe.tools.plot.load_log import read_loads

    loads = read_loads(args.log)
    if args.layer:
        names = [load.name for load in loads]
        for name in args.layer:
            if name not in names:
                raise ArgumentError(f"layer ({name}) is not in {args.log}, which has {', '.join(names)}")
        loads = [load for load in loads if load.name in args.layer]
    draw_load(loads, args.png)
    return 0


def _plot_bench(args: argparse.Namespace) -> int:
    from symmoe.tools.plot.bench import draw_benchmarks

    records = [record for path in args.records for record in load_records(path)]
    print("\n".join(draw_benchmarks(records, args.out)))
    return 0
