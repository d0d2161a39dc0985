"""The suite "suspend": what `heap.suspend()` gives back, and how long it and `heap.resume()` take. `--heap-gib` sets
the size of the heap, which decides both.

Times are those of the slowest rank, MiB those of the rank that gives the least: of its GPU, or of shared memory, which
is taken at the first write. So the heap is filled before.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch

from suites.problem import Problem
from suites.records import Record, new_record
from suites.timing import Run, host_times_ms


def used_mib(device: torch.device) -> float:
    """The used memory of this rank's GPU, or of shared memory, in MiB."""
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return (total_bytes - free_bytes) / 2**20
    return (
        int(re.findall(r"RssShmem:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) / 2**10
    )


def bench_suspend(problem: Problem, run: Run) -> list[Record]:
    """Records of the run's heap, for any problem. Collective."""
    heap, ranks = run.heap, run.ranks
    times: dict[str, list[float]] = {"suspend": [], "resume": []}
    given_back = []
    for _ in range(run.repetitions):
        with heap.lease((heap.memory.arena.largest_free_bytes,), torch.uint8) as lease:
            lease.tensor.fill_(1)
        mib_before = used_mib(ranks.device)
        for name, times_ms in times.items():
            (milliseconds,) = host_times_ms(getattr(heap, name), ranks)
            times_ms.append(ranks.largest(milliseconds))
            if name == "suspend":
                given_back.append(-ranks.largest(used_mib(ranks.device) - mib_before))
    gib = heap.num_bytes / 2**30
    back = min(given_back)
    about = {
        "suite": "suspend",
        "variant": f"{gib:g} GiB, {back:.0f} MiB back",
        "ep": ranks.num_ranks,
        "heap_gib": gib,
        "given_back_mib": back,
    }
    return [
        new_record(np.array(milliseconds), direction=name, **about)
        for name, milliseconds in times.items()
    ]
