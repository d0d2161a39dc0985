"""Choices of experts that are hard to make, for the kernels and their twins."""

import torch

from symmoe.kernels.routing_rule import RoutingRule

SIZES = ((7, 1, 1), (40, 6, 6), (33, 48, 8), (3, 1000, 32))  # T, E, K
RULES = (
    RoutingRule(),
    RoutingRule(score="sigmoid", route_scale=2.5),
    RoutingRule(renormalize=False, num_groups=2),
    RoutingRule(num_groups=6, top_groups=3),
    RoutingRule(score="sigmoid", num_groups=3, top_groups=2),
    RoutingRule(score="sigmoid", num_groups=8, top_groups=4),
)


def fits(rule: RoutingRule, num_experts: int, top_k: int) -> bool:
    """Whether MoEConfig would take them together."""
    return num_experts % rule.num_groups == 0 and top_k <= rule.top_groups * (num_experts // rule.num_groups)


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
    """What choose_experts and its gradient make, on the CPU."""
    device, (num_tokens, num_experts) = logits.device, logits.shape
    choice = num_tokens, top_k
    bias = torch.linspace(-0.2, 0.2, num_experts, device=device) if biased else None
    slots = torch.arange(num_tokens * top_k, dtype=torch.int32, device=device).view(choice)
    given_idx = slots % (num_experts + 2) - 1 if given else None
    topk_idx, probs = torch.full(choice, -7, dtype=torch.int32, device=device), torch.zeros(choice, device=device)
    scores = torch.zeros_like(logits)
    module.choose_experts(logits, bias, given_idx, topk_idx, probs, scores, rule=rule)
    generator = torch.Generator().manual_seed(top_k)
    d_probs, d_scores = (torch.randn(shape, generator=generator).to(device) for shape in (choice, logits.shape))
    results = {"topk_idx": topk_idx, "probs": probs, "scores": scores}
    for name, gradients in {"both": (d_probs, d_scores), "probs": (d_probs, None), "scores": (None, d_scores)}.items():
        d_logits = torch.zeros_like(logits)
        module.choose_experts_grad(*gradients, topk_idx, scores, d_logits, rule=rule)
        results[f"gradient of {name}"] = d_logits
    return {name: value.cpu() for name, value in results.items()}


def differing(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names of results that are not the same choice, or numbers that are not close."""
    return [
        name
        for name, value in found.items()
        if not torch.allclose(value, wanted[name], rtol=2e-5, atol=0 if name == "topk_idx" else 2e-6, equal_nan=True)
    ]
