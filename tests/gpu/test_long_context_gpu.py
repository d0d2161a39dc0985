"""Calls with so many tokens that 32 bits hold no offset into rows: a token's y and dx are those of a short call."""

import pytest
import torch
from cluster import run_on
from layers import layer_config
from worker import Findings, open_heap

from symmoe import MoELayer
from symmoe.training import plan_memory

PIECE = 32768
SIZES = {"hidden": 1024, "ffn": 512, "num_experts": 128, "top_k": 8}


def step(layer: MoELayer, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """y, dx, and the weights' gradients of one call."""
    x = x.detach().requires_grad_()
    y, _ = layer(x)
    return [y.detach(), *torch.autograd.grad(y, (x, *layer.experts.parameters()), dy)]


@pytest.mark.parametrize("num_tokens", [2**17, 2**19])
@run_on(2, device="cuda")
def test_tokens_of_a_long_call_have_the_bits_of_short_ones(
    rank: int, num_ranks: int, findings: Findings, num_tokens: int
) -> None:
    config = layer_config(order="slot", **SIZES)
    need = plan_memory(config, num_ranks=num_ranks, num_tokens=num_tokens).heap_bytes
    with open_heap("cuda", num_bytes=int(1.2 * need)) as heap:
        torch.manual_seed(7)  # the router is replicated
        layer = MoELayer(config, heap, dtype=torch.bfloat16)
        shape = (num_tokens, config.hidden)
        generator = torch.Generator(heap.device).manual_seed(rank)
        numbers = {"dtype": torch.bfloat16, "device": heap.device, "generator": generator}
        x, dy = (torch.randn(shape, **numbers) for _ in range(2))
        slots = num_ranks * num_tokens * config.top_k
        findings.check(num_tokens < 2**19 or slots * config.hidden > 2**32, "offsets are small")
        y, dx, *long = step(layer, x, dy)
        summed = [torch.zeros_like(gradient, dtype=torch.float32) for gradient in long]
        for piece in torch.arange(num_tokens, device=heap.device).split(PIECE):
            part = slice(int(piece[0]), int(piece[-1]) + 1)
            short_y, short_dx, *short = step(layer, x[part], dy[part])
            findings.check(torch.equal(y[part], short_y), f"y from token {part.start} differs")
            findings.check(torch.equal(dx[part], short_dx), f"dx from token {part.start} differs")
            for total, gradient in zip(summed, short, strict=True):
                total += gradient
        for total, gradient in zip(summed, long, strict=True):
            error = (total - gradient.float()).norm() / total.norm()
            findings.check(error < 5e-3, f"a weight gradient differs by {float(error)}")
