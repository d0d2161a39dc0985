"""One or two ranks that are killed, stopped, or raise, in every phase of a step: the survivors' errors, and leaked
resources.

A case is a job of its own. Its victims take part in some steps and then, at the phase of the case, end by SIGKILL, stop
by SIGSTOP, or raise an exception that no code catches. Every survivor must raise a typed error that names a victim
within `timeout_s` + 2 s of that moment (1 s if the victim has signalled its peers), and must end by itself with a code
other than 0. A victim that another victim stops before its phase is a survivor. Afterwards no process may remain,
/dev/shm and the memory of the GPUs must be as before, and a new job must work at once.

The start of a job takes seconds on GPUs, so several cases may run in parallel; then leaked resources are measured, and
the new job is started, after all of them. No other program may allocate memory of the same GPUs in the meantime.
Victims that raise take turns: a rank that ends may block a GPU for a second, the whole limit of the survivors'
errors."""

import fcntl
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from heap_calls import round_trip
from shared_memory import left_in_shared_memory, shared_memory

from reliability.delays import before_steps
from reliability.launch import Job, JobFailure, Launcher
from reliability.step import HIDDEN, TOP_K, make_layer, tokens_of
from reliability.suite import SEED_STRIDE, Outcome, Run, Suite, in_parallel, percentiles
from symmoe import SymmetricHeap, combine_tokens, dispatch_tokens, errors, make_plan
from symmoe.kernels import control

TIMEOUT_S = 2.0
SLACK_S = 2.0
TOLD_S = 1.0  # where the victim itself told its peers
EXIT_S = 10.0  # from a survivor's error to its end: Python takes torch apart
FREE_AGAIN_S = 10.0
GPU_SLACK_MIB = 64

OF_REPLICAS = ("while weights travel", "while gradients come home")
PHASES = ("before", "in dispatch", "between", "in combine", "in backward", "in close", *OF_REPLICAS)
VICTIMS = ("first", "middle", "last", "first and last")
KINDS = ("kill", "stop", "raise")
NUM_CASES, NUM_GPU_CASES = 192, 96  # the latter: every kind in every phase with all victims


class UsersError(Exception):
    """The exception that a victim raises; it is no error of the package."""


@dataclass(frozen=True)
class Fault:
    """One case."""

    kind: str
    phase: str
    victims: tuple[int, ...]  # their ranks
    steps: int  # that go well before
    options: dict | None  # of the layer; None: of make_plan, dispatch_tokens and combine_tokens
    seed: int

    def __str__(self) -> str:
        ranks = " and ".join(map(str, self.victims))
        return f"{self.kind} rank {ranks} {self.phase}, after {self.steps} steps of {self.options or 'the parts'}"


