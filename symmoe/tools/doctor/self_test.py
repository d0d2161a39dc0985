"""The self-test: :func:`run_trial` starts ranks, ends them in time, and returns the result; `python -m
symmoe.tools.doctor.self_test` is one rank. docs/doctor.md describes a rank's work."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from symmoe.dispatch.plan import make_plan
from symmoe.errors import PeerError, WrongResult
from symmoe.symm_mem.heap import SymmetricHeap
from symmoe.tokens import combine_tokens, dispatch_tokens
from symmoe.tools.doctor.findings import Finding, findings_about, first
from symmoe.tools.ranks import Ranks, join, times_in_a_row_ms

DEADLINE_S = 180  # most of it is Triton's first compilation of the kernels, if there are GPUs
MAX_GPUS = 8
_RANK = (sys.executable, "-m", "symmoe.tools.doctor.self_test")
_POLL_S = 0.05
_MODEST_LINK, _MODEST_DISPATCH = (
    0.6,
    0.4,
)  # fractions of the link's and of the copy's speed; H200s reach 0.8 and 0.7
_WAITS = 3  # a wait on the heap takes at most the deadline's third: a rank may compile kernels while the others wait
_EXPERTS_PER_RANK, _HIDDEN = 2, 64
_REPETITIONS = 3  # each of twenty consecutive steps
_GRACE_S = 5.0
_SPARE_BYTES = 32 << 20  # of the heap, in addition to the sizes below
# The timed transfer: tokens of a rank, each sent to one other rank; their width and dtype.
_LOADS = {"cpu": (512, 1024, torch.float32), "cuda": (8192, 7168, torch.bfloat16)}


class Trial(NamedTuple):
    """The result of the self-test: figures from :func:`run`, or the type and text of an exception, or the end of a
    process and the process's last printed line; seconds until the last process had ended."""

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
    job: Any = None,
) -> Trial:
    """Runs the self-test on this machine, and returns after the end of all its processes. They are killed after
    deadline_s; None: DEADLINE_S, up to ten times longer on a busy machine. `command` starts one rank, and passes the
    last argument, which contains the job, to :func:`be_rank`."""
    load_per_core = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    deadline_s = (
        DEADLINE_S * min(10.0, max(1.0, load_per_core)) if deadline_s is None else deadline_s
    )
    variables = {
        **environment,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "SYMMOE_FLIGHT_DIR": "",
        "TORCHELASTIC_RESTART_COUNT": "0",  # torch requires it
    }
    start, ranks = time.monotonic(), range(num_ranks)
    with tempfile.TemporaryDirectory(prefix="symmoe-doctor-") as folder:
        arguments = {
            rank: {
                "rank": rank,
                "num_ranks": num_ranks,
                "store": f"{folder}/store",
                "out": f"{folder}/found-{rank}",
                "deadline_s": math.ceil(deadline_s) + 1,
                "job": job,
            }
            for rank in ranks
        }
        processes = start_processes(
            "symmoe-doctor",
            command[0],
            {rank: (*command[1:], json.dumps(arguments[rank])) for rank in ranks},
            dict.fromkeys(ranks, variables),
            DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL),
        )
        try:
            ended = processes.wait(deadline_s, period=_POLL_S)
        finally:
            groups = processes.pids().values()
            processes.close(signal.SIGKILL)
            for group in groups:  # kills all descendants, even of ended processes
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
        took_s = time.monotonic() - start
        if ended is not None and not ended.is_failed():
            return Trial(num_ranks, took_s, json.loads(Path(folder, "found-0").read_text()))
        failures = ended.failures if ended else {}
        return Trial(num_ranks, took_s, None, *_first_error(Path(folder), failures, num_ranks))


def _first_error(
    folder: Path, failures: Mapping[int, ProcessFailure], num_ranks: int
) -> tuple[str, str]:
    """The error and the text that are nearest to the cause."""
    causes = (_cause_of(folder, rank, failures.get(rank)) for rank in failures or range(num_ranks))
    return min(causes, key=lambda cause: cause[0])[1]


