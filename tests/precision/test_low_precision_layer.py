"""Expert-parallel layers in a recipe's numbers: every way to run a step, rows that travel quantised, memory, errors."""

import gc
from dataclasses import replace
from functools import partial

import low_precision_checks as checks
import numpy as np
import pytest
import torch
from cluster import on_ranks, run_on
from kept_memory import bytes_kept
from layers import tokens_of
from low_precision_cases import ON_GPUS, every_recipe
from row_ranges import whole_groups
from stacks import Stack, compare_bits, pipeline, run_schedule
from worker import Findings, open_heap

from symmoe import GroupedLinear, GroupedMLP, MoEConfig, MoELayer, SymmetricHeap, add_lora, make_plan, plan_memory
from symmoe.errors import ArgumentError, HeapExhausted
from symmoe.grouped.experts import ExpertRows, evaluated
from symmoe.grouped.mlp import expert_weights
from symmoe.kernels.gemm_parts import Part
from symmoe.moe.ep_step import expert_parallel_mlp
from symmoe.precision import MXFP8, NVFP4, Float8Block
from symmoe.precision.wire import WireFormat
from symmoe.symm_mem.memory import ALIGNMENT_BYTES

slowly = partial(pytest.param, marks=pytest.mark.slow)


def wired(*cases):
    return pytest.mark.parametrize(("recipe", "wire"), cases, ids=str)


# -- one step, in every way -------------------------------------------------------------------------------------------
@every_recipe
@on_ranks(cpu=(1, 2), cuda=(1, 2, 4), marks=ON_GPUS)
def test_all_ways_give_the_same_bits(cluster, num_ranks: int, device: str, recipe):
    assert cluster(num_ranks, device).findings(checks.check_ways, device, recipe, torch.bfloat16) == []


# -- any number of ranks ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", [slowly("cpu"), pytest.param("cuda", marks=ON_GPUS)])
@wired((NVFP4(), "none"), (Float8Block(), "both"), (MXFP8(), "forward"))
def test_any_number_of_ranks_gives_the_same_bits(cluster, recipe, wire, device: str):
    """With order="slot", stochastic rounding included: it depends on the expert's rows and not on where they are."""
    want = None
    for num_ranks, cut in ((1, [44]), (2, [40, 4]), (4, [11, 0, 30, 3]))[: 3 if device == "cpu" else 2]:
        results = cluster(num_ranks, device).run(checks.run_cut, device, recipe, wire, cut, "slot")
        found = {name: np.concatenate([part[name] for part in results]) for name in checks.NAMES}
        want = found if want is None else want
        for name in checks.NAMES:
            assert np.array_equal(found[name], want[name]), (num_ranks, name)
    (other,) = cluster(1, device).run(checks.run_cut, device, replace(recipe), "none", [44], "slot")
    assert np.array_equal(other["y"], want["y"])


# -- the layer --------------------------------------------------------------------------------------------------------
@wired((NVFP4(), "none"), (Float8Block(), "both"), (MXFP8(), "backward"))
@on_ranks(cpu=(1, 2), cuda=(1, 2), marks=ON_GPUS)
def test_layers(cluster, num_ranks: int, device: str, recipe, wire):
    assert cluster(num_ranks, device).findings(checks.check_layer, device, recipe, wire) == []


@on_ranks(cpu=(1, 2), cuda=(1, 2), marks=ON_GPUS)
@wired((Float8Block(), "none"), (Float8Block(), "both"), (MXFP8(), "none"), slowly(NVFP4(), "none"))
def test_second_bias(cluster, num_ranks: int, device: str, recipe, wire: str):
    assert cluster(num_ranks, device).findings(checks.check_second_bias, device, recipe, wire) == []


def test_rows_on_their_way_are_waited_for():
    """Whatever hands out parts: all of them are taken before anything is quantised."""
    call = evaluated(GroupedMLP(2, 64, 32, precision=NVFP4()), torch.float32)
    weights = expert_weights(call.form, call.biases, call.tensors, trains=(True, True))
    rows = torch.randn(8, 64)
    row_range, scale = whole_groups((5, 3)), torch.ones(8)
    want, _ = weights.first_layer(ExpertRows(rows, row_range, scale), num_rows=8)
    arriving = torch.full_like(rows, torch.nan)

    def parts():
        for begin, end in ((0, 3), (3, 8)):
            arriving[begin:end] = rows[begin:end]
            yield Part(row_range)

    found, _ = weights.first_layer(ExpertRows(arriving, row_range, scale), num_rows=8, parts=parts())
    assert torch.equal(found.h, want.h)


