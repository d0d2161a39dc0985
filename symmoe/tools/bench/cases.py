"""What is measured: layer shapes of known models, numbers of tokens, and how skewed the routing is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from symmoe.errors import ArgumentError

HOT_EXPERT = 0
_ZIPF_SEED = 20261121


@dataclass(frozen=True, slots=True)
class Shape:
    """One MoE layer: H, I, E, K."""

    name: str
    hidden: int
    ffn: int
    num_experts: int
    top_k: int


PRESETS = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b", 2048, 768, 128, 8),
        Shape("qwen3-235b", 4096, 1536, 128, 8),
        Shape("mixtral-8x7b", 4096, 14336, 8, 2),
        Shape("deepseek-like", 7168, 2048, 64, 8),  # DeepSeek-V3 with a quarter of its experts, so that it fits
        Shape("gpt-oss-120b", 2880, 2880, 128, 4),
        Shape("olmoe", 2048, 1024, 64, 8),
    )
}


@dataclass(frozen=True, slots=True)
class Case:
    """A shape, T tokens on every rank, and a routing."""

    shape: Shape
    num_tokens: int
    skew: str

    @property
    def num_slots(self) -> int:
        """T * K, which is also the mean number of rows of a rank."""
        return self.num_tokens * self.shape.top_k

    @property
    def forward_flops(self) -> int:
        """6 T H I K, FLOPs of the mean rank; a backward pass has twice as many."""
        return 6 * self.num_slots * self.shape.hidden * self.shape.ffn

    def __str__(self) -> str:
        return f"{self.shape.name}, {self.num_tokens} tokens, {self.skew}"


SKEWS = ("uniform", "zipf", "hot")


def log_popularity(skew: str, num_experts: int) -> torch.Tensor:
    """The logarithm of every expert's popularity, fp32 [E]."""
    weights = torch.zeros(num_experts)
    if skew == "zipf":
        # The order of popularity is a fixed permutation, so that not all popular experts live on rank 0.
        place = torch.randperm(num_experts, generator=torch.Generator().manual_seed(_ZIPF_SEED))
        weights = -torch.log1p(place.float())
    elif skew == "hot":
        weights[HOT_EXPERT] = math.inf
    return weights


def choose_experts(case: Case, generator: torch.Generator) -> torch.Tensor:
    """int64 [T, K] on the CPU: each token's K distinct experts.

    "uniform": all equally likely. "zipf": drawn without replacement with probabilities proportional to 1 / place, the
    place being the same for all ranks. "hot": every token chooses one and the same expert first, the others uniformly.

    Keys log(popularity) + Gumbel noise, sorted, are draws without replacement (Efraimidis and Spirakis, 2006).
    """
    num_experts = case.shape.num_experts
    uniform = torch.rand(case.num_tokens, num_experts, generator=generator).clamp_(1e-30, 1 - 2**-24)
    keys = log_popularity(case.skew, num_experts) - torch.log(-torch.log(uniform))
    return keys.topk(case.shape.top_k, dim=1).indices


def check_case(case: Case, num_ranks: int) -> None:
    """Raises ArgumentError if the case cannot be run on `num_ranks` ranks."""
    shape = case.shape
    for name, value in (("hidden", shape.hidden), ("ffn", shape.ffn), ("tokens", case.num_tokens)):
        if value < 1:
            raise ArgumentError(f"{name} ({value}) must be at least 1")
    if not 1 <= shape.top_k <= shape.num_experts:
        raise ArgumentError(f"top-k ({shape.top_k}) must be in [1, experts ({shape.num_experts})]")
    if shape.num_experts % num_ranks:
        raise ArgumentError(f"experts ({shape.num_experts}) must be divisible by the number of ranks ({num_ranks})")
