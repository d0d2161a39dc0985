"""A fast slice of every reliability suite (`python -m tests.reliability` runs them in full), and of their launcher."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from reliability import command, faults, mutations
from reliability.launch import JobFailure, Launcher
from reliability.protocol import Model, Protocol, scenarios
from reliability.suite import Run, execute

SLICES = {
    "routings": (range(28), 2),  # two of each stratum
    "gradients": (range(13), 2),
    "determinism": ((*range(15, 26), 1040), 2),  # a repeat with skew, and a restart
    "stalls": (range(60), 2),
    "fuzz": (range(66), 2),  # three of each mutation
    "soak": (range(151), 2),
    "lifecycle": ((0, 1, 2, 50), 2),
    "model": ((0, 3, 4), 3),  # plans, a step, signals; the others below
}
# One of each kind, at other phases and with other victims.
FAULTS = (13, 69, 104)
TWIN_MUTANTS = ("no wait for rows to arrive", "one half of the count table", "payload after the signal")


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher() as launcher:
        yield launcher


def failures(suite: str, run: Run, launcher: Launcher) -> list[str]:
    """What is wrong in the cases of a run, which have all been run."""
    record = execute(suite, command.suite_of(suite), run, launcher, command="pytest")
    assert record["cases_run"] == len(run.numbers)
    return [text for failure in record["failures"] for text in failure["problems"]]


@pytest.mark.parametrize("suite", SLICES)
def test_suite(launcher: Launcher, suite: str):
    numbers, num_ranks = SLICES[suite]
    assert failures(suite, Run(tuple(numbers), num_ranks), launcher) == []


@pytest.mark.parametrize("number", FAULTS)
def test_fault(launcher: Launcher, number: int):
    assert failures("faults", Run((number,), 3), launcher) == []


def test_the_faults_are_all_kinds_in_all_phases_on_all_victims():
    for num_ranks in (2, 3):
        run = Run((), num_ranks)
        found = [faults.fault_of(number, run) for number in range(sum(faults.CASES["cpu"]))]
        assert [sum(fault.kind == kind for fault in found) for kind in faults.KINDS] == list(faults.CASES["cpu"])
        for kind in faults.KINDS:
            combinations = {(fault.phase, fault.victim) for fault in found if fault.kind == kind}
            assert combinations == {(phase, victim) for phase in faults.PHASES for victim in range(num_ranks)}


@pytest.mark.parametrize("index", range(len(scenarios(2))))
def test_the_model_on_two_ranks(index: int):
    assert Model(scenarios(2)[index], Protocol()).search().violation is None


@pytest.mark.parametrize("mutant", mutations.OF_THE_MODEL)
def test_a_mutant_of_the_model_is_found(mutant: str):
    """On two ranks, in seconds; a mutant that takes a third to show is searched for with three."""
    assert mutations.found_in_the_model(mutant, 2) or mutations.found_in_the_model(mutant, 3)


@pytest.mark.parametrize("mutant", TWIN_MUTANTS)
def test_a_mutant_of_the_twins_is_found(launcher: Launcher, mutant: str):
    assert mutations.found_in_twins(Run((), 3), launcher, mutant, mutations.FOUND_BY[mutant])


@pytest.mark.parametrize("part", sorted({mutations.FOUND_BY[mutant] for mutant in TWIN_MUTANTS}))
def test_without_a_mutant_nothing_is_found(launcher: Launcher, part: str):
    assert mutations.found_in_twins(Run((), 3), launcher, None, part) == ""


# -- the launcher -----------------------------------------------------------------------------------------------------


def sleep_on_the_last_rank(rank: int, num_ranks: int) -> Iterator[str]:
    yield "here"
    if rank == num_ranks - 1:
        time.sleep(60.0)
    yield "there"


def raise_on_the_last_rank(rank: int, num_ranks: int) -> Iterator[str]:
    if rank == num_ranks - 1:
        raise ZeroDivisionError("on purpose")
    yield "fine"


def yield_pid(rank: int, num_ranks: int) -> Iterator[int]:
    yield os.getpid()


def test_a_rank_that_hangs_is_a_failure_that_says_where(launcher: Launcher):
    start = time.monotonic()
    with pytest.raises(JobFailure, match="rank 1 gave no answer") as caught, launcher.start(2, "cpu") as job:
        list(job.stream(sleep_on_the_last_rank, deadline_s=1.0))
    assert time.monotonic() - start < 10.0
    assert "in sleep_on_the_last_rank" in str(caught.value)
    assert job.processes() == []


def test_a_rank_that_raises_ends_with_its_traceback(launcher: Launcher):
    with pytest.raises(JobFailure, match="rank 1 ended with exit code 1") as caught, launcher.start(2, "cpu") as job:
        job.run(raise_on_the_last_rank, deadline_s=10.0)
    assert "ZeroDivisionError: on purpose" in str(caught.value)


def test_ranks_lead_sessions_and_end_with_the_job(launcher: Launcher):
    with launcher.start(2, "cpu") as job:
        assert job.run(yield_pid, deadline_s=10.0) == job.pids
        assert [os.getsid(pid) for pid in job.pids] == job.pids
        os.kill(job.pids[0], signal.SIGSTOP)  # it cannot end by itself
    assert job.processes() == []
    assert [job.exit_code(rank, deadline=0.0) for rank in range(2)] == [-signal.SIGKILL, 0]
