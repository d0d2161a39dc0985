"""From a router's logits to the choice of experts and its weights, in one launch each way."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.autograd.function import once_differentiable

from symmoe import kernels
from symmoe.autograd import Context, Function
from symmoe.kernels.routing_rule import RoutingRule

Chosen = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def choose_experts(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    topk_idx: torch.Tensor | None,
    *,
    top_k: int,
    rule: RoutingRule,
) -> Chosen:
    """The experts of each token, their probs, and the scores of all experts: see kernels/contract/router.py.

    Not collective; no host synchronisation. Differentiable by logits, once.

    Args:
        logits: fp32 [T, E].
        bias: fp32 [E], added to the scores where experts are compared, or None.
        topk_idx: int32 [T, K], experts to take instead of the best ones; None: the best ones.

    Returns:
        probs fp32 [T, K]; scores fp32 [T, E]; topk_idx int32 [T, K].
    """
    if torch.compiler.is_compiling():
        fields = rule.score, rule.renormalize, rule.num_groups, rule.top_groups, rule.route_scale
        chosen: Chosen = _choose_experts(logits, bias, topk_idx, top_k, *fields)
        return chosen
    applied: Chosen = _ChooseExperts.apply(logits, bias, topk_idx, top_k, rule)
    return applied


def _choose(
    logits: torch.Tensor, bias: torch.Tensor | None, given_idx: torch.Tensor | None, top_k: int, rule: RoutingRule
) -> Chosen:
    probs, scores, topk_idx = _empty(logits, top_k)
    given_idx = None if given_idx is None else given_idx.contiguous()
    ops = kernels.for_device(logits.device)
    ops.choose_experts(logits.contiguous(), bias, given_idx, topk_idx, probs, scores, rule=rule)
    return probs, scores, topk_idx


def _empty(logits: torch.Tensor, top_k: int) -> Chosen:
    choice = logits.shape[0], top_k
    return logits.new_empty(choice), logits.new_empty(logits.shape), logits.new_empty(choice, dtype=torch.int32)


def _gradient(
    d_probs: torch.Tensor | None,
    d_scores: torch.Tensor | None,
    topk_idx: torch.Tensor,
    scores: torch.Tensor,
    rule: RoutingRule,
) -> torch.Tensor:
    d_logits = torch.empty_like(scores)
    d_probs, d_scores = (None if each is None else each.contiguous() for each in (d_probs, d_scores))
    ops = kernels.for_device(scores.device)
    ops.choose_experts_grad(d_probs, d_scores, topk_idx, scores, d_logits, rule=rule)
    return d_logits


class _ChoiceContext(Context, Protocol):
    rule: RoutingRule


class _ChooseExperts(Function):
    @staticmethod
    def forward(
        ctx: _ChoiceContext,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        given_idx: torch.Tensor | None,
        top_k: int,
        rule: RoutingRule,
    ) -> Chosen:
        probs, scores, topk_idx = _choose(logits, bias, given_idx, top_k, rule)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(topk_idx)
        ctx.save_for_backward(topk_idx, scores)
        ctx.rule = rule
        return probs, scores, topk_idx

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _ChoiceContext, d_probs: torch.Tensor | None, d_scores: torch.Tensor | None, _: None
    ) -> tuple[torch.Tensor | None, None, None, None, None]:
        topk_idx, scores = ctx.saved_tensors
        return _gradient(d_probs, d_scores, topk_idx, scores, ctx.rule), None, None, None, None


# For torch.compile, operators, which take numbers and words in place of a rule.


@torch.library.custom_op("symmoe::choose_experts", mutates_args=())
def _choose_experts(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    given_idx: torch.Tensor | None,
    top_k: int,
    score: str,
    renormalize: bool,
    num_groups: int,
    top_groups: int,
    route_scale: float,
) -> Chosen:
    rule = RoutingRule(
        score=score, renormalize=renormalize, num_groups=num_groups, top_groups=top_groups, route_scale=route_scale
    )
    return _choose(logits, bias, given_idx, top_k, rule)


@_choose_experts.register_fake
def _(
    logits: torch.Tensor, bias: torch.Tensor | None, given_idx: torch.Tensor | None, top_k: int, *rule: object
) -> Chosen:
    return _empty(logits, top_k)


@torch.library.custom_op("symmoe::choose_experts_grad", mutates_args=())
def _choose_experts_grad(
    d_probs: torch.Tensor | None,
    d_scores: torch.Tensor | None,
    topk_idx: torch.Tensor,
    scores: torch.Tensor,
    score: str,
    renormalize: bool,
    route_scale: float,
) -> torch.Tensor:
    rule = RoutingRule(score=score, renormalize=renormalize, route_scale=route_scale)
    return _gradient(d_probs, d_scores, topk_idx, scores, rule)


@_choose_experts_grad.register_fake
def _(
    d_probs: torch.Tensor | None,
    d_scores: torch.Tensor | None,
    topk_idx: torch.Tensor,
    scores: torch.Tensor,
    *_: object,
) -> torch.Tensor:
    return torch.empty_like(scores)


class _OperatorContext(Context, Protocol):
    rule: tuple[object, ...]


def _keep(ctx: _OperatorContext, inputs: tuple[object, ...], output: Chosen) -> None:
    _, scores, topk_idx = output
    ctx.mark_non_differentiable(topk_idx)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(topk_idx, scores)
    score, renormalize, _, _, route_scale = inputs[4:]
    ctx.rule = score, renormalize, route_scale


def _backward(
    ctx: _OperatorContext, d_probs: torch.Tensor | None, d_scores: torch.Tensor | None, _: None
) -> tuple[torch.Tensor | None, ...]:
    topk_idx, scores = ctx.saved_tensors
    return _choose_experts_grad(d_probs, d_scores, topk_idx, scores, *ctx.rule), *[None] * 8


_choose_experts.register_autograd(_backward, setup_context=_keep)
