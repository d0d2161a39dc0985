"""Which experts a token goes to (Triton).

A score and its index make one integer that is larger for the better choice, so K maxima give K choices: no sort, no
copies of [T, E], and the result of a row depends only on the row.
"""

import torch
import triton
import triton.language as tl

from symmoe.kernels.launch.integers import next_power_of_2
from symmoe.kernels.launch.launch import fast_launch

SCORES_PER_PROGRAM = 1024
NUM_WARPS = 4
LEAST = tl.constexpr(-(2**63))
NAN_KEY = tl.constexpr(2**31 - 1)


@fast_launch
@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["scores", "topk_idx"])
def select_experts_kernel(
    scores,  # fp32 [T, E]
    topk_idx,  # int64 [T, K]
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    EXPERT_LANES: tl.constexpr,
    TOP_K: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, EXPERT_LANES)
    mask = (token < num_tokens)[:, None] & (expert < NUM_EXPERTS)[None, :]
    score = tl.load(scores + token[:, None] * NUM_EXPERTS + expert[None, :], mask=mask, other=0.0)
    bits = (score + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0: they are equal
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # as integers in the order of the numbers
    ordered = tl.where(score != score, NAN_KEY, ordered)
    key = (ordered.to(tl.int64) << 32) | (EXPERT_LANES - 1 - expert)[None, :].to(tl.int64)
    key = tl.where(mask, key, LEAST)
    for k in range(TOP_K):
        best = tl.max(key, axis=1)
        chosen = EXPERT_LANES - 1 - (best & (EXPERT_LANES - 1))
        tl.store(topk_idx + token * TOP_K + k, chosen, mask=token < num_tokens)
        key = tl.where(key == best[:, None], LEAST, key)


def select_experts(scores: torch.Tensor, topk_idx: torch.Tensor) -> None:
    num_tokens, num_experts = scores.shape
    if num_tokens == 0:
        return
    lanes = next_power_of_2(num_experts)
    tokens = max(1, SCORES_PER_PROGRAM // lanes)
    with torch.cuda.device_of(scores):
        select_experts_kernel[(-(-num_tokens // tokens),)](
            scores,
            topk_idx,
            num_tokens,
            NUM_EXPERTS=num_experts,
            EXPERT_LANES=lanes,
            TOP_K=topk_idx.shape[1],
            TOKENS=tokens,
            num_warps=NUM_WARPS,
        )