# -- rows on the wire -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", checks.WIRE_RECIPES, ids=str)
@pytest.mark.parametrize("hidden", [64, 160, 512])
def test_a_row_on_the_wire(monkeypatch, recipe, hidden):
    """Bytes are what the recipe makes of the row; they come out as they went in, in any order."""
    wire, x = WireFormat(recipe, hidden), torch.randn(20, hidden).bfloat16()
    x[3], x[4, 5] = 0, torch.nan
    counts = checks.count_calls(monkeypatch, "quantize_rows", "encode_rows")
    sent = wire.encode(x)
    assert counts == {"quantize_rows": 0, "encode_rows": 1}
    quantized = recipe.quantize(x)
    assert wire.row_bytes % 16 == 0
    assert 0 <= wire.row_bytes - recipe.row_bytes(hidden) < 16
    assert wire.row_bytes < 0.55 * 2 * hidden or hidden < 512
    assert (sent.shape, sent.dtype) == ((20, wire.row_words), torch.bfloat16)
    row_range = whole_groups((4, 5))
    index = torch.randint(20, (11,), dtype=torch.int32)
    for row_index in (None, index):
        found = wire.quantized(sent, row_range, row_index)
        picked = slice(None) if row_index is None else index.long()
        for name in ("data", "scale"):
            got, want = (getattr(q, name).view(torch.uint8) for q in (found, quantized))
            assert torch.equal(got[:9], want[picked][:9]), name  # the others belong to no group
        assert found.row_range is row_range
        for dtype in (torch.bfloat16, torch.float16, torch.float32):  # along tokens: of the decoded rows
            columns = wire.columns(sent, row_range, dtype, row_index)
            wanted = recipe.quantize_columns(wire.decode(sent, dtype), row_range, row_index=row_index)
            assert (columns.layout, columns.num_rows, columns.row_range) == ("columns", wanted.num_rows, row_range)
            assert torch.equal(columns.dequantize().nan_to_num(7), wanted.dequantize().nan_to_num(7))
    parts = quantized.data.view(torch.uint8), quantized.scale.view(torch.uint8)
    padding = torch.zeros(20, wire.row_bytes - recipe.row_bytes(hidden), dtype=torch.uint8)
    assert torch.equal(sent.view(torch.uint8), torch.cat([*parts, padding], dim=1))
    want = quantized.dequantize()
    assert torch.equal(wire.decode(sent, torch.float32).nan_to_num(7), want.nan_to_num(7))
    assert wire.decode(sent, torch.bfloat16).dtype == torch.bfloat16
    assert wire.encode(x[:0]).shape == (0, wire.row_words)
    assert not wire.encode(x.clone().requires_grad_()).requires_grad
    for wrong in (x[0], x.double(), x[:, :16], x[:, ::2], torch.cat([x, x], dim=1)):
        with pytest.raises(ArgumentError, match=rf"it must be contiguous \[T, {hidden}\]"):
            wire.encode(wrong)


@every_recipe
def test_gradients_of_biases_come_with_the_quantised_gradients(monkeypatch, recipe):
    """No kernel reads the rows for them, unless nothing else asks for quantised rows."""
    seen = checks.count_calls(monkeypatch, "dact_quantize", "scaled_activation_grad", "grouped_bias_grad", "sum_dbias")
    mlp = GroupedMLP(2, 64, 128, bias=True, precision=recipe, dtype=torch.bfloat16)
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    mlp(x, [3, 5], torch.ones(8)).sum().backward()
    assert mlp.fc1.bias.grad.any()
    apart = recipe.row_format.has_global_scale  # activation and quantiser
    wanted = {"dact_quantize": 1 - apart, "scaled_activation_grad": apart, "sum_dbias": 1 + apart}
    assert seen == {**wanted, "grouped_bias_grad": 0}
    linear = GroupedLinear(2, 64, 128, bias=True, precision=recipe, dtype=torch.bfloat16)
    for is_trained in (True, False):
        seen.update(dict.fromkeys(seen, 0))
        linear(x.requires_grad_(is_trained), [3, 5]).sum().backward()
        assert (seen["sum_dbias"], seen["grouped_bias_grad"]) == (is_trained, not is_trained)


