"""The self-test as a whole: starts the ranks, ends them in time, and says what came of it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from symmoe.tools.doctor.findings import Finding

DEADLINE_S = 180  # most of it is Triton's first compilation of the kernels, if there are GPUs
MAX_GPUS = 8
_RANK = (sys.executable, "-m", "symmoe.tools.doctor.self_test")
_POLL_S = 0.05
_GRACE_S = 5.0  # for the other ranks, once one has failed
_MODEST_LINK, _MODEST_DISPATCH = 0.6, 0.4  # shares of the link's and of the copy's speed; H200s reach 0.8 and 0.7
_NOT_FOR_RANKS = ("SYMMOE_FLIGHT_DIR",)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The result of the self-test: figures, or an error.

    Attributes:
        num_ranks: number of ranks that were started.
        figures: as self_test.run returns them.
        error: type of the exception, or how a process ended.
        text: text of the exception, or the last line that the process has printed.
        took_s: from the start of the processes to the end of the last.
    """

    num_ranks: int
    took_s: float
    figures: Mapping[str, float] | None = None
    error: str = ""
    text: str = ""


def run_trial(
    num_ranks: int,
    environment: Mapping[str, str],
    *,
    deadline_s: float | None = None,
    command: Sequence[str] = _RANK,
) -> Trial:
    """Runs the self-test on this machine; all its processes have ended when this returns.

    Args:
        environment: environment of the processes; variables for threads and interfaces are set here.
        deadline_s: time after which they are killed; None: DEADLINE_S, longer on a busy machine.
        command: command of one rank; gets the arguments of self_test.main.
    """
    deadline_s = DEADLINE_S * _slowness() if deadline_s is None else deadline_s
    variables = {name: value for name, value in environment.items() if name not in _NOT_FOR_RANKS}
    variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    start = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="symmoe-doctor-") as name:
        folder = Path(name)
        try:
            for rank in range(num_ranks):
                arguments = {"store": folder / "store", "out": folder / f"found-{rank}", "rank": rank}
                arguments |= {"num-ranks": num_ranks, "deadline-s": math.ceil(deadline_s) + 1}
                with (folder / f"output-{rank}").open("wb") as output:
                    process = subprocess.Popen(
                        [*command, *(f"--{key}={value}" for key, value in arguments.items())],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=variables,
                        start_new_session=True,  # so that whatever it starts ends with it
                    )
                processes.append(process)
            statuses = _wait(processes, start + deadline_s)
        finally:
            for process in processes:
                _kill(process)
        took_s = time.monotonic() - start
        if all(status == 0 for status in statuses):
            return Trial(num_ranks=num_ranks, took_s=took_s, figures=json.loads((folder / "found-0").read_text()))
        error, text = _first_error(folder, statuses)
    return Trial(num_ranks=num_ranks, took_s=took_s, error=error, text=text)


def _slowness() -> float:
    """How many processes want to run on each core, at least 1 and at most 10."""
    try:
        load = os.getloadavg()[0]
    except OSError:
        return 1.0
    return min(10.0, max(1.0, load / len(os.sched_getaffinity(0))))


def check_trial(trial: Trial, *, on_gpus: bool, link_gbs: float | None = None) -> list[Finding]:
    """Findings from the self-test.

    Args:
        link_gbs: GB/s of all NVLinks of a GPU in one direction; None is unknown.
    """
    where = "GPU" if on_gpus else "CPU"
    ranks = f"1 rank on a {where}" if trial.num_ranks == 1 else f"{trial.num_ranks} ranks on {where}s"
    if trial.figures is None:
        text = f"{ranks}: {trial.error}: {trial.text}"
        return [Finding("problem", "self-test", text, _fix(trial, on_gpus))]
    figures, found = trial.figures, []
    text = f"{ranks}: heap built in {figures['heap_s']:.2g} s; dispatch and combine are exact"
    if "copy_gbs" not in figures:
        return [Finding("ok", "self-test", f"{text} ({trial.took_s:.0f} s in all)")]
    dispatch, combine, copy = (figures[f"{name}_gbs"] for name in ("dispatch", "combine", "copy"))
    if on_gpus and link_gbs and copy < _MODEST_LINK * link_gbs:
        slow = f"a plain copy to a peer moves {copy:.0f} GB/s of the {link_gbs:.0f} GB/s of its links"
        found.append(Finding("note", "self-test", slow, "end what else uses the GPUs; nvidia-smi nvlink -e"))
    if on_gpus and dispatch < _MODEST_DISPATCH * copy:
        slow = f"dispatch moves {dispatch:.0f} GB/s, a plain copy {copy:.0f}"
        fix = f"torchrun --nproc-per-node={trial.num_ranks} benchmarks/bench.py dispatch measures it at length"
        found.append(Finding("note", "self-test", slow, fix))
    link = f" of {link_gbs:.0f}" if on_gpus and link_gbs else ""
    speeds = f"dispatch {dispatch:.3g}, combine {combine:.3g}, plain copy {copy:.3g}{link} GB/s per rank"
    return [*found, Finding("ok", "self-test", f"{text}; {speeds} ({trial.took_s:.0f} s in all)")]


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> list[int | None]:
    """The exit statuses; None of ranks that have not ended in time, or soon after one that has failed."""
    has_failed = False
    while True:
        statuses = [process.poll() for process in processes]
        now = time.monotonic()
        if any(statuses) and not has_failed:
            has_failed, deadline = True, min(deadline, now + _GRACE_S)
        if None not in statuses or now > deadline:
            return statuses
        time.sleep(_POLL_S)


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended, and so has everything that it started
    process.wait()


def _first_error(folder: Path, statuses: Sequence[int | None]) -> tuple[str, str]:
    """The first cause: a rank's own error, else a process's sudden end, else the error of a rank that waited."""
    own: list[tuple[str, str]] = []
    missed: list[tuple[str, str]] = []
    ended, late = [], []
    for rank, status in enumerate(statuses):
        path = folder / f"found-{rank}"
        found = json.loads(path.read_text()) if path.exists() else {}
        if "error" in found:
            errors = missed if found["error"].startswith("Peer") else own
            errors.append((found["error"], found["text"]))
        elif status is None:
            late.append((f"rank {rank} did not end in time", _last_line(folder / f"output-{rank}")))
        elif status:
            ended.append((f"rank {rank} {_status(status)}", _last_line(folder / f"output-{rank}")))
    return (own or ended or missed or late)[0]


def _status(returncode: int) -> str:
    if returncode > 0:
        return f"ended with status {returncode}"
    try:
        return f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was ended by signal {-returncode}"


def _last_line(path: Path) -> str:
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it has printed nothing"


def _fix(trial: Trial, on_gpus: bool) -> str:
    if "pip install" in trial.text:
        return trial.text[trial.text.index("pip install") :]
    if "SIGKILL" in trial.error or "SIGBUS" in trial.error:
        return "give it memory: end other jobs, or docker run --memory=8g"
    if trial.error == "WrongResult":
        return "symmoe doctor --json > doctor.json, and open an issue with it"
    if on_gpus:
        return "NVSHMEM_DEBUG=INFO torchrun --nproc-per-node=2 examples/dispatch_roundtrip.py shows more"
    return "torchrun --nproc-per-node=2 examples/dispatch_roundtrip.py shows more"
