"""Choices of experts that are hard to make, for the kernels and their twins."""

from typing import get_args

import torch
from activation_formula import SCORES

from symmoe.kernels.control import TOKENS_PER_LOSS_BLOCK, num_blocks
from symmoe.kernels.routing_rule import RoutingRule, Score

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


def choices(module, logits: torch.Tensor, top_k: int, rule: RoutingRule, biased: bool, given: bool):
    """What choose_experts and its gradient make, on the CPU. Counting or not, the choice has the same bits."""
    device, (num_tokens, num_experts) = logits.device, logits.shape
    bias = torch.linspace(-0.2, 0.2, num_experts, device=device) if biased else None
    slots = torch.arange(num_tokens * top_k, dtype=torch.int32, device=device).view(
        num_tokens, top_k
    )
    given_idx, bits = slots % (num_experts + 2) - 1 if given else None, []
    for counts in (
        None,
        slots.new_full((num_blocks(num_tokens), num_experts + max(1, num_experts // 2) + 2), -7),
    ):
        topk_idx, probs, scores = slots * 0 - 7, slots.float() * torch.nan, logits * torch.nan
        module.choose_experts(
            logits, bias, given_idx, topk_idx, probs, scores, rule=rule, block_counts=counts
        )
        bits.append([each.view(torch.int32).tolist() for each in (topk_idx, probs, scores)])
    assert bits[0] == bits[1]
    generator = torch.Generator().manual_seed(top_k)
    d_probs, d_scores = (
        torch.randn(shape, generator=generator).to(device) for shape in (slots.shape, logits.shape)
    )
    results = {"topk_idx": topk_idx, "probs": probs, "scores": scores, "block_counts": counts}
    for name, gradients in {
        "both": (d_probs, d_scores),
        "probs": (d_probs, None),
        "scores": (None, d_scores),
    }.items():
        d_logits = torch.zeros_like(logits)
        module.choose_experts_grad(*gradients, topk_idx, scores, d_logits, rule=rule)
        results[f"gradient of {name}"] = d_logits
    return {name: value.cpu() for name, value in results.items()}


def differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names of results that are not the same choice, or numbers that are not close."""
    near = {
        True: {"rtol": 2e-5, "atol": 2e-6, "equal_nan": True},
        False: {"rtol": 0.0, "atol": 0.0},
    }
    pairs = {name: (value, wanted[name]) for name, value in found.items()}
    return [
        name
        for name, pair in pairs.items()
        if not torch.allclose(*pair, **near[pair[0].is_floating_point()])
    ]


def wrong_extremes(module, device: str = "cpu") -> dict[str, list[float]]:
    """Small and large logits whose sqrtsoftplus score, or its slope, is not that of the formula in float64."""
    special = torch.tensor([3e38, 1e4, 1e-3, 0.0, -0.0, 1e-42, -1e-3])
    logits = torch.cat([torch.linspace(-170, 100, 993), special])[None].to(device)
    exact = logits.double().requires_grad_()
    wanted = SCORES["sqrtsoftplus"](exact)
    wanted.sum().backward()
    rule = RoutingRule(score="sqrtsoftplus")
    scores, slopes, ones = (torch.ones_like(logits) for _ in range(3))
    topk_idx = scores[:, :1].int()
    probs = scores[:, :1].clone()
    module.choose_experts(logits, None, None, topk_idx, probs, scores, rule=rule)
    module.choose_experts_grad(None, ones, topk_idx, scores, slopes, rule=rule)
    pairs = {"scores": (scores, wanted.detach()), "slopes": (slopes, exact.grad)}
    return {
        name: far
        for name, (found, want) in pairs.items()
        if (far := logits[~torch.isclose(found.double(), want, rtol=1e-5, atol=0)].tolist())
    }


def losses(module, num_tokens: int, num_experts: int, score: str, is_masked: bool):
    """What router_losses and its gradient make, on the CPU. Scores of one token are all 0."""
    generator = torch.Generator().manual_seed(num_tokens)
    logits = torch.randn((num_tokens, num_experts), generator=generator)
    scores = SCORES[score](logits)
    scores[1:2] = 0.0
    load = torch.randint(0, 9, (num_experts,), generator=generator, dtype=torch.int32)
    mask = torch.rand(num_tokens, generator=generator) < 0.7 if is_masked else None
    blocks = -(-num_tokens // TOKENS_PER_LOSS_BLOCK)
    results = {
        "sums": torch.full((blocks, num_experts + 2), torch.nan),
        "slopes": torch.full((num_experts + 1,), torch.nan),
        "loss": torch.full((), torch.nan),
        "d_logits": torch.full_like(logits, torch.nan),
        "d_scores": torch.full_like(logits, torch.nan),
    }
    sums, slopes, loss, d_logits, d_scores = results.values()
    options = {"normalises": score != "softmax"}
    given = logits, scores, load, mask, sums, slopes, loss
    module.router_losses(*given, balance_coef=0.5, z_coef=0.25, **options)
    given = torch.tensor(3.0), logits, scores, mask, slopes
    module.router_losses_grad(*given, d_logits, d_scores, **options)
    return results