@every_recipe
def test_a_weight_is_quantised_once(monkeypatch, recipe):
    """For both directions in one call if the rows have a gradient, else for forward alone; none in backward."""
    counts = checks.count_calls(monkeypatch, "quantize_weights", "quantize_weight_pairs", "group_amax", "weight_amax")
    linear, mlp = GroupedLinear(2, 64, 32, precision=recipe), GroupedMLP(2, 64, 32, precision=recipe)
    splits = torch.tensor([3, 5], dtype=torch.int32)

    def forward(module, trains_rows: bool) -> torch.Tensor:
        counts.update(dict.fromkeys(counts, 0))
        x = torch.randn(8, 64, requires_grad=trains_rows)
        return module(x, splits) if module is linear else module(x, splits, torch.ones(8))

    has_amax = recipe.weight_format.has_global_scale
    for module, num_weights in ((linear, 1), (mlp, 2)):
        y = forward(module, True)
        assert (counts["quantize_weights"], counts["quantize_weight_pairs"]) == (0, num_weights)
        assert (counts["group_amax"], counts["weight_amax"]) == (num_weights * has_amax, num_weights * has_amax)
        counts.update(dict.fromkeys(counts, 0))
        y.sum().backward()
        assert (counts["quantize_weights"], counts["quantize_weight_pairs"]) == (0, 0)
        forward(module, False)  # FC2's input gradient is asked for all the same
        assert (counts["quantize_weights"], counts["quantize_weight_pairs"]) == (1, num_weights - 1)
        with torch.no_grad():
            forward(module, False)
        assert (counts["quantize_weights"], counts["quantize_weight_pairs"]) == (num_weights, 0)


# -- memory -----------------------------------------------------------------------------------------------------------
@every_recipe
@pytest.mark.parametrize("stash", ["all", "rows", "hidden", "none"])
def test_bytes_of_a_call(recipe, stash: str):
    for wire in ("none", "both") if recipe in checks.WIRE_RECIPES else ("none",):
        options = {"precision": recipe, "quantized_wire": wire, "stash": stash, "capacity": 150}
        config = MoEConfig(hidden=160, ffn=96, num_experts=8, top_k=3, schedule="always-overlapped", **options)
        plan = plan_memory(config, num_ranks=1, num_tokens=37, dtype=torch.float32)
        assert (plan.lease_bytes_per_call, plan.activation_bytes_per_call) == bytes_kept(config, 37), wire


@wired((Float8Block(), "both"), slowly(MXFP8(), "backward"), slowly(NVFP4(), "none"))
@run_on(2)
def test_the_heap_is_as_large_as_planned(rank: int, num_ranks: int, findings: Findings, recipe, wire: str) -> None:
    """1F1B runs on a heap of as many bytes as planned, with the bits of one after the other, and not on less."""
    options = {"precision": recipe, "quantized_wire": wire, "capacity": 48, "max_tokens": 8}
    for stash, layout in (("all", "packed"), ("none", "expert-major")):
        config = checks.config_for(num_ranks, stash=stash, layout=layout, **options)
        sizes = {"num_ranks": num_ranks, "num_tokens": 8, "num_layers": 2, "num_in_flight": 2, "dtype": torch.float32}
        num_bytes = plan_memory(config, **sizes).heap_bytes
        with open_heap("cpu", num_bytes=num_bytes) as heap:
            model = Stack(heap, config)
            want = run_schedule(model, heap, [turn for i in range(3) for turn in (("F", i), ("B", i))])
            compare_bits(findings, run_schedule(model, heap, pipeline(3, 2)), want)
        with open_heap("cpu", num_bytes=num_bytes - ALIGNMENT_BYTES) as heap:
            raised = False
            try:
                run_schedule(Stack(heap, config), heap, pipeline(3, 2))
            except HeapExhausted:
                raised = True
            findings.check(raised, f"{stash}, {layout}: one block less is enough")
            gc.collect()


