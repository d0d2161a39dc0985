"""Low precision in rare cases: tokens of NaN, padding, drops, delayed gradients, errors of other ranks."""

import gc
import re
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from cluster import run_on
from heap_calls import outcome
from host_reads import NoReads
from layers import tokens_of
from low_precision_cases import RECIPES
from row_ranges import whole_groups
from worker import Findings

from symmoe import GroupedLinear, GroupedMLP, MoEConfig, MoELayer, SymmetricHeap, make_plan
from symmoe.errors import ArgumentError
from symmoe.kernels import architectures
from symmoe.metrics import MetricsLogger
from symmoe.moe.ep_step import expert_parallel_mlp
from symmoe.precision import MXFP8, NVFP4, Float8Block
from symmoe.precision.operands import gradient_seeds
from symmoe.precision.recipes import Recipe
from symmoe.precision.wire import WireFormat


def wires(recipe: Recipe) -> tuple[str, ...]:
    return ("none", "both") if recipe.row_format.element == "e4m3" else ("none",)


# -- padding, duplicates, drops ---------------------------------------------------------------------------------------
EXPERTS, H, I, K, T = 8, 64, 32, 3, 24
NAMES = ("y", "dx", "dprobs", "dw1", "dw2")


@pytest.mark.parametrize(
    ("recipe", "wire"), [(recipe, wire) for recipe in RECIPES for wire in wires(recipe)], ids=str
)
@run_on(2)
def test_padding_duplicates_and_drops_are_as_the_same_rows_without(
    rank: int, num_ranks: int, findings: Findings, heap: SymmetricHeap, recipe: Recipe, wire: str
) -> None:
    """Tokens without experts, tokens with an expert twice, and drops: the bits are those of the same rows without."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(-1, EXPERTS, (T, K), generator=generator)
    ids[3], ids[5], ids[7] = -1, torch.tensor([2, 2, 2]), torch.tensor([6, 1, 6])
    probs = torch.rand((T, K), generator=generator) + 0.5
    x, dy = (tokens_of(rank, T, H, salt=salt).bfloat16() for salt in (1, 2))
    torch.manual_seed(rank)
    experts = GroupedMLP(EXPERTS // num_ranks, H, I, precision=recipe, dtype=torch.bfloat16)

    def run(ids: torch.Tensor, **options) -> dict[str, torch.Tensor]:
        limits = {"capacity": 30, "overflow": "drop"} if options.pop("drops", False) else {}
        plan = make_plan(ids, num_experts=EXPERTS, heap=heap, **limits)
        leaves = x.clone().requires_grad_(), probs.clone().requires_grad_()
        y = expert_parallel_mlp(
            *leaves,
            experts,
            plan,
            order="slot",
            quantized_wire=wire,
            **{"schedule": "always-overlapped", **options},
        )
        weights = experts.fc1.weight, experts.fc2.weight
        tensors = [y.detach(), *torch.autograd.grad(y, (*leaves, *weights), dy)]
        drops = {"kept": plan.slot_to_row >= 0, "dropped": plan.num_dropped.item()}
        return dict(zip(("y", "dx", "dprobs", "dw1", "dw2"), tensors, strict=True)) | drops

    all_rows = run(ids)
    findings.check(
        not all_rows["y"][3].any() and not all_rows["dx"][3].any(),
        "a token of no expert gets something",
    )
    findings.check(bool(all_rows["y"].isfinite().all()), "y is not finite")
    for options in ({"layout": "expert-major", "stash": "none"}, {"schedule": "serial"}):
        findings.where = f"rank {rank}, {recipe}, {wire}, {options}"
        again = run(ids, **options)
        findings.same_bits(map(again.get, NAMES), map(all_rows.get, NAMES))
    dropped = [
        run(ids, drops=True, **options)
        for options in ({}, {"layout": "expert-major", "stash": "none"})
    ]
    findings.where = f"rank {rank}, {recipe}, {wire}, drops"
    findings.check(torch.equal(dropped[0]["kept"], dropped[1]["kept"]), "others are dropped")
    same = run(torch.where(dropped[0]["kept"], ids, -1))
    for actual in dropped:
        findings.check(actual["dropped"] > 0, "nothing was dropped")
        findings.same_bits(map(actual.get, NAMES), map(same.get, NAMES))
        findings.check(not torch.equal(actual["y"], all_rows["y"]), "the drops change nothing")


# -- memory between forward and backward ------------------------------------------------------------------------------
def alive(dtype: torch.dtype, *shapes: tuple[int, ...]) -> int:
    """The live tensors with these shapes and dtypes."""
    gc.collect()
    tensors = (candidate for candidate in gc.get_objects() if type(candidate) is torch.Tensor)
    return sum(tensor.dtype == dtype and tuple(tensor.shape) in shapes for tensor in tensors)


MLP_WEIGHTS = [(3, 48, 160), (3, 80, 48)]  # transposed


@pytest.mark.parametrize(
    ("make", "precision", "dtype", "shapes"),
    [
        (GroupedLinear, Float8Block(), torch.float8_e4m3fn, [(3, 48, 80)]),
        (GroupedMLP, Float8Block(), torch.float8_e4m3fn, MLP_WEIGHTS),
        (GroupedLinear, None, torch.bfloat16, [(3, 80, 48)]),  # autocast's copies
        (GroupedLinear, Float8Block(), torch.bfloat16, [(3, 80, 48)]),
    ],
)
def test_delayed_weight_gradients_keep_no_weights(
    make, precision, dtype: torch.dtype, shapes: list
):
    """Between backward and backward_dw, which is much later in some schedules, the operands of dgrad are freed."""
    module = make(3, 48, 80, precision=precision, delay_wgrad=True)
    x = torch.randn(6, 48, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = module(x, [1, 2, 3], *([torch.ones(6)] if make is GroupedMLP else []))
    saved = [tensor for tensor in y.grad_fn.saved_tensors if tensor is not None]
    assert alive(dtype, *shapes) == len(shapes)  # the count finds them
    del saved
    y.sum().backward()
    assert x.grad.any()
    del y
    assert alive(dtype, *shapes) == 0
    module.backward_dw()
    assert all(
        parameter.grad.any() for name, parameter in module.named_parameters() if "weight" in name
    )


def test_seeds_and_global_scales_are_not_read():
    """The host reads no seeds and no global scales. tests/gpu checks the reads of kernels."""
    rows = torch.randn(40, 64).bfloat16()
    row_range = whole_groups((9, 0, 21))
    index = torch.arange(39, -1, -1, dtype=torch.int32)
    numbers = NVFP4().quantize(rows, row_range)
    with NoReads() as mode:
        seeds = gradient_seeds(NVFP4(), rows, row_range, index)
        global_scale = numbers.global_scale
    assert mode.noted == []
    assert seeds.shape == global_scale.shape == (3,)


# -- other ranks ------------------------------------------------------------------------------------------------------
@run_on(2)
def test_a_wire_without_a_recipe_raises_on_every_rank(
    rank: int, num_ranks: int, heap: SymmetricHeap
) -> None:
    """Only rank 1 wants rows quantised, by experts that have no recipe for it."""
    experts = GroupedMLP(2, 64, 32)
    plan = make_plan(torch.zeros((4, 1), dtype=torch.int64), num_experts=2 * num_ranks, heap=heap)
    wire = "both" if rank == 1 else "none"
    with pytest.raises(ArgumentError, match=r"precision \(None\) must be a recipe of E4M3 numbers"):
        expert_parallel_mlp(torch.ones(4, 64), torch.ones(4, 1), experts, plan, quantized_wire=wire)


TOO_OLD = r"precision \(.*\) needs a GPU of compute capability 8.9 or more; cpu has 8.6"


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_gpus_that_are_too_old_are_refused_at_construction(monkeypatch, heap, recipe):
    rows = torch.zeros(4, 64)
    weight = torch.zeros(2, 64, 64)
    config = MoEConfig(hidden=64, ffn=32, num_experts=2, top_k=1, precision=recipe)
    linear = GroupedLinear(2, 64, 64, precision=recipe)
    calls = [
        lambda: GroupedLinear(2, 64, 64, precision=recipe),
        lambda: GroupedMLP(2, 64, 32, precision=recipe),
        lambda: MoELayer(config, heap),
        lambda: MoELayer(
            config, heap, experts=GroupedMLP(2, 64, 32, precision=recipe, device="meta")
        ),
        lambda: recipe.quantize(rows),
        lambda: recipe.quantize_columns(rows),
        lambda: recipe.quantize_weight(weight),
        lambda: recipe.quantize_weight_transposed(weight),
        lambda: recipe.quantize_weight_pair(weight),
        lambda: linear(rows, torch.tensor([2, 2])),
    ]
    if recipe.row_format.element == "e4m3":
        calls.append(lambda: WireFormat(recipe, 64).encode(rows))
    for call in calls:
        call()
    for capability, is_refused in (((8, 6), True), ((8, 9), False)):
        monkeypatch.setattr(
            architectures,
            "capability",
            lambda device, cpu=capability: cpu if device.type == "cpu" else (9, 0),
        )
        for call in calls:
            with pytest.raises(ArgumentError, match=TOO_OLD) if is_refused else nullcontext():
                call()
        GroupedLinear(2, 64, 64)


@run_on(2)
def test_an_old_gpu_of_one_rank_raises_on_every_rank(
    rank, num_ranks, findings: Findings, heap: SymmetricHeap
) -> None:
    """Only rank 1 has an old GPU: each call with a recipe raises on both ranks, and the next call without one works."""
    capability = architectures.capability
    config = MoEConfig(hidden=64, ffn=32, num_experts=2 * num_ranks, top_k=1, precision=MXFP8())
    layer = MoELayer(config, heap)

    def step() -> None:
        plan = make_plan(
            torch.zeros((4, 1), dtype=torch.int64), num_experts=config.num_experts, heap=heap
        )
        expert_parallel_mlp(torch.ones(4, 64), torch.ones(4, 1), layer.experts, plan)

    for call in (step, lambda: layer(torch.ones(4, 64))):
        call()
        with mock.patch.object(
            architectures, "capability", (lambda device: (8, 6)) if rank == 1 else capability
        ):
            name, text = outcome(call)
        findings.check(name == "ArgumentError" and re.search(TOO_OLD, text), f"{name}: {text}")
        call()


# -- metrics ----------------------------------------------------------------------------------------------------------
def count_bytes(
    rank: int, num_ranks: int, heap: SymmetricHeap, recipe: Recipe, wire: str
) -> tuple[int, int]:
    config = MoEConfig(
        hidden=256,
        ffn=32,
        num_experts=2 * num_ranks,
        top_k=2,
        precision=recipe,
        quantized_wire=wire,
    )
    torch.manual_seed(1)
    layer = MoELayer(config, heap, dtype=torch.bfloat16)
    logger = MetricsLogger(layer)
    layer(tokens_of(rank, 20, 256).bfloat16())
    (record,) = logger.step(0)
    logger.close()
    return record.dispatch_bytes, record.combine_bytes


@pytest.mark.parametrize("recipe", [Float8Block(), NVFP4()], ids=str)
def test_metrics_count_the_bytes_that_travel(cluster, recipe):
    """256 numbers are 512 bytes as bf16, and 256 with 2 scales of 4 bytes, and padding, on the wire."""
    plain = cluster(2).run(count_bytes, recipe, "none")
    assert all(sent == read > 0 for sent, read in plain)
    if recipe.row_format.element == "e4m3":
        for wire, row_bytes in (("forward", 272), ("both", 272), ("backward", 512)):
            actual = cluster(2).run(count_bytes, recipe, wire)
            assert actual == [(sent // 512 * row_bytes, read) for sent, read in plain]
