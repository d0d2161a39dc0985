"""Null and identity experts behind one router, as docs/training.md builds them, against a dense sum in float64."""

import pytest
import torch
import torch.distributed as dist
from cluster import run_on
from worker import Findings

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
    """Every expert for every token; unchosen experts have weight 0."""
    scores = (x @ router.T).softmax(1)
    chosen = torch.zeros_like(scores).scatter(1, scores.topk(TOP_K, 1).indices, 1.0)
    weights = scores * chosen / (scores * chosen).sum(1, keepdim=True)
    gate, up = torch.einsum("th,eih->eti", x, fc1).chunk(2, 2)
    of_experts = torch.einsum("eti,ehi->eth", torch.nn.functional.silu(gate) * up, fc2)
    y = torch.einsum("te,eth->th", weights[:, :NUM_EXPERTS], of_experts)
    return y + weights[:, NUM_EXPERTS:].sum(1, keepdim=True) * x if is_identity else y


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The tensors of all ranks, concatenated, in float64."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts).double()


@pytest.mark.parametrize("is_identity", [False, True])
@run_on(1, 2)
def test_null_and_identity_experts_equal_a_dense_sum(
    rank: int, num_ranks: int, findings: Findings, heap: symmoe.SymmetricHeap, is_identity: bool
) -> None:
    """Ranks have different numbers of tokens."""
    block = Block(heap, is_identity=is_identity)
    symmoe.training.broadcast_parameters(block)
    router, linears = block.router.weight, (block.layer.experts.fc1, block.layer.experts.fc2)
    expected = [router.detach().double(), *(gathered(fc.weight.detach()) for fc in linears)]
    x = torch.randn(7 + rank, HIDDEN).requires_grad_()
    leaves = [tensor.requires_grad_() for tensor in (x.detach().double(), *expected)]
    y, want_y = block(x), dense(*leaves, is_identity)
    findings.close("y", y, want_y, rtol=1e-5, atol=1e-5)
    y.square().sum().backward()
    want_y.square().sum().backward()
    for leaf in leaves[2:]:
        dist.all_reduce(leaf.grad)  # of the tokens of all ranks
    want_x, want_router, *want_experts = (leaf.grad for leaf in leaves)
    findings.close("dx", x.grad, want_x, rtol=1e-4, atol=1e-4)
    findings.close("router", router.grad, want_router, rtol=1e-4, atol=1e-4)
    for fc, want in zip(linears, want_experts, strict=True):
        local = want.chunk(num_ranks)[rank]
        findings.close("experts", fc.weight.grad, local, rtol=1e-4, atol=1e-4)