# -- errors -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, r"precision \('fp8'\) must be a recipe of symmoe.precision"),
        ({"precision": Float8Block}, r"precision \(<class .*must be a recipe"),
        ({"precision": MXFP8(), "hidden": 48}, r"hidden \(48\) must be a multiple of 32 for MXFP8\(\)"),
        ({"precision": NVFP4(), "ffn": 80}, r"ffn \(80\) must be a multiple of 32 for NVFP4"),
        ({"precision": Float8Block(), "ffn": 24}, r"ffn \(24\) must be a multiple of 16 for Float8Block"),
        ({"quantized_wire": "both"}, r"quantized_wire \('both'\): precision \(None\) must be a recipe of E4M3 numbers"),
        ({"quantized_wire": "forward", "precision": NVFP4()}, r"quantized_wire \('forward'\): precision \(NVFP4\("),
        ({"quantized_wire": True}, r"quantized_wire \(True\) must be one of \('none', 'forward', 'backward', 'both'\)"),
    ],
)
def test_a_configuration_that_makes_no_sense(options, message):
    with pytest.raises(ArgumentError, match=message):
        replace(checks.config_for(1), **options)


def test_a_configuration_is_a_value():
    config = checks.config_for(1, precision=Float8Block(power_of_two=True), quantized_wire="forward")
    assert (config, hash(config)) == (replace(config), hash(replace(config)))
    assert config != replace(config, precision=Float8Block())
    assert config.received_layout == "packed"
    assert replace(config, ffn=1024).received_layout == "packed"
    assert replace(config, ffn=1024, precision=None, quantized_wire="none").received_layout == "expert-major"
    assert replace(config, layout="expert-major").received_layout == "expert-major"


def test_experts_must_have_the_precision_of_the_layer(heap: SymmetricHeap):
    for mine, theirs in ((None, MXFP8()), (MXFP8(), None), (MXFP8(), Float8Block())):
        with pytest.raises(ArgumentError, match=r"experts.precision \(.*\) must be "):
            MoELayer(checks.config_for(1, precision=mine), heap, experts=GroupedMLP(2, 64, 32, precision=theirs))
    layer = MoELayer(checks.config_for(1), heap)
    x = torch.randn(4, 64)
    plan = make_plan(torch.zeros(4, 2, dtype=torch.int64), num_experts=2, heap=heap)
    with pytest.raises(ArgumentError, match=r"precision \(None\) must be a recipe of E4M3 numbers"):
        expert_parallel_mlp(x, torch.ones(4, 2), layer.experts, plan, quantized_wire="both")


def test_adapters_are_for_products_in_full_and_recipes_want_multiples():
    mlp = GroupedMLP(2, 64, 32, precision=MXFP8())
    with pytest.raises(ArgumentError, match=r"fc1.precision \(MXFP8\(\)\) must be None"):
        add_lora(mlp, rank=4, alpha=1.0)
    assert all(parameter.requires_grad for parameter in mlp.parameters())
    for sizes, text in (((48, 64), r"in_features \(48\)"), ((64, 48), r"out_features \(48\)")):
        with pytest.raises(ArgumentError, match=text + r" must be a multiple of 32 for MXFP8"):
            GroupedLinear(2, *sizes, precision=MXFP8())
    with pytest.raises(ArgumentError, match=r"precision \(8\) must be a recipe"):
        GroupedLinear(2, 64, 64, precision=8)


def test_compiled_layers_share_a_graph():
    """Layers of equal recipes are alike to torch.compile; it gives the bits of the layer as it is."""
    from torch._dynamo.testing import CompileCounterWithBackend  # takes long to import

    config = checks.config_for(1, precision=Float8Block(), quantized_wire="both")
    with SymmetricHeap(num_bytes=4 << 20, backend="host") as heap:
        layers = [MoELayer(replace(config, precision=Float8Block()), heap) for _ in range(2)]
        backend = CompileCounterWithBackend("aot_eager")
        call = torch.compile(lambda layer, x: layer(x)[0], backend=backend, fullgraph=True)
        for layer in layers:
            found = []
            for run in (call, lambda layer, x: layer(x)[0]):
                x = tokens_of(0, 9, 64).requires_grad_()
                y = run(layer, x)
                found.append([y.detach(), *torch.autograd.grad(y.square().sum(), (x, *layer.experts.parameters()))])
                del y
            assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert backend.frame_count == 1
