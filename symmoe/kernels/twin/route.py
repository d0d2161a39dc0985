"""The router: its GEMMs and the choice of experts."""

import math

import torch

from symmoe.kernels import control
from symmoe.kernels.operands import writes
from symmoe.kernels.routing_rule import SMALLEST, TINY, RoutingRule
from symmoe.kernels.twin.gemm import multiply_rows
from symmoe.kernels.twin.plan import PlanKernels


class RouterKernels:
    @staticmethod
    @writes("logits")
    def router_gemm(x: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor) -> None:
        """logits = x @ weight^T. x bf16 [T, H], weight fp32 [E, H], logits fp32 [T, E].

        Products and sums have the accuracy of fp32, but not the bits of fp32 sums in any order.
        """
        logits.copy_(multiply_rows(x, weight.t()))

    @staticmethod
    @writes("dx", "d_weight")
    def router_gemm_grads(
        d_logits: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        dx: torch.Tensor | None,
        d_weight: torch.Tensor | None,
    ) -> None:
        """dx = d_logits @ weight and d_weight = d_logits^T @ x; a result that is None is not computed.

        d_logits fp32 [T, E]; x and dx bf16 [T, H]; weight and d_weight fp32 [E, H]. dx is rounded to bf16 once; the
        error of the sum before rounding is at most 2^-15 of its terms' magnitudes.
        """
        if dx is not None:
            dx.copy_(multiply_rows(d_logits, weight))
        if d_weight is not None:
            torch.mm(d_logits.t(), x.float(), out=d_weight)

    @staticmethod
    @writes("topk_idx", "probs", "scores", "block_counts")
    def choose_experts(
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        given_idx: torch.Tensor | None,
        topk_idx: torch.Tensor,
        probs: torch.Tensor,
        scores: torch.Tensor,
        *,
        rule: RoutingRule,
        block_counts: torch.Tensor | None = None,
    ) -> None:
        """scores = the rule's function of logits; topk_idx[t] = the K experts in token t's best groups with the largest
        score + bias, best first, ties to the lower index; probs[t, k] = the score of expert topk_idx[t, k], divided by
        the sum of the K (renormalize), times route_scale.

        NaN is larger than any number. given_idx replaces the choice: an id outside [0, E) has the prob 0.

        logits and scores fp32 [T, E]; bias fp32 [E]; given_idx and topk_idx int32 [T, K]; probs fp32
        [T, K]; block_counts int32 [B, E + R + 2] gets count_slots' result for topk_idx (twin/plan.py).
        """
        scores.copy_(_SCORES[rule.score](logits, None))
        if given_idx is None:
            values_TE = scores if bias is None else scores + bias
            if rule.num_expert_groups > 1:
                values_TE = _keep_top_groups(values_TE, rule)
            given_idx = _largest(values_TE, topk_idx.shape[1])
        topk_idx.copy_(given_idx)
        chosen_TK, _ = _chosen_scores(topk_idx, scores)
        if rule.renormalize:
            chosen_TK = chosen_TK / (chosen_TK.sum(1, keepdim=True) + TINY)
        probs.copy_(chosen_TK * rule.route_scale)
        if block_counts is not None:
            num_experts = scores.shape[1]
            num_ranks = block_counts.shape[1] - num_experts - 2
            PlanKernels.count_slots(
                topk_idx, block_counts, num_experts=num_experts, num_ranks=num_ranks
            )

    @staticmethod
    @writes("d_logits")
    def choose_experts_grad(
        d_probs: torch.Tensor | None,
        d_scores: torch.Tensor | None,
        topk_idx: torch.Tensor,
        scores: torch.Tensor,
        d_logits: torch.Tensor,
        *,
        rule: RoutingRule,
    ) -> None:
        """d_logits fp32 [T, E] of choose_experts, from the gradients of its probs [T, K] and scores [T, E]; None is 0.

        The choice itself has no gradient.
        """
        total_TE = (
            torch.zeros_like(scores)
            if d_scores is None
            else d_scores.clone(memory_format=torch.contiguous_format)
        )
        if d_probs is not None:
            chosen_TK, places_TK = _chosen_scores(topk_idx, scores)
            d_chosen_TK = d_probs * rule.route_scale
            if rule.renormalize:
                divisor_T1 = chosen_TK.sum(1, keepdim=True) + TINY
                d_chosen_TK = (
                    d_chosen_TK - (d_chosen_TK * (chosen_TK / divisor_T1)).sum(1, keepdim=True)
                ) / divisor_T1
            is_expert_TK = (topk_idx >= 0) & (topk_idx < scores.shape[1])
            total_TE.scatter_add_(1, places_TK, d_chosen_TK.masked_fill(~is_expert_TK, 0.0))
        d_logits.copy_(_SCORES[rule.score](scores, total_TE))

    @staticmethod
    @writes("sums", "slopes", "loss")
    def router_losses(
        logits: torch.Tensor,
        scores: torch.Tensor,
        expert_load: torch.Tensor,
        token_mask: torch.Tensor | None,
        sums: torch.Tensor,
        slopes: torch.Tensor,
        loss: torch.Tensor,
        *,
        balance_coef: float,
        z_coef: float,
        normalises: bool,
    ) -> None:
        """loss = balance_coef * E * sum_e f_e P_e + z_coef * Z of moe/balance.py: the fraction f_e of expert_load, the
        mean P_e of the tokens' shares (scores, divided by their sum over the experts if `normalises`), and the mean Z
        of logsumexp(logits)^2; 0 without tokens.

        Args:
            logits, scores: fp32 [T, E]. expert_load: int32 or int64 [E]. token_mask: bool [T]; a token with False does
                not count.
            sums: workspace, fp32 [B, E + 2], one line per control.TOKENS_PER_LOSS_BLOCK tokens.
            slopes: fp32 [E + 1], for router_losses_grad: the loss's derivative by each mean share of a token, and twice
                the factor of its squared logsumexp.
            loss: fp32 [].
        """
        num_experts = scores.shape[1]
        is_counted_T1 = _counted(token_mask, scores)
        shares_TE = (
            scores / scores.sum(1, keepdim=True).clamp_min(SMALLEST) if normalises else scores
        )
        squares_T1 = logits.logsumexp(1, keepdim=True).square()
        lines = torch.cat([shares_TE, squares_T1, torch.ones_like(squares_T1)], 1).where(
            is_counted_T1, 0.0
        )
        for block, part in enumerate(lines.split(control.TOKENS_PER_LOSS_BLOCK)[: len(sums)]):
            sums[block] = part.sum(0)
        total = sums.sum(0)
        num_counted, load_E = total[-1].clamp_min(1), expert_load.float()
        slopes[:-1] = (
            balance_coef * num_experts / num_counted * (load_E / load_E.sum().clamp_min(1))
        )
        slopes[-1] = 2 * z_coef / num_counted
        loss.copy_((slopes[:-1] * total[:-2]).sum() + slopes[-1] / 2 * total[-2])

    @staticmethod
    @writes("d_logits", "d_scores")
    def router_losses_grad(
        d_loss: torch.Tensor,
        logits: torch.Tensor,
        scores: torch.Tensor,
        token_mask: torch.Tensor | None,
        slopes: torch.Tensor,
        d_logits: torch.Tensor | None,
        d_scores: torch.Tensor | None,
        *,
        normalises: bool,
    ) -> None:
        """d_logits and d_scores, fp32 [T, E], of router_losses, from the gradient d_loss, fp32 []. None: skipped."""
        is_counted_T1 = _counted(token_mask, logits)
        if d_logits is not None:
            lse_T1 = logits.logsumexp(1, keepdim=True)
            slope_TE = slopes[-1] * lse_T1 * (logits - lse_T1).exp()
            d_logits.copy_((d_loss * slope_TE).where(is_counted_T1, 0.0))
        if d_scores is not None:
            slope_TE = slopes[:-1].expand_as(scores)
            if normalises:
                total_T1 = scores.sum(1, keepdim=True)
                divisor_T1 = total_T1.clamp_min(SMALLEST)
                mean_T1 = (slope_TE * scores).sum(1, keepdim=True) / divisor_T1
                slope_TE = (slope_TE - mean_T1.where(total_T1 >= SMALLEST, 0.0)) / divisor_T1
            d_scores.copy_((d_loss * slope_TE).where(is_counted_T1, 0.0))


