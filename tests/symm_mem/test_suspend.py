"""A heap returns its memory to the system and restores it: layers and graphs keep working, and no call works in
between."""

import re
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from captured_cases import HostGraph
from cluster import run_on
from heap_calls import outcome, round_trip
from layers import config_for, make_layer, tokens_of
from limits import PROMPT_S
from worker import Findings, open_heap

import symmoe
from symmoe.symm_mem.streams import NoStreams
from symmoe.training.captured_step import CudaGraph


def used_bytes(device: str) -> int:
    """Bytes in use of this rank's GPU, or of its shared memory."""
    if device == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return total_bytes - free_bytes
    return int(re.findall(r"RssShmem:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10


@run_on(2, on_gpus=[2])
def test_a_layer_has_the_same_bits_after_suspends(
    rank: int, num_ranks: int, findings: Findings, device: str
) -> None:
    """Eager steps, programs and a captured step use the same addresses, in five suspends."""
    num_bytes = 1 << 30 if device == "cuda" else 64 << 20
    with open_heap(device, num_bytes=num_bytes, programs="on", fills="0") as heap:
        layer, _ = make_layer(heap, config_for(num_ranks, device))
        x = tokens_of(rank, 40, layer.config.hidden).to(heap.device)

        def step(x: torch.Tensor) -> torch.Tensor:
            y, _ = layer(x)
            y.square().sum().backward()
            return y

        captured = symmoe.capture_step(step, layer, num_eager=1)
        if device == "cpu":
            captured.make_graph = lambda function, heaps: HostGraph(layer, [], function, heaps)

        def results() -> list[torch.Tensor]:
            tensors = []
            for run in (captured, step):
                layer.zero_grad()
                tensors += [run(x).detach().clone(), *(p.grad.clone() for p in layer.parameters())]
            return tensors

        expected = [results() for _ in range(4)][-1]
        before = heap.peers.bases.tolist(), dict(heap.row_histories), captured.num_captures
        for number in range(5):
            with heap.lease((num_bytes // 2,), torch.uint8, name="rows") as lease:
                lease.tensor.fill_(7)
            bytes_before = used_bytes(device)
            heap.suspend()
            heap.suspend()
            freed_bytes = bytes_before - used_bytes(device)
            findings.check(
                freed_bytes > num_bytes * (0.9 if device == "cuda" else 0.45),
                f"{freed_bytes} bytes back",
            )
            calls = (
                lambda: captured(x),
                lambda: step(x),
                heap.check,
                heap.synchronize,
                lambda: heap.lease((1,), x.dtype),
            )
            with (
                mock.patch.object(HostGraph, "replay", None),
                mock.patch.object(CudaGraph, "replay", None),
            ):
                findings.equal("suspended", {outcome(call)[0] for call in calls}, {"HeapSuspended"})
            heap.resume()
            heap.resume()
            with heap.lease((num_bytes // 2,), torch.uint8, name="rows") as lease:
                findings.check(not lease.tensor.any(), "old rows")
            findings.same_bits(results(), expected, f"other bits in round {number}")
        findings.equal(
            "kept",
            (heap.peers.bases.tolist(), dict(heap.row_histories), captured.num_captures),
            before,
        )
        findings.check(captured.num_replays >= 5, "no replays")
        captured.close()


@run_on(2, on_gpus=[2])
def test_live_leases_prevent_a_suspend_on_all_ranks(
    rank: int, num_ranks: int, findings: Findings, device: str
) -> None:
    """Leases of saved activations, and a lease of one rank only: all ranks raise, and the heap continues."""
    with open_heap(device) as heap:
        layer, _ = make_layer(heap, config_for(num_ranks, device))
        y, _ = layer(tokens_of(rank, 40, layer.config.hidden).to(heap.device))
        name, text = outcome(heap.suspend)
        findings.check(
            name == "ArgumentError" and "are live, the largest are 'received rows' of" in text, text
        )
        y.sum().backward()
        cycle = [heap.lease((rank * 1000,), torch.uint8, name="mine") if rank else None]
        name, text = outcome(heap.suspend)
        findings.check(
            name == "ArgumentError"
            and "1 leases of 1000 bytes are live, the largest are 'mine'" in text,
            text,
        )
        cycle.append(cycle)
        del y, cycle
        heap.suspend()
        heap.resume()
        findings.check(round_trip(heap), "afterwards")


@pytest.mark.parametrize("end", ["close", "leave", "abort"])
@run_on(2, on_gpus=[2])
def test_a_suspended_heap_can_be_closed(rank: int, num_ranks: int, end: str, device: str) -> None:
    heap = symmoe.SymmetricHeap(num_bytes=8 << 20, backend="host" if device == "cpu" else "nvshmem")
    assert round_trip(heap)
    heap.suspend()
    if end == "leave":
        with pytest.raises(ZeroDivisionError), heap:
            raise ZeroDivisionError
    if end == "abort":
        if rank == 1:
            heap.abort("a reason")
        text = "on rank 1: an earlier call failed: this rank gave up: a reason"
        assert outcome(heap.resume) == ("HeapPoisoned", text)
    heap.close()
    for call in (heap.check, heap.suspend, heap.resume):
        with pytest.raises(symmoe.errors.HeapClosed):
            call()
    with symmoe.SymmetricHeap(num_bytes=8 << 20, backend=heap.backend) as again:
        assert round_trip(again)


@pytest.mark.parametrize("call", ["suspend", "resume"])
@run_on(2)
def test_a_missing_rank_is_a_timeout(rank: int, num_ranks: int, call: str) -> None:
    group = dist.new_group(backend="gloo")  # it breaks
    heap = symmoe.SymmetricHeap(group, num_bytes=8 << 20, backend="host", timeout_s=0.5)
    if call == "resume":
        heap.suspend()
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(
            symmoe.errors.PeerTimeout,
            match=r"rank 1 did not reach 'suspend or resume' within timeout_s=0\.5",
        ):
            getattr(heap, call)()
        assert time.monotonic() - start < PROMPT_S
    dist.barrier()
    if rank == 0 or call == "resume":
        heap.close()
    else:
        with pytest.raises(symmoe.errors.PeerAborted):
            heap.close()


@run_on(2)
def test_errors_of_one_rank_raise_on_all_ranks(rank: int, num_ranks: int) -> None:
    """One rank cannot suspend, one cannot resume, one fails while it suspends: all ranks raise the error."""
    with symmoe.SymmetricHeap(num_bytes=8 << 20, backend="host", ranks_per_node=1) as heap:
        assert outcome(heap.suspend)[1].startswith("suspend: a heap that spans nodes cannot")
        assert round_trip(heap)
    with (
        symmoe.SymmetricHeap(num_bytes=8 << 20, backend="host") as heap,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(heap._arenas, "suspend_problem", "no way back" if rank else "")
        assert outcome(heap.suspend) == ("BackendUnavailable", "on rank 1: suspend: no way back")
        assert round_trip(heap)
        patch.undo()
        with patch.context() as of_graph:
            of_graph.setattr(NoStreams, "capture", 1)
            assert outcome(heap.suspend)[1].startswith("suspend: a CUDA graph is being captured")
        heap.suspend()
        problem = symmoe.errors.BackendUnavailable("too small") if rank else None
        patch.setattr(heap._arenas, "resume", lambda group: group.agree(problem))
        assert outcome(heap.resume) == ("BackendUnavailable", "on rank 1: too small")
        assert outcome(heap.check)[0] == "HeapSuspended"
        patch.undo()
        heap.resume()
        assert round_trip(heap)
    with (
        symmoe.SymmetricHeap(num_bytes=8 << 20, backend="host") as heap,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(heap._arenas, "suspend", lambda: 1 / (1 - rank))
        assert outcome(heap.suspend) == (
            "BackendUnavailable",
            "on rank 1: ZeroDivisionError: division by zero",
        )
        assert [outcome(call)[0] for call in (heap.suspend, heap.resume)] == [
            "HeapSuspended",
            "HeapPoisoned",
        ]


def test_other_threads_can_neither_lease_nor_resume(
    heap: symmoe.SymmetricHeap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread gets a lease after suspend's check for leases, or resumes or closes a heap that another resumes."""
    barrier = heap.barrier
    late = []
    monkeypatch.setattr(
        heap, "barrier", lambda phase: late.extend([barrier(phase), heap.lease((9,), torch.uint8)])
    )
    name, text = outcome(heap.suspend)
    assert (name, "'lease' of 9 bytes" in text) == ("ArgumentError", True)
    monkeypatch.undo()
    assert round_trip(heap)
    late.clear()
    heap.suspend()
    begun = threading.Event()
    goes_on = threading.Event()
    monkeypatch.setattr(heap._arenas, "resume", lambda group: begun.set() or goes_on.wait(PROMPT_S))
    thread = threading.Thread(target=heap.resume, name="first")
    thread.start()
    assert begun.wait(60.0)
    for call in (heap.resume, heap.close):
        name, text = outcome(call)
        assert (name, "on which thread 'first' is in a call" in text) == ("ConcurrentUse", True)
    goes_on.set()
    thread.join()
    assert round_trip(heap)
