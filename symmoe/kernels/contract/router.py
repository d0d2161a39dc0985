"""The router: its GEMMs, and the choice of experts."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RouterKernels(Protocol):
    def router_gemm(self, x: Tensor, weight: Tensor, logits: Tensor) -> None:
        """logits = x @ weight^T. x bf16 [T, H], weight fp32 [E, H], logits fp32 [T, E].

        Products and sums are as good as those of fp32, but their bits are not those of fp32 sums in any order.
        """

    def router_gemm_grads(
        self, d_logits: Tensor, x: Tensor, weight: Tensor, dx: Tensor | None, d_weight: Tensor | None
    ) -> None:
        """dx = d_logits @ weight and d_weight = d_logits^T @ x; what is None is not computed.

        d_logits fp32 [T, E]; x and dx bf16 [T, H]; weight and d_weight fp32 [E, H]. dx is rounded to bf16 once; the sum
        before that is good to 2^-15 of its terms' magnitudes.
        """

    def select_experts(self, scores: Tensor, topk_idx: Tensor) -> None:
        """topk_idx[t] = the K largest of scores[t], best first, ties to the lower index; NaN is larger than any number.

        scores fp32 [T, E]; topk_idx int64 [T, K].
        """
