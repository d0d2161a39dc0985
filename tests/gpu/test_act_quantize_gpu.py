"""Activations that quantise on a GPU: byte for byte what the kernels they fuse give, with device splits, in a graph."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs a GPU that converts to E4M3: Hopper or newer", allow_module_level=True)

import act_quantize_cases as cases
from graphs import captured
from host_reads import synchronising_is_an_error
from quantize_cases import differences, row_range_of
from row_ranges import random_ranges

from symmoe.kernels import gpu, twin
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", cases.NAMES)
@pytest.mark.parametrize(("activation", "ffn"), CASES, ids=str)
def test_the_bits_of_what_is_fused(activation, ffn, name, dtype):
    cases.check_fusion(
        gpu, cases.Problem(cases.ACTIVATIONS[activation], ffn, dtype, device="cuda"), name
    )


@pytest.mark.parametrize(("activation", "ffn"), MIXED, ids=str)
def test_blocks_of_32_divide_halves_that_blocks_of_128_do_not(activation, ffn):
    p = cases.Problem(cases.ACTIVATIONS[activation], ffn, device="cuda")
    assert (
        differences(
            cases.forward(gpu, p, "float8_block"), cases.forward_apart(gpu, p, "float8_block")
        )
        == []
    )
    assert (
        differences(cases.backward(gpu, p, "mxfp8")[0], cases.backward_apart(gpu, p, "mxfp8")[0])
        == []
    )


@pytest.mark.parametrize("name", cases.NAMES)
def test_the_bits_of_the_twin_where_the_activation_is_exact(name):
    p = cases.exact_problem(720)
    expected, (expected_grad, wanted) = cases.forward(twin, p, name), cases.backward(twin, p, name)
    p.device = "cuda"
    p.h, p.da, p.row_scale, p.row_range = (x.cuda() for x in (p.h, p.da, p.row_scale, p.row_range))
    assert differences(cases.forward(gpu, p, name), expected) == []
    found, sums = cases.backward(gpu, p, name)
    assert differences(found, expected_grad) == []
    cases.assert_same_sums(sums, wanted)


def test_differences_are_noticed():
    cases.check_that_differences_are_noticed(
        gpu, cases.Problem(cases.ACTIVATIONS["swiglu"], 256, device="cuda")
    )


def test_graph_replay_with_other_rows_and_splits():
    p = cases.Problem(cases.ACTIVATIONS["swiglu"], 256, device="cuda")
    both = captured(
        lambda: (cases.forward(gpu, p, "float8_block"), cases.backward(gpu, p, "float8_block"))
    )
    graph, (found, (found_grad, sums)) = both
    other = (100, 3, 0, 0, 217, 7)
    assert sum(other) == sum(cases.SPLITS)
    for seed, splits in ((3, cases.SPLITS), (4, other)):
        q = cases.Problem(cases.ACTIVATIONS["swiglu"], 256, splits=splits, device="cuda", seed=seed)
        for here, there in (
            (p.h, q.h),
            (p.da, q.da),
            (p.row_scale, q.row_scale),
            (p.row_range, row_range_of(splits)),
        ):
            here.copy_(there)
        graph.replay()
        assert differences(found, cases.forward_apart(gpu, q, "float8_block")) == []
        expected, wanted = cases.backward_apart(gpu, q, "float8_block")
        assert differences(found_grad, expected) == []
        cases.assert_same_sums(sums, wanted)


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
    p = cases.Problem(activation, 256, splits=splits, device="cuda")
    cases.check_ranges(gpu, p, "float8_block", random_ranges(splits, 4))
