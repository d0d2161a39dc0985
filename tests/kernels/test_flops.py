"""FLOPs that torch.utils.flop_counter counts, against the products of the kernels."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cluster import run_on
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import symmoe
from symmoe import kernels
from symmoe.precision import MXFP8, NVFP4, Float8Block

HIDDEN, FFN, EXPERTS, TOP_K, TOKENS = 32, 64, 4, 2, 13
ROUTER = 2 * TOKENS * HIDDEN * EXPERTS
EXPERT = 2 * 3 * HIDDEN * FFN  # of a row in forward: gate, up and FC2

# Positions of two arguments with the widths of a product: of a row before and after it, or of a weight gradient. An
# argument may be a tuple whose first part has the width.
PRODUCTS = {
    "grouped_gemm": (0, 3),
    "grouped_gemm_dgrad": (0, 3),
    "grouped_gemm_wgrad": (0, 1),
    "grouped_gemm_act": (0, 4),
    "grouped_gemm_dact": (0, 4),
}


@contextmanager
def multiplied() -> Iterator[list[int]]:
    """FLOPs of each grouped product that the twins compute: an oracle that looks at rows, not at weights."""
    flops: list[int] = []

    def spy(name: str, kernel: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if name in PRODUCTS:
            first, second = (args[position] for position in PRODUCTS[name])
            rows = sum(max(0, end - begin) for begin, end in args[2].t().tolist())
            second = second[name == "grouped_gemm_dact"] if name.endswith("act") else second
            widths = [
                (operand[0] if isinstance(operand, tuple) else operand).shape[1]
                for operand in (first, second)
            ]
            flops.append(2 * rows * widths[0] * widths[1])
        return kernel(*args, **kwargs)

    with kernels.hooked(torch.device("cpu"), spy):
        yield flops


def counted(call: Callable[[], object]) -> dict[str, int]:
    """FLOPs that torch counts, by operator."""
    with FlopCounterMode(display=False) as counter:
        call()
    return {
        str(operator): flops
        for operator, flops in counter.get_flop_counts().get("Global", {}).items()
    }


def train(layer: nn.Module, x: torch.Tensor, *inputs: Any, **kwargs: Any) -> None:
    y = layer(x, *inputs, **kwargs)
    (y[0] if isinstance(y, tuple) else y).square().sum().backward()


def make(heap: symmoe.SymmetricHeap, *, bias: bool = False, **fields: Any) -> symmoe.MoELayer:
    torch.manual_seed(heap.rank)
    config = symmoe.MoEConfig(hidden=HIDDEN, ffn=FFN, num_experts=EXPERTS, top_k=TOP_K, **fields)
    experts = symmoe.GroupedMLP(EXPERTS // heap.num_ranks, HIDDEN, FFN, bias=bias)
    return symmoe.MoELayer(config, heap, experts=experts)


def test_flops_of_a_layer_are_those_of_its_products(heap):
    """The experts have two products forward and three backward, the router, a kernel on CPUs, one and one: tokens need
    no gradient."""
    layer = make(heap)
    counts = counted(lambda: train(layer, torch.randn(TOKENS, HIDDEN)))
    rows = TOKENS * TOP_K
    fc1, fc2 = 2 * rows * HIDDEN * 2 * FFN, 2 * rows * FFN * HIDDEN
    of_experts = {"symmoe.moe_forward": fc1 + fc2, "symmoe.moe_backward": 2 * fc2 + fc1}
    assert counts == {"symmoe.product": 2 * ROUTER, **of_experts}


def frozen(layer: symmoe.MoELayer) -> None:
    layer.experts.requires_grad_(False)


def adapted(layer: symmoe.MoELayer) -> None:
    symmoe.lora.add_lora(layer, rank=3, alpha=1.0)


def adapted_in_full(layer: symmoe.MoELayer) -> None:
    adapted(layer)
    layer.experts.fc1.weight.requires_grad_(True)


def delay(layer: symmoe.MoELayer) -> None:
    """Delays weight gradients: such experts are not called as an operator."""
    for linear in (layer.experts.fc1, layer.experts.fc2):
        linear.delay_wgrad = True


CASES: dict[str, tuple[dict, Callable[[symmoe.MoELayer], object]]] = {
    "plain": ({}, id),
    "bias, expert-major": ({"bias": True, "layout": "expert-major"}, id),
    "dropped by a capacity": ({"capacity": 17, "max_tokens": 64, "overflow": "drop"}, id),
    "dropped by a factor": ({"capacity_factor": 0.5}, id),
    "stash rows": ({"stash": "rows"}, id),
    "stash none": ({"stash": "none"}, id),
    "frozen": ({}, frozen),
    "adapters": ({}, adapted),
    "adapters, weights": ({"stash": "hidden"}, adapted_in_full),
    "adapters, stash rows": ({"stash": "rows"}, adapted),
    "delayed": ({}, delay),
}


@pytest.mark.parametrize("needs_x", [True, False], ids=["", "tokens without gradient"])
@pytest.mark.parametrize("name", CASES)
def test_flops_of_a_layer_are_those_of_its_kernels(heap, name: str, needs_x: bool):
    fields, change = CASES[name]
    layer = make(heap, **fields)
    change(layer)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=needs_x)
    mask = torch.arange(TOKENS) < TOKENS - 2
    with multiplied() as flops:
        counts = counted(lambda: train(layer, x, mask))
    router = (2 + needs_x) * ROUTER
    assert sum(counts.values()) - router == sum(flops) > 0
    assert (counts["symmoe.product"] > router) == (name == "delayed")


@pytest.mark.parametrize(
    "fields",
    [{}, {"capacity": 20, "max_tokens": 64, "overflow": "drop"}],
    ids=["exact", "dropped by a capacity"],
)
@run_on(2)
def test_each_rank_counts_the_rows_of_its_experts(
    rank: int, num_ranks: int, heap: symmoe.SymmetricHeap, fields: dict
) -> None:
    """Each rank counts the rows of its own experts; other numbers of tokens come from each."""
    layer = make(heap, **fields)
    x = torch.randn(TOKENS + 20 * rank, HIDDEN, requires_grad=True)
    with multiplied() as flops:
        counts = counted(lambda: train(layer, x))
    assert counts["symmoe.moe_forward"] + counts["symmoe.moe_backward"] == sum(flops) > 0
    rows = torch.tensor(counts["symmoe.moe_forward"] // EXPERT)
    torch.distributed.all_reduce(rows)
    assert rows == (2 * TOKENS + 20) * TOP_K or fields


def test_a_checkpoint_counts_twice(heap):
    layer = make(heap)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    plain = counted(lambda: train(layer, x))
    again = counted(lambda: train(lambda x: checkpoint(layer, x, use_reentrant=False), x))
    assert again["symmoe.moe_forward"] == 2 * plain["symmoe.moe_forward"]
    assert again["symmoe.moe_backward"] == plain["symmoe.moe_backward"]


def test_an_exported_layer_counts_the_same(heap):
    """In an exported layer the router is an operator as well."""
    layer = make(heap)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    exported = torch.export.export(layer, (x,)).module()
    counts = counted(lambda: train(exported, x))
    assert (counts["symmoe.route"], counts["symmoe.route_gradients"]) == (ROUTER, 2 * ROUTER)
    assert sum(counts.values()) == 3 * (ROUTER + TOKENS * TOP_K * EXPERT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_data_every_slot_counts(heap, dtype: torch.dtype):
    """The routing of fake tensors is unknown; the router's product is a kernel."""
    layer = make(heap)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.randn(TOKENS, HIDDEN, requires_grad=True, dtype=dtype)
        counts = counted(lambda: train(layer, x))
    assert "symmoe.product" in counts
    assert sum(counts.values()) == 3 * (ROUTER + TOKENS * TOP_K * EXPERT)


