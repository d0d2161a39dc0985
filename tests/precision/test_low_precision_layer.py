"""Expert-parallel layers in a recipe's numbers: every way to run a step, rows that travel quantised, memory, errors."""

import gc
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import oracle
import pytest
import torch
from cluster import on_ranks, run_on
from heap_calls import outcome
from kept_memory import bytes_kept
from layers import WAYS, global_weights, local_part, tokens_of
from low_precision_cases import (
    ON_GPUS,
    ONE_PRODUCT,
    RECIPES,
    TWO_LAYERS,
    config_for,
    count_calls,
    every_recipe,
)
from low_precision_oracle import relative_error
from row_ranges import whole_groups
from stacks import Stack, pipeline, run_schedule, step
from torch.utils.checkpoint import checkpoint
from worker import Findings, Watching, experts_of, open_heap

from symmoe import (
    GroupedLinear,
    GroupedMLP,
    MoEConfig,
    MoELayer,
    SymmetricHeap,
    make_plan,
    plan_memory,
)
from symmoe.errors import ArgumentError
from symmoe.grouped import quantized_experts
from symmoe.grouped.experts import materialized
from symmoe.grouped.mlp import expert_weights
from symmoe.grouped.rows_function import ExpertRows
from symmoe.kernels.gemm_parts import Part
from symmoe.lora import add_lora
from symmoe.moe.ep_step import expert_parallel_mlp
from symmoe.precision import MXFP8, NVFP4, Float8Block
from symmoe.precision.wire import WireFormat
from symmoe.symm_mem.memory import ALIGNMENT_BYTES

H, I, K = 256, 32, 2
RANK_TO_TOKENS = (
    300,
    3,
    61,
    0,
)  # experts of several tiles: FC2 computes some of them before the others
WIRE_RECIPES = [recipe for recipe in RECIPES if recipe.row_format.element == "e4m3"]
NAMES = ("y", "dx", "dprobs", "dw1", "dw2")
STASHED = list(zip(WAYS[1:], ("rows", "hidden", "none"), strict=True))
STASHED_SLOT = [WAYS[0], {**WAYS[3], "stash": "rows"}]

slowly = partial(pytest.param, marks=pytest.mark.slow)


def wired(*cases):
    return pytest.mark.parametrize(("recipe", "wire"), cases, ids=str)


# -- one step, in every way -------------------------------------------------------------------------------------------
@every_recipe
@on_ranks(cpu=(1, 2), cuda=(1, 2, 4), marks=ON_GPUS)
@run_on()
def test_all_ways_give_the_same_bits(
    rank: int, num_ranks: int, findings: Findings, device: str, recipe
):
    """All ways have the same bits, near the oracle; quantised rows on the wire change only weight gradients."""
    element, dtype = recipe.row_format.element, torch.bfloat16
    num_experts, num_tokens = 2 * num_ranks, RANK_TO_TOKENS[rank]
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand((num_tokens, num_experts), generator=generator).topk(K).indices
    probs = torch.rand((num_tokens, K), generator=generator) + 0.25
    x, dy = (tokens_of(rank, num_tokens, H, salt=salt).to(dtype) for salt in (1, 2))
    all_ids = oracle.gather(ids)
    weights = global_weights(num_experts, H, I, dtype)
    layout = oracle.lay_out([t.numpy() for t in all_ids], num_experts)
    gathered = [oracle.gather(tensor) for tensor in (x, probs, dy)]
    exact = oracle.dense_moe(layout, all_ids, *gathered[:2], weights, gathered[2])
    local = slice(2 * rank, 2 * rank + 2)
    expected = (
        exact.y[rank],
        exact.dx[rank],
        exact.dprobs[rank],
        *(w[local] for w in exact.dweights),
    )
    with open_heap(device, num_bytes=16 << 20) as heap:
        x, probs, dy, ids = (tensor.to(heap.device) for tensor in (x, probs, dy, ids))
        experts = experts_of(*local_part(weights, heap), precision=recipe)
        leaves = x.requires_grad_(), probs.requires_grad_(), experts.fc1.weight, experts.fc2.weight

        def run(**options) -> list[torch.Tensor]:
            limits = {"capacity": 768, "max_tokens": 300} if options.get("stash") == "none" else {}
            plan = make_plan(ids, num_experts=num_experts, heap=heap, **limits)
            y = expert_parallel_mlp(x, probs, experts, plan, **options)
            actual = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
            del y
            findings.equal("leased bytes", heap.leased_bytes, 0)
            return actual

        for order in ("rank", "slot"):
            ways = (
                [*WAYS, *({**options, "stash": stash} for options, stash in STASHED)]
                if order == "rank"
                else STASHED_SLOT
            )
            first = None
            for options in ways:
                findings.where = f"rank {rank} of {num_ranks}, {recipe}, order {order}, {options}"
                actual = run(order=order, **options)
                first = actual if first is None else first
                findings.same_bits(actual, first)
            for name, got, want in zip(NAMES, first, expected, strict=True):
                if want.numel() > 50:  # few numbers may be small by chance
                    error = relative_error(got, want)
                    findings.check(
                        0.01 < error < 1.25 * TWO_LAYERS[element], f"{name} is off by {error}"
                    )
        if element == "e4m3":
            for wire, options in (
                ("forward", WAYS[0]),
                ("backward", WAYS[3]),
                ("both", {**WAYS[1], "stash": "none"}),
                ("both", {**WAYS[2], "stash": "rows"}),
            ):
                findings.where = f"rank {rank} of {num_ranks}, {recipe}, wire {wire}, {options}"
                actual = run(order="slot", quantized_wire=wire, **options)
                changed = (
                    {"dw1"}
                    if wire == "forward"
                    else {"dw2"}
                    if wire == "backward"
                    else {"dw1", "dw2"}
                )
                for name, got, same, want in zip(NAMES, actual, first, expected, strict=True):
                    if name not in changed:
                        findings.check(
                            torch.equal(got, same), f"{name} has other bits than without"
                        )
                        continue
                    # A row that was rounded once is rounded again along tokens: another 2.8 % at most. Where scales are
                    # powers of two, its numbers have 3 bits behind the leading one already, and nothing changes.
                    error = relative_error(got, want)
                    if recipe == Float8Block():
                        findings.check(
                            not torch.equal(got, same), f"{name} knows nothing of the wire"
                        )
                    findings.check(
                        error < 1.25 * (TWO_LAYERS[element] + ONE_PRODUCT[element] / 2),
                        f"{name}: {error}",
                    )
        findings.equal("staging copies", heap.statistics.num_staging_copies, 0)


