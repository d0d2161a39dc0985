"""Closing a heap of which a rank stays away, or raises inside of `heap.close()`: no rank waits longer than the bound.
And the end of processes that close and destroy nothing."""

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cluster import run_on
from heap_calls import round_trip
from limits import HANG_S, PROMPT_S
from worker import wait_for_arrivals

import symmoe
from symmoe import SymmetricHeap
from symmoe.errors import CapacityError, HeapClosed, PeerAborted, PeerTimeout
from symmoe.symm_mem.streams import NoStreams

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 10 * PROMPT_S
VICTIM, SLOW = 1, 2


class OwnError(BaseException):
    """An error that is no Exception, like KeyboardInterrupt."""


def raise_own_error(*args: object) -> None:
    raise OwnError("of a signal handler")


@run_on(2, on_gpus=(1, 2))
def test_an_error_of_the_last_call_is_raised_by_close(
    rank: int, num_ranks: int, device: str
) -> None:
    """On GPUs a later call of the host finds that a static capacity was too small."""
    backend = "host" if device == "cpu" else "auto"
    heap = SymmetricHeap(num_bytes=4 << 20, backend=backend)
    ids = torch.zeros((8, 2), dtype=torch.int32, device=heap.device)
    with mock.patch.object(NoStreams, "raises_at_once", False):
        symmoe.make_plan(ids, num_experts=2 * num_ranks, heap=heap, capacity=4)
        with pytest.raises(CapacityError, match="more than capacity"):
            heap.close()
    with pytest.raises(HeapClosed):
        heap.check()
    heap.close()
    with SymmetricHeap(num_bytes=4 << 20, backend=backend) as again:
        assert round_trip(again)


@pytest.mark.parametrize("where", ["before the barrier", "in the wait"])
@run_on(3)
def test_a_rank_that_raises_in_close_aborts_its_peers(
    rank: int, num_ranks: int, where: str
) -> None:
    heap = SymmetricHeap(num_bytes=1 << 20, backend="host", timeout_s=TIMEOUT_S)
    assert round_trip(heap)
    dist.barrier()
    if rank == VICTIM and where == "before the barrier":
        heap.streams.synchronize = raise_own_error
    if rank == VICTIM and where == "in the wait":
        signal.signal(signal.SIGALRM, raise_own_error)
        wait = heap.waits.wait
        heap.waits.wait = lambda call: signal.setitimer(signal.ITIMER_REAL, 0.2) and wait(call)
    if rank == SLOW:  # so that the others wait
        time.sleep(0.5)
    start = time.monotonic()
    try:
        with pytest.raises(OwnError if rank == VICTIM else PeerAborted) as raised:
            heap.close()
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    close_s = time.monotonic() - start
    heap.close()  # closed twice is closed
    with pytest.raises(HeapClosed):
        heap.check()
    dist.barrier()
    with SymmetricHeap(num_bytes=1 << 20, backend="host", timeout_s=TIMEOUT_S) as again:
        assert round_trip(again)
    assert close_s < PROMPT_S  # and not timeout_s
    if rank != VICTIM:
        assert (raised.value.rank, raised.value.reason) == (VICTIM, "OwnError: of a signal handler")


@run_on(3)
def test_close_waits_no_longer_than_the_timeout(rank: int, num_ranks: int) -> None:
    """Rank 0 stays away; the others wait for it no longer than timeout_s."""
    heap = SymmetricHeap(
        num_bytes=1 << 20, backend="host", timeout_s=HANG_S, start_timeout_s=HANG_S
    )
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
    assert seconds < PROMPT_S
    assert text.startswith("rank 0 did not reach 'close' within ") if rank else text == ""
    assert rank != 1 or "within timeout_s=0.5" in text


def ends(num_pairs: int, kind: str, folder: Path) -> tuple[list[int], str]:
    """Exit statuses of pairs of ranks, and their output on stderr."""
    command = [
        sys.executable,
        ROOT / "tests" / "support" / "many_ends.py",
        str(num_pairs),
        kind,
        folder,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=True
    )
    return ast.literal_eval(process.stdout), process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a heap", "a layer"])
def test_processes_that_close_nothing_end_well(tmp_path: Path, kind: str):
    codes, errors = ends(20, kind, tmp_path)
    assert codes == [0] * len(codes), errors
    assert len(codes) >= 4  # 40, unless other processes are busy too


@pytest.mark.slow
@pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="Python does not end other threads any more"
)
def test_processes_without_a_heap_may_crash_at_their_end(tmp_path: Path):
    """Negative control of the test above. The fault is in torch (symm_mem/bootstrap.py)."""
    codes, errors = ends(100, "without a heap", tmp_path)
    assert set(codes) <= {0, -6}
    assert -6 in codes
    assert "terminate called without an active exception" in errors
