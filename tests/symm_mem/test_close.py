"""Closing a heap of which a rank stays away, or raises inside of `heap.close()`: nobody waits longer than the bound."""

from __future__ import annotations

import signal
import time

import pytest
import torch.distributed as dist
from heap_calls import round_trip
from limits import HANG_S, PROMPT_S
from worker import wait_for_arrivals

from symmoe import SymmetricHeap
from symmoe.errors import HeapClosed, PeerAborted, PeerTimeout

TIMEOUT_S = 10 * PROMPT_S
VICTIM, SLOW = 1, 2


class OwnError(BaseException):
    """As KeyboardInterrupt: no Exception."""


def raise_own_error(*args: object) -> None:
    raise OwnError("of a signal handler")


def raise_in_close(rank: int, num_ranks: int, where: str) -> dict:
    heap = SymmetricHeap(num_bytes=1 << 20, backend="host", timeout_s=TIMEOUT_S)
    facts = {"exact": round_trip(heap)}
    dist.barrier()
    if rank == VICTIM and where == "before the barrier":
        heap.streams.synchronize = raise_own_error
    if rank == VICTIM and where == "in the wait":
        signal.signal(signal.SIGALRM, raise_own_error)
        wait = heap.waits.barrier
        heap.waits.barrier = lambda call: signal.setitimer(signal.ITIMER_REAL, 0.2) and wait(call)
    if rank == SLOW:  # so that the others wait
        time.sleep(0.5)
    start = time.monotonic()
    try:
        heap.close()
    except PeerAborted as error:
        facts |= {"rank": error.rank, "reason": error.reason}
    except OwnError:
        facts["rank"] = "own"
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    facts["close_s"] = time.monotonic() - start
    heap.close()  # closed twice is closed
    try:
        heap.check()
    except HeapClosed:
        facts["closed"] = True
    dist.barrier()
    with SymmetricHeap(num_bytes=1 << 20, backend="host", timeout_s=TIMEOUT_S) as again:
        facts["works"] = round_trip(again)
    return facts


@pytest.mark.parametrize("where", ["before the barrier", "in the wait"])
def test_peers_of_a_rank_that_raises_in_close(cluster, where: str):
    for rank, facts in enumerate(cluster(3).run(raise_in_close, where)):
        assert facts["exact"]
        assert facts["works"]
        assert facts["closed"]
        assert facts["close_s"] < PROMPT_S  # and not timeout_s
        if rank == VICTIM:
            assert facts["rank"] == "own"
        else:
            assert (facts["rank"], facts["reason"]) == (VICTIM, "OwnError: of a signal handler")


def close_alone(rank: int, num_ranks: int) -> tuple[str, float]:
    """Rank 0 stays away; the others wait for it no longer than timeout_s."""
    heap = SymmetricHeap(num_bytes=1 << 20, backend="host", timeout_s=HANG_S, start_timeout_s=HANG_S)
    text, start = "", time.monotonic()
    if rank == 1:  # only this rank loses patience with rank 0
        wait_for_arrivals(heap, [2])
        heap.timeout_s = 0.5
    try:
        if rank:
            heap.close()
    except PeerTimeout as error:
        text = str(error)
    seconds = time.monotonic() - start
    dist.barrier()
    return text, seconds


def test_close_waits_no_longer_than_the_timeout(cluster):
    first, *others = cluster(3).run(close_alone)
    assert first[0] == ""
    for text, seconds in others:
        assert text.startswith("rank 0 did not reach 'close' within ")
        assert seconds < PROMPT_S
    assert "within timeout_s=0.5" in others[0][0]
