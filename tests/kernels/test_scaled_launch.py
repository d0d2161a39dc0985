"""Launches of the GEMMs of MXFP8 and NVFP4 numbers: after the first one they skip the JIT. See test_fast_launch.py."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from fake_cuda import assert_only_the_first_compiles, fake_cuda, fake_jits  # noqa: F401
from scaled_problem import NAMES, Numbers, Problem, WgradProblem
from test_scaled_twin import names, problem, wgrad_problem

from symmoe.errors import ArgumentError
from symmoe.kernels import architectures
from symmoe.kernels.low_precision import fp8, hopper_fp8, hopper_fp8_wgrad, scaled

BF16 = torch.bfloat16


def test_launches_are_understood(fake_cuda, monkeypatch):  # noqa: F811
    """Whatever the tensors' addresses and the number of rows and tokens."""
    jits = fake_jits(monkeypatch, fake_cuda, scaled)

    def step(splits, O=520, C=160):
        for name in NAMES:
            numbers = Numbers(name, exact=True)
            p, q = Problem(splits, (O, C), numbers), WgradProblem(splits, (O, C), numbers)
            *operands, row_range = p.operands
            out = p.blank(BF16)
            scaled.grouped_gemm_scaled(*operands, row_range, out, zero_tail=True, num_sms=8, **p.options)
            addend = {"bias": torch.empty(len(splits), O), "bias_scale": torch.empty(p.capacity)}
            scaled.grouped_gemm_scaled(*operands, row_range, out, num_sms=8, **p.options, **addend)
            options = {**p.options, "group_range": row_range, "num_sms": 8}
            scaled.grouped_gemm_scaled(*operands, row_range, out, **options)
            for accumulate in (False, True):
                gradient = torch.zeros(q.shape)
                options = {**q.options, "accumulate": accumulate, "num_sms": 8}
                scaled.grouped_gemm_wgrad_scaled(*q.operands, gradient, **options)

    assert len(jits) == 2
    assert_only_the_first_compiles(jits, step, ((40, 0, 24), (1, 0, 0), (0, 64, 0), (5, 50, 10), (300, 1, 700)))


@names
def test_nothing_is_launched_without_rows(fake_cuda, monkeypatch, name):  # noqa: F811
    jits = fake_jits(monkeypatch, fake_cuda, scaled, fp8, hopper_fp8, hopper_fp8_wgrad)
    gemm, wgrad = scaled.grouped_gemm_scaled, scaled.grouped_gemm_wgrad_scaled
    if name == "fp8":
        gemm, wgrad = fp8.grouped_gemm_fp8, fp8.grouped_gemm_wgrad_fp8
    p, q = (make(name, (0, 0), (64, 96), 0, exact=True) for make in (problem, wgrad_problem))
    gemm(*p.operands, p.blank(BF16), **getattr(p, "options", {}))
    for accumulate in (True, False):
        out = torch.ones(q.shape)
        wgrad(*q.operands, out, accumulate=accumulate, **getattr(q, "options", {}))
        assert (out == (1.0 if accumulate else 0.0)).all()
    assert not any(jit.calls for jit in jits.values())


def test_which_gpus_have_products_with_block_scales(monkeypatch):
    assert scaled.scaled_products(torch.device("cpu")) is None
    for capability, unit in (((9, 0), None), ((10, 0), "tcgen05"), ((10, 3), "tcgen05"), ((12, 0), "mma")):
        monkeypatch.setattr(architectures, "capability", lambda device, found=capability: found)
        assert scaled.scaled_products.__wrapped__(torch.device("cuda", 0)) == unit


@pytest.mark.parametrize("change", [{"block_m": 64}, {"block_n": 64}, {"block_k": 64}], ids=str)
def test_tiles_that_cut_tiles_of_scales(change):
    p = Problem((3,), (128, 128), Numbers("mxfp8", exact=True))
    with pytest.raises(ArgumentError, match="tiles must have block_m 128, block_n a multiple of it, and block_k one"):
        scaled.grouped_gemm_scaled(*p.operands, p.blank(BF16), num_sms=1, config=replace(scaled.CONFIG, **change))
    q = WgradProblem((3,), (128, 128), Numbers("mxfp8", exact=True))
    wide = replace(scaled.CONFIG, block_k=256)
    with pytest.raises(ArgumentError, match="tiles of a weight gradient must have block_k 128"):
        scaled.grouped_gemm_wgrad_scaled(*q.operands, torch.zeros(q.shape), num_sms=1, config=wide)
