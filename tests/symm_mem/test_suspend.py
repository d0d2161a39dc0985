"""A heap gives its memory back and gets it back: what it was keeps working, and nothing works in between."""

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


def held_bytes(device: str) -> int:
    """What is held of this rank's GPU, or of shared memory."""
    if device == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return total_bytes - free_bytes
    return int(re.findall(r"RssShmem:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10


@run_on(2, on_gpus=[2])
def test_a_layer_goes_on(rank: int, num_ranks: int, findings: Findings, device: str) -> None:
    """With the same bits at the same addresses, eagerly, by programs and from a captured step; five times."""
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
            found = []
            for way in (captured, step):
                layer.zero_grad()
                found += [way(x).detach().clone(), *(p.grad.clone() for p in layer.parameters())]
            return found

        wanted = [results() for _ in range(4)][-1]
        before = heap.peers.bases.tolist(), dict(heap.row_histories), captured.num_captures
        for number in range(5):
            with heap.lease((num_bytes // 2,), torch.uint8, name="rows") as lease:
                lease.tensor.fill_(7)
            held = held_bytes(device)
            heap.suspend()
            heap.suspend()
            given_back = held - held_bytes(device)
            findings.check(
                given_back > num_bytes * (0.9 if device == "cuda" else 0.45),
                f"{given_back} bytes back",
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
            findings.same_bits(results(), wanted, f"other bits in round {number}")
        findings.equal(
            "kept",
            (heap.peers.bases.tolist(), dict(heap.row_histories), captured.num_captures),
            before,
        )
        findings.check(captured.num_replays >= 5, "no replays")
        captured.close()


@run_on(2, on_gpus=[2])
def test_live_leases(rank: int, num_ranks: int, findings: Findings, device: str) -> None:
    """Of saved activations, and of one rank only: all ranks raise, and the heap goes on."""
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
def test_the_end_of_a_suspended_heap(rank: int, num_ranks: int, end: str, device: str) -> None:
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
def test_a_rank_that_does_not_come(rank: int, num_ranks: int, call: str) -> None:
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
def test_errors_of_one_rank(rank: int, num_ranks: int) -> None:
    """They are those of all ranks: of one that cannot suspend, of one that cannot resume, of one that fails to."""
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


def test_other_threads(heap: symmoe.SymmetricHeap, monkeypatch: pytest.MonkeyPatch) -> None:
    """None gets a lease once suspend has looked for leases; none resumes a heap, or closes it, that one is resuming."""
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
