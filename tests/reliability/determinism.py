"""The same bits: 100 repeats of 10 steps, 40 times with ranks that come late in turn, and in 3 more processes. A case
is one repeat of one step, compared by hash with the first time that its ranks took that step; every repeat has the
arena shifted by another number of bytes. The last cases start new processes, which must find the hashes of the old."""

import time
from collections.abc import Iterator

import torch
from worker import open_heap

from reliability.launch import JobFailure, Launcher
from reliability.step import hash_of_step, make_layer, tokens_of
from reliability.suite import SEED_STRIDE, Numbers, Outcome, Results, Run, Suite, merged, on_ranks
from symmoe import SymmetricHeap

NUM_STEPS, REPEATS, SKEWED, RESTARTS = 10, 100, 40, 3
_SKEW_EVERY = (NUM_STEPS * REPEATS + SKEWED) // SKEWED  # the last of so many cases is a skewed one
_FIRST_RESTART = NUM_STEPS * REPEATS + SKEWED
_SKEW_S = 0.1


def hash_of(heap: SymmetricHeap, step: int, seed: int) -> str:
    """The hash of step number `step`, which determines sizes, order, layout, schedule and capacity."""
    number = seed * SEED_STRIDE + step
    options: dict = {
        "order": ("rank", "slot")[step % 2],
        "layout": ("packed", "expert-major")[step // 2 % 2],
        "schedule": ("serial", "always-overlapped")[step // 4 % 2],
        "stash": ("all", "none")[step // 5 % 2],
    }
    if step % 3 == 0:
        options |= {
            "capacity": 48,
            "overflow": "drop",
            "max_tokens": 17 + NUM_STEPS + 3 * heap.num_ranks,
        }
    return hash_of_step(
        make_layer(heap, number, **options), tokens_of(heap, number, 17 + step + 3 * heap.rank)
    )


def check(rank: int, num_ranks: int, numbers: Numbers, seed: int, device: str) -> Results:
    """Yields an outcome for each repeat."""
    first: dict[int, str] = {}
    with open_heap(device) as heap:
        for number in numbers:
            start, turn = time.perf_counter(), number // _SKEW_EVERY
            skewed = number % _SKEW_EVERY == _SKEW_EVERY - 1
            step = (turn if skewed else number - turn) % NUM_STEPS
            if step not in first:
                first[step] = hash_of(heap, step, seed)
            if skewed and turn % num_ranks == rank:
                time.sleep(_SKEW_S)
            with heap.lease((1 + 512 * (number % 7),), torch.uint8, name="shift"):
                digest = hash_of(heap, step, seed)
            problems = (
                []
                if digest == first[step]
                else [f"step {step} hashes to {digest}, the first time {first[step]}"]
            )
            yield 1e3 * (time.perf_counter() - start), problems, {}


def hashes(rank: int, num_ranks: int, seed: int, device: str) -> Iterator[list[str]]:
    """The hashes of all steps, each run once."""
    with open_heap(device) as heap:
        yield [hash_of(heap, step, seed) for step in range(NUM_STEPS)]


def run_cases(run: Run, launcher: Launcher) -> Iterator[Outcome]:
    repeats = tuple(number for number in run.numbers if number < _FIRST_RESTART)
    if repeats:
        yield from on_ranks(
            Run(repeats, run.num_ranks, run.device, run.seed), launcher, check, deadline_s=60.0
        )
    restarts = [number for number in run.numbers if number >= _FIRST_RESTART]
    expected = None
    for number in [None, *restarts] if restarts else []:
        start = time.perf_counter()
        try:
            with launcher.start(run.num_ranks, run.device) as job:
                actual = job.run(hashes, run.seed, run.device, deadline_s=run.seconds(60.0))
        except JobFailure as failure:
            yield Outcome(
                _FIRST_RESTART if number is None else number, float("nan"), [str(failure)]
            )
            continue
        if expected is None:
            expected = actual
            continue
        ms = 1e3 * (time.perf_counter() - start)
        yield merged(
            number, [(ms, differences(a, b), {}) for a, b in zip(actual, expected, strict=True)]
        )


def differences(actual: list[str], expected: list[str]) -> list[str]:
    pairs = enumerate(zip(actual, expected, strict=True))
    return [
        f"step {step} hashes to {a}, in another process to {b}" for step, (a, b) in pairs if a != b
    ]


SUITE = Suite(run_cases, num_cases=_FIRST_RESTART + RESTARTS)
