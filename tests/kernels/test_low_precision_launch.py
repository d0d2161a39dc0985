"""Which products of quantised numbers are launched, and how."""

import pytest
import torch

pytest.importorskip("triton")

from compiled_launches import GENERAL_MODULES, HOPPER_MODULES
from fake_cuda import fake_jits
from quantized_problem import NAMES, Numbers, Problem, WgradProblem

from symmoe.errors import ArgumentError
from symmoe.kernels import architectures
from symmoe.kernels.low_precision import products
from symmoe.kernels.low_precision.block_scaled import scaled

BF16 = torch.bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_launched_without_rows(fake_cuda, monkeypatch, name):
    jits = fake_jits(monkeypatch, fake_cuda, *GENERAL_MODULES, *HOPPER_MODULES)
    p, q = (
        kind((0, 0), (64, 96), Numbers(name, exact=True), 0) for kind in (Problem, WgradProblem)
    )
    p.run(products, p.blank(BF16), num_sms=8)
    for accumulate in (True, False):
        out = torch.ones(q.shape)
        q.run(products, out, accumulate=accumulate)
        assert (out == (1.0 if accumulate else 0.0)).all()
    assert not any(jit.calls for jit in jits.values())


def test_gpus_with_products_of_block_scales(monkeypatch):
    assert scaled.scaled_products(torch.device("cpu")) is None
    for capability, unit in (
        ((9, 0), None),
        ((10, 0), "tcgen05"),
        ((10, 3), "tcgen05"),
        ((12, 0), "mma"),
    ):
        monkeypatch.setattr(architectures, "capability", lambda device, value=capability: value)
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