def _softmax(x: torch.Tensor, d_scores: torch.Tensor | None) -> torch.Tensor:
    """Scores [T, E] of logits x; with d_scores, the gradient of the logits of scores x."""
    if d_scores is None:
        return x.softmax(1)
    return x * (d_scores - (d_scores * x).sum(1, keepdim=True))


def _sigmoid(x: torch.Tensor, d_scores: torch.Tensor | None) -> torch.Tensor:
    """As _softmax."""
    if d_scores is None:
        return 1 / (1 + (-x).exp())  # not torch.sigmoid, see twin/activation.py
    return d_scores * x * (1 - x)


def _sqrtsoftplus(x: torch.Tensor, d_scores: torch.Tensor | None) -> torch.Tensor:
    """As _softmax. Small scores are exp(x / 2), and half of that their slope, because their squares underflow."""
    if d_scores is None:
        softplus = x.clamp_min(0) + (-x.abs()).exp().log1p()  # not torch's, as for sigmoid
        return softplus.sqrt().where(x > -16, (x / 2).exp())
    return d_scores * ((-x * x).expm1() / (-2 * x)).where(x > 2.0**-12, x / 2)


_SCORES = {"softmax": _softmax, "sigmoid": _sigmoid, "sqrtsoftplus": _sqrtsoftplus}


def _chosen_scores(
    topk_idx: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, K] scores of the chosen experts, 0 for ids out of range; and int64 indices, 0 for such ids."""
    is_expert_TK = (topk_idx >= 0) & (topk_idx < scores.shape[1])
    places_TK = topk_idx.long().masked_fill(~is_expert_TK, 0)
    return scores.gather(1, places_TK).masked_fill(~is_expert_TK, 0.0), places_TK


def _largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """Indices [T, k] of the k largest of each row, best first, ties to the lower index."""
    # A stable sort: `torch.topk` does not define the order of ties and chooses its algorithm by shape, so a batch of
    # another size could route the same token differently.
    return values.argsort(dim=1, descending=True, stable=True)[:, :k]


def _keep_top_groups(values: torch.Tensor, rule: RoutingRule) -> torch.Tensor:
    """[T, E] values, -inf outside of a token's best groups."""
    grouped_TGe = values.unflatten(1, (rule.num_expert_groups, -1))
    worth_TG = grouped_TGe.topk(rule.best_of_group(values.shape[1]), dim=2).values.sum(2)
    is_kept_TG = torch.zeros_like(worth_TG, dtype=torch.bool)
    is_kept_TG.scatter_(1, _largest(worth_TG, rule.topk_groups), True)
    kept_TGe: torch.Tensor = grouped_TGe.masked_fill(~is_kept_TG.unsqueeze(2), -math.inf)
    return kept_TGe.flatten(1)


def _counted(token_mask: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
    """bool [T, 1]: whether a token counts."""
    is_counted_T = scores.new_ones(len(scores), dtype=torch.bool)
    return (is_counted_T if token_mask is None else token_mask)[:, None]
