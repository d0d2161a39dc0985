"""The E4M3 GEMM with an activation on Hopper: the bits of the product followed by act_quantize, on either."""

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from fp8_problem import SENTINEL, Numbers, Problem

from symmoe.kernels import gpu
from symmoe.kernels.act_quantized import FLOAT8_BLOCK
from symmoe.kernels.activation import Activation
from symmoe.kernels.gpu import hopper

BF16, FP16 = torch.bfloat16, torch.float16
if hopper.kernels(torch.device("cuda", 0), BF16, 256) is None:
    pytest.skip("needs a Triton that has the kernels", allow_module_level=True)

from symmoe.kernels.gpu.hopper import launchers  # noqa: E402

# A kernel whose warps wait for each other for ever cannot be interrupted: the process ends.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(40, method="thread")]

SPLITS = [(300, 0, 1, 777, 128, 129, 0), (0,) * 7, (0, 64, 0, 1000, 0, 0, 9)]
WIDTHS = [(256, 1024), (1152, 720), (128, 48)]  # I, C
FILL = 0xA5


def problem(splits, widths, seed=0):
    ffn, in_width = widths
    p = Problem(splits, (2 * ffn, in_width), Numbers(exact=False, seed=seed, device="cuda"))
    p.row_scale /= 40  # activations of all sizes
    factor = torch.rand(p.capacity, device="cuda") + 0.01
    factor[p.num_rows :] = torch.nan
    return p, factor


def blank(p, dtype):
    ffn = p.widths[0] // 2
    data = torch.full((p.capacity, ffn), FILL, dtype=torch.uint8, device="cuda")
    return p.blank(dtype), data.view(torch.float8_e4m3fn), torch.full((p.capacity, ffn // 128), SENTINEL, device="cuda")


def together(p, factor, dtype=BF16, **options):
    h, data, scale = blank(p, dtype)
    launchers.launch_fp8_act(*p.operands, factor, h, data, scale, Activation(), **options)
    return h, data.view(torch.uint8), scale


def apart(p, factor, dtype=BF16):
    h, data, scale = blank(p, dtype)
    launchers.launch_fp8_gemm(*p.operands, h)
    gpu.act_quantize(h, factor, p.row_start, Activation(), FLOAT8_BLOCK, rows=(data, scale))
    return h, data.view(torch.uint8), scale


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_the_bits_of_what_is_fused(widths, dtype):
    for splits in SPLITS:
        p, factor = problem(splits, widths)
        expected = apart(p, factor, dtype)
        for options in ({}, {"num_sms": 7}, {"num_sms": 1}, {"in_order": True}):
            found = together(p, factor, dtype, **options)
            for name, got, right in zip(("h", "data", "scale"), found, expected, strict=True):
                assert torch.equal(got, right), (name, splits, options)
        assert (found[1][p.num_rows :] == FILL).all()
        assert (found[2][p.num_rows :] == SENTINEL).all()


def test_differences_are_noticed():
    p, factor = problem(SPLITS[0], WIDTHS[0])
    expected = apart(p, factor)
    p.weight_scale = p.weight_scale.flip(1)
    assert not any(map(torch.equal, together(p, factor), expected))


def test_nan_stays_in_its_row():
    p, factor = problem(SPLITS[0], WIDTHS[0])
    clean = together(p, factor)
    row = p.spans[3].start
    p.rows.view(torch.uint8)[row, 3] = 0x7F
    dirty = together(p, factor)
    assert dirty[0][row].isnan().all()
    assert (dirty[1][row] == 0x7F).all()
    assert dirty[2][row].isnan().all()
    for got, right in zip(dirty, clean, strict=True):
        got[row] = right[row]
        assert torch.equal(got, right)


def test_the_public_function_chooses_it(monkeypatch):
    called = []
    kernel = launchers.launch_fp8_act
    monkeypatch.setattr(launchers, "launch_fp8_act", lambda *args, **rest: called.append(kernel(*args, **rest)))
    p, factor = problem(SPLITS[0], WIDTHS[0])
    h, data, scale = blank(p, BF16)
    gpu.grouped_gemm_fp8_act(*p.operands, factor, h, data, scale, Activation())
    assert called == [None]
    for got, right in zip((h, data.view(torch.uint8), scale), apart(p, factor), strict=True):
        assert torch.equal(got, right)
