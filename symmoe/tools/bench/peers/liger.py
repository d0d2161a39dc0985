"""liger-cute-kernels: the whole layer in one persistent kernel each way. It takes the probs in bf16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from symmoe.autograd import Context, Function
from symmoe.tools.bench.cases import Case
from symmoe.tools.bench.peers.common import Measured, missing
from symmoe.tools.bench.problem import Problem
from symmoe.tools.bench.ranks import Ranks
from symmoe.tools.bench.reference import Reference
from symmoe.tools.bench.steps import eager_step

NAME = "liger-cute-kernels"


def find_problem(device: torch.device, num_ranks: int) -> str:
    """See peers/__init__.py."""
    return missing("liger_cute_kernels", device, num_ranks)


def open_peer(cases: list[Case], ranks: Ranks) -> int:
    """Sets NVSHMEM up for the largest of all cases, since capacities cannot grow; returns the team."""
    import liger_cute_kernels
    from liger_cute_kernels import nvshmem

    shapes = [case.shape for case in cases]
    config = liger_cute_kernels.MoEConfig(
        max_tokens=max(case.num_tokens for case in cases),
        hidden_size=max(shape.hidden for shape in shapes),
        num_experts=max(shape.num_experts for shape in shapes),
        top_k=max(shape.top_k for shape in shapes),
        num_hosts=1,
        gpus_per_host=ranks.num_ranks,
    )
    liger_cute_kernels.configure(device=ranks.device, moe=config)
    team: int = nvshmem.team_world()
    return team


def make_variants(problem: Problem, ranks: Ranks, opened: int) -> list[Measured]:
    """The layer."""
    x, probs, w1, w2 = problem.inputs
    gate, up = (part.contiguous().requires_grad_() for part in w1.detach().chunk(2, dim=1))
    inputs = (x, probs, gate, up, w2)
    sizes = problem.case.shape.num_experts, problem.case.shape.top_k, opened

    def forward() -> torch.Tensor:
        y: torch.Tensor = _Layer.apply(x, problem.topk_idx, probs.to(x.dtype), gate, up, w2, sizes)
        return y

    reference = Reference(problem)

    def verify() -> float:
        y = forward()
        dx, dprobs, d_gate, d_up, dw2 = torch.autograd.grad(y, inputs, problem.tokens.dy)
        return reference.step_error(y, dx, dprobs, torch.cat([d_gate, d_up], dim=1), dw2)

    return [Measured("layer", replace(eager_step(NAME, problem, reference, forward, inputs), verify=verify))]


class _LayerContext(Context, Protocol):
    first: tuple[Any, ...]
    second: tuple[torch.Tensor, ...]
    sizes: tuple[int, int, int]
    tile_rows: Any


class _Layer(Function):
    """Forward leaves its buffers on a stack of the library's, from which backward takes them."""

    @staticmethod
    def forward(
        ctx: _LayerContext,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        probs: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        w2: torch.Tensor,
        sizes: tuple[int, int, int],
    ) -> torch.Tensor:
        from liger_cute_kernels import tvm_ffi

        y: torch.Tensor
        y, *kept, ctx.tile_rows = tvm_ffi.moe_fused_fwd_bf16(x, topk_idx, probs, gate, up, w2, *sizes)
        x_sorted, y_buffer, expert_offsets, token_expert_slots, tile_expert_ids = kept
        ctx.first = y_buffer, x_sorted, token_expert_slots, tile_expert_ids, expert_offsets
        ctx.second = topk_idx, probs, gate, up, w2
        ctx.sizes = sizes
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: _LayerContext, dy: torch.Tensor) -> tuple[Any, ...]:
        from liger_cute_kernels import tvm_ffi

        dx, d_gate, d_up, dw2, dprobs = tvm_ffi.moe_fused_bwd_bf16(
            dy.contiguous(), *ctx.first, *ctx.second, *ctx.sizes, ctx.tile_rows
        )
        tvm_ffi.moe_pop_fwd()
        return dx, None, dprobs, d_gate, d_up, dw2, None
