"""The activation kernels, separate and fused with GEMMs, on a GPU: against float64, and each other."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import gemm_problem
from gemm_problem import (
    ActProblem,
    Scattered,
    assert_near,
    check_a_forgotten_range,
    check_act,
    check_act_ranges,
    check_activation,
    check_fused,
    check_nan_goes_through,
    gate_columns,
)
from row_ranges import random_ranges

from symmoe.kernels.activation import Activation
from symmoe.kernels.triton import gemm_act
from symmoe.kernels.triton.tiles import TileConfig

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# H, I: tiles fit exactly; neither tiles nor contraction steps fit; smaller than a tile.
WIDTHS = [(1024, 768), (1032, 712), (64, 48)]
# As many groups everywhere, because every number of groups is compiled anew.
SPLITS = [(300, 0, 1, 777, 128, 129, 0), (0,) * 7, (0, 64, 0, 1000, 0, 0, 9)]
ACTIVATIONS = {
    "swiglu": Activation(),
    "gpt-oss": Activation(alpha=1.702, limit=1.0, offset=1.0, interleave=1),
    "blocks": Activation(interleave=8),
    "srelu": Activation(function="relu2", is_gated=False),
    "geglu": Activation(function="gelu"),
    "tanh gelu": Activation(function="gelu_tanh", is_gated=False),
}

kernels = gemm_problem.triton_kernels()
Problem = functools.partial(ActProblem, device="cuda")
forward, backward = (functools.partial(each, kernels) for each in (gemm_problem.forward, gemm_problem.backward))
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
activations = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)


@dtypes
@activations
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_against_float64(widths, activation, dtype):
    for splits in SPLITS:
        check_act(kernels, Problem(splits, widths, dtype, activation), cases=itertools.product((False, True), repeat=2))


BASE = {"block_m": 128, "block_n": 128, "block_k": 64, "num_stages": 3, "num_warps": 8}
VARIANTS = {
    "parts 4": {"parts": 4},
    "lead 1": {"parts": 4, "lead": 1, "flatten": True},
    "lead 2": {"parts": 4, "lead": 2},
    "wide": {"block_n": 256, "parts": 8, "lead": 2, "flatten": True},
    "narrow": {"block_m": 64, "block_n": 64, "parts": 2},
}


@pytest.mark.parametrize("activation", [ACTIVATIONS["swiglu"], ACTIVATIONS["blocks"]], ids=["halves", "blocks"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_tile_configs(variant, activation):
    """What a sweep may choose must be right before it is fast."""
    config = TileConfig(**{**BASE, **VARIANTS[variant]})
    act_config = replace(gemm_act.ACT_CONFIG, flatten=config.flatten, parts=config.parts)
    p = Problem(SPLITS[0], WIDTHS[1], torch.bfloat16, activation)
    cases = itertools.product((False, True), repeat=2)
    check_act(kernels, p, {"config": act_config}, {"config": config}, cases=cases)


@dtypes
@activations
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_fused_is_bitwise_the_three_modules(widths, activation, dtype):
    check_fused(kernels, Problem(SPLITS[0], widths, dtype, activation))


@dtypes
@activations
def test_elementwise_kernels(activation, dtype):
    for (_, ffn), num_rows in itertools.product(WIDTHS, (0, 1, 8, 1001)):
        check_activation(kernels, Problem((num_rows,), (64, ffn), dtype, activation), dscale_dtype=dtype)


@activations
def test_nan_goes_through(activation):
    check_nan_goes_through(kernels, activation, "cuda")


@dtypes
@pytest.mark.parametrize("interleave", [1, 2, 4, 8, 16, 32])
def test_interleaved_features_give_the_bits_of_two_halves(interleave, dtype):
    """The same features in another order: a, dscale and (in that order) h, dh and dbias are the same."""
    halves, blocks = Activation(), Activation(interleave=interleave)
    p = Problem(SPLITS[0], (136, 416), dtype, halves)
    q = Problem(SPLITS[0], (136, 416), dtype, blocks)
    order = torch.cat(gate_columns(p.ffn, blocks, "cuda"))
    for name in ("scale", "weight2"):
        setattr(q, name, getattr(p, name))
    q.weight1[:, order], q.bias[:, order] = p.weight1, p.bias
    rows = p.packed, p.row_index
    h, a = forward(p, rows, bias=p.bias)
    h_q, a_q = forward(q, rows, bias=q.bias)
    dh, a_again, dscale, dbias = backward(p, rows, h)
    dh_q, a_again_q, dscale_q, dbias_q = backward(q, rows, h_q)
    n = p.num_rows
    pairs = ((h, h_q[:, order]), (a, a_q), (dh, dh_q[:, order]), (a_again, a_again_q))
    for left, right in pairs:
        assert torch.equal(left[:n], right[:n])
    assert_near(dscale, dscale_q)
    assert_near(dbias, dbias_q[:, order])


def same_bits(p, left, right):
    """Rows of groups, and whatever is not rows."""
    for a, b in zip(left, right, strict=True):
        rows = slice(p.num_rows) if a.shape[0] == p.capacity else slice(None)
        assert torch.equal(a[rows], b[rows])


@dtypes
@activations
@pytest.mark.parametrize("widths", WIDTHS[:2], ids=str)
def test_tables_of_weights_give_the_bits_of_packed_weights(widths, activation, dtype):
    p = Problem(SPLITS[0], widths, dtype, activation)
    scattered1, scattered2 = Scattered(p.weight1), Scattered(p.weight2)
    for rows in (p.rows, (p.packed, p.row_index)):
        h, a = forward(p, rows, bias=p.bias)
        same_bits(p, (h, a), forward(p, rows, weight=scattered1.table, bias=p.bias))
        same_bits(p, backward(p, rows, h), backward(p, rows, h, weight=scattered2.table))


@dtypes
@activations
def test_repeated_runs_and_other_grids_give_the_same_bits(activation, dtype):
    p = Problem(SPLITS[0], WIDTHS[1], dtype, activation)
    rows = p.packed, p.row_index
    h, a = forward(p, rows)
    gradients = backward(p, rows, h)
    assert torch.equal(a, gradients[1])
    for num_sms in (None, 100, 1):
        same_bits(p, (h, a), forward(p, rows, num_sms=num_sms))
        same_bits(p, gradients, backward(p, rows, h, num_sms=num_sms))


@dtypes
@pytest.mark.parametrize("activation", [ACTIVATIONS["swiglu"], ACTIVATIONS["blocks"]], ids=["halves", "blocks"])
@pytest.mark.parametrize("step", [1, 128])
def test_ranges_of_rows_give_the_bits_of_the_whole(step, activation, dtype):
    """By the kernels that the functions choose, and by Triton's; with fewer SMs."""
    for splits, widths in ((SPLITS[0], WIDTHS[1]), (SPLITS[2], WIDTHS[0])):
        p = Problem(splits, widths, dtype, activation)
        act_options = {"config": gemm_act.act_config(p.ffn, dtype, activation)}
        configs = {"act_options": act_options, "dact_options": {"config": gemm_act.dact_config(p.ffn, dtype)}}
        parts = random_ranges(splits, 3, step=step)
        check_act_ranges(kernels, p, parts)
        check_act_ranges(kernels, p, parts, gather=True, bias=p.bias, num_sms=7, **configs)


