"""The suite "router": the router's products, forward and backward: ours and torch's in fp32, tf32 and bf16. Local.

Tokens in bf16, weights in fp32. fp32 and tf32 need an fp32 copy of the tokens, and keep it for backward; their times
have the copy and the rounding of the tokens' gradient. bf16 rounds weights and logits, which routers in fp32 are to
avoid. On GPUs times are of CUDA graphs that go through so many different inputs that those do not stay in the L2 cache,
divided by their number. Errors are of logits: the largest one against float64, relative to the sum of the terms'
magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from suites.problem import Problem
from suites.records import Record
from suites.steps import Step
from suites.stock_torch import ByHand
from suites.timing import Run, Variant, measure, timed_records
from symmoe import kernels

_INPUTS_BYTES = 200 << 20  # of different inputs: four times the L2 cache of an H200
_MOST_INPUTS = 64  # of few tokens
_SAMPLED_TOKENS = 1024

Logits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def of_fp32_copy(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x.float(), weight)


def of_bf16(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight.bfloat16()).float()


def of_kernels(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    ops = kernels.for_device(x.device)

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = torch.empty((len(x), len(weight)), dtype=torch.float32, device=x.device)
        ops.router_gemm(x, weight, logits)
        return logits

    def backward(d_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gradients = torch.empty_like(x), torch.empty_like(weight)
        ops.router_gemm_grads(d_logits, x.detach(), weight.detach(), *gradients)
        return gradients

    return ByHand.apply(forward, backward, x, weight)


WAYS: dict[str, tuple[Logits, float]] = {  # and the largest error
    "ours": (of_kernels, 2.0**-21),
    "fp32": (of_fp32_copy, 2.0**-21),
    "tf32": (of_fp32_copy, 2.0**-9),
    "bf16": (of_bf16, 2.0**-6),
}


def bench_router(problem: Problem, run: Run) -> list[Record]:
    """Measures all variants in turn, on this rank's tokens and on those of absent ranks."""
    shape, device = problem.case.shape, problem.device
    generator = torch.Generator(device).manual_seed(0)
    numbers = {"generator": generator, "device": device}
    weight = torch.randn(shape.num_experts, shape.hidden, **numbers) / shape.hidden**0.5
    d_logits = torch.randn(problem.case.num_tokens, shape.num_experts, **numbers)
    num_inputs = 1
    if device.type == "cuda":
        num_inputs = min(-(-_INPUTS_BYTES // problem.tokens.x.nbytes), _MOST_INPUTS)
    xs = [problem.tokens_of(rank).x.requires_grad_() for rank in range(num_inputs)]
    times, errors = measure(run, [_variant(name, xs, weight, d_logits) for name in WAYS])
    of_one = {name: times_ms / num_inputs for name, times_ms in times.items()}
    return timed_records(problem, "router", of_one, lambda way, _: {"error": errors[way]})


def _variant(
    name: str, xs: list[torch.Tensor], weight: torch.Tensor, d_logits: torch.Tensor
) -> Variant:
    """The products of all inputs; the gradient of the weight is that of one input each time."""
    logits_of, max_error = WAYS[name]
    weights = [weight.detach().requires_grad_() for _ in xs]

    def forward() -> list[torch.Tensor]:
        return list(map(logits_of, xs, weights))

    d_out = (d_logits,) * len(xs)
    step = Step(name, forward, (*xs, *weights), d_out, partial(_error, xs[0], weight), max_error)
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    variant = step.captured() if weight.device.type == "cuda" else step.eager()
    torch.backends.cuda.matmul.allow_tf32 = False
    return variant


def _error(
    x: torch.Tensor, weight: torch.Tensor, logits: list[torch.Tensor], *_: torch.Tensor
) -> float:
    """The error of some logits of the first input."""
    x = x.detach()[:_SAMPLED_TOKENS].double()
    weight = weight.double()
    off = (logits[0].detach()[:_SAMPLED_TOKENS] - x @ weight.t()).abs()
    return float((off / (x.abs() @ weight.abs().t())).max())
