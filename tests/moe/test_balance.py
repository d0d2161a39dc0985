"""Balance losses, expert bias and imbalance against NumPy, and their independence of the number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from symmoe.errors import ArgumentError
from symmoe.moe import balance

TOKENS, EXPERTS, TOP_K = 24, 6, 2


def make_scores(seed: int = 0, *, softmax: bool = True) -> torch.Tensor:
    logits = 2 * torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return (logits.softmax(-1) if softmax else logits.sigmoid()).requires_grad_()


def load_of(scores: torch.Tensor) -> torch.Tensor:
    return torch.bincount(scores.topk(TOP_K, dim=1).indices.flatten(), minlength=EXPERTS).int()


@pytest.mark.parametrize("softmax", [True, False])
def test_load_balance_loss_equals_numpy(softmax: bool):
    scores = make_scores(softmax=softmax)
    load = load_of(scores)
    p = scores.detach().double().numpy()
    p /= p.sum(1, keepdims=True)
    expected = 0.0
    for expert in range(EXPERTS):
        expected += EXPERTS * (int(load[expert]) / (TOKENS * TOP_K)) * p[:, expert].mean()
    value = balance.load_balance_loss(scores if softmax else balance.normalised(scores), load)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(expected, rel=1e-6)
    assert expected > 1.05  # the case is unbalanced enough for the test to mean something


def test_normalised_scores_add_up_to_one():
    scores = make_scores(softmax=False).detach()
    scores[3] = 0.0
    shares = balance.normalised(scores.half())
    assert shares.dtype == torch.float32
    wanted = np.ones(TOKENS)
    wanted[3] = 0.0
    np.testing.assert_allclose(shares.sum(1).numpy(), wanted, rtol=1e-6)
    ratio = scores[0].half().double().numpy()
    np.testing.assert_allclose(shares[0].numpy(), ratio / ratio.sum(), rtol=1e-6)


def test_load_balance_loss_is_one_when_balanced_and_e_when_collapsed():
    uniform = torch.full((TOKENS, EXPERTS), 1 / EXPERTS)
    assert balance.load_balance_loss(uniform, torch.full((EXPERTS,), 8)).item() == pytest.approx(1)
    collapsed = torch.zeros(TOKENS, EXPERTS)
    collapsed[:, 3] = 1
    load = torch.tensor([0, 0, 0, 48, 0, 0])
    assert balance.load_balance_loss(collapsed, load).item() == pytest.approx(EXPERTS)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_mean_over_ranks_is_the_loss_of_the_global_batch(num_ranks: int):
    """Values and gradients, with the load of all ranks; a load per rank would give something else."""
    whole, cut = make_scores(), make_scores()
    load = load_of(whole)
    expected = balance.load_balance_loss(whole, load)
    expected.backward()
    shards = cut.chunk(num_ranks)
    mean = sum(balance.load_balance_loss(shard, load) for shard in shards) / num_ranks
    mean.backward()
    torch.testing.assert_close(mean, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(cut.grad, whole.grad, rtol=1e-5, atol=1e-9)

    per_rank = sum(balance.load_balance_loss(shard, load_of(shard)) for shard in shards) / num_ranks
    assert abs(per_rank.item() - expected.item()) > 1e-3


def test_load_has_no_gradient_and_pushes_scores_off_busy_experts():
    logits = torch.zeros(TOKENS, EXPERTS, requires_grad=True)
    load = torch.tensor([30, 18, 0, 0, 0, 0])
    balance.load_balance_loss(logits.softmax(-1), load).backward()
    push = -logits.grad.sum(0)  # the direction of descent
    assert push[0] < push[1] < 0 < push[2]
    torch.testing.assert_close(push[2:], push[2:3].expand(4))


def test_z_loss_equals_numpy():
    logits = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(3), requires_grad=True)
    values = logits.detach().double().numpy()
    log_sum = np.log(np.exp(values).sum(1))
    value = balance.z_loss(logits)
    value.backward()
    assert value.item() == pytest.approx((log_sum**2).mean(), rel=1e-6)
    expected = 2 * log_sum[:, None] * np.exp(values) / np.exp(values).sum(1, keepdims=True) / TOKENS
    np.testing.assert_allclose(logits.grad.numpy(), expected, rtol=1e-4, atol=1e-7)


def test_no_tokens_give_zero_with_a_graph():
    scores = torch.empty(0, EXPERTS, requires_grad=True)
    total = balance.load_balance_loss(scores, torch.zeros(EXPERTS, dtype=torch.int32)) + balance.z_loss(scores)
    ids, mask = torch.empty(0, TOP_K, dtype=torch.int32), torch.empty(0, dtype=torch.bool)
    for length in (0, 5):
        total = total + balance.sequence_balance_loss(scores, ids, length, mask)
    assert total.item() == 0
    total.backward()
    assert scores.grad.shape == (0, EXPERTS)


def test_update_expert_bias_moves_towards_balance():
    bias = torch.tensor([0.5, -0.25, 0.0, 1.0])
    balance.update_expert_bias(bias, torch.tensor([10, 0, 4, 2], dtype=torch.int32), 0.01)  # mean 4
    torch.testing.assert_close(bias, torch.tensor([0.49, -0.24, 0.0, 1.01]), rtol=0, atol=1e-7)


def test_update_expert_bias_compares_with_the_exact_mean():
    # 2^24 + 1 is not an fp32 number: a rounded mean would call expert 0 balanced.
    load = torch.tensor([2**24 + 1, 2**24 - 1, 2**24, 2**24], dtype=torch.int32)
    bias = torch.zeros(4)
    balance.update_expert_bias(bias, load, 1.0)
    assert bias.tolist() == [-1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("bias", [torch.zeros(4, dtype=torch.bfloat16), torch.zeros(3)])
def test_update_expert_bias_refuses(bias: torch.Tensor):
    with pytest.raises(ArgumentError, match=r"bias \(torch.*\) must be torch.float32 .* \(4,\)"):
        balance.update_expert_bias(bias, torch.ones(4, dtype=torch.int32), 0.01)


@pytest.mark.parametrize(
    ("load", "expected"), [([5, 5, 5, 5], 1.0), ([8, 0, 0, 0], 4.0), ([3, 1, 0, 0], 3.0), ([1, 0, 0, 0], 4.0)]
)
def test_imbalance(load: list[int], expected: float):
    assert balance.imbalance(torch.tensor(load, dtype=torch.int32)).item() == expected
    assert balance.max_violation(torch.tensor(load)).item() == expected - 1


def test_nothing_is_balanced():
    nothing = torch.zeros(EXPERTS, dtype=torch.int32)
    assert balance.imbalance(nothing).item() == balance.max_violation(nothing).item() == 0
