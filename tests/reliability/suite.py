"""Common parts of the suites: numbered cases, their outcomes, and the record of a run."""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from suites.records import machine

from reliability.launch import JobFailure, Launcher

SEED_STRIDE = 1_000_000  # case I of seed S is number S * SEED_STRIDE + I of an endless list
MAX_FAILURES = (
    20  # of one run: what fails so often is broken, and every failure may cost a deadline
)


@dataclass(frozen=True)
class Run:
    """The settings of a run of a suite. More than a few jobs per GPU are slower: GPUs share their time among jobs, and
    ranks that synchronise wait for time slices."""

    numbers: tuple[int, ...]  # of the cases, each from 0
    num_ranks: int = 2
    device: str = "cpu"  # or "cuda"
    seed: int = 0
    num_jobs: int = 1  # groups of ranks that share the cases, on the same devices
    patience: float = 1.0  # times as long as on a machine that has nothing else to do

    def seconds(self, on_cpu: float) -> float:
        """A deadline; GPUs have more time, because first calls compile kernels."""
        return self.patience * on_cpu + (0.0 if self.device == "cpu" else 240.0)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one case."""

    case: int
    ms: float
    problems: list[str]  # what is wrong, as text; nothing if the case has passed
    facts: dict = field(
        default_factory=dict
    )  # figures that the run's record sums up or lists, by name


# Runs cases; outcomes come as they are known.
RunCases = Callable[[Run, Launcher], Iterator[Outcome]]
# On every rank: (rank, num_ranks, numbers, seed, device), a generator of (milliseconds, problems, facts) per number.
Numbers = tuple[int, ...]
Results = Iterator[tuple[float, list[str], dict]]
CheckCases = Callable[[int, int, Numbers, int, str], Results]


@dataclass(frozen=True)
class Suite:
    """A suite as a command."""

    run: RunCases
    num_cases: int  # of a run in full
    num_gpu_cases: int | None = None  # of one on GPUs; None: the same
    num_ranks: int = 2  # if nobody asks for others
    summarize: Callable[[list[Outcome]], dict] = lambda outcomes: {}  # more entries of the record


def on_ranks(
    run: Run, launcher: Launcher, check: CheckCases, *, deadline_s: float
) -> Iterator[Outcome]:
    """Runs cases on ranks that stay from case to case, and are restarted after a case that ended them."""
    bounds = [len(run.numbers) * job // run.num_jobs for job in range(run.num_jobs + 1)]
    parts = [replace(run, numbers=run.numbers[a:b]) for a, b in pairwise(bounds) if a < b]
    return in_parallel([partial(_in_one_job, part, launcher, check, deadline_s) for part in parts])


def _in_one_job(
    run: Run, launcher: Launcher, check: CheckCases, deadline_s: float
) -> Iterator[Outcome]:
    remaining = list(run.numbers)
    while remaining:
        try:
            with launcher.start(run.num_ranks, run.device) as job:
                stream = job.stream(
                    check,
                    tuple(remaining),
                    run.seed,
                    run.device,
                    deadline_s=run.seconds(deadline_s),
                )
                for results in stream:
                    yield merged(remaining.pop(0), results)
        except JobFailure as failure:
            if not remaining:
                raise  # the ranks could not end
            yield Outcome(remaining.pop(0), float("nan"), [str(failure)])


def in_parallel(works: Sequence[Callable[[], Iterator[Outcome]]]) -> Iterator[Outcome]:
    """Yields the outcomes of all iterators as they arrive, each iterator in its own thread; the first exception ends
    all."""
    if len(works) == 1:
        yield from works[0]()
        return
    results: queue.SimpleQueue[Outcome | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()

    def work_through(work: Callable[[], Iterator[Outcome]]) -> None:
        outcomes = work()
        try:
            for outcome in outcomes:
                results.put(outcome)
                if stop.is_set():
                    break
            outcomes.close()
            results.put(None)
        except BaseException as error:  # noqa: BLE001 - raised by whoever reads the results
            results.put(error)

    threads = [threading.Thread(target=work_through, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        num_at_work = len(threads)
        while num_at_work:
            result = results.get()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                num_at_work -= 1
            else:
                yield result
    finally:
        stop.set()
        for thread in threads:
            thread.join(15.0)


def merged(case: int, results: Iterable[tuple[float, list[str], dict]]) -> Outcome:
    """One outcome from the ranks' outcomes: the slowest rank's time, all problems, facts as lists over ranks."""
    results = list(results)
    names = list(dict.fromkeys(name for _, _, facts in results for name in facts))
    return Outcome(
        case,
        max(ms for ms, _, _ in results),
        [
            f"rank {rank}: {text}"
            for rank, (_, problems, _) in enumerate(results)
            for text in problems
        ],
        {name: [facts.get(name) for _, _, facts in results] for name in names},
    )


def execute(
    name: str,
    suite: Suite,
    run: Run,
    launcher: Launcher,
    *,
    command: str,
    limit_s: float = math.inf,
) -> dict:
    """Runs the cases and builds the record: counts, times, the failures in full, and the machine. After `limit_s` or a
    KeyboardInterrupt it accepts no more outcomes: the record has the number of cases so far."""
    start, outcomes, failed = time.monotonic(), [], []
    running = suite.run(run, launcher)
    try:
        for outcome in running:
            outcomes.append(outcome)
            if outcome.problems:
                failed.append(outcome)
                print(
                    f"{name} case {outcome.case}: " + "\n  ".join(outcome.problems)[:6000],
                    flush=True,
                )
            if len(failed) >= MAX_FAILURES:
                print(f"{name}: stopped after {MAX_FAILURES} failures", flush=True)
                break
            if time.monotonic() - start > limit_s and len(outcomes) < len(run.numbers):
                print(f"{name}: stopped after {limit_s:.0f} s", flush=True)
                break
        running.close()  # ends the ranks, if there are any
    except KeyboardInterrupt:
        print(f"{name}: interrupted", flush=True)
    wall_s = time.monotonic() - start
    with launcher.start(1, run.device) as job:
        (facts,) = job.run(describe, run.device, deadline_s=120.0)
    return {
        "suite": name,
        "device": run.device,
        "ranks": run.num_ranks,
        "seed": run.seed,
        "jobs": run.num_jobs,
        "cases_wanted": len(run.numbers),
        "cases_run": len(outcomes),
        "cases_failed": len(failed),
        "case_ms": percentiles([outcome.ms for outcome in outcomes]),
        "wall_s": round(wall_s, 1),
        **suite.summarize(outcomes),
        "failures": [asdict(outcome) for outcome in failed],
        **facts,
        "command": command,
    }


def percentiles(values: Iterable[float]) -> dict[str, float | None]:
    """p50, p99 and the largest of the values that are numbers."""
    finite = np.array([value for value in values if not np.isnan(value)])
    if not finite.size:
        return {"p50": None, "p99": None, "max": None}
    marks = {"p50": np.quantile(finite, 0.5), "p99": np.quantile(finite, 0.99), "max": finite.max()}
    return {name: round(float(value), 3) for name, value in marks.items()}


def describe(rank: int, num_ranks: int, device: str) -> Iterator[dict]:
    """The machine and versions of a run; collected on a rank, because it may touch the GPU."""
    yield machine(torch.device(device))
