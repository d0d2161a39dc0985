"""Grouped linear layers and the fused MLP on one GPU: CUDA graphs, and no waiting for the device."""

import functools
import itertools
from dataclasses import replace

import grouped_cases as cases
import numpy as np
import pytest
import torch
from graphs import captured
from host_reads import synchronising_is_an_error

from symmoe import GroupedLinear, GroupedMLP, SymmetricHeap
from symmoe.errors import ArgumentError, StaleLease
from symmoe.grouped import ScaledSwiGLU, Sequential
from symmoe.precision import MXFP8, NVFP4, Float8Block

SIZES = cases.ODD
PLAIN = cases.Case(buffers=())
inputs_of = functools.partial(cases.inputs_of, sizes=SIZES, device="cuda")


# -- what CPUs compute, too -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", cases.PATHS)
def test_more_discrete_weights_than_one_launch_carries(path):
    sizes = cases.Sizes(splits=(1, 0, 3) * 50, lead=(20, 11), hidden=16, ffn=8)
    cases.check_discrete_weights(path, cases.Case(dtype=torch.bfloat16), sizes, "cuda")


@pytest.mark.parametrize("kind", ["int32", "int64", "list", "cpu"])
@pytest.mark.parametrize(
    "splits", [(70, 0, 3, 55), (0, 0, 0, 0), (132, 0, 0, 0), (0, 0, 0, 132)], ids=str
)
@pytest.mark.parametrize("path", cases.PATHS)
def test_splits(kind, splits, path):
    device = "cpu" if kind == "cpu" else "cuda"
    argument = list(splits) if kind == "list" else torch.tensor(splits, device=device)
    cases.check_splits(
        path, argument.int() if kind == "int32" else argument, replace(SIZES, splits=splits), "cuda"
    )


