"""Gradient reduction and clipping on 4 processes, two EP groups of 2, against the same model in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from worker import Findings

from symmoe import clip_grad_norm, reduce_gradients

WORLD, TOKENS, WIDTH, EXPERTS = 4, 6, 5, 4
MAX_NORM = 0.05


class Share(nn.Module):
    """Some of the experts."""

    holds_experts = True

    def __init__(self, experts: torch.Tensor) -> None:
        super().__init__()
        self.experts = nn.Parameter(experts)


class Model(nn.Module):
    """A dense matrix, `share.experts` [e, WIDTH], one dense parameter in another dtype and one that is never used.

    The token on place i of a rank adds dense(x) . expert[i % EXPERTS] to the rank's loss.
    """

    def __init__(self, expert_ids: slice = slice(None)) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.dense = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.share = Share(torch.randn(EXPERTS, WIDTH, generator=generator)[expert_ids].clone())

    def rank_loss(self, rank: int, experts: torch.Tensor) -> torch.Tensor:
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 + rank))
        y = (x @ self.dense * experts[torch.arange(TOKENS) % EXPERTS]).sum(1)
        return (self.scale * y.square()).mean().float()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad.clone() for name, p in self.named_parameters() if p.requires_grad}


def reference() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Gradients of the mean loss of all ranks, all experts in one process, and their norm."""
    model = Model()
    torch.stack([model.rank_loss(rank, model.share.experts) for rank in range(WORLD)]).mean().backward()
    model.unused.grad = torch.zeros(3)
    gradients = model.gradients()
    return gradients, sum(each.double().square().sum() for each in gradients.values()).sqrt()


def leave_gradients(model: Model, rank: int) -> None:
    """What backward leaves on `rank`: dense gradients of its own loss, expert gradients of its EP group's losses."""
    whole = Model()
    own = whole.rank_loss(rank, whole.share.experts.detach())
    model.dense.grad, model.scale.grad = torch.autograd.grad(own, [whole.dense, whole.scale])
    group_loss = sum(whole.rank_loss(peer, whole.share.experts) for peer in (rank // 2 * 2, rank // 2 * 2 + 1))
    (gradient,) = torch.autograd.grad(group_loss, whole.share.experts)
    model.share.experts.grad = gradient.chunk(2)[rank % 2].clone()
    if rank == 3:  # a rank whose dense parameter took no part counts as zeros
        model.unused.grad = torch.zeros(3)


def check_gradients(rank: int, num_ranks: int) -> list[str]:
    """Reduced, and clipped by a norm that counts every parameter once; dense ones have the same bits on all ranks."""
    findings = Findings()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model, (want, norm) = Model(slice(rank % 2 * 2, rank % 2 * 2 + 2)), reference()
    findings.check(bool(norm > 10 * MAX_NORM), "clipping has nothing to do")
    want["share.experts"] = want["share.experts"].chunk(2)[rank % 2]
    leave_gradients(model, rank)
    for stage, factor in (("reduced", 1.0), ("clipped", MAX_NORM / norm.item())):
        findings.where = f"rank {rank}, {stage}"
        if stage == "reduced":
            reduce_gradients(model, group=dist.group.WORLD, expert_group=groups[rank % 2])
        else:
            found = clip_grad_norm(model, MAX_NORM, group=dist.group.WORLD, expert_group=groups[rank % 2])
            findings.close("norm", found, norm, rtol=1e-6, atol=0)
        for name, gradient in model.gradients().items():
            findings.close(name, gradient, want[name] * factor, rtol=1e-5, atol=1e-7)
        findings.check(model.frozen.grad is None, "a frozen parameter has a gradient")
    everywhere: list[object] = [None] * num_ranks
    dense = {name: each.tolist() for name, each in model.gradients().items() if name != "share.experts"}
    dist.all_gather_object(everywhere, (found.item(), dense))
    findings.equal("norm and dense gradients on rank 0", everywhere[0], everywhere[rank])
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return findings.texts


def test_gradients_are_those_of_the_mean_loss(cluster):
    assert cluster(WORLD).findings(check_gradients) == []


def test_alone_it_changes_nothing_but_missing_gradients():
    model = Model()
    model.rank_loss(0, model.share.experts).backward()
    before = model.share.experts.grad.clone()
    reduce_gradients(model)
    assert torch.equal(model.share.experts.grad, before)
    assert torch.equal(model.unused.grad, torch.zeros(3))
    norm = clip_grad_norm(model, 1e9)
    assert torch.equal(model.share.experts.grad, before)
    expected = sum(each.double().square().sum() for each in model.gradients().values()).sqrt()
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_norm_of_half_precision_gradients_is_taken_in_fp32(dtype: torch.dtype):
    """3 * 30080 is more than fp16 can hold, and takes more bits than bf16 has; both hold 30080 itself."""
    model = nn.Linear(3, 3, bias=False, dtype=dtype)
    model.weight.grad = torch.full_like(model.weight, 30080.0)
    norm = clip_grad_norm(model, 3.0)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, torch.tensor(90240.0))
    torch.testing.assert_close(model.weight.grad, torch.ones_like(model.weight))
