"""Twins of the router's GEMMs and of the choice of experts of contract/router.py."""

import math

import torch

from symmoe.kernels import control
from symmoe.kernels.routing_rule import SMALLEST, TINY, RoutingRule
from symmoe.kernels.twin import plan
from symmoe.kernels.twin.gemm import multiply_rows


def router_gemm(x, weight, logits):
    multiply_rows(logits, x, weight.t())


def router_gemm_grads(d_logits, x, weight, dx, d_weight):
    if dx is not None:
        multiply_rows(dx, d_logits, weight)
    if d_weight is not None:
        torch.mm(d_logits.t(), x.float(), out=d_weight)


def choose_experts(logits, bias, given_idx, topk_idx, probs, scores, *, rule, block_counts=None):
    # Not torch.sigmoid, see twin/activation.py.
    scores.copy_(logits.softmax(1) if rule.score == "softmax" else 1 / (1 + (-logits).exp()))
    if given_idx is None:
        values = scores if bias is None else scores + bias
        if rule.num_expert_groups > 1:
            values = _keep_top_groups(values, rule)
        given_idx = _largest(values, topk_idx.shape[1])
    topk_idx.copy_(given_idx)
    chosen, _ = _chosen_scores(topk_idx, scores)
    if rule.renormalize:
        chosen = chosen / (chosen.sum(1, keepdim=True) + TINY)
    probs.copy_(chosen * rule.route_scale)
    if block_counts is not None:
        num_experts = scores.shape[1]
        num_ranks = block_counts.shape[1] - num_experts - 2
        plan.count_slots(topk_idx, block_counts, num_experts=num_experts, num_ranks=num_ranks)


def choose_experts_grad(d_probs, d_scores, topk_idx, scores, d_logits, *, rule):
    total = (
        torch.zeros_like(scores)
        if d_scores is None
        else d_scores.clone(memory_format=torch.contiguous_format)
    )
    if d_probs is not None:
        chosen, places = _chosen_scores(topk_idx, scores)
        d_chosen = d_probs * rule.route_scale
        if rule.renormalize:
            divisor = chosen.sum(1, keepdim=True) + TINY
            d_chosen = (d_chosen - (d_chosen * (chosen / divisor)).sum(1, keepdim=True)) / divisor
        is_expert = (topk_idx >= 0) & (topk_idx < scores.shape[1])
        total.scatter_add_(1, places, d_chosen.masked_fill(~is_expert, 0.0))
    if rule.score == "softmax":
        d_logits.copy_(scores * (total - (total * scores).sum(1, keepdim=True)))
    else:
        d_logits.copy_(total * scores * (1 - scores))


def _chosen_scores(
    topk_idx: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, K] scores of the chosen experts, 0 for an id that is none; and the ids as places, int64, these as 0."""
    is_expert = (topk_idx >= 0) & (topk_idx < scores.shape[1])
    places = topk_idx.long().masked_fill(~is_expert, 0)
    return scores.gather(1, places).masked_fill(~is_expert, 0.0), places


def _largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices [T, k] of the k largest of each row, best first, ties to the lower index."""
    # A stable sort, because `torch.topk` leaves ties open and picks its algorithm by shape, so that the same token
    # could be routed differently in a batch of another size.
    indices: torch.Tensor = values.sort(dim=1, descending=True, stable=True).indices
    return indices[:, :k]


def _keep_top_groups(values: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """[T, E] values, -inf outside of a token's best groups."""
    grouped_TGe = values.unflatten(1, (rule.num_expert_groups, -1))
    worth_TG = grouped_TGe.topk(rule.best_of_group(values.shape[1]), dim=2).values.sum(2)
    is_kept_TG = torch.zeros_like(worth_TG, dtype=torch.bool)
    is_kept_TG.scatter_(1, _largest(worth_TG, rule.topk_groups), True)
    kept: torch.Tensor = grouped_TGe.masked_fill(~is_kept_TG.unsqueeze(2), -math.inf)
    return kept.flatten(1)


def router_losses(
    logits, scores, expert_load, token_mask, sums, slopes, loss, *, balance_coef, z_coef, normalises
):
    num_experts = scores.shape[1]
    is_counted = _counted(token_mask, scores)
    shares = scores / _sum_of(scores) if normalises else scores
    squares = logits.logsumexp(1, keepdim=True).square()
    lines = torch.cat([shares, squares, torch.ones_like(squares)], 1).where(is_counted, 0.0)
    for block, part in enumerate(lines.split(control.TOKENS_PER_LOSS_BLOCK)[: len(sums)]):
        sums[block] = part.sum(0)
    total = sums.sum(0)
    num_counted, load = total[-1].clamp_min(1), expert_load.float()
    slopes[:-1] = balance_coef * num_experts / num_counted * (load / load.sum().clamp_min(1))
    slopes[-1] = 2 * z_coef / num_counted
    loss.copy_((slopes[:-1] * total[:-2]).sum() + slopes[-1] / 2 * total[-2])


def router_losses_grad(
    d_loss, logits, scores, token_mask, slopes, d_logits, d_scores, *, normalises
):
    is_counted = _counted(token_mask, logits)
    if d_logits is not None:
        lse = logits.logsumexp(1, keepdim=True)
        slope = slopes[-1] * lse * (logits - lse).exp()
        d_logits.copy_((d_loss * slope).where(is_counted, 0.0))
    if d_scores is not None:
        slope = slopes[:-1].expand_as(scores)
        if normalises:
            total = _sum_of(scores)
            mean = (slope * scores).sum(1, keepdim=True) / total
            slope = (slope - mean.where(scores.sum(1, keepdim=True) >= SMALLEST, 0.0)) / total
        d_scores.copy_((d_loss * slope).where(is_counted, 0.0))


def _counted(token_mask: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
    if token_mask is None:
        return scores.new_ones((len(scores), 1), dtype=torch.bool)
    return token_mask[:, None]


def _sum_of(scores: torch.Tensor) -> torch.Tensor:
    return scores.sum(1, keepdim=True).clamp_min(SMALLEST)
