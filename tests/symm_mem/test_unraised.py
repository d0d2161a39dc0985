"""A rank leaves a call by its own error before it has raised the error that all ranks have found there. On GPUs hosts
look for errors late; here they do not look. tests/gpu/test_unraised_gpu.py has hosts that are really late."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from cluster import run_on
from heap_calls import outcome, round_trip
from worker import Findings, open_heap

from symmoe import SymmetricHeap, combine_tokens, dispatch_tokens, make_plan
from symmoe.kernels import control
from symmoe.symm_mem.faults import has_left_call

T, K, H = 6, 2, 16


@contextmanager
def looking_away(heap: SymmetricHeap) -> Iterator[None]:
    """The host continues and looks for no error."""
    heap.check = lambda phase=None, *, waits=False: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del heap.check


def plan_of(heap: SymmetricHeap, *, capacity: int | None = None):
    ids = (torch.arange(T)[:, None] + torch.arange(K)) % (2 * heap.num_ranks)
    return make_plan(ids, num_experts=2 * heap.num_ranks, heap=heap, capacity=capacity)


def fail_together(heap: SymmetricHeap, capacity: int | None, leaver: bool) -> tuple[str, str]:
    """A dispatch in which the first rank of each node has another hidden size, which only barriers find. The error that
    this rank raises by the end of the call; a leaver leaves before it looks."""
    plan = plan_of(heap, capacity=capacity)
    with looking_away(heap):
        rows, _, handle = dispatch_tokens(
            torch.ones(T, 2 * H if heap.topology.local_rank == 0 else H), plan
        )
    if leaver:
        return "", ""
    return outcome(combine_tokens, rows, handle)


@pytest.mark.parametrize("capacity", [None, 4 * T * K])
@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "leavers"),
    [
        (2, 2, (0,)),
        (2, 2, (1,)),
        (3, 3, (0, 2)),
        (3, 3, (0, 1, 2)),
        (4, 2, (2, 3)),  # a node
        (4, 2, (0, 2)),  # a rail
        (4, 2, (0, 1, 3)),
        (4, 2, (0, 1, 2, 3)),
    ],
)
@run_on()
def test_the_next_correct_call_after_a_left_one_works(
    rank: int,
    num_ranks: int,
    findings: Findings,
    ranks_per_node: int,
    leavers: tuple[int, ...],
    capacity: int | None,
) -> None:
    with open_heap("cpu", ranks_per_node=ranks_per_node) as heap:
        for turn in range(4):
            findings.where = f"turn {turn}, rank {rank} of {num_ranks}"
            name, text = fail_together(heap, capacity, rank in leavers)
            if rank not in leavers:
                findings.equal("error", name, "ConfigMismatch")
                findings.check(
                    "hidden differs at 'dispatch: ready': rank 0 has 32, rank 1 has 16" in text,
                    text,
                )
            if len(leavers) == num_ranks:  # no rank has raised the error
                name, text = outcome(plan_of, heap)
                findings.equal("error of the next plan", name, "ConfigMismatch")
                findings.check("hidden differs at 'dispatch: ready'" in text, text)
            for again in range(2):
                name, text = outcome(
                    lambda turn=turn: findings.check(round_trip(heap, turn), "rows are wrong")
                )
                findings.equal(f"error of correct call {again}", (name, text), ("", ""))
        findings.equal("leased bytes", heap.leased_bytes, 0)


@run_on(2)
def test_the_next_wrong_call_after_a_left_one_raises_on_all_ranks(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap
) -> None:
    """Rank 0 has left a failed call, or a plan, and its next call is wrong or late; all ranks raise the same error."""

    def raised(name_of_case: str, actual: tuple[str, str], name: str, part: str) -> None:
        findings.where = f"{name_of_case}, rank {rank} of {num_ranks}"
        findings.check(
            actual[0] == name and part in actual[1], f"raised {actual}, want {name} with {part!r}"
        )
        findings.check(round_trip(heap), "the next correct call is wrong")

    def next_call() -> None:
        """With static capacity the host of the leaver may have launched the next plan before it looks."""
        with looking_away(heap) if rank == 0 else nullcontext():
            plan = plan_of(heap, capacity=4 * T * K)
        dispatch_tokens(torch.ones(T, H), plan)

    for _ in range(3):
        fail_together(heap, 4 * T * K, rank == 0)
        raised(
            "a plan that was launched",
            outcome(next_call),
            "ConfigMismatch",
            "hidden differs at 'dispatch: ready'",
        )
    for _ in range(3):  # an overflow, found by a plan, and not by its barrier
        with looking_away(heap) if rank == 1 else nullcontext():
            actual = outcome(plan_of, heap, capacity=1)
        raised("an overflow", actual, "" if rank == 1 else "CapacityError", "")
    for culprit in range(
        num_ranks
    ):  # the next call of the leaver, or of its peer, is wrong as well
        fail_together(heap, None, rank == 0)
        ids = torch.zeros(T, K, dtype=torch.float32 if rank == culprit else torch.int64)
        actual = outcome(make_plan, ids, num_experts=2 * num_ranks, heap=heap)
        raised(
            f"wrong on rank {culprit}", actual, "ArgumentError", "topk_idx has dtype torch.float32"
        )


PLAN, READY, DONE = control.PHASE_PLAN, control.PHASE_DISPATCH_READY, control.PHASE_DISPATCH_DONE
NODES_PLAN = control.PHASE_NODES_PLAN
COMBINE, END = control.PHASE_COMBINE_READY, control.PHASE_COMBINE_DONE


@pytest.mark.parametrize(
    ("phase", "since", "want"),
    [
        (READY, [PLAN], True),
        (READY, [DONE, PLAN], True),
        (DONE, [PLAN, READY], True),
        (PLAN, [PLAN], True),
        (PLAN, [NODES_PLAN, PLAN], True),
        (NODES_PLAN, [PLAN], True),
        (NODES_PLAN, [READY, DONE, PLAN], False),
        (READY, [None], False),
        (READY, [DONE, READY], False),
        (READY, [DONE, COMBINE], False),
        (
            READY,
            [DONE, COMBINE, END, PLAN],
            False,
        ),  # a call that was gone through, and the next layer's
        (PLAN, [READY, PLAN], False),
        (COMBINE, [PLAN], False),
        (END, [PLAN], False),
    ],
)
def test_left_calls_are_recognised_by_their_phases(phase: int, since: list[int | None], want: bool):
    assert has_left_call(phase, since) is want
