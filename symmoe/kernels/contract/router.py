"""The router: its GEMMs, and the choice of experts."""

from typing import Protocol

from torch import Tensor

from symmoe.kernels.contract.operands import writes
from symmoe.kernels.routing_rule import RoutingRule


class RouterKernels(Protocol):
    @writes("logits")
    def router_gemm(self, x: Tensor, weight: Tensor, logits: Tensor) -> None:
        """logits = x @ weight^T. x bf16 [T, H], weight fp32 [E, H], logits fp32 [T, E].

        Products and sums are as good as those of fp32, but their bits are not those of fp32 sums in any order.
        """

    @writes("dx", "d_weight")
    def router_gemm_grads(
        self,
        d_logits: Tensor,
        x: Tensor,
        weight: Tensor,
        dx: Tensor | None,
        d_weight: Tensor | None,
    ) -> None:
        """dx = d_logits @ weight and d_weight = d_logits^T @ x; what is None is not computed.

        d_logits fp32 [T, E]; x and dx bf16 [T, H]; weight and d_weight fp32 [E, H]. dx is rounded to bf16 once; the sum
        before that is good to 2^-15 of its terms' magnitudes.
        """

    @writes("topk_idx", "probs", "scores", "block_counts")
    def choose_experts(
        self,
        logits: Tensor,
        bias: Tensor | None,
        given_idx: Tensor | None,
        topk_idx: Tensor,
        probs: Tensor,
        scores: Tensor,
        *,
        rule: RoutingRule,
        block_counts: Tensor | None = None,
    ) -> None:
        """scores = softmax or sigmoid of logits; topk_idx[t] = the K experts of token t whose score + bias is largest,
        of those in its best groups, best first, ties to the lower index; probs[t, k] = the score of expert
        topk_idx[t, k], divided by the sum of the K (renormalize), times route_scale.

        NaN is larger than any number. With given_idx, these experts are taken: an id outside [0, E) has the prob 0.

        logits and scores fp32 [T, E]; bias fp32 [E]; given_idx and topk_idx int32 [T, K]; probs fp32
        [T, K]; block_counts int32 [B, E + R + 2], which gets what count_slots of contract/plan.py finds in topk_idx.
        """

    @writes("d_logits")
    def choose_experts_grad(
        self,
        d_probs: Tensor | None,
        d_scores: Tensor | None,
        topk_idx: Tensor,
        scores: Tensor,
        d_logits: Tensor,
        *,
        rule: RoutingRule,
    ) -> None:
        """d_logits fp32 [T, E] of choose_experts, for the gradients of its probs [T, K] and scores [T, E]; None is 0.

        The choice itself has no gradient.
        """

    @writes("sums", "slopes", "loss")
    def router_losses(
        self,
        logits: Tensor,
        scores: Tensor,
        expert_load: Tensor,
        token_mask: Tensor | None,
        sums: Tensor,
        slopes: Tensor,
        loss: Tensor,
        *,
        balance_coef: float,
        z_coef: float,
        normalises: bool,
    ) -> None:
        """loss = balance_coef * E * sum_e f_e P_e + z_coef * Z of moe/balance.py: the fraction f_e of expert_load, the
        mean P_e over the tokens of their shares (scores, divided by their sum over the experts if `normalises`), and
        the mean Z of logsumexp(logits)^2; without tokens 0.

        Args:
            logits, scores: fp32 [T, E]. expert_load: int32 or int64 [E]. token_mask: bool [T]; tokens of False do not
                count.
            sums: workspace, fp32 [B, E + 2], a line for each control.TOKENS_PER_LOSS_BLOCK tokens.
            slopes: fp32 [E + 1], what router_losses_grad needs: of the loss in each mean share of a token, and twice
                the factor of its squared logsumexp.
            loss: fp32 [].
        """

    @writes("d_logits", "d_scores")
    def router_losses_grad(
        self,
        d_loss: Tensor,
        logits: Tensor,
        scores: Tensor,
        token_mask: Tensor | None,
        slopes: Tensor,
        d_logits: Tensor | None,
        d_scores: Tensor | None,
        *,
        normalises: bool,
    ) -> None:
        """d_logits and d_scores, fp32 [T, E], of router_losses, for the gradient d_loss, fp32 []. None: not wanted."""
