"""The subcommand `symmoe bench`: its arguments. What it does is in session.py, imported when it runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection

from symmoe.errors import ArgumentError
from symmoe.tools.bench.cases import PRESETS, SKEWS, Case, Shape
from symmoe.tools.bench.options import Options

_OF_CASES = ("steps", "layer", "variants", "precision", "plan", "dispatch", "combine", "gemm", "grouped")
SUITES = (*_OF_CASES, "overhead", "rail")
DEFAULT_SUITES = ("steps", "layer", "dispatch", "combine", "gemm", "overhead")
MIN_REPETITIONS = 30  # for figures that are published; fewer are for a first look
_DESCRIPTION = """\
Times the layer and its parts, and yardsticks in the same run, on the ranks that torchrun has started or on only one:

  torchrun --nproc-per-node=2 -m symmoe bench layer dispatch --preset qwen3-30b --tokens 128,8192 --json out.json
  symmoe bench --load out.json --check baseline.json

docs/benchmarking.md has the protocol, and what the records mean.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `bench` to the subcommands."""
    parser = commands.add_parser(
        "bench",
        help="times of the layer and its parts, and yardsticks",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = f"{', '.join(SUITES)} ({', '.join(DEFAULT_SUITES)})"
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=known)
    add_shape_arguments(parser)
    parser.add_argument("--tokens", default="8192", help="comma-separated numbers of tokens per rank (8192)")
    parser.add_argument("--skew", default="uniform", help=f"comma-separated routings: {', '.join(SKEWS)} (uniform)")
    parser.add_argument(
        "--repetitions", type=int, default=MIN_REPETITIONS, help="of every variant (%(default)s; show none of fewer)"
    )
    parser.add_argument("--heap-gib", type=float, help="GiB of the symmetric heap (what the cases need)")
    parser.add_argument("--ranks-per-node", type=int, help="cuts machines into virtual nodes, see docs/nodes.md")
    parser.add_argument(
        "--load", nargs="+", default=[], metavar="FILE", help="take the records of these files instead of measuring"
    )
    parser.add_argument("--json", metavar="FILE", help="write the records to FILE")
    parser.add_argument(
        "--check", metavar="BASELINE.json", help="fail if a ratio to its yardstick dropped by over 10 %%"
    )
    parser.set_defaults(run=run)


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what :func:`shapes_of` reads."""
    parser.add_argument("--preset", help=f"comma-separated names, or all: {', '.join(PRESETS)} (qwen3-30b)")
    parser.add_argument("--hidden", type=int, help="H; with --ffn, --experts and --top-k instead of a preset")
    parser.add_argument("--ffn", type=int, help="I, width of one expert")
    parser.add_argument("--experts", type=int, help="E, experts in all")
    parser.add_argument("--top-k", type=int, help="K, experts per token")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    options = parse_options(args)
    from symmoe.tools.bench.session import run_session

    return run_session(options)


def parse_options(args: argparse.Namespace) -> Options:
    """The options of these arguments. Raises ArgumentError for errors that argparse cannot find."""
    shapes = shapes_of(args)
    tokens = [_number("tokens", text) for text in args.tokens.split(",")]
    skews = _names("skew", args.skew, SKEWS)
    if args.repetitions < 1:
        raise ArgumentError(f"repetitions ({args.repetitions}) must be greater than 0")
    if args.heap_gib is not None and not 0 < args.heap_gib < 1 << 30:
        raise ArgumentError(f"heap-gib ({args.heap_gib}) must be greater than 0, and less than 2**30")
    if args.json and not os.access(os.path.dirname(args.json) or ".", os.W_OK):  # before an hour of measuring
        raise ArgumentError(f"json ({args.json}) cannot be written: no folder of yours")
    return Options(
        suites=_names("suite", ",".join(args.suites or DEFAULT_SUITES), SUITES),
        cases=tuple(Case(shape, count, skew) for shape in shapes for count in tokens for skew in skews),
        repetitions=args.repetitions,
        heap_gib=args.heap_gib,
        ranks_per_node=args.ranks_per_node,
        load=tuple(args.load),
        json=args.json,
        check=args.check,
    )


def shapes_of(args: argparse.Namespace) -> list[Shape]:
    """The layers that the arguments name. Raises ArgumentError for what is unknown or incomplete."""
    sizes = {name: getattr(args, name) for name in ("hidden", "ffn", "experts", "top_k")}
    given = [name for name, value in sizes.items() if value is not None]
    if not given:
        return [PRESETS[name] for name in _names("preset", args.preset or "qwen3-30b", PRESETS)]
    if args.preset is not None:
        raise ArgumentError(f"preset ({args.preset}) and sizes ({', '.join(given)}) exclude each other")
    if len(given) < len(sizes):
        missing = [f"--{name.replace('_', '-')}" for name in sizes if name not in given]
        raise ArgumentError(f"explicit sizes also need {', '.join(missing)}")
    return [Shape("x".join(map(str, sizes.values())), *sizes.values())]


def _names(what: str, text: str, known: Collection[str]) -> tuple[str, ...]:
    names = tuple(known) if text == "all" else tuple(text.split(","))
    for name in names:
        if name not in known:
            raise ArgumentError(f"{what} ({name}) must be of {', '.join(known)}, or all")
    return tuple(dict.fromkeys(names))


def _number(what: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ArgumentError(f"{what} ({text}) must be comma-separated whole numbers") from None
    if value < 1:
        raise ArgumentError(f"{what} ({value}) must be at least 1")
    return value
