"""Experts in E4M3 whose kernels begin with the rows that have arrived: parts of a step, on CPUs and on GPUs."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from cluster import run_on
from layers import make_layer, tokens_of
from low_precision_cases import ON_GPUS, RECIPES
from worker import Findings, open_heap

from symmoe import MoEConfig, kernels
from symmoe.grouped import quantized_experts
from symmoe.precision import MXFP8, NVFP4, Float8Block

H, I = 144, 128
RANK_TO_TOKENS = (300, 5, 900, 1)  # experts of several tiles
# Where row_range is.
PART_KERNELS = {
    "grouped_gemm_quantized": 2,
    "quantize_rows": 1,
    "unpack_rows": 1,
    "act_quantize": 2,
}


def is_part(row_range: torch.Tensor) -> bool:
    """Whether the range has the rows of one source rank, out of plan.source_to_rows, and is not plan.row_range, the
    second tensor in the plan's storage."""
    first_after_splits = -(-row_range.shape[1] // 4) * 4
    return row_range.storage_offset() != first_after_splits


@contextmanager
def counted_parts(lag_s: float = 0.0) -> Iterator[Counter[tuple[str, bool]]]:
    """The calls of PART_KERNELS, with parts and with all rows; the first one takes `lag_s`."""
    calls: Counter[tuple[str, bool]] = Counter()

    def count(name: str, kernel, /, *args, **options):
        if name in PART_KERNELS:
            time.sleep(0.0 if calls else lag_s)
            calls[name, is_part(args[PART_KERNELS[name]])] += 1
        return kernel(*args, **options)

    with kernels.hooked(torch.device("cpu"), count):
        yield calls


def layer_step(heap, config: MoEConfig, dtype: torch.dtype) -> list[torch.Tensor]:
    """y and all gradients of a step of the layer with this configuration."""
    layer, _ = make_layer(heap, config)
    layer.experts.to(dtype)
    num_tokens = RANK_TO_TOKENS[heap.rank]
    x, dy = (
        tokens_of(heap.rank, num_tokens, config.hidden, salt=salt).to(heap.device, dtype)
        for salt in (1, 2)
    )
    y, _ = layer(x.requires_grad_())
    y.backward(dy)
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def expected_calls(config: MoEConfig, num_parts: int, dtype: torch.dtype) -> Counter:
    """The expected calls with ranges: one for each part, of each product, of the kernels that make its rows and of the
    activation."""
    forward, backward = (
        "unpack_rows" if config.quantized_wire in (direction, "both") else "quantize_rows"
        for direction in ("forward", "backward")
    )
    num_forward = num_parts * (1 if config.stash in ("all", "hidden") else 2)  # FC1 again
    counts = Counter(
        {"grouped_gemm_quantized": num_forward + 2 * num_parts}
    )  # FC1, FC2 and FC2's dgrad
    counts[forward] += num_forward
    counts[backward] += num_parts
    if dtype != torch.float32:  # for which no kernel activates and quantises
        counts["act_quantize"] += num_forward
    return counts


WIRES = (
    ("none", "all", "packed", {}),
    ("both", "none", "packed", {}),
    ("forward", "hidden", "expert-major", {}),
    (
        "both",
        "all",
        "expert-major",
        {"capacity": 2 * sum(RANK_TO_TOKENS), "max_tokens": max(RANK_TO_TOKENS)},
    ),
)


def configs(num_ranks: int, recipe, hidden: int, ffn: int) -> list[MoEConfig]:
    """One for each of WIRES."""
    sizes = {
        "hidden": hidden,
        "ffn": ffn,
        "num_experts": 2 * num_ranks,
        "top_k": 2,
        "precision": recipe,
    }
    return [
        MoEConfig(
            **sizes,
            quantized_wire=wire,
            stash=stash,
            layout=layout,
            schedule="always-overlapped",
            **limits,
        )
        for wire, stash, layout, limits in WIRES
    ]


BF16, BLOCKS = torch.bfloat16, (Float8Block(), Float8Block(power_of_two=True))
CALLS = [
    *((num_ranks, "cpu", recipe, BF16) for num_ranks in (2, 3) for recipe in BLOCKS),
    *((num_ranks, "cpu", Float8Block(), torch.float32) for num_ranks in (2, 3)),
    *(
        pytest.param(num_ranks, "cuda", recipe, BF16, marks=ON_GPUS)
        for num_ranks in (2, 4)
        for recipe in BLOCKS
    ),
]


@pytest.mark.parametrize(("num_ranks", "device", "recipe", "dtype"), CALLS, ids=str)
@run_on(timeout_s=190.0)
def test_parts_have_the_bits_of_the_whole(
    rank: int, num_ranks: int, findings: Findings, device: str, recipe, dtype: torch.dtype
):
    """The bits of one thing after the other. On CPUs also: every product that reads arriving rows, or makes rows that
    are sent, has as many parts as there are ranks."""
    with open_heap(device, num_bytes=64 << 20) as heap:
        for config in configs(num_ranks, recipe, *((H, I) if device == "cpu" else (512, 256))):
            findings.where = f"rank {rank} of {num_ranks}, {config}, {dtype}"
            want = layer_step(heap, replace(config, schedule="serial"), dtype)
            with counted_parts() as calls:
                got = layer_step(heap, config, dtype)
            findings.same_bits(got, want)
            findings.check(
                not any(tensor.isnan().any() for tensor in want), "there is nothing to compare"
            )
            if device == "cpu":
                with_ranges = Counter({name: n for (name, are), n in calls.items() if are})
                findings.equal(
                    "calls with ranges", with_ranges, expected_calls(config, num_ranks, dtype)
                )


def all_at_once(weights, wire, x, parts, dbias):
    """A wrong _part_by_part, which makes operands of all rows when the first part has arrived."""
    rows = None
    for part in parts:
        if rows is None and wire is None:
            rows = weights.recipe.quantize(x.rows, x.row_range, row_index=x.row_index)
        elif rows is None:
            rows = wire.quantized(x.rows, x.row_range, x.row_index)
        yield rows.operand(), part


@pytest.mark.parametrize("wire", ["none", "both"])
@run_on(2)
def test_rows_that_are_not_there_are_noticed(rank: int, num_ranks: int, wire: str) -> None:
    """Negative control: y is wrong if rank 0 does not wait for the late rows of rank 1."""
    options = {"precision": Float8Block(), "quantized_wire": wire, "layout": "expert-major"}
    config = MoEConfig(
        hidden=H, ffn=I, num_experts=2 * num_ranks, top_k=2, schedule="always-overlapped", **options
    )
    results = []
    with open_heap("cpu", num_bytes=64 << 20, programs="off") as heap:
        want = layer_step(heap, replace(config, schedule="serial"), torch.bfloat16)
        right = quantized_experts._part_by_part
        for part_by_part in (right, all_at_once):
            quantized_experts._part_by_part = part_by_part if rank == 0 else right
            try:
                with counted_parts(lag_s=0.3 * rank):
                    y, *_ = layer_step(heap, config, torch.bfloat16)
            finally:
                quantized_experts._part_by_part = right
            results.append(torch.equal(y, want[0]))
    assert results == [True, rank == 0]


def test_recipes_that_support_parts():
    supported = {Float8Block(), Float8Block(power_of_two=True)}
    assert {
        recipe for recipe in RECIPES if quantized_experts.takes_parts(recipe)
    } == supported & set(RECIPES)
    assert all(map(quantized_experts.takes_parts, (None, *supported)))
    assert not any(map(quantized_experts.takes_parts, (MXFP8(), NVFP4())))
