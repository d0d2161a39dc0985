"""Run by test_interpreted.py in a process with TRITON_INTERPRET=1: kernels against what they fuse. Two comparisons,
byte for byte: with the Triton kernels that are fused, of any numbers; and with the twin, of numbers whose activation is
exact in both. The interpreter's casts to E4M3 are replaced, see quantize_interpreter_checks.py."""

import act_quantize_cases as cases
import quantize_interpreter_checks
import torch
import triton
import triton.language as tl
from quantize_cases import FORMATS, as_bytes, differences
from row_ranges import random_ranges, rows_of

from symmoe.kernels import gpu, twin
from symmoe.kernels.low_precision import act_quantized, codes
from symmoe.kernels.triton import tiles


@triton.jit
def e4m3_code(x):
    """The cast, of NaN as well."""
    return tl.where(x == x, quantize_interpreter_checks.e4m3_code(x), 0x7F).to(tl.uint8)


SPLITS = (0, 133, 1, 0)
CASES = [  # activation, FFN width, format
    ("swiglu", 128, "float8_block"),
    ("swiglu", 160, "mxfp8"),
    ("clamped", 128, "float8_block_powers"),
    ("interleaved", 80, "float8_block"),
    ("interleaved 32", 96, "mxfp8"),
    ("srelu", 144, "float8_block"),
    ("geglu", 128, "mxfp8"),
    ("tanh gelu", 128, "float8_block"),
]


def check_fusion(name, ffn, block_format):
    p = cases.Problem(cases.ACTIVATIONS[name], ffn, splits=SPLITS)
    assert differences(cases.forward(gpu, p, block_format), cases.forward_apart(gpu, p, block_format)) == []
    (found, sums), (expected, wanted) = cases.backward(gpu, p, block_format), cases.backward_apart(gpu, p, block_format)
    assert differences(found, expected) == [], (name, differences(found, expected))
    cases.assert_same_sums(sums, wanted)
    expected, _ = cases.backward(gpu, p, block_format, with_dbias=False)
    assert differences(found, expected) == [], name


def check_ranges(name, ffn, block_format):
    """Rows of ranges: those of one call for all, and no others."""
    tiles.ROW_PROGRAMS = 4  # so that programs have several tiles
    p, recorded = cases.Problem(cases.ACTIVATIONS[name], ffn, splits=SPLITS), []
    for row_range in (p.row_range, *random_ranges(SPLITS, 3)):
        rows = p.operand(ffn, block_format)
        gpu.act_quantize(p.h, p.row_scale, row_range, rows, p.activation, FORMATS[block_format])
        recorded.append((row_range, [as_bytes(tensor) for tensor in rows]))
    (_, whole), *parts = recorded
    blank = [as_bytes(tensor) for tensor in p.operand(ffn, block_format)]
    for ranges, found in parts:
        inside = rows_of(ranges, p.h.shape[0])[:, None]
        for got, right, nothing in zip(found, whole, blank, strict=True):
            assert torch.equal(got, torch.where(inside, right, nothing)), (name, ranges)


def check_twin(block_format):
    p = cases.exact_problem(144, splits=SPLITS)
    assert differences(cases.forward(gpu, p, block_format), cases.forward(twin, p, block_format)) == []
    (found, sums), (expected, wanted) = cases.backward(gpu, p, block_format), cases.backward(twin, p, block_format)
    assert differences(found, expected) == []
    cases.assert_same_sums(sums, wanted)


def check_that_differences_are_noticed():
    p = cases.Problem(cases.ACTIVATIONS["swiglu"], 128, splits=SPLITS)
    expected = cases.forward_apart(gpu, p, "float8_block")
    p.row_scale[40] *= 2
    # Twice the numbers, twice the scale.
    assert differences(cases.forward(gpu, p, "float8_block"), expected) == ["scale"]


def main():
    quantize_interpreter_checks.check_casts()
    codes.e4m3_code = quantize_interpreter_checks.e4m3_code
    act_quantized.e4m3_code = e4m3_code
    for case in CASES:
        check_fusion(*case)
        check_ranges(*case)
        print(case, ": ok", flush=True)
    for block_format in ("float8_block", "mxfp8"):
        check_twin(block_format)
        print("twin", block_format, ": ok")
    check_that_differences_are_noticed()
    no_rows = cases.Problem(cases.ACTIVATIONS["swiglu"], 128, splits=(0, 0))
    assert differences(cases.forward(gpu, no_rows, "mxfp8"), cases.forward(twin, no_rows, "mxfp8")) == []
    (found, sums), (expected, wanted) = cases.backward(gpu, no_rows, "mxfp8"), cases.backward(twin, no_rows, "mxfp8")
    assert differences(found, expected) == []
    cases.assert_same_sums(sums, wanted)
