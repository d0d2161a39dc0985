"""Kernels of the router in Triton's interpreter, which test_interpreted.py runs: GEMMs against exact sums, the choice
of experts and its losses against the twins.

The interpreter of Triton 3.6 multiplies the bits of bf16 numbers instead of the numbers: here is a product in float64.
It also cuts numbers off where hardware rounds them to bf16, which changes their parts, but not their sums."""

from functools import partial
from itertools import product

import numpy as np
import torch
from compared_launches import differences
from router_choices import (
    RULES,
    SIZES,
    TOLERANCE,
    all_losses,
    changed_by_counting,
    choices,
    wrong_extremes,
)
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from symmoe.kernels import gpu, twin
from symmoe.kernels.triton import router_products

SHAPES = [(70, 20, 96), (5, 8, 64), (1, 128, 200), (130, 300, 136), (64, 1, 64)]  # T, E, H


def floats(data):
    """Of the bits of bf16 numbers."""
    return (data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def create_dot(self, left, right, acc, *args):
    assert left.dtype.scalar.name == right.dtype.scalar.name == "bf16"
    product = floats(left.data) @ floats(right.data)
    return TensorHandle(product.astype(np.float32) + acc.data, acc.dtype.scalar)


def numbers(*shape, exact):
    """fp32 numbers; exact: small integers, whose sums are exact in any order."""
    return torch.randint(-4, 5, shape).float() if exact else torch.randn(shape)


def check_parts():
    matrix = torch.cat(
        [torch.randn(5000), 2.0 ** torch.randint(-90, 100, (500,)) * torch.randn(500)]
    )
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    odd_parts, parts = router_products.bf16_parts(odd, matrix)
    assert torch.equal(parts.double().sum(0), matrix.double())
    assert (parts[1].abs() <= 2.0**-7 * parts[0].abs()).all()
    assert (parts[2].abs() <= 2.0**-7 * parts[1].abs()).all()
    assert torch.equal(
        odd_parts[0].float().nan_to_num(7.0, 8.0, 9.0), odd.nan_to_num(7.0, 8.0, 9.0)
    )
    assert not odd_parts[1:].any()


def results(kernels, x, weight, d_logits):
    """logits, dx, d_weight, over memory that was NaN."""
    logits, dx, d_weight = (torch.full_like(like, torch.nan) for like in (d_logits, x, weight))
    kernels.router_gemm(x, weight, logits)
    kernels.router_gemm_grads(d_logits, x, weight, dx, d_weight)
    return logits, dx, d_weight


def products(x, weight, d_logits):
    return x @ weight.t(), d_logits @ weight, d_logits.t() @ x


def check_products(num_tokens, num_experts, width, *, exact):
    x = numbers(num_tokens, width, exact=exact).bfloat16()
    weight = numbers(num_experts, width, exact=exact)
    d_logits = numbers(num_tokens, num_experts, exact=exact)
    operands = [tensor.double() for tensor in (x, weight, d_logits)]
    sums = products(*operands)
    magnitudes = products(*map(torch.abs, operands))
    for kernels in (gpu, twin):
        for actual, expected, magnitude in zip(
            results(kernels, x, weight, d_logits), sums, magnitudes, strict=True
        ):
            limit = 2.0**-20 * magnitude * (not exact)
            if actual.dtype == torch.bfloat16:  # the interpreter cuts off dx
                limit = (2.0**-20 + 2.0**-14) * magnitude + 2.0**-7 * expected.abs()
            assert ((actual.double() - expected).abs() <= limit).all(), kernels


def check_splits():
    for num_tokens in (1, 511, 512, 1024, 5000, 8192, 8200):
        for num_tiles in (1, 16, 56, 300):
            num_splits, split_tokens = router_products._splits(num_tokens, num_tiles)
            assert (num_splits - 1) * split_tokens < num_tokens <= num_splits * split_tokens
            assert split_tokens % router_products.BLOCK_K == 0
    assert router_products._splits(8192, 16) == (8, 1024)


def check_several_splits():
    """Their sums are added up."""
    router_products.SPLIT_TOKENS = 64
    router_products._splits.cache_clear()
    assert router_products._splits(130, 1)[0] == 2
    check_products(130, 5, 72, exact=True)


def checks():
    """Names, and what checks them."""
    InterpreterBuilder.create_dot = create_dot
    torch.manual_seed(0)
    yield "parts", check_parts
    for shape in [*SHAPES, (0, 4, 64)]:
        for exact in (False, True):
            check = partial(check_products, *shape, exact=exact)
            yield f"router_gemm, router_gemm_grads, {shape}, exact {exact}", check
    for sizes, rule in product(SIZES, RULES):
        for launch in choices(*sizes, rule):
            name = f"{launch}, {rule}"
            yield name, partial(differences, launch, tolerance=TOLERANCE)
            if launch.kernel == "choose_experts":
                yield f"counts of {name}", partial(changed_by_counting, launch, gpu)
    for launch in all_losses():
        yield str(launch), partial(differences, launch, tolerance=TOLERANCE)
    yield "choose_experts, extreme logits", partial(wrong_extremes, gpu)
    yield "splits", check_splits
    yield "router_gemm, router_gemm_grads, several splits", check_several_splits
