"""A rank that does not come to combine: the others' outputs and gradients are NaN, and their CUDA contexts live on.
A rank that calls a layer inside a transform of torch.func: an error on all ranks, and the heap lives on."""

import time

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster, run_on
from culprits import TRANSFORMS, sets_of_culprits
from heap_calls import expect, outcome
from layers import config_for, make_layer
from limits import PROMPT_S
from shared_gpus import are_too_few
from worker import Findings, open_heap

from symmoe import SymmetricHeap, combine_tokens, dispatch_tokens, make_plan

T, K, H = 40, 2, 64
TIMEOUT_S = 1.0


class Call:
    """A call whose combine is to fail, and what it computes: combine_tokens itself, or the backward of a dispatch."""

    def __init__(self, heap: SymmetricHeap, where: str, order: str) -> None:
        self._where, self._order = where, order
        num_experts = 2 * heap.num_ranks
        ids = (torch.arange(T)[:, None] + torch.tensor([0, heap.num_ranks])) % num_experts
        self._plan = make_plan(ids.to(heap.device), num_experts=num_experts, heap=heap)
        self._x = torch.randn(T, H, device=heap.device, requires_grad=True)
        self._probs = torch.rand(T, K, device=heap.device, requires_grad=True)
        rows, row_probs, self._handle = dispatch_tokens(
            self._x, self._plan, probs=self._probs, order=order
        )
        self._rows = rows * row_probs[:, None]
        heap.synchronize()

    def make(self) -> None:
        if self._where == "combine":
            self._y = combine_tokens(self._rows.detach(), self._handle, order=self._order)
        else:
            self._rows.sum().backward()

    @property
    def results(self) -> dict[str, torch.Tensor]:
        if self._where == "combine":
            return {"y": self._y}
        return {"dx": self._x.grad, "dprobs": self._probs.grad}


def leave_out_of_combine(
    rank: int, num_ranks: int, findings: Findings, where: str, order: str
) -> None:
    """The last rank comes to combine when the others have given it up."""
    missing = num_ranks - 1
    findings.where = f"{where}, order {order}, rank {rank} of {num_ranks}"
    heap = SymmetricHeap(num_bytes=8 << 20, backend="nvshmem")
    good = Call(heap, where, order)
    good.make()
    heap.synchronize()
    for name, result in good.results.items():
        findings.check(bool(result.isfinite().all()), f"{name} of a good call is not finite")
    call = Call(heap, where, order)
    for result in good.results.values():
        result.fill_(7.0)  # what memory of that size may hold when it is given out again
    del good, result
    dist.barrier()
    heap.timeout_s = heap.start_timeout_s = TIMEOUT_S  # kernels are compiled
    if rank == missing:
        dist.barrier()
        heap.timeout_s = heap.start_timeout_s = 10 * PROMPT_S  # for nothing: it is told
    start = time.monotonic()
    call.make()
    for name, result in call.results.items():
        findings.check(
            bool(result.isnan().all()), f"{name} of a failed call: {result.flatten()[:4].tolist()}"
        )
    error = outcome(heap.synchronize)
    took_s = time.monotonic() - start
    if rank != missing:
        dist.barrier()
    text = f"rank {missing} did not reach 'combine: ready' within timeout_s=1"
    expect(findings, error, "PeerAborted" if rank == missing else "PeerTimeout", text)
    if rank == missing:
        findings.check(took_s < PROMPT_S, f"the late rank has waited {took_s:.2f} s")
    else:
        findings.check(0.9 * TIMEOUT_S < took_s < PROMPT_S, f"the error took {took_s:.2f} s")
    findings.equal("next call", outcome(heap.lease, (1,), torch.uint8)[0], "HeapPoisoned")
    ones = torch.ones(64, 64, device=heap.device)
    findings.check(bool((ones @ ones == 64).all()), "the device computes something else")
    heap.close()
    findings.check(
        bool((ones @ ones == 64).all()), "the device computes something else after close()"
    )


@pytest.mark.parametrize("order", ["rank", "slot"])
@pytest.mark.parametrize("where", ["combine", "backward"])
def test_results_of_a_failed_combine_are_nan(where: str, order: str):
    if are_too_few(2):
        pytest.skip(f"needs 2 CUDA GPUs, this machine has {torch.cuda.device_count()}")
    # Of its own: NVSHMEM does not start again in a process whose heap ended in an error.
    with Cluster(2, "cuda") as ranks:
        assert ranks.findings(leave_out_of_combine, where, order) == []


@run_on(1, 2, device="cuda")
def test_transforms_of_a_layer(rank: int, num_ranks: int, findings: Findings) -> None:
    with open_heap("cuda") as heap:
        layer, _ = make_layer(heap, config_for(num_ranks, "cuda"))
        x = torch.ones(T, layer.config.hidden, device=heap.device)

        def call(x: torch.Tensor) -> torch.Tensor:
            y, _ = layer(x)
            heap.synchronize()
            return y.sum()

        expected = call(x).detach()
        for culprits in sets_of_culprits(num_ranks):
            for name, transform in TRANSFORMS.items():
                findings.where = f"{name} on {culprits}, rank {rank} of {num_ranks}"
                error = outcome(transform, call, x) if rank in culprits else outcome(call, x)
                expect(findings, error, "ArgumentError", "no rules for transforms of torch.func")
                findings.check(torch.equal(call(x).detach(), expected), "the next call is wrong")
