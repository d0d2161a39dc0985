"""Layers in models that torch itself captures in CUDA graphs: the results of the same model without captures."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from captured_cases import H, T, batches
from cluster import run_on
from torch import nn
from torch._inductor import config
from worker import Findings, open_heap

from symmoe import MoEConfig, MoELayer, SymmetricHeap

STATIC = {
    "capacity": 2 * 3 * T,
    "max_tokens": T,
}  # for all slots of two ranks, which have batches of other lengths


class Block(nn.Module):
    """A layer between two dense ones; its output is one tensor, as make_graphed_callables wants it."""

    def __init__(self, heap: SymmetricHeap, **options) -> None:
        super().__init__()
        torch.manual_seed(heap.rank)
        config = MoEConfig(hidden=H, ffn=24, num_experts=8, top_k=3, **options)
        self.before = nn.Linear(H, H, device=heap.device)
        self.after = nn.Linear(H, H, device=heap.device)
        self.layer = MoELayer(config, heap)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(x + self.layer(self.before(x))[0])


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [
        y.detach().clone(),
        x.grad,
        *(parameter.grad.clone() for parameter in model.parameters()),
    ]


def compare(
    heap: SymmetricHeap,
    plain: nn.Module,
    captured: nn.Module,
    findings: Findings,
    are_same: Callable[..., bool],
) -> None:
    for number, (x, _) in enumerate(batches(heap.rank, 8)):
        pairs = zip(
            results(captured, x.to(heap.device)), results(plain, x.to(heap.device)), strict=True
        )
        same = [are_same(a, b) for a, b in pairs]
        findings.check(all(same), f"rank {heap.rank}, step {number}: {same}")


@run_on(1, 2, device="cuda")
def test_graphed_callables(rank: int, num_ranks: int, findings: Findings) -> None:
    with open_heap("cuda", num_bytes=64 << 20) as heap:
        plain = Block(heap, **STATIC)
        sample = torch.randn_like(
            next(batches(heap.rank, 1))[0], device=heap.device, requires_grad=True
        )
        graphed = torch.cuda.make_graphed_callables(copy.deepcopy(plain), (sample,))
        compare(heap, plain, graphed, findings, torch.equal)
        del graphed
        heap.release_graphs()
        findings.check(heap.memory.graph_bytes == 0, f"graphs hold {heap.memory.graph_bytes} bytes")


@pytest.mark.parametrize("options", [{}, STATIC], ids=["exact", "static"])
@run_on(1, 2, device="cuda")
def test_reduce_overhead(rank: int, num_ranks: int, findings: Findings, options: dict) -> None:
    replays = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(graph)
        replay(graph)

    # Compiles in this process, without a pool of workers that outlives the test.
    with (
        config.patch(compile_threads=1),
        open_heap("cuda", num_bytes=64 << 20) as heap,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(torch.cuda.CUDAGraph, "replay", counted)
        plain = Block(heap, **options)
        captured = torch.compile(copy.deepcopy(plain), mode="reduce-overhead")
        compare(heap, plain, captured, findings, partial(torch.allclose, rtol=1e-4, atol=1e-4))
        torch._dynamo.reset()
        findings.check(heap.leased_bytes == 0, f"{heap.leased_bytes} bytes are leased")
    assert len(replays) > 8
