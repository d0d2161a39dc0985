"""No false alarm: plan, dispatch and combine, called again and again by ranks that stall up to half the timeout. A case
is one call. Before some calls a rank stalls, half of these times for exactly half of the timeout. The timeout is short,
1 s, so that 10,000 calls take two minutes; what the machine itself makes the ranks wait for has the other half. (With
0.5 s, ranks that shared two cores with a load of 15 to 50 ran into 4 timeouts in 10,000 calls.)"""

import random
import time
from functools import partial

from heap_calls import calls_of_a_round_trip, round_trip

from reliability.suite import SEED_STRIDE, Numbers, Outcome, Results, Suite, on_ranks, percentiles
from symmoe import SymmetricHeap

TIMEOUT_S = 4.0
SHARE = 0.02  # of calls before which a rank stalls, each rank about equally often
NUM_CALLS = 3  # of a round


def check(rank: int, num_ranks: int, numbers: Numbers, seed: int, device: str) -> Results:
    """Yields an outcome for each call. A timeout ends the rank, and is the case's failure."""
    backend = "nvshmem" if device == "cuda" else "host"
    with SymmetricHeap(num_bytes=1 << 20, backend=backend) as heap:
        round_trip(heap)  # compiles kernels on GPUs
    current_number = -1
    with SymmetricHeap(num_bytes=1 << 20, backend=backend, timeout_s=TIMEOUT_S) as heap:
        for number in numbers:
            start = time.perf_counter()
            round_number, call = divmod(number, NUM_CALLS)
            generator = random.Random(f"{seed * SEED_STRIDE + number}, {rank}")
            stall_s = 0.0
            if generator.random() < SHARE / num_ranks:
                stall_s = TIMEOUT_S / 2 * (1.0 if generator.random() < 0.5 else generator.random())
                time.sleep(stall_s)
            if round_number != current_number:
                current_number = round_number
                seed_of_round = 100 * (seed * SEED_STRIDE + round_number)
                calls = enumerate(calls_of_a_round_trip(heap, seed_of_round))
            is_exact = next(exact for call_number, exact in calls if call_number == call)
            heap.synchronize()
            yield (
                1e3 * (time.perf_counter() - start),
                [] if is_exact else ["the round trip is not exact"],
                {"stall_ms": 1e3 * stall_s} if stall_s else {},
            )


def summarize(outcomes: list[Outcome]) -> dict:
    stalls = [ms for outcome in outcomes for ms in outcome.facts.get("stall_ms", []) if ms]
    return {
        "timeout_ms": 1e3 * TIMEOUT_S,
        "num_stalls": len(stalls),
        "stall_ms": percentiles(stalls),
    }


SUITE = Suite(
    partial(on_ranks, check=check, deadline_s=30.0), num_cases=10_000, summarize=summarize
)
