"""The same call has the same bits, whichever kernels compute it: in all layouts, with all schedules and stashes. Which
kernels those are follows from the width, the dtype and the layout, and from whether modules are fused."""

import itertools

import pytest
import torch
from cluster import run_on
from grouped_cases import PATHS, Case, Sizes, assert_same_results, make_inputs, run_experts
from layers import WAYS
from worker import Findings, open_heap

from symmoe import make_plan
from symmoe.grouped import ScaledClampedSwiGLU, ScaledSReLU
from symmoe.grouped.mlp import GroupedMLP
from symmoe.moe.ep_step import STASHES, expert_parallel_mlp

pytestmark = pytest.mark.timeout(500, method="thread")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Narrower than a tile; whole tiles; such that the last block of dscale's sum, the last tile, or both are not full.
WIDTHS = (8, 24, 64, 72, 128, 200, 256, 264, 392, 512, 712, 768, 1032, 2048)
HIDDEN = (40, 512)  # a contraction of one step, and of many
SPLITS = (70, 0, 1, 129, 35)

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# -- one GPU: fused, or three modules ---------------------------------------------------------------------------------
@dtypes
@pytest.mark.parametrize("ffn", WIDTHS)
def test_fused_is_three_modules(ffn, dtype):
    cases = (
        (None, False),
        (None, True),
        (ScaledClampedSwiGLU(interleave=8), False),
        (ScaledSReLU(), True),
    )
    for seed, (hidden, (activation, bias)) in enumerate(itertools.product(HIDDEN, cases)):
        sizes = Sizes(splits=SPLITS, lead=(16, 15), hidden=hidden, ffn=ffn)
        case = Case(dtype=dtype, bias=bias, buffers=())
        width = ffn if isinstance(activation, ScaledSReLU) else None
        inputs = make_inputs(case, sizes=sizes, width=width, device="cuda", seed=seed)
        modules = run_experts(PATHS[0], case, inputs, activation=activation)
        for path in PATHS[1:]:
            fused = run_experts(path, case, inputs, activation=activation)
            # The gradient of FC1's bias is the one sum whose order is the kernel's own.
            assert_same_results(fused, modules, sizes, close=("d_fc1.bias",))


# -- ranks: layouts, schedules, stashes -------------------------------------------------------------------------------
NAMES = ("y", "dx", "dprobs", "parameters' gradients")
# Tokens of a rank, and K: few, and uneven.
ROUTINGS = (((13, 9, 1, 20), 1), ((1, 1, 1, 1), 3), ((21, 4, 0, 7), 3), ((150, 301, 77, 260), 4))


@dtypes
@pytest.mark.parametrize("ffn", WIDTHS)
@run_on(1, 2, 4, device="cuda", timeout_s=400.0)
def test_ways_have_the_same_bits(
    rank: int, num_ranks: int, findings: Findings, ffn: int, dtype: torch.dtype
) -> None:
    num_experts = 8
    with open_heap("cuda", num_bytes=64 << 20) as heap:
        torch.manual_seed(rank)
        # With biases where the contraction is one step.
        options = {"dtype": dtype, "device": heap.device}
        for hidden, (tokens, top_k) in itertools.product(HIDDEN, ROUTINGS):
            experts = GroupedMLP(
                num_experts // num_ranks, hidden, ffn, bias=hidden == HIDDEN[0], **options
            )
            num_tokens = tokens[rank]
            x = torch.randn(num_tokens, hidden, device=heap.device).to(dtype).requires_grad_()
            dy = torch.randn(num_tokens, hidden, device=heap.device).to(dtype)
            probs = torch.rand(num_tokens, top_k, device=heap.device).requires_grad_()
            ids = (
                torch.rand(num_tokens, num_experts, device=heap.device)
                .argsort(1)[:, :top_k]
                .contiguous()
            )
            ids[::5] = -1  # tokens of a mask
            leaves = (x, probs, *experts.parameters())
            for order, stashes in (("rank", STASHES), ("slot", ("all",))):
                first = None
                for fields, stash in itertools.product(WAYS, stashes):
                    call = (
                        f"hidden {hidden}, {tokens} tokens, K {top_k}, {order}, {fields}, {stash}"
                    )
                    findings.where = f"rank {rank} of {num_ranks}, {call}"
                    plan = make_plan(ids, num_experts=num_experts, heap=heap)
                    y = expert_parallel_mlp(
                        x, probs, experts, plan, order=order, stash=stash, **fields
                    )
                    dx, dprobs, *weight_grads = torch.autograd.grad(y, leaves, dy)
                    actual = (
                        y.detach(),
                        dx,
                        dprobs,
                        torch.cat([gradient.flatten() for gradient in weight_grads]),
                    )
                    first = actual if first is None else first
                    for name, got, want in zip(NAMES, actual, first, strict=True):
                        num_other = int((got != want).sum())
                        findings.check(
                            not num_other, f"{num_other} of {got.numel()} numbers of {name} differ"
                        )
