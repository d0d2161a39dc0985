"""A fast slice of every reliability suite (`python -m tests.reliability` runs them in full), and of their launcher."""

import time
from collections.abc import Iterator

import pytest
from bad_calls import MISTAKES
from limits import HANG_S
from rank_jobs import raise_on_the_last_rank, sleep_on_the_last_rank, yield_pid
from reliability import command, faults, fuzz, lifecycle, soak
from reliability.launch import JobFailure, Launcher
from reliability.suite import Run, execute

SLICES = {
    "routings": (range(14), 2),  # one of each stratum
    "gradients": (range(13), 2),
    "determinism": ((*range(15, 26), 1040), 2),  # a repeat with skew, and a restart
    "stalls": (range(24), 2),
    "fuzz": (range(72), 2),  # three of each mutation
    "soak": (range(151), 2),
    "lifecycle": ((0, 1, 2, 50), 2),
    "litmus": ((*range(12), 400), 2),  # three of each kind, and the control
    "checkpoint_kills": (range(5), 2),
}
LONG = (
    "lifecycle",
    "soak",
    "determinism",
    "gradients",
    "fuzz",
    "routings",
    "checkpoint_kills",
)
ON_EIGHT = {
    "routings": range(14),
    "gradients": range(2),
    "determinism": (15, 16),
    "stalls": range(20),
    "fuzz": range(24),
    "litmus": (*range(4), 400),
}
# One of each kind, at other phases and with other victims, and a rank that raises in every phase; on eight ranks mostly
# of two at once.
FAULTS = {2: (18, 21, 19, 23), 3: (13, 9, 56, 59, 44, 47, 68, 35), 8: (4, 9, 10, 11, 20)}
PATIENCE = 10.0  # nothing here measures speed


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher() as launcher:
        yield launcher


def failures(suite: str, run: Run, launcher: Launcher) -> list[str]:
    """Problems in the cases of a run; all cases must have run."""
    record = execute(suite, command.suite_of(suite), run, launcher, command="pytest")
    assert record["cases_run"] == len(run.numbers)
    return [text for failure in record["failures"] for text in failure["problems"]]


@pytest.mark.parametrize(
    "suite", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in SLICES]
)
def test_a_slice_of_the_suite_passes(launcher: Launcher, suite: str):
    numbers, num_ranks = SLICES[suite]
    assert failures(suite, Run(tuple(numbers), num_ranks, patience=PATIENCE), launcher) == []


@pytest.mark.slow
@pytest.mark.parametrize("suite", ON_EIGHT)
def test_a_slice_on_eight_ranks_passes(launcher: Launcher, suite: str):
    assert failures(suite, Run(tuple(ON_EIGHT[suite]), 8, patience=PATIENCE), launcher) == []


@pytest.mark.parametrize(
    ("number", "num_ranks"),
    [
        pytest.param(number, num_ranks, marks=[pytest.mark.slow] * (n > 0))
        for num_ranks, numbers in FAULTS.items()
        for n, number in enumerate(numbers)
    ],
)
def test_survivors_of_a_fault_raise_in_time(launcher: Launcher, number: int, num_ranks: int):
    assert failures("faults", Run((number,), num_ranks, patience=PATIENCE), launcher) == []


def test_faults_cover_all_kinds_phases_and_victims():
    all_victims = {2: {(0,), (1,)}, 3: {(0,), (1,), (2,), (0, 2)}, 8: {(0,), (4,), (7,), (0, 7)}}
    for num_ranks, victims in all_victims.items():
        actual = [
            faults.fault_of(number, Run((), num_ranks)) for number in range(faults.NUM_GPU_CASES)
        ]
        for kind in faults.KINDS:
            combinations = {(fault.phase, fault.victims) for fault in actual if fault.kind == kind}
            assert combinations == {
                (phase, chosen) for phase in faults.PHASES for chosen in victims
            }
            few = [fault for fault in actual[:24] if fault.kind == kind]
            assert {fault.phase for fault in few} == set(faults.PHASES)
            assert {fault.victims for fault in few} == victims


def test_wrong_calls_cover_all_kinds():
    for device in ("cpu", "cuda"):
        assert {call for call, _ in fuzz.mistakes_for(2, device)} == set(MISTAKES)
    assert len(fuzz.mistakes_for(2, "cpu")) > len(fuzz.mistakes_for(2, "cuda")) > 100


def test_growth_is_distinguished_from_fluctuation():
    def grown(rate: float, files: int = 13, steps: int = 20_000) -> list[str]:
        samples = [
            (step, int(rate * step) + step % 100 * 2000, 4096, 0, 13, 0)
            for step in range(100, steps + 1, 50)
        ]
        return soak.growth_problems([*samples[:-1], (*samples[-1][:4], files, 0)])

    assert (grown(900.0), grown(0.0, files=14)) == ([], ["open files went from 13 to [13, 14]"])
    assert grown(1500.0)[0].startswith("host memory grew by 255")
    # Programs of new kinds take memory in the first steps, but not as much as a leak.
    assert grown(3000.0, steps=2500) == []
    assert grown(10_000.0, steps=2500)[0].startswith("host memory grew by 24")
    free = [
        (140 << 30) - (600 << 20) * (number % 3 > 0) for number in range(50)
    ]  # others' jobs come and go
    leaking = [
        num_bytes - lifecycle.ARENA_BYTES["cuda"] * number for number, num_bytes in enumerate(free)
    ]
    assert lifecycle.lost_bytes(free) == 0 < lifecycle.LOST_BYTES < lifecycle.lost_bytes(leaking)


# -- running suites ---------------------------------------------------------------------------------------------------
def test_a_suite_that_exceeds_its_time_writes_a_record(launcher: Launcher):
    run = Run(tuple(range(6)), 2)
    record = execute(
        "litmus", command.suite_of("litmus"), run, launcher, command="pytest", limit_s=0.0
    )
    assert (record["cases_wanted"], record["cases_run"], record["cases_failed"]) == (6, 1, 0)


# -- the launcher -----------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_hanging_rank_is_a_failure_with_its_stack(launcher: Launcher):
    with launcher.start(2, "cpu") as job:
        assert sorted(job.run(yield_pid, deadline_s=HANG_S)) == sorted(
            job.processes()
        )  # and imports its module
        with pytest.raises(JobFailure, match="rank 1 gave no answer") as caught:
            list(job.stream(sleep_on_the_last_rank, deadline_s=10.0))
    assert "in sleep_on_the_last_rank" in str(caught.value)
    assert job.processes() == []


def test_a_rank_that_raises_ends_with_its_traceback(launcher: Launcher, monkeypatch):
    with launcher.start(2, "cpu") as job:
        exit_code, begin = launcher.exit_code, time.monotonic()

        def late(pid: int) -> int | None:  # as on a busy machine
            return None if pid == job.pids[1] and time.monotonic() < begin + 3.0 else exit_code(pid)

        monkeypatch.setattr(launcher, "exit_code", late)
        with pytest.raises(JobFailure, match="rank 1 ended with exit code 1") as caught:
            job.run(raise_on_the_last_rank, deadline_s=HANG_S)
    assert "ZeroDivisionError: on purpose" in str(caught.value)
