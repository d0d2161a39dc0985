"""50 heaps made, used and closed in one process, and 20 jobs one after the other: each works, and nothing is left. With
several jobs these begin while the heaps are made, and take memory of the same GPUs for a while. If every heap kept its
arena, the most that is ever free would be less among the later cycles than among the earlier ones, by many arenas. It
is a little less in any case: NVSHMEM 3.4.5 makes two CUDA streams in each of its inits and destroys neither
(https://github.com/NVIDIA/nvshmem/issues/77), about 1 MiB a cycle on H200s."""

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from heap_calls import round_trip
from shared_memory import left_in_shared_memory, shared_memory

from reliability.launch import JobFailure, Launcher
from reliability.step import num_arenas_mapped, num_open_files
from reliability.suite import Numbers, Outcome, Results, Run, Suite, in_parallel, merged, on_ranks
from symmoe import SymmetricHeap

CYCLES, JOBS = 50, 20
ARENA_BYTES = {"cpu": 1 << 20, "cuda": 32 << 20}
LOST_BYTES = 50 << 20  # allowed from the earlier half of the cycles to the later one: 2 MiB of each


def check(rank: int, num_ranks: int, numbers: Numbers, seed: int, device: str) -> Results:
    """Yields an outcome for each cycle. Resources of the first two cycles (loaded libraries) may stay; later cycles
    must add none."""
    before, free_bytes = None, []
    for turn, number in enumerate(numbers):
        start, problems = time.perf_counter(), []
        backend = "nvshmem" if device == "cuda" else "host"
        with SymmetricHeap(num_bytes=ARENA_BYTES[device], backend=backend) as heap:
            if not round_trip(heap, number):
                problems.append("the round trip is not exact")
        del heap
        gc.collect()
        remaining = num_open_files(), num_arenas_mapped()
        before = remaining if turn < 2 else before
        if remaining != before or remaining[1]:
            problems.append(
                f"(open files, arenas mapped) are {remaining}, after the second cycle {before}"
            )
        if device == "cuda":
            free_bytes.append(torch.cuda.mem_get_info()[0])
            if number == numbers[-1] and (lost := lost_bytes(free_bytes)) > LOST_BYTES:
                problems.append(
                    f"of the GPU, {lost} bytes less are free: {[free >> 20 for free in free_bytes]} MiB"
                )
        yield 1e3 * (time.perf_counter() - start), problems, {}


def lost_bytes(free_bytes: list[int]) -> int:
    """The decrease of the largest free memory in the later half of the cycles; the first cycle may load libraries."""
    cycles = free_bytes[1:]
    half = len(cycles) // 2
    return max(cycles[:half]) - max(cycles[half:]) if half else 0


def run_cases(run: Run, launcher: Launcher) -> Iterator[Outcome]:
    cycles = replace(
        run, numbers=tuple(number for number in run.numbers if number < CYCLES), num_jobs=1
    )
    jobs = replace(run, numbers=tuple(number for number in run.numbers if number >= CYCLES))
    works = [
        partial(on_ranks, cycles, launcher, check, deadline_s=30.0),
        partial(run_jobs, jobs, launcher),
    ]
    works = [work for work, part in zip(works, (cycles, jobs), strict=True) if part.numbers]
    if run.num_jobs > 1:
        yield from in_parallel(works)
    else:
        for work in works:
            yield from work()


def run_jobs(run: Run, launcher: Launcher) -> Iterator[Outcome]:
    shm_before = shared_memory()
    for number in run.numbers:
        start = time.perf_counter()
        try:
            with launcher.start(run.num_ranks, run.device) as job:
                (results,) = job.stream(
                    check, (number,), run.seed, run.device, deadline_s=run.seconds(30.0)
                )
                job.close(
                    grace_s=run.seconds(30.0)
                )  # of a busy machine a process needs a while to end
                codes = [job.exit_code(rank, deadline=0.0) for rank in range(run.num_ranks)]
        except JobFailure as failure:
            yield Outcome(number, float("nan"), [str(failure)])
            continue
        problems = [text for _, texts, _ in results for text in texts]
        if any(codes):
            problems.append(f"the ranks ended with {codes}")
        if job.processes():
            problems.append(f"processes {job.processes()} are left")
        if remaining := left_in_shared_memory(shm_before):
            problems.append(f"{sorted(remaining)} are left in /dev/shm")
        yield merged(number, [(1e3 * (time.perf_counter() - start), problems, {})])


SUITE = Suite(run_cases, num_cases=CYCLES + JOBS)