# -- any number of ranks ----------------------------------------------------------------------------------------------
EXPERTS, TOKENS = 8, 44


def run_cut(
    rank, num_ranks, device: str, recipe, wire: str, cut: list[int], order: str
) -> dict[str, np.ndarray]:
    """Bits of this rank's part of a batch that `cut` divides between the ranks."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.rand((TOKENS, EXPERTS), generator=generator).topk(K).indices
    probs = torch.rand((TOKENS, K), generator=generator)
    x, dy = torch.randn((2, TOKENS, 64), generator=generator).bfloat16()
    tokens = slice(sum(cut[:rank]), sum(cut[: rank + 1]))
    with open_heap(device, num_bytes=8 << 20) as heap:
        weights = local_part(global_weights(EXPERTS, 64, 32, torch.bfloat16), heap)
        experts = experts_of(*weights, precision=recipe)
        ids, probs, x, dy = (tensor[tokens].to(heap.device) for tensor in (ids, probs, x, dy))
        x.requires_grad_()
        plan = make_plan(ids, num_experts=EXPERTS, heap=heap)
        y = expert_parallel_mlp(
            x,
            probs.requires_grad_(),
            experts,
            plan,
            order=order,
            schedule="always-overlapped",
            quantized_wire=wire,
        )
        y.backward(dy)
        actual = {
            "y": y,
            "dx": x.grad,
            "dprobs": probs.grad,
            "dw1": experts.fc1.weight.grad,
            "dw2": experts.fc2.weight.grad,
        }
        return {
            name: tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
            for name, tensor in actual.items()
        }


@pytest.mark.parametrize("device", [slowly("cpu"), pytest.param("cuda", marks=ON_GPUS)])
@wired((NVFP4(), "none"), (Float8Block(), "both"), (MXFP8(), "forward"))
def test_any_number_of_ranks_gives_the_same_bits(cluster, recipe, wire, device: str):
    """With order="slot", also with stochastic rounding, which depends on an expert's rows and not on their ranks."""
    want = None
    for num_ranks, cut in ((1, [44]), (2, [40, 4]), (4, [11, 0, 30, 3]))[
        : 3 if device == "cpu" else 2
    ]:
        results = cluster(num_ranks, device).run(run_cut, device, recipe, wire, cut, "slot")
        actual = {name: np.concatenate([part[name] for part in results]) for name in NAMES}
        want = actual if want is None else want
        for name in NAMES:
            assert np.array_equal(actual[name], want[name]), (num_ranks, name)
    (single,) = cluster(1, device).run(run_cut, device, replace(recipe), "none", [44], "slot")
    assert np.array_equal(single["y"], want["y"])


