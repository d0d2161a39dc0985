"""The subcommand `symmoe check`: starts the runs, compares them, says on one screen what differs first."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from symmoe.errors import ArgumentError
from symmoe.tools.check.compare import Compared, compare
from symmoe.tools.check.model import module_of
from symmoe.tools.check.runs import DTYPES, STAGES, Job
from symmoe.tools.doctor.self_test import run_trial

HELP = "whether a model trains on n ranks as on one, and which tensor differs first"
DESCRIPTION = """\
One step of a model on one rank and on several, which are processes on CPUs, with the same weights and tokens, in fp32
and in --dtype. Compares activations, gradients, what clipping and a step make of them, and weights after save and load:

  symmoe check Qwen/Qwen3-30B-A3B --layers 2
  symmoe check train.py:make --ranks 4 --json check.json

The exit status is 0 if they agree, 1 if a tensor differs, 2 if a run has failed. docs/check.md says what a function is.
"""
NUMBERS = {
    "ranks": (2, 2, "that are compared with one"),
    "layers": (None, 1, "of a model of transformers: only the first"),
    "length": (16, 2, "tokens of a sequence; a rank has two"),
    "heap_mib": (256, 1, "MiB of the symmetric heap"),
    "timeout_s": (600, 1, "for the run of one rank, and for that of all"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what :func:`run` reads."""
    parser.add_argument(
        "target", help="a name or folder of transformers', file.py:function, or package.module:function"
    )
    for name, (default, _, text) in NUMBERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"{text} ({default})")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16", help="in addition to fp32 (%(default)s)")
    parser.add_argument("--copy-weights", action="store_true", help="ranks get the weights of the one rank first")
    parser.add_argument("--json", metavar="FILE", help="write what was found to FILE")


def run(args: argparse.Namespace) -> int:
    """Runs, compares and prints. Returns the exit status. ArgumentError: the target or a number is wrong."""
    for name, (default, least, _) in NUMBERS.items():
        if (value := getattr(args, name)) is not default and value < least:
            raise ArgumentError(f"{name.replace('_', '-')} ({value}) must be at least {least}")
    if args.json and not os.access(os.path.dirname(args.json) or ".", os.W_OK):  # before minutes of running
        raise ArgumentError(f"json ({args.json}) cannot be written: no folder of yours")
    module_of(args.target)
    options = {field.name: getattr(args, field.name) for field in dataclasses.fields(Job) if field.name != "folder"}
    with tempfile.TemporaryDirectory(prefix="symmoe-check-") as folder:
        job = Job(**options, folder=folder)
        command = (sys.executable, "-m", "symmoe.tools.check.runs", f"--job={json.dumps(dataclasses.asdict(job))}")
        failure = ""
        for num_ranks in (1, args.ranks):
            trial = run_trial(num_ranks, {"CUDA_VISIBLE_DEVICES": ""}, deadline_s=args.timeout_s, command=command)
            if trial.error:
                failure = f"the run of {num_ranks} rank{'s' * (num_ranks > 1)} has failed: {trial.error}: {trial.text}"
                break
        tensors = judge(job)
    different = [dataclasses.asdict(each) for each in tensors if each.text]
    if args.json:
        found = {"target": args.target, "num_ranks": args.ranks, "same": not (different or failure), "failure": failure}
        found |= {"stages": stages(tensors), "first": next(iter(different), None), "differences": different}
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(render(tensors, failure), flush=True)
    return 1 if different else 2 * bool(failure)


def judge(job: Job) -> list[Compared]:
    """Compares what the runs of a job have left."""
    found = []
    for dtype in dict.fromkeys(["fp32", job.dtype]):
        one, noisy = job.found(dtype, 1, 0), job.found(dtype, 1, 0, is_noisy=True)
        found += compare(dtype, one, noisy, [job.found(dtype, job.ranks, rank) for rank in range(job.ranks)])
    return found


def stages(tensors: Sequence[Compared]) -> list[dict[str, Any]]:
    """By dtype and stage: numbers of tensors, and the one that is nearest to its tolerance, or exceeds it most."""
    rows = []
    for dtype, stage in dict.fromkeys((each.dtype, stage) for each in tensors for stage in STAGES):
        its = [each for each in tensors if (each.dtype, each.stage) == (dtype, stage)]
        known = [each for each in its if each.error is not None]
        worst = max(known, key=lambda each: (each.error or 0.0) / (each.tolerance or 1.0), default=None)
        row = {"dtype": dtype, "stage": stage, "compared": len(known), "not_compared": len(its) - len(known)}
        rows.append(
            row | {"different": sum(bool(each.text) for each in its), "worst": worst and dataclasses.asdict(worst)}
        )
    return rows


def render(tensors: Sequence[Compared], failure: str) -> str:
    """One screen."""
    lines = [f"{'':6}{'stage':20}{'compared':>9}{'not':>6}{'differ':>8}{'error':>10}{'allowed':>10}  of"]
    for row in stages(tensors):
        counts = f"{row['compared']:9}{row['not_compared']:6}{row['different']:8}"
        worst = row["worst"] or {"error": 0.0, "tolerance": 0.0, "name": ""}
        error = f"{worst['error']:10.1e}{worst['tolerance']:10.1e}  {worst['name']}"
        lines.append(f"{row['dtype']:6}{row['stage']:20}{counts}{error}")
    first = next((each for each in tensors if each.text), None)
    if first is not None:
        lines.append(f"different, first in {first.dtype}: {first.stage} of {first.name}: {first.text}")
    return "\n".join([*lines, failure or "the same: no tensor differs beyond rounding" * (first is None)]).rstrip()
