"""The self-test as a whole: starts the ranks, ends them in time, and says what came of it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from symmoe.tools.doctor.findings import Said, about

DEADLINE_S = 180  # most of it is Triton's first compilation of the kernels, if there are GPUs
MAX_GPUS = 8
_RANK = (sys.executable, "-m", "symmoe.tools.doctor.self_test")
_POLL_S = 0.05
_MODEST_LINK, _MODEST_DISPATCH = 0.6, 0.4  # shares of the link's and of the copy's speed; H200s reach 0.8 and 0.7


class Trial(NamedTuple):
    """The result of the self-test: figures as self_test.run returns them, or the type of an exception (or how a process
    ended) and its text (or the last line that the process has printed); seconds until the last process had ended."""

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
        deadline_s: time after which they are killed; None: DEADLINE_S, up to ten times longer on a busy machine.
        command: command of one rank; gets the arguments of self_test.main.
    """
    load_per_core = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    deadline_s = DEADLINE_S * min(10.0, max(1.0, load_per_core)) if deadline_s is None else deadline_s
    variables = {**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "SYMMOE_FLIGHT_DIR": ""}
    variables["TORCHELASTIC_RESTART_COUNT"] = "0"  # which torch asks for
    start, ranks = time.monotonic(), range(num_ranks)
    with tempfile.TemporaryDirectory(prefix="symmoe-doctor-") as folder:
        known = {"store": f"{folder}/store", "num-ranks": num_ranks, "deadline-s": math.ceil(deadline_s) + 1}
        arguments = [known | {"rank": rank, "out": f"{folder}/found-{rank}"} for rank in ranks]
        processes = start_processes(
            "symmoe-doctor",
            command[0],
            {rank: (*command[1:], *(f"--{key}={value}" for key, value in arguments[rank].items())) for rank in ranks},
            dict.fromkeys(ranks, variables),
            DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL),
        )
        try:
            ended = processes.wait(deadline_s, period=_POLL_S)
        finally:
            groups = processes.pids().values()
            processes.close(signal.SIGKILL)
            for group in groups:  # whatever they have started, also those that had ended by themselves
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
        took_s = time.monotonic() - start
        if ended is not None and not ended.is_failed():
            return Trial(num_ranks, took_s, json.loads(Path(folder, "found-0").read_text()))
        failures = {} if ended is None else ended.failures
        return Trial(num_ranks, took_s, None, *_first_error(Path(folder), failures, num_ranks))


@about("self-test")
def check_trial(trial: Trial, *, on_gpus: bool, link_gbs: float | None = None) -> Iterator[Said]:
    """Findings from the self-test.

    Args:
        link_gbs: GB/s of all NVLinks of a GPU in one direction; None is unknown.
    """
    where = "GPU" if on_gpus else "CPU"
    ranks = f"1 rank on a {where}" if trial.num_ranks == 1 else f"{trial.num_ranks} ranks on {where}s"
    figures = trial.figures
    if figures is None:
        yield "problem", f"{ranks}: {trial.error}: {trial.text}", _fix(trial, on_gpus)
        return
    text = f"{ranks}: heap built in {figures['heap_s']:.2g} s; dispatch and combine are exact"
    if "copy_gbs" in figures:
        dispatch, combine, copy = (figures[f"{name}_gbs"] for name in ("dispatch", "combine", "copy"))
        if on_gpus and link_gbs and copy < _MODEST_LINK * link_gbs:
            slow = f"a plain copy to a peer moves {copy:.0f} GB/s of the {link_gbs:.0f} GB/s of its links"
            yield "note", slow, "end what else uses the GPUs; nvidia-smi nvlink -e"
        if on_gpus and dispatch < _MODEST_DISPATCH * copy:
            slow = f"dispatch moves {dispatch:.0f} GB/s, a plain copy {copy:.0f}"
            fix = f"torchrun --nproc-per-node={trial.num_ranks} benchmarks/bench.py dispatch measures it at length"
            yield "note", slow, fix
        link = f" of {link_gbs:.0f}" if on_gpus and link_gbs else ""
        text += f"; dispatch {dispatch:.3g}, combine {combine:.3g}, plain copy {copy:.3g}{link} GB/s per rank"
    yield "ok", f"{text} ({trial.took_s:.0f} s in all)", ""


def _first_error(folder: Path, failures: Mapping[int, ProcessFailure], num_ranks: int) -> tuple[str, str]:
    """The first cause: a rank's own error, else a process's sudden end, else the error of a rank that waited."""
    causes: list[tuple[int, tuple[str, str]]] = []
    for rank in failures or range(num_ranks):
        path = folder / f"found-{rank}"
        found = json.loads(path.read_text()) if path.exists() else {}
        if "error" in found:
            causes.append((2 if found["error"].startswith("Peer") else 0, (found["error"], found["text"])))
            continue
        logs = "".join(log.read_text(errors="replace") for log in sorted(folder.glob(f"**/{rank}/std*.log")))
        last = next((line.strip() for line in reversed(logs.split("\n")) if line.strip()), "it has printed nothing")
        if rank not in failures:
            causes.append((3, (f"rank {rank} did not end in time", last)))
        else:
            code = failures[rank].exitcode
            how = f"ended with status {code}" if code > 0 else f"was ended by {failures[rank].signal_name()}"
            # torch ends the others so, once one has failed.
            causes.append((3 if code == -signal.SIGTERM else 1, (f"rank {rank} {how}", last)))
    return min(causes, key=lambda cause: cause[0])[1]


def _fix(trial: Trial, on_gpus: bool) -> str:
    if "pip install" in trial.text:
        return trial.text[trial.text.index("pip install") :]
    if "SIGKILL" in trial.error or "SIGBUS" in trial.error:
        return "give it memory: end other jobs, or docker run --memory=8g"
    if trial.error == "WrongResult":
        return "symmoe doctor --json > doctor.json, and open an issue with it"
    debug = "NVSHMEM_DEBUG=INFO " if on_gpus else ""
    return f"{debug}torchrun --nproc-per-node=2 examples/dispatch_roundtrip.py shows more"
