"""Router against an independent implementation in float64 (support/reference.py)."""

import itertools
from typing import get_args

import pytest
import reference
import torch
from layers import layer_config
from router_choices import wrong_extremes

from symmoe.errors import ArgumentError
from symmoe.kernels import twin
from symmoe.kernels.routing_rule import Score
from symmoe.moe.router import Router

HIDDEN, EXPERTS, TOKENS = 24, 16, 50


def make_router(seed: int = 0, **changes: object) -> Router:
    torch.manual_seed(seed)
    router = Router(
        layer_config(**{"hidden": HIDDEN, "ffn": 8, "num_experts": EXPERTS, "top_k": 3} | changes)
    )
    if router.expert_bias is not None:
        router.expert_bias.normal_(std=0.2)
    return router


def make_tokens(seed: int = 1, num_tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


NAMES = ("score", "renormalize", "expert_bias", "num_expert_groups", "topk_groups", "top_k")
SIZES = ((1, 1, 3), (4, 2, 3), (16, 5, 3), (8, 8, 3), (1, 1, 1), (1, 1, EXPERTS))
MODES = itertools.product(get_args(Score), (False, True), (False, True), SIZES)


@pytest.mark.parametrize("mode", [(*mode, *sizes) for *mode, sizes in MODES], ids=str)
def test_every_mode_equals_the_reference(mode: tuple[object, ...]):
    """Results, and gradients of a weighted sum of probs, scores and logits."""
    router = make_router(route_scale=2.5, **dict(zip(NAMES, mode, strict=True)))
    x = make_tokens().requires_grad_()
    exact_x, weight = (tensor.detach().double().requires_grad_() for tensor in (x, router.weight))
    bias = None if router.expert_bias is None else router.expert_bias.double()
    output = router(x)
    expected = reference.route(router.config, exact_x, weight, bias, None)
    assert output.topk_idx.dtype == torch.int32
    assert torch.equal(output.topk_idx.long(), expected.ids)
    generator = torch.Generator().manual_seed(2)
    loss = torch.zeros(())
    required = torch.zeros((), dtype=torch.float64)
    for name in ("probs", "scores", "logits"):
        got = getattr(output, name)
        want = getattr(expected, name)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-6)
        factors = torch.randn(want.shape, generator=generator)
        loss = loss + (got * factors).sum()
        required = required + (want * factors).sum()
    loss.backward()
    required.backward()
    for leaf, exact in ((x, exact_x), (router.weight, weight)):
        torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_ties_go_to_the_lowest_id(groups: tuple[int, int]):
    router = make_router(num_expert_groups=groups[0], topk_groups=groups[1], top_k=5)
    router.weight.data.zero_()
    for num_tokens in (1, 7, 300):
        topk_idx = router(make_tokens(num_tokens=num_tokens)).topk_idx
        assert torch.equal(topk_idx, torch.arange(5, dtype=torch.int32).expand(num_tokens, 5))


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_scores_that_underflow_give_zero_probs(score: str):
    router = make_router(score=score)
    router.weight.data.fill_(-1000.0)
    x = torch.ones(2, HIDDEN, requires_grad=True)
    output = router(x)
    output.probs.sum().backward()
    assert torch.equal(output.probs, torch.zeros(2, 3))
    assert torch.isfinite(x.grad).all()


def test_scores_of_extreme_logits():
    assert wrong_extremes(twin) == []


def test_no_tokens():
    router = make_router(num_expert_groups=4, topk_groups=2, expert_bias=True)
    x = torch.empty(0, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    output = router(x)
    assert output.topk_idx.shape == output.probs.shape == (0, 3)
    assert output.logits.shape == (0, EXPERTS)
    assert output.topk_idx.dtype == torch.int32
    (output.probs.sum() + output.scores.sum() + output.logits.sum()).backward()
    assert x.grad.shape == (0, HIDDEN)
    assert torch.equal(router.weight.grad, torch.zeros(EXPERTS, HIDDEN))


def test_the_router_computes_in_fp32_under_autocast_and_for_half_precision():
    router = make_router()
    x = make_tokens().bfloat16()
    expected = router(x.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = router(x)
    for name in ("topk_idx", "probs", "scores", "logits"):
        assert torch.equal(getattr(output, name), getattr(expected, name))
        assert getattr(output, name).dtype == getattr(expected, name).dtype


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, HIDDEN + 1), r"x \(3, 25\) must be \[tokens, hidden \(24\)\]"),
        (torch.zeros(2, 3, HIDDEN), r"x \(2, 3, 24\) must be \[tokens, hidden \(24\)\]"),
        (torch.zeros(3, HIDDEN, dtype=torch.int64), r"x \(torch.int64\) must be floating point"),
    ],
)
def test_wrong_tokens_are_refused(x: torch.Tensor, message: str):
    with pytest.raises(ArgumentError, match=message):
        make_router()(x)