# -- the layer --------------------------------------------------------------------------------------------------------
@wired((NVFP4(), "none"), (Float8Block(), "both"), (MXFP8(), "backward"))
@on_ranks(cpu=(1, 2), cuda=(1, 2), marks=ON_GPUS)
@run_on()
def test_layers_in_a_row_have_the_same_bits_in_every_mode(
    rank: int, num_ranks: int, findings: Findings, device: str, recipe, wire: str
):
    """Two layers in a row have the same bits eagerly, under a mode (as operators), and recomputed."""
    config = config_for(num_ranks, precision=recipe, quantized_wire=wire)
    with open_heap(device) as heap:

        def batch() -> torch.Tensor:
            return tokens_of(rank, 9, 64).to(heap.device).requires_grad_()

        model = Stack(heap, config)
        findings.equal("precision", model.layers[0].experts.precision, recipe)
        want = step(model, batch())
        x = batch()
        with Watching():
            y = model(x)
            y.square().sum().backward()
        findings.same_bits([y.detach(), x.grad, *model.gradients()], want)
        del y

        def through(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda x: layer(x)[0], x, use_reentrant=False)

        output = model(batch(), through=through)
        findings.equal("leased bytes between forward and backward", heap.leased_bytes, 0)
        del output
        findings.same_bits(step(model, batch(), through=through), want)
        plain = Stack(heap, replace(config, precision=None, quantized_wire="none"))
        for name, got, want_tensor in zip(("y", "dx"), step(plain, batch()), want, strict=False):
            findings.check(
                1e-4 < relative_error(want_tensor, got) < 0.5,
                f"{name} is not near the layer in full",
            )
        gc.collect()
        findings.equal("leased bytes", heap.leased_bytes, 0)


@on_ranks(cpu=(1, 2), cuda=(1, 2), marks=ON_GPUS)
@wired((Float8Block(), "none"), (Float8Block(), "both"), (MXFP8(), "none"), slowly(NVFP4(), "none"))
@run_on()
def test_gradients_of_the_second_bias_have_the_bits_of_sums(
    rank: int, num_ranks: int, findings: Findings, device: str, recipe, wire: str
):
    """The gradient of FC2's bias has the bits of a kernel that only sums, in every way to run a step, also in parts."""
    right = quantized_experts.QuantizedBackward

    class Summed(right):
        def __init__(self, x, weights, hidden, d_out, **options) -> None:
            super().__init__(x, weights, hidden, d_out, **options)
            x, want = self._x, torch.empty_like(self.db2)
            d_out = self._output_gradients(), x.row_index
            self._ops.grouped_bias_grad(d_out, x.row_range, want, scale=x.bias_scale)
            findings.check(torch.equal(self.db2, want) and want.any(), "db2 has other bits")
            steps.append(x)

    quantized_experts.QuantizedBackward, steps = Summed, []
    try:
        with open_heap(device, num_bytes=16 << 20, programs="off") as heap:
            for chosen, (weights, dtype) in product(
                WAYS, (("packed", torch.float32), ("discrete", torch.bfloat16))
            ):
                findings.where = f"rank {rank} of {num_ranks}, {recipe}, wire {wire}, {chosen}, {weights}, {dtype}"
                experts = GroupedMLP(
                    2, H, I, bias=True, precision=recipe, weights=weights, device=heap.device
                )
                config = replace(
                    config_for(num_ranks, precision=recipe, quantized_wire=wire, **chosen),
                    hidden=H,
                    ffn=I,
                )
                layer = MoELayer(config, heap, experts=experts.to(dtype))
                y, _ = layer(
                    tokens_of(rank, RANK_TO_TOKENS[rank], H).to(heap.device, dtype).requires_grad_()
                )
                y.square().sum().backward()
                del y
    finally:
        quantized_experts.QuantizedBackward = right
    findings.equal("backward passes", len(steps), 2 * len(WAYS))


def test_rows_in_flight_are_awaited_before_quantisation():
    """All parts are awaited before any row is quantised."""
    call = materialized(GroupedMLP(2, 64, 32, precision=NVFP4()), torch.float32)
    weights = expert_weights(call.form, call.biases, call.tensors, trains=(True, True))
    rows = torch.randn(8, 64)
    row_range = whole_groups((5, 3))
    scale = torch.ones(8)
    want, _ = weights.first_layer(ExpertRows(rows, row_range, scale), num_rows=8)
    arriving = torch.full_like(rows, torch.nan)

    def parts():
        for begin, end in ((0, 3), (3, 8)):
            arriving[begin:end] = rows[begin:end]
            yield Part(row_range)

    actual, _ = weights.first_layer(
        ExpertRows(arriving, row_range, scale), num_rows=8, parts=parts()
    )
    assert torch.equal(actual.h, want.h)


