"""Starts a process per rank for each peer, and turns whatever happens to it into records or a reason."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from symmoe.tools.bench.cases import Case
from symmoe.tools.bench.ranks import Ranks
from symmoe.tools.bench.records import Record

# Name, as in records, to module.
PEERS = {
    "deepep": "symmoe.tools.bench.peers.deepep",
    "liger-cute-kernels": "symmoe.tools.bench.peers.liger",
    "transformer-engine": "symmoe.tools.bench.peers.transformer_engine",
    "torch-nvshmem": "symmoe.tools.bench.peers.torch_nvshmem",
}
_TEXT_BYTES = 1024
_RAISED = re.compile(r"(?:\[rank\d+\]: )?((?:\w+\.)*\w+(?:Error|Exception)(?::.*|$))")
_POLL_S, _GRACE_S = 0.2, 5.0


def measure_peers(
    cases: Sequence[Case],
    suites: Sequence[str],
    ranks: Ranks,
    *,
    repetitions: int,
    timeout_s: float,
    peers: Mapping[str, str] = PEERS,
) -> tuple[list[Record], dict[str, str]]:
    """Records of every peer that can be measured, and by name why the others, or some of their cases, were not.

    Collective. Records are complete only on rank 0. The caller should have freed its GPU memory.

    Args:
        suites: suites to measure.
        timeout_s: limit for all cases of one peer; then its processes are killed.
    """
    records, reasons = [], {}
    for name, module in peers.items():
        problem = import_module(module).find_problem(ranks.device, ranks.num_ranks)
        if problem := _first(problem, ranks):
            reasons[name] = problem
            continue
        found, problem = _measure(module, cases, suites, ranks, repetitions, timeout_s)
        records += found
        if problem:
            reasons[name] = problem
    return records, reasons


def _measure(
    module: str, cases: Sequence[Case], suites: Sequence[str], ranks: Ranks, repetitions: int, timeout_s: float
) -> tuple[list[Record], str]:
    with tempfile.TemporaryDirectory(prefix="symmoe-bench-") as mine:
        folder = Path(_first(mine if ranks.rank == 0 else "", ranks))
        arguments = {
            "module": module,
            "store": folder / "store",
            "out": folder / "records",
            "cases": json.dumps([dataclasses.asdict(case) for case in cases]),
            "suites": ",".join(suites),
            "rank": ranks.rank,
            "num-ranks": ranks.num_ranks,
            "repetitions": repetitions,
        }
        command = [sys.executable, "-m", "symmoe.tools.bench.peers.child"]
        command += [f"--{key}={value}" for key, value in arguments.items()]
        problem = _first(_run(command, Path(mine) / "output", folder / "failed", timeout_s), ranks)
        lines = []
        if (folder / "records").exists():
            written = (folder / "records").read_text(encoding="utf-8").splitlines(keepends=True)
            lines = [line for line in written if line.endswith("\n")]  # the last may have been cut off
        ranks.barrier()  # no folder is deleted before all ranks have read
    return [json.loads(line) for line in lines], problem


def _run(command: list[str], output: Path, failed: Path, timeout_s: float) -> str:
    """Why the process did not succeed, or "". `failed` is a file that tells the other ranks that there is a reason."""
    with output.open("w+", encoding="utf-8", errors="replace") as file:
        # A new session, so that all processes that the peer starts end with it.
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = _wait(process, failed, timeout_s)
        finally:
            _kill(process)
        if status == 0:
            return ""
        if status is None and failed.exists():
            return ""  # it waited for another rank, which tells the reason
        failed.touch()
        if status is None:
            return f"did not end within {timeout_s:g} s"
        file.seek(0)
        lines = [line.strip() for line in file if line.strip()]
    return f"exit status {status}: {_reason(lines)}"


def _wait(process: subprocess.Popen[bytes], failed: Path, timeout_s: float) -> int | None:
    """The exit status; None if it has not ended in time. Others' failures shorten the time: it would wait for them."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            if failed.exists():
                deadline = min(deadline, now + _GRACE_S)
            if now > deadline:
                return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass  # it has ended, and so has everything that it started
    process.wait()


def _reason(lines: list[str]) -> str:
    """The last exception that was printed, else the last line."""
    raised = [match.group(1) for line in lines if (match := _RAISED.match(line))]
    return (raised or lines or ["no output"])[-1]


def _first(text: str, ranks: Ranks) -> str:
    """The first rank's text that is not empty. Collective."""
    return next((each for each in ranks.texts(text, num_bytes=_TEXT_BYTES) if each), "")
