"""Launches of a router's kernels that are hard to compute."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import torch
from activation_formula import SCORES
from compared_launches import Numbers, is_near, results
from launch_table import I32, Launch

from symmoe.kernels import twin
from symmoe.kernels.routing_rule import RoutingRule, Score

TOLERANCE = 2e-5
SIZES = ((7, 1, 1), (40, 6, 6), (33, 48, 8), (3, 1000, 32))  # T, E, K
RULES = (
    *(RoutingRule(score=score, route_scale=2.5) for score in get_args(Score)),
    RoutingRule(renormalize=False, num_expert_groups=2),
    RoutingRule(num_expert_groups=6, topk_groups=3),
    RoutingRule(score="sigmoid", num_expert_groups=3, topk_groups=2),
    RoutingRule(score="sigmoid", num_expert_groups=8, topk_groups=4),
)


def fits(rule: RoutingRule, num_experts: int, top_k: int) -> bool:
    """Whether MoEConfig would take them together."""
    return num_experts % rule.num_expert_groups == 0 and top_k <= rule.topk_groups * (
        num_experts // rule.num_expert_groups
    )


def hard_logits(num_tokens: int, num_experts: int) -> torch.Tensor:
    """Logits with many ties and both zeros; every fourth token has infinities and NaN, which spoil its softmax."""
    generator = torch.Generator().manual_seed(num_experts)
    logits = torch.randn((num_tokens, num_experts), generator=generator)
    rare = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-42, -torch.inf, torch.inf, torch.nan])
    which = torch.randint(0, 5 * len(rare), logits.shape, generator=generator)
    which[torch.arange(num_tokens) % 4 > 0] %= len(rare) - 3  # only ties
    which[:, ::2] += len(rare)  # and, of every other expert, neither
    return torch.where(which < len(rare), rare[which % len(rare)], logits)


def choices(num_tokens: int, num_experts: int, top_k: int, rule: RoutingRule) -> Iterator[Launch]:
    """choose_experts of ids that are chosen, with a bias and without, or given; and its gradients. Nothing if the sizes
    do not fit the rule."""
    if not fits(rule, num_experts, top_k):
        return
    sizes = {"T": num_tokens, "E": num_experts, "K": top_k, "R": max(1, num_experts // 2)}
    bias = torch.linspace(-0.2, 0.2, num_experts)
    slots = torch.arange(num_tokens * top_k, dtype=I32).view(num_tokens, top_k)
    ids = slots % (num_experts + 2) - 1
    logits = hard_logits(num_tokens, num_experts)
    for biased, given_idx in ((None, None), (bias, None), (None, ids)):
        changes = {"logits": logits, "bias": biased, "given_idx": given_idx, "rule": rule}
        launch = Launch("choose_experts", sizes, ways="counted", changes=changes)
        yield launch
        chosen = launch.arguments(Numbers(launch))
        twin.choose_experts(**chosen)
        changes = {name: chosen[name] for name in ("topk_idx", "scores", "rule")}
        for missing in ({}, {"d_probs": None}, {"d_scores": None}):
            yield Launch("choose_experts_grad", sizes, changes=changes | missing)


def wrong_extremes(module, device: str = "cpu") -> dict[str, list[float]]:
    """Small and large logits whose sqrtsoftplus score, or its slope, is not that of the formula in float64."""
    special = torch.tensor([3e38, 1e4, 1e-3, 0.0, -0.0, 1e-42, -1e-3])
    logits = torch.cat([torch.linspace(-170, 100, 993), special])[None].to(device)
    exact = logits.double().requires_grad_()
    expected = SCORES["sqrtsoftplus"](exact)
    expected.sum().backward()
    rule = RoutingRule(score="sqrtsoftplus")
    scores, slopes, ones = (torch.ones_like(logits) for _ in range(3))
    topk_idx = scores[:, :1].int()
    probs = scores[:, :1].clone()
    module.choose_experts(logits, None, None, topk_idx, probs, scores, rule=rule)
    module.choose_experts_grad(None, ones, topk_idx, scores, slopes, rule=rule)
    pairs = {"scores": (scores, expected.detach()), "slopes": (slopes, exact.grad)}
    return {
        name: wrong
        for name, (actual, reference) in pairs.items()
        if (wrong := logits[~torch.isclose(actual.double(), reference, rtol=1e-5, atol=0)].tolist())
    }


def changed_by_counting(launch: Launch, kernels: Any, device: str = "cpu") -> list[str]:
    """Results of choose_experts that have other bits if it counts nothing."""
    plain, counted = (
        results(variant, kernels.choose_experts, Numbers(variant, device))
        for variant in (replace(launch, ways=""), launch)
    )
    return [name for name, tensor in plain.items() if not is_near(tensor, counted[name], 0.0)]


def losses(num_tokens: int, num_experts: int, score: str, is_masked: bool) -> Iterator[Launch]:
    """router_losses and its gradient. Scores of one token are all 0."""
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn((num_tokens, num_experts), generator=generator)
    scores = SCORES[score](logits)
    scores[1:2] = 0.0
    load = torch.randint(0, 9, (num_experts,), generator=generator, dtype=I32)
    mask = torch.rand(num_tokens, generator=generator) < 0.7 if is_masked else None
    sizes = {"T": num_tokens, "E": num_experts}
    changes = {"logits": logits, "scores": scores, "token_mask": mask}
    changes["normalises"] = score != "softmax"
    coefficients = {"balance_coef": 0.5, "z_coef": 0.25}
    launch = Launch(
        "router_losses", sizes, changes={**changes, "expert_load": load, **coefficients}
    )
    yield launch
    computed = launch.arguments(Numbers(launch))
    twin.router_losses(**computed)
    changes |= {"slopes": computed["slopes"], "d_loss": torch.tensor(3.0)}
    yield Launch("router_losses_grad", sizes, changes=changes)


def all_losses() -> Iterator[Launch]:
    for case in product((0, 1, 300), (20, 32), get_args(Score), (False, True)):
        yield from losses(*case)
