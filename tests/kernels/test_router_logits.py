"""The router's product of bf16 tokens: the numbers of fp32 copies, and no copy."""

import pytest
import torch
from torch import nn

from symmoe.kernels.routing_rule import RoutingRule
from symmoe.moe.config import MoEConfig
from symmoe.moe.router import Route, Router, route_tokens

T, E, H = 37, 12, 40


def operands(
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight, d_logits."""
    generator = torch.Generator().manual_seed(0)
    x, weight, d_logits = (
        torch.randn(shape, generator=generator) for shape in ((T, H), (E, H), (T, E))
    )
    return x.to(dtype).requires_grad_(), weight.requires_grad_(), d_logits


def router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return route_tokens(Route(x.contiguous(), weight, None, None, 1, RoutingRule())).logits


def gradients(
    logits: torch.Tensor, *inputs: torch.Tensor, by: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(logits, inputs, by)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_is_the_product_of_an_fp32_copy(dtype):
    x, weight, d_logits = operands(dtype)
    logits = router_logits(x, weight)
    wanted = nn.functional.linear(x.float(), weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, wanted, rtol=1e-6, atol=1e-6)
    dx, d_weight = gradients(logits, x, weight, by=d_logits)
    wanted_dx, wanted_d_weight = gradients(wanted, x, weight, by=d_logits)
    assert dx.dtype == dtype
    torch.testing.assert_close(dx, wanted_dx)
    torch.testing.assert_close(d_weight, wanted_d_weight, rtol=1e-5, atol=1e-5)


def test_weights_are_not_rounded_to_bf16():
    x, weight, _ = operands()
    assert (
        router_logits(x, weight) - router_logits(x, weight.bfloat16().float())
    ).abs().max() > 1e-3


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_only_what_is_asked_for_is_computed(monkeypatch, wanted):
    from symmoe.kernels import twin

    given, grads = [], twin.router_gemm_grads
    monkeypatch.setattr(
        twin, "router_gemm_grads", lambda *args: (given.append(args[3:]), grads(*args))
    )
    x, weight, d_logits = operands()
    for tensor, is_wanted in zip((x, weight), wanted, strict=True):
        tensor.requires_grad_(is_wanted)
    router_logits(x, weight).backward(d_logits)
    ((dx, d_weight),) = given
    assert (
        (dx is not None, d_weight is not None)
        == wanted
        == (x.grad is not None, weight.grad is not None)
    )


def test_nothing_of_fp32_is_kept_of_the_tokens():
    x, weight, _ = operands()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        router_logits(x, weight)
    assert [tensor.data_ptr() for tensor in kept[:2]] == [x.data_ptr(), weight.data_ptr()]
    assert [tensor.shape for tensor in kept[2:]] == [(T, 1), (T, E)]  # topk_idx, scores


def test_layouts_of_views():
    x, weight, d_logits = operands()
    across = x.detach().t().contiguous().t()
    wide = d_logits.repeat_interleave(2, 1)[:, ::2]
    assert not across.is_contiguous()
    assert not wide.is_contiguous()
    across.requires_grad_()
    logits = router_logits(across, weight)
    assert torch.equal(logits, router_logits(x, weight))
    found = gradients(logits, across, weight, by=wide)
    assert all(map(torch.equal, found, gradients(router_logits(x, weight), x, weight, by=d_logits)))


def test_autocast_rounds_nothing():
    x, weight, d_logits = operands()
    logits = router_logits(x, weight)
    wanted = gradients(logits, x, weight, by=d_logits)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        router = Router(MoEConfig(hidden=H, ffn=8, num_experts=E, top_k=1))
        router.weight = nn.Parameter(weight.detach())
        assert torch.equal(router(x).logits, logits)
        found = gradients(router_logits(x, weight), x, weight, by=d_logits)
    assert all(map(torch.equal, found, wanted))


def test_compiled_it_gives_the_same_bits():
    x, weight, d_logits = operands()
    compiled = torch.compile(router_logits, fullgraph=True, backend="aot_eager")
    found = compiled(x, weight)
    wanted = router_logits(x, weight)
    assert torch.equal(found, wanted)
    compared = gradients(found, x, weight, by=d_logits), gradients(wanted, x, weight, by=d_logits)
    assert all(map(torch.equal, *compared))
