"""Reduction and clipping of gradients on 4 processes, two EP groups of 2, against values by hand. Whole steps:
test_training_step.py."""

import re
from functools import partial

import pytest
import small_model as small
import torch
import torch.distributed as dist
from cluster import run_on
from torch import nn
from worker import Findings

from symmoe import SymmetricHeap, reduce_gradients
from symmoe.errors import ArgumentError
from symmoe.training import balance_step, broadcast_parameters, clip_grad_norm

WORLD, MAX_NORM = 4, 0.05


class Share(nn.Module):
    """A part of the experts."""

    holds_experts = True

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(2, 5))


class Model(nn.Module):
    """Two dense parameters of different dtypes, one that only the last rank uses, and experts of a user's class. heap:
    its `expert_group` has the replicas of the experts."""

    def __init__(self, heap: SymmetricHeap | None = None) -> None:
        super().__init__()
        self.heap = heap
        self.dense = nn.Parameter(torch.zeros(5, 5))
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.share = Share()

    def left_by_backward(self) -> dict[str, torch.Tensor]:
        """A gradient of each parameter on each rank, as backward leaves it."""
        generator = torch.Generator().manual_seed(0)
        trained = {name: p for name, p in self.named_parameters() if p.requires_grad}
        return {
            n: torch.randn(WORLD, *p.shape, dtype=p.dtype, generator=generator)
            for n, p in trained.items()
        }


@run_on(WORLD)
def test_gradients_are_those_of_the_mean_loss(
    rank: int, num_ranks: int, findings: Findings
) -> None:
    """Reduced gradients, and clipped ones by a norm that counts every parameter once; dense gradients have the same
    bits on all ranks."""
    with small.on_layout(2, 2) as (_, heap):
        model = Model(heap)
        local = model.left_by_backward()
        for name, gradient in local.items():
            if (
                name != "unused" or rank == 3
            ):  # ranks on which a dense parameter took no part count as zeros
                model.get_parameter(name).grad = gradient[rank].clone()
        local["unused"][:3] = 0
        want = {name: gradient.sum(0) / WORLD for name, gradient in local.items()}
        shares = [local["share.experts"][position::2].sum(0) / WORLD for position in (0, 1)]
        want["share.experts"] = torch.cat(shares)
        norm = torch.cat([value.double().flatten() for value in want.values()]).norm()
        want["share.experts"] = shares[rank % 2]
        findings.check(bool(norm > 10 * MAX_NORM), "clipping has nothing to do")
        for stage, factor in (("reduced", 1.0), ("clipped", MAX_NORM / norm.item())):
            findings.where = f"rank {rank}, {stage}"
            if stage == "reduced":
                reduce_gradients(model)
            else:
                actual = clip_grad_norm(model, MAX_NORM)
                findings.close("norm", actual, norm, rtol=1e-6, atol=0)
            for name, gradient in want.items():
                findings.close(
                    name, model.get_parameter(name).grad, gradient * factor, rtol=1e-5, atol=1e-7
                )
            findings.check(model.frozen.grad is None, "a frozen parameter has a gradient")
        everywhere: list[object] = [None] * num_ranks
        dense = [
            model.get_parameter(name).grad.tolist() for name in want if name != "share.experts"
        ]
        dist.all_gather_object(everywhere, (actual.item(), dense))
        findings.equal("norm and dense gradients on rank 0", everywhere[0], everywhere[rank])


@run_on(WORLD)
def test_gradients_of_a_part_are_reduced_once(
    rank: int, num_ranks: int, findings: Findings
) -> None:
    """The part is reduced before the whole model or after it, clipped in between, and reduced again in the next
    step."""
    with small.on_layout(2, 2) as (_, heap):
        full, parts = (nn.ModuleList([Model(heap), Model(heap)]) for _ in range(2))
        for model in (*full, *parts):
            for name, gradient in model.left_by_backward().items():
                model.get_parameter(name).grad = gradient[rank].clone()
        reduce_gradients(full)
        reduce_gradients(parts[1])
        for step in range(2):
            reduce_gradients(parts)
            for (name, first), second in zip(
                full.named_parameters(), parts.parameters(), strict=True
            ):
                if first.requires_grad:
                    findings.close(
                        f"{name}, step {step}", second.grad, first.grad, rtol=1e-6, atol=1e-7
                    )
            clip_grad_norm(parts, MAX_NORM)
            for model in (parts, parts[0], parts[0].share):
                with pytest.raises(ArgumentError, match="called for these gradients already"):
                    reduce_gradients(model)
            for model in parts:  # the next step's, in the same memory
                for name, gradient in model.left_by_backward().items():
                    model.get_parameter(name).grad.zero_().add_(gradient[rank])


@run_on(WORLD)
def test_layers_with_different_expert_groups_are_refused(rank: int, num_ranks: int) -> None:
    """In one model: experts could be summed over the replicas of only one heap."""
    with small.on_layout(2, 2) as (_, heap), small.open_heap(None) as single:
        model = nn.ModuleList([Model(heap), Model(single)])
        ranks = sorted([(rank,), (rank % 2, rank % 2 + 2)])
        for call in (
            reduce_gradients,
            broadcast_parameters,
            balance_step,
            partial(clip_grad_norm, max_norm=1.0),
        ):
            with pytest.raises(ArgumentError, match=re.escape(f"of the ranks {ranks}")):
                call(model)


@run_on(2)
def test_a_forgotten_expert_group_is_named(rank: int, num_ranks: int) -> None:
    """Without it, the experts of two EP groups of one rank would train separately."""
    with small.open_heap(None) as heap:
        message = r"group has 2 ranks; the heap has 1, and its expert_group 1: group must have"
        with pytest.raises(ArgumentError, match=message):
            reduce_gradients(Model(heap))


def test_one_process_changes_nothing_but_missing_gradients():
    model = Model()
    local = {name: by_rank[0] for name, by_rank in model.left_by_backward().items()}
    model.dense.grad = local["dense"].clone()
    model.share.experts.grad = local["share.experts"].clone()
    reduce_gradients(model)
    norm = clip_grad_norm(model, 1e9)
    assert torch.equal(model.dense.grad, local["dense"])
    assert torch.equal(model.share.experts.grad, local["share.experts"])
    assert torch.equal(model.unused.grad, torch.zeros(3))
    expected = sum(
        local[name].double().square().sum() for name in ("dense", "share.experts")
    ).sqrt()
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_norm_of_half_precision_gradients_is_taken_in_fp32(dtype: torch.dtype):
    """3 * 30080 is beyond fp16's range and bf16's precision; both can represent 30080 itself."""
    model = nn.Linear(3, 3, bias=False, dtype=dtype)
    model.weight.grad = torch.full_like(model.weight, 30080.0)
    norm = clip_grad_norm(model, 3.0)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, torch.tensor(90240.0))
    torch.testing.assert_close(model.weight.grad, torch.ones_like(model.weight))