def _cause_of(
    folder: Path, rank: int, failure: ProcessFailure | None
) -> tuple[tuple[int, int], tuple[str, str]]:
    """A rank's distance from the cause, and time; its error and text. The nearest is a rank's own exception, then a
    process's sudden end, then the exception of a rank that lost a peer."""
    path = folder / f"found-{rank}"
    output = json.loads(path.read_text()) if path.exists() else {}
    if "error" in output:
        distance = 2 if output["error"].startswith("Peer") else 0
        return (distance, path.stat().st_mtime_ns), (output["error"], output["text"])
    logs = "".join(
        log.read_text(errors="replace") for log in sorted(folder.glob(f"**/{rank}/std*.log"))
    )
    last = next(
        (line.strip() for line in reversed(logs.split("\n")) if line.strip()),
        "it has printed nothing",
    )
    code = failure.exitcode if failure else None
    ending = f"ended with status {code}" if code else "did not end in time"
    if failure and failure.exitcode < 0:
        ending = f"was ended by {failure.signal_name()}"
    # After the first failure, torch ends the remaining processes by SIGTERM.
    return (3 if code in (None, -signal.SIGTERM) else 1, 0), (f"rank {rank} {ending}", last)


def check_trial(trial: Trial, *, on_gpus: bool, link_gbs: float | None = None) -> list[Finding]:
    """Findings from the self-test; link_gbs: GB/s of all NVLinks of a GPU in one direction, None is unknown."""
    where = "GPU" if on_gpus else "CPU"
    ranks = (
        f"1 rank on a {where}" if trial.num_ranks == 1 else f"{trial.num_ranks} ranks on {where}s"
    )
    if trial.figures is None:
        failed = "problem", f"{ranks}: {trial.error}: {trial.text}"
        install = trial.text.find("pip install")
        return findings_about(
            "self-test",
            *first(
                (install >= 0, *failed, trial.text[install:]),
                (
                    "SIGKILL" in trial.error or "SIGBUS" in trial.error,
                    *failed,
                    "give it memory: end other jobs, or docker run --memory=8g",
                ),
                (
                    trial.error == "WrongResult",
                    *failed,
                    "symmoe doctor --json > doctor.json, and open an issue with it",
                ),
                (
                    True,
                    *failed,
                    f"{'NVSHMEM_DEBUG=INFO ' * on_gpus}torchrun --nproc-per-node=2 examples/dispatch_roundtrip.py "
                    "shows more",
                ),
            ),
        )
    # One rank sends no rows: it has no such figures.
    dispatch, combine, copy = (
        trial.figures.get(f"{name}_gbs", 0.0) for name in ("dispatch", "combine", "copy")
    )
    text = f"{ranks}: heap built in {trial.figures['heap_s']:.2g} s; dispatch and combine are exact"
    if "copy_gbs" in trial.figures:
        link = f" of {link_gbs:.0f}" if on_gpus and link_gbs else ""
        text += f"; dispatch {dispatch:.3g}, combine {combine:.3g}, plain copy {copy:.3g}{link} GB/s per rank"
    known_gbs = link_gbs or 0.0
    return findings_about(
        "self-test",
        (
            on_gpus and copy < _MODEST_LINK * known_gbs and "copy_gbs" in trial.figures,
            "note",
            f"a plain copy to a peer moves {copy:.0f} GB/s of the {known_gbs:.0f} GB/s of its links",
            "end what else uses the GPUs; nvidia-smi nvlink -e",
        ),
        (
            on_gpus and dispatch < _MODEST_DISPATCH * copy,
            "note",
            f"dispatch moves {dispatch:.0f} GB/s, a plain copy {copy:.0f}",
            f"torchrun --nproc-per-node={trial.num_ranks} benchmarks/bench.py dispatch measures it at length",
        ),
        (True, "ok", f"{text} ({trial.took_s:.0f} s in all)", ""),
    )


# -- one rank ---------------------------------------------------------------------------------------------------------


def be_rank(
    payload: str,
    work: Callable[[Ranks, float, Any], dict[str, float]],
    text_of: Callable[[int, Exception], str] = lambda _, error: str(error),
) -> int:
    """The main function of a rank: joins the process group, calls `work`, and writes the result to a file as JSON, or
    the type and `text_of` the error. Returns the exit status.

    Args:
        payload: the rank's arguments from :func:`run_trial`, in JSON.
        work: receives the ranks, the time limit of a wait on a heap, and the job.
    """
    arguments = json.loads(payload)
    signal.alarm(arguments["deadline_s"])  # ends this process even if its parent is gone
    lingers = False
    with contextlib.ExitStack() as stack:
        try:
            ranks = stack.enter_context(
                join(f"file://{arguments['store']}", arguments["rank"], arguments["num_ranks"])
            )
            output: Mapping[str, Any] = work(
                ranks, arguments["deadline_s"] / _WAITS, arguments["job"]
            )
        except Exception as error:  # noqa: BLE001 - the parent process must report any error
            output = {"error": type(error).__name__, "text": text_of(arguments["rank"], error)}
            lingers = isinstance(error, PeerError)
        part = Path(f"{arguments['out']}.part")
        part.write_text(json.dumps(output), encoding="utf-8")
        part.replace(arguments["out"])  # atomic, and before this rank leaves the process group
    if lingers:  # the lost rank must end first: torch ends all ranks after the first that fails
        time.sleep(_GRACE_S)
    return int("error" in output)


