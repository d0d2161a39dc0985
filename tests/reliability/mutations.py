"""Each order, wait, epoch step and fill is taken away from the CPU twins in turn: something must fail. A case is one
mutant. It is found if a part of the suites of this folder fails that passes on the code as it is, which is tried first,
with the same delays."""

import re
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from worker import open_heap

from reliability import faults, fuzz, gradients, random_routings
from reliability.delays import dawdling
from reliability.launch import Job, JobFailure, Launcher
from reliability.suite import Numbers, Outcome, Results, Run, Suite
from reliability.twin_mutants import MUTANTS, DoesNotApply, mutated, slow_waits
from symmoe import make_plan

# Which part of which suite has to find a mutant.
FOUND_BY = dict.fromkeys(MUTANTS, "routings") | {
    "no wait for signals": "gradients",
    "payload after the signal": "gradients",
    "one half of the count table": "plans",
    "fault not told": "fuzz",
    "wait without end": "faults",
    "timeout not reported": "faults",
}
# The last line of a traceback, and what gloo and the bootstrap over it raise on a rank whose peer has gone.
_RAISED = re.compile(r"(symmoe\.errors\.\w+|[\w.]*Error)(:|$)")
_OF_THE_TRANSPORT = re.compile(
    r"gloo|Connection (closed|reset) by peer|Dist(Network|Backend|Store)Error|PeerLost:"
)
_FAULT = faults.Fault(kind="kill", phase="in dispatch", victims=(1,), steps=1, options=None, seed=3)
_FAULT_WAIT_S = 8.0
_CASE_S = 10.0  # a case takes one or two; mutants that hang cost all of it
_SOUND_CASE_S = 60.0
NAMES = [*MUTANTS]


def check_plans(rank: int, num_ranks: int, numbers: Numbers, seed: int, device: str) -> Results:
    """Plans without a trip between them, of ranks that dawdle: every rank's load is what the ids say."""
    num_experts = 2 * num_ranks
    with open_heap(device) as heap, dawdling(heap.device, rank, longest_s=3e-3):
        for number in numbers:
            problems = []
            for turn in range(5):
                seeds = [[number, turn, r] for r in range(num_ranks)]
                ids = [np.random.default_rng(s).integers(0, num_experts, (6, 2)) for s in seeds]
                plan = make_plan(torch.from_numpy(ids[rank]), num_experts=num_experts, heap=heap)
                want = np.bincount(np.concatenate(ids).ravel(), minlength=num_experts).tolist()
                if plan.expert_load.tolist() != want:
                    problems.append(
                        f"turn {turn}: the load is {plan.expert_load.tolist()}, want {want}"
                    )
            yield 0.0, problems, {}


CHECKS = {
    "routings": (random_routings.check, tuple(range(28))),
    "gradients": (gradients.check, (1, 3, 5, 7)),
    "fuzz": (fuzz.check, tuple(range(6))),
    "plans": (check_plans, tuple(range(10))),
}


def check(
    rank, num_ranks, numbers: tuple[int, ...], seed: int, device, mutant: str | None, part: str
) -> Iterator:
    """A part of a suite on ranks with a mutant. Yields once when that is in place, then the part's results."""
    try:
        late = slow_waits(1) if rank == num_ranks - 1 else nullcontext()
        with late, mutated(mutant):
            yield ""
            yield from CHECKS[part][0](rank, num_ranks, numbers, seed, device)
    except DoesNotApply as problem:
        yield str(problem)


def take_part(
    rank: int, num_ranks: int, fault: faults.Fault, device: str, mutant: str | None
) -> Iterator:
    with mutated(mutant):
        yield from faults.take_part(rank, num_ranks, fault, device)


def found_in_twins(run: Run, launcher: Launcher, mutant: str | None, part: str) -> str:
    """What fails, as text; "" if nothing does.

    Raises:
        DoesNotApply: on the ranks the mutant could not be put in place.
    """
    with launcher.start(run.num_ranks, run.device) as job:
        if part == "faults":
            job_run = replace(run, numbers=())
            problems, _ = faults.watch(
                job, _FAULT, job_run, take_part, (mutant,), wait_s=_FAULT_WAIT_S
            )
            return "; ".join(text.splitlines()[0] for text in problems)[:300]  # the rest is stacks
        return _first_failure(job, run, mutant, part)


def _first_failure(job: Job, run: Run, mutant: str | None, part: str) -> str:
    numbers = CHECKS[part][1]
    deadline_s = _CASE_S if mutant else run.seconds(_SOUND_CASE_S)
    stream = job.stream(check, numbers, run.seed, run.device, mutant, part, deadline_s=deadline_s)
    in_place = next(stream)
    if any(in_place):
        raise DoesNotApply("; ".join(in_place))
    try:
        for number, results in zip(numbers, stream, strict=True):
            for _, problems, _ in results:
                if problems:
                    return f"case {number}: {problems[0]}"[:300]
    except JobFailure as failure:
        return str(failure) if mutant is None else line_of(failure)[:300]
    return ""


def line_of(failure: JobFailure) -> str:
    """The line that says what a rank raised, if one did; what a peer's end made of the process group comes last."""
    lines = [
        re.sub(r"^\[rank\d+\]: ", "", line) for line in str(failure).splitlines()
    ]  # torch's prefix
    raised = [line for line in lines if _RAISED.match(line)]
    own = [line for line in raised if not _OF_THE_TRANSPORT.search(line)]
    return (own or raised or lines)[0]


def run_cases(run: Run, launcher: Launcher) -> Iterator[Outcome]:
    sound: dict[str, str] = {}
    for number in run.numbers:
        start = time.perf_counter()
        name = NAMES[number]
        part = FOUND_BY[name]
        problems = []
        found = ""
        if part not in sound:
            sound[part] = found_in_twins(run, launcher, None, part)
        if sound[part]:
            problems.append(f"{part} fails without a mutant: {sound[part]}")
        try:
            found = found_in_twins(run, launcher, name, part)
        except DoesNotApply as problem:
            problems.append(f"{name} does not apply: {problem}")
        if not found and not problems:
            problems.append(f"nothing fails with this mutant: {name}")
        ms = 1e3 * (time.perf_counter() - start)
        yield Outcome(number, ms, problems, {"mutant": name, "found": found})


def summarize(outcomes: list[Outcome]) -> dict:
    return {"mutants": [outcome.facts for outcome in outcomes]}


# On CPUs, which run the twins.
SUITE = Suite(run_cases, num_cases=len(NAMES), num_gpu_cases=0, num_ranks=3, summarize=summarize)
