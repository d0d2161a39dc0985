"""cache_quantized_weights: the bits of calls without it, one quantisation per block, no stale weight, no memory
after the block."""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from cluster import run_on
from heap_calls import expect, outcome
from layers import tokens_of
from low_precision_cases import RECIPES, config_for, count_calls
from torch.utils.checkpoint import checkpoint
from worker import Findings, Watching

import symmoe
from symmoe.errors import ArgumentError
from symmoe.precision import MXFP8, NVFP4, Float8Block, operands

SPLITS = torch.tensor([5, 0, 11], dtype=torch.int32)
KERNELS = ("quantize_weights", "quantize_weight_pairs")
MICRO_BATCHES = 3


def batches(width: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(16, width, generator=generator).to(dtype) for _ in range(MICRO_BATCHES)]


def experts(x: torch.Tensor, layer: symmoe.GroupedMLP) -> torch.Tensor:
    return layer(x, SPLITS, x.detach()[:, 0].float())


def recomputed(x: torch.Tensor, layer: symmoe.GroupedMLP) -> torch.Tensor:
    return checkpoint(experts, x, layer, use_reentrant=False)


def autocast(x: torch.Tensor, layer: symmoe.GroupedMLP) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return experts(x, layer)


def build(kind: str, recipe, **options) -> tuple[torch.nn.Module, Callable, int]:
    """A module, a function that calls it, and the number of its weights."""
    torch.manual_seed(1)
    options = {"precision": recipe, "dtype": torch.bfloat16, **options}
    if kind == "linear":
        return symmoe.GroupedLinear(3, 64, 96, **options), lambda x, layer: layer(x, SPLITS), 1
    if kind == "three":
        three = symmoe.grouped.Sequential(
            symmoe.GroupedLinear(3, 64, 64, **options),
            symmoe.grouped.ScaledSwiGLU(),
            symmoe.GroupedLinear(3, 32, 64, **options),
        )
        return three, lambda x, layer: layer(x, SPLITS, x.detach()[:, 0].float(), SPLITS), 2
    if kind == "autocast":
        options["dtype"] = torch.float32
    call = {"mlp": experts, "recomputed": recomputed, "autocast": autocast}[kind]
    return symmoe.GroupedMLP(3, 64, 32, **options), call, 2


