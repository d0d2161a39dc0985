"""How a router's logits become a choice of experts, as data that kernels and modules share."""

from dataclasses import dataclass
from typing import Literal, get_args

from symmoe.errors import choice_problem, raise_for

# Of a token's logits over all experts. The function and its gradient: twin/route.py and triton/route.py. Those of
# softmax are shares of the token; others are normalised where shares are needed.
Score = Literal["softmax", "sigmoid"]
TINY = 1e-20  # is added to the sum of K scores: sigmoid scores that all underflow must give probs of 0, not NaN
SMALLEST = 2.0**-126  # the smallest normal fp32: scores whose sum is less have shares of 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """The fields of RouterConfig of these names. ArgumentError: `score` is no word of a score.

    Of E experts in groups of neighbours, a token's best groups are kept. A group is worth its best expert ("softmax",
    DeepSeek-V2, arXiv:2405.04434), or the sum of its best two ("sigmoid", DeepSeek-V3, arXiv:2412.19437).
    """

    score: str = "softmax"
    renormalize: bool = True
    num_expert_groups: int = 1
    topk_groups: int = 1
    route_scale: float = 1.0

    def __post_init__(self) -> None:
        raise_for(choice_problem("score", self.score, get_args(Score)))

    def best_of_group(self, num_experts: int) -> int:
        """How many experts say what a group is worth."""
        return 1 if self.score == "softmax" else min(2, num_experts // self.num_expert_groups)
