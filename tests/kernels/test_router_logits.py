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
    logits: torch.Tensor, *inputs: torch.Tensor, grad_outputs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(logits, inputs, grad_outputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_the_product_of_an_fp32_copy(dtype):
    x, weight, d_logits = operands(dtype)
    logits = router_logits(x, weight)
    expected = nn.functional.linear(x.float(), weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    dx, d_weight = gradients(logits, x, weight, grad_outputs=d_logits)
    expected_dx, expected_d_weight = gradients(expected, x, weight, grad_outputs=d_logits)
    assert dx.dtype == dtype
    torch.testing.assert_close(dx, expected_dx)
    torch.testing.assert_close(d_weight, expected_d_weight, rtol=1e-5, atol=1e-5)


def test_weights_are_not_rounded_to_bf16():
    x, weight, _ = operands()
    assert (
        router_logits(x, weight) - router_logits(x, weight.bfloat16().float())
    ).abs().max() > 1e-3


@pytest.mark.parametrize("required", [(True, False), (False, True)])
def test_only_required_gradients_are_computed(monkeypatch, required):
    from symmoe.kernels import twin

    results, grads = [], twin.router_gemm_grads
    monkeypatch.setattr(
        twin, "router_gemm_grads", lambda *args: (results.append(args[3:]), grads(*args))
    )
    x, weight, d_logits = operands()
    for tensor, is_required in zip((x, weight), required, strict=True):
        tensor.requires_grad_(is_required)
    router_logits(x, weight).backward(d_logits)
    ((dx, d_weight),) = results
    assert (
        (dx is not None, d_weight is not None)
        == required
        == (x.grad is not None, weight.grad is not None)
    )


def test_no_fp32_copy_of_the_tokens_is_saved():
    x, weight, _ = operands()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        router_logits(x, weight)
    assert [tensor.data_ptr() for tensor in saved[:2]] == [x.data_ptr(), weight.data_ptr()]
    assert [tensor.shape for tensor in saved[2:]] == [(T, 1), (T, E)]  # topk_idx, scores


def test_strided_views_have_the_bits_of_contiguous_tensors():
    x, weight, d_logits = operands()
    across = x.detach().t().contiguous().t()
    wide = d_logits.repeat_interleave(2, 1)[:, ::2]
    assert not across.is_contiguous()
    assert not wide.is_contiguous()
    across.requires_grad_()
    logits = router_logits(across, weight)
    assert torch.equal(logits, router_logits(x, weight))
    actual = gradients(logits, across, weight, grad_outputs=wide)
    assert all(
        map(
            torch.equal,
            actual,
            gradients(router_logits(x, weight), x, weight, grad_outputs=d_logits),
        )
    )


def test_autocast_rounds_nothing():
    x, weight, d_logits = operands()
    logits = router_logits(x, weight)
    expected = gradients(logits, x, weight, grad_outputs=d_logits)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        router = Router(MoEConfig(hidden=H, ffn=8, num_experts=E, top_k=1))
        router.weight = nn.Parameter(weight.detach())
        assert torch.equal(router(x).logits, logits)
        actual = gradients(router_logits(x, weight), x, weight, grad_outputs=d_logits)
    assert all(map(torch.equal, actual, expected))


def test_compiled_logits_have_the_same_bits():
    x, weight, d_logits = operands()
    compiled = torch.compile(router_logits, fullgraph=True, backend="aot_eager")
    actual = compiled(x, weight)
    expected = router_logits(x, weight)
    assert torch.equal(actual, expected)
    compared = (
        gradients(actual, x, weight, grad_outputs=d_logits),
        gradients(expected, x, weight, grad_outputs=d_logits),
    )
    assert all(map(torch.equal, *compared))