@pytest.fixture
def mlp() -> symmoe.GroupedMLP:
    """Experts with two weights."""
    return build("mlp", Float8Block())[0]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The numbers of calls of KERNELS."""
    return count_calls(monkeypatch, *KERNELS)


@pytest.fixture
def x() -> torch.Tensor:
    return batches()[0]


def accumulate(
    module: torch.nn.Module, call: Callable, block=nullcontext
) -> dict[str, torch.Tensor]:
    """The results of several micro-batches, and their accumulated gradients."""
    results = {}
    with block():
        for i, x in enumerate(batches(dtype=next(module.parameters()).dtype)):
            x.requires_grad_()
            y = call(x, module)
            y.float().square().sum().backward()
            results |= {f"y{i}": y.detach(), f"dx{i}": x.grad}
    results |= {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    return results


def assert_same(actual: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        *(("mlp", recipe) for recipe in RECIPES),
        *((kind, Float8Block()) for kind in ("three", "recomputed", "autocast")),
        ("linear", NVFP4()),
    ],
    ids=str,
)
def test_cached_weights_have_the_bits_of_calls_without(monkeypatch, kind: str, recipe):
    module, call, num_weights = build(kind, recipe)
    counts = count_calls(monkeypatch, *KERNELS)
    want = accumulate(module, call)
    once = sum(counts.values())
    # Each weight once per micro-batch; twice where forward runs again.
    assert once == MICRO_BATCHES * num_weights * (2 if kind == "recomputed" else 1)
    counts.update(dict.fromkeys(counts, 0))
    actual = accumulate(module, call, lambda: symmoe.grouped.cache_quantized_weights(module))
    assert (counts["quantize_weights"], counts["quantize_weight_pairs"]) == (0, num_weights)
    assert_same(actual, want)
    accumulate(module, call)  # outside, each call makes its own again
    assert sum(counts.values()) == once + num_weights


@pytest.mark.parametrize(
    "options", [{"weights": "discrete"}, {"delay_wgrad": True}, {"bias": True}], ids=str
)
def test_weights_of_every_kind_have_the_same_bits(monkeypatch, options):
    module, call, num_weights = build("mlp", Float8Block(), **options)

    def run(block) -> dict[str, torch.Tensor]:
        actual = accumulate(module, call, block)
        if not module.fc1.delay_wgrad:
            return actual
        for _ in range(MICRO_BATCHES):
            module.backward_dw()
        actual |= {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
        module.zero_grad()
        return actual

    want = run(nullcontext)
    counts = count_calls(monkeypatch, *KERNELS)
    assert_same(run(lambda: symmoe.grouped.cache_quantized_weights(module)), want)
    assert sum(counts.values()) == num_weights


def test_calls_without_gradients_make_forward_operands_alone(
    mlp: symmoe.GroupedMLP, counts: dict[str, int]
):
    with symmoe.grouped.cache_quantized_weights(mlp):
        with torch.no_grad():
            want = [experts(x, mlp) for x in batches()]
        assert (counts["quantize_weights"], counts["quantize_weight_pairs"]) == (2, 0)
        y = experts(batches()[0].requires_grad_(), mlp)
        assert (counts["quantize_weights"], counts["quantize_weight_pairs"]) == (
            2,
            2,
        )
        with torch.no_grad():
            again = experts(batches()[0], mlp)
        assert torch.equal(y, want[0])
        assert torch.equal(again, want[0])
        assert (counts["quantize_weights"], counts["quantize_weight_pairs"]) == (
            2,
            2,
        )


def test_two_dtypes_are_cached_separately(monkeypatch):
    module, _, num_weights = build("autocast", Float8Block())
    counts = count_calls(monkeypatch, *KERNELS)
    x = batches(dtype=torch.float32)[0]
    want = [call(x, module).detach() for call in (experts, autocast)]
    counts.update(dict.fromkeys(counts, 0))
    with symmoe.grouped.cache_quantized_weights(module):
        actual = [call(x, module).detach() for call in (experts, autocast, experts, autocast)]
    assert sum(counts.values()) == 2 * num_weights
    assert all(map(torch.equal, actual, want * 2))
    assert want[0].dtype != want[1].dtype


def test_backward_after_the_block_uses_the_cached_operands(mlp: symmoe.GroupedMLP, monkeypatch):
    want = accumulate(mlp, experts)
    counts = count_calls(monkeypatch, *KERNELS)
    actual, ys = {}, []
    with symmoe.grouped.cache_quantized_weights(mlp):
        xs = [x.requires_grad_() for x in batches()]
        ys = [experts(x, mlp) for x in xs]
    before = sum(counts.values())
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        y.float().square().sum().backward()
        actual |= {f"y{i}": y.detach(), f"dx{i}": x.grad}
    actual |= {name: parameter.grad for name, parameter in mlp.named_parameters()}
    assert sum(counts.values()) == before
    assert_same(actual, want)


# -- stale weights ----------------------------------------------------------------------------------------------------
def test_a_step_inside_of_the_block_raises(mlp: symmoe.GroupedMLP, x: torch.Tensor):
    """The next forward pass raises, with both versions in the text; after the block calls work."""
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.5)
    with symmoe.grouped.cache_quantized_weights(mlp):
        experts(x, mlp).float().square().sum().backward()
        version = mlp.fc1.weight._version
        optimizer.step()
        text = (
            rf"weight .* is at version {mlp.fc1.weight._version}, and was at version {version} when"
        )
        with pytest.raises(ArgumentError, match=text):
            experts(x, mlp)
        with pytest.raises(ArgumentError, match=text):
            experts(x, mlp)
    fresh = copy.deepcopy(mlp)
    assert torch.equal(experts(x, mlp), experts(x, fresh))


def test_a_step_before_any_quantisation_is_allowed(mlp: symmoe.GroupedMLP):
    """Also after a failed call."""
    with symmoe.grouped.cache_quantized_weights(mlp):
        with pytest.raises(ArgumentError, match="splits"):
            experts(batches()[0][:1], mlp)
        with torch.no_grad():
            mlp.fc1.weight.mul_(2)
        actual = experts(batches()[0], mlp)
    assert torch.equal(actual, experts(batches()[0], mlp))


@pytest.mark.parametrize("weights", ["packed", "discrete"])
@pytest.mark.parametrize("kind", ["linear", "three", "mlp"])
def test_a_write_to_any_layer_raises(kind: str, weights: str):
    for number in range(1 if kind == "linear" else 2):
        module, call, _ = build(kind, Float8Block(), weights=weights)
        layer = [layer for layer in module.modules() if isinstance(layer, symmoe.GroupedLinear)][
            number
        ]
        with symmoe.grouped.cache_quantized_weights(module):
            call(batches()[0], module)
            with torch.no_grad():
                layer.weight_parameters()[-1].mul_(2)
            with pytest.raises(
                ArgumentError, match="it has been written to inside cache_quantized_weights"
            ):
                call(batches()[0], module)
        with symmoe.grouped.cache_quantized_weights(module):
            call(batches()[0], module)
            layer.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True)
            with pytest.raises(ArgumentError, match="has been replaced by another inside"):
                call(batches()[0], module)


def test_steps_between_blocks_take_effect(mlp: symmoe.GroupedMLP):
    x = batches()[0]
    results = []
    for _ in range(2):
        with symmoe.grouped.cache_quantized_weights(mlp):
            results.append(experts(x, mlp).detach())
        with torch.no_grad():
            mlp.fc1.weight.mul_(-1)
    assert not torch.equal(*results)
    with torch.no_grad():
        mlp.fc1.weight.mul_(-1)
    assert torch.equal(results[1], experts(x, mlp))


def test_writes_hidden_from_autograd_are_not_noticed(mlp: symmoe.GroupedMLP, x: torch.Tensor):
    """As documented, calls use the old numbers until the end of the block."""
    with symmoe.grouped.cache_quantized_weights(mlp):
        before = experts(x, mlp)
        mlp.fc1.weight.data.copy_(-mlp.fc1.weight.data)
        assert torch.equal(experts(x, mlp), before)
    assert not torch.equal(experts(x, mlp), before)


# -- the block --------------------------------------------------------------------------------------------------------
def test_an_exception_leaves_the_block(mlp: symmoe.GroupedMLP):
    with pytest.raises(ArgumentError, match="rows"), symmoe.grouped.cache_quantized_weights(mlp):
        experts(batches(width=32)[0], mlp)
    assert mlp.fc1.cached_weight is mlp.fc2.cached_weight is None
    with torch.no_grad():
        mlp.fc1.weight.mul_(2)
    experts(batches()[0], mlp)


def test_inner_blocks_leave_the_outer_one(mlp: symmoe.GroupedMLP, counts: dict[str, int]):
    with symmoe.grouped.cache_quantized_weights(mlp):
        for _ in range(2):
            with symmoe.grouped.cache_quantized_weights(mlp.fc1):
                experts(batches()[0], mlp)
        experts(batches()[0], mlp)
    assert sum(counts.values()) == 2


def test_layers_in_full_precision_are_left_alone():
    module, call, _ = build("mlp", None)
    want = accumulate(module, call)
    assert_same(
        accumulate(module, call, lambda: symmoe.grouped.cache_quantized_weights(module)), want
    )
    symmoe.lora.add_lora(module, rank=8, alpha=8)
    with symmoe.grouped.cache_quantized_weights(module):
        assert module.fc1.cached_weight is None
        call(batches()[0], module)
    with (
        pytest.raises(ArgumentError, match=r"module \(Linear\) has no GroupedLinear"),
        symmoe.grouped.cache_quantized_weights(torch.nn.Linear(2, 2)),
    ):
        pass


def test_copies_of_modules_have_no_cached_weights(mlp: symmoe.GroupedMLP, x: torch.Tensor):
    with symmoe.grouped.cache_quantized_weights(mlp):
        want = experts(x, mlp)
        buffer = io.BytesIO()
        torch.save(mlp, buffer)
        buffer.seek(0)
        copies = (
            copy.deepcopy(mlp),
            pickle.loads(pickle.dumps(mlp)),
            torch.load(buffer, weights_only=False),
        )
    for copied in copies:
        assert copied.fc1.cached_weight is None
        assert torch.equal(experts(x, copied), want)
    assert mlp.state_dict().keys() == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"} - {
        "fc1.bias",
        "fc2.bias",
    }


def live_bytes(dtype: torch.dtype) -> int:
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype == dtype]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def test_cached_weights_have_two_bytes_per_parameter(mlp: symmoe.GroupedMLP):
    """Two bytes of E4M3 for a parameter however many calls wait; nothing after the block and the backward passes."""
    num_parameters = sum(parameter.numel() for parameter in mlp.parameters())
    before = live_bytes(torch.float8_e4m3fn)
    with symmoe.grouped.cache_quantized_weights(mlp):
        ys = [experts(x.requires_grad_(), mlp) for x in batches()]
        num_bytes = (
            mlp.fc1.cached_weight,
            mlp.fc2.cached_weight,
        )  # as by nodes that wait for their backward pass
        assert live_bytes(torch.float8_e4m3fn) - before == 2 * num_parameters
    assert (
        live_bytes(torch.float8_e4m3fn) - before == num_parameters
    )  # backward's, which the calls share
    del ys
    assert live_bytes(torch.float8_e4m3fn) == before
    assert None not in num_bytes


@pytest.mark.parametrize(
    ("entered", "called", "text"),
    [
        (0, 7, "entered outside of a capture, and this call is inside the capture of"),
        (7, 8, "entered inside the capture of CUDA graph 7, and this call is inside"),
    ],
)
def test_a_call_of_another_graph_is_refused(
    mlp: symmoe.GroupedMLP, monkeypatch, entered: int, called: int, text: str, x: torch.Tensor
):
    """Calls in fake captures; 0 is no capture."""
    capture = entered
    monkeypatch.setattr(operands, "capture_id", lambda device: capture)
    with symmoe.grouped.cache_quantized_weights(mlp):
        experts(x, mlp)
        capture = called
        with pytest.raises(ArgumentError, match=text):
            experts(x, mlp)
        capture = entered
        experts(x, mlp)


def test_recomputation_in_another_graph_quantises_again(monkeypatch):
    """An error in a backward pass would be too late: the pass uses no memory of another graph instead."""
    module, _, _ = build("linear", Float8Block())
    capture = 0
    monkeypatch.setattr(operands, "capture_id", lambda device: capture)
    numbers = Float8Block()
    with symmoe.grouped.cache_quantized_weights(module):
        cached = module.cached_weight
        first = cached.operands(numbers, module.weight, transposed=True)
        assert cached.operands(numbers, module.weight, transposed=True)[0].data is first[0].data
        capture = 7
        assert cached.operands(numbers, module.weight, transposed=True) is None
        capture = 0
    assert cached.operands(numbers, module.weight, transposed=True) is None


# -- expert parallelism -----------------------------------------------------------------------------------------------
def run_layer(
    layer: symmoe.MoELayer, rank: int, block
) -> tuple[list[torch.Tensor], dict[str, int]]:
    """The results of several micro-batches, and the number of quantised weights."""
    results = []
    with pytest.MonkeyPatch.context() as patch, block:
        counts = count_calls(patch, *KERNELS)
        for i in range(MICRO_BATCHES):
            x = tokens_of(rank, 20, layer.config.hidden, salt=i).bfloat16().requires_grad_()
            y, _ = layer(x)
            y.float().square().sum().backward()
            results += [y.detach(), x.grad]
    results += [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    return results, counts


@pytest.mark.parametrize(("recipe", "wire"), [(Float8Block(), "both"), (MXFP8(), "none")], ids=str)
@run_on(1, 2)
def test_layers_with_cached_weights_have_the_same_bits(
    rank: int, num_ranks: int, findings: Findings, heap: symmoe.SymmetricHeap, recipe, wire: str
) -> None:
    """A MoELayer has the same bits with every stash. If one rank writes to a weight, all raise, and all continue."""
    for stash in ("all", "rows", "none") if wire == "both" else ("hidden",):
        findings.where = f"rank {rank}, {recipe}, {wire}, {stash}"
        torch.manual_seed(rank)
        layer = symmoe.MoELayer(
            config_for(num_ranks, stash=stash, precision=recipe, quantized_wire=wire), heap
        )
        want, counts = run_layer(layer, rank, nullcontext())
        actual, counts_in_block = run_layer(
            layer, rank, symmoe.grouped.cache_quantized_weights(layer)
        )
        findings.same_bits(actual, want)
        recomputes = stash in ("rows", "none")
        findings.equal("without", sum(counts.values()), MICRO_BATCHES * 2 * (1 + recomputes))
        # Where forward keeps nothing for backward: once in forward, once in backward for both directions.
        once = {"quantize_weights": 2 * recomputes, "quantize_weight_pairs": 2}
        findings.equal("quantisations", counts_in_block, once)

    x = tokens_of(rank, 20, layer.config.hidden).bfloat16()
    with symmoe.grouped.cache_quantized_weights(layer):
        want, _ = layer(x)
        if rank == num_ranks - 1:
            with torch.no_grad():
                layer.experts.fc2.weight.add_(0)
        expect(findings, outcome(layer, x), "ArgumentError", "inside cache_quantized_weights")
    again, _ = layer(x)
    findings.check(torch.equal(again, want), "other bits afterwards")
    del want, again
    gc.collect()
    findings.equal("leased bytes", heap.leased_bytes, 0)


@run_on(1)
def test_layers_under_a_dispatch_mode_have_the_same_bits(
    rank: int, num_ranks: int, findings: Findings, heap: symmoe.SymmetricHeap
) -> None:
    """Under a mode the layers are operators, which quantise by themselves, with the same bits."""
    torch.manual_seed(rank)
    layer = symmoe.MoELayer(config_for(num_ranks, precision=Float8Block()), heap)
    x = tokens_of(rank, 20, layer.config.hidden).bfloat16()
    want, _ = layer(x)
    with symmoe.grouped.cache_quantized_weights(layer), Watching():
        actual = [layer(x)[0] for _ in range(2)]
    findings.check(all(torch.equal(y, want) for y in actual), "other bits")
