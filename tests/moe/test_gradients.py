"""Gradient reduction and clipping on 4 processes, two EP groups of 2, against the same model in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from symmoe.training.gradients import clip_grad_norm, reduce_gradients

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

    def __init__(self, expert_ids: range) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.dense = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        whole = torch.randn(EXPERTS, WIDTH, generator=generator)
        self.share = Share(whole[expert_ids.start : expert_ids.stop].clone())

    def rank_loss(self, rank: int, experts: torch.Tensor) -> torch.Tensor:
        x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 + rank))
        y = (x @ self.dense * experts[torch.arange(TOKENS) % EXPERTS]).sum(1)
        return (self.scale * y.square()).mean().float()


def reference() -> tuple[Model, torch.Tensor]:
    """Gradients of the mean loss of all ranks, all experts in one process, and their norm."""
    model = Model(range(EXPERTS))
    torch.stack([model.rank_loss(rank, model.share.experts) for rank in range(WORLD)]).mean().backward()
    model.unused.grad = torch.zeros(3)
    square = sum(p.grad.double().square().sum() for p in model.parameters() if p.requires_grad)
    return model, square.sqrt()


def leave_gradients(model: Model, rank: int) -> None:
    """What backward leaves on `rank`: dense gradients of its own loss, expert gradients of its EP group's losses."""
    peers = [rank // 2 * 2, rank // 2 * 2 + 1]
    whole = Model(range(EXPERTS))
    own = whole.rank_loss(rank, whole.share.experts.detach())
    model.dense.grad, model.scale.grad = torch.autograd.grad(own, [whole.dense, whole.scale])
    group_loss = sum(whole.rank_loss(peer, whole.share.experts) for peer in peers)
    (gradient,) = torch.autograd.grad(group_loss, whole.share.experts)
    model.share.experts.grad = gradient.chunk(2)[rank % 2].clone()
    if rank == 3:  # a rank whose dense parameter took no part counts as zeros
        model.unused.grad = torch.zeros(3)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    ids = range(0, 2) if rank % 2 == 0 else range(2, 4)
    model = Model(ids)
    leave_gradients(model, rank)
    reduce_gradients(model, group=dist.group.WORLD, expert_group=replicas)
    reduced = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    norm = clip_grad_norm(model, MAX_NORM, group=dist.group.WORLD, expert_group=replicas)
    clipped = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert model.frozen.grad is None
    torch.save({"reduced": reduced, "clipped": clipped, "norm": norm}, f"{folder}/rank-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    folder: Path = tmp_path_factory.mktemp("gradients")
    mp.spawn(worker, args=(str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(WORLD)]


@pytest.mark.parametrize("stage", ["reduced", "clipped"])
def test_gradients_are_those_of_the_mean_loss(results: list[dict], stage: str):
    model, norm = reference()
    factor = 1.0 if stage == "reduced" else MAX_NORM / norm.item()
    for rank, result in enumerate(results):
        for name, gradient in result[stage].items():
            expected = model.get_parameter(name).grad
            if name == "share.experts":
                expected = expected.chunk(2)[rank % 2]
            torch.testing.assert_close(gradient, expected * factor, rtol=1e-5, atol=1e-7)


def test_dense_gradients_and_norm_are_the_same_bits_on_every_rank(results: list[dict]):
    for result in results[1:]:
        assert torch.equal(result["norm"], results[0]["norm"])
        for name in ("dense", "scale", "unused"):
            assert torch.equal(result["clipped"][name], results[0]["clipped"][name])


def test_norm_counts_every_parameter_once(results: list[dict]):
    _, norm = reference()
    assert norm > 10 * MAX_NORM  # clipping has something to do
    for result in results:
        assert result["norm"].item() == pytest.approx(norm.item(), rel=1e-6)


def test_alone_it_changes_nothing_but_missing_gradients():
    model = Model(range(EXPERTS))
    model.rank_loss(0, model.share.experts).backward()
    before = model.share.experts.grad.clone()
    reduce_gradients(model)
    assert torch.equal(model.share.experts.grad, before)
    assert torch.equal(model.unused.grad, torch.zeros(3))
    norm = clip_grad_norm(model, 1e9)
    assert torch.equal(model.share.experts.grad, before)
    expected = sum(p.grad.double().square().sum() for p in model.parameters() if p.requires_grad).sqrt()
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
