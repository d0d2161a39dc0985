"""Runs the source of the E4M3 GEMM with an activation for Hopper in gluon_emulator.py. A script.

test_fp8_emulator.py starts it. The arithmetic of the epilogue is Triton's, which the emulator has not: it is replaced
by the oracle's, numpy's quantisers among it, so what is checked is which numbers it gets and where its results go. Sums
are of whole numbers and exact.
"""

import gluon_emulator
import torch

gluon_emulator.install()

import numpy as np  # noqa: E402
import quantize_reference as reference  # noqa: E402
from fp8_problem import SENTINEL, Numbers, Problem, cdiv  # noqa: E402

from symmoe.kernels.activation import Activation  # noqa: E402
from symmoe.kernels.gpu.hopper import fp8_act  # noqa: E402

BF16, FP16, BLOCK, FILL = torch.bfloat16, torch.float16, 128, 0xA5
CASES = [((140, 0, 1, 128, 0), (256, 400)), ((0, 0, 0), (128, 128)), ((0, 300, 9), (384, 144))]  # splits; I, C


def silu_up(gate, up):
    return gate * torch.sigmoid(gate) * up


def block_scales(bits, global_scale, kind):
    """Of rows whose largest |x| has these bits."""
    assert (global_scale, kind) == (1.0, "fp32")
    scale = (bits.view(torch.float32) / 448).clamp(min=2.0**-126)
    return scale, 1.0 / scale


def encode(x, is_finite, multiplier, words, element):
    assert (words, element) == (None, "e4m3")
    scaled = (x * multiplier).where(is_finite, 0.0)  # rows past a group's end may be anything, and are not stored
    return torch.from_numpy(reference.e4m3(scaled.numpy()).view(np.uint8))


def install_arithmetic():
    fp8_act.act_value = lambda gate, up, activation: silu_up(gate, up)
    fp8_act.magnitude_bits = lambda x: x.abs().view(torch.int32)
    fp8_act.INFINITY_BITS = 0x7F800000
    fp8_act.block_scales, fp8_act.encode = block_scales, encode


def expected_of(p, factor, dtype):
    """h, data and scale as they are to be, with what nobody writes."""
    ffn, n = p.widths[0] // 2, p.num_rows
    h = p.expected().to(dtype)
    data = torch.full((p.capacity, ffn), FILL, dtype=torch.uint8)
    scale = torch.full((p.capacity, ffn // BLOCK), SENTINEL)
    gate, up = h[:n, :ffn].float(), h[:n, ffn:].float()
    a = (silu_up(gate, up) * factor[:n, None]).to(dtype).float().numpy()
    fields = {"element": "e4m3", "kind": "fp32", "block": BLOCK, "block_lines": 1, "amax": None}
    if n:
        codes, scales = reference.quantize_lines(a, **fields)
        data[:n] = torch.from_numpy(codes)
        scale[:n] = torch.from_numpy(scales.view(np.float32).copy())
    return h, data, scale


def results_of(p, factor, dtype, num_sms, **options):
    ffn = p.widths[0] // 2
    h = p.blank(dtype)
    data = torch.full((p.capacity, ffn), FILL, dtype=torch.uint8)
    scale = torch.full((p.capacity, cdiv(ffn, BLOCK)), SENTINEL)
    view = data.view(torch.float8_e4m3fn)
    fp8_act.launch_fp8_act(*p.operands, factor, h, view, scale, Activation(), num_sms=num_sms, **options)
    return h, data, scale


def check(splits, ffn, in_width):
    p = Problem(splits, (2 * ffn, in_width), Numbers(exact=True))
    p.row_scale /= 64  # activations that are neither 0 nor their own limit
    factor = torch.rand(p.capacity, generator=torch.Generator().manual_seed(0))
    factor[p.num_rows :] = torch.nan
    for dtype, num_sms, options in ((BF16, 3, {}), (FP16, 1, {"in_order": True}), (BF16, 2, {"stages": 2})):
        found, expected = results_of(p, factor, dtype, num_sms, **options), expected_of(p, factor, dtype)
        for name, got, right in zip(("h", "data", "scale"), found, expected, strict=True):
            assert torch.equal(got, right), (name, splits, dtype, num_sms, options)


def check_that_mistakes_are_noticed():
    """Scales of gates for ups."""
    p = Problem((130,), (256, 256), Numbers(exact=True))
    p.row_scale /= 64
    factor = torch.ones(p.capacity)
    expected = expected_of(p, factor, BF16)
    assert all(map(torch.equal, results_of(p, factor, BF16, 2), expected))
    p.weight_scale = p.weight_scale.flip(1)
    assert not any(map(torch.equal, results_of(p, factor, BF16, 2), expected))


if __name__ == "__main__":
    torch.set_num_threads(1)
    install_arithmetic()
    for splits, (ffn, in_width) in CASES:
        check(splits, ffn, in_width)
    check_that_mistakes_are_noticed()
    print("all is well")