SPLITS = torch.tensor([3, 0, 5, 2])  # of 13 rows: the tail is not multiplied


@pytest.mark.parametrize("splits", [SPLITS, SPLITS.tolist()], ids=["tensor", "list"])
def test_grouped_layers_count_the_rows_of_groups(splits):
    rows = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    scale = torch.rand(TOKENS)
    mlp = symmoe.GroupedMLP(EXPERTS, HIDDEN, FFN)
    linear = symmoe.GroupedLinear(EXPERTS, HIDDEN, FFN)
    assert counted(lambda: train(mlp, rows, splits, scale)) == {"symmoe.product": 3 * 10 * EXPERT}
    assert counted(lambda: train(linear, rows, splits)) == {
        "symmoe.product": 3 * 10 * 2 * HIDDEN * FFN
    }
    with torch.no_grad():
        assert counted(lambda: mlp(rows, splits, scale)) == {"symmoe.product": 10 * EXPERT}


@pytest.mark.parametrize("recipe", [Float8Block(), MXFP8(), NVFP4()], ids=str)
def test_quantised_products_count_like_others(recipe):
    mlp = symmoe.GroupedMLP(EXPERTS, HIDDEN, FFN, precision=recipe)
    rows = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    assert counted(lambda: train(mlp, rows, SPLITS, torch.rand(TOKENS))) == {
        "symmoe.product": 3 * 10 * EXPERT
    }


def test_results_under_a_mode_have_the_same_bits():
    """A product under a mode runs hidden from the mode, with the result that it has without a mode."""
    mlp = symmoe.GroupedMLP(EXPERTS, HIDDEN, FFN)
    scale = torch.rand(TOKENS)
    results = []
    for run in (lambda call: call(), counted):
        rows = torch.ones(TOKENS, HIDDEN).cumsum(0).requires_grad_()
        mlp.zero_grad()
        run(lambda rows=rows: train(mlp, rows, SPLITS, scale))
        results.append([rows.grad, *(parameter.grad.clone() for parameter in mlp.parameters())])
    assert all(map(torch.equal, *results))