# -- what only GPUs do ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("splits", "meant"),
    [
        ((70, -5, 3, 55), (70, 0, 3, 55)),
        ((70, 0, 3, 10**6), (70, 0, 3, 59)),
        ((10**6, 5, 5, 5), (132, 0, 0, 0)),
        ((2**31 - 1,) * 4, (132, 0, 0, 0)),
        ((-1,) * 4, (0,) * 4),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_device_splits_cannot_lead_out_of_the_rows(splits, meant, dtype):
    """Nobody reads them on the host, so the kernels keep within the rows."""
    sizes = replace(SIZES, splits=(132, 0, 0, 0))
    inputs = inputs_of("mlp", PLAIN, sizes=sizes)  # no NaN: every row may be used
    got = cases.run_experts(
        "mlp", PLAIN, inputs, splits=torch.tensor(splits, dtype=dtype, device="cuda")
    )
    want = cases.run_experts(
        "mlp", PLAIN, inputs, splits=torch.tensor(meant, dtype=dtype, device="cuda")
    )
    for name, tensor in want.tensors.items():
        cases.assert_same_bits(got.tensors[name], tensor, name)


@pytest.mark.parametrize("sizes", [{"hidden": 12}, {"ffn": 12}, {"hidden": 12, "ffn": 12}], ids=str)
def test_widths_that_kernels_cannot_take(sizes):
    """fc2's input of 12 features is as wrong as fc1's, though fc1's output of 24 is right."""
    model = GroupedMLP(4, **{"hidden": 16, "ffn": 16} | sizes, device="cuda")
    rows = torch.ones(8, model.hidden, device="cuda")
    splits = torch.tensor([2, 2, 2, 2], device="cuda")
    with pytest.raises(ArgumentError, match=r"\(12\) must be a multiple of 8 on GPUs"):
        model(rows, splits, torch.ones(8, device="cuda"))
    with pytest.raises(ArgumentError, match=r"\(12\) must be a multiple of 8 on GPUs"):
        Sequential(model.fc1, ScaledSwiGLU(), model.fc2)(
            rows, splits, torch.ones(8, device="cuda"), splits
        )


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_the_same_bits_every_time(dtype):
    case = cases.Case(dtype=dtype, buffers=())
    inputs = inputs_of("mlp", case)
    for path in cases.PATHS:
        first = cases.run_experts(path, case, inputs)
        for _ in range(3):
            cases.assert_same_results(cases.run_experts(path, case, inputs), first, SIZES)


# -- CUDA graphs ------------------------------------------------------------------------------------------------------
def model_of(path: str, case: cases.Case, inputs: cases.Inputs, **options):
    """(call(x, scale, splits, out, grad_input_out), the layers)."""
    function, layers = cases.make_way(path, case, inputs, **options)

    def call(x, scale, splits, out, grad_input_out):
        return function(
            x, scale, splits, out=out, grad_input_out=grad_input_out, is_first_microbatch=True
        )

    return call, tuple(layers.values())


REPLAYED = [
    ((70, 0, 3, 55), 1),
    ((0, 0, 0, 0), 2),
    ((1, 130, 0, 1), 3),
    ((0, 0, 0, 131), 4),
    ((33, 33, 33, 33), 5),
]

NUMBERS = {
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    **{
        type(recipe).__name__: (torch.bfloat16, recipe)
        for recipe in (Float8Block(), MXFP8(), NVFP4())
    },
}
WEIGHTS = ("packed", "side by side", "scattered")
# Every pair of two options of a capture.
CAPTURED = [
    (path, numbers, weights, *(bool(index * step // 4 & 1) for step in (1, 2, 3)))
    for index, (path, numbers, weights) in enumerate(
        itertools.product(("linear", "modules", "sequential", "mlp"), NUMBERS, WEIGHTS)
    )
]
WHOLE_BLOCKS = cases.Sizes(
    splits=SIZES.splits, lead=SIZES.lead, hidden=160, ffn=96
)  # recipes want multiples of 16 or 32


def test_pairs_of_options_are_captured():
    for first, second in itertools.combinations(range(6), 2):
        pairs = {(case[first], case[second]) for case in CAPTURED}
        assert len(pairs) == len({case[first] for case in CAPTURED}) * len(
            {case[second] for case in CAPTURED}
        )


@pytest.mark.parametrize(("path", "numbers", "weights", "main_grad", "delayed", "bias"), CAPTURED)
def test_graph_replays_with_other_data_and_other_splits(
    path, numbers, weights, main_grad, delayed, bias
):
    dtype, recipe = NUMBERS[numbers]
    case = cases.Case(dtype=dtype, main_grad=main_grad, delayed=delayed, bias=bias)
    shape = SIZES if recipe is None else WHOLE_BLOCKS
    widths = {"width": 96, "out_features": 96} if path == "linear" else {}
    make = functools.partial(inputs_of, "mlp", case, **widths)
    inputs = make(sizes=shape)
    form = "packed" if weights == "packed" else "discrete"
    call, layers = model_of(path, case, inputs, weights=form, precision=recipe)
    if weights == "scattered":
        for parameter in (p for layer in layers for p in layer.weight_parameters()):
            parameter.data = parameter.data.clone()
            if main_grad:
                parameter.main_grad = parameter.main_grad.clone()
    parameters = [p for layer in layers for p in layer.parameters()]
    columns = inputs.d_y.shape[-1]
    x = inputs.x.clone().requires_grad_()
    scale = inputs.scale.clone().requires_grad_()
    d_y, splits = inputs.d_y.clone(), inputs.splits
    out = x.new_full((shape.num_rows, columns), cases.SENTINEL)
    grad_input_out = torch.full_like(x, cases.SENTINEL).detach()

    def step(out, grad_input_out):
        """Forward and backward; the gradients of x, scale and all parameters."""
        for tensor in (x, scale, *parameters):
            tensor.grad = None
        call(x, scale, splits, out, grad_input_out).backward(d_y)
        for layer in reversed(layers):
            layer.backward_dw()
        weights = [p.main_grad if hasattr(p, "main_grad") else p.grad for p in parameters]
        return [x.grad, scale.grad, *weights]

    graph, grads = captured(lambda: step(out, grad_input_out))
    for counts, seed in REPLAYED:
        sizes = replace(shape, splits=counts)
        fresh = make(sizes=sizes, seed=seed)
        with torch.no_grad():
            for static, value in (
                (x, fresh.x),
                (scale, fresh.scale),
                (d_y, fresh.d_y),
                (splits, fresh.splits),
            ):
                static.copy_(value)
        out.fill_(cases.SENTINEL)
        grad_input_out.fill_(cases.SENTINEL)
        graph.replay()
        torch.cuda.synchronize()
        for buffer in (out, grad_input_out):
            assert (buffer[sizes.num_used :] == cases.SENTINEL).all(), "the tail was written"
        replayed = [
            out[: sizes.num_used].clone(),
            grad_input_out[: sizes.num_used].clone(),
            *(None if grad is None else grad.clone() for grad in grads),
        ]
        out_again = torch.full_like(out, cases.SENTINEL)
        grad_again = torch.full_like(grad_input_out, cases.SENTINEL)
        eager = step(out_again, grad_again)
        eager = [out_again[: sizes.num_used], grad_again[: sizes.num_used], *eager]
        assert len(replayed) == len(eager)
        for i, (got, want) in enumerate(zip(replayed, eager, strict=True)):
            assert (got is None) == (want is None)
            if got is None:
                continue
            cases.assert_same_bits(got, want, f"tensor {i} with splits {counts}")


@pytest.mark.parametrize("path", ["linear", "sequential"])
@pytest.mark.parametrize("kind", ["list", "cpu", "array"])
def test_host_splits_in_a_capture(path, kind):
    """They would be frozen into the graph. The error leaves the capture alive."""
    inputs = inputs_of(path, PLAIN)
    call, _ = model_of(path, PLAIN, inputs)
    host = {"list": list, "cpu": torch.tensor, "array": np.array}[kind](SIZES.splits)
    splits, outputs = inputs.splits, []
    with torch.no_grad():
        want = call(inputs.x, inputs.scale, splits, None, None)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with pytest.raises(ArgumentError, match="CUDA graph that is being captured"):
                call(inputs.x, inputs.scale, host, None, None)
            outputs.append(call(inputs.x, inputs.scale, splits, None, None))
        graph.replay()
        torch.cuda.synchronize()
    cases.assert_same_bits(outputs[0], want)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int16, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
)
def test_splits_of_any_integers_in_a_graph(dtype):
    """They are converted on the device, in the graph: a replay reads those of then."""
    inputs = inputs_of("linear", PLAIN)
    call, _ = model_of("linear", PLAIN, inputs)
    splits = inputs.splits.to(dtype)
    new_splits = torch.tensor([3, 70, 0, 55], device="cuda")
    with torch.no_grad():
        want = call(inputs.x.nan_to_num(), inputs.scale, new_splits, None, None)
        graph, y = captured(lambda: call(inputs.x.nan_to_num(), inputs.scale, splits, None, None))
        splits.copy_(new_splits)
        graph.replay()
    cases.assert_same_bits(y, want)


def test_another_default_device():
    inputs = inputs_of("linear", PLAIN)
    call, _ = model_of("linear", PLAIN, inputs)
    want = call(inputs.x, inputs.scale, inputs.splits, None, None)
    for device in ("meta", "cuda", "cpu"):
        with torch.device(device):
            cases.assert_same_bits(
                call(inputs.x, inputs.scale, list(SIZES.splits), None, None), want
            )


# -- no waiting for the device ----------------------------------------------------------------------------------------
def test_synchronising_is_found():
    with synchronising_is_an_error(), pytest.raises(RuntimeError, match="synchronizing"):
        torch.ones(1, device="cuda").item()


@pytest.mark.parametrize("kind", ["int32", "int64", "int16", "uint8", "list"])
@pytest.mark.parametrize("weights", ["packed", "discrete"])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("path", ["linear", "modules", "sequential"])
def test_no_host_synchronisation(path, delayed, weights, kind):
    case = cases.Case(dtype=torch.bfloat16, delayed=delayed)
    inputs = inputs_of(path, case)
    call, layers = model_of(path, case, inputs, weights=weights)
    x = inputs.x.clone().requires_grad_()
    scale = inputs.scale.clone().requires_grad_()
    buffers = cases.Buffers.of(case, inputs, out_features=inputs.d_y.shape[-1])
    splits = list(SIZES.splits) if kind == "list" else inputs.splits.to(getattr(torch, kind))
    for _ in range(2):  # the second time with gradients that are there already
        with synchronising_is_an_error():
            call(x, scale, splits, buffers.out, buffers.grad_input_out).backward(inputs.d_y)
            for layer in layers:
                layer.backward_dw()
    assert x.grad is not None


def test_runs_on_the_current_stream():
    """x, splits and d_y are made by slow work of the same side stream."""
    case = cases.Case(dtype=torch.bfloat16, buffers=())
    inputs = inputs_of("linear", case)
    layer: GroupedLinear = cases.make_linear(case, inputs.w1, inputs.b1, weights="discrete")
    want = cases.run(lambda x, scale: layer(x, inputs.splits), {"fc": layer}, inputs, case)
    layer.zero_grad()
    side = torch.cuda.Stream()
    late = [torch.zeros_like(tensor) for tensor in (inputs.x, inputs.d_y, inputs.splits)]
    tensors = (inputs.x, inputs.d_y, inputs.splits)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        for static, value in zip(late, tensors, strict=True):
            static.copy_(value)
        x = late[0].requires_grad_()
        y = layer(x, late[2])
        y.backward(late[1])
    torch.cuda.synchronize()
    cases.assert_same_bits(cases.used(y.detach(), SIZES), cases.used(want.tensors["y"], SIZES))
    cases.assert_same_bits(cases.used(x.grad, SIZES), cases.used(want.tensors["d_x"], SIZES))
    cases.assert_same_bits(layer.weight0.grad, want.tensors["d_fc.weight"][0])


# -- buffers that are written again -----------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["linear", "modules", "sequential"])
def test_raw_writes_under_saved_tensors_are_errors(path):
    inputs = inputs_of(path, PLAIN)
    call, _ = model_of(path, PLAIN, inputs)
    x, splits = inputs.x.nan_to_num().requires_grad_(), inputs.splits
    out = inputs.d_y.nan_to_num()
    grad_input_out = inputs.x.nan_to_num()
    square = call(x, inputs.scale, splits, out, None) ** 2
    call(x, inputs.scale, splits, out, None)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()
    product = torch.ones_like(x, requires_grad=True) * grad_input_out
    call(x, inputs.scale, splits, None, grad_input_out).backward(inputs.d_y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("path", ["linear", "modules", "sequential"])
def test_leaf_accumulates_over_micro_batches(path):
    case = cases.Case(buffers=("out", "grad_input_out"))
    inputs = inputs_of(path, case)
    call, _ = model_of(path, PLAIN, inputs)
    x, splits = inputs.x.nan_to_num().requires_grad_(), inputs.splits
    buffers = cases.Buffers.of(case, inputs, out_features=inputs.d_y.shape[-1])
    for _ in range(2):
        call(x, inputs.scale, splits, buffers.out, buffers.grad_input_out).backward(inputs.d_y)
    cases.assert_same_bits(cases.used(x.grad, SIZES), 2 * cases.used(buffers.grad_input_out, SIZES))
    assert not buffers.out.requires_grad
    assert not buffers.grad_input_out.requires_grad


@pytest.mark.parametrize("path", ["linear", "modules", "sequential"])
def test_losses_that_are_kept_keep_no_leases(path):
    """Backward runs in a thread of autograd's: nothing of a spent graph may outlive it."""
    case = cases.Case(buffers=("out", "grad_input_out"))
    inputs = inputs_of(path, case)
    call, _ = model_of(path, PLAIN, inputs)
    x, splits, losses = inputs.x.nan_to_num().requires_grad_(), inputs.splits, []
    with SymmetricHeap(num_bytes=4 << 20) as heap:
        for _ in range(200):
            out, grad_input_out = (
                heap.lease(tuple(like.shape), like.dtype) for like in (inputs.d_y, x)
            )
            y = call(x, inputs.scale, splits, out.tensor, grad_input_out.tensor)
            losses.append(cases.used(y, SIZES).square().sum())
            del out, grad_input_out, y
            losses[-1].backward()
            assert heap.leased_bytes == 0
        assert not heap.owns(x.grad)
        with heap.lease(tuple(inputs.d_y.shape), inputs.d_y.dtype, name="mine") as lease:
            stale = lease.tensor
        with pytest.raises(StaleLease, match="d_y is memory of lease 'mine'"):
            call(x, inputs.scale, splits, None, None).backward(stale)
