"""Compiles the router's kernels for Hopper without a GPU, with the arguments of their launchers."""

import re

import pytest
import torch

pytest.importorskip("triton")

from compiled_launches import catch_launches
from compiled_launches import meta as empty

from symmoe.kernels.routing_rule import RoutingRule
from symmoe.kernels.triton import route, router_products

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = {  # T, E, H
    "qwen3-30b": (8192, 128, 2048),
    "mixtral-8x7b": (8192, 8, 4096),
    "deepseek-like": (8192, 64, 7168),
    "deepseek-v3": (8192, 256, 7168),
    "odd": (100, 20, 1000),
}
GEMMS = ("router_gemm_kernel", "router_dgrad_kernel", "router_wgrad_kernel")
shapes = pytest.mark.parametrize("shape", SHAPES)


@pytest.fixture
def launches(monkeypatch):
    return catch_launches(monkeypatch, router_products)


def launch(shape):
    num_tokens, num_experts, width = SHAPES[shape]
    x, weight = empty(num_tokens, width, dtype=BF16), empty(num_experts, width, dtype=FP32)
    logits = empty(num_tokens, num_experts, dtype=FP32)
    router_products.router_gemm(x, weight, logits)
    router_products.router_gemm_grads(logits, x, weight, torch.empty_like(x), torch.empty_like(weight))


@shapes
def test_products_are_of_bf16_in_fp32(launches, shape):
    launch(shape)
    for name in GEMMS:
        code = launches.compile(name)
        kinds = set(re.findall(r"wgmma\.mma_async\S*", code.ptx))
        assert len(kinds) == 1, (name, kinds)
        assert re.search(r"\.f32\.bf16\.bf16$", *kinds), (name, kinds)
        assert "mma.sync" not in code.ptx
        assert code.stack == 0


@shapes
def test_tensor_cores_add_up_a_step_only(launches, shape):
    """What they cut off must not grow with the number of terms: a step begins at zero, and is added outside."""
    launch(shape)
    for name in GEMMS:
        ptx = launches.compile(name).ptx
        begins = re.findall(r"wgmma\.mma_async[^;]*\}, %rd\d+, %rd\d+, (\S+), 1, 1, [01], [01];", ptx)
        assert len(begins) == ptx.count("wgmma.mma_async"), name
        assert begins.count("0") == 1, (name, begins)
        assert all(begin == "0" or begin.startswith("%p") for begin in begins)
        rows, columns = (int(size) for size in re.search(r"wgmma\.mma_async\S*\.m(\d+)n(\d+)k", ptx).groups())
        sums_of_a_thread = rows * columns // 128
        assert len(re.findall(r"add(?:\.rn)?\.f32", ptx)) >= sums_of_a_thread, name


def test_parts_round_to_nearest(launches):
    launch("odd")
    assert "cvt.rn.bf16" in launches.compile("bf16_parts_kernel").ptx


@pytest.mark.parametrize(
    ("num_experts", "top_k", "rule"),
    [
        (128, 8, RoutingRule()),
        (20, 3, RoutingRule()),
        (256, 8, RoutingRule(score="sigmoid", num_groups=8, top_groups=4)),
    ],
)
def test_a_choice_spills_nothing(monkeypatch, num_experts, top_k, rule):
    launches = catch_launches(monkeypatch, route)
    logits, probs = empty(8192, num_experts, dtype=FP32), empty(8192, top_k, dtype=FP32)
    topk_idx = empty(8192, top_k)
    route.choose_experts(logits, logits[0], None, topk_idx, probs, logits, rule=rule)
    route.choose_experts_grad(probs, logits, topk_idx, logits, logits, rule=rule)
    for name in ("choose_experts_kernel", "choose_experts_grad_kernel"):
        assert launches.compile(name).stack == 0, name
