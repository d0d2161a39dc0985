"""A rank that leaves a call by an error of its own, on GPUs, whose hosts look late: see test_unraised.py."""

import pytest
import torch
from cluster import run_on
from heap_calls import outcome, round_trip
from worker import Findings, open_heap

from symmoe import SymmetricHeap, combine_tokens, dispatch_tokens, make_plan

T, K, H, FFN = 40, 2, 64, 32


def fail_together(heap: SymmetricHeap, capacity: int | None) -> tuple[str, str]:
    """Rank 0 brings another hidden size, and its GEMM refuses the rows. What this rank raises."""
    ids = (torch.arange(T)[:, None] + torch.tensor([0, heap.num_ranks])) % (2 * heap.num_ranks)

    def call() -> None:
        plan = make_plan(
            ids.to(heap.device), num_experts=2 * heap.num_ranks, heap=heap, capacity=capacity
        )
        rows, _, handle = dispatch_tokens(
            torch.ones(T, 2 * H if heap.rank == 0 else H, device=heap.device), plan
        )
        weight = torch.ones(H, FFN, device=heap.device)
        combine_tokens(rows @ weight @ weight.t(), handle)
        heap.synchronize()

    return outcome(call)


@pytest.mark.parametrize("capacity", [None, 4 * T * K])
@run_on(2, device="cuda")
def test_the_next_correct_call_works(
    rank: int, num_ranks: int, findings: Findings, capacity: int | None
) -> None:
    """It has exact capacity, for which the host waits anyway, so that it knows of the error before it begins."""
    with open_heap("cuda") as heap:
        findings.check(round_trip(heap), "the first call is wrong")
        for turn in range(10):
            findings.where = f"turn {turn}, rank {rank} of {num_ranks}"
            name, text = fail_together(heap, capacity)
            findings.equal("error", name, "RuntimeError" if rank == 0 else "ConfigMismatch")
            findings.check(
                rank == 0 or "hidden differs at 'dispatch: ready': rank 0 has 128" in text, text
            )
            for again in range(2):
                name, text = outcome(
                    lambda turn=turn: findings.check(round_trip(heap, turn), "rows are wrong")
                )
                findings.equal(f"error of correct call {again}", (name, text), ("", ""))


def look_late(rank: int, num_ranks: int) -> list[str]:
    """With static capacity nobody waits: the next call works, or fails on all ranks alike, and the one after works."""
    findings = Findings()
    with open_heap("cuda") as heap:
        ids = (torch.arange(T)[:, None] + torch.tensor([0, num_ranks])) % (2 * num_ranks)
        ids = ids.to(heap.device)
        x = torch.ones(T, H, device=heap.device)

        def call() -> None:
            plan = make_plan(ids, num_experts=2 * num_ranks, heap=heap, capacity=4 * T * K)
            rows, _, handle = dispatch_tokens(x, plan)
            y = combine_tokens(rows, handle)
            heap.synchronize()
            findings.check(torch.equal(y, K * x), "rows are wrong")

        call()
        names = []
        for turn in range(10):
            findings.where = f"turn {turn}, rank {rank}"
            fail_together(heap, 4 * T * K)
            names.append(outcome(call)[0])
            findings.equal("error of the call after the next", outcome(call), ("", ""))
    findings.check(set(names) <= {"", "ConfigMismatch"}, f"{names} were raised")
    return [*findings.texts, f"next: {names}"]


def test_with_static_capacity_all_ranks_fail_or_none(cluster):
    results = cluster(2, "cuda").run(look_late)
    assert ([texts[:-1] for texts in results], results[0]) == ([[], []], results[1])
