"""Activations that quantise on a GPU: byte for byte what the kernels they fuse give, with device splits, in a graph."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs a GPU that converts to E4M3: Hopper or newer", allow_module_level=True)

import act_quantize_cases as cases
from compared_launches import differences, is_near
from graphs import captured
from host_reads import synchronising_is_an_error
from launch_table import Launch
from quantize_cases import row_range_of
from row_ranges import random_ranges

from symmoe.kernels import gpu
from symmoe.kernels.activation import Activation

CASES = [  # activation, FFN width: whole tiles and parts of them
    ("swiglu", 768),
    ("swiglu", 128),
    ("gpt-oss", 384),
    ("interleave by one", 720),
    ("interleave", 288),
    ("srelu", 720),
    ("geglu", 384),
    ("tanh gelu", 288),
]
MIXED = [("swiglu", 288), ("gpt-oss", 2880)]  # a block of 128 would have both halves of h


APART = {"reference": cases.Apart(gpu), "reference_device": "cuda"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize(("activation", "ffn"), CASES, ids=str)
def test_the_bits_of_what_is_fused(activation, ffn, name, dtype):
    for launch in cases.launches(cases.ACTIVATIONS[activation], ffn, name, dtype):
        assert differences(launch, gpu, "cuda", splits=cases.SPLITS, **APART) == []


@pytest.mark.parametrize(("activation", "ffn"), MIXED, ids=str)
def test_blocks_of_32_divide_halves_that_blocks_of_128_do_not(activation, ffn):
    forward, *_ = cases.launches(cases.ACTIVATIONS[activation], ffn, "float8_block")
    *_, backward = cases.launches(cases.ACTIVATIONS[activation], ffn, "mxfp8")
    for launch in (forward, backward):
        assert differences(launch, gpu, "cuda", splits=cases.SPLITS, **APART) == []


@pytest.mark.parametrize("name", cases.NAMES)
def test_the_bits_of_the_twin_where_the_activation_is_exact(name):
    for kernel, ways in (("act_quantize", ""), ("dact_quantize", "fp32-dbias")):
        sizes = {"I": 720}
        launch = Launch(kernel, sizes, torch.bfloat16, name, cases.ACTIVATIONS["srelu"], ways)
        assert differences(launch, gpu, "cuda", splits=cases.SPLITS) == []


def test_graph_replay_with_other_rows_and_splits():
    p = cases.Problem(cases.ACTIVATIONS["swiglu"], 256, device="cuda")
    both = captured(
        lambda: (cases.forward(gpu, p, "float8_block"), cases.backward(gpu, p, "float8_block"))
    )
    graph, (activations, (gradients, sums)) = both
    other_splits = (100, 3, 0, 0, 217, 7)
    assert sum(other_splits) == sum(cases.SPLITS)
    for seed, splits in ((3, cases.SPLITS), (4, other_splits)):
        q = cases.Problem(cases.ACTIVATIONS["swiglu"], 256, splits=splits, device="cuda", seed=seed)
        for captured_tensor, new_tensor in (
            (p.h, q.h),
            (p.da, q.da),
            (p.row_scale, q.row_scale),
            (p.row_range, row_range_of(splits)),
        ):
            captured_tensor.copy_(new_tensor)
        graph.replay()
        expected_grad, expected_sums = cases.backward(gpu, q, "float8_block")
        expected = cases.forward(gpu, q, "float8_block") | expected_grad | expected_sums
        actual = activations | gradients | sums
        assert all(is_near(tensor, expected[name], 0.0) for name, tensor in actual.items())


def test_nothing_waits_for_the_device():
    p = cases.Problem(cases.ACTIVATIONS["swiglu"], 256, device="cuda")

    def step():
        cases.forward(gpu, p, "mxfp8")
        cases.backward(gpu, p, "mxfp8")

    step()
    with synchronising_is_an_error():
        step()


@pytest.mark.timeout(
    200, method="thread"
)  # warps that wait for each other for ever cannot be interrupted
@pytest.mark.parametrize(
    "activation",
    [Activation(), Activation(limit=7.0), Activation(function="relu2", is_gated=False)],
    ids=str,
)
def test_ranges_of_rows(activation):
    splits = (0, 133, 1, 300, 0, 128, 777)
    forward, *_ = cases.launches(activation, 256, "float8_block", splits=splits)
    for part in random_ranges(splits, 4):
        assert differences(forward, gpu, "cuda", splits=splits, part=part, **APART) == []
