"""50 heaps made, used and closed in one process, then 20 jobs one after the other: each works, and nothing is left."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

from conftest import left_in_shared_memory, shared_memory
from test_heap import round_trip

from reliability.launch import Launcher
from reliability.step import num_arenas_mapped, num_open_files
from reliability.suite import Outcome, Run, Suite, merged, on_ranks
from symmoe import SymmetricHeap

CYCLES, JOBS = 50, 20


def check(
    rank: int, num_ranks: int, numbers: tuple[int, ...], seed: int, device: str
) -> Iterator[tuple[float, list[str], dict[str, Any]]]:
    """Yields per cycle. What the first one leaves (libraries that are loaded) may stay; later ones add nothing."""
    before = None
    for number in numbers:
        start, problems = time.perf_counter(), []
        backend, timeout_s = ("nvshmem", 120.0) if device == "cuda" else ("host", 30.0)
        with SymmetricHeap(num_bytes=1 << 20, backend=backend, timeout_s=timeout_s) as heap:
            if not round_trip(heap, number):
                problems.append("the round trip is not exact")
        del heap
        gc.collect()
        left = num_open_files(), num_arenas_mapped()
        before = left if before is None else before
        if left != before or left[1]:
            problems.append(f"(open files, arenas mapped) are {left}, after the first cycle {before}")
        yield 1e3 * (time.perf_counter() - start), problems, {}


def run_cases(run: Run, launcher: Launcher) -> Iterator[Outcome]:
    shm_before = shared_memory()
    cycles = tuple(number for number in run.numbers if number < CYCLES)
    if cycles:
        yield from on_ranks(Run(cycles, run.num_ranks, run.device, run.seed), launcher, check, deadline_s=30.0)
    for number in run.numbers:
        if number < CYCLES:
            continue
        start = time.perf_counter()
        with launcher.start(run.num_ranks, run.device) as job:
            (results,) = job.stream(check, (number,), run.seed, run.device, deadline_s=run.seconds(30.0))
            job.close()
            codes = [job.exit_code(rank, deadline=0.0) for rank in range(run.num_ranks)]
        problems = [text for _, texts, _ in results for text in texts]
        if any(codes):
            problems.append(f"the ranks ended with {codes}")
        if job.processes():
            problems.append(f"processes {job.processes()} are left")
        if left := left_in_shared_memory(shm_before):
            problems.append(f"{sorted(left)} are left in /dev/shm")
        yield merged(number, [(1e3 * (time.perf_counter() - start), problems, {})])


SUITE = Suite(run_cases, num_cases=CYCLES + JOBS)
