"""What `heap.suspend()` gives back, and how long it and `heap.resume()` take, by the size of the heap.

    torchrun --nproc-per-node=2 benchmarks/suspend.py --gib 1,8 --json suspend.json

Times are those of the slowest rank, MiB those of the rank that gives the least: of its GPU, or of shared memory, which
is taken at the first write. So the heap is filled before.
"""

import argparse
import re
import time
from pathlib import Path

import numpy as np
import torch
from suites.records import Record, measured_on, new_record, show

from symmoe import SymmetricHeap
from symmoe.tools.ranks import Ranks, join


def held_mib(device: torch.device) -> float:
    """What is held of this rank's GPU, or of shared memory."""
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return (total_bytes - free_bytes) / 2**20
    return (
        int(re.findall(r"RssShmem:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) / 2**10
    )


def bench(gib: float, ranks: Ranks, repetitions: int) -> list[Record]:
    """Records of one heap. Collective."""
    times, given_back = {"suspend": list[float](), "resume": list[float]()}, list[float]()
    with SymmetricHeap(num_bytes=int(gib * 2**30)) as heap:
        for _ in range(repetitions):
            with heap.lease((heap.memory.arena.largest_free_bytes,), torch.uint8) as lease:
                lease.tensor.fill_(1)
            held = held_mib(ranks.device)
            for name, times_ms in times.items():
                ranks.barrier()
                start = time.perf_counter()
                getattr(heap, name)()
                times_ms.append(ranks.largest((time.perf_counter() - start) * 1e3))
                if name == "suspend":
                    given_back.append(-ranks.largest(held_mib(ranks.device) - held))
    more = {
        "suite": "suspend",
        "ep": ranks.num_ranks,
        "heap_gib": gib,
        "given_back_mib": min(given_back),
    }
    more["variant"] = f"{gib:g} GiB, {more['given_back_mib']:.0f} MiB back"
    return [
        new_record(np.array(times_ms), direction=name, **more) for name, times_ms in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", default="1,8", help="sizes of heaps (%(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the records to FILE")
    options = parser.parse_args()
    with join() as ranks:
        about = measured_on(ranks)
        sizes = map(float, options.gib.split(","))
        records = [each | about for gib in sizes for each in bench(gib, ranks, options.repetitions)]
    if ranks.rank == 0:
        show(records, options.json)


if __name__ == "__main__":
    main()
