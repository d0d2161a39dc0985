"""No false alarm: plan, dispatch and combine, called again and again by ranks that stall up to half the timeout. A case
is one call. Before some calls a rank stalls, half of these times for exactly half of the timeout. The timeout is short,
1 s, so that 10,000 calls take two minutes; what the machine itself makes the ranks wait for has the other half. (With
0.5 s, ranks that shared two cores with a load of 15 to 50 ran into 4 timeouts in 10,000 calls.)"""

import random
import time
from collections.abc import Callable
from functools import partial

import torch
from heap_calls import round_trip

from reliability.suite import SEED_STRIDE, Numbers, Outcome, Results, Suite, on_ranks, percentiles
from symmoe import SymmetricHeap, combine_tokens, dispatch_tokens, make_plan

TIMEOUT_S = 4.0
SHARE = 0.02  # of calls before which a rank stalls, each rank about equally often
CALLS = ("make_plan", "dispatch_tokens", "combine_tokens")


class Round:
    """The three calls of one round, which can be made one by one in order."""

    def __init__(self, heap: SymmetricHeap, number: int) -> None:
        self.heap, self.num_made = heap, 0
        generator = torch.Generator().manual_seed(100 * number + heap.rank)
        num_experts = 2 * heap.num_ranks
        ids = torch.stack(
            [torch.randperm(num_experts, generator=generator)[:2] for _ in range(5)]
        ).to(heap.device)
        self.x = torch.randint(-50, 50, (5, 8), generator=generator).float().to(heap.device)
        self.calls: list[Callable[[], None]] = [
            lambda: self.keep(plan=make_plan(ids, num_experts=num_experts, heap=heap)),
            lambda: self.keep(rows=dispatch_tokens(self.x, self.plan)[0]),
            lambda: self.keep(y=combine_tokens(self.rows, self.plan, order="slot")),
        ]

    def keep(self, **results) -> None:
        self.__dict__ |= results

    def make(self, call: int) -> list[str]:
        """Makes all calls up to this one; what is wrong with the result."""
        for make_call in self.calls[self.num_made : call + 1]:
            make_call()
        self.heap.synchronize()
        self.num_made = call + 1
        exact = self.num_made < len(CALLS) or torch.equal(self.y, 2 * self.x)
        return [] if exact else ["the round trip is not exact"]


def check(rank: int, num_ranks: int, numbers: Numbers, seed: int, device: str) -> Results:
    """Yields per call. A timeout ends the rank, and is the case's failure."""
    backend = "nvshmem" if device == "cuda" else "host"
    with SymmetricHeap(num_bytes=1 << 20, backend=backend) as heap:
        round_trip(heap)  # compiles kernels on GPUs
    current, current_number = None, -1
    with SymmetricHeap(num_bytes=1 << 20, backend=backend, timeout_s=TIMEOUT_S) as heap:
        for number in numbers:
            start, (round_number, call) = time.perf_counter(), divmod(number, len(CALLS))
            generator = random.Random(f"{seed * SEED_STRIDE + number}, {rank}")
            stall_s = 0.0
            if generator.random() < SHARE / num_ranks:
                stall_s = TIMEOUT_S / 2 * (1.0 if generator.random() < 0.5 else generator.random())
                time.sleep(stall_s)
            if round_number != current_number:
                current, current_number = (
                    Round(heap, seed * SEED_STRIDE + round_number),
                    round_number,
                )
            problems = current.make(call)
            yield (
                1e3 * (time.perf_counter() - start),
                problems,
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
