"""`symmoe doctor`: what this machine can do; `symmoe doctor --read FILE...`: what flight records say."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys

from symmoe.errors import ArgumentError
from symmoe.tools.doctor.findings import Finding, render, worst_level
from symmoe.tools.doctor.flight import diagnose, read_record

_DESCRIPTION = """\
Says on one screen whether this machine can run symmoe and how well: GPUs, links, versions, limits, environment, and a
self-test of heap, dispatch and combine on every GPU (at most 8) or on 2 CPU processes. What stands behind -> helps.
Under torchrun the first process of each node does all that, the others say nothing. With --nodes all processes that
torchrun has started, on several machines or with --ranks-per-node on one, look at what is between them. The exit status
is 1 if there is a problem. docs/doctor.md has all that it looks for.
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
    doctor.add_argument("--nodes", action="store_true", help="look at several nodes and what is between them instead")
    doctor.add_argument("--ranks-per-node", type=int, help="with --nodes: cuts machines into virtual nodes")
    doctor.add_argument("--no-self-test", action="store_true", help="only look; with --nodes, send nothing over rails")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.nodes:
        return _examine_nodes(args)
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
    _tell(findings, args)
    return _status(findings)


def _examine_nodes(args: argparse.Namespace) -> int:
    from symmoe.tools.doctor.nodes import Worker, join_and_examine
    from symmoe.tools.doctor.pairs import LASTS_S

    if args.read:
        raise ArgumentError("--nodes and --read exclude each other")
    if args.ranks_per_node is not None and args.ranks_per_node < 1:
        raise ArgumentError(f"ranks-per-node ({args.ranks_per_node}) must be at least 1")
    names = {"rank": "RANK", "num_ranks": "WORLD_SIZE", "local_rank": "LOCAL_RANK"}
    if missing := [name for name in names.values() if not os.environ.get(name, "").isdigit()]:
        raise ArgumentError(
            f"--nodes needs ranks that torchrun has started: {', '.join(missing)} not set (docs/nodes.md)"
        )
    worker = Worker(**{key: int(os.environ[name]) for key, name in names.items()})
    findings = join_and_examine(
        worker,
        os.environ,
        lambda findings: _tell(findings, args),
        ranks_per_node=args.ranks_per_node,
        lasts_s=None if args.no_self_test else LASTS_S,
    )
    return _status(findings)  # of every process, so that torchrun on every node ends with it


def _tell(findings: list[Finding], args: argparse.Namespace) -> None:
    as_json = {"level": worst_level(findings), "findings": [dataclasses.asdict(finding) for finding in findings]}
    print(json.dumps(as_json, indent=1) if args.json else render(findings), flush=True)


def _status(findings: list[Finding]) -> int:
    return 1 if worst_level(findings) == "problem" else 0


def _read(args: argparse.Namespace) -> int:
    diagnosis = diagnose([read_record(path) for path in args.read])
    print(json.dumps(dataclasses.asdict(diagnosis), indent=1) if args.json else diagnosis.sentence)
    return 0
