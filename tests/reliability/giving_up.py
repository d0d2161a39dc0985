"""What a rank that gives up leaves behind, on CPUs: a part of the mutations suite."""

import time
from contextlib import suppress
from unittest.mock import patch

import torch
import torch.distributed as dist

from reliability.suite import Numbers, Results
from symmoe import SymmetricHeap
from symmoe.errors import PeerAborted, PeerError, PeerTimeout
from symmoe.kernels import control
from symmoe.kernels.twin import sync

_PHASE = control.PHASE_DISPATCH_READY


def _new_heap(timeout_s: float) -> SymmetricHeap:
    heap = SymmetricHeap(num_bytes=1 << 20, backend="host", timeout_s=timeout_s)
    heap.start_timeout_s = timeout_s
    return heap


def _end(heap: SymmetricHeap) -> None:
    with suppress(PeerError):
        heap.close()


def rows_of_a_failed_call(rank: int, num_ranks: int) -> list[str]:
    """They are NaN, so that nobody takes them for a result."""
    heap = _new_heap(30.0)
    rows, problems = heap.lease((7, 5), torch.float32).tensor.fill_(3.0), []
    dist.barrier()
    if rank == num_ranks - 1:
        heap.abort("on purpose")
    else:
        try:
            heap.barrier(_PHASE, nan_on_failure=rows)
            problems.append("nothing is raised after an abort")
        except PeerAborted:
            if not rows.isnan().all():
                problems.append(f"rows of a failed call: {rows[0].tolist()}")
    _end(heap)
    return problems


def a_late_rank(rank: int, num_ranks: int) -> list[str]:
    """It does not succeed in the call that the others have given up."""
    heap, late = _new_heap(0.5), 0
    if rank == late:
        dist.barrier()
    try:
        heap.barrier(_PHASE)
        raised = None
    except (PeerTimeout, PeerAborted) as error:
        raised = type(error).__name__
    if rank != late:
        dist.barrier()  # all have given up: now the late rank comes
    _end(heap)
    want = "PeerAborted" if rank == late else "PeerTimeout"
    return (
        []
        if raised == want
        else [f"{'the late rank' if rank == late else 'another rank'} raises {raised}"]
    )


def what_had_come(rank: int, num_ranks: int) -> list[str]:
    """A rank that gives up after a call does not take it from those who are slow to see its end."""
    heap, wait, problems = _new_heap(30.0), sync._wait, []

    def late(*args):
        time.sleep(0.1)
        return wait(*args)

    gives_up = rank == num_ranks - 1
    dist.barrier()
    with patch.object(sync, "_wait", wait if gives_up else late):
        try:
            heap.barrier(_PHASE)
        except PeerAborted as error:
            problems.append(f"a call that all have entered fails: {error}")
    if gives_up:
        heap.abort("on purpose")
    elif not problems:
        try:
            heap.barrier(_PHASE)
            problems.append("nothing is raised after an abort")
        except PeerAborted:
            pass
    _end(heap)
    return problems


CASES = (rows_of_a_failed_call, a_late_rank, what_had_come)


def check(rank: int, num_ranks: int, numbers: Numbers, seed: int, device: str) -> Results:
    """Yields per case."""
    for number in numbers:
        yield 0.0, CASES[number](rank, num_ranks), {}
