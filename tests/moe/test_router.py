"""Router against an independent implementation in NumPy, float64, one token at a time."""

import itertools
import math

import numpy as np
import pytest
import torch

from symmoe.errors import ArgumentError
from symmoe.moe.config import MoEConfig
from symmoe.moe.router import Router, RouterOutput

HIDDEN, EXPERTS, TOKENS = 24, 16, 50


def oracle_token(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, config: MoEConfig
) -> dict[str, list]:
    """Ids, probs, scores and logits of one token, from the definitions."""
    logits = [
        float(sum(x[h] * weight[e, h] for h in range(len(x)))) for e in range(config.num_experts)
    ]
    if config.score == "sigmoid":
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    else:
        total = sum(math.exp(v) for v in logits)
        scores = [math.exp(v) / total for v in logits]
    biased = [s + float(b) for s, b in zip(scores, bias, strict=True)]

    size = config.num_experts // config.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config.num_groups)]

    def worth(group: list[int]) -> float:
        best = sorted((biased[e] for e in group), reverse=True)
        return sum(best[:2]) if config.score == "sigmoid" else best[0]

    kept = sorted(groups, key=worth, reverse=True)[: config.top_groups]
    allowed = sorted(e for group in kept for e in group)
    # Python's sort is stable: equal scores stay in the order of their ids.
    ids = sorted(allowed, key=lambda e: biased[e], reverse=True)[: config.top_k]
    probs = [scores[e] for e in ids]
    if config.renormalize:
        probs = [p / sum(probs) for p in probs]
    return {
        "ids": ids,
        "probs": [p * config.route_scale for p in probs],
        "scores": scores,
        "logits": logits,
    }


def oracle(x: torch.Tensor, router: Router) -> dict[str, np.ndarray]:
    config = router.config
    weight = router.weight.detach().double().numpy()
    bias = (
        np.zeros(config.num_experts)
        if router.expert_bias is None
        else router.expert_bias.double().numpy()
    )
    tokens = [oracle_token(token, weight, bias, config) for token in x.detach().double().numpy()]
    return {
        key: np.array([token[key] for token in tokens])
        for key in ("ids", "probs", "scores", "logits")
    }


def make_router(seed: int = 0, **changes: object) -> Router:
    torch.manual_seed(seed)
    router = Router(
        MoEConfig(**{"hidden": HIDDEN, "ffn": 8, "num_experts": EXPERTS, "top_k": 3} | changes)
    )
    if router.expert_bias is not None:
        router.expert_bias.normal_(std=0.2)
    return router


def make_tokens(seed: int = 1, num_tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


def assert_equals_oracle(output: RouterOutput, expected: dict[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(output.topk_idx.numpy(), expected["ids"])
    for name in ("probs", "scores", "logits"):
        actual = getattr(output, name)
        assert actual.dtype == torch.float32
        np.testing.assert_allclose(actual.detach().numpy(), expected[name], rtol=2e-5, atol=2e-6)
    assert output.topk_idx.dtype == torch.int32


NAMES = ("score", "renormalize", "expert_bias", "num_groups", "top_groups", "top_k")
SIZES = ((1, 1, 3), (4, 2, 3), (16, 5, 3), (8, 8, 3), (1, 1, 1), (1, 1, EXPERTS))
MODES = itertools.product(("softmax", "sigmoid"), (False, True), (False, True), SIZES)


@pytest.mark.parametrize("mode", [(*mode, *sizes) for *mode, sizes in MODES], ids=str)
def test_every_mode_equals_numpy(mode: tuple[object, ...]):
    router, x = make_router(route_scale=2.5, **dict(zip(NAMES, mode, strict=True))), make_tokens()
    assert_equals_oracle(router(x), oracle(x, router))


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_ties_go_to_the_lowest_id(groups: tuple[int, int]):
    router = make_router(num_groups=groups[0], top_groups=groups[1], top_k=5)
    router.weight.data.zero_()
    for num_tokens in (1, 7, 300):
        topk_idx = router(make_tokens(num_tokens=num_tokens)).topk_idx
        assert torch.equal(topk_idx, torch.arange(5, dtype=torch.int32).expand(num_tokens, 5))


@pytest.mark.parametrize(
    ("score", "renormalize"), list(itertools.product(["softmax", "sigmoid"], [False, True]))
)
def test_gradients_equal_finite_differences(score: str, renormalize: bool):
    """d/dw and d/dx of a weighted sum of probs, scores and logits; differences are taken on the oracle."""
    router = make_router(
        score=score, renormalize=renormalize, num_experts=4, top_k=2, expert_bias=True
    )
    x = make_tokens(num_tokens=3).requires_grad_()
    widths = {"probs": 2, "scores": 4, "logits": 4}
    factors = {
        name: np.random.default_rng(0).normal(size=(3, width)) for name, width in widths.items()
    }
    output = router(x)
    sum((getattr(output, name) * torch.tensor(f)).sum() for name, f in factors.items()).backward()

    def value() -> float:
        expected = oracle(x, router)
        np.testing.assert_array_equal(expected["ids"], output.topk_idx.numpy())
        return sum(float((expected[name] * f).sum()) for name, f in factors.items())

    step = 2.0**-9  # exact in fp32, so that the two points are where they are meant to be
    for tensor, index in [
        (router.weight, (0, 3)),
        (router.weight, (3, 11)),
        (x, (0, 0)),
        (x, (2, 17)),
    ]:
        with torch.no_grad():
            original = tensor[index].clone()
            tensor[index] = original + step
            above, high = value(), float(tensor[index])
            tensor[index] = original - step
            below, low = value(), float(tensor[index])
            tensor[index] = original
        assert float(tensor.grad[index]) == pytest.approx(
            (above - below) / (high - low), rel=2e-3, abs=2e-4
        )


def test_scores_that_underflow_give_zero_probs():
    router = make_router(score="sigmoid")
    router.weight.data.fill_(-1000.0)
    x = torch.ones(2, HIDDEN, requires_grad=True)
    output = router(x)
    output.probs.sum().backward()
    assert torch.equal(output.probs, torch.zeros(2, 3))
    assert torch.isfinite(x.grad).all()


def test_no_tokens():
    router = make_router(num_groups=4, top_groups=2, expert_bias=True)
    x = torch.empty(0, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    output = router(x)
    assert output.topk_idx.shape == output.probs.shape == (0, 3)
    assert output.logits.shape == (0, EXPERTS)
    assert output.topk_idx.dtype == torch.int32
    (output.probs.sum() + output.scores.sum() + output.logits.sum()).backward()
    assert x.grad.shape == (0, HIDDEN)
    assert torch.equal(router.weight.grad, torch.zeros(EXPERTS, HIDDEN))


def test_is_fp32_under_autocast_and_for_half_precision_tokens():
    router, x = make_router(), make_tokens().bfloat16()
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
