"""The rule that turns a router's logits into a choice of experts, as data for kernels and modules."""

from dataclasses import dataclass
from typing import Literal, get_args

from symmoe.errors import choice_problem, raise_for

# Scores of a token's logits over all experts. The functions and gradients: twin/route.py and triton/route.py. Scores of
# softmax are shares of the token; other scores are normalised where shares are needed.
Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
TINY = 1e-20  # added to the sum of K scores: if all scores underflow, probs are 0, not NaN
SMALLEST = 2.0**-126  # the smallest normal fp32: scores with a smaller sum have shares of 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """The fields of RouterConfig with these names. ArgumentError: `score` names no score function.

    E experts form groups of neighbours; a token keeps its best groups. A group's value is its best score ("softmax",
    DeepSeek-V2, arXiv:2405.04434), or the sum of its best two (others, as in DeepSeek-V3, arXiv:2412.19437).
    """

    score: str = "softmax"
    renormalize: bool = True
    num_expert_groups: int = 1
    topk_groups: int = 1
    route_scale: float = 1.0

    def __post_init__(self) -> None:
        raise_for(choice_problem("score", self.score, get_args(Score)))

    def best_of_group(self, num_experts: int) -> int:
        """The number of experts that determine a group's value."""
        return 1 if self.score == "softmax" else min(2, num_experts // self.num_expert_groups)
