"""Null and identity experts behind one router, as docs/training.md builds them, against a dense sum in float64."""

import pytest
import torch
import torch.distributed as dist
from cluster import run_on
from worker import Findings, open_heap

import symmoe

HIDDEN, FFN, NUM_EXPERTS, NUM_FREE, TOP_K = 16, 8, 4, 3, 2  # FREE experts compute nothing


class Block(torch.nn.Module):
    def __init__(self, heap: symmoe.SymmetricHeap, *, is_identity: bool) -> None:
        super().__init__()
        sizes = {"hidden": HIDDEN, "ffn": FFN, "top_k": TOP_K}
        wide = symmoe.MoEConfig(**sizes, num_experts=NUM_EXPERTS + NUM_FREE)
        self.router = symmoe.Router(wide)
        config = symmoe.MoEConfig(**sizes, num_experts=NUM_EXPERTS, router=None)
        self.layer = symmoe.MoELayer(config, heap)
        self.is_identity = is_identity

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x)
        is_free = chosen.topk_idx >= NUM_EXPERTS
        topk_idx = chosen.topk_idx.masked_fill(is_free, -1)
        y, _ = self.layer(x, topk_idx=topk_idx, probs=chosen.probs)
        if not self.is_identity:
            return y
        return y + chosen.probs.masked_fill(~is_free, 0).sum(1, keepdim=True) * x


def dense(
    x: torch.Tensor, router: torch.Tensor, fc1: torch.Tensor, fc2: torch.Tensor, is_identity: bool
) -> torch.Tensor:
    """Every expert for every token; experts that were not chosen have the weight 0."""
    scores = (x @ router.T).softmax(1)
    chosen = torch.zeros_like(scores).scatter(1, scores.topk(TOP_K, 1).indices, 1.0)
    weights = scores * chosen / (scores * chosen).sum(1, keepdim=True)
    gate, up = torch.einsum("th,eih->eti", x, fc1).chunk(2, 2)
    of_experts = torch.einsum("eti,ehi->eth", torch.nn.functional.silu(gate) * up, fc2)
    y = torch.einsum("te,eth->th", weights[:, :NUM_EXPERTS], of_experts)
    return y + weights[:, NUM_EXPERTS:].sum(1, keepdim=True) * x if is_identity else y


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks, one after the other, in float64."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts).double()


@pytest.mark.parametrize("is_identity", [False, True])
@run_on(1, 2)
def test_free_experts(rank: int, num_ranks: int, findings: Findings, is_identity: bool) -> None:
    """Two blocks, one after the other, and two micro-batches in flight; ranks have other numbers of tokens."""
    with open_heap("cpu", num_bytes=4 << 20) as heap:
        blocks = torch.nn.Sequential(*(Block(heap, is_identity=is_identity) for _ in range(2)))
        symmoe.training.broadcast_parameters(blocks)
        wanted = [
            [block.router.weight.detach().double().requires_grad_()]
            + [
                gathered(fc.weight.detach()).requires_grad_()
                for fc in (block.layer.experts.fc1, block.layer.experts.fc2)
            ]
            for block in blocks
        ]
        x = [torch.randn(7 + rank + turn, HIDDEN).requires_grad_() for turn in range(2)]
        want_x = [each.detach().double().requires_grad_() for each in x]
        y = [blocks(each) for each in x]
        for each, mine, want in zip(x, y, want_x, strict=True):
            of_oracle = want
            for weights in wanted:
                of_oracle = dense(of_oracle, *weights, is_identity)
            findings.close("y", mine.double(), of_oracle, rtol=1e-5, atol=1e-5)
            of_oracle.square().sum().backward()
            mine.square().sum().backward()
            findings.close("dx", each.grad.double(), want.grad, rtol=1e-4, atol=1e-4)
        for block, weights in zip(blocks, wanted, strict=True):
            own = block.router.weight.grad.double()
            findings.close("router", own, weights[0].grad, rtol=1e-4, atol=1e-4)
            for fc, weight in zip(
                (block.layer.experts.fc1, block.layer.experts.fc2), weights[1:], strict=True
            ):
                dist.all_reduce(weight.grad)  # of the tokens of all ranks
                mine = weight.grad.chunk(num_ranks)[rank]
                findings.close("experts", fc.weight.grad.double(), mine, rtol=1e-4, atol=1e-4)
