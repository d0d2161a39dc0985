"""The router's GEMMs on a GPU: as near to float64 as fp32 products are, exact where sums are, a token at a time."""

from functools import partial

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from router_interpreter_checks import products
from router_interpreter_checks import results as results_of

from symmoe import MoEConfig, RouterConfig, kernels
from symmoe.kernels.routing_rule import RoutingRule
from symmoe.kernels.triton import router_products
from symmoe.moe.router import Route, Router, route_tokens

DEVICE = torch.device("cuda")
OURS = kernels.for_device(DEVICE)
SHAPES = [
    (8192, 128, 2048),
    (8192, 8, 4096),
    (4096, 64, 7168),
    (1000, 256, 7168),
    (77, 20, 96),
    (1, 300, 136),
]  # T, E, H
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def numbers(*shape, exact=False, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    if exact:
        return torch.randint(-4, 5, shape, device=DEVICE, generator=generator).float()
    return torch.randn(shape, device=DEVICE, generator=generator)


def operands(shape, *, exact):
    num_tokens, num_experts, width = shape
    x = numbers(num_tokens, width, exact=exact).bfloat16()
    return (
        x,
        numbers(num_experts, width, exact=exact, seed=1),
        numbers(num_tokens, num_experts, exact=exact, seed=2),
    )


results = partial(results_of, OURS)


@shapes
def test_sums_of_small_numbers_are_exact(shape):
    x, weight, d_logits = operands(shape, exact=True)
    logits, dx, d_weight = results(x, weight, d_logits)
    expected = products(x.double(), weight.double(), d_logits.double())
    assert torch.equal(logits.double(), expected[0])
    assert torch.equal(dx, expected[1].bfloat16())
    assert torch.equal(d_weight.double(), expected[2])


@shapes
def test_sums_are_as_near_to_float64_as_those_of_fp32(shape):
    arguments = operands(shape, exact=False)
    logits, dx, d_weight = results(*arguments)
    expected = products(*(tensor.double() for tensor in arguments))
    magnitudes = products(*(tensor.double().abs() for tensor in arguments))
    for actual, reference, magnitude in (
        (logits, expected[0], magnitudes[0]),
        (d_weight, expected[2], magnitudes[2]),
    ):
        assert ((actual.double() - reference).abs() / magnitude).max() < 2.0**-21
    assert (
        (dx.double() - expected[1]).abs() <= 2.0**-8 * expected[1].abs() + 2.0**-15 * magnitudes[1]
    ).all()


def test_the_limit_notices_tf32():
    x, weight, _ = (tensor.double() for tensor in operands(SHAPES[0], exact=False))
    rounded = (
        weight.float().view(torch.int32).bitwise_and_(~0x1FFF).view(torch.float32).double()
    )  # to 10 bits
    error = (x @ rounded.t() - x @ weight.t()).abs() / (x.abs() @ weight.abs().t())
    assert error.max() > 2.0**-17


@shapes
def test_results_depend_on_nothing_but_their_operands(shape):
    """Not on other tokens, on the other gradient, or on the time."""
    arguments = x, weight, d_logits = operands(shape, exact=False)
    logits, dx, d_weight = results(*arguments)
    for some in (slice(0, 1), slice(5, 70), slice(len(x) // 2, None)):
        fewer = results(x[some].contiguous(), weight, d_logits[some].contiguous())
        assert torch.equal(fewer[0], logits[some])
        assert torch.equal(fewer[1], dx[some])
    own_dx = torch.empty_like(dx)
    own_d_weight = torch.empty_like(d_weight)
    OURS.router_gemm_grads(d_logits, x, weight, own_dx, None)
    OURS.router_gemm_grads(d_logits, x, weight, None, own_d_weight)
    for repeated in (*(results(*arguments) for _ in range(3)), (logits, own_dx, own_d_weight)):
        assert all(map(torch.equal, repeated, (logits, dx, d_weight)))


def test_nan_stays_in_its_token():
    x, weight, d_logits = operands((200, 20, 96), exact=False)
    logits, dx, _ = results(x, weight, d_logits)
    for value in (torch.nan, torch.inf):
        bad_x = x.clone()
        bad_d_logits = d_logits.clone()
        bad_x[70, 3] = bad_d_logits[70, 3] = value
        bad = results(bad_x, weight, bad_d_logits)
        is_other = torch.arange(200, device=DEVICE) != 70
        assert not bad[0][70].isfinite().any()
        assert not bad[1][70].isfinite().any()
        assert torch.equal(bad[0][is_other], logits[is_other])
        assert torch.equal(bad[1][is_other], dx[is_other])


def test_parts_are_the_matrix():
    matrix = numbers(300, 77) * 2.0 ** torch.randint(-90, 100, (300, 77), device=DEVICE)
    few, parts = router_products.bf16_parts(matrix[:1, :5], matrix)
    assert torch.equal(parts.double().sum(0), matrix.double())
    assert (parts[1].abs() <= 2.0**-8 * parts[0].abs()).all()
    assert torch.equal(few, parts[:, :1, :5])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("seed", range(5))
def test_router_is_that_of_fp32_tokens(score, seed):
    """Where scores are further apart than either is off."""
    torch.manual_seed(seed)
    router = Router(
        MoEConfig(hidden=256, ffn=64, num_experts=16, top_k=4, router=RouterConfig(score=score)),
        device=DEVICE,
    )
    x = numbers(500, 256, seed=seed).bfloat16()
    best = router(x.float()).scores.topk(5).values
    x = x[(best[:, :-1] - best[:, 1:]).amin(1) > 1e-5]
    assert len(x) > 480
    actual, expected = [], []
    for into, tokens in ((actual, x), (expected, x.float())):
        tokens = tokens.detach().requires_grad_()
        router.zero_grad()
        routed = router(tokens)
        (routed.probs.square().sum() + routed.logits.logsumexp(-1).sum()).backward()
        into += [routed.topk_idx, routed.probs, tokens.grad, router.weight.grad]
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual[2], expected[2].bfloat16(), rtol=2e-2, atol=1e-4)
    torch.testing.assert_close(actual[3], expected[3], rtol=1e-4, atol=1e-4)


def test_nothing_of_fp32_is_kept_of_the_tokens():
    x = numbers(4096, 2048).bfloat16().requires_grad_()
    weight = numbers(16, 2048).requires_grad_()
    route_tokens(Route(x, weight, None, None, 1, RoutingRule())).logits.sum().backward()  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logits = route_tokens(Route(x, weight, None, None, 1, RoutingRule())).logits
    assert torch.cuda.max_memory_allocated() - before < x.numel()  # a quarter of an fp32 copy
    del logits
