"""The subcommand `symmoe check`: starts the runs, compares their tensors, and shows the first difference on one
screen."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from symmoe.errors import ArgumentError, first_problem, raise_for
from symmoe.tools.check.compare import Comparison, compare
from symmoe.tools.check.model import BadTarget
from symmoe.tools.check.runs import DTYPES, STAGES, Job, Tensors
from symmoe.tools.doctor.self_test import run_trial
from symmoe.tools.shapes import Options, number

HELP = "whether a model trains on n ranks as on one, and which tensor differs first"
DESCRIPTION = """\
Runs one step of a model on one rank and on several, which are processes on CPUs, with the same weights and tokens, in
fp32 and in --dtype. Compares activations, gradients, clipped gradients, the update, and loaded with saved tensors:

  symmoe check Qwen/Qwen3-30B-A3B --layers 2
  symmoe check train.py:make --ranks 4 --json check.json

The exit status is 0 if they agree, 1 if a tensor differs, 2 if a run has failed. docs/check.md describes the function.
"""


OPTIONS: Options = {
    "target": {
        "help": "a model of transformers, file.py:function, or package.module:function",
    },
    "--ranks": {
        "type": lambda text: number(text, above=1),
        "default": 2,
        "help": "number of ranks to compare with one (%(default)s)",
    },
    "--dtype": {
        "choices": sorted(DTYPES),
        "default": "bf16",
        "help": "dtype of a second comparison beside fp32 (%(default)s)",
    },
    "--layers": {"type": number, "help": "number of layers of a transformers model (all)"},
    "--length": {
        "type": number,
        "default": 32,
        "help": "tokens of a rank, one sequence (%(default)s)",
    },
    "--heap-mib": {
        "type": number,
        "default": 256,
        "help": "MiB of the symmetric heap (%(default)s)",
    },
    "--timeout-s": {
        "type": number,
        "default": 600,
        "help": "limit of each run: of one rank, and of all (%(default)s)",
    },
    "--json": {"metavar": "FILE", "help": "write the findings to FILE"},
}


def run(args: argparse.Namespace) -> int:
    """Runs, compares and prints. Returns the exit status. ArgumentError: the target or the file is invalid."""
    where, failure = args.target.rpartition(":")[0], ""
    is_name = (
        re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(?<!\.py)", args.target) is not None
        or Path(args.target).is_dir()
    )
    raise_for(
        first_problem(
            (
                args.json and not os.access(os.path.dirname(args.json) or ".", os.W_OK),
                f"json ({args.json}) cannot be written: no folder of yours",
            ),
            (
                not (Path(where).is_file() if where.endswith(".py") else where or is_name),
                f"target ({args.target}) is no file with :function, and no name or folder of a model",
            ),
        )
    )
    with tempfile.TemporaryDirectory(prefix="symmoe-check-") as folder:
        job = Job(
            args.target, args.ranks, args.dtype, args.layers, args.length, args.heap_mib, folder
        )
        for num_ranks in (1, args.ranks):
            trial = run_trial(
                num_ranks,
                {"CUDA_VISIBLE_DEVICES": ""},
                deadline_s=args.timeout_s,
                command=(sys.executable, "-m", "symmoe.tools.check.runs"),
                job=job,
            )
            if trial.error == BadTarget.__name__:
                raise ArgumentError(trial.text)
            if trial.error:
                failure = (
                    f"failed, with {num_ranks} rank(s): {trial.error}: {in_options(trial.text)}"
                )
                break
        comparisons = judge(job)
    if not (comparisons or failure):
        failure = "failed: the runs have left nothing to compare"
    differs = any(comparison.text for comparison in comparisons)
    if args.json:
        report = {
            "target": args.target,
            "num_ranks": args.ranks,
            "same": not (differs or failure),
            "failure": failure,
            "tensors": list(map(dataclasses.asdict, comparisons)),
        }
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(render(comparisons, failure), flush=True)
    return 1 if differs else 2 * bool(failure)


def in_options(text: str) -> str:
    """An error's text, with the command's option for the heap's size."""
    return re.sub(
        r"num_bytes=(\d+) \(now (\d+)\)",
        lambda match: "--heap-mib={} (now {})".format(
            *(math.ceil(int(size) / 2**20) for size in match.groups())
        ),
        text,
    )


def judge(job: Job) -> list[Comparison]:
    """The comparisons of all tensors in the files of a job's runs."""

    def saved_stages(dtype: str, num_ranks: int, rank: int) -> dict[str, Tensors]:
        return {
            stage: torch.load(file)
            for stage in STAGES
            if (file := job.file(dtype, num_ranks, rank, stage)).exists()
        }

    dtypes = [*dict.fromkeys(["fp32", job.dtype])]
    references = [saved_stages(dtype, 1, 0) for dtype in dtypes]
    by_rank = [
        [saved_stages(dtype, job.ranks, rank) for rank in range(job.ranks)] for dtype in dtypes
    ]
    return [
        comparison
        for run in zip(dtypes, references, reversed(references), by_rank, strict=True)
        for comparison in compare(*run)
    ]


def render(comparisons: Sequence[Comparison], failure: str) -> str:
    """One screen: by stage, counts of tensors and the one with the largest excess, and the first that differs."""
    head = (
        f"{'':6}{'stage':20}{'compared':>9}{'not':>6}{'differ':>8}{'error':>10}{'allowed':>10}  of"
    )
    stages = itertools.groupby(comparisons, lambda comparison: (comparison.dtype, comparison.stage))
    notes = [
        f"note: {comparison.dtype}, {comparison.stage} of {comparison.name}: {comparison.note}"
        for comparison in comparisons
        if comparison.note
    ]
    different = [
        f"different, first in {comparison.dtype}: {comparison.stage} of {comparison.name}: {comparison.text}"
        for comparison in comparisons
        if comparison.text
    ]
    verdict = failure or "the same: no tensor differs beyond rounding" * (not different)
    lines = [
        *[head] * bool(comparisons),
        *(_stage_line(dtype, stage, list(group)) for (dtype, stage), group in stages),
        *notes[:1],
        *different[:1],
        *[verdict] * bool(verdict),
    ]
    return "\n".join(lines)


def _stage_line(dtype: str, stage: str, comparisons: Sequence[Comparison]) -> str:
    compared = [comparison for comparison in comparisons if comparison.error is not None]
    num_different = sum(bool(comparison.text) for comparison in comparisons)
    worst = max(compared, key=Comparison.excess, default=comparisons[0])
    return (
        f"{dtype:6}{stage:20}{len(compared):9}{len(comparisons) - len(compared):6}{num_different:8}"
        f"{worst.error or 0.0:10.1e}{worst.tolerance:10.1e}  {worst.name}"
    )
