"""Dropping over an expert's capacity against a loop over experts, and against Megatron-Core where it is installed."""

import pytest
import torch

from symmoe.moe.router import drop_over_capacity

TOKENS, EXPERTS, TOP_K = 37, 6, 2


def make_choice(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A lopsided choice with some -1, and distinct probs."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator) + torch.linspace(2, 0, EXPERTS)
    scores, ids = logits.softmax(-1).topk(TOP_K)
    ids[::7] = -1
    return ids.int(), scores.masked_fill(ids < 0, 0.0)


def kept_slots(
    ids: torch.Tensor, probs: torch.Tensor, capacity: int, policy: str
) -> set[tuple[int, int]]:
    """(token, k) of the slots that stay."""
    kept = set()
    for expert in range(EXPERTS):
        slots = [(t, k) for t in range(TOKENS) for k in range(TOP_K) if int(ids[t, k]) == expert]
        if policy == "probs":
            slots.sort(key=lambda slot: -float(probs[slot]))  # stable
        kept |= set(slots[:capacity])
    return kept


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("capacity", [1, 5, 13, 1000])
def test_drop_equals_a_loop(policy: str, capacity: int):
    ids, probs = make_choice()
    leaf = probs.clone().requires_grad_()
    got_ids, got_probs, dropped = drop_over_capacity(
        ids, leaf, num_experts=EXPERTS, capacity=capacity, policy=policy
    )
    kept = kept_slots(ids, probs, capacity, policy)
    got_probs.sum().backward()
    for t in range(TOKENS):
        for k in range(TOP_K):
            stays = (t, k) in kept
            assert int(got_ids[t, k]) == (int(ids[t, k]) if stays else -1)
            assert float(got_probs[t, k].detach()) == (float(probs[t, k]) if stays else 0.0)
            assert float(leaf.grad[t, k]) == float(stays or int(ids[t, k]) < 0)
    assert dropped.tolist() == [int((ids >= 0).sum()) - len(kept)]
    assert dropped.dtype == got_ids.dtype == torch.int32
    assert (dropped.item() > 0) == (capacity < 1000)


def test_policies_differ_and_equal_probs_go_by_position():
    ids, probs = make_choice()
    options = {"num_experts": EXPERTS, "capacity": 5}
    by_probs, by_position = (
        drop_over_capacity(ids, probs, **options, policy=p)[0] for p in ("probs", "position")
    )
    assert not torch.equal(by_probs, by_position)
    same = torch.full_like(probs, 0.5)
    assert torch.equal(drop_over_capacity(ids, same, **options, policy="probs")[0], by_position)


def test_no_tokens():
    ids, probs, dropped = drop_over_capacity(
        torch.empty(0, 2, dtype=torch.int32),
        torch.empty(0, 2),
        num_experts=4,
        capacity=0,
        policy="probs",
    )
    assert ids.shape == probs.shape == (0, 2)
    assert dropped.tolist() == [0]
