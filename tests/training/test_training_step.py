"""Whole optimizer steps on EP x EDP processes against one process, and fp32 masters under half-precision compute."""

from unittest.mock import patch

import pytest
import small_model as small
import torch
import torch.distributed as dist
from layers import layer_config
from torch import nn
from worker import Findings

from symmoe import GroupedMLP, MoELayer, SymmetricHeap, reduce_gradients
from symmoe.grouped.parameters import trainable
from symmoe.moe.balance import balance_step
from symmoe.training import clip_grad_norm

EXPERTS, TOP_K, H, I, TOKENS = 4, 2, 16, 8, 6
STEPS, MICRO_BATCHES, MAX_NORM = 3, 2, 0.05


class Model(nn.Module):
    def __init__(self, heap: SymmetricHeap, weights: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(H, H)
        balance = {
            "expert_bias": True,
            "bias_update_rate": 0.05,
            "aux_loss_coef": 0.1,
            "aux_loss": "global",
        }
        config = layer_config(hidden=H, ffn=I, num_experts=EXPERTS, top_k=TOP_K, **balance)
        shared = nn.Linear(H, H)
        experts = GroupedMLP(EXPERTS // heap.num_ranks, H, I, weights=weights)
        self.moe = MoELayer(config, heap, experts=experts, shared_expert=shared)
        generator = torch.Generator().manual_seed(1)
        local = slice(
            heap.rank * EXPERTS // heap.num_ranks, (heap.rank + 1) * EXPERTS // heap.num_ranks
        )
        with torch.no_grad():
            self.moe.router.weight.copy_(torch.randn(EXPERTS, H, generator=generator))
            for matrices in self.matrices():
                full = torch.randn(EXPERTS, *matrices[0].shape, generator=generator) / 4
                for matrix, value in zip(matrices, full[local], strict=True):
                    matrix.copy_(value)

    def matrices(self) -> list[list[torch.Tensor]]:
        """The weights of both linear layers, as one matrix for each expert."""
        experts = self.moe.experts
        return [
            [getattr(fc, f"weight{number}") for number in range(experts.num_groups)]
            for fc in (experts.fc1, experts.fc2)
        ]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        y, metrics = self.moe(self.dense(x))
        return y.square().mean() + metrics.aux_loss


def batch(rank: int, step: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + 100 * rank + 10 * step + number)
    return torch.randn(TOKENS, H, generator=generator) + 0.3


def optimizers_of(
    model: Model, for_experts: type[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    dense, experts = trainable(model)
    return [torch.optim.AdamW(dense, lr=3e-3), for_experts(experts, lr=3e-3)]


def check_steps(
    rank: int,
    num_ranks: int,
    findings: Findings,
    ep_size: int,
    wrong: str = "",
    kind: str = "AdamW",
) -> None:
    """Compares training on these processes with one process; `wrong` omits the heap's replicas, and the comparison must
    fail. With Muon every expert has its own matrices."""
    weights = "discrete" if kind == "Muon" else "packed"
    for_experts = getattr(torch.optim, kind)
    alone = dist.new_group([rank], use_local_synchronization=True)
    layout = num_ranks // ep_size, ep_size
    with small.on_layout(*layout) as (_, heap), small.open_heap(None) as single:
        replicas = heap.expert_group
        full_model = Model(single, weights)
        model = Model(heap, weights)
        optimizers = optimizers_of(full_model, for_experts) + optimizers_of(model, for_experts)
        for step in range(STEPS):
            for number in range(MICRO_BATCHES):
                everybody = torch.cat([batch(r, step, number) for r in range(num_ranks)])
                (full_model.loss(everybody) / MICRO_BATCHES).backward()
                (model.loss(batch(rank, step, number)) / MICRO_BATCHES).backward()
            want_norm = clip_grad_norm(full_model, MAX_NORM, group=alone)
            with patch.object(heap, "expert_group", None if wrong == "reduce" else replicas):
                reduce_gradients(model)
            norm = clip_grad_norm(model, MAX_NORM)
            findings.close(f"norm of step {step}", norm, want_norm, rtol=1e-5, atol=0)
            findings.check(float(want_norm) > 2 * MAX_NORM, f"nothing to clip: {float(want_norm)}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            balance_step(full_model)
            with patch.object(heap, "expert_group", None if wrong == "balance" else replicas):
                balance_step(model)
        local = slice(heap.rank * EXPERTS // ep_size, (heap.rank + 1) * EXPERTS // ep_size)
        actual, expected = (
            {k: v for k, v in m.state_dict().items() if ".experts." not in k}
            for m in (model, full_model)
        )
        for number, (got, want) in enumerate(
            zip(model.matrices(), full_model.matrices(), strict=True)
        ):
            actual[f"fc{number + 1}"], expected[f"fc{number + 1}"] = (
                torch.stack(got),
                torch.stack(want[local]),
            )
        for name, want in expected.items():
            findings.close(name, actual[name], want, rtol=1e-4, atol=2e-5)
        findings.check(bool(full_model.moe.router.expert_bias.any()), "the bias has not moved")


@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
@pytest.mark.parametrize(("num_ranks", "ep_size"), [(2, 2), (4, 2), (2, 1)])
def test_steps_are_those_of_one_process(cluster, num_ranks: int, ep_size: int, kind: str):
    texts_by_rank = cluster(num_ranks).run(check_steps, ep_size, kind=kind)
    assert [text for texts in texts_by_rank for text in texts] == []


@pytest.mark.parametrize(
    ("wrong", "text"), [("reduce", "norm of step 0"), ("balance", "expert_bias")]
)
def test_a_forgotten_group_changes_the_training(cluster, wrong: str, text: str):
    actual = [t for texts in cluster(4).run(check_steps, 2, wrong) for t in texts]
    assert any(text in t for t in actual), actual
