"""Launches of low precision: after the first one they skip the JIT. See test_fast_launch.py."""

import pytest
import torch

pytest.importorskip("triton")

import compiled_launches
import low_precision_launches as launches
from compiled_launches import meta
from fake_cuda import assert_only_the_first_compiles, fake_jits
from quantize_cases import FORMATS
from quantized_problem import NAMES, Numbers, Problem, WgradProblem

from symmoe.errors import ArgumentError
from symmoe.kernels import architectures
from symmoe.kernels.activation import Activation
from symmoe.kernels.bias_sums import empty_row_sums
from symmoe.kernels.low_precision import act_quantized, fp8, hopper_fp8, products, quantize
from symmoe.kernels.low_precision import hopper_dact_quantize as hopper_dact
from symmoe.kernels.low_precision import hopper_fp8_wgrad as hopper_wgrad
from symmoe.kernels.low_precision.block_scaled import scaled
from symmoe.kernels.triton import bias, gemm_act

BF16 = torch.bfloat16
FLOAT8_BLOCK = FORMATS["float8_block"]


class Hopper:
    """Stands for products.py, with the kernels for Hopper."""

    grouped_gemm_quantized = hopper_fp8.launch_fp8_gemm
    grouped_gemm_wgrad_quantized = hopper_wgrad.launch_fp8_wgrad


def test_launches_of_products_are_understood(fake_cuda, monkeypatch):
    """Whatever the tensors' addresses and the number of rows and tokens."""
    jits = fake_jits(monkeypatch, fake_cuda, scaled, fp8, hopper_fp8, hopper_wgrad)

    def step(splits, O=520, C=160):
        for kernels, name in ((Hopper, "fp8"), *((products, name) for name in NAMES)):
            numbers = Numbers(name, exact=True)
            p, q = Problem(splits, (O, C), numbers), WgradProblem(splits, (O, C), numbers)
            addend = {"bias": (torch.empty(len(splits), O), torch.empty(p.capacity))}
            for row_range, options in (
                (None, {"zero_tail": True}),
                (None, addend),
                (p.row_range, {}),
            ):
                p.run(kernels, p.blank(BF16), row_range, num_sms=8, **options)
            for accumulate in (False, True):
                q.run(kernels, torch.zeros(q.shape), accumulate=accumulate, num_sms=8)

    assert len(jits) == 6
    assert_only_the_first_compiles(
        jits, step, ((40, 0, 24), (1, 0, 0), (0, 64, 0), (5, 50, 10), (300, 1, 700))
    )


@pytest.fixture
def with_rows(monkeypatch):
    """with_rows(number): from now on operands of launches are small tensors of so many rows."""
    monkeypatch.setattr(compiled_launches, "DEVICE", "cpu")
    monkeypatch.setattr(launches, "G", 4)
    monkeypatch.setattr(launches, "C", 144)
    return lambda number: monkeypatch.setattr(launches, "N", number)


def test_launches_of_activations_are_understood(fake_cuda, monkeypatch, with_rows):
    """Whatever the tensors' addresses and the number of rows and tokens."""
    jits = fake_jits(monkeypatch, fake_cuda, act_quantized, hopper_dact, gemm_act, bias)

    def step(num_rows):
        with_rows(num_rows)
        launches.launch_act("swiglu", 256, "float8_block")
        for dbias_dtype in (None, BF16):
            inputs = launches.dact_inputs(512, 256, "float8_block", dbias_dtype=dbias_dtype)
            act_quantized.dact_quantize(*inputs, Activation(), FLOAT8_BLOCK)
            arguments = act_quantized.dact_arguments(*inputs)
            hopper_dact.launch_dact_quantize(arguments, Activation(), FLOAT8_BLOCK, num_sms=8)

    used = {
        "hopper_dact_quantize_kernel",
        "act_quantize_rows_kernel",
        "dact_quantize_kernel",
        "sum_dbias_kernel",
    }
    assert_only_the_first_compiles({name: jits[name] for name in used}, step, (64, 1, 64, 65, 4096))


def test_launches_that_quantise_rows_are_understood(fake_cuda, monkeypatch, with_rows):
    """With sums for a bias gradient and without."""
    jits = fake_jits(monkeypatch, fake_cuda, quantize, bias)

    def step(num_rows):
        with_rows(num_rows)
        dbias = meta(4, 144, dtype=BF16)
        sums = empty_row_sums(num_rows, dbias)
        for options in ({}, {"sums": (sums, meta(num_rows, dtype=torch.float32))}):
            launches.launch_rows("float8_block", BF16, **options)
        bias.sum_dbias(sums, meta(2, 4), dbias)

    used = {name: jits[f"{name}_kernel"] for name in ("quantize_rows", "sum_dbias")}
    assert_only_the_first_compiles(used, step, (64, 1, 64, 65, 4096))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_launched_without_rows(fake_cuda, monkeypatch, name):
    jits = fake_jits(monkeypatch, fake_cuda, scaled, fp8, hopper_fp8, hopper_wgrad)
    p, q = (
        kind((0, 0), (64, 96), Numbers(name, exact=True), 0) for kind in (Problem, WgradProblem)
    )
    p.run(products, p.blank(BF16), num_sms=8)
    for accumulate in (True, False):
        out = torch.ones(q.shape)
        q.run(products, out, accumulate=accumulate)
        assert (out == (1.0 if accumulate else 0.0)).all()
    assert not any(jit.calls for jit in jits.values())


def test_which_gpus_have_products_with_block_scales(monkeypatch):
    assert scaled.scaled_products(torch.device("cpu")) is None
    for capability, unit in (
        ((9, 0), None),
        ((10, 0), "tcgen05"),
        ((10, 3), "tcgen05"),
        ((12, 0), "mma"),
    ):
        monkeypatch.setattr(architectures, "capability", lambda device, found=capability: found)
        assert scaled.scaled_products.__wrapped__(torch.device("cuda", 0)) == unit


@pytest.mark.parametrize("change", [{"block_m": 64}, {"block_n": 64}, {"block_k": 64}], ids=str)
def test_tiles_that_cut_tiles_of_scales_are_refused(change):
    p, q = (
        kind((3,), (128, 128), Numbers("mxfp8", exact=True)) for kind in (Problem, WgradProblem)
    )
    with pytest.raises(
        ArgumentError,
        match="tiles must have block_m 128, block_n a multiple of it, and block_k one",
    ):
        p.run(products, p.blank(BF16), num_sms=1, **change)
    with pytest.raises(ArgumentError, match="tiles of a weight gradient must have block_k 128"):
        q.run(products, torch.zeros(q.shape), num_sms=1, block_k=256)
