"""The command line of the suites. Every case has a number and depends only on that, the seed and the ranks."""

import argparse
import json
import math
import shlex
import signal
import sys
from importlib import import_module
from pathlib import Path

from reliability.launch import Launcher
from reliability.suite import Run, Suite, execute

# Suite to module and what it shows; the numbers of cases are in the modules.
SUITES = {
    "routings": ("random_routings", "random routings against the oracle, bit for bit"),
    "gradients": (
        "gradients",
        "gradients of the layer against the oracle, and the adjoint identity",
    ),
    "determinism": (
        "determinism",
        "the same bits in repeats, with late ranks, and in other processes",
    ),
    "faults": (
        "faults",
        "ranks that are killed, stopped or raise: typed errors in time, and nothing is left",
    ),
    "stalls": ("stalls", "no false timeout when ranks stall up to half the timeout"),
    "fuzz": ("fuzz", "wrong calls: the documented error on every rank, then an exact call"),
    "soak": ("soak", "steps with random sizes: nothing grows"),
    "litmus": (
        "litmus",
        "payload and flags between ranks: no stale read in many, with delays everywhere",
    ),
    "lifecycle": ("lifecycle", "heaps made and closed, jobs one after the other"),
    "checkpoint_kills": (
        "checkpoint_kills",
        "ranks that are killed while they save: the old state or the new one is loaded",
    ),
}


def suite_of(name: str) -> Suite:
    """The suite with that name."""
    return import_module(f"reliability.{SUITES[name][0]}").SUITE


def case_numbers(text: str) -> tuple[int, ...]:
    """The case numbers of "17", or of "17-20", both ends included."""
    first_text, _, last_text = text.partition("-")
    first = int(first_text)
    last = int(last_text or first_text)
    if last < first:
        raise argparse.ArgumentTypeError(
            f"the first case ({first}) must not be after the last one ({last})"
        )
    return tuple(range(first, last + 1))


def main(arguments: list[str] | None = None) -> int:
    """Runs one suite; the exit code is 0 if every case has passed."""
    arguments = sys.argv[1:] if arguments is None else arguments
    shown = "\n".join(f"  {name:16} {purpose}" for name, (_, purpose) in SUITES.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.reliability",
        description=f"suites:\n{shown}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suite", choices=SUITES, metavar="SUITE")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--ranks", type=int, help="processes of the EP group (default: the suite's, mostly 2)"
    )
    parser.add_argument(
        "--cases", type=int, help="how many, from case 0 (default: all that the suite promises)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--case", type=case_numbers, help="only this one, or those from A to B as A-B"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="groups of ranks that share the cases, side by side"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="take no more results after that time"
    )
    parser.add_argument(
        "--patience", type=float, default=1.0, help="times as long as on a machine that is not busy"
    )
    parser.add_argument("--json", type=Path, help="write the record to this file")
    options = parser.parse_args(arguments)
    suite = suite_of(options.suite)
    full = suite.num_cases
    if options.device == "cuda" and suite.num_gpu_cases is not None:
        full = suite.num_gpu_cases
    count = full if options.cases is None else options.cases
    numbers = tuple(range(count)) if options.case is None else options.case
    num_ranks = options.ranks or suite.num_ranks
    run = Run(numbers, num_ranks, options.device, options.seed, options.jobs, options.patience)
    command = shlex.join(["python", "-m", "tests.reliability", *arguments])
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # who stops a suite still gets the record
    with Launcher() as launcher:
        record = execute(
            options.suite, suite, run, launcher, command=command, limit_s=options.seconds
        )
    text = json.dumps(record, indent=1)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return int(record["cases_failed"] > 0 or record["cases_run"] < record["cases_wanted"])
