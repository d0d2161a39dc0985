"""`symmoe doctor`: checks this machine; `symmoe doctor --read FILE...`: diagnoses flight records."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping

from symmoe.errors import ArgumentError
from symmoe.tools.doctor.findings import Finding, render, worst_level
from symmoe.tools.doctor.flight import diagnose, read_record
from symmoe.tools.doctor.gpus import ask, check_gpus, check_links, read_gpus
from symmoe.tools.doctor.machine import check_environment, check_limits, check_system, read_system
from symmoe.tools.doctor.self_test import MAX_GPUS, check_trial, run_trial
from symmoe.tools.doctor.versions import check_versions, read_versions
from symmoe.tools.shapes import Options, number

HELP = "whether this machine can run symmoe; after a hang, which ranks waited for which"
DESCRIPTION = """\
Reports on one screen whether this machine can run symmoe and how well: GPUs, links, versions, limits, environment, and
a self-test of heap, dispatch and combine on every GPU (at most 8) or on 2 CPU processes. The text after -> is the fix.
Under torchrun the first process of each node does the checks, the others print nothing. With --nodes all processes of
torchrun, on several machines or with --ranks-per-node on one, check the connections between them. The exit status is 1
if there is a problem. docs/doctor.md lists all checks.
"""

OPTIONS: Options = {
    "--read": {
        "nargs": "+",
        "metavar": "FILE",
        "help": "instead, explain the flight records of one job's ranks (SYMMOE_FLIGHT_DIR)",
    },
    "--nodes": {
        "action": "store_true",
        "help": "instead, check several nodes and their connections",
    },
    "--ranks-per-node": {
        "type": number,
        "help": "with --nodes: divides machines into virtual nodes",
    },
    "--no-self-test": {
        "action": "store_true",
        "help": "without the self-test; with --nodes, without traffic over rails",
    },
    "--json": {"action": "store_true", "help": "print the findings as JSON"},
}


def run(args: argparse.Namespace) -> int:
    """Runs the command and prints its findings. Returns the exit status."""

    def publish(findings: list[Finding]) -> None:
        as_json = {
            "level": worst_level(findings),
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        print(json.dumps(as_json, indent=1) if args.json else render(findings), flush=True)

    if args.nodes:
        from symmoe.tools.doctor.nodes import join_and_examine

        if args.read:
            raise ArgumentError("--nodes and --read exclude each other")
        findings = join_and_examine(
            os.environ, publish, args.ranks_per_node, sends=not args.no_self_test
        )
        # Every process returns the status, so that torchrun on every node does.
        return int(worst_level(findings) == "problem")
    # torchrun has started a process per rank: self-tests of several would disturb each other.
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) != "0":
        return 0
    if args.read:
        diagnosis = diagnose([read_record(path) for path in args.read])
        print(
            json.dumps(dataclasses.asdict(diagnosis), indent=1) if args.json else diagnosis.sentence
        )
        return 0
    if not args.no_self_test:
        print(
            "The self-test takes some 10 s, longer the first time on GPUs...",
            file=sys.stderr,
            flush=True,
        )
    findings = examine(dict(os.environ), self_test=not args.no_self_test)
    publish(findings)
    return int(worst_level(findings) == "problem")


def examine(environment: Mapping[str, str], *, self_test: bool) -> list[Finding]:
    """Checks this machine, and runs the self-test: on up to 8 GPUs, one process each, else on 2 CPU processes."""
    system, versions, smi = read_system(environment), read_versions(), ask()
    gpus, visible = read_gpus(smi), environment.get("CUDA_VISIBLE_DEVICES")
    has_gpu, used = bool(gpus.gpus), [smi.index_of(gpu) for gpu in gpus.gpus]
    links = {index: link for index, link in smi.links.items() if index in used}
    findings = [
        *check_system(system, has_gpu=has_gpu),
        *check_versions(versions, has_gpu=has_gpu),
        *check_gpus(gpus, smi, torch_cuda=versions.torch_cuda, visible=visible),
        *check_links(gpus.pairs, links, visible=visible),
        *check_limits(system, has_gpu=has_gpu),
        *check_environment(environment, has_gpu=has_gpu, num_cores=system.num_cores),
    ]
    if self_test:
        slowest = min((link.gbs for link in links.values()), default=0.0) if len(links) > 1 else 0.0
        findings += check_trial(
            run_trial(min(len(gpus.gpus), MAX_GPUS) or 2, environment),
            on_gpus=has_gpu,
            link_gbs=slowest or None,
        )
    return findings
