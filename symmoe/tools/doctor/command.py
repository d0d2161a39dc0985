"""`symmoe doctor`: what this machine can do; `symmoe doctor --read FILE...`: what flight records say."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys

from symmoe.tools.doctor.findings import render, worst_level
from symmoe.tools.doctor.flight import diagnose, read_record

_DESCRIPTION = """\
Says on one screen whether this machine can run symmoe and how well: GPUs, links, versions, limits, environment, and a
self-test of heap, dispatch and combine on every GPU (at most 8) or on 2 CPU processes. What stands behind -> helps.
Under torchrun the first process of each node does all that, the others say nothing. The exit status is 1 if there is a
problem. docs/doctor.md has all that it looks for.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `doctor` to the command's subparsers."""
    doctor = commands.add_parser(
        "doctor",
        help="whether this machine can run symmoe; who waited for whom when ranks stood still",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument(
        "--read",
        nargs="+",
        metavar="FILE",
        help="make a sentence of the flight records of one job's ranks (SYMMOE_FLIGHT_DIR) instead",
    )
    doctor.add_argument("--no-self-test", action="store_true", help="only look, start no processes of symmoe")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    # torchrun has started one per rank. They would only disturb each other.
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) != "0":
        return 0
    return _read(args) if args.read else _examine(args)


def _examine(args: argparse.Namespace) -> int:
    from symmoe.tools.doctor.checkup import examine, examine_and_try

    environment = dict(os.environ)
    if args.no_self_test:
        findings = examine(environment)
    else:
        print("The self-test takes some 10 s, longer the first time on GPUs...", file=sys.stderr, flush=True)
        findings = examine_and_try(environment)
    level = worst_level(findings)
    as_json = {"level": level, "findings": [dataclasses.asdict(finding) for finding in findings]}
    print(json.dumps(as_json, indent=1) if args.json else render(findings))
    return 1 if level == "problem" else 0


def _read(args: argparse.Namespace) -> int:
    diagnosis = diagnose([read_record(path) for path in args.read])
    print(json.dumps(dataclasses.asdict(diagnosis), indent=1) if args.json else diagnosis.sentence)
    return 0