# -- rows on the wire -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", WIRE_RECIPES, ids=str)
@pytest.mark.parametrize("hidden", [64, 160, 512])
def test_rows_of_the_wire_are_those_of_the_recipe(monkeypatch, recipe, hidden):
    """The bytes are the recipe's numbers of the row; unpacked rows have the same bytes, in any order."""
    wire = WireFormat(recipe, hidden)
    x = torch.randn(20, hidden).bfloat16()
    x[3], x[4, 5] = 0, torch.nan
    counts = count_calls(monkeypatch, "quantize_rows", "encode_rows")
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
        actual = wire.quantized(sent, row_range, row_index)
        picked = slice(None) if row_index is None else index.long()
        for name in ("data", "scale"):
            got, want = (getattr(q, name).view(torch.uint8) for q in (actual, quantized))
            assert torch.equal(got[:9], want[picked][:9]), name  # the others belong to no group
        assert actual.row_range is row_range
        for dtype in (
            torch.bfloat16,
            torch.float16,
            torch.float32,
        ):  # along tokens: of the decoded rows
            columns = wire.columns(sent, row_range, dtype, row_index)
            expected = recipe.quantize_columns(
                wire.decode(sent, dtype), row_range, row_index=row_index
            )
            assert (columns.layout, columns.num_rows, columns.row_range) == (
                "columns",
                expected.num_rows,
                row_range,
            )
            assert torch.equal(
                columns.dequantize().nan_to_num(7), expected.dequantize().nan_to_num(7)
            )
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
    """No kernel reads rows only for bias gradients, unless no product needs quantised rows."""
    num_calls = count_calls(
        monkeypatch, "dact_quantize", "scaled_activation_grad", "grouped_bias_grad", "sum_dbias"
    )
    mlp = GroupedMLP(2, 64, 128, bias=True, precision=recipe, dtype=torch.bfloat16)
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    mlp(x, [3, 5], torch.ones(8)).sum().backward()
    assert mlp.fc1.bias.grad.any()
    apart = recipe.row_format.has_global_scale  # activation and quantiser
    expected = {"dact_quantize": 1 - apart, "scaled_activation_grad": apart, "sum_dbias": 1 + apart}
    assert num_calls == {**expected, "grouped_bias_grad": 0}
    linear = GroupedLinear(2, 64, 128, bias=True, precision=recipe, dtype=torch.bfloat16)
    for is_trained in (True, False):
        num_calls.update(dict.fromkeys(num_calls, 0))
        linear(x.requires_grad_(is_trained), [3, 5]).sum().backward()
        assert (num_calls["sum_dbias"], num_calls["grouped_bias_grad"]) == (
            is_trained,
            not is_trained,
        )


@every_recipe
def test_a_weight_is_quantised_once(monkeypatch, recipe):
    """For both directions in one call if the rows have a gradient, else for forward alone; none in backward."""
    counts = count_calls(
        monkeypatch, "quantize_weights", "quantize_weight_pairs", "group_amax", "weight_amax"
    )
    linear = GroupedLinear(2, 64, 32, precision=recipe)
    mlp = GroupedMLP(2, 64, 32, precision=recipe)
    splits = torch.tensor([3, 5], dtype=torch.int32)

    def forward(module, trains_rows: bool) -> torch.Tensor:
        counts.update(dict.fromkeys(counts, 0))
        x = torch.randn(8, 64, requires_grad=trains_rows)
        return module(x, splits) if module is linear else module(x, splits, torch.ones(8))

    has_amax = recipe.weight_format.has_global_scale
    for module, num_weights in ((linear, 1), (mlp, 2)):
        y = forward(module, True)
        assert (counts["quantize_weights"], counts["quantize_weight_pairs"]) == (0, num_weights)
        assert (counts["group_amax"], counts["weight_amax"]) == (
            num_weights * has_amax,
            num_weights * has_amax,
        )
        counts.update(dict.fromkeys(counts, 0))
        y.sum().backward()
        assert (counts["quantize_weights"], counts["quantize_weight_pairs"]) == (0, 0)
        forward(module, False)  # FC2's input gradient is asked for all the same
        assert (counts["quantize_weights"], counts["quantize_weight_pairs"]) == (1, num_weights - 1)
        with torch.no_grad():
            forward(module, False)
        assert (counts["quantize_weights"], counts["quantize_weight_pairs"]) == (num_weights, 0)