def test_a_forgotten_range_is_seen():
    p = Problem(SPLITS[0], WIDTHS[0], torch.bfloat16, ACTIVATIONS["swiglu"])
    check_a_forgotten_range(kernels, p, 3, 100)


@dtypes
@pytest.mark.parametrize("before", [1, 63, 128, 500])
def test_an_experts_bits_do_not_depend_on_the_others(before, dtype):
    """777 rows alone, and the same rows between others."""
    size, activation = 777, Activation()
    alone = Problem((size,), WIDTHS[1], dtype, activation)
    among = Problem((before, size, 0, 65), WIDTHS[1], dtype, activation, seed=1)
    span = slice(before, before + size)
    for name in ("rows", "h", "scale"):
        getattr(among, name)[span] = getattr(alone, name)[:size]
    for name in ("weight1", "weight2", "bias"):
        getattr(among, name)[1] = getattr(alone, name)[0]
    results = [(*forward(p, p.rows, bias=p.bias), *backward(p, p.rows, p.h)) for p in (alone, among)]
    for left, right in zip(*(r[:-1] for r in results), strict=True):
        assert torch.equal(left[:size], right[span])
    assert torch.equal(results[0][-1][0], results[1][-1][1])


def test_no_rows():
    """Nothing is launched; the gradient of the bias is zero."""
    p = Problem((0, 0), (64, 96), torch.bfloat16, Activation(), capacity=0)
    forward(p, p.rows, bias=p.bias)
    *_, dbias = backward(p, p.rows, p.h)
    assert not dbias.any()