def run(ranks: Ranks, wait_s: float) -> dict[str, float]:
    """Figures of the group: `heap_s` and, with several ranks, in GB/s of the slowest one, `dispatch_gbs`,
    `combine_gbs`, `copy_gbs`. A wait on the heap takes at most `wait_s`. Collective."""
    num_tokens, hidden, dtype = _LOADS[ranks.device.type]
    start = time.perf_counter()
    # Rows, the plain copy's tokens, and in combine memory for sums of as many tokens from each peer.
    num_bytes = (3 + ranks.num_ranks - 1) * num_tokens * hidden * dtype.itemsize + _SPARE_BYTES
    with SymmetricHeap(num_bytes=num_bytes, timeout_s=wait_s, start_timeout_s=wait_s) as heap:
        figures = {"heap_s": ranks.largest(time.perf_counter() - start)}
        check(heap, ranks, dtype)
        return figures | (speeds(heap, ranks) if ranks.num_ranks > 1 else {})


def check(heap: SymmetricHeap, ranks: Ranks, dtype: torch.dtype) -> None:
    """Dispatches tokens of small integers, exact in every dtype, to one or two experts, which multiply the rows, and
    combines the products. Collective. Raises WrongResult on every rank if an element is wrong on any."""
    rank, num_experts, device = ranks.rank, _EXPERTS_PER_RANK * ranks.num_ranks, heap.device
    token = torch.arange(60 + 5 * rank, device=device)
    x = ((31 * rank + 7 * token[:, None] + torch.arange(_HIDDEN, device=device)) % 8).to(dtype)
    first = (token + rank) % num_experts
    second = torch.where(token % 7 > 0, (first + 1 + token % (num_experts - 1)) % num_experts, -1)
    chosen = torch.stack([first, second], dim=1)
    plan = make_plan(chosen, num_experts=num_experts, heap=heap)
    rows, _, handle = dispatch_tokens(x, plan)
    factors = torch.arange(1, 1 + _EXPERTS_PER_RANK, device=device) + _EXPERTS_PER_RANK * rank
    factors = factors.repeat_interleave(plan.splits.long())
    is_wrong = len(rows) != len(factors)
    y = combine_tokens(rows if is_wrong else rows * factors[:, None].to(dtype), handle)
    is_wrong |= not torch.equal(
        y, x * (chosen + 1).sum(1, keepdim=True).to(dtype)
    )  # -1 counts nothing
    if ranks.largest(float(is_wrong)):
        raise WrongResult("dispatch or combine moved wrong rows")


def speeds(heap: SymmetricHeap, ranks: Ranks) -> dict[str, float]:
    """GB/s per rank and direction of dispatch, combine and a plain copy, all ranks at once. Collective."""
    num_tokens, hidden, dtype = _LOADS[ranks.device.type]
    token, num_peers = torch.arange(num_tokens), ranks.num_ranks - 1
    destination = (ranks.rank + 1 + token % num_peers) % ranks.num_ranks  # one expert per rank
    plan = make_plan(destination[:, None].to(heap.device), num_experts=ranks.num_ranks, heap=heap)
    x = torch.ones((num_tokens, hidden), dtype=dtype, device=heap.device)
    share = num_tokens // num_peers  # tokens that the copy sends to each rank
    peers = [
        (ranks.rank + step) % ranks.num_ranks for step in range(1, ranks.num_ranks)
    ]  # spreads destinations at any time
    with (
        heap.lease((plan.row_capacity, hidden), dtype, name="rows") as rows,
        heap.lease((ranks.num_ranks * share, hidden), dtype, name="copy") as copied,
    ):
        out, region = rows.tensor, slice(ranks.rank * share, (ranks.rank + 1) * share)
        targets = [copied.peer(peer)[region] for peer in peers]

        *_, handle = dispatch_tokens(x, plan, out=out)
        steps = {
            "dispatch": lambda: dispatch_tokens(x, plan, out=out),
            "combine": lambda: combine_tokens(plan.rows_of(out), handle),
            "copy": lambda: [target.copy_(x[:share]) for target in targets],
        }
        return {
            f"{name}_gbs": x.nbytes / float(np.median(times_ms)) / 1e6
            for name, times_ms in times_in_a_row_ms(steps, ranks, _REPETITIONS).items()
        }


if __name__ == "__main__":
    sys.exit(be_rank(sys.argv[-1], lambda ranks, wait_s, _: run(ranks, wait_s)))