# -- memory -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", [Float8Block(), MXFP8(), NVFP4()], ids=str)
@pytest.mark.parametrize("stash", ["all", "rows", "hidden", "none"])
def test_calls_save_the_planned_bytes(recipe, stash: str):
    for wire in ("none", "both") if recipe in WIRE_RECIPES else ("none",):
        options = {"precision": recipe, "quantized_wire": wire, "stash": stash, "capacity": 150}
        config = MoEConfig(
            hidden=160, ffn=96, num_experts=8, top_k=3, schedule="always-overlapped", **options
        )
        plan = plan_memory(config, num_ranks=1, num_tokens=37, dtype=torch.float32)
        assert (plan.lease_bytes_per_call, plan.activation_bytes_per_call) == bytes_kept(
            config, 37
        ), wire


@wired((Float8Block(), "both"), slowly(MXFP8(), "backward"), slowly(NVFP4(), "none"))
@run_on(2)
def test_the_heap_is_as_large_as_planned(
    rank: int, num_ranks: int, findings: Findings, recipe, wire: str
) -> None:
    """1F1B runs on a heap of as many bytes as planned, with the bits of one after the other, and not on less."""
    options = {"precision": recipe, "quantized_wire": wire, "capacity": 48, "max_tokens": 8}
    for stash, layout in (("all", "packed"), ("none", "expert-major")):
        config = config_for(num_ranks, stash=stash, layout=layout, **options)
        sizes = {
            "num_ranks": num_ranks,
            "num_tokens": 8,
            "num_layers": 2,
            "num_in_flight": 2,
            "dtype": torch.float32,
        }
        num_bytes = plan_memory(config, **sizes).heap_bytes
        with open_heap("cpu", num_bytes=num_bytes) as heap:
            model = Stack(heap, config)
            want = run_schedule(
                model, heap, [turn for i in range(3) for turn in (("F", i), ("B", i))]
            )
            findings.same_bits(run_schedule(model, heap, pipeline(3, 2)), want)
        with open_heap("cpu", num_bytes=num_bytes - ALIGNMENT_BYTES) as heap:
            error, _ = outcome(run_schedule, Stack(heap, config), heap, pipeline(3, 2))
            findings.equal(f"{stash}, {layout}: with one block less", error, "HeapExhausted")
            gc.collect()


# -- errors -----------------------------------------------------------------------------------------------------------
def test_a_configuration_is_a_value():
    config = config_for(1, precision=Float8Block(power_of_two=True), quantized_wire="forward")
    assert (config, hash(config)) == (replace(config), hash(replace(config)))
    assert config != replace(config, precision=Float8Block())
    assert config.received_layout == "packed"
    assert replace(config, ffn=1024).received_layout == "packed"
    assert (
        replace(config, ffn=1024, precision=None, quantized_wire="none").received_layout
        == "expert-major"
    )
    assert replace(config, layout="expert-major").received_layout == "expert-major"


def test_experts_must_have_the_precision_of_the_layer(heap: SymmetricHeap):
    for of_layer, of_experts in ((None, MXFP8()), (MXFP8(), None), (MXFP8(), Float8Block())):
        with pytest.raises(ArgumentError, match=r"experts.precision \(.*\) must be "):
            MoELayer(
                config_for(1, precision=of_layer),
                heap,
                experts=GroupedMLP(2, 64, 32, precision=of_experts),
            )
    layer = MoELayer(config_for(1), heap)
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
    """Layers of equal recipes share a graph of torch.compile, which has the bits of the eager layer."""
    from torch._dynamo.testing import CompileCounterWithBackend  # takes long to import

    config = config_for(1, precision=Float8Block(), quantized_wire="both")
    with SymmetricHeap(num_bytes=4 << 20, backend="host") as heap:
        layers = [MoELayer(replace(config, precision=Float8Block()), heap) for _ in range(2)]
        backend = CompileCounterWithBackend("aot_eager")
        call = torch.compile(lambda layer, x: layer(x)[0], backend=backend, fullgraph=True)
        for layer in layers:
            results = []
            for run in (call, lambda layer, x: layer(x)[0]):
                x = tokens_of(0, 9, 64).requires_grad_()
                y = run(layer, x)
                results.append(
                    [
                        y.detach(),
                        *torch.autograd.grad(y.square().sum(), (x, *layer.experts.parameters())),
                    ]
                )
                del y
            assert all(
                torch.equal(compiled_result, eager_result)
                for compiled_result, eager_result in zip(*results, strict=True)
            )
    assert backend.frame_count == 1