def fault_of(number: int, run: Run) -> Fault:
    """Case `number`: kinds in turn, and so are phases and victims of a kind; the other fields are random."""
    index, kind = divmod(number, len(KINDS))
    last = run.num_ranks - 1
    named = {
        "first": (0,),
        "middle": (run.num_ranks // 2,),
        "last": (last,),
        "first and last": (0, last),
    }
    if last == 1:  # somebody has to survive
        named["first and last"] = (last,)
    generator = random.Random(f"{run.seed * SEED_STRIDE + number}")
    ways: tuple[dict | None, ...] = (
        None,
        {"order": "rank", "layout": "packed"},
        {"order": "slot", "layout": "expert-major", "stash": "none"},
        {"schedule": "overlapped"},
        {"capacity": 64 * run.num_ranks, "max_tokens": 32},
        {"balance": "replicas", "replicas_per_rank": 1, "replica_slack": 0.0},
    )
    phase = PHASES[index % len(PHASES)]
    return Fault(
        KINDS[kind],
        phase,
        named[VICTIMS[(index + index // len(PHASES)) % len(VICTIMS)]],
        generator.randrange(3),
        generator.choice(ways[-1:] if phase in OF_REPLICAS else ways),
        generator.randrange(1000),
    )


# -- on the ranks -----------------------------------------------------------------------------------------------------
class Step:
    """A step that reports its phases: it calls `at(phase)` before, between and in close, and kernels report the
    others."""

    def __init__(self, heap: SymmetricHeap, fault: Fault, at: Callable[[str], None]) -> None:
        self._heap, self._fault, self._at = heap, fault, at
        self.layer = (
            None if fault.options is None else make_layer(heap, fault.seed, **fault.options)
        )
        self.in_backward = False

    def run(self, turn: int) -> None:
        x = tokens_of(self._heap, self._fault.seed + turn, 20)
        self.in_backward = False
        self._at("before")
        y = self._parts(x) if self.layer is None else self.layer(x)[0]
        self._heap.synchronize()
        self.in_backward = True
        y.square().sum().backward()
        self._heap.synchronize()

    def _parts(self, x: torch.Tensor) -> torch.Tensor:
        num_experts = 2 * self._heap.num_ranks
        ids = (torch.arange(20)[:, None] + torch.arange(TOP_K) + self._fault.seed) % num_experts
        plan = make_plan(ids.to(x.device), num_experts=num_experts, heap=self._heap, hidden=HIDDEN)
        rows, _, handle = dispatch_tokens(x, plan)
        self._at("between")
        return combine_tokens(rows * 2, handle)

    def before_kernel(self, name: str) -> None:
        """Hook: reports the phase of a kernel."""
        if name == "push_replicas":
            self._at("while weights travel")
        elif name == "add_from_replicas":
            self._at("while gradients come home")
        elif self.in_backward:
            if name.startswith("push_rows"):
                self._at("in backward")
        elif name.startswith("push_rows"):
            self._at("in dispatch")
        elif name in ("push_sums", "pull_rows"):
            self._at("in combine")
        elif name == "index_rows" and self.layer is not None:
            self._at("between")  # rows are there, experts come next


def take_part(
    rank: int, num_ranks: int, fault: Fault, device: str, turns: str | None
) -> Iterator[dict]:
    """Yields the pipe, in which a victim announces its fault; then the raised error and its time. turns: a file that
    the first victim locks before the last steps, until its process ends."""
    is_victim, turn, struck = rank in fault.victims, 0, False

    def strike(phase: str) -> None:
        if phase == fault.phase and is_victim and turn == fault.steps:
            mark_and(fault.kind)

    def mark_and(kind: str) -> None:
        nonlocal struck
        if struck:  # what runs on the way out of an exception passes here again
            return
        struck = True
        os.write(report, f"{time.monotonic()}".encode())
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            raise UsersError(f"of rank {rank}")

    backend = "nvshmem" if device == "cuda" else "host"
    raised = None
    read_end, report = os.pipe()
    os.set_blocking(read_end, False)
    yield {
        "pipe": (os.getpid(), read_end)
    }  # the launcher reads it after the death of this process, too
    try:
        # As a user writes it: an exception leaves the heap on its way out.
        with SymmetricHeap(num_bytes=8 << 20, backend=backend) as heap:
            Step(heap, fault, lambda phase: None).run(0)
            if turns is not None and rank == fault.victims[0]:
                fcntl.flock(os.open(turns, os.O_RDWR), fcntl.LOCK_EX)
            dist.barrier()  # kernels are compiled, from here on waits may be short
            heap.timeout_s = heap.start_timeout_s = TIMEOUT_S
            step = Step(heap, fault, strike)
            with before_steps(heap.device, step.before_kernel) if is_victim else nullcontext():
                for turn in range(fault.steps + 1):
                    step.run(turn)
            if fault.phase == "in close" and is_victim:
                closing = heap.waits.wait

                def close_barrier(call: int, *args, **kwargs) -> torch.Tensor:
                    if control.unpack_call(call)["phase"] == control.PHASE_CLOSE:
                        mark_and(fault.kind)
                    return closing(call, *args, **kwargs)

                heap.waits.wait = close_barrier
    except errors.SymmoeError as error:
        raised = error
        yield {
            "raised": type(error).__name__,
            "text": str(error),
            "rank": getattr(error, "rank", None),
            "at": time.monotonic(),
        }
        raise  # nobody catches it: the process has to end by itself
    finally:
        del raised


# -- in the launcher --------------------------------------------------------------------------------------------------
def run_cases(run: Run, launcher: Launcher) -> Iterator[Outcome]:
    for first in range(0, len(run.numbers), run.num_jobs):
        numbers = run.numbers[first : first + run.num_jobs]
        shm_before = shared_memory()
        used_before = gpu_mib(run)
        with tempfile.NamedTemporaryFile() as turns:
            outcomes = list(
                in_parallel(
                    [partial(run_case, number, run, launcher, turns.name) for number in numbers]
                )
            )
        problems = leaked_resources(run, shm_before, used_before) + new_job_problems(launcher, run)
        problems = [f"after cases {list(numbers)}: {text}" for text in problems]
        yield from outcomes[:-1]
        yield replace(outcomes[-1], problems=outcomes[-1].problems + problems)


def run_case(number: int, run: Run, launcher: Launcher, turns: str) -> Iterator[Outcome]:
    fault = fault_of(number, run)
    start = time.perf_counter()
    try:
        with launcher.start(run.num_ranks, run.device) as job:
            problems, facts = watch(job, fault, run, turns if fault.kind == "raise" else None)
    except JobFailure as failure:
        yield Outcome(number, float("nan"), [f"{fault}: {failure}"])
        return
    if job.processes():
        problems.append(f"processes {job.processes()} are left")
    problems = [f"{fault}: {text}" for text in problems]
    yield Outcome(number, 1e3 * (time.perf_counter() - start), problems, facts)


def watch(job: Job, fault: Fault, run: Run, turns: str | None) -> tuple[list[str], dict]:
    """Problems of the survivors' behaviour, and their times. turns: as for take_part."""
    problems, facts = (
        [],
        {"kind": fault.kind, "phase": fault.phase, "detect_ms": [], "exit_ms": [], "errors": []},
    )
    job.send(take_part, fault, run.device, turns)
    ready = time.monotonic() + run.seconds(30.0)
    streams = {rank: job.received(rank, deadline=ready) for rank in range(run.num_ranks)}
    pipes = {rank: next(stream, None) for rank, stream in streams.items()}
    if None in pipes.values():
        return [f"a rank did not start: {job.log(0)}"], facts
    # Opened here while the victims live: a pipe keeps what was written to it.
    reports = {
        victim: os.open(f"/proc/{pid}/fd/{file}", os.O_RDONLY | os.O_NONBLOCK)
        for victim, (pid, file) in ((victim, pipes[victim]["pipe"]) for victim in fault.victims)
    }
    try:
        deadline = time.monotonic() + run.seconds(30.0)
        streams = {rank: job.received(rank, deadline=deadline) for rank in range(run.num_ranks)}
        announced = {
            rank: next(streams[rank], None) for rank in streams if rank not in fault.victims
        }
        struck = {
            victim: at for victim, report in reports.items() if (at := _time_in(report)) is not None
        }
    finally:
        for report in reports.values():
            os.close(report)
    if not struck:
        job.dump_stacks()
        logs = [job.log(victim) for victim in fault.victims]
        return [
            f"the fault never happened; survivors have {announced}; logs of the victims: {logs}"
        ], facts
    for rank in (rank for rank in streams if rank not in struck):
        facts_of = announced[rank] if rank in announced else next(streams[rank], None)
        if facts_of is None:
            job.dump_stacks()
            problems.append(f"survivor {rank} raised nothing: {job.log(rank)}")
            continue
        detect_s = facts_of["at"] - min(struck.values())
        facts["detect_ms"].append(1e3 * detect_s)
        facts["errors"].append(facts_of["raised"])
        problems += wrong_error(rank, facts_of, fault.kind, struck)
        allowed_s = run.patience * TOLD_S
        if fault.kind != "raise":
            allowed_s = TIMEOUT_S + run.patience * SLACK_S
        if detect_s > allowed_s:
            problems.append(
                f"survivor {rank} raised after {detect_s:.2f} s, allowed are {allowed_s} s"
            )
        code = job.exit_code(rank, deadline=facts_of["at"] + run.patience * EXIT_S)
        facts["exit_ms"].append(1e3 * (time.monotonic() - facts_of["at"]))
        if not code:
            problems.append(
                f"survivor {rank} " + ("still runs" if code is None else "ended with code 0")
            )
    for victim in struck:
        if fault.kind == "stop":
            job.kill(victim)
        if fault.kind == "raise":
            code = job.exit_code(victim, deadline=time.monotonic() + run.patience * EXIT_S)
            if not code:
                problems.append(f"victim {victim} ended with {code} after an exception")
            if UsersError.__name__ not in job.log(victim):
                problems.append(f"the own exception of victim {victim} is lost: {job.log(victim)}")
    return problems, facts


def _time_in(report: int) -> float | None:
    """The time of a victim's fault, from its pipe; None before the fault."""
    try:
        return float(os.read(report, 64))
    except (BlockingIOError, ValueError):  # the latter: it has ended without
        return None


def wrong_error(rank: int, actual: dict, kind: str, victims: Iterable[int]) -> list[str]:
    """The problem of a survivor's error; none if its class is right and it names a victim."""
    shown = f"survivor {rank} raised {actual['raised']}: {actual['text']}"
    # In the middle of a call the peers are told of an exception, elsewhere of a heap that is left.
    is_reported = actual["raised"] == "SymmoeError" and UsersError.__name__ in actual["text"]
    expected = (
        actual["raised"] == "PeerAborted" or is_reported
        if kind == "raise"
        else actual["raised"] == "PeerTimeout"
    )
    if not expected:
        return [shown]
    named = any(
        actual["rank"] == victim or re.search(rf"rank {victim}\b", actual["text"])
        for victim in victims
    )
    return [] if named else [f"no victim is named: {shown}"]


def leaked_resources(run: Run, shm_before: frozenset[str], used_before: list[int]) -> list[str]:
    """Resources of ended jobs: names in /dev/shm, memory of the GPUs."""
    problems = []
    if remaining := left_in_shared_memory(shm_before):
        problems.append(f"{sorted(remaining)} are left in /dev/shm")
    deadline = time.monotonic() + FREE_AGAIN_S
    while True:
        used = gpu_mib(run)
        if all(now <= was + GPU_SLACK_MIB for now, was in zip(used, used_before, strict=True)):
            return problems
        if time.monotonic() > deadline:
            return [*problems, f"the GPUs hold {used} MiB, before the job {used_before}"]
        time.sleep(0.2)


def new_job_problems(launcher: Launcher, run: Run) -> list[str]:
    """Problems of a new job on the same devices, which must work at once."""
    try:
        with launcher.start(run.num_ranks, run.device) as job:
            exact = job.run(work, run.device, deadline_s=run.seconds(30.0))
    except JobFailure as failure:
        return [f"a new job fails: {failure}"]
    return [] if all(exact) else ["the round trip of a new job is not exact"]


def work(rank: int, num_ranks: int, device: str) -> Iterator[bool]:
    with SymmetricHeap(
        num_bytes=1 << 20, backend="nvshmem" if device == "cuda" else "host"
    ) as heap:
        yield round_trip(heap)


def gpu_mib(run: Run) -> list[int]:
    """MiB in use on each GPU that ranks can see; nothing on CPUs."""
    if run.device == "cpu":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    query += ["--id", visible] if visible else []
    return [
        int(line)
        for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    ]


def summarize(outcomes: list[Outcome]) -> dict:
    by_kind = {}
    for kind in KINDS:
        facts = [outcome.facts for outcome in outcomes if outcome.facts.get("kind") == kind]
        raised = [name for f in facts for name in f["errors"]]
        by_kind[kind] = {
            "cases": len(facts),
            "survivors": len(raised),
            "errors": {name: raised.count(name) for name in sorted(set(raised))},
            "detect_ms": percentiles(ms for f in facts for ms in f["detect_ms"]),
            "exit_ms": percentiles(ms for f in facts for ms in f["exit_ms"]),
        }
    return {"timeout_ms": 1e3 * TIMEOUT_S, "kinds": by_kind}


SUITE = Suite(run_cases, NUM_CASES, NUM_GPU_CASES, num_ranks=3, summarize=summarize)
